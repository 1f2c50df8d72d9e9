"""The state of the merge (merge.py) for one peer and stage: what a snapshot holds, exactly.

Memory, in vectors of the stage's size: live weights (the caller's), anchor, outer momentum, start
and residual; two more for a send in flight and for each undone send (at most `max_undone`).
Settling a residual allocates one or two for a moment; live weights on a GPU are copied in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilocox.compression.residual import Residual
from dilocox.peer.progress import Progress

State = TypeVar("State", bound="MergeState")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """The merge rule of a run in numbers."""

    weight: float = 0.75
    """w, the share of progress without a record that the live weights keep; 0 is `reset`."""
    decay: float = 0.95
    """How much of the codec's error the residual keeps."""
    max_age: int = 8
    """Records after which unsent progress is dropped and undone sends are forgotten."""
    max_undone: int = 2
    """Undone sends kept, the newest, two vectors each; one named after that costs a reset."""

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and 0 <= self.decay <= 1):
            raise ValueError(f"merge weight {self.weight}, decay {self.decay}: choose from 0 to 1")
        if self.max_age < 1 or self.max_undone < 1:
            raise ValueError(f"max_age {self.max_age}, max_undone {self.max_undone}: at least 1")

    @classmethod
    def of(cls, merge: str, *, rebase_weight: float, decay: float, max_age: int) -> MergeConfig:
        """From the manifest's words: `merge` is rebase, reset or none."""
        if merge not in ("rebase", "reset", "none"):
            raise ValueError(f"merge {merge!r}: choose rebase, reset or none")
        weight = 0.0 if merge == "reset" else rebase_weight
        return cls(weight=weight, decay=decay, max_age=max_age)


@dataclass(frozen=True, eq=False)
class Send:
    """One send: the progress, the message (progress and residual), the tokens behind them."""

    delta: Tensor
    message: Tensor
    tokens: int


class MergeState:
    """One peer's state of one stage. `progress.live` belongs to the caller and changes in place.

    Anchors and momenta are adopted, not copied: whoever passes them must not write to them until
    others were adopted.
    """

    def __init__(
        self,
        config: MergeConfig,
        live: Tensor,
        anchor: Tensor,
        momentum: Tensor,
        *,
        round_number: int,
        digest: str,
    ):
        """As a joiner or spare: live weights set to the anchor of this record.

        Before the first record `round_number` is -1 and `digest` the manifest's. All vectors are
        flat, of one length and dtype; live weights may be on another device.
        """
        self.config = config
        self.progress = Progress(live, torch.empty_like(anchor))
        self.residual = Residual(torch.zeros_like(anchor))
        self.fly: dict[int, Send] = {}
        self.undone: dict[int, Send] = {}
        self.tokens: int = 0  # behind the unsent progress; negative while that is a doubled send's
        self.age: int = 0  # records applied since nothing was unsent, or it was sent
        self.lost_tokens: int = 0
        self._unsent = False
        self._undone_age: dict[int, int] = {}
        self._counted: dict[int, int] = {}  # tokens of own sends in the chain's last records
        self._adopt(round_number, digest, anchor, momentum)
        self.reset_to_anchor()

    def reset_to_anchor(self) -> None:
        """Stand on the anchor with nothing of one's own: spare, joiner, splice."""
        self.progress.stand_on(self.anchor)
        self.residual.clear()
        self.fly.clear()
        self.undone.clear()
        self._undone_age.clear()
        self._nothing_unsent()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors (not copied) and JSON facts; `from_state` restores them exactly."""
        tensors = {
            "anchor": self.anchor,
            "momentum": self.momentum,
            "live": self.progress.live_on_host(),
            "start": self.progress.start,
            "residual": self.residual.values,
        }
        for kind, sends in (("fly", self.fly), ("undone", self.undone)):
            for number, send in sends.items():
                tensors[f"{kind}.{number}.delta"] = send.delta
                tensors[f"{kind}.{number}.message"] = send.message
        facts: dict[str, Any] = {
            "round": self.round,
            "digest": self.digest,
            "tokens": self.tokens,
            "age": self.age,
            "lost_tokens": self.lost_tokens,
            "unsent": self._unsent,
            "fly": [[number, send.tokens] for number, send in self.fly.items()],
            "undone": [[n, send.tokens, self._undone_age[n]] for n, send in self.undone.items()],
            "counted": [[number, tokens] for number, tokens in self._counted.items()],
        }
        return tensors, facts

    @classmethod
    def from_state(
        cls: type[State],
        config: MergeConfig,
        live: Tensor,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> State:
        """The state as it was. `live` is overwritten, the other tensors are adopted.

        Raises:
            KeyError: a tensor or a fact is missing.
            ValueError: vectors that do not fit the live weights.
        """
        anchor, momentum = tensors["anchor"], tensors["momentum"]
        self = cls(
            config, live, anchor, momentum, round_number=facts["round"], digest=facts["digest"]
        )
        self.progress.check(tensors["live"], tensors["start"], tensors["residual"])
        live.copy_(tensors["live"])
        self.progress.start = tensors["start"]
        self.residual = Residual(tensors["residual"])
        for kind, sends in (("fly", self.fly), ("undone", self.undone)):
            for number, tokens, *_ in facts[kind]:
                delta, message = (tensors[f"{kind}.{number}.{n}"] for n in ("delta", "message"))
                self.progress.check(delta, message)
                sends[number] = Send(delta, message, tokens)
        self._undone_age = {number: age for number, _, age in facts["undone"]}
        self._counted = {number: tokens for number, tokens in facts["counted"]}  # noqa: C416
        self._unsent = facts["unsent"]
        self.age = facts["age"]
        self.tokens = facts["tokens"]
        self.lost_tokens = facts["lost_tokens"]
        return self

    def _adopt(self, round_number: int, digest: str, anchor: Tensor, momentum: Tensor) -> None:
        self.progress.check(anchor, momentum)
        self.anchor = anchor
        self.momentum = momentum
        self.round = round_number
        self.digest = digest

    def _nothing_unsent(self) -> None:
        self.tokens = self.age = 0
        self._unsent = False
