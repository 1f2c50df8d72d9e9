"""Inner steps: AdamW, or Muon beside it, on one stage, with the clipping and the learning rate
decided for the whole replica.

A stage accumulates gradients, reports their squared norm, and steps when it is told the clip
factor and the learning rate. What is not finite never reaches the weights: a loss or a norm that is
infinite or not a number makes the clip factor not a number, and with such a factor every stage
drops its gradients, and leaves weights and moments be.

fp16 scales the loss (`torch.amp.GradScaler`) so that small gradients survive; they are unscaled
before anything looks at them. Every peer of such a run has a scale, also those that compute in
fp32, and all stages of a replica use their head's, which travels with the forward frames.

`inner_parts` says which of torch's optimizers steps which parameters of a stage.

AdamW steps everything, or, where the run chose Muon, all that Muon is not for. Muon
(https://kellerjordan.github.io/posts/muon/) steps matrices between hidden states only: the 2-D
weights of the layers. A stage's parameters have the names that they have in the whole model, and in
every family that can be cut the layers are a list inside the decoder, so theirs are called
`model.layers.7.mlp.up_proj.weight` or `model.decoder.layers.7.fc1.weight`; embeddings, final norm
and head are outside that list. Stacked weights of experts (3-D) and a layer's odd tensors
(`A_log`, biases of experts) stay with AdamW.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.unsent_progress import norm

logger = logging.getLogger(__name__)

LEAST_LOSS_SCALE = 1.0
MOST_LOSS_SCALE = 2.0**24  # a backward in fp16 has overflowed long before
SUMMED_VALUES = 1 << 20  # that torch sums up well on a CPU; of 2^28 a norm is 4 % too small

# What torch keeps of a parameter.
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
_MUON_STATE = ("momentum_buffer",)

# Decoder (two names in opt), list of layers, number of the layer, and a weight in it.
_LAYER_WEIGHT = re.compile(r"([^.]+\.){2,3}\d+\.(.+\.)?weight")

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class InnerPart:
    """One of torch's optimizers over some parameters of a stage.

    names: of its parameters, in the order of torch's state.
    state_names: the tensors that it keeps of each of them.
    relative_rate: its learning rate over that of AdamW.
    """

    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]
    state_names: tuple[str, ...]
    relative_rate: float

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use the learning rate that goes with this one of AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * self.relative_rate

    @property
    def has_gradients(self) -> bool:
        """Whether there is anything to step."""
        return any(parameter.grad is not None for parameter in self._parameters())

    @property
    def untaken_bytes(self) -> int:
        """What its state is still to take: torch makes it in the first step."""
        vectors = sum(name != "step" for name in self.state_names)
        return vectors * sum(
            parameter.nbytes
            for parameter in self._parameters()
            if not self.optimizer.state.get(parameter)
        )

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors, the live ones."""
        state: dict[int, dict[str, Tensor]] = self.optimizer.state_dict()["state"]
        return {
            f"{key}/{self.names[index]}": tensor
            for index, kept in state.items()
            for key, tensor in kept.items()
        }

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor that the state can hold."""
        return {
            f"{key}/{name}": torch.Size() if key == "step" else parameter.shape
            for name, parameter in zip(self.names, self._parameters(), strict=True)
            for key in self.state_names
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the state from tensors named as in `tensors`, others among them."""
        state = {
            index: {key: tensors[f"{key}/{name}"].clone() for key in self.state_names}
            for index, name in enumerate(self.names)
            if f"{self.state_names[0]}/{name}" in tensors
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def is_for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether this parameter of a stage is one that Muon steps."""
    return parameter.ndim == 2 and _LAYER_WEIGHT.fullmatch(name) is not None


def inner_parts(named: Iterable[tuple[str, nn.Parameter]], spec: InnerSpec) -> list[InnerPart]:
    """The optimizers of a stage with these parameters; AdamW's is the last.

    Raises:
        InvalidInput: the run uses Muon and this torch has none.
    """
    rest, parts = list(named), list[InnerPart]()
    if spec.optimizer == "muon":
        muon = _muon_class()
        hidden = [item for item in rest if is_for_muon(*item)]
        rest = [item for item in rest if not is_for_muon(*item)]
        if hidden:
            parts.append(_muon(muon, hidden, spec))
        else:
            logger.warning(
                "inner.optimizer is muon, and no weight here has the name of a matrix in a layer: "
                "AdamW steps them all"
            )
    if rest:
        parts.append(_adamw(rest, spec))
    return parts


def _adamw(named: NamedParameters, spec: InnerSpec) -> InnerPart:
    """Without weight decay on vectors (norms and biases)."""
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    vectors = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    groups = [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in ((matrices, spec.weight_decay), (vectors, 0.0))
        if group
    ]
    adamw = torch.optim.AdamW(
        groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=True
    )
    names = tuple(name for name, _ in matrices + vectors)
    return InnerPart(adamw, names, _ADAMW_STATE, relative_rate=1.0)


def _muon(muon: type[torch.optim.Optimizer], named: NamedParameters, spec: InnerSpec) -> InnerPart:
    options: dict[str, Any] = {
        "lr": spec.muon_learning_rate,
        "momentum": spec.muon_momentum,
        "weight_decay": spec.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    optimizer = muon([parameter for _, parameter in named], **options)
    relative_rate = spec.muon_learning_rate / spec.learning_rate
    return InnerPart(optimizer, tuple(name for name, _ in named), _MUON_STATE, relative_rate)


def _muon_class() -> type[torch.optim.Optimizer]:
    found: type[torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)
    if found is None:
        raise InvalidInput(
            f"inner.optimizer is muon, which torch {torch.__version__} does not have; "
            "install torch 2.9 or newer"
        )
    return found


Precision = Literal["fp32", "bf16", "fp16"]

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


BF16_CAPABILITY = 8  # of CUDA; torch emulates bf16 on older GPUs, slowly


def usable_precision(wanted: Precision, device: torch.device) -> Precision:
    """The run's precision where the device computes in it; a CPU, and bf16 on old GPUs: fp32."""
    if device.type != "cuda":
        return "fp32"
    if wanted == "bf16" and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < BF16_CAPABILITY:
            logger.warning("%s (%d.%d) has no bf16: computing in fp32", device, major, minor)
            return "fp32"
    return wanted


def learning_rate(spec: InnerSpec, end_tokens: int, tokens: int) -> float:
    """Return the learning rate of an inner step after which the run has trained on `tokens` tokens.

    Linear from 0 over `warmup_tokens`, then as `spec.schedule` says down to `final_fraction` of the
    peak at `end_tokens`, and that from there on.
    """
    if tokens < spec.warmup_tokens:
        return spec.learning_rate * tokens / spec.warmup_tokens
    if spec.schedule == "constant":
        return spec.learning_rate
    left = 0.0  # of what is above the end's rate
    if tokens < end_tokens:
        progress = (tokens - spec.warmup_tokens) / (end_tokens - spec.warmup_tokens)
        match spec.schedule:
            case "cosine":
                left = (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                left = 1 - progress
            case "wsd":
                left = min(1.0, (1 - tokens / end_tokens) / spec.decay_share)
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * left)


def clip_factor(squared_norm: float, clip_norm: float) -> float:
    """Return what gradients of this squared norm are to be multiplied by, to clip them.

    Not a number if the norm is not finite, which makes every stage skip the step.

    For a model in one piece, with no tensor of more than `SUMMED_VALUES` on a CPU, this is to the
    last bit what `torch.nn.utils.clip_grad_norm_` computes.
    """
    if not math.isfinite(squared_norm):
        return math.nan
    length = torch.tensor(math.sqrt(squared_norm), dtype=torch.float32)
    return float(torch.clamp(clip_norm / (length + 1e-6), max=1.0))


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

    Raises:
        InvalidInput: the manifest's optimizer is one that this torch has not.
        ValueError: a parameter is not contiguous.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        spec: InnerSpec,
        *,
        precision: Precision | None = None,
    ):
        named = list(named_parameters)
        if not all(parameter.is_contiguous() for _, parameter in named):
            raise ValueError("the fused AdamW would step strided parameters in the wrong places")
        self.spec = spec
        self.device = named[0][1].device
        self.precision = precision or usable_precision(spec.precision, self.device)
        self.steps = 0
        self._parameters = [parameter for _, parameter in named]
        self._parts = inner_parts(named, spec)
        self._scaler: torch.amp.GradScaler | None = None
        if "fp16" in (self.precision, spec.precision):
            self._scaler = torch.amp.GradScaler(self.device.type)
            # The scale exists from its first use on, and only the last stage scales a loss.
            self._scaler.scale(torch.zeros((), device=self.device))
        self._squared_norm: float | None = None
        self._loss_scale: float | None = None  # asking the scaler waits for the GPU
        self._scale_before: float | None = None  # the steps that were skipped last

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies a loss by now; 1.0 unless the run's precision is fp16."""
        if self._loss_scale is None:
            self._loss_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        return self._loss_scale

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
            self._loss_scale = stored

    def restore_loss_scale(self) -> None:
        """Put it back to what it was before the steps that were skipped last, for whose fault it
        was lowered in vain.
        """
        if self._scaler is not None and self._scale_before is not None:
            self._scaler.update(self._scale_before)
            self._scale_before = self._loss_scale = None

    def untaken_bytes(self, device: torch.device) -> int:
        """What an inner step is to take on a device beside weights and activations, and that is
        free now: gradients, and before the first step the optimizer's state.
        """
        if device.type != self._parameters[0].device.type:
            return 0
        gradients = sum(each.nbytes for each in self._parameters if each.grad is None)
        return gradients + sum(part.untaken_bytes for part in self._parts)

    def refresh(self) -> None:
        """The weights may have changed since the last forward: nothing to do where they are those
        that the stage computes with.
        """

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        dtype = AUTOCAST.get(self.precision)
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
            # of these torch's sum on a CPU leaves out what is small beside it
            large = [g for g in gradients if g.device.type == "cpu" and g.numel() > SUMMED_VALUES]
            small = [g for g in gradients if g.device.type != "cpu" or g.numel() <= SUMMED_VALUES]
            self._squared_norm = float(nn.utils.get_total_norm(small)) ** 2
            self._squared_norm += sum(norm(gradient.reshape(-1)) ** 2 for gradient in large)
        return self._squared_norm

    def step(self, factor: float, learning_rate: float) -> bool:
        """Take an inner step with gradients multiplied by `factor`, and clear them.

        learning_rate: as the replica's head states it; no more than the run's largest is taken.
        Returns whether the step was taken: it is skipped if the factor or this stage's own
        squared norm is not finite.
        """
        taken = math.isfinite(self.squared_norm()) and math.isfinite(factor)
        if taken:
            self._step(factor, min(learning_rate, self.spec.learning_rate))
            self.steps += 1
        else:
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
        values = {"steps": self.steps, "scaler": scaler}
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
        self.steps = int(state.values["steps"])
        if self._scaler is not None and state.values["scaler"] is not None:
            self._scaler.load_state_dict(state.values["scaler"])
            self._scaler.update(max(self._scaler.get_scale(), LEAST_LOSS_SCALE))
            self._loss_scale = None

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
            self._scale_before = None
            self._scaler.update()
            # where all compute in fp32 nothing overflows, and it would double for ever
            if self.device.type == "cpu" and self._scaler.get_scale() > MOST_LOSS_SCALE:
                self._scaler.update(MOST_LOSS_SCALE)
            self._loss_scale = None

    def _back_off(self) -> None:
        """Lower the loss scale as GradScaler does, also where the overflow was on another stage."""
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            if self._scale_before is None:
                self._scale_before = scale
            # with a lower one gradients vanish that fp16 could hold, and no step looks wrong
            self._scaler.update(max(scale * self._scaler.get_backoff_factor(), LEAST_LOSS_SCALE))
            self._loss_scale = None
            self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": 0})
