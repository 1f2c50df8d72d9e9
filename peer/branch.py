"""What happens on disk when the operator goes back to an earlier round.

The chain of a stage goes on from its last record of that round or an earlier one; the records after
it, under the rules before, do not count any more (`Manifest.rolled_back`). Whoever kept them puts
them aside, in a folder `before-RULES`, and removes nothing. A peer begins with what is left of its
log if that reaches back to the initial weights; else, like any joiner, with a state: the operator's
command made it by replaying the archive, and the operator's bootstrap gives it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from dilocox.dht.manifest import Manifest
from dilocox.peer.files import disk_fault, make_folder, write_atomically
from dilocox.peer.kept_chain import OLDER_NAME
from dilocox.peer.record_folder import Entry, RecordFolder
from dilocox.peer.snapshot import Snapshot, write_state

logger = logging.getLogger(__name__)

MARK = "rollback"
ASIDE = "before-"  # how the folders begin of what was put aside
STATE_NAME = "00000000"


def last_rollback(manifest: Manifest) -> int:
    """The rules of the operator's last rollback, 0 if there was none."""
    rollbacks = manifest.operation.rollbacks
    return rollbacks[-1][0] if rollbacks else 0


def peer_goes_back(own: Path, manifest: Manifest) -> bool:
    """Bring a peer's folder of a stage in line with the manifest; whether that changed it.

    Raises EnvironmentFault if the disk is full.
    """
    since = last_rollback(manifest)
    if _done(own) >= since:
        return False
    aside = _put_aside(own, since, ("log", "snapshots"))
    log = RecordFolder(aside / "log")
    kept = counting(log.entries(), manifest)
    first = kept[0].header() if kept else None
    if first is not None and first.previous == manifest.root:
        RecordFolder(own / "log").share(log, [entry.round for entry in kept])
    _mark(own, since)
    logger.warning("records and snapshots from before the rollback are in %s", aside)
    return True


def archive_goes_back(folder: Path, manifest: Manifest) -> None:
    """Bring an archive's folder of a stage in line with the manifest.

    The state that the operator's command prepared becomes the current generation; in a copy of the
    bootstrap there is none, and it follows its peers. Raises EnvironmentFault.
    """
    since = last_rollback(manifest)
    if _done(folder) < since:
        names = sorted(path.name for path in folder.iterdir() if path.name.isdecimal())
        aside = _put_aside(folder, since, (*names, OLDER_NAME))
        moved = sorted(path.name for path in aside.iterdir() if path.name.isdecimal())
        older = RecordFolder(folder / OLDER_NAME)
        logs = [aside / name / "log" for name in moved] + [aside / OLDER_NAME]
        for log in map(RecordFolder, logs):
            older.share(log, [entry.round for entry in counting(log.entries(), manifest)])
        _mark(folder, since)
    # after the mark: who is killed in between finds it here, and puts nothing aside twice
    with contextlib.suppress(FileNotFoundError):
        prepared(folder, since).rename(folder / f"{_next_generation(folder):08d}")


def newest_aside(own: Path) -> int:
    """The newest round of a peer's records that rollbacks have put aside, -1 without one.

    Rounds go on after it: no number may come twice, or who counts by them (a monitor, a log) takes
    the new rounds for the old ones.
    """
    logs = map(RecordFolder, own.glob(f"{ASIDE}*/log"))
    return max((number for log in logs for number in log.rounds()), default=-1)


def prepared(folder: Path, rules: int) -> Path:
    """Where a state lies that the operator's command made for the rules of a rollback."""
    return folder / f"rollback-{rules:08d}"


def prepare(
    folder: Path, rules: int, entry: Entry | None, anchor: Tensor, momentum: Tensor
) -> None:
    """Make the generation that an archive begins with after a rollback (archive_generation.py).

    entry: the record that the state stands on; None for the initial weights. Raises
    EnvironmentFault.
    """
    final = prepared(folder, rules)
    partial = final.with_name(f"{final.name}.partial")
    try:
        for old in (final, partial):
            shutil.rmtree(old, ignore_errors=True)
        make_folder(partial / "log")
        if entry is not None:
            state = partial / "state" / STATE_NAME
            make_folder(state)
            write_state(
                state,
                Snapshot(
                    round=entry.round,
                    digest=entry.digest,
                    layout="",
                    anchor=anchor,
                    momentum=momentum,
                    tensors={},
                    facts={},
                ),
            )
            RecordFolder(partial / "log").share(entry.folder, [entry.round])
        partial.rename(final)
    except OSError as error:
        raise disk_fault(final, error) from error


def counting(entries: Iterable[Entry], manifest: Manifest) -> list[Entry]:
    """The records that no rollback has taken back."""
    found: list[Entry] = []
    for entry in entries:
        header = entry.header()
        if header is not None and not manifest.rolled_back(entry.round, header.rules):
            found.append(entry)
    return found


def _put_aside(folder: Path, rules: int, names: Iterable[str]) -> Path:
    """Move what has these names; after a crash it goes on where it was."""
    aside = folder / f"{ASIDE}{rules:08d}"
    make_folder(aside)
    for name in names:
        if not (aside / name).exists():
            with contextlib.suppress(FileNotFoundError):
                (folder / name).rename(aside / name)
    return aside


def _next_generation(folder: Path) -> int:
    found = (*folder.iterdir(), *folder.glob(f"{ASIDE}*/*"))
    return 1 + max((int(path.name) for path in found if path.name.isdecimal()), default=-1)


def _done(folder: Path) -> int:
    try:
        return int((folder / MARK).read_text())
    except (OSError, ValueError):
        return 0


def _mark(folder: Path, rules: int) -> None:
    write_atomically(folder / MARK, f"{rules}\n".encode())
