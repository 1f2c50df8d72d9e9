"""Many replicas of one small model, trained side by side in one vectorised inner step.

Why: a step of a model this small is mostly Python. Sixteen replicas that step at once take about
half the time of sixteen steps, and every rule that is compared gets the same arithmetic. The stage,
the loss, the clipping and the inner optimizer are the product's own; AdamW sees tensors of all
replicas stacked, which is the same since it works value by value.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.data import validation_loss
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor, is_for_muon
from dilocox.pipeline.stage import build_stage, flatten_parameters
from dilocox.pipeline.stage_worker import next_token_loss

# scaled dot product attention has no vectorised kernel for CPUs and says so; it is as fast without
warnings.filterwarnings("ignore", message=".*have not yet implemented the batching rule.*")


class Fleet:
    """Replicas of one model; the rows of `weights` [replicas, layout.numel] are theirs."""

    def __init__(self, model: dict[str, Any], seeds: Sequence[int], inner: InnerSpec):
        """A replica for each of `seeds`, with the weights that a run of this seed starts with."""
        self.stage = build_stage(model, 0, 1, seeds[0])
        parameters = [(name, tuple(p.shape)) for name, p in self.stage.named_parameters()]
        self.layout = FlatLayout.of(parameters)
        first = {
            seed: flatten_parameters(build_stage(model, 0, 1, seed), self.layout)
            for seed in dict.fromkeys(seeds)
        }
        self.weights = torch.stack([first[seed] for seed in seeds])
        self._views = {
            piece.name: self.weights[:, piece.start : piece.start + piece.numel].view(
                len(seeds), *piece.shape
            )
            for piece in self.layout.slices
        }
        self._gradients = vmap(grad_and_value(self._loss))
        self._clip_norm = inner.clip_norm
        self._optimizers = _optimizers(self._views, inner)

    def step(self, windows: Tensor, rate: float, together: Sequence[slice] = ()) -> Tensor:
        """One inner step of all replicas; their training losses [replicas].

        windows: int64 [replicas, b, t + 1]. together: replicas that average their gradients.
        """
        gradients, losses = self._gradients(self._views, windows)
        for group in together:
            for gradient in gradients.values():
                gradient[group] = gradient[group].mean(0, keepdim=True)
        squared = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)
        factors = torch.tensor([clip_factor(norm, self._clip_norm) for norm in squared.tolist()])
        for gradient in gradients.values():
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
        for optimizer in self._optimizers:
            optimizer.step(gradients, rate)
        return losses

    def fade_momentum(self, rows: slice, share: float) -> None:
        """Leave this share of Muon's momentum to these replicas."""
        for optimizer in self._optimizers:
            optimizer.fade_momentum(rows, share)

    @torch.no_grad()
    def validation_loss(self, weights: Tensor, windows: Tensor) -> float:
        """Mean nats a token of weights [layout.numel] on windows int64 [n, t + 1]."""
        tensors = self.layout.view(weights)
        return validation_loss(
            lambda ids: functional_call(self.stage, tensors, (ids,)),
            windows,
        )

    def _loss(self, tensors: dict[str, Tensor], windows: Tensor) -> Tensor:
        logits = functional_call(self.stage, tensors, (windows[:, :-1],))
        return next_token_loss(logits, windows)


class _Optimizer:
    """One of the product's inner optimizers, over tensors of all replicas."""

    def __init__(self, views: dict[str, Tensor], spec: InnerSpec, *, stacked: bool):
        """stacked: it takes each of `views` [replicas, ...] as one tensor, else their rows."""
        # torch's fused step is only right for contiguous tensors, which the stacked views are not
        self._parameters = {
            name: [nn.Parameter(part.clone()) for part in _cut(view.contiguous(), stacked)]
            for name, view in views.items()
        }
        self._views, self._stacked = views, stacked
        named = [
            (f"{row}{name}", part)  # with the row each name is another one, of the same layer
            for name, parts in self._parameters.items()
            for row, part in enumerate(parts)
        ]
        self._optimizer = InnerOptimizer(named, spec)

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Step with gradients [replicas, ...], which are clipped already."""
        for name, parts in self._parameters.items():
            live = _cut(self._views[name], self._stacked)
            found = _cut(gradients[name].contiguous(), self._stacked)
            for part, weights, gradient in zip(parts, live, found, strict=True):
                part.data.copy_(weights)  # records may have changed them
                part.grad = gradient
        if not self._optimizer.step(1.0, rate):
            raise RuntimeError("an inner step was not finite: lower the inner learning rate")
        for name, parts in self._parameters.items():
            for part, weights in zip(parts, _cut(self._views[name], self._stacked), strict=True):
                weights.copy_(part.data)

    def fade_momentum(self, rows: slice, share: float) -> None:
        """Of Muon; AdamW has none."""
        if self._stacked:
            return
        state = self._optimizer.state_dict().tensors
        for name, parts in self._parameters.items():
            for row in range(len(parts))[rows]:
                state[f"momentum_buffer/{row}{name}"].mul_(share)


def _cut(tensor: Tensor, stacked: bool) -> list[Tensor]:
    return [tensor] if stacked else list(tensor)


def _optimizers(views: dict[str, Tensor], spec: InnerSpec) -> list[_Optimizer]:
    """AdamW over stacked tensors; those of vectors look like matrices, so its decay is set to 0.

    Muon takes the matrices of layers one by one.
    """
    one_by_one = {
        name: view
        for name, view in views.items()
        if spec.optimizer == "muon" and is_for_muon(name, nn.Parameter(view[0]))
    }
    vectors = {name: view for name, view in views.items() if view.dim() == 2}
    rest = {name: view for name, view in views.items() if name not in one_by_one | vectors}
    kinds = ((one_by_one, spec, False), (vectors, replace(spec, weight_decay=0.0), True))
    return [
        _Optimizer(some, kind, stacked=stacked)
        for some, kind, stacked in (*kinds, (rest, spec, True))
        if some
    ]
