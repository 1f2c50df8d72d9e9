"""Forward and backward passes of one stage over one microbatch.

How: hidden states that arrive become leaves of autograd, so that a backward leaves their gradient
in them. A forward keeps its graph, or (to save memory) only its input and the random state, and
runs once more before its backward. Inputs and gradients come from any device and in any float type,
and results stay on the stage's device.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dilocox.pipeline.loss import next_token_loss, summed_next_token_loss
from dilocox.pipeline.measure import Smoothed, Stopwatch, StoredBytes
from dilocox.pipeline.stage import StageModule


class StageOptimizer(Protocol):
    """What a stage needs of the optimizer of its parameters (`peer/inner.py` has it)."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        ...

    def squared_norm(self) -> float:
        """Return the squared norm of this step's gradients, which are all there now."""
        ...

    def step(self, factor: float, learning_rate: float) -> bool:
        """Take a step with gradients times `factor` unless that is not finite; clear them."""
        ...

    def drop(self) -> None:
        """Clear the gradients."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Forwarded:
    """A microbatch between its forward and its backward."""

    inputs: Tensor
    """Ids int64 [b, t], or the leaf [b, t, d] that collects the gradient."""
    output: Tensor | None
    """Hidden states [b, t, d] with their graph; None: to be computed again."""
    random_state: Tensor | None
    """Before the forward that is to be repeated."""


class StagePasses:
    """Runs a stage; gradients add up in its parameters.

    Attributes:
        watch: seconds spent in here, and wherever else its owner lets it run.
        forward_s, backward_s: smoothed seconds of one; a `forward_backward` counts as a backward.
        stored: bytes that the first forward kept.
    """

    def __init__(self, stage: StageModule, optimizer: StageOptimizer, *, recompute: bool) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._device = optimizer.device
        self._recompute = recompute
        self.watch = Stopwatch(self._device)
        self.forward_s = Smoothed()
        self.backward_s = Smoothed()
        self.stored = StoredBytes(stage)

    def forward(self, inputs: Tensor | None, windows: Tensor) -> tuple[Tensor, Forwarded]:
        """Return the hidden states [b, t, d] to send on, and what `backward` needs.

        Args:
            inputs: hidden states [b, t, d]; None on the first stage.
            windows: token ids int64 [b, t + 1].
        """
        with self.watch.running(self.forward_s):
            leaf = self._leaf(inputs, windows)
            random_state = _random_state(self._device) if self._recompute else None
            with torch.set_grad_enabled(not self._recompute), self.stored.measuring() as tally:
                output = self._run(leaf)
                for kept in [leaf] if self._recompute else [leaf, output]:
                    tally.add(kept)
        kept_output = None if self._recompute else output
        forwarded = Forwarded(inputs=leaf, output=kept_output, random_state=random_state)
        return output.detach(), forwarded

    def backward(self, forwarded: Forwarded, gradient: Tensor) -> Tensor | None:
        """From the gradient [b, t, d] of the output to that of the input; None for token ids."""
        with self.watch.running(self.backward_s):
            output = forwarded.output
            if output is None:
                output = self._run_again(forwarded)
            gradient = gradient.to(output.device, non_blocking=True)
            torch.autograd.backward(output, gradient)
        return forwarded.inputs.grad

    def forward_backward(
        self, inputs: Tensor | None, windows: Tensor, share: float
    ) -> tuple[Tensor, Tensor | None]:
        """On the last stage: the mean loss over `share`, and its gradient for the input [b, t, d].

        Arguments as for `forward`. The loss is a scalar in nats, fp32; the gradient is None for
        token ids, and scaled as `StageOptimizer.scale` does.
        """
        with self.watch.running(self.backward_s):
            leaf = self._leaf(inputs, windows)
            targets = windows.to(self._device, non_blocking=True)
            with self.stored.measuring() as tally:
                loss = next_token_loss(self._run(leaf), targets) / share
                tally.add(leaf)
            self._optimizer.scale(loss).backward()  # pyright: ignore[reportUnknownMemberType]
        return loss.detach(), leaf.grad

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | None, windows: Tensor) -> Tensor | float:
        """Run in full precision, without dropout, and keep nothing: hidden states, or on the last
        stage the loss.

        That is the sum over b * t tokens, in nats. Arguments as for `forward`.
        """
        with self.watch.running(), _evaluating(self._stage):
            output = cast(Tensor, self._stage(self._leaf(inputs, windows)))
            if not self._stage.is_last:
                return output
            return float(summed_next_token_loss(output, windows.to(self._device)))

    def _leaf(self, inputs: Tensor | None, windows: Tensor) -> Tensor:
        """Ids, or a leaf of autograd that shares no gradient with what was given."""
        if inputs is None:
            return windows[:, :-1].to(self._device, non_blocking=True)
        moved = inputs.detach().to(self._device, torch.float32, non_blocking=True)
        return moved.requires_grad_()

    def _run(self, inputs: Tensor) -> Tensor:
        with self._optimizer.autocast():
            return cast(Tensor, self._stage(inputs))

    def _run_again(self, forwarded: Forwarded) -> Tensor:
        """The output with a graph, from the random state in which it was computed first."""
        now = _random_state(self._device)
        _set_random_state(self._device, cast(Tensor, forwarded.random_state))
        try:
            return self._run(forwarded.inputs)
        finally:
            _set_random_state(self._device, now)


@contextmanager
def _evaluating(stage: nn.Module) -> Generator[None]:
    """For a while nothing is left to chance (no dropout), as it is in training."""
    training = stage.training
    stage.eval()
    try:
        yield
    finally:
        stage.train(training)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
