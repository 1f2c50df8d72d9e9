"""Peers of one run in one process: the product's merge, outer step and codecs, a simulated network.

All replicas are alike: the model is one stage, every peer makes its inner steps at one speed, and a
round's record reaches all of them `arrival` inner steps after its send. What an exchange moves is
encoded, averaged and decoded as peers do it, part by part, and its bytes are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.fleet import Fleet
from benchmarks.simulated_exchange import Averaging, Exchange, Lie
from dilocox.compression.stage_codec import Compression
from dilocox.dht.manifest import DataSpec, InnerSpec
from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.peer.training.data import Corpus, held_out_windows
from dilocox.peer.training.inner_optimizer import learning_rate
from dilocox.peer.training.merge import Merge, MergeConfig, RecordFacts, Remainder
from dilocox.pipeline.stage import parameter_shapes

FP16_BYTES = 2  # of a value
DATA = DataSpec(parts=16)  # a part holds about half a million tokens


@dataclass(frozen=True, kw_only=True)
class World:
    """What all rules have in common.

    arrival: inner steps from a send to its record. batch: windows of an inner step, and their
    length in tokens.
    """

    model: dict[str, Any]
    workers: int
    inner_steps: int
    rounds: int
    arrival: int
    batch: tuple[int, int]
    held_out: int

    @property
    def steps(self) -> int:
        """Inner steps of each worker."""
        return self.inner_steps * self.rounds

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one worker."""
        return self.batch[0] * self.batch[1]

    @property
    def tokens(self) -> int:
        """Tokens of all workers."""
        return self.workers * self.steps * self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What the first `liars` workers send instead of what they learnt, or of a mean they reduced.

    kind: `flip` the sign; `noise` of the norm that their message has; `constant`, the same value
        everywhere, of that norm; `little`: the honest mean less `factor` standard deviations of
        each value, which no single value gives away (arXiv 1902.06156); `reverse` the mean of the
        part that they reduce; `bias` it by a constant of its norm. factor: of all that.
    weight: what they state, an honest worker's being 1.
    """

    kind: Literal["flip", "noise", "constant", "little", "reverse", "bias"]
    liars: int
    factor: float = 1.0
    weight: int = 1

    def weights(self, workers: int) -> list[int]:
        """What all workers state."""
        return [self.weight if worker < self.liars else 1 for worker in range(workers)]

    @property
    def lies(self) -> dict[int, Lie]:
        """By liar, what it makes of the mean that it reduced."""
        make = {"reverse": self._reversed, "bias": self._biased}.get(self.kind)
        return {} if make is None else dict.fromkeys(range(self.liars), make)

    def _reversed(self, mean: Tensor) -> Tensor:
        return mean * -self.factor

    def _biased(self, mean: Tensor) -> Tensor:
        return mean + self.factor * float(mean.norm()) / math.sqrt(mean.numel())

    def change(self, messages: Sequence[Tensor], seed: int) -> None:
        """Put the lies into the messages [n] of the liars, in place."""
        honest = torch.stack(list(messages[self.liars :]))
        for number, message in enumerate(messages[: self.liars]):
            norm = float(message.norm())
            match self.kind:
                case "flip":
                    message.mul_(-self.factor)
                case "noise":
                    draw = torch.Generator().manual_seed(seed * 100 + number)
                    noise = torch.randn(message.shape, generator=draw)
                    message.copy_(noise * (self.factor * norm / float(noise.norm())))
                case "constant":
                    message.fill_(self.factor * norm / math.sqrt(message.numel()))
                case "little":
                    message.copy_(honest.mean(dim=0) - self.factor * honest.std(dim=0))
                case "reverse" | "bias":
                    pass  # it sends what it learnt


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the replicas' progress becomes one model.

    merge: as in the manifest; `gradients`: they are averaged at every inner step (AllReduce).
    learning_rate, momentum: of the outer step. weight: w of `rebase`. decay: of the residual.
    energy: ranks follow it, as in the manifest's codec section; None: they stay.
    robust: how far reducers believe workers, as in the manifest; or `centered`, of
        benchmarks/robust.py. attack: what liars send; nobody lies
        where it is None.
    """

    merge: Literal["gradients", "none", "reset", "rebase"]
    compression: Compression
    learning_rate: float = 0.7
    momentum: float = 0.5
    weight: float = 0.75
    decay: float = 0.95
    energy: float | None = None
    robust: Averaging = "none"
    attack: Attack | None = None
    inner: InnerSpec


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rule from one seed."""

    rule: Rule
    seed: int


@dataclass(frozen=True)
class Point:
    """A place on a loss curve: tokens of all workers, and nats a token of the anchor."""

    tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial came to.

    bytes_sent: by each peer, on the average. exchange_s: of a processor in all exchanges. ranks: of
        the last exchange's factored matrices.
    """

    trial: Trial
    curve: tuple[Point, ...]
    bytes_sent: float
    exchange_s: float
    ranks: tuple[int, ...]

    @property
    def loss(self) -> float:
        """The validation loss at the end."""
        return self.curve[-1].loss


def fp16_bytes(world: World) -> float:
    """What each worker sends if every round all-reduces all values in fp16."""
    values = sum(math.prod(shape) for _, shape in parameter_shapes(world.model, 1, 0))
    return world.rounds * _moved(world.workers) * FP16_BYTES * values


def _moved(workers: int) -> float:
    """How often a worker sends each of its bytes in an all-reduce: scattered, then gathered."""
    return 2 * (workers - 1) / workers


