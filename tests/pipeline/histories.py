"""What happened in a swarm, and what its weights must be after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.frames import Frame
from tests.pipeline.chains import Chain, fresh_stage
from tests.pipeline.replicas import Swarm

How = Literal["kill", "kill, what it sent arrives", "freeze"]

RATE = 1e-2


def strike(swarm: Swarm, victim: str, how: How) -> None:
    if how == "freeze":
        swarm.wires.freeze(victim)
    else:
        swarm.wires.kill(victim, flushed=how != "kill")


@contextmanager
def after_frames(swarm: Swarm, count: int, act: Callable[[], None]) -> Iterator[None]:
    """`act` when so many more frames have arrived; it must come to that within."""
    due = swarm.wires.delivered + count
    acted = False

    def look(_: Frame | None) -> None:
        nonlocal acted
        if swarm.wires.delivered >= due and not acted:
            acted = True
            act()

    swarm.wires.on_frame = look
    look(None)
    yield
    assert acted


def go(chained: Chain, stages: set[int]) -> None:
    """End a step as a head does; only these stages hear of it."""
    squared_norm = sum(worker.squared_norm() for worker in reversed(chained.workers))
    chained.go(squared_norm, RATE, stages)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def retraced(swarm: Swarm) -> dict[str, list[Tensor]]:
    """The weights that all peers must have, from who completed which steps with whom."""
    config, count = swarm.plan.config, swarm.plan.num_stages
    stages = {name: fresh_stage(config, peer.stage, count) for name, peer in swarm.peers.items()}
    optimizers = {
        name: InnerOptimizer(stage.named_parameters(), swarm.plan.spec)
        for name, stage in stages.items()
    }
    for going in swarm.goings:
        members = going.members
        chained = Chain(
            [stages[name] for name in members],
            [optimizers[name] for name in members],
            microbatches=swarm.plan.microbatches,
        )
        chained.run(going.batch)
        step = (going.head, going.step)
        heard = {at for at, name in enumerate(members) if step in swarm.peers[name].steps}
        go(chained, heard)
    return {name: [p.detach() for p in stage.parameters()] for name, stage in stages.items()}


def check_history(swarm: Swarm) -> None:
    """Each step was completed once, and missed by nobody who stayed."""
    for peer in swarm.peers.values():
        assert len(set(peer.steps)) == len(peer.steps), "a step was made twice"
        for head, step in peer.steps:
            assert [g.members for g in swarm.goings if (g.head, g.step) == (head, step)]
    by_head: dict[str, list[int]] = {}
    for going in swarm.goings:
        by_head.setdefault(going.head, []).append(going.step)
    for numbers in by_head.values():
        assert numbers == list(range(len(numbers)))
    for before, after in pairwise(swarm.goings):
        stayed = set(before.members) & set(after.members) if before.head == after.head else set()
        if not swarm.peers[before.head].telling("dissolved"):
            for name in stayed:
                assert (before.head, before.step) in swarm.peers[name].steps


def check_weights(swarm: Swarm) -> None:
    """Everybody has what the history says."""
    swarm.settle()
    check_history(swarm)
    for name, expected in retraced(swarm).items():
        assert equal(swarm.peers[name].weights(), expected), name
