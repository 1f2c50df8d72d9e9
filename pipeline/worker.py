"""One stage at work in a replica: forwards and backwards of an inner step's microbatches.

What: inputs and gradients that arrived are fed in, `run_one` computes the next piece and returns
what to send to a neighbour, `go` ends the inner step. No network, no threads, no waiting.
Why: that a replica trains exactly like the same model in one process is decided here, and can be
tested here without links.
How: the last stage runs a backward right after its forward, the others keep a microbatch until the
gradient of their output is there. Gradients add up in the parameters until `go`. A microbatch that
is not finite anywhere is None from there on, up and down the chain, and makes the squared norm of
the step not a number on all stages that it passes, so that every stage skips the step.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dilocox.pipeline.frames import FrameRefused
from dilocox.pipeline.passes import Forwarded, StageOptimizer, StagePasses
from dilocox.pipeline.schedule import Policy, next_action
from dilocox.pipeline.stage import StageModule

__all__ = ["Produced", "StageOptimizer", "StageWorker"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Produced:
    """What `run_one` computed."""

    kind: Literal["forward", "gradient", "backward"]
    """"forward" goes to the lower neighbour, "gradient" to the upper one; "backward" was the first
    stage's and goes nowhere."""
    microbatch: int
    tensor: Tensor | None = None
    """Hidden states or their gradient [b, t, d] on the stage's device; None: not finite, or
    "backward"."""
    windows: Tensor | None = None
    """Of a "forward": as they were fed, int64 [b, t + 1]."""