def run_trials(world: World, trials: Sequence[Trial], points: int = 1) -> list[Outcome]:
    """Run trials that have one way of making inner steps, side by side.

    points: how often each is evaluated, evenly over the rounds, the last time at the end.
    """
    inner = trials[0].rule.inner
    if any(trial.rule.inner != inner for trial in trials):
        raise ValueError("trials that run side by side must make inner steps in one way")
    seeds = [trial.seed for trial in trials for _ in range(world.workers)]
    fleet = Fleet(world.model, seeds, inner)
    swarms = [
        _Swarm(world, trial, fleet, slice(index * world.workers, (index + 1) * world.workers))
        for index, trial in enumerate(trials)
    ]
    together = [swarm.rows for swarm in swarms if swarm.averages_gradients]
    data = torch.cat(
        [_windows(world.workers, world.steps, world.batch, trial.seed) for trial in trials]
    )
    held_out = _held_out(world.batch[1], world.held_out)
    curves: list[list[Point]] = [[] for _ in trials]
    for step in range(1, world.steps + 1):
        tokens = step * world.workers * world.tokens_per_step
        rate = learning_rate(inner, world.tokens, tokens)
        fleet.step(data[:, step - 1], rate, together)
        for swarm in swarms:
            swarm.stepped(step)
        if step % world.inner_steps == 0:
            number = step // world.inner_steps
            if number * points // world.rounds > (number - 1) * points // world.rounds:
                for swarm, curve in zip(swarms, curves, strict=True):
                    loss = fleet.validation_loss(swarm.model(last=step == world.steps), held_out)
                    curve.append(Point(tokens, loss))
    return [
        Outcome(
            trial=swarm.trial,
            curve=tuple(curve),
            bytes_sent=swarm.bytes_sent / world.workers,
            exchange_s=swarm.exchange_s,
            ranks=swarm.ranks,
        )
        for swarm, curve in zip(swarms, curves, strict=True)
    ]


class _Swarm:
    """The workers of one trial: those of the fleet at `rows`."""

    def __init__(self, world: World, trial: Trial, fleet: Fleet, rows: slice):
        self.trial = trial
        self.rows = rows
        self.averages_gradients = trial.rule.merge == "gradients"
        self.bytes_sent = self.exchange_s = 0.0
        self._world = world
        rule = trial.rule
        weights = fleet.weights[rows]
        anchor, momentum = weights[0].clone(), torch.zeros_like(weights[0])
        self._weights = weights
        self._outer = OuterStep(rule.learning_rate, rule.momentum)
        self._exchange = Exchange(
            fleet.layout, rule.compression, rule.energy, trial.seed, rule.robust
        )
        self._gradient_bytes = fp16_bytes(world) / world.rounds
        config = MergeConfig(
            weight=rule.weight if rule.merge == "rebase" else 0.0, decay=rule.decay
        )
        self._merges = [
            Merge(config, live, anchor, momentum, round_number=-1, digest="-1") for live in weights
        ]
        self._in_flight: tuple[Tensor, list[Tensor]] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of the factored matrices."""
        return tuple(rank for rank in self._exchange.ranks if rank)

    def stepped(self, step: int) -> None:
        """All workers made this inner step."""
        world = self._world
        if self.averages_gradients:
            self.bytes_sent += world.workers * self._gradient_bytes
            return
        for merge in self._merges:
            merge.trained(world.tokens_per_step)
        number, rest = divmod(step, world.inner_steps)
        if self.trial.rule.merge == "rebase" and rest == world.arrival % world.inner_steps:
            self._arrive()
        if rest == 0:
            self._arrive()  # under `reset` the one before, at the end of the round
            self._send(number - 1)
            if self.trial.rule.merge == "none":
                self._arrive()

    def model(self, *, last: bool) -> Tensor:
        """The weights to judge, [n]: the anchor, at the end with what is in flight."""
        if self.averages_gradients:
            return self._weights[0]
        if last:
            self._arrive()
        return self._merges[0].anchor

    def _send(self, number: int) -> None:
        messages = [merge.send(number).message for merge in self._merges]
        attack, weights, lies = self.trial.rule.attack, None, dict[int, Lie]()
        if attack is not None:
            weights, lies = attack.weights(len(messages)), attack.lies
            attack.change(messages, seed=self.trial.seed * 1000 + number)
        started = time.process_time()
        averaged = self._exchange.average(messages, weights, lies)
        self.exchange_s += time.process_time() - started
        if attack is not None and not lies:
            for left in averaged.left[: attack.liars]:
                left.zero_()  # each of its lies is a new one
        self.bytes_sent += averaged.bytes_sent
        self._in_flight = averaged.average, averaged.left

    def _arrive(self) -> None:
        """The record in flight reaches all workers."""
        if self._in_flight is None:
            return
        average, left = self._in_flight
        self._in_flight = None
        first = self._merges[0]
        anchor, momentum = torch.empty_like(first.anchor), torch.empty_like(first.momentum)
        self._outer.apply(first.anchor, first.momentum, average, anchor, momentum)
        number = first.round + 1
        facts = RecordFacts(
            round=number, digest=str(number), previous=str(number - 1), contributor=True
        )
        for merge, values in zip(self._merges, left, strict=True):
            merge.commit(facts, anchor, momentum, Remainder(values))


@lru_cache(maxsize=4)
def _windows(workers: int, steps: int, batch: tuple[int, int], seed: int) -> Tensor:
    """What each worker trains on, int64 [workers, steps, b, t + 1]: data part w of the seed's."""
    size, length = batch
    corpus = Corpus(DATA, sequence_length=length, microbatch_size=size, seed=seed)
    found: list[Tensor] = []
    for worker in range(workers):
        corpus.open_part(worker)
        found.append(torch.stack(list(islice(corpus, steps))))
    return torch.stack(found)


@lru_cache(maxsize=2)
def _held_out(length: int, count: int) -> Tensor:
    return held_out_windows(DATA, length, count)
