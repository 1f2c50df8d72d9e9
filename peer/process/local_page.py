"""The page of one peer, for the volunteer at its machine: what it does, what it gave, its limits,
and buttons to pause and go on. Apart from resting.py, which does what the buttons ask for.

The peer that trains and the small process in which it rests both serve it, of what the state folder
holds. Anybody that may open a page of this machine may read it. Pausing takes a token, which is in
the address that the peer prints and in a file that only its user can read: neither another user
here nor a web page in the volunteer's browser has it. It travels in a header, which no foreign page
can set, and nothing changes by GET. A name that somebody's DNS points at this machine is refused.
Where the server listens beyond this machine, there is no token, so there are no buttons.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import disk_fault
from dilocox.dht.manifest import Manifest
from dilocox.peer.hours import Rest
from dilocox.peer.http_pages import Page, asks_this_machine, html_page, is_loopback, not_allowed
from dilocox.peer.options import PeerOptions
from dilocox.peer.state_folder import MANIFEST_FILE, STATUS_FILE, StateFolder

TOKEN_HEADER = "X-Dilocox-Token"
SHOWN_STATUS = (
    *("state", "head", "blocked", "round", "inner_step", "inner_steps", "train_loss"),
    *("val_loss", "val_round", "tokens_per_s", "waiting_share"),
)
SHOWN_LIMITS = ("idle_only", "idle_share", "max_upload_mb_s", "memory_limit_gb", "threads")


class LocalPage:
    """The page, its facts and its buttons. query: what appended to its address shows them."""

    def __init__(
        self, options: PeerOptions, rest: Callable[[], Rest | None], month_bytes: Callable[[], int]
    ):
        """rest: why the peer rests. month_bytes: sent and received in this month. Raises
        EnvironmentFault if the state folder can keep no token.
        """
        self._options, self._rest, self._month_bytes = options, rest, month_bytes
        self._folder, self._run = StateFolder(options.state), options.invite.run_id
        self._token = _token(options.state) if is_loopback(options.metrics_host) else ""
        self.query = f"?token={self._token}" if self._token else ""
        html = files("dilocox.peer.process") / "page" / "peer.html"
        self._page = html_page(html.read_text("utf-8"))

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Page | None:
        """To a request; None where there is nothing."""
        if path not in ("/", "/peer.json", "/pause", "/resume"):
            return None
        if self._token and not asks_this_machine(headers):
            return Page.text("open it as http://127.0.0.1", HTTPStatus.MISDIRECTED_REQUEST)
        methods = "POST" if path in ("/pause", "/resume") else "GET, HEAD"
        if method not in methods.split(", "):
            return not_allowed(methods)
        given = (headers.get(TOKEN_HEADER) or "").encode()
        may = self._token != "" and hmac.compare_digest(given, self._token.encode())
        if path == "/":
            return self._page
        if path == "/peer.json":
            return Page.json(self._facts() | {"buttons": may})
        if not may:
            said = "this takes the token in the address that the peer printed at its start"
            return Page.text(said, HTTPStatus.FORBIDDEN)
        try:
            self._folder.pause(path == "/pause")
        except EnvironmentFault as error:
            return Page.text(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        return Page.text("noted")

    def _facts(self) -> dict[str, Any]:
        """What the page asks for, as the state folder has it; of the run null what it lacks."""
        options, rest = self._options, self._rest()
        told = list[tuple[float, Path, dict[str, Any]]]()  # by stage that the peer was in, or none
        own = options.state / STATUS_FILE
        for path in (own, *StateFolder(options.state).of_stages(STATUS_FILE, self._run)):
            with suppress(OSError, ValueError):
                told.append((path.stat().st_mtime, path.parent, json.loads(path.read_bytes())))
        _, place, status = max(told, default=(0.0, options.state, {"state": "joining"}))
        manifest = None
        with suppress(OSError, ValueError, InvalidInput):
            manifest = Manifest.from_bytes((place / MANIFEST_FILE).read_bytes())
        gave: list[dict[str, int]] = [each.get("gave") or {} for _, _, each in told]
        tokens, rounds, of_tokens = (
            sum(each.get(name, 0) for each in gave) for name in ("tokens", "rounds", "of_tokens")
        )
        return {
            "run": self._run,
            "name": manifest and manifest.name,
            "peer": options.name,
            "stage": place.name.partition(f"{self._run}-stage")[2],
            "stages": manifest and manifest.stages,
            "status": {name: status.get(name) for name in SHOWN_STATUS},
            "rest": rest and asdict(rest),
            "given": [tokens, rounds, tokens / of_tokens if of_tokens else None],
            "traffic": [self._month_bytes(), options.monthly_traffic_bytes],
            "hours": options.hours and options.hours.shown,
            "limits": {name: getattr(options, name) for name in SHOWN_LIMITS},
        }


def _token(state: Path) -> str:
    """The token of a state folder, made where there is none."""
    path, token = StateFolder(state).page_token, secrets.token_urlsafe(16)
    try:
        with suppress(FileNotFoundError):
            token = path.read_text(errors="replace").strip() or token
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # also where it was there before
            file.truncate()
            file.write(token)
    except OSError as error:
        raise disk_fault(path, error) from error
    return token
