"""The command `dilocox generate`: continue a text with a run's newest anchors.

What: the anchors are downloaded as `dilocox export` does, into a cache folder that is named by
their digests, and are used from there for as long as no peer claims a newer round.
Why: a look at what a run has learnt should need nothing but the invite, and a second look at the
same round no second download.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.peer.options import GenerateOptions
from dilocox.peer.os_process import StopSignal

if TYPE_CHECKING:  # both are heavy, and `dilocox --help` needs none of them
    from dilocox.dht.join import Joined
    from dilocox.peer.chain.download import StageAnchor

logger = logging.getLogger(__name__)

LOOK_LIMIT_S = 15.0  # for somebody who holds each stage
LOOK_PAUSE_S = 1.0
FOLDERS_KEPT = 2  # of a run: one may be in use while another is downloaded
STOPPED = 130


def run_generate_command(options: GenerateOptions) -> int:
    """Continue the text on the terminal; the exit code."""
    if not options.text:
        raise InvalidInput("TEXT is empty: give at least one character to continue")
    with StopSignal():
        folder = _newest_folder(options)
        from dilocox.peer.commands.export import continue_text

        _tell(options.text)
        continue_text(
            folder,
            options.text,
            options.tokens,
            random.getrandbits(32) if options.seed is None else options.seed,
            temperature=options.temperature,
            tell=_tell,
        )
        typer.echo()
        return 0
    return STOPPED


def _tell(text: str) -> None:
    typer.echo(text, nl=False)


def default_cache() -> Path:
    """Where caches of a user lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dilocox"


# ---- the newest anchors --------------------------------------------------------------------------
def _newest_folder(options: GenerateOptions) -> Path:
    from dilocox.dht.join import visiting
    from dilocox.peer.chain.download import download_anchors
    from dilocox.peer.commands.export import write_anchors

    home = (options.cache or default_cache()) / options.invite.run_id
    with visiting(options.invite, options.host) as place:
        newest = _newest_claims(place)
        for folder in _kept(home):
            if is_newest(_digests(folder), newest):
                os.utime(folder)
                return folder
        anchors = download_anchors(place, timeout_s=options.timeout_s)
        folder = home / folder_name(anchors)
        if not folder.exists():
            write_anchors(folder, place, anchors)
    os.utime(folder)
    for older in _kept(home)[FOLDERS_KEPT:]:
        shutil.rmtree(older, ignore_errors=True)
    return folder


def _newest_claims(place: Joined) -> list[ClaimRecord]:
    """The newest claim of every stage; EnvironmentFault if there is none of one."""
    from dilocox.dht.swarm_view import that_count

    deadline = time.monotonic() + LOOK_LIMIT_S
    while True:
        keys = {claim_key(place.run, stage): stage for stage in range(place.manifest.stages)}
        found = place.swarm.read_many(dict.fromkeys(keys, ClaimRecord))
        claims = {
            stage: that_count(found[key] or {}, place.manifest) for key, stage in keys.items()
        }
        newest = [newest_claim(claims[stage]) for stage in range(place.manifest.stages)]
        held = [claim for claim in newest if claim is not None]
        if len(held) == len(newest):
            return held
        if time.monotonic() > deadline:
            stage = newest.index(None)
            raise EnvironmentFault(missing(stage, len(claims[stage])))
        time.sleep(LOOK_PAUSE_S)


def newest_claim(claims: Mapping[str, ClaimRecord]) -> ClaimRecord | None:
    """Of the peers of a stage: the one whose anchor `export` would ask for."""
    held = [claim for claim in claims.values() if claim.round >= 0]
    return max(held, key=lambda claim: (claim.round, claim.chain_tokens), default=None)


def missing(stage: int, peers: int) -> str:
    """What to tell a person when nobody holds a round of a stage."""
    from dilocox.dht.swarm_view import nobody_holds

    mend = "; try again when its first round is over" if peers else ", and try again"
    return f"stage {stage}: {nobody_holds(peers)}{mend}"


def is_newest(kept: Sequence[tuple[int, str]], newest: Sequence[ClaimRecord]) -> bool:
    """Whether anchors (round and digest by stage) are those that would be downloaded now: of the
    newest round that all stages have.
    """
    if len(kept) != len(newest):
        return False
    common = min(claim.round for claim in newest)
    return all(
        number == common and (claim.round > common or digest == claim.digest)
        for (number, digest), claim in zip(kept, newest, strict=True)
    )


# ---- the cache -----------------------------------------------------------------------------------
def folder_name(anchors: Sequence[StageAnchor]) -> str:
    """The name of the folder of these anchors, from the digests of all stages."""
    return hashlib.sha256(" ".join(each.digest for each in anchors).encode()).hexdigest()[:32]


def _kept(home: Path) -> list[Path]:
    """The folders of a run, that of the last use first."""
    found = [path.parent for path in home.glob("*/dilocox.json")]
    return sorted(found, key=lambda path: -path.stat().st_mtime)


def _digests(folder: Path) -> list[tuple[int, str]]:
    """Round and digest of the anchors in a folder by stage; nothing if it does not say."""
    try:
        facts = cast("dict[str, Any]", json.loads((folder / "dilocox.json").read_bytes()))
        return [(int(stage["round"]), str(stage["digest"])) for stage in facts["stages"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is not used: %s", folder, error)
        return []
