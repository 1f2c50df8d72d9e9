"""What the activation codecs cost in loss: a replica in one process, on the same batches each time.

The stages are the product's workers; what goes from one to the next is encoded and decoded as on a
link. The validation loss is computed as a replica does: with activations as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.manifest import Manifest
from dilocox.peer.inner import InnerOptimizer, clip_factor, learning_rate
from dilocox.peer.prepare import held_out, open_corpus
from dilocox.peer.validation import batches_of
from dilocox.pipeline.activations import decode, encode
from dilocox.pipeline.stage import build_stage
from dilocox.pipeline.worker import Produced, StageWorker

LAST_STEPS = 20  # over which training losses are averaged


@dataclass(frozen=True, kw_only=True)
class Losses:
    """In nats a token."""

    validation: float
    training: float
    """The mean of the last steps."""


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
                stage_index=index,
                num_stages=stages,
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
