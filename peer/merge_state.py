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

SENDS_REMEMBERED = 64  # of those that are not held any more: two integers each

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


@dataclass(frozen=True)
class GivenUp:
    """A send that is not held any more, and that a record may name all the same.

    clean: nothing of it is in what this peer still has of its own.
    """

    tokens: int
    clean: bool


class MergeState:
    """One peer's state of one stage. `progress.live` belongs to the caller and changes in place.

    Anchors and momenta are adopted, not copied: whoever passes them must not write to them until
    others were adopted.

    Every token that was trained on is behind the unsent progress (`tokens`), behind a send in
    flight, in a record as far as this peer knows (`counted_tokens`), or lost.
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
        self.trained_tokens: int = 0
        self.counted_tokens: int = 0
        self._unsent = False
        self._undone_age: dict[int, int] = {}
        self._counted: dict[int, int] = {}  # tokens of own sends in the chain's last records
        self._given_up: dict[int, GivenUp] = {}
        self._adopt(round_number, digest, anchor, momentum)
        self.reset_to_anchor()

    @property
    def lost_tokens(self) -> int:
        """Tokens that no record will hold, as far as is known: one that names a send which was
        given up takes its tokens back. A record that holds a send twice counts with a minus.
        """
        in_flight = sum(send.tokens for send in self.fly.values())
        return self.trained_tokens - self.counted_tokens - self.tokens - in_flight

    def reset_to_anchor(self) -> None:
        """Stand on the anchor with nothing of one's own; what that was counts as lost, unless a
        record of one of its sends comes after all."""
        self.progress.stand_on(self.anchor)
        self.residual.clear()
        given_up = {n: send.tokens for n, send in (*self.fly.items(), *self.undone.items())}
        given_up |= {number: send.tokens for number, send in self._given_up.items()}
        self._give_up(given_up, clean=True)
        self.fly.clear()
        self.undone.clear()
        self._undone_age.clear()
        self._nothing_unsent()

    def start_over(self, sent: Mapping[int, int], trained_tokens: int) -> None:
        """Stand on the anchor after a restart: this state was followed by sends that it does not
        know, whose records may or may not come.

        sent: their tokens, by round. trained_tokens: as of the last of them.
        """
        self.trained_tokens = max(self.trained_tokens, trained_tokens)
        self.reset_to_anchor()
        self._give_up(sent, clean=True)

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
            "trained": self.trained_tokens,
            "counted_tokens": self.counted_tokens,
            "unsent": self._unsent,
            "fly": [[number, send.tokens] for number, send in self.fly.items()],
            "undone": [[n, send.tokens, self._undone_age[n]] for n, send in self.undone.items()],
            "counted": [[number, tokens] for number, tokens in self._counted.items()],
            "given_up": [[n, send.tokens, send.clean] for n, send in self._given_up.items()],
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
        """The state as it was. `live` is overwritten, anchor and momentum are adopted, and the rest
        is copied.

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
        self.progress.start.copy_(tensors["start"])
        self.residual.values.copy_(tensors["residual"])
        for kind, sends in (("fly", self.fly), ("undone", self.undone)):
            for number, tokens, *_ in facts[kind]:
                delta, message = (tensors[f"{kind}.{number}.{n}"] for n in ("delta", "message"))
                self.progress.check(delta, message)
                sends[number] = Send(delta.clone(), message.clone(), tokens)
        self._undone_age = {number: age for number, _, age in facts["undone"]}
        self._counted = {number: tokens for number, tokens in facts["counted"]}  # noqa: C416
        self._unsent = facts["unsent"]
        self.age = facts["age"]
        self.tokens = facts["tokens"]
        self.trained_tokens = facts["trained"]
        self.counted_tokens = facts["counted_tokens"]
        self._given_up = {n: GivenUp(tokens, clean) for n, tokens, clean in facts["given_up"]}
        return self

    def _adopt(self, round_number: int, digest: str, anchor: Tensor, momentum: Tensor) -> None:
        self.progress.check(anchor, momentum)
        self.anchor = anchor
        self.momentum = momentum
        self.round = round_number
        self.digest = digest

    def _give_up(self, sends: Mapping[int, int], *, clean: bool) -> None:
        self._given_up |= {number: GivenUp(tokens, clean) for number, tokens in sends.items()}
        for old in sorted(self._given_up)[:-SENDS_REMEMBERED]:
            del self._given_up[old]

    def _nothing_unsent(self) -> None:
        self.tokens = self.age = 0
        self._unsent = False
