"""The command `dilocox push`: the newest anchors of a run as commits of a repository on the Hugging
Face hub, once or every so many rounds until the run has ended.

What is uploaded is what `dilocox export` writes, model card included; it stays in a folder here.
The token is that of huggingface_hub: HF_TOKEN, or what `hf auth login` keeps. It goes nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars

from dilocox.dht.errors import EnvironmentFault, InvalidInput, in_one_line
from dilocox.dht.join import Joined, check_node, visiting
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.dht.swarm_view import newest_round
from dilocox.peer.chain.visitor_download import run_claims
from dilocox.peer.commands.export import export_run, shown_rounds
from dilocox.peer.options import PushOptions
from dilocox.peer.os_process import STOPPED, StopSignal

logger = logging.getLogger(__name__)

LOOK_S = 5.0
RETRY_S = 60.0  # after a push in the middle of a run that did not succeed
SETTLED_S = 60.0  # peers of an ended run send what is left; without a round for so long, it is over

_NETWORK: Any = importlib.import_module("huggingface_hub.errors").HTTPError  # of its client
TOKEN = "set HF_TOKEN to a token that may write, or type `hf auth login`"


def run_push_command(options: PushOptions) -> int:
    """Export and upload, until nothing more is to come; the exit code."""
    with StopSignal():
        repository = Repository(options.repository)
        repository.make(private=options.private)
        with visiting(options.invite, options.host) as joined:
            watch = ManifestWatch(joined.swarm, joined.run, joined.manifest)
            pushed, over = -2, not options.every
            while True:
                try:
                    pushed = _push(replace(joined, manifest=watch.manifest), repository, options)
                except EnvironmentFault as error:
                    if over or pushed < -1:  # what never went will not go by itself
                        raise
                    logger.warning("%s; trying again in %.0f s", error, RETRY_S)
                    time.sleep(RETRY_S)
                if over:
                    return 0
                over = _wait(joined, watch, pushed + options.every)
                if over and _newest(joined, watch)[0] <= pushed:
                    return 0
    return STOPPED


def _push(joined: Joined, repository: Repository, options: PushOptions) -> int:
    """Push the newest anchors once; their round, the lowest of all stages."""
    places = export_run(joined, options.folder, options, contributors=options.contributors)
    rounds = shown_rounds([each.round for each in places])
    commit = repository.push(options.folder, f"{rounds}, {places[0].chain_tokens:,} tokens")
    typer.echo(f"pushed {rounds}, {places[0].chain_tokens:,} tokens: {commit}")
    return min(each.round for each in places)


def _newest(joined: Joined, watch: ManifestWatch) -> tuple[int, int]:
    return newest_round(run_claims(replace(joined, manifest=watch.manifest)), joined.witness)


def _wait(joined: Joined, watch: ManifestWatch, wanted: int) -> bool:
    """Wait for a round, or for the last one of a run that has ended; whether it is that."""
    before, since = -1, time.monotonic()
    while True:
        check_node(joined)
        watch.look()
        found, tokens = _newest(joined, watch)
        ended = watch.manifest.ended_at(tokens)
        if not ended and found >= wanted:
            return False
        if found != before or not ended:
            before, since = found, time.monotonic()
        if time.monotonic() >= since + SETTLED_S:
            return True
        time.sleep(LOOK_S)


class Repository:
    """A repository of models on the hub, which this account may write to."""

    def __init__(self, name: str):
        """name: OWNER/NAME. Raises InvalidInput where this machine has no token."""
        if get_token() is None:
            raise InvalidInput(f"this machine has no token of the Hugging Face hub: {TOKEN}")
        if not sys.stderr.isatty():
            disable_progress_bars()
        self._name = name
        self._api = HfApi()

    def make(self, *, private: bool) -> None:
        """See that it is there; one that is stays as public as it is. Raises as `push`."""
        with self._faults():
            self._api.create_repo(self._name, private=private, exist_ok=True)

    def push(self, folder: Path, message: str) -> str:
        """Upload all of a folder as one commit; where it can be looked at.

        Raises:
            InvalidInput: the hub refuses the name, the token, or to let it write there.
            EnvironmentFault: it does not answer, or has trouble of its own.
        """
        card = folder / "README.md"
        text = card.read_text("utf-8").replace('"FOLDER"', f'"{self._name}"')
        card.write_text(text, "utf-8")
        with self._faults():
            commit = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=message
            )
        return commit.commit_url

    @contextmanager
    def _faults(self) -> Generator[None]:
        try:
            yield
        except HFValidationError as error:
            raise InvalidInput(
                f"{self._name!r} is no repository of the hub; name it OWNER/NAME"
            ) from error
        # RuntimeError: around what a thread that uploads a large file met
        except (OSError, ValueError, RuntimeError, _NETWORK) as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
            if status == 401:
                raise InvalidInput(f"the Hugging Face hub refuses the token: {TOKEN}") from error
            if status in (403, 404):
                raise InvalidInput(
                    f"the Hugging Face hub does not let this token write to {self._name}: name a "
                    "repository of this account or its organization, or take a token that may "
                    "write there"
                ) from error
            met = (type(error) is RuntimeError and error.__cause__) or error
            reason = in_one_line(met)[:300] or type(met).__name__
            raise EnvironmentFault(
                f"the Hugging Face hub took nothing for {self._name} ({reason}); check the network "
                "and type the command again: what was exported stays here"
            ) from error
