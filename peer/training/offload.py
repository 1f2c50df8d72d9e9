"""Inner steps for a GPU that has no room for them: weights, gradients and moments stay in the
machine's memory, and the stage on the GPU holds copies of the weights alone. Apart from the
optimizer (inner_optimizer.py), which does not know where tensors are.

Matrices lie there in the dtype that autocast would give them anyway, and so compute the same bits;
embeddings and vectors stay fp32, as autocast leaves them. (It leaves stacks of experts and their
biases, too; those are most of their model, and narrow all the same.) Each gradient leaves for the
machine's memory as soon as it is there and is added up in fp32, so the GPU never holds more than
the largest.
It costs a copy of the weights to the GPU for each inner step, a copy of the gradients back for each
microbatch, and a step that the CPU computes: see ZeRO-Offload (arXiv 2101.06840).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dilocox.compression.low_rank import memory_is_full
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import (
    AUTOCAST,
    InnerOptimizer,
    Precision,
    usable_precision,
)


class OffloadedOptimizer(InnerOptimizer):
    """As `InnerOptimizer`, of the weights that the stage has now; they stay where they are, and the
    stage gets copies on `device`.

    Args:
        stage: its parameters in fp32, on the CPU.
        spec: the manifest's inner section.
        device: where the stage computes.
        precision: of forward and backward; by default the manifest's.
    """

    def __init__(
        self,
        stage: nn.Module,
        spec: InnerSpec,
        device: torch.device,
        *,
        precision: Precision | None = None,
    ):
        named = list(stage.named_parameters())
        masters = [(name, nn.Parameter(parameter.data)) for name, parameter in named]
        precision = precision or usable_precision(spec.precision, device)
        super().__init__(masters, spec, precision=precision)
        self.device = device
        self._copies = [
            (master, copy) for (_, master), (_, copy) in zip(masters, named, strict=True)
        ]
        narrow = AUTOCAST.get(self.precision, torch.float32)
        tables = {id(m.weight) for m in stage.modules() if isinstance(m, nn.Embedding)}
        for master, copy in self._copies:
            wide = copy.dim() < 2 or id(copy) in tables
            copy.data = copy.data.to(device, torch.float32 if wide else narrow, copy=True)
            copy.register_post_accumulate_grad_hook(  # pyright: ignore[reportUnknownMemberType]
                _Gradient(master)
            )
        for buffer in stage.buffers():
            buffer.data = buffer.data.to(device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the stage the weights as they are now."""
        for master, copy in self._copies:
            copy.copy_(master)


class _Gradient:
    """Takes the gradient of a microbatch away from a copy and adds it to its master's."""

    def __init__(self, master: nn.Parameter):
        self._master = master

    def __call__(self, copy: Tensor) -> None:
        taken, copy.grad = copy.grad, None
        if taken is None:
            return
        gradient = taken.to(self._master.device).float()  # what travels is narrow
        if self._master.grad is None:
            self._master.grad = gradient
        else:
            self._master.grad.add_(gradient)


@contextmanager
def gpu_memory(untried: Sequence[str]) -> Generator[None]:
    """Where a GPU's memory is used up inside, raise EnvironmentFault, which names the remedy; of
    the options that take less memory these were not given.

    The peer ends as if it had been killed: nothing of the inner step in progress is written.
    """
    try:
        yield
    except RuntimeError as error:
        if not memory_is_full(error):
            raise
        option = f"start with {' and '.join(untried)}, which takes less, " if untried else ""
        raise EnvironmentFault(
            f"the GPU has no memory left for an inner step, which is dropped: {option}close other "
            "programs that use it, host a smaller stage, or take --device cpu"
        ) from error
