"""What the activation codecs cost in loss: a replica in one process, on the same batches each time.

The stages are the product's workers; what goes from one to the next is encoded and decoded as on a
link. The validation loss is computed as a replica does: with activations as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.pool import pool
from benchmarks.report import Column, Report
from dilocox.dht.manifest import Manifest
from dilocox.peer.process.prepare import held_out, open_corpus
from dilocox.peer.training.data import batches_of
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor, learning_rate
from dilocox.pipeline.activation_codec import decode, encode
from dilocox.pipeline.frames import CODECS
from dilocox.pipeline.stage import build_stage
from dilocox.pipeline.stage_worker import Produced, StageWorker
from tests.swarm.small_run import run_manifest

LAST_STEPS = 20  # over which training losses are averaged
LOSS_LIMIT_S = 1800.0
LOSS_LIMITS = {"int8": 0.005, "int4": 0.02}  # over bf16's
STEP_TOKENS = 4 * 128
COLUMNS = (
    *(Column(name) for name in ("model", "codec")),
    Column("validation", ".4f"),
    *(Column(name, "+.2%") for name in ("over bf16", "largest")),
    Column("training", ".4f"),
    Column("over bf16", "+.2%"),
    Column("limit", "+.1%"),
)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """In nats a token."""

    validation: float
    training: float
    """The mean of the last steps."""


@dataclass(frozen=True, kw_only=True)
class LossSetting:
    """One group of rows of the second table."""

    hidden_size: int
    learning_rate: float
    warm_up_steps: int = 0

    def __str__(self) -> str:
        warm_up = f", {self.warm_up_steps} to warm up" if self.warm_up_steps else ""
        return f"hidden {self.hidden_size}, lr {self.learning_rate:g}{warm_up}"


LOSS_SETTINGS = (
    LossSetting(hidden_size=128, learning_rate=1e-3),
    LossSetting(hidden_size=256, learning_rate=1e-3, warm_up_steps=20),
    LossSetting(hidden_size=256, learning_rate=5e-4),
)


class EncodedChain:
    """All stages of a run in one process."""

    def __init__(self, manifest: Manifest, codec: str):
        self._manifest = manifest
        self._codec = codec
        stages = manifest.stages
        self._workers: list[StageWorker] = []
        for index in range(stages):
            stage = build_stage(manifest.model, index, stages, manifest.seed)
            optimizer = InnerOptimizer(stage.named_parameters(), manifest.inner)
            worker = StageWorker(
                stage,
                optimizer,
                microbatches=manifest.batch.microbatches,
                document_end=manifest.document_end,
            )
            self._workers.append(worker)

    def step(self, batch: list[Tensor], rate: float) -> float:
        """One inner step on microbatches int64 [b, t + 1]; its training loss."""
        for microbatch, windows in enumerate(batch):
            self._pass(microbatch, windows)
        loss = self._workers[-1].loss
        squared_norm = sum(worker.squared_norm() for worker in self._workers)
        factor = clip_factor(squared_norm, self._manifest.inner.clip_norm)
        taken = [worker.go(factor, rate) for worker in self._workers]
        if not all(taken):
            raise RuntimeError(f"{self._codec}: an inner step was not finite")
        return loss

    def _pass(self, microbatch: int, windows: Tensor) -> None:
        """All forwards down the chain, and all backwards up."""
        sent: Tensor | None = None
        for worker in self._workers:
            worker.feed(microbatch, sent, windows)
            sent = self._sent(self._run(worker))
        for worker in reversed(self._workers[:-1]):
            worker.feed_gradient(microbatch, sent)
            sent = self._sent(self._run(worker))

    def _run(self, worker: StageWorker) -> Produced:
        produced = worker.run_one()
        if produced is None:
            raise RuntimeError("a stage has nothing to do")
        return produced

    def _sent(self, produced: Produced) -> Tensor | None:
        """What the neighbour gets, [b, t, d]; None from the first stage's backward."""
        tensor = produced.tensor
        if tensor is None:
            return None
        return decode(self._codec, encode(self._codec, tensor), tuple(tensor.shape))

    def validation_loss(self, windows: Tensor) -> float:
        """Mean nats a token of held-out windows int64 [n, t + 1]."""
        total = 0.0
        for batch in batches_of(windows):
            result: Tensor | float | None = None
            for worker in self._workers:
                result = worker.evaluate(result if isinstance(result, Tensor) else None, batch)
            total += float(result or math.nan)
        return total / (windows.shape[0] * (windows.shape[1] - 1))


