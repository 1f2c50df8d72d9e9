"""One stage at work in a replica: forwards and backwards of an inner step's microbatches.

What: inputs and gradients that arrived are fed in, `run_one` computes the next piece and returns
what to send to a neighbour, `go` ends the inner step. No network, no threads, no waiting.
Why: that a replica trains exactly like the same model in one process is decided here, and can be
tested here without links.
How: the last stage runs a backward right after its forward, the others keep a microbatch until the
gradient of their output is there. Gradients add up in the parameters until `go`. A microbatch that
is not finite anywhere is None from there on, up and down the chain, and makes the squared norm of
the step not a number on all stages that it passes, so that every stage skips the step.

`StagePasses` makes the forward and backward pass over one microbatch.

How: hidden states that arrive become leaves of autograd, so that a backward leaves their gradient
in them. A forward keeps its graph, or (to save memory) only the input of each layer, and every
layer runs once more before its backward. Inputs and gradients come from any device and in any float
type, and results stay on the stage's device, for which nothing here waits: what a GPU is told to do
is asked for once an inner step.

The head runs on as many tokens at a time as have `LOGITS_AT_ONCE` logits, forward and backward:
those of a whole microbatch would often take more memory than the rest of the stage.

A stage measures of itself the seconds of computing, and the bytes that a microbatch holds: both
decide how many microbatches are kept in flight (`window_size`), and depend on family, kernels,
precision and machine in ways that no formula follows.

`summed_loss` is what the last stage makes of logits, in fp32 nats: in one place, so that a stage of
a replica, a model in one piece and the validation compute the same numbers.

A stage runs a backward when one is there, else a forward. Over slow links a stage that insists on
an order, as 1F1B in data centres, waits for frames while it could compute; and a backward frees
memory.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilocox.pipeline.frames import FrameRefused
from dilocox.pipeline.stage import StageModule

LOGITS_AT_ONCE = 1 << 24  # 64 MiB in fp32
GPU_LOGITS_AT_ONCE = 1 << 27  # of each piece a GPU casts the head's weight anew
_LEAST_TOKENS = 256  # at once: fewer would only add up the gradient of the head's weight more often


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy, in fp32 nats, of logits [..., v] against targets int64 [n], summed."""
    return F.cross_entropy(logits.float().reshape(len(targets), -1), targets, reduction="sum")


def next_token_loss(logits: Tensor, windows: Tensor) -> Tensor:
    """The cross-entropy, in fp32 nats a token, of logits [b, t, v] against windows int64
    [b, t + 1].
    """
    targets = windows[:, 1:].reshape(-1)
    return summed_loss(logits, targets) / len(targets)


_SMOOTHING = 0.2  # weight of the newest measurement of a time


class Smoothed:
    """A moving mean of measurements without the first one, which warms up caches.

    value: the mean; until the second measurement the first, before it 0.0.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, measured: float) -> None:
        weight = 1.0 if self._count < 2 else _SMOOTHING
        self.value += weight * (measured - self.value)
        self._count += 1


class Stopwatch:
    """Seconds of computing on a device, on a GPU those that it has really computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_s = 0.0
        self._untold: list[tuple[torch.cuda.Event, torch.cuda.Event, Smoothed | None]] = []
        self._lock = threading.Lock()  # metrics ask from threads of their own

    @property
    def total_s(self) -> float:
        """All seconds so far; see `settle`."""
        self.settle()
        return self._total_s

    @contextmanager
    def running(self, smoothed: Smoothed | None = None) -> Generator[None]:
        """Measure what runs inside, without waiting for a GPU: `settle` adds it up."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            yield
            end.record(stream)
            with self._lock:
                self._untold.append((start, end, smoothed))
        else:
            began = time.perf_counter()
            yield
            self._add(time.perf_counter() - began, smoothed)

    def settle(self) -> None:
        """Wait until a GPU has computed all that was measured, and add it up."""
        with self._lock:
            untold, self._untold = self._untold, []
            for start, end, smoothed in untold:
                end.synchronize()
                self._add(start.elapsed_time(end) / 1000, smoothed)

    def _add(self, taken_s: float, smoothed: Smoothed | None) -> None:
        self._total_s += taken_s
        if smoothed is not None:
            smoothed.add(taken_s)


class StoredBytes:
    """Measures what the first forward of a module keeps for its backward.

    Autograd shows every tensor that it saves. Each storage counts once, those of parameters and
    buffers not at all; weights that autocast converts anew for every forward do count.
    measured: bytes of the first forward; 0 before it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sizes: dict[int, int] = {}  # by storage: all that are counted live
        self.measured = 0

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Count what autograd saves inside and what is added, if this is the first forward."""
        if self.measured:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield
        # Now, because weights may have moved into a flat vector since this object was made.
        for tensor in chain(self._module.parameters(), self._module.buffers()):
            self._sizes.pop(id(tensor.untyped_storage()), None)
        self.measured = sum(self._sizes.values())

    def add(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor that stays alive; gives back just that tensor."""
        if not self.measured:
            storage = tensor.untyped_storage()
            self._sizes[id(storage)] = storage.nbytes()
        return tensor


