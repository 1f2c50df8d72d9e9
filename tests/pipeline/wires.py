"""Links and requests between peers of one process: no threads, no waiting, frames as real bytes.

What network.py does for a peer, reduced to what its computing thread sees. Everything that happens
(a link stands, a frame arrives, a link turns out to be closed) is one event; who owns the wires
decides when it happens, and lets the time pass.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dilocox.pipeline.frames import (
    PREFIX_BYTES,
    TENSOR_KINDS,
    Frame,
    FrameLimits,
    encode_prefix_and_header,
    parse_header,
    parse_prefix,
)
from dilocox.pipeline.link import (
    Answer,
    Arrived,
    Broken,
    BrokenKind,
    Inbox,
    LinkFacts,
    LinkKey,
    Message,
    Opened,
    link_of,
)
from dilocox.pipeline.network import Network

SILENCE_S = 5.0
OPENING_S = 8.0
LIMITS = FrameLimits(microbatch_size=2, sequence_length=8, hidden_size=16, evaluate_windows=8)


class Vanished(BaseException):
    """This peer is dead or frozen: whatever it was about to do, it does not."""


@dataclass(eq=False)
class End:
    """One peer's end of a link. hello: of the end that dials. sent: bytes on their way from it."""

    box: Box
    key: LinkKey
    peer: str
    hello: Frame | None
    since: float
    opening_s: float
    other: End | None = None
    closed: bool = False
    sent: deque[tuple[str, bytes]] = field(default_factory=deque[tuple[str, bytes]])


class WireInbox(Inbox):
    """Messages of one peer. `wait(timeout)` is what happens while it waits for one."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.wait: Callable[[float], None] = lambda _: None

    def put(self, message: Message, backlog: object = None) -> None:
        self.messages.append(message)

    def get(self, timeout_s: float) -> Message | None:
        self.wait(timeout_s)
        return self.messages.popleft() if self.messages else None


class Box(Network):
    """What one peer's computing thread sees of a network: none of its thread, all of its links."""

    def __init__(self, wires: Wires, me: str, stage: int, answer: Callable[[str, Frame], Frame]):
        self.inbox = WireInbox()
        self.me = me
        self.stage = stage
        self.answer = answer
        self.alive = True
        self.frozen_at: float | None = None
        self.ends: dict[LinkKey, End] = {}
        self.measured = LinkFacts()  # of any link
        self.distance_s = 0.01
        self.meanwhile: Callable[[], None] = lambda: None  # what happens while it asks
        self._wires = wires

    @property
    def active(self) -> bool:
        return self.alive and self.frozen_at is None

    def open_link(
        self, key: LinkKey, peer: str, hello: Frame | None, opening_s: float = 0.0
    ) -> None:
        sent = None if hello is None else over_the_wire(hello)
        opening_s = max(opening_s, OPENING_S)
        self.ends[key] = End(self, key, peer, sent, self._wires.now, opening_s)

    def send(self, key: LinkKey, frame: Frame) -> None:
        data = encode_prefix_and_header(frame) + frame.payload
        if key in self.ends:
            self.ends[key].sent.append((frame.kind, data))

    def break_link(self, key: LinkKey, reason: str) -> None:
        self._wires.refused[reason] += 1
        if key in self.ends:
            self._wires.broken(self.ends[key], "refused", 0.0)

    def drop_links(self) -> None:
        for end in self.ends.values():
            end.sent = deque(item for item in end.sent if item[0] not in TENSOR_KINDS)
            self._wires.close(end)
        self.ends.clear()
        self.inbox.messages.clear()  # all of it is of links

    def link_facts(self, key: LinkKey) -> LinkFacts:
        return self.measured if key in self.ends else LinkFacts()

    def request_all(
        self, frames: Mapping[str, Frame], timeout_s: float
    ) -> dict[str, Answer | None]:
        answers: dict[str, Answer | None] = {}
        for peer, frame in frames.items():
            self.meanwhile()
            answers[peer] = self._wires.request(self.me, peer, frame)
        if None in answers.values():
            self._wires.pass_time(timeout_s)
        self.meanwhile()
        return answers