def trained(description: Mapping[str, Any], codec: str, steps: int) -> Losses:
    """Train the run.yaml's model for so many inner steps, from the same start every time."""
    torch.set_num_threads(1)
    manifest = Manifest.from_dict(description)
    chain = EncodedChain(manifest, codec)
    corpus = open_corpus(manifest, "")
    corpus.open_part(0)
    losses: list[float] = []
    for step in range(1, steps + 1):
        batch = list(islice(corpus, manifest.batch.microbatches))
        tokens = step * manifest.batch.tokens_per_step
        rate = learning_rate(manifest.inner, manifest.end_tokens, tokens)
        losses.append(chain.step(batch, rate))
    last = losses[-LAST_STEPS:]
    return Losses(
        validation=chain.validation_loss(held_out(manifest)), training=sum(last) / len(last)
    )


def model_description(*, hidden_size: int, layers: int, heads: int, width: int) -> dict[str, Any]:
    """A Llama over bytes; `width`: of a head."""
    return {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * heads * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def description(setting: LossSetting, stages: int, seed: int) -> dict[str, Any]:
    """The run.yaml of one training."""
    heads = setting.hidden_size // 32
    return run_manifest(
        seed=seed,
        model=model_description(
            hidden_size=setting.hidden_size, layers=stages, heads=heads, width=32
        ),
        stages=stages,
        batch={"sequence_length": 128, "microbatch_size": 4, "microbatches": 1},
        inner={
            "learning_rate": setting.learning_rate,
            "warmup_tokens": setting.warm_up_steps * STEP_TOKENS,
        },
        data={"held_out_windows": 64},
    )


def losses(
    report: Report, *, stages: int, steps: int, seeds: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Measure and print the table; validation losses over bf16's by setting and codec."""
    rows: list[tuple[str | float | None, ...]] = []
    found: dict[str, dict[str, list[float]]] = {}
    with report.console.status("losses"), pool(threads=None) as processes:
        futures = {
            (setting, codec, seed): processes.submit(
                trained, description(setting, stages, seed), codec, steps
            )
            for setting in LOSS_SETTINGS
            for codec in CODECS
            for seed in seeds
        }
        for setting in LOSS_SETTINGS:
            reference = [futures[setting, "bf16", seed].result(LOSS_LIMIT_S) for seed in seeds]
            for codec in CODECS:
                each = [futures[setting, codec, seed].result(LOSS_LIMIT_S) for seed in seeds]
                over = [
                    a.validation / b.validation - 1 for a, b in zip(each, reference, strict=True)
                ]
                found.setdefault(str(setting), {})[codec] = over
                rows.append((str(setting), codec, *_loss_cells(codec, each, reference, over)))
    title = f"loss after {steps} inner steps, {stages} stages, {len(seeds)} seeds"
    report.table(COLUMNS, rows, title=title, part="losses")
    return found


def _loss_cells(
    codec: str, each: list[Losses], reference: list[Losses], over: list[float]
) -> tuple[float | None, ...]:
    training = [a.training / b.training - 1 for a, b in zip(each, reference, strict=True)]
    return (
        statistics.fmean(one.validation for one in each),
        statistics.fmean(over),
        max(over),
        statistics.fmean(one.training for one in each),
        statistics.fmean(training),
        LOSS_LIMITS.get(codec),
    )