class StageWorker:
    """Computes inner steps of one stage, one piece at a time.

    Args:
        stage: this peer's part of the model.
        optimizer: of its parameters.
        microbatches: of an inner step; their losses weigh the same.
        stage_index, num_stages: the stage's place in the chain.
        policy: the order of the pieces, see `schedule.next_action`.
        recompute: keep only the input of a forward and run it again before its backward.

    Attributes:
        window: how many microbatches the head keeps in flight, None for at least one a stage. Only
            "1f1b" needs it, which would wait for more for ever.
    """

    def __init__(
        self,
        stage: StageModule,
        optimizer: StageOptimizer,
        *,
        microbatches: int,
        stage_index: int,
        num_stages: int,
        policy: Policy = "backward_first",
        recompute: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._microbatches = microbatches
        self._is_first = stage_index == 0
        self._is_last = stage_index == num_stages - 1
        self._policy: Policy = policy
        self._stages_from_here = num_stages - stage_index
        self._passes = StagePasses(stage, optimizer, recompute=recompute)
        self.window: int | None = None
        self._forget()

    def restart(self) -> None:
        """Drop everything in flight and all gradients: the inner step begins anew."""
        self._optimizer.drop()
        self._forget()

    def feed(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> None:
        """Take the input of a forward.

        Args:
            microbatch: its number in this inner step, from 0.
            inputs: hidden states [b, t, d], None if they are not finite; None on the first stage.
            windows: token ids int64 [b, t + 1].

        Raises:
            FrameRefused: "order": no such microbatch, or it was there before.
        """
        if not 0 <= microbatch < self._microbatches:
            raise FrameRefused("order", f"microbatch {microbatch} of {self._microbatches}")
        if microbatch in self._fed:
            raise FrameRefused("order", f"microbatch {microbatch} came twice")
        self._fed.add(microbatch)
        self._inputs.append((microbatch, inputs, windows))

    def feed_gradient(self, microbatch: int, gradient: Tensor | None) -> None:
        """Take the gradient [b, t, d] of what was sent down, None if it is not finite.

        Raises:
            FrameRefused: "order": that microbatch waits for no gradient.
        """
        if microbatch not in self._awaited:
            raise FrameRefused("order", f"no gradient is due for microbatch {microbatch}")
        self._gradients.append((microbatch, self._awaited.pop(microbatch), gradient))

    def run_one(self) -> Produced | None:
        """Run a backward or a forward, on the last stage both; None if none can run now.

        What comes out is not checked: a caller that finds it not finite sends None in its place.
        """
        action = next_action(
            self._policy,
            warm_up=min(self._stages_from_here, self.window or self._stages_from_here),
            microbatches=self._microbatches,
            forwards=self._forwards,
            backwards=self._backwards,
            forward_ready=bool(self._inputs),
            backward_ready=bool(self._gradients),
        )
        if action == "backward":
            return self._run_backward(*self._gradients.popleft())
        if action == "forward":
            run = self._run_both if self._is_last else self._run_forward
            return run(*self._inputs.popleft())
        return None

    @property
    def idle(self) -> bool:
        """Whether nothing of an inner step is here: the weights may be changed."""
        return not self._fed

    @property
    def finished(self) -> bool:
        """Whether all backwards of this inner step ran."""
        return self._backwards == self._microbatches

    @property
    def in_flight(self) -> int:
        """Microbatches that were fed and whose backward has not run."""
        return len(self._fed) - self._backwards

    @property
    def compute_s(self) -> float:
        """Smoothed seconds of one forward plus one backward; 0.0 before the first."""
        return self._passes.forward_s.value + self._passes.backward_s.value

    @property
    def computing_s(self) -> float:
        """All seconds spent computing so far, evaluation and optimizer included."""
        return self._passes.watch.total_s

    @property
    def stored_bytes(self) -> int:
        """Bytes that one microbatch keeps for its backward, without weights; 0 before the first.

        Measured at the first forward. On the last stage they are there only while it runs.
        """
        return self._passes.stored.measured

    @property
    def loss(self) -> float:
        """On the last stage the mean loss of a finished step, in nats; elsewhere 0.0.

        Added up in fp32 in the order of the microbatches, whatever the order they came in.
        """
        total = torch.zeros((), device=self._optimizer.device)
        for microbatch in sorted(self._losses):
            total += self._losses[microbatch]
        return float(total)

    def squared_norm(self) -> float:
        """Squared norm of the gradients of a finished step; not a number if anything was not."""
        with self._passes.watch.running():
            return math.nan if self._poisoned else self._optimizer.squared_norm()

    def go(self, factor: float, learning_rate: float) -> bool:
        """End the inner step: step the optimizer; returns whether that was taken or skipped.

        Args:
            factor: what gradients are multiplied by; not a number to skip the step.
            learning_rate: of this step.

        Raises:
            FrameRefused: "order": the step is not finished here.
        """
        if not self.finished:
            done = f"{self._backwards} of {self._microbatches} microbatches"
            raise FrameRefused("order", f"go after {done}")
        with self._passes.watch.running():
            taken = self._optimizer.step(math.nan if self._poisoned else factor, learning_rate)
        self._forget()
        return taken

    def evaluate(self, inputs: Tensor | None, windows: Tensor) -> Tensor | float:
        """Run the stage on held-out `windows` [b, t + 1], in full precision, keeping nothing.

        `inputs` as in `feed`. Returns hidden states [b, t, d]; on the last stage the cross-entropy
        in nats, summed over the b * t tokens. Not a number on any stage whose inputs are not
        finite: no stage below can say more.
        """
        if inputs is None and not self._is_first:
            return math.nan
        return self._passes.evaluate(inputs, windows)

    def _forget(self) -> None:
        """Begin an inner step."""
        self._fed: set[int] = set()
        self._inputs: deque[tuple[int, Tensor | None, Tensor]] = deque()
        self._awaited: dict[int, Forwarded | None] = {}
        self._gradients: deque[tuple[int, Forwarded | None, Tensor | None]] = deque()
        self._losses: dict[int, Tensor] = {}
        self._forwards = 0
        self._backwards = 0
        self._poisoned = False

    def _run_forward(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> Produced:
        self._forwards += 1
        output: Tensor | None = None
        self._awaited[microbatch] = None
        if inputs is None and not self._is_first:
            self._poisoned = True
        else:
            output, self._awaited[microbatch] = self._passes.forward(inputs, windows)
        return Produced(kind="forward", microbatch=microbatch, tensor=output, windows=windows)

    def _run_backward(
        self, microbatch: int, forwarded: Forwarded | None, gradient: Tensor | None
    ) -> Produced:
        self._backwards += 1
        if forwarded is None or gradient is None:
            self._poisoned = True
            return self._upward(microbatch, None)
        return self._upward(microbatch, self._passes.backward(forwarded, gradient))

    def _run_both(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> Produced:
        self._forwards += 1
        self._backwards += 1
        if inputs is None and not self._is_first:
            self._poisoned = True
            self._losses[microbatch] = torch.tensor(math.nan)
            return self._upward(microbatch, None)
        self._losses[microbatch], gradient = self._passes.forward_backward(
            inputs, windows, self._microbatches
        )
        return self._upward(microbatch, gradient)

    def _upward(self, microbatch: int, gradient: Tensor | None) -> Produced:
        kind = "backward" if self._is_first else "gradient"
        return Produced(kind=kind, microbatch=microbatch, tensor=gradient)
