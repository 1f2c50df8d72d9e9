"""Trials of rules of averaging, many side by side: local swarms (dilocox.local_swarm) whose workers
train as one fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.fleet import Fleet
from benchmarks.simulated_exchange import Attack, AttackedSwarm, Hearing
from benchmarks.trial_averages import TriedSwarm, Way
from benchmarks.uneven_swarm import PacedFleet, UnevenSwarm
from dilocox.compression.stage_codec import Compression
from dilocox.dht.manifest import CodecSpec, DataSpec, InnerSpec, OuterSpec, RoundSpec
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.training.data import ByteTokenizer, Corpus, held_out_windows
from dilocox.peer.training.inner_optimizer import learning_rate
from dilocox.pipeline.stage import parameter_shapes

FP16_BYTES = 2  # of a value
DATA = DataSpec(parts=16)  # a part holds about half a million tokens
FIRST_BYTE = 3  # the id of byte 0


@dataclass(frozen=True, kw_only=True)
class World:
    """What all rules have in common.

    arrival: inner steps from a send to its record. batch: windows of an inner step, and their
    length in tokens. paces: inner steps of each worker in a round; all of them if left out.
    absent: worker r mod n is not in round r. mixed: all workers draw from all files, instead of
    each from its own. other: what the first worker learns from in the place of source code: prose
    (the reference of the language, as pydoc has it), or its code in letters that no other worker
    has, as another script would be to a tokenizer of bytes.
    """

    model: dict[str, Any]
    workers: int
    inner_steps: int
    rounds: int
    arrival: int
    batch: tuple[int, int]
    held_out: int
    paces: tuple[int, ...] = ()
    absent: bool = False
    mixed: bool = False
    other: Literal["", "prose", "script"] = ""

    def __post_init__(self) -> None:
        if self.paces and (len(self.paces) != self.workers or max(self.paces) != self.inner_steps):
            raise ValueError("paces: one for each worker, H for the fastest")

    @property
    def steps(self) -> int:
        """Inner steps of each worker, or of the fastest."""
        return self.inner_steps * self.rounds

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one worker."""
        return self.batch[0] * self.batch[1]

    @property
    def tokens(self) -> int:
        """Tokens of all workers."""
        made = sum(self.paces) if self.paces else self.workers * self.inner_steps
        return made * self.rounds * self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the replicas' progress becomes one model.

    merge: as in the manifest; `gradients`: they are averaged at every inner step (AllReduce).
    learning_rate, momentum: of the outer step. weight: w of `rebase`. decay: of the residual.
    energy: ranks follow it, as in the manifest's codec section; None: they stay.
    robust: how far reducers believe workers, as in the manifest. attack: what liars send; nobody
        lies where it is None. half: values travel in fp16 in the place of the codec's 32 bits. way:
        of benchmarks/trial_averages.py, in the place of the codec. momentum_kept: the share of
        Muon's momentum that an arriving record leaves.
    """

    merge: Literal["gradients", "none", "reset", "rebase"]
    compression: Compression
    learning_rate: float = 0.7
    momentum: float = 0.5
    weight: float = 0.75
    decay: float = 0.95
    energy: float | None = None
    robust: RobustRule = "none"
    attack: Attack | None = None
    half: bool = False
    way: Way | None = None
    momentum_kept: float = 1.0
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
        the last exchange's factored matrices. hearings: of each worker, where none is absent.
    """

    trial: Trial
    curve: tuple[Point, ...]
    bytes_sent: float
    exchange_s: float
    ranks: tuple[int, ...]
    hearings: tuple[Hearing, ...]

    @property
    def loss(self) -> float:
        """The validation loss at the end."""
        return self.curve[-1].loss


def fp16_bytes(world: World) -> float:
    """What each worker sends if every round all-reduces all values in fp16."""
    return world.rounds * _moved(world.workers) * FP16_BYTES * _values(world)


def bits_a_value(world: World, bytes_sent: float) -> float:
    """That a worker sent of each value in a round: to those that average it, and from them."""
    return 8 * bytes_sent / _values(world) / world.rounds


def _values(world: World) -> int:
    return sum(math.prod(shape) for _, shape in parameter_shapes(world.model, 1, 0))


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
    fleet = _fleet(world, seeds, inner)
    swarms = [
        _Trial(world, trial, fleet, slice(index * world.workers, (index + 1) * world.workers))
        for index, trial in enumerate(trials)
    ]
    together = [swarm.rows for swarm in swarms if swarm.averages_gradients]
    data = torch.cat(
        [
            _windows(world.workers, world.steps, world.batch, trial.seed, world.mixed, world.other)
            for trial in trials
        ]
    )
    held_out = _held_out(world.batch[1], world.held_out)
    curves: list[list[Point]] = [[] for _ in trials]
    for step in range(1, world.steps + 1):
        tokens = world.tokens * step // world.steps
        rate = learning_rate(inner, world.tokens, tokens)
        fleet.step(data[:, step - 1], rate, together)
        for swarm in swarms:
            swarm.stepped()
        if step % world.inner_steps == 0:
            number = step // world.inner_steps
            if number * points // world.rounds > (number - 1) * points // world.rounds:
                for swarm, curve in zip(swarms, curves, strict=True):
                    loss = fleet.validation_loss(swarm.model(last=step == world.steps), held_out)
                    curve.append(Point(tokens, loss))
    return [swarm.outcome(curve) for swarm, curve in zip(swarms, curves, strict=True)]