class StageOptimizer(Protocol):
    """What a stage needs of the optimizer of its parameters.

    device: where the stage computes. refresh: to be called before the first forward of an inner
    step and before an evaluation between two of them, since weights may have changed. loss_scale:
    of fp16, what the last stage multiplies its loss by, else 1.0; `take_loss_scale` sets the
    head's, and `restore_loss_scale` takes back what it was lowered for steps that were skipped
    since one was taken. autocast: the context in which forward passes run. scale: the loss to call
    `backward` on. squared_norm: of this step's gradients, which are all there now. step: takes a
    step with gradients times `factor` unless that is not finite, and clears them; whether it was
    taken. drop: clears them.
    """

    @property
    def device(self) -> torch.device: ...
    def refresh(self) -> None: ...
    @property
    def loss_scale(self) -> float: ...
    def take_loss_scale(self, scale: float) -> None: ...
    def restore_loss_scale(self) -> None: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def squared_norm(self) -> float: ...
    def step(self, factor: float, learning_rate: float) -> bool: ...
    def drop(self) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Forwarded:
    """A microbatch between its forward and its backward.

    inputs: ids int64 [b, t], or the leaf [b, t, d] that collects the gradient. output: hidden
    states [b, t, d] with their graph. auxiliary: see `StageModule.hidden_states`.
    """

    inputs: Tensor
    output: Tensor
    auxiliary: Tensor | None


