"""The return of a run to an earlier round: how it is prepared, and what it does to peers and
archives that kept more.

`prepare_rollback` works beside the operator's running bootstrap. Every stage's records are
replayed, from the newest state that the archive keeps of that time or before, or the initial
weights, up to the last one that is to count. What they make is put beside the archive, which begins
with it as soon as it sees the revision. Nothing of this changes the run before that is published.

Once it is published (`peer_goes_back`, `archive_goes_back`), the chain of a stage goes on from its
last record of that round or an earlier one; the records after it, under the rules before, do not
count any more (`Manifest.rolled_back`). Their keepers put them aside, in a folder
`before-RULES`. An archive removes nothing; a peer removes the tensors of its snapshots, which it
never reads again, and for which no disk is planned. It begins with what is left of its log if that
reaches back to the initial weights; else, like any joiner, with a state: the operator's command
made it by replaying the archive, and the operator's bootstrap gives it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import make_folder, write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.peer.chain.replay import state_after
from dilocox.peer.chain.snapshot_files import keep_position_alone, made_whole, write_state
from dilocox.peer.chain.store import (
    OLDER_NAME,
    PREVIOUS_NAME,
    KeptChain,
    KeptState,
    LogEntry,
    Store,
    archive_folder,
    kept_run,
)
from dilocox.peer.state_folder import ASIDE, LOG_FOLDER, SNAPSHOT_FOLDER

logger = logging.getLogger(__name__)

MARK = "rollback"
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
    aside = _put_aside(own, since, (LOG_FOLDER, SNAPSHOT_FOLDER))
    keep_position_alone(aside / SNAPSHOT_FOLDER)
    log = Store(aside / LOG_FOLDER)
    kept = log.counting(manifest)
    if from_start(kept, manifest):
        Store(own / LOG_FOLDER).share(log, [entry.round for entry in kept])
    _mark(own, since)
    logger.warning("the records from before the rollback are in %s", aside)
    return True


def archive_goes_back(folder: Path, manifest: Manifest) -> None:
    """Bring an archive's folder of a stage in line with the manifest.

    The state that the operator's command prepared becomes the current generation; in a copy of the
    bootstrap there is none, and it follows its peers. Raises EnvironmentFault.
    """
    since = last_rollback(manifest)
    if _done(folder) < since:
        names = sorted(path.name for path in folder.iterdir() if path.name.isdecimal())
        aside = _put_aside(folder, since, (*names, PREVIOUS_NAME, OLDER_NAME))
        moved = sorted(path.name for path in aside.iterdir() if path.name.isdecimal())
        older = Store(folder / OLDER_NAME)
        logs = [aside / name / LOG_FOLDER for name in (*moved, PREVIOUS_NAME)] + [
            aside / OLDER_NAME
        ]
        for log in map(Store, logs):
            older.share(log, [entry.round for entry in log.counting(manifest)])
        _mark(folder, since)
    # after the mark: an archive killed in between finds it here, and puts nothing aside twice
    with contextlib.suppress(FileNotFoundError):
        prepared(folder, since).rename(folder / f"{_next_generation(folder):08d}")


def newest_aside(own: Path) -> int:
    """The newest round of a peer's records that rollbacks have put aside, -1 without one.

    Rounds go on after it: no number may come twice, or a program that counts by them (a monitor, a
    log) takes the new rounds for the old ones.
    """
    logs = own.glob(f"{ASIDE}*/{LOG_FOLDER}")
    return max((number for log in logs for number in Store(log).rounds()), default=-1)


def prepared(folder: Path, rules: int) -> Path:
    """Where a state lies that the operator's command made for the rules of a rollback."""
    return folder / f"rollback-{rules:08d}"


def prepare(
    folder: Path, rules: int, entry: LogEntry | None, anchor: Tensor, momentum: Tensor
) -> None:
    """Make the generation that an archive begins with after a rollback (archive.py).

    entry: the record that the state stands on; None for the initial weights. Raises
    EnvironmentFault.
    """
    with made_whole(prepared(folder, rules)) as partial:
        if entry is not None:
            state = partial / "state" / STATE_NAME
            make_folder(state)
            write_state(state, entry.round, entry.digest, anchor, momentum)
            Store(partial / LOG_FOLDER).share(entry.store, [entry.round])


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


TRIES = 3
PAUSE_S = 1.0


def prepare_rollback(
    state: Path,
    run: str,
    manifest: Manifest,
    round_number: int,
    rules: int,
    *,
    tell: Callable[[str], None],
) -> list[str]:
    """Make each stage's state after a round; the digests of the records that they stand on.

    rules: those of the rollback's own revision.

    Raises:
        InvalidInput: there is nothing after that round, or too little is kept to go back to it.
        EnvironmentFault: what is kept is damaged, or the disk is full.
    """
    for _ in range(TRIES - 1):
        try:
            return _prepared(state, run, manifest, round_number, rules, tell)
        except EnvironmentFault:  # the archive changes under our eyes
            time.sleep(PAUSE_S)
    return _prepared(state, run, manifest, round_number, rules, tell)