class _Trial:
    """The workers of one trial: those of the fleet at `rows`."""

    def __init__(self, world: World, trial: Trial, fleet: Fleet | PacedFleet, rows: slice):
        self.trial = trial
        self.rows = rows
        rule = trial.rule
        self.averages_gradients = rule.merge == "gradients"
        self._tokens = world.tokens_per_step
        self._fleet = fleet
        self._weights = fleet.weights[rows]
        self._gradient_bytes = fp16_bytes(world) / world.rounds
        self._all_reduces = 0
        self._swarm = _swarm(world, trial, fleet.stage, list(self._weights))

    def stepped(self) -> None:
        """All workers made an inner step."""
        if self.averages_gradients:
            self._all_reduces += 1
            return
        before, kept = self._swarm.anchor, self.trial.rule.momentum_kept
        self._swarm.trained(self._tokens)
        if kept < 1 and self._swarm.anchor is not before:  # a record arrived
            self._fleet.fade_momentum(self.rows, kept)

    def model(self, *, last: bool) -> Tensor:
        """The weights to judge, [n]: the anchor, at the end with what is in flight."""
        if self.averages_gradients:
            return self._weights[0]
        if last:
            self._swarm.arrive()
        return self._swarm.anchor

    def outcome(self, curve: Sequence[Point]) -> Outcome:
        """What it came to."""
        swarm = self._swarm
        return Outcome(
            trial=self.trial,
            curve=tuple(curve),
            bytes_sent=self._all_reduces * self._gradient_bytes
            + swarm.bytes_sent / len(self._weights),
            exchange_s=swarm.exchange_s,
            ranks=tuple(rank for rank in swarm.ranks if rank),
            hearings=tuple(map(swarm.hearing, range(len(self._weights)))),
        )


def _fleet(world: World, seeds: Sequence[int], inner: InnerSpec) -> Fleet | PacedFleet:
    """A replica for each of `seeds`, of one world after another."""
    if not world.paces:
        return Fleet(world.model, seeds, inner)
    paces = world.paces * (len(seeds) // world.workers)
    return PacedFleet(world.model, seeds, inner, paces=paces, inner_steps=world.inner_steps)


def _swarm(world: World, trial: Trial, stage: nn.Module, weights: list[Tensor]) -> AttackedSwarm:
    """The trial's workers, whose live weights these are."""
    rule = trial.rule
    common: dict[str, Any] = {
        **_sections(world, rule),
        "weights": weights,
        "arrival": world.arrival,
        "seed": trial.seed,
        "attack": rule.attack,
    }
    if rule.way is not None:
        if world.paces or world.absent or rule.attack is not None:
            raise ValueError("a way to average is tried with workers that are alike and honest")
        return TriedSwarm([stage], **common, way=rule.way)
    if not (world.paces or world.absent or rule.half):
        return AttackedSwarm([stage], **common)
    if world.absent and rule.attack is not None:
        raise ValueError("workers that may be absent are all honest here")
    paces = world.paces or (world.inner_steps,) * world.workers
    return UnevenSwarm([stage], **common, paces=paces, absent=world.absent, half=rule.half)


def _sections(world: World, rule: Rule) -> dict[str, Any]:
    """The rule in the words of a manifest."""
    return {
        "rounds": RoundSpec(inner_steps=world.inner_steps, robust=rule.robust),
        "outer": OuterSpec(
            merge="none" if rule.merge == "gradients" else rule.merge,
            apply="round_end" if rule.merge == "reset" else "arrival",
            rebase_weight=rule.weight,
            learning_rate=rule.learning_rate,
            momentum=rule.momentum,
        ),
        "codec": CodecSpec(
            **asdict(rule.compression),
            adaptive=rule.energy is not None,
            energy=rule.energy or CodecSpec().energy,
            residual_decay=rule.decay,
        ),
    }


@lru_cache(maxsize=4)
def _windows(
    workers: int,
    steps: int,
    batch: tuple[int, int],
    seed: int,
    mixed: bool = False,
    other: str = "",
) -> Tensor:
    """What each worker trains on, int64 [workers, steps, b, t + 1]: data part w of the seed's.

    mixed: the same windows, dealt to the workers at random. other: of the first worker, as in
    World.
    """
    size, length = batch
    data = replace(DATA, parts=max(DATA.parts, workers))
    corpus = Corpus(data, sequence_length=length, microbatch_size=size, seed=seed)
    found: list[Tensor] = []
    for worker in range(workers):
        corpus.open_part(worker)
        found.append(torch.stack(list(islice(corpus, steps))))
    windows = torch.stack(found)
    if mixed:
        draw = torch.Generator().manual_seed(seed)
        dealt = torch.randperm(workers * steps * size, generator=draw)
        windows = windows.flatten(0, 2)[dealt].view(windows.shape)
    if other:
        windows[0] = _other_text(other, windows[0], seed)
    return windows


def _other_text(kind: str, windows: Tensor, seed: int) -> Tensor:
    """Windows in the place of these [steps, b, t + 1]: prose, or the same text in other letters."""
    if kind == "script":
        letters = (windows - FIRST_BYTE + 128) % 256 + FIRST_BYTE
        return torch.where(windows < FIRST_BYTE, windows, letters)
    length = windows.shape[-1]
    text = torch.from_numpy(ByteTokenizer().encode("".join(topics.values()).encode())).long()
    cut = text[: len(text) // length * length].view(-1, length)
    drawn = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))
    return cut[drawn[: windows[..., 0].numel()]].view(windows.shape)


@lru_cache(maxsize=2)
def _held_out(length: int, count: int) -> Tensor:
    return held_out_windows(DATA, length, count)