class Wires:
    """All links of a swarm. `now`: seconds. delivered: frames so far."""

    def __init__(self, limits: FrameLimits, seed: int = 0) -> None:
        self.limits = limits
        self.now = 1000.0
        self.boxes: dict[str, Box] = {}
        self.delivered = 0
        self.refused: Counter[str] = Counter()
        self.unreachable: set[str] = set()  # for requests; links stand
        self.on_frame: Callable[[Frame], None] = lambda _: None  # when it has arrived
        self.on_request: Callable[[str, str, Frame], None] = lambda *_: None  # before its answer
        self.dice = random.Random(seed)
        self._lasting: list[End] = []  # ends whose peer has dropped them, with frames on their way

    def monotonic(self) -> float:
        """In place of time.monotonic."""
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for end in self._ends():
            if not end.box.active:
                continue
            frozen_at = None if end.other is None else end.other.box.frozen_at
            if end.other is None:
                if self.now - end.since > end.opening_s:
                    self.broken(end, "missing", self.now - end.since)
            elif frozen_at is not None and self.now - frozen_at > SILENCE_S:
                self.broken(end, "silent", self.now - frozen_at)

    def broken(self, end: End, kind: BrokenKind, after_s: float) -> None:
        """This end finds the link broken, and closes it for the other."""
        if end.box.ends.get(end.key) is end:
            del end.box.ends[end.key]
            end.box.inbox.put(Broken(end.key, kind, after_s))
        end.sent.clear()
        self.close(end)

    def close(self, end: End) -> None:
        """The other end finds it out when what was sent has arrived."""
        end.closed = True
        if end not in self._lasting:
            self._lasting.append(end)

    # ---- events ----------------------------------------------------------------------------------
    def events(self) -> list[Callable[[], None]]:
        """What could happen next."""
        possible: list[Callable[[], None]] = []
        for end in self._ends():
            other = end.other
            if other is None:
                target = self._answering(end)
                if target is not None:
                    possible.append(lambda end=end, target=target: self._stand(end, target))
            elif other.box.active and not other.closed and (end.sent or end.closed):
                possible.append(lambda end=end, other=other: self._arrive(end, other))
        return possible

    def kill(self, peer: str, *, flushed: bool) -> None:
        """The process ends; flushed: what it has sent still arrives."""
        box = self.boxes[peer]
        box.alive = False
        for end in list(box.ends.values()):
            if not flushed:
                end.sent.clear()
            self.close(end)
        box.ends.clear()
        box.inbox.messages.clear()

    def freeze(self, peer: str) -> None:
        self.boxes[peer].frozen_at = self.now

    def thaw(self, peer: str) -> None:
        self.boxes[peer].frozen_at = None

    def request(self, asker: str, peer: str, frame: Frame) -> Answer | None:
        box = self.boxes.get(peer)
        self.on_request(asker, peer, frame)
        if box is None or not box.active or peer in self.unreachable:
            return None
        answer = box.answer(asker, over_the_wire(frame))
        return Answer(frame=over_the_wire(answer), round_trip_s=box.distance_s)

    def _ends(self) -> list[End]:
        standing = [end for box in self.boxes.values() for end in box.ends.values()]
        self._lasting = [end for end in self._lasting if end.other and not end.other.closed]
        return standing + self._lasting

    def _answering(self, end: End) -> End | None:
        """The end that takes this one's hello."""
        box = self.boxes.get(end.peer)
        if end.hello is None or box is None or not box.active or not end.box.active:
            return None
        key = link_of(end.hello, box.stage)
        other = None if key is None else box.ends.get(key)
        if other is None or other.hello is not None or other.other is not None:
            return None
        return other if other.peer == end.box.me else None

    def _stand(self, end: End, other: End) -> None:
        end.other, other.other = other, end
        for each in (end, other):
            each.box.inbox.put(Opened(each.key))

    def _arrive(self, end: End, other: End) -> None:
        if end.sent:
            _, data = end.sent.popleft()
            self.delivered += 1
            frame = decoded(data, self.limits)
            other.box.inbox.put(Arrived(other.key, frame))
            self.on_frame(frame)
        else:
            self.broken(other, "closed", 0.1)


def decoded(data: bytes, limits: FrameLimits) -> Frame:
    """The frame of these bytes, as a peer's network thread reads it."""
    header_bytes, payload_bytes = parse_prefix(data[:PREFIX_BYTES], limits)
    header, payload = data[PREFIX_BYTES:][:header_bytes], data[PREFIX_BYTES + header_bytes :]
    assert len(payload) == payload_bytes
    return replace(parse_header(header, payload_bytes, limits), payload=payload)


def over_the_wire(frame: Frame) -> Frame:
    """A frame without a tensor, as it arrives."""
    limits = FrameLimits(microbatch_size=1, sequence_length=1, hidden_size=1, evaluate_windows=1)
    return decoded(encode_prefix_and_header(frame), limits)
