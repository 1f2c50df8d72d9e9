"""What activations of a stage take, reckoned before there is any memory for them. Apart from
prepare.py, which decides by it: this only counts bytes.

What: `activation_bytes` runs one microbatch through a stage, forward and backward, as a peer does,
over tensors that have shapes and no values.
Why: how much a family keeps for its backward depends on its kernels, the precision and what is
computed twice, in ways that no formula follows; and a volunteer wants to know before the download.
How: torch's fake tensors. Whatever comes to life is added up, and taken off when it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilocox.dht.manifest import Manifest
from dilocox.peer.training.inner_optimizer import InnerOptimizer, Precision
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.stage import StageModule, shape_stage
from dilocox.pipeline.stage_worker import StagePasses


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Of one microbatch. kept: between its forward and its backward. peak: while it is computed,
    with what is kept and with temporaries.
    """

    kept: int
    peak: int


def activation_bytes(
    manifest: Manifest,
    stage: int,
    *,
    recompute: bool,
    precision: Precision = "fp32",
    logits_at_once: int | None = None,
) -> ActivationBytes | None:
    """Of a stage of the run; None where it depends on values: with experts, and where a version of
    transformers looks at one on its way (5.17 does in OPT).

    recompute: see `StagePasses`; the manifest may ask for it, too. precision, logits_at_once: of
    the device; by default a CPU's.
    """
    mode = FakeTensorMode()
    module = shape_stage(manifest.model, stage, manifest.stages, mode)
    if any(parameter.dim() > 2 for parameter in module.parameters()):  # a stack of experts
        return None
    with mode, _Living() as living:
        optimizer = InnerOptimizer(module.named_parameters(), manifest.inner, precision=precision)
        passes = StagePasses(
            module,
            optimizer,
            recompute=recompute or manifest.pipeline.recompute,
            document_end=manifest.document_end,
            logits_at_once=logits_at_once,
        )
        try:
            return _one_microbatch(manifest, module, passes, living)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None


def _one_microbatch(
    manifest: Manifest, module: StageModule, passes: StagePasses, living: _Living
) -> ActivationBytes:
    batch = manifest.batch
    for parameter in module.parameters():  # neither they nor their gradients are activations
        living.count(parameter)
        parameter.grad = torch.zeros_like(parameter)
    for buffer in module.buffers():
        living.count(buffer)
    shape = batch.microbatch_size, batch.sequence_length
    windows = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64)
    before = living.start_peak()
    inputs = None if module.is_first else torch.zeros(*shape, hidden_size(manifest.model))
    if module.is_last:
        passes.forward_backward(inputs, windows, 1.0)
        return ActivationBytes(kept=0, peak=living.peak - before)
    output, forwarded = passes.forward(inputs, windows)
    kept = living.bytes - before
    passes.backward(forwarded, torch.zeros_like(output), 1.0)
    return ActivationBytes(kept=kept, peak=living.peak - before)


class _Living(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.bytes = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage

    def start_peak(self) -> int:
        """Let the peak begin anew; what lives now."""
        self.peak = self.bytes
        return self.bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.count(each)
        return made

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet, until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
