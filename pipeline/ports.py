"""What the parts of a replica need around them: the network, the optimizer, the anchor."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.links import Answer, Inbox, LinkFacts, LinkKey, Message

Shape = tuple[int, int, int]


class Asking(Protocol):
    """How others are asked, and heard."""

    @property
    def inbox(self) -> Inbox:
        """What comes over links."""
        ...

    def request_all(
        self, frames: Mapping[str, Frame], timeout_s: float
    ) -> dict[str, Answer | None]:
        """Ask several peers at once; None for those that cannot be reached."""
        ...


class Links(Protocol):
    """What a member needs of the network (network.py)."""

    def open_link(self, key: LinkKey, peer: str, hello: Frame) -> None:
        """Dial this neighbour."""
        ...

    def expect_link(self, key: LinkKey, peer: str) -> None:
        """Wait for this neighbour to dial."""
        ...

    def send(self, key: LinkKey, frame: Frame) -> None:
        """Queue a frame; nothing happens if the link is gone."""
        ...

    def break_link(self, key: LinkKey, reason: str) -> None:
        """Close a link over which came what cannot be; counted as refused, told as Broken."""
        ...

    def drop_links(self) -> None:
        """Close all links without telling this peer's loop."""
        ...

    def link_facts(self, key: LinkKey) -> LinkFacts | None:
        """What was measured of a link."""
        ...


class LossScaled(Protocol):
    """The optimizer, as far as the loss scale of fp16 goes; 1.0 for other precisions."""

    @property
    def loss_scale(self) -> float:
        """What the last stage multiplies its loss by."""
        ...

    def take_loss_scale(self, scale: float) -> None:
        """Use the head's."""
        ...


class Anchors(Protocol):
    """The anchor, on which the validation loss is computed."""

    @property
    def round(self) -> int:
        """The round of the last record in it."""
        ...

    def in_place(self) -> AbstractContextManager[None]:
        """For a while the stage has the anchor's weights."""
        ...


def receive(inbox: Inbox, wait_s: float) -> Message | None:
    """The next message, None if none comes within the wait."""
    try:
        return inbox.get(wait_s)
    except queue.Empty:
        return None


def link_of(hello: Frame, stage: int) -> LinkKey | None:
    """Which link of a peer of this stage a `hello` asks for; None: none that it could have."""
    upper_stage = hello.facts.get("upper_stage")
    if upper_stage == stage:
        return LinkKey(hello.replica, hello.epoch, stage, "lower")
    if upper_stage == stage - 1:
        return LinkKey(hello.replica, hello.epoch, stage - 1, "upper")
    return None
