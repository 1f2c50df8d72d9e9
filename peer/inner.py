"""Inner steps: AdamW, or Muon beside it, on one stage, with the clipping and the learning rate
decided for the whole replica.

A stage accumulates gradients, reports their squared norm, and steps when it is told the clip
factor and the learning rate. What is not finite never reaches the weights: a loss or a norm that is
infinite or not a number makes the clip factor not a number, and with such a factor every stage
drops its gradients, counts a skipped step, and leaves weights and moments be.

fp16 scales the loss (`torch.amp.GradScaler`) so that small gradients survive; they are unscaled
before anything looks at them. Every peer of such a run has a scale, also those that compute in
fp32, and all stages of a replica use their head's, which travels with the forward frames.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.inner_parts import inner_parts

Precision = Literal["fp32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def learning_rate(spec: InnerSpec, end_tokens: int, tokens: int) -> float:
    """Return the learning rate of an inner step after which the run has trained on `tokens` tokens.

    Linear from 0 over `warmup_tokens`, then half a cosine down to `final_fraction` of the peak at
    `end_tokens`, and that from there on.
    """
    if tokens < spec.warmup_tokens:
        return spec.learning_rate * tokens / spec.warmup_tokens
    if tokens >= end_tokens:
        return spec.learning_rate * spec.final_fraction
    progress = (tokens - spec.warmup_tokens) / (end_tokens - spec.warmup_tokens)
    above_final = (1 - spec.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (spec.final_fraction + above_final)


def clip_factor(squared_norm: float, clip_norm: float) -> float:
    """Return what gradients of this squared norm are to be multiplied by, to clip them.

    Not a number if the norm is not finite, which makes every stage skip the step.

    For a model in one piece this is to the last bit what `torch.nn.utils.clip_grad_norm_` computes.
    """
    if not math.isfinite(squared_norm):
        return math.nan
    norm = torch.tensor(math.sqrt(squared_norm), dtype=torch.float32)
    return float(torch.clamp(clip_norm / (norm + 1e-6), max=1.0))


@dataclass(frozen=True, kw_only=True)
class InnerState:
    """An inner optimizer's state: named tensors for a safetensors file, and JSON-able values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class InnerOptimizer:
    """AdamW over one stage's parameters, without weight decay on vectors (norms and biases).

    Where the manifest says so, Muon steps the 2-D weights of the layers (`inner_parts`).

    Args:
        named_parameters: the stage's parameters, fp32, all on one device.
        spec: the manifest's inner section.
        precision: of forward and backward; by default the manifest's on a GPU and fp32 on a CPU.

    Attributes:
        steps: inner steps taken.
        skipped: inner steps skipped because something was not finite.

    Raises:
        InvalidInput: the manifest's optimizer is one that this torch has not.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        spec: InnerSpec,
        *,
        precision: Precision | None = None,
    ):
        named = list(named_parameters)
        self.spec = spec
        self.device = named[0][1].device
        self.precision = precision or (spec.precision if self.device.type == "cuda" else "fp32")
        self.steps = 0
        self.skipped = 0
        self._parameters = [parameter for _, parameter in named]
        self._parts = inner_parts(named, spec)
        self._scaler: torch.amp.GradScaler | None = None
        if "fp16" in (self.precision, spec.precision):
            self._scaler = torch.amp.GradScaler(self.device.type)
            # The scale exists from its first use on, and only the last stage scales a loss.
            self._scaler.scale(torch.zeros((), device=self.device))
        self._squared_norm: float | None = None

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies a loss by now; 1.0 unless the run's precision is fp16."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def take_loss_scale(self, scale: float) -> None:
        """Use the loss scale of the replica's head; without effect unless the precision is fp16.

        To be called before the first backward of a step: gradients of two scales do not add up.

        Raises:
            ValueError: it is not a positive finite number of fp32.
        """
        stored = float(torch.tensor(scale, dtype=torch.float32))
        if not 0 < stored < math.inf:
            raise ValueError(f"a loss scale must be positive and finite in fp32, not {scale}")
        if self._scaler is not None and stored != self.loss_scale:
            self._scaler.update(stored)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        dtype = _AUTOCAST.get(self.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def squared_norm(self) -> float:
        """Return the squared norm of the gradients of this step, which are all there now."""
        if self._squared_norm is None:
            if self._scaler is not None:
                for part in self._parts:
                    self._scaler.unscale_(part.optimizer)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self._squared_norm = float(nn.utils.get_total_norm(gradients)) ** 2
        return self._squared_norm

    def step(self, factor: float, learning_rate: float) -> bool:
        """Take an inner step with gradients multiplied by `factor`, and clear them.

        Returns whether the step was taken: it is skipped if the factor or this stage's own
        squared norm is not finite.
        """
        taken = math.isfinite(self.squared_norm()) and math.isfinite(factor)
        if taken:
            self._step(factor, learning_rate)
            self.steps += 1
        else:
            self.skipped += 1
            self._back_off()
        self._clear()
        return taken

    def drop(self) -> None:
        """Clear the gradients as if none had been accumulated, without counting a step."""
        if self._scaler is not None:
            self._scaler.update(self.loss_scale)  # forgets that they were unscaled
        self._clear()

    def reset(self) -> None:
        """Forget the moments, and the gradients with them: the next step is like a first one."""
        for part in self._parts:
            part.optimizer.state.clear()
        self.drop()

    def state_dict(self) -> InnerState:
        """Return the state; its tensors are the live ones, which the next step changes."""
        tensors = {name: tensor for part in self._parts for name, tensor in part.tensors().items()}
        scaler = None if self._scaler is None else self._scaler.state_dict()
        values = {"steps": self.steps, "skipped": self.skipped, "scaler": scaler}
        return InnerState(tensors=tensors, values=values)

    def load_state_dict(self, state: InnerState) -> None:
        """Copy a state of the same parameters into this optimizer.

        Raises:
            InvalidInput: it belongs to other parameters; nothing has changed then.
        """
        shapes = {name: shape for part in self._parts for name, shape in part.shapes().items()}
        for label, tensor in state.tensors.items():
            if tensor.shape != shapes.get(label):
                raise InvalidInput(
                    f"the saved inner optimizer holds {label} of shape {tuple(tensor.shape)}, "
                    "which this stage has not; remove the snapshot to start without it"
                )
        for part in self._parts:
            part.load(state.tensors)
        self.steps, self.skipped = int(state.values["steps"]), int(state.values["skipped"])
        if self._scaler is not None and state.values["scaler"] is not None:
            self._scaler.load_state_dict(state.values["scaler"])

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._squared_norm = None

    def _step(self, factor: float, learning_rate: float) -> None:
        if factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for part in self._parts:
            part.set_learning_rate(learning_rate)
            if self._scaler is None:
                part.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            elif part.has_gradients:  # a scaler refuses to step without
                self._scaler.step(part.optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def _back_off(self) -> None:
        """Lower the loss scale as GradScaler does, also where the overflow was on another stage."""
        if self._scaler is not None:
            scale = self._scaler.get_scale() * self._scaler.get_backoff_factor()
            self._scaler.update(scale)
            self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": 0})
