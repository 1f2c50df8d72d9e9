"""What a state folder holds of a stage's chain: records, and states that some of them lead to.

A peer keeps the newest records and one state (`RUN-stage0/log`, `.../snapshots`), a bootstrap
more of both, for every stage (`RUN-archive-DIGEST/stage0/older`, `.../00000003/log`, `.../state`).
Whoever reads them here needs no lock: the owner may be running.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.files import make_folder, write_atomically
from dilocox.peer.record_folder import Entry, RecordFolder
from dilocox.peer.snapshot import STATE_FACTS_FILE, STATE_FILE, newest

MANIFEST_FILE = "manifest.json"
OLDER_NAME = "older"

_OF_PEER = re.compile(r"[0-9a-f]{32}-stage[0-9]{1,3}")
_OF_ARCHIVE = re.compile(r"[0-9a-f]{32}-archive-[0-9a-f]{16}")
_STAGE = re.compile(r"stage(?P<stage>[0-9]{1,3})")


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """An anchor and momentum on disk, and the record that they stand on."""

    round: int  # -1 for the initial weights
    digest: str  # of that record, or of the manifest
    sha256: str  # of the file
    file: Path


@dataclass(frozen=True, kw_only=True)
class KeptChain:
    """One stage's chain, as far as it is kept; the records are in chain order."""

    stage: int
    records: tuple[Entry, ...]
    states: tuple[KeptState, ...]


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """What a state folder holds of a run, by stage."""

    run: str
    stages: Mapping[int, KeptChain]
    folder: Path  # the manifest is in it

    def manifest(self) -> Manifest:
        """The run's manifest, as its owner knew it; InvalidInput if it is not there."""
        path = self.folder / MANIFEST_FILE
        try:
            return Manifest.from_bytes(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                f"{path}: cannot be read ({error.strerror}); a peer or bootstrap writes it when it "
                "starts: start it once, or give the invite instead of the folder"
            ) from error
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error


def keep_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest beside what is kept under it; EnvironmentFault if the disk is full."""
    make_folder(folder)
    write_atomically(folder / MANIFEST_FILE, manifest.to_bytes())


def kept_run(path: Path) -> KeptRun:
    """What is kept in a state folder, or in one of its folders that belong to a run.

    Raises:
        InvalidInput: there is nothing of the kind, or of several runs.
    """
    path = path.resolve()
    inside = sorted(path.iterdir()) if path.is_dir() else []
    peers = [each for each in (path, *inside) if _OF_PEER.fullmatch(each.name)]
    archives = [each for each in (path, *inside) if _OF_ARCHIVE.fullmatch(each.name)]
    if not peers and not archives:
        raise InvalidInput(
            f"{path}: there is no round log; name the folder that a peer or bootstrap was given as "
            "--state, or an invite"
        )
    owners = {each.name.partition("-")[0] for each in peers} | {each.name for each in archives}
    if len(owners) > 1:
        names = ", ".join(str(each) for each in (*peers, *archives))
        raise InvalidInput(f"{path}: holds several runs; name one of {names}")
    chains = [_of_peer(each) for each in peers] if peers else _of_archive(archives[0])
    return KeptRun(
        run=(peers + archives)[0].name.partition("-")[0],
        stages={chain.stage: chain for chain in chains},
        folder=(peers + archives)[0],
    )


def _of_peer(folder: Path) -> KeptChain:
    stage = int(folder.name.rpartition("-stage")[2])
    return _chain(stage, [folder / "log"], [folder / "snapshots"])


def _of_archive(folder: Path) -> list[KeptChain]:
    """All that an archive keeps of its stages: see archive_stage.py."""
    chains: list[KeptChain] = []
    for path in sorted(folder.iterdir()):
        if match := _STAGE.fullmatch(path.name):
            generations = sorted(each for each in path.iterdir() if each.name.isdecimal())
            logs = [each / "log" for each in generations]
            states = [each / "state" for each in generations]
            chains.append(_chain(int(match["stage"]), [*logs, path / OLDER_NAME], states))
    return chains


def _chain(stage: int, logs: Iterable[Path], states: Iterable[Path]) -> KeptChain:
    records: dict[int, Entry] = {}
    for log in logs:  # what two of them have is the same; else the first one counts
        for entry in RecordFolder(log).entries():
            records.setdefault(entry.round, entry)
    found = [state for folder in states if (state := _state(folder)) is not None]
    return KeptChain(
        stage=stage,
        records=tuple(records[number] for number in sorted(records)),
        states=tuple(found),
    )


def _state(folder: Path) -> KeptState | None:
    snapshot = newest(folder)
    if snapshot is None:
        return None
    try:
        facts = json.loads((snapshot / STATE_FACTS_FILE).read_text())
        return KeptState(
            round=int(facts["round"]),
            digest=str(facts["digest"]),
            sha256=str(facts["sha256"]),
            file=snapshot / STATE_FILE,
        )
    except FileNotFoundError:  # its owner wrote a newer one meanwhile
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{snapshot}: the snapshot is damaged ({error})") from error
