"""Which of torch's optimizers steps which parameters of a stage, and their state by name.

AdamW steps everything, or, where the run chose Muon, all that Muon is not for. Muon
(https://kellerjordan.github.io/posts/muon/) steps matrices between hidden states only: the 2-D
weights of the layers. A stage's parameters have the names that they have in the whole model, and in
every family that can be cut the layers are a list inside the decoder, so theirs are called
`model.layers.7.mlp.up_proj.weight` or `gpt_neox.layers.7.attention.dense.weight`; embeddings, final
norm and head are outside that list. Stacked weights of experts (3-D) and a layer's odd tensors
(`A_log`, biases of experts) stay with AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec

# What torch keeps of a parameter.
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
_MUON_STATE = ("momentum_buffer",)

# Decoder, list of layers, number of the layer, and a weight in it.
_LAYER_WEIGHT = re.compile(r"[^.]+\.[^.]+\.\d+\.(.+\.)?weight")

Named = list[tuple[str, nn.Parameter]]


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
    if rest:
        parts.append(_adamw(rest, spec))
    return parts


def _adamw(named: Named, spec: InnerSpec) -> InnerPart:
    """Without weight decay on vectors (norms and biases)."""
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    vectors = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    groups = [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in ((matrices, spec.weight_decay), (vectors, 0.0))
        if group
    ]
    adamw = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps)
    names = tuple(name for name, _ in matrices + vectors)
    return InnerPart(adamw, names, _ADAMW_STATE, relative_rate=1.0)


def _muon(muon: type[torch.optim.Optimizer], named: Named, spec: InnerSpec) -> InnerPart:
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
