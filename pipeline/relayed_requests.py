"""Requests that reach a peer by way of a third one: signed, addressed, short-lived, taken once.

What: a request frame that the asking peer seals for one recipient; its reply is sealed, too.
Why: only peers that it has dialled can call a peer that can only dial out. Everybody can reach
these, and they pass sealed requests on (requests.py). Such a relay is a stranger to both: it may
lose a request, but not make one up, change it, keep it for later or deliver it twice.
How: the envelope of the DHT's records. Its key names run and recipient, so it can be taken for no
record and for nobody else's request; its sequence grows, and a reply has that of its request.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

from dilocox.dht.identity import Identity
from dilocox.dht.wire import Envelope, Refused, seal, unseal
from dilocox.pipeline.frames import (
    ANSWER_KINDS,
    NO_TENSORS,
    PREFIX_BYTES,
    REQUEST_KINDS,
    Frame,
    FrameRefused,
    encode_prefix_and_header,
    parse_header,
    parse_prefix,
)

LIFE_S = 5.0  # of a sealed request
AHEAD_S = 2.0  # how far another one's run time may be ahead of ours
MAX_ASKERS = 4096
# Each costs a check, most a signature, in a thread that has activations to move. A peer that asks
# often, or brings nonsense, must not have the requests of others refused.
TAKEN_PER_S, TAKEN_OF_ONE_PER_S = 500, 50


class RelayedRequests:
    """Those of one peer in one run; lives in one thread.

    now: run time in seconds. max_askers: peers whose requests are told apart at a time.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        now: Callable[[], float],
        *,
        max_askers: int = MAX_ASKERS,
    ):
        self._identity = identity
        self._run = run
        self._now = now
        self._max_askers = max_askers
        self._asked = 0
        self._last: dict[str, tuple[int, float]] = {}  # by asker: sequence, until when it counts
        self._second = 0
        self._taken: Counter[str] = Counter()  # by asker, or bringer of nonsense, in this second
        self._read: set[bytes] = set()  # digests of those taken in it

    def ask(self, to: str, request: Frame) -> tuple[bytes, int]:
        """The request, sealed for this peer, and its number."""
        self._asked = max(self._asked + 1, int(self._now() * 1e6))  # grows beyond a restart
        return self._sealed("request", to, self._asked, request), self._asked

    def take(self, data: bytes, bringer: str) -> tuple[str, Frame, int] | None:
        """Open what is sealed for this peer: the asker, the request and its number.

        bringer: id of the peer that passed it on; of one asker, and of nonsense of one bringer,
        only so many are opened a second.
        None for one that came before, and for one that a later one overtook: a request goes by
        several relays at once, so its copies come late through nobody's fault. Raises
        `FrameRefused` (sealed, crowded, or what a frame is refused for).
        """
        second = int(self._now())
        if second != self._second:
            self._second, self._taken, self._read = second, Counter(), set()
        digest = hashlib.sha256(data).digest()
        if digest in self._read:
            return None
        if self._taken[bringer] >= TAKEN_OF_ONE_PER_S:
            raise FrameRefused("crowded", f"{TAKEN_OF_ONE_PER_S} requests of a peer in a second")
        if self._taken.total() >= TAKEN_PER_S:
            raise FrameRefused("crowded", f"{TAKEN_PER_S} sealed requests in a second")
        self._taken[bringer] += 1
        opened = self._opened("request", data, self._identity.peer_id)
        asker = opened.owner
        self._taken[bringer] -= 1  # it counts as its asker's, whichever peer brings it
        if self._taken[asker] >= TAKEN_OF_ONE_PER_S:
            raise FrameRefused("crowded", f"{TAKEN_OF_ONE_PER_S} requests of a peer in a second")
        self._taken[asker] += 1
        sequence, _ = self._last.get(asker, (-1, 0.0))
        if opened.sequence <= sequence:
            return None
        request = _frame(opened.payload)
        if request.kind not in REQUEST_KINDS:
            raise FrameRefused("kind", f"{request.kind} in a sealed request")
        self._note(asker, opened)
        self._read.add(digest)
        return asker, request, opened.sequence

    def _note(self, asker: str, opened: Envelope) -> None:
        if len(self._last) >= self._max_askers and asker not in self._last:
            now = self._now()
            self._last = {peer: last for peer, last in self._last.items() if last[1] > now}
            if len(self._last) >= self._max_askers:
                raise FrameRefused("crowded", f"{self._max_askers} others asked a moment ago")
        self._last[asker] = opened.sequence, opened.expires_at

    def reply(self, to: str, number: int, answer: Frame) -> bytes:
        """The reply to the request of this number, sealed."""
        return self._sealed("reply", to, number, answer)

    def read_reply(self, data: bytes, peer: str, number: int) -> Frame:
        """What this peer replies to our request; raises `FrameRefused` as `take`."""
        reply = self._opened("reply", data, self._identity.peer_id)
        if reply.owner != peer or reply.sequence != number:
            raise FrameRefused("sealed", "the reply is another one's, or to another request")
        answer = _frame(reply.payload)
        if answer.kind not in ANSWER_KINDS:
            raise FrameRefused("kind", f"{answer.kind} as an answer")
        return answer

    def _sealed(self, what: str, to: str, number: int, frame: Frame) -> bytes:
        return seal(
            self._identity,
            key=f"{self._run}/{what}/{to}",
            sequence=number,
            expires_at=self._now() + LIFE_S,
            payload=encode_prefix_and_header(frame),
        )

    def check_passed_on(self, data: bytes, asker: str, to: str) -> None:
        """Refuse (sealed) to pass on what this asker did not seal for that peer: nonsense would use
        up what the recipient takes of this one.
        """
        if self._opened("request", data, to).owner != asker:
            raise FrameRefused("sealed", "it is of somebody else")

    def _opened(self, what: str, data: bytes, to: str) -> Envelope:
        try:
            opened = unseal(data)
        except Refused as refused:
            raise FrameRefused("sealed", str(refused)) from refused
        if opened.key != f"{self._run}/{what}/{to}":
            raise FrameRefused("sealed", "it is for somebody else, or for another purpose")
        if not 0 < opened.expires_at - self._now() <= LIFE_S + AHEAD_S:
            raise FrameRefused("sealed", "it is not of this moment")
        return opened


def _frame(data: bytes) -> Frame:
    """A frame without a tensor; raises `FrameRefused`."""
    header_bytes, payload_bytes = parse_prefix(data[:PREFIX_BYTES], NO_TENSORS)
    if len(data) != PREFIX_BYTES + header_bytes or payload_bytes:
        raise FrameRefused("length", f"{len(data)} bytes of a frame")
    return parse_header(data[PREFIX_BYTES:], 0, NO_TENSORS)
