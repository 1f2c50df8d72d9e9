"""Whole fault campaigns: the swarm that is hurt, and the same run without faults beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm import links, verdict
from tests.swarm.campaign import KINDS, Campaign, Fault, Outcome, draw
from tests.swarm.harness import ProcessSwarm
from tests.swarm.small_run import MODEL, fixed_steps, run_manifest

WITHOUT_SPARES = (0, 0, 1, 1, 2, 2)
SPARE_STAGES = ((0, 1), (0, 2), (1, 2))  # by seed, so that campaigns together hurt them all
REPLICAS = 2
# A forward and a backward sleep for so long, and an inner step takes about half a second; the cores
# are left to peers that start.
PIECE_S = 0.02
INNER_STEPS = 20
# While a replica is missing, anchors are averages of fewer, and some 5 % worse: the losses to be
# compared are those of whole rounds at the end.
LAST_ROUNDS = 6
REFERENCE_LIMIT_S = 3600.0

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Hurt:
    """A campaign: what must not be, one line each; losses by tokens; how each fault ended."""

    flaws: list[str]
    losses: list[tuple[int, float]]
    outcomes: list[Outcome]


def manifest(stages: int) -> dict[str, Any]:
    """The run.yaml of campaigns."""
    return run_manifest(
        model=MODEL | {"num_hidden_layers": 3},
        stages=stages,
        batch={"microbatches": 4},
        data={"held_out_windows": 32},
        rounds=fixed_steps(INNER_STEPS),
        pipeline={"codec": "bf16"},
    )


def hurt(
    folder: Path,
    stages: Sequence[int],
    faults: Sequence[Fault],
    *,
    replicas: int,
    seed: int,
    tell: Tell,
    last_rounds: int = 0,
) -> Hurt:
    """One campaign on peers of these stages."""
    with contextlib.ExitStack() as stack:
        lab = None
        if any(fault.kind == "cut" for fault in faults):
            lab = stack.enter_context(links.Links(len(stages) + 1, mbit=1000.0))
        swarm = stack.enter_context(ProcessSwarm(folder, manifest(max(stages) + 1), links=lab))
        for stage in stages:
            swarm.add_peer("--log-level", "debug", stage=stage, shown_s=PIECE_S)
        campaign = Campaign(swarm, count=replicas, seed=seed, tell=tell)
        campaign.run(faults, last_rounds=last_rounds)
        outcomes = campaign.outcomes
        flaws = verdict.flaws(swarm, outcomes)
        tell(verdict.summary(swarm, outcomes))
    for flaw in flaws:
        tell(f"FLAW: {flaw}")
    return Hurt(flaws=flaws, losses=verdict.losses(swarm), outcomes=outcomes)


def unhurt(folder: Path, tokens: int) -> list[tuple[int, float]]:
    """The losses by tokens of the same run without faults, up to so many tokens at least."""
    with ProcessSwarm(folder, manifest(max(WITHOUT_SPARES) + 1)) as swarm:
        for stage in WITHOUT_SPARES:
            swarm.add_peer("--log-level", "debug", stage=stage, shown_s=PIECE_S)
        swarm.wait(
            lambda: verdict.losses(swarm) and verdict.losses(swarm)[-1][0] >= tokens,
            REFERENCE_LIMIT_S,
            f"{tokens:,} tokens without faults",
        )
        return verdict.losses(swarm)


def run(count: int, seed: int, *, reference: bool, folder: Path, tell: Tell) -> Hurt:
    """The whole campaign, beside a run without faults."""
    kinds = KINDS
    if reason := links.available():
        kinds = tuple(kind for kind in KINDS if kind != "cut")
        tell(f"no link is cut: {reason}")
    faults = draw(count, seed, kinds=kinds)
    (folder / "hurt").mkdir()
    found = hurt(
        folder / "hurt",
        sorted(WITHOUT_SPARES + SPARE_STAGES[(seed - 1) % len(SPARE_STAGES)]),
        faults,
        replicas=REPLICAS,
        seed=seed,
        tell=tell,
        last_rounds=LAST_ROUNDS,
    )
    if not reference:
        return found
    (folder / "unhurt").mkdir()
    tokens = found.losses[-1][0]
    beside = unhurt(folder / "unhurt", tokens)
    with_faults, without = verdict.loss_beside(found.losses, beside)
    ratio = with_faults / without - 1
    tell(
        f"loss at {tokens:,} tokens: {with_faults:.4f}, without faults {without:.4f} ({ratio:+.2%})"
    )
    if abs(ratio) > verdict.LOSS_SHARE:
        found.flaws.append(f"the loss differs by {ratio:+.1%} from that of a run without faults")
    return found
