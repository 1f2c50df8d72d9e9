"""What a stage measures of itself: seconds of computing, and bytes that a microbatch holds.

Why: both decide how many microbatches are kept in flight, and depend on family, kernels, precision
and machine in ways that no formula follows.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SMOOTHING = 0.2  # weight of the newest measurement of a time


class Smoothed:
    """A moving mean of measurements without the first one, which warms up caches.

    Attributes:
        value: the mean; until the second measurement the first, before it 0.0.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, measured: float) -> None:
        """Take a measurement."""
        weight = 1.0 if self._count < 2 else _SMOOTHING
        self.value += weight * (measured - self.value)
        self._count += 1


class Stopwatch:
    """Seconds of computing on a device.

    Attributes:
        total_s: all so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_s = 0.0

    @contextmanager
    def running(self, smoothed: Smoothed | None = None) -> Generator[None]:
        """Measure what runs inside, on a GPU until it has really been computed."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        taken_s = time.perf_counter() - start
        self.total_s += taken_s
        if smoothed is not None:
            smoothed.add(taken_s)


class StoredBytes:
    """Measures what the first forward of a module keeps for its backward.

    Autograd shows every tensor that it saves. Each storage counts once, those of parameters and
    buffers not at all; weights that autocast converts anew for every forward do count.

    Attributes:
        measured: bytes of the first forward; 0 before it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.measured = 0

    @contextmanager
    def measuring(self) -> Generator["StorageTally"]:
        """Count what autograd saves inside and what is added, if this is the first forward."""
        tally = StorageTally()
        if self.measured:
            yield tally
            return
        with torch.autograd.graph.saved_tensors_hooks(tally.keep, _as_it_is):
            yield tally
        # Now, because weights may have moved into a flat vector since this object was made.
        lasting = {_address(tensor) for tensor in self._module.parameters()}
        lasting |= {_address(tensor) for tensor in self._module.buffers()}
        self.measured = sum(size for address, size in tally.sizes.items() if address not in lasting)


class StorageTally:
    """Sizes in bytes of storages by address; equal addresses are equal storages while all live."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that stays alive."""
        self.sizes[_address(tensor)] = tensor.untyped_storage().nbytes()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and let it save just that."""
        self.add(tensor)
        return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
