"""Prepares the return of a run to an earlier round, beside the operator's running bootstrap.

Every stage's records are replayed, from the initial weights or a state that the archive keeps, up
to the last one that is to count. What they make is put beside the archive, which begins with it as
soon as it sees the revision (branch.py). Nothing of this changes the run before that is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.branch import counting, prepare
from dilocox.peer.kept_chain import KeptChain, kept_run
from dilocox.peer.replay import state_after

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
    archive = _archive(state, run, manifest)
    chain = kept_run(archive).stages.get(0) if archive.exists() else None
    kept = [] if chain is None else counting(chain.records, manifest)
    newest = kept[-1].header() if kept else None
    return 0 if newest is None else newest.chain_tokens


def _archive(state: Path, run: str, manifest: Manifest) -> Path:
    return state / f"{run}-archive-{manifest.root[:16]}"


def _prepared(
    state: Path,
    run: str,
    manifest: Manifest,
    round_number: int,
    rules: int,
    tell: Callable[[str], None],
) -> list[str]:
    archive = _archive(state, run, manifest)
    stages = dict(kept_run(archive).stages) if archive.exists() else {}
    empty = KeptChain(stage=0, records=(), states=())
    rounds = [
        entry.round for chain in stages.values() for entry in counting(chain.records, manifest)
    ]
    if not rounds:
        raise InvalidInput(
            f"--round {round_number}: the archive has no round yet, so there is none to go back "
            "behind"
        )
    if max(rounds) <= round_number:
        raise InvalidInput(
            f"--round {round_number}: the newest round is {max(rounds)}; give an earlier one"
        )
    _check_reach(manifest, stages, round_number)
    base: list[str] = []
    for stage in range(manifest.stages):
        chain = stages.get(stage, empty)
        entries = [e for e in counting(chain.records, manifest) if e.round <= round_number]
        last = entries[-1] if entries else None
        known = {manifest.root, *(entry.digest for entry in entries)}
        states = [each for each in chain.states if each.digest in known]
        flaws, vectors = state_after(manifest, run, stage, entries, states)
        if flaws:
            raise EnvironmentFault(f"stage {stage}: the archive is damaged: {flaws[0]}")
        if vectors is None:
            raise InvalidInput(
                f"--round {round_number}: of stage {stage} too few records are kept to go back"
            )
        prepare(archive / f"stage{stage}", rules, last, *vectors)
        base.append(manifest.root if last is None else last.digest)
        where = "the initial weights" if last is None else f"its record of round {last.round}"
        tell(f"stage {stage}: goes back to {where}")
    return base


def _check_reach(manifest: Manifest, stages: Mapping[int, KeptChain], round_number: int) -> None:
    """Raise InvalidInput if what is kept of a stage begins only after that round."""
    here = f"--round {round_number}: this bootstrap keeps"
    reach = ((_first(manifest, stages, stage, here), stage) for stage in range(manifest.stages))
    first, stage = max(reach)
    if round_number < first:
        raise InvalidInput(
            f"{here} stage {stage} from round {first} on; choose a round from {first} on"
        )


def _first(manifest: Manifest, stages: Mapping[int, KeptChain], stage: int, here: str) -> int:
    """The first round after which a stage's state can be made, -1 for the initial weights.

    That nothing is kept from before it does not say that nothing was: the archive of a bootstrap
    that began later lacks what came before, and so does one that had to make room.
    """
    chain = stages.get(stage)
    kept = [] if chain is None else counting(chain.records, manifest)
    if chain is None or not kept:
        if not all(_whole(each, manifest) for each in stages.values()):
            raise InvalidInput(f"{here} nothing of stage {stage} yet; try again in some minutes")
        return -1  # nobody has committed a record of it
    if _whole(chain, manifest):
        return -1
    known = {entry.digest for entry in kept}
    first = min((each.round for each in chain.states if each.digest in known), default=None)
    if first is None:
        raise InvalidInput(f"{here} too few records of stage {stage} to go back to any round")
    return first


def _whole(chain: KeptChain, manifest: Manifest) -> bool:
    """Whether these records begin at the initial weights; also where there are none."""
    kept = counting(chain.records, manifest)
    first = kept[0].header() if kept else None
    return not kept or (first is not None and first.previous == manifest.root)
