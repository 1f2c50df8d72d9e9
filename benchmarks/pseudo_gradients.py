"""Pseudo-gradients of a real run, and what a codec makes of them round after round.

Four workers train one model on the standard library's text as peers do: the product's inner
optimizer, merge and outer step; a round's average, here without any loss, arrives when a quarter of
the next round has passed. What each worker learnt in each round is kept. Every codec is then given
the same pseudo-gradients, from the first round on, so that its residual and its basis are those of
a run that goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.manifest import Manifest
from dilocox.peer.process.prepare import open_corpus
from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import RoundRecord, stage_codec
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor, learning_rate
from dilocox.peer.training.merge import (
    Merge,
    MergeConfig,
    RecordFacts,
    Remainder,
    Residual,
)
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from dilocox.pipeline.stage_worker import next_token_loss
from tests.peer.averaged import averaged
from tests.swarm.small_run import MODEL, fixed_steps, run_manifest

WORKERS = 4
SEED = 1
LLAMA = MODEL | {  # 3.0 million parameters
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WARM_UP_STEPS = 20
ARRIVES_AFTER = 0.25  # of a round


def manifest_of(codec: dict[str, Any], inner_steps: int) -> Manifest:
    """The run of these pseudo-gradients under a codec."""
    batch = {"sequence_length": 32, "microbatch_size": 4, "microbatches": 1}
    warm_up = WARM_UP_STEPS * batch["sequence_length"] * batch["microbatch_size"]
    description = run_manifest(
        model=LLAMA,
        seed=SEED,
        codec=codec,
        batch=batch,
        inner={"learning_rate": 1e-3, "warmup_tokens": warm_up},
        # `exchange_all` computes plain means
        rounds=fixed_steps(inner_steps) | {"robust": "none"},
    )
    return Manifest.from_dict(description)


def layout_of(manifest: Manifest) -> FlatLayout:
    """The layout of the run's one stage."""
    return FlatLayout.of(parameter_shapes(manifest.model, 1, 0))


class _Worker:
    """A replica of one peer; its anchor and momentum are everybody's."""

    def __init__(self, manifest: Manifest, part: int, anchor: Tensor, momentum: Tensor):
        self._manifest = manifest
        self._stage = build_stage(manifest.model, 0, 1, manifest.seed)
        live = flatten_parameters(self._stage, layout_of(manifest))
        anchor.copy_(live)
        self._optimizer = InnerOptimizer(self._stage.named_parameters(), manifest.inner)
        rule = MergeConfig.of(manifest.outer, manifest.codec, manifest.rounds)
        self.merge = Merge(rule, live, anchor, momentum, round_number=-1, digest="-1")
        self._corpus = open_corpus(manifest, "")
        self._corpus.open_part(part)
        self.loss = 0.0

    def train(self, steps: int) -> None:
        """Make inner steps; keep the loss of the last one."""
        inner, tokens = self._manifest.inner, self._manifest.batch.tokens_per_step
        for _ in range(steps):
            windows = next(self._corpus)
            loss = next_token_loss(self._stage(windows[:, :-1]), windows)
            loss.backward()
            factor = clip_factor(self._optimizer.squared_norm(), inner.clip_norm)
            done = (self._optimizer.steps + 1) * tokens * WORKERS
            rate = learning_rate(inner, self._manifest.end_tokens, done)
            if not self._optimizer.step(factor, rate):
                raise RuntimeError("an inner step was not finite")
            self.merge.trained(tokens)
            self.loss = loss.item()


@dataclass(frozen=True, eq=False)
class Training:
    """What a run left: `rounds[r][w]` is the pseudo-gradient [n] of worker w in round r; the mean
    training loss of the last inner steps."""

    layout: FlatLayout
    rounds: list[list[Tensor]]
    loss: float


def train(inner_steps: int, rounds: int) -> Training:
    """Train for so many rounds of `inner_steps` inner steps, on two threads."""
    manifest = manifest_of({"scheme": "dense", "bits": 32}, inner_steps)
    layout = layout_of(manifest)
    anchor, momentum = torch.zeros(layout.numel), torch.zeros(layout.numel)
    workers = [_Worker(manifest, part, anchor, momentum) for part in range(WORKERS)]
    outer = OuterStep(manifest.outer.learning_rate, manifest.outer.momentum)
    late = int(ARRIVES_AFTER * inner_steps)
    kept: list[list[Tensor]] = []
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number in range(rounds):
            if number:
                list(pool.map(lambda worker: worker.train(late), workers))
                anchor, momentum = _arrive(workers, outer, kept[-1], number - 1)
            steps = inner_steps - (late if number else 0)
            list(pool.map(lambda worker: worker.train(steps), workers))  # noqa: B023 - at once
            kept.append([worker.merge.send(number).delta for worker in workers])
    return Training(layout, kept, sum(worker.loss for worker in workers) / WORKERS)