class StagePasses:
    """Runs a stage; gradients add up in its parameters.

    recompute: each layer keeps only its input, and runs again before its backward. document_end:
    the token behind each document, where tokens see those of their own alone. logits_at_once: of
    how many the loss is computed at a time, by default what suits the device; at least of
    `_LEAST_TOKENS` tokens.

    watch: seconds spent in here, and wherever else its owner lets it run. forward_s, backward_s:
    smoothed seconds of one, once `watch` has settled; a `forward_backward` counts as a backward.
    stored: bytes that the first forward kept.
    """

    def __init__(
        self,
        stage: StageModule,
        optimizer: StageOptimizer,
        *,
        recompute: bool,
        document_end: int | None = None,
        logits_at_once: int | None = None,
    ) -> None:
        if recompute:
            stage.recompute_layers()
        self._stage = stage
        self._optimizer = optimizer
        self._device = optimizer.device
        self._document_end = document_end
        suits = LOGITS_AT_ONCE if self._device.type == "cpu" else GPU_LOGITS_AT_ONCE
        self._logits_at_once = logits_at_once or suits
        self.watch = Stopwatch(self._device)
        self.forward_s = Smoothed()
        self.backward_s = Smoothed()
        self.stored = StoredBytes(stage)

    def forward(self, inputs: Tensor | None, windows: Tensor) -> tuple[Tensor, Forwarded]:
        """The hidden states [b, t, d] to send on, and what `backward` needs.

        inputs: hidden states [b, t, d]; None on the first stage. windows: token ids int64
        [b, t + 1].
        """
        with self.watch.running(self.forward_s):
            leaf, positions = self._leaf(inputs, windows), self._positions(windows)
            with self.stored.measuring(), self._optimizer.autocast():
                output, auxiliary = self._stage.hidden_states(leaf, positions)
                for kept in (leaf, output):
                    self.stored.add(kept)
        return output.detach(), Forwarded(inputs=leaf, output=output, auxiliary=auxiliary)

    def backward(self, forwarded: Forwarded, gradient: Tensor, share: float) -> Tensor | None:
        """From the gradient [b, t, d] of the output, and the stage's auxiliary loss over `share`,
        to the gradient of the input; None for token ids.
        """
        with self.watch.running(self.backward_s):
            self._backward(forwarded, _moved(gradient, self._device), share)
        return forwarded.inputs.grad

    def forward_backward(
        self, inputs: Tensor | None, windows: Tensor, share: float
    ) -> tuple[Tensor, Tensor | None]:
        """On the last stage: the mean loss over `share`, and its gradient for the input [b, t, d].

        Arguments as for `forward`. The loss is a scalar in nats, fp32, without the auxiliary loss,
        which is in the gradient; that is None for token ids, and scaled as `StageOptimizer.scale`
        does.
        """
        with self.watch.running(self.backward_s):
            leaf, positions = self._leaf(inputs, windows), self._positions(windows)
            with self.stored.measuring(), self._optimizer.autocast():
                hidden, auxiliary = self._stage.hidden_states(leaf, positions)
                self.stored.add(leaf)
            total = torch.zeros((), device=self._device)
            gradients: list[Tensor] = []
            for tokens, targets in self._pieces(hidden.detach(), windows):
                tokens.requires_grad_()
                loss = self._summed_loss(tokens, targets) / windows[:, 1:].numel() / share
                self._optimizer.scale(loss).backward()  # pyright: ignore[reportUnknownMemberType]
                total += loss.detach()
                gradients.append(cast(Tensor, tokens.grad))
            forwarded = Forwarded(inputs=leaf, output=hidden, auxiliary=auxiliary)
            self._backward(forwarded, torch.cat(gradients, dim=1).view_as(hidden), share)
        return total, leaf.grad

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | None, windows: Tensor) -> Tensor | float:
        """Run as in training, but without dropout, and keep nothing: hidden states, or on the last
        stage the loss.

        That is the sum over b * t tokens, in nats. Arguments as for `forward`.
        """
        with self.watch.running(), _evaluating(self._stage):
            leaf, positions = self._leaf(inputs, windows), self._positions(windows)
            with self._optimizer.autocast():
                hidden, _ = self._stage.hidden_states(leaf, positions)
            if not self._stage.is_last:
                return hidden
            total = torch.zeros((), device=self._device)
            for tokens, targets in self._pieces(hidden, windows):
                total += self._summed_loss(tokens, targets)
            return float(total)

    @torch.no_grad()
    def next_logits(self, ids: Tensor) -> Tensor:
        """After ids int64 [1, t], of a whole model between steps: logits [v], fp32, on the CPU."""
        self._optimizer.refresh()
        with self.watch.running(), _evaluating(self._stage), self._optimizer.autocast():
            hidden, _ = self._stage.hidden_states(_moved(ids, self._device))
            return self._stage.logits(hidden[:, -1:])[0, -1].float().cpu()

    def _backward(self, forwarded: Forwarded, gradient: Tensor, share: float) -> None:
        roots, gradients = [forwarded.output], [gradient, None]
        if forwarded.auxiliary is not None:
            roots.append(self._optimizer.scale(forwarded.auxiliary / share))
        torch.autograd.backward(roots, gradients[: len(roots)])

    def _leaf(self, inputs: Tensor | None, windows: Tensor) -> Tensor:
        """Ids, or a leaf of autograd that shares no gradient with what was given."""
        if inputs is None:
            return _moved(windows[:, :-1], self._device)
        return _moved(inputs.detach(), self._device).float().requires_grad_()

    def _positions(self, windows: Tensor) -> Tensor | None:
        """Where each id [b, t] stands in its document; None where documents are not kept apart."""
        if self._document_end is None:
            return None
        ids = windows[:, :-1]
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = torch.zeros_like(ids)  # of documents: where, else 0
        begins[:, 1:] = places[:, 1:] * (ids[:, :-1] == self._document_end)
        return _moved(places - begins.cummax(dim=1).values, self._device)

    def _pieces(self, hidden: Tensor, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states [1, n, d] of some tokens at a time, and what follows these, int64 [n]."""
        targets = _moved(windows[:, 1:].reshape(-1), self._device)
        at_once = max(_LEAST_TOKENS, self._logits_at_once // self._stage.vocabulary)
        tokens = hidden.reshape(1, len(targets), -1)
        for start in range(0, len(targets), at_once):
            piece = slice(start, start + at_once)
            yield tokens[:, piece], targets[piece]

    def _summed_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._optimizer.autocast():
            logits = self._stage.logits(tokens)
        return summed_loss(logits, targets)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; to a GPU by way of pinned memory, so that no copy holds up what computes."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


@contextmanager
def _evaluating(stage: nn.Module) -> Generator[None]:
    """For a while nothing is left to chance (no dropout), as it is in training."""
    training = stage.training
    stage.eval()
    try:
        yield
    finally:
        stage.train(training)


# Microbatches wait for each other, because forwards and backwards take different times: in
# simulated chains a window without margin leaves stages idle for up to 15 % of the time.
_MARGIN = 1.5


def window_size(
    *,
    stages: int,
    microbatches: int,
    round_trip_s: float,
    compute_s: float,
    limit: int,
) -> int:
    """How many microbatches the head keeps in flight in an inner step of so many.

    Half as many again as the slowest stage finishes (one in `compute_s`) while one travels through
    all stages and back; at least one for every stage, and twice that while nothing is measured.

    round_trip_s: what one microbatch spends on links, down the whole chain and back up, transfers
    included. compute_s: of one forward plus one backward on the slowest stage; 0 while unknown.
    limit: what memory or the manifest allows; goes before all the rest, but one is always let
    through.
    """
    if compute_s <= 0:
        wanted = 2 * stages
    else:
        # Little's law: in flight = rate * time = (stages * compute_s + round_trip_s) / compute_s
        on_links = min(round_trip_s / compute_s, microbatches)
        wanted = math.ceil(_MARGIN * (stages + on_links))
    return max(1, min(wanted, microbatches, limit))


@dataclass(frozen=True, kw_only=True, eq=False)
class Produced:
    """What `run_one` computed.

    kind: "forward" goes to the lower neighbour, "gradient" to the upper one; "backward" was the
    first stage's and goes nowhere. tensor: hidden states or their gradient [b, t, d] on the stage's
    device; None: not finite, or "backward". windows: of a "forward", as they were fed, int64
    [b, t + 1].
    """

    kind: Literal["forward", "gradient", "backward"]
    microbatch: int
    tensor: Tensor | None = None
    windows: Tensor | None = None


class StageWorker:
    """Computes inner steps of one stage, one piece at a time.

    optimizer: of the stage's parameters. microbatches: of an inner step; their losses weigh the
    same. recompute, document_end: see `StagePasses`.
    """

    def __init__(
        self,
        stage: StageModule,
        optimizer: StageOptimizer,
        *,
        microbatches: int,
        recompute: bool = False,
        document_end: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._microbatches = microbatches
        self._is_first = stage.is_first
        self._is_last = stage.is_last
        self._passes = StagePasses(stage, optimizer, recompute=recompute, document_end=document_end)
        self.next_logits = self._passes.next_logits
        self._forget()

    def restart(self) -> None:
        """Drop everything in flight and all gradients: the inner step begins anew."""
        self.optimizer.drop()
        self._forget()

    def feed(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> None:
        """Take the input of forward number `microbatch`, counted from 0 in this inner step.

        inputs: hidden states [b, t, d], None if they are not finite; None on the first stage.
        windows: token ids int64 [b, t + 1]. Raises FrameRefused ("order") where there is no such
        microbatch, or it was there before.
        """
        if not 0 <= microbatch < self._microbatches:
            raise FrameRefused("order", f"microbatch {microbatch} of {self._microbatches}")
        if microbatch in self._fed:
            raise FrameRefused("order", f"microbatch {microbatch} came twice")
        if self.idle:
            self.optimizer.refresh()
        self._fed.add(microbatch)
        self._inputs.append((microbatch, inputs, windows))

    def feed_gradient(self, microbatch: int, gradient: Tensor | None) -> None:
        """Take the gradient [b, t, d] of what was sent down, None if it is not finite.

        Raises FrameRefused ("order") where that microbatch waits for no gradient.
        """
        if microbatch not in self._awaited:
            raise FrameRefused("order", f"no gradient is due for microbatch {microbatch}")
        self._gradients.append((microbatch, self._awaited.pop(microbatch), gradient))

    def run_one(self, most: int = sys.maxsize) -> Produced | None:
        """Run a backward or a forward, on the last stage both; None if none can run now, or `most`
        microbatches wait for their gradients.

        What comes out is not checked: a caller that finds it not finite sends None in its place.
        """
        if self._gradients:
            return self._run_backward(*self._gradients.popleft())
        if self._inputs and len(self._awaited) < most:
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
        self._passes.watch.settle()
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
        total = torch.zeros((), device=self.optimizer.device)
        for microbatch in sorted(self._losses):
            total += self._losses[microbatch]
        return float(total)

    def squared_norm(self) -> float:
        """Squared norm of the gradients of a finished step; not a number if anything was not."""
        with self._passes.watch.running():
            return math.nan if self._poisoned else self.optimizer.squared_norm()

    def go(self, factor: float, learning_rate: float) -> bool:
        """End the inner step: step the optimizer; returns whether that was taken or skipped.

        factor: what gradients are multiplied by; not a number to skip the step. Raises FrameRefused
        ("order") where the step is not finished here.
        """
        if not self.finished:
            done = f"{self._backwards} of {self._microbatches} microbatches"
            raise FrameRefused("order", f"go after {done}")
        with self._passes.watch.running():
            taken = self.optimizer.step(math.nan if self._poisoned else factor, learning_rate)
        self._forget()
        return taken

    def refresh(self) -> None:
        """To be called before evaluations: between inner steps the weights may have changed."""
        if self.idle:
            self.optimizer.refresh()

    def evaluate(self, inputs: Tensor | None, windows: Tensor) -> Tensor | float:
        """Run the stage on held-out `windows` [b, t + 1], keeping nothing.

        `inputs` as in `feed`. Returns hidden states [b, t, d]; on the last stage the cross-entropy
        in nats, summed over the b * t tokens. Not a number on any stage whose inputs are not
        finite: no stage below can say more.
        """
        if inputs is None and not self._is_first:
            return math.nan
        return self._passes.evaluate(inputs, windows)

    def _forget(self) -> None:
        self._fed: set[int] = set()
        self._inputs: deque[tuple[int, Tensor | None, Tensor]] = deque()
        self._awaited: dict[int, Forwarded | None] = {}
        self._gradients: deque[tuple[int, Forwarded | None, Tensor | None]] = deque()
        self._losses: dict[int, Tensor] = {}
        self._backwards = 0
        self._poisoned = False

    def _run_forward(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> Produced:
        if inputs is None and not self._is_first:
            self._poisoned, output, forwarded = True, None, None
        else:
            output, forwarded = self._passes.forward(inputs, windows)
        self._awaited[microbatch] = forwarded
        return Produced(kind="forward", microbatch=microbatch, tensor=output, windows=windows)

    def _run_backward(
        self, microbatch: int, forwarded: Forwarded | None, gradient: Tensor | None
    ) -> Produced:
        if forwarded is None or gradient is None:
            self._poisoned, upward = True, None
        else:
            upward = self._passes.backward(forwarded, gradient, self._microbatches)
        return self._upward(microbatch, upward)

    def _run_both(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> Produced:
        if inputs is None and not self._is_first:
            self._poisoned, loss, gradient = True, torch.tensor(math.nan), None
        else:
            share = self._microbatches
            loss, gradient = self._passes.forward_backward(inputs, windows, share)
        self._losses[microbatch] = loss
        return self._upward(microbatch, gradient)

    def _upward(self, microbatch: int, gradient: Tensor | None) -> Produced:
        self._backwards += 1
        kind = "backward" if self._is_first else "gradient"
        return Produced(kind=kind, microbatch=microbatch, tensor=gradient)