def archived_tokens(state: Path, run: str, manifest: Manifest) -> int:
    """The tokens that the run has trained, as far as the archive of stage 0 tells."""
    archive = archive_folder(state, run, manifest)
    chain = kept_run(archive).stages.get(0) if archive.exists() else None
    kept = [] if chain is None else chain.counting(manifest)
    newest = kept[-1].header() if kept else None
    return 0 if newest is None else newest.chain_tokens


def _prepared(
    state: Path,
    run: str,
    manifest: Manifest,
    round_number: int,
    rules: int,
    tell: Callable[[str], None],
) -> list[str]:
    archive = archive_folder(state, run, manifest)
    there = dict(kept_run(archive).stages) if archive.exists() else {}
    empty = [KeptChain(stage=stage, records=(), states=()) for stage in range(manifest.stages)]
    chains = [there.get(chain.stage, chain) for chain in empty]
    counting = [chain.counting(manifest) for chain in chains]
    rounds = [entry.round for kept in counting for entry in kept]
    if not rounds:
        raise InvalidInput(
            f"--round {round_number}: the archive has no round yet, so there is none to go back "
            "behind"
        )
    if max(rounds) <= round_number:
        raise InvalidInput(
            f"--round {round_number}: the newest round is {max(rounds)}; give an earlier one"
        )
    here = f"--round {round_number}: this bootstrap keeps"
    first, where = max((_first(manifest, counting, chain, here), chain.stage) for chain in chains)
    if round_number < first:
        raise InvalidInput(
            f"{here} stage {where} from round {first} on; choose a round from {first} on"
        )
    base: list[str] = []
    for stage, chain in enumerate(chains):
        entries = [entry for entry in counting[stage] if entry.round <= round_number]
        last = entries[-1] if entries else None
        known = {manifest.root, *(entry.digest for entry in entries)}
        states = [each for each in chain.states if each.digest in known]
        vectors = _vectors_after(manifest, run, stage, entries, states)
        if vectors is None:
            raise InvalidInput(
                f"--round {round_number}: of stage {stage} too few records are kept to go back"
            )
        prepare(archive / f"stage{stage}", rules, last, *vectors)
        base.append(manifest.root if last is None else last.digest)
        where = "the initial weights" if last is None else f"its record of round {last.round}"
        tell(f"stage {stage}: goes back to {where}")
    return base


def _vectors_after(
    manifest: Manifest,
    run: str,
    stage: int,
    entries: Sequence[LogEntry],
    states: Iterable[KeptState],
) -> tuple[Tensor, Tensor] | None:
    """The anchor and momentum after these records, of the newest state that leads there; None where
    none does. Raises EnvironmentFault where only damage is in the way.
    """
    places = {entry.digest: place for place, entry in enumerate(entries)}
    starts = dict[int, list[KeptState]]({0: []})  # by the place of the first record to be replayed
    for state in states:
        starts.setdefault(places.get(state.digest, 0), []).append(state)
    damage = ""
    for start in sorted(starts, reverse=True):
        flaws, vectors = state_after(manifest, run, stage, entries[start:], starts[start])
        if vectors is not None and not flaws:
            return vectors
        damage = damage or "".join(flaws[:1])
    if damage:
        raise EnvironmentFault(f"stage {stage}: the archive is damaged: {damage}")
    return None


def _first(
    manifest: Manifest, counting: Sequence[list[LogEntry]], chain: KeptChain, here: str
) -> int:
    """The first round after which a stage's state can be made, -1 for the initial weights.

    That nothing is kept from before it does not say that nothing was: the archive of a bootstrap
    that began later lacks what came before, and so does one that had to make room.
    """
    kept = counting[chain.stage]
    if not kept and not all(from_start(each, manifest) for each in counting if each):
        raise InvalidInput(f"{here} nothing of stage {chain.stage} yet; try again in some minutes")
    if not kept or from_start(kept, manifest):  # or nobody has committed a record of it
        return -1
    known = {entry.digest for entry in kept}
    first = min((each.round for each in chain.states if each.digest in known), default=None)
    if first is None:
        raise InvalidInput(f"{here} too few records of stage {chain.stage} to go back to any round")
    return first


def from_start(kept: list[LogEntry], manifest: Manifest) -> bool:
    """Whether these records begin with the first one of the chain."""
    first = kept[0].header() if kept else None
    return first is not None and first.previous == manifest.root
