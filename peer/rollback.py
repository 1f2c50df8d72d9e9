"""Prepares the return of a run to an earlier round, beside the operator's running bootstrap.

Every stage's records are replayed, from the initial weights or a state that the archive keeps, up
to the last one that is to count. What they make is put beside the archive, which begins with it as
soon as it sees the revision (branch.py). Nothing of this changes the run before that is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


def _prepared(
    state: Path,
    run: str,
    manifest: Manifest,
    round_number: int,
    rules: int,
    tell: Callable[[str], None],
) -> list[str]:
    archive = state / f"{run}-archive-{manifest.root[:16]}"
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
            oldest = min((each.round for each in chain.states), default=-1)
            raise InvalidInput(
                f"--round {round_number}: of stage {stage} too few records are kept to go back so "
                f"far; the oldest state is of round {oldest}"
            )
        prepare(archive / f"stage{stage}", rules, last, *vectors)
        base.append(manifest.root if last is None else last.digest)
        where = "the initial weights" if last is None else f"its record of round {last.round}"
        tell(f"stage {stage}: goes back to {where}")
    return base
