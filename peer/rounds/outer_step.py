"""The outer step: Nesterov SGD on the anchor with the averaged pseudo-gradient of one round.

Anchors must be byte-equal on every machine, so the step is a fixed sequence of separate
multiplications and additions in the anchor's own dtype (fp32; float64 in tests) on the CPU, each
rounded once as IEEE 754 says. No fused kernel (`add(alpha=)`, `addcmul`, `torch.optim`'s foreach)
and no BLAS call: those may keep a product unrounded, and whether they do depends on the machine.
Every value has its own arithmetic, so neither chunks nor the number of threads can change a bit.

Source: DiLoCo (arXiv 2311.08105, algorithm 1) with PyTorch's form of Nesterov momentum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.record import RoundRecord

CHUNK_VALUES = 1 << 16  # one chunk of each operand (256 KiB in fp32) stays in a core's cache


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer of a run; equal on all its peers.

    The two coefficients are rounded once to the anchor's dtype; 0.7 in fp32 is fp32's 0.7.
    """

    learning_rate: float
    """Outer learning rate, above 0."""
    momentum: float
    """Nesterov momentum, from 0 to below 1; 0 is plain SGD."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"outer learning rate {self.learning_rate}: choose one above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum {self.momentum}: choose one from 0 to below 1")

    @torch.no_grad()
    def apply(
        self,
        anchor: Tensor,
        momentum_buffer: Tensor,
        average: Tensor,
        out_anchor: Tensor,
        out_momentum: Tensor,
    ) -> None:
        """Write the anchor and the momentum after one record into the two outputs.

        For each value, with mu and lr the two coefficients and `average` a descent direction:

            buf = mu * buf + g;  d = g + mu * buf;  A = A - lr * d

        All are flat vectors of one length and dtype on the CPU. An output may be the input that it
        replaces (the step is then in place), `out_anchor` may also be the average, whose values are
        then lost, and nothing else. Allocates one chunk.

        Raises:
            ValueError: tensors that differ in length, dtype or device, or an output that overwrites
                what the step still reads.
        """
        _check(anchor, momentum_buffer, average, out_anchor, out_momentum)
        mu = torch.tensor(self.momentum, dtype=anchor.dtype)
        learning_rate = torch.tensor(self.learning_rate, dtype=anchor.dtype)
        scratch = torch.empty(min(CHUNK_VALUES, anchor.numel()), dtype=anchor.dtype)
        for low in range(0, anchor.numel(), CHUNK_VALUES):
            part = slice(low, low + CHUNK_VALUES)
            gradient, buffer = average[part], out_momentum[part]
            step = scratch[: gradient.numel()]
            torch.mul(momentum_buffer[part], mu, out=buffer)
            torch.add(buffer, gradient, out=buffer)
            torch.mul(buffer, mu, out=step)
            torch.add(gradient, step, out=step)
            torch.mul(step, learning_rate, out=step)
            torch.sub(anchor[part], step, out=out_anchor[part])


def outer_step(manifest: Manifest, rules: int) -> OuterStep:
    """The outer step of a record that was made under these rules."""
    return OuterStep(*manifest.outer_under(rules))


def move_anchor(
    manifest: Manifest, record: RoundRecord, codec: StageCodec, anchor: Tensor, momentum: Tensor
) -> None:
    """The outer step of a record on the anchor that it applies to and the momentum, fp32 [numel]
    each: in place, in the memory of a few pieces.

    Raises PayloadRefused if a mean is malformed; they may be a mixture then.
    """
    outer = outer_step(manifest, record.rules)

    def step(part: slice, average: Tensor) -> None:
        outer.apply(anchor[part], momentum[part], average, anchor[part], momentum[part])

    record.average_pieces(codec, step)


def anchor_sha256(anchor: Tensor) -> str:
    """The sha256, in hex, of a flat CPU vector's bytes; equal on all (little-endian) machines.

    Raises:
        ValueError: a tensor that is not flat, contiguous and on the CPU.
    """
    if anchor.dim() != 1 or not anchor.is_contiguous() or anchor.device.type != "cpu":
        raise ValueError(f"an anchor is a flat CPU vector, not {_describe(anchor)}")
    return hashlib.sha256(anchor.detach().view(torch.uint8).numpy().data).hexdigest()


def _check(*tensors: Tensor) -> None:
    anchor, momentum_buffer, average, out_anchor, out_momentum = tensors
    for tensor in tensors:
        same = tensor.shape == anchor.shape and tensor.dtype == anchor.dtype
        if tensor.dim() != 1 or tensor.device.type != "cpu" or not same:
            raise ValueError(
                "the outer step takes flat CPU vectors of one length and dtype: "
                f"{_describe(tensor)} beside {_describe(anchor)}"
            )
    momenta = momentum_buffer.data_ptr(), out_momentum.data_ptr()
    if anchor.numel() and out_anchor.data_ptr() in momenta:
        raise ValueError("out_anchor may share memory with the anchor or the average alone")
    if anchor.numel() and momenta[1] in (average.data_ptr(), anchor.data_ptr()):
        raise ValueError("out_momentum may share memory with the momentum buffer alone")


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