def _arrive(
    workers: Sequence[_Worker], outer: OuterStep, deltas: Sequence[Tensor], number: int
) -> tuple[Tensor, Tensor]:
    """The record of a round reaches all workers; the anchor and momentum after it."""
    first = workers[0].merge
    anchor, momentum = torch.empty_like(first.anchor), torch.empty_like(first.momentum)
    outer.apply(first.anchor, first.momentum, torch.stack(list(deltas)).mean(0), anchor, momentum)
    facts = RecordFacts(
        round=number, digest=str(number), previous=str(number - 1), contributor=True
    )
    for worker, delta in zip(workers, deltas, strict=True):
        worker.merge.commit(facts, anchor, momentum, Remainder(torch.zeros_like(delta)))
    return anchor, momentum


@dataclass(frozen=True, eq=False, kw_only=True)
class Exchanged:
    """The last of a codec's rounds.

    before: the record before it. record: its own. messages: of its members, in their order.
    error: of its average, relative to the mean of the messages. error_so_far: of the sum of all
    averages, relative to the sum of all mean pseudo-gradients.
    """

    codec: StageCodec
    before: RoundRecord
    record: RoundRecord
    messages: list[Tensor]
    error: float
    error_so_far: float

    @property
    def ranks(self) -> list[int]:
        """Those of the factored matrices."""
        return [rank for rank in self.record.ranks if rank]

    @property
    def bits(self) -> tuple[float, float]:
        """Of the payload over the values of the 2-D weights, to the reducers and back; with low
        rank without what other tensors take.
        """
        codec, record = self.codec, self.record
        phases = codec.phases(record.ranks)
        up = sum(
            phases[part.phase].codec.encoded_bytes(part.stop - part.start) for part in record.parts
        )
        down = sum(map(len, record.means))
        pieces = codec.layout.slices
        vectors = 0
        if record.ranks:
            group = GroupCodec(codec.compression.bits)
            alone = [group.encoded_bytes(p.numel) for p in pieces if len(p.shape) < 2]
            vectors = sum(alone) - len(alone) * group.encoded_bytes(0)
            pieces = [piece for piece in pieces if len(piece.shape) >= 2]
        values = sum(piece.numel for piece in pieces)
        return 8 * (up - vectors) / values, 8 * (down - vectors) / values


def exchange_all(
    manifest: Manifest, training: Training, members: Sequence[str], run: str
) -> Exchanged:
    """All rounds, one after the other, as the members' averaging processes would do them."""
    layout, spec = training.layout, manifest.codec
    codec = stage_codec(manifest, layout)
    plan = RoundPlan(manifest, codec)
    tokens = dict.fromkeys(members, manifest.rounds.inner_steps * manifest.batch.tokens_per_step)
    residuals = [Residual(torch.zeros(layout.numel)) for _ in members]
    sent, meant = torch.zeros(layout.numel), torch.zeros(layout.numel)
    ranks, basis = codec.first_ranks, codec.first_basis(f"{run}/0/-1")
    before: RoundRecord | None = None
    for number, deltas in enumerate(training.rounds):
        messages = [r.take(delta) for r, delta in zip(residuals, deltas, strict=True)]
        record = averaged(
            codec,
            dict(zip(members, messages, strict=True)),
            tokens,
            ranks=ranks,
            basis=basis,
            round_number=number,
        ).record
        record = plan.finished(
            replace(record, run=run, window=() if before is None else before.window)
        )
        means = record.decoded(codec)
        average, mean = means.average(), torch.stack(messages).mean(0)
        sent += average
        meant += torch.stack(deltas).mean(0)
        if before is not None and number == len(training.rounds) - 1:
            return Exchanged(
                codec=codec,
                before=before,
                record=record,
                messages=messages,
                error=relative_error(average, mean),
                error_so_far=relative_error(sent, meant),
            )
        for peer, residual, message in zip(members, residuals, messages, strict=True):
            means.take_out(message, record.counted(peer))
            residual.settle(Remainder(message), spec.residual_decay)
        ranks, before = record.next_ranks, record
        basis = means.next_basis(codec.low_rank(ranks), f"{run}/0/{number}")
    raise ValueError(f"{len(training.rounds)} rounds: there must be two or more")


def relative_error(found: Tensor, right: Tensor) -> float:
    """The norm of the difference, of vectors, over that of the right one."""
    return float((found - right).norm() / right.norm())
