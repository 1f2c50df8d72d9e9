"""Requests that reach a peer by way of a third one: signed, addressed, short-lived, taken once.

What: a letter is a request frame, sealed by whoever asks for one recipient, and the reply likewise.
Why: a peer that can only dial out can be called by those alone whom it has dialled. They can be
reached by everybody, and pass letters on (requests.py). Such a one is a stranger to both: it may
lose a letter, but not make one up, change it, keep it for later or deliver it twice.
How: the envelope of the DHT's records. Its key names run and recipient, so no letter can be taken
for a record or for somebody else's; its sequence grows, and a reply has that of its letter.
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

LIFE_S = 5.0  # of a letter
AHEAD_S = 2.0  # how far another one's run time may be ahead of ours
MAX_WRITERS = 4096
# Each costs a check, most a signature, in a thread that has activations to move. Whoever writes
# many, or brings nonsense, must not have the letters of others refused.
TAKEN_PER_S, TAKEN_OF_ONE_PER_S = 500, 50


class RelayedRequests:
    """Those of one peer in one run; lives in one thread.

    now: run time in seconds. max_writers: whose letters are told apart at a time.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        now: Callable[[], float],
        *,
        max_writers: int = MAX_WRITERS,
    ):
        self._identity = identity
        self._run = run
        self._now = now
        self._max_writers = max_writers
        self._written = 0
        self._last: dict[str, tuple[int, float]] = {}  # by writer: sequence, until when it counts
        self._second = 0
        self._taken: Counter[str] = Counter()  # by writer, or who brought nonsense, in this second
        self._read: set[bytes] = set()  # digests of the letters taken in it

    def write(self, to: str, request: Frame) -> tuple[bytes, int]:
        """A letter to this peer, and its number."""
        self._written = max(self._written + 1, int(self._now() * 1e6))  # grows beyond a restart
        return self._sealed("letter", to, self._written, request), self._written

    def take(self, data: bytes, bringer: str) -> tuple[str, Frame, int] | None:
        """Read a letter to this peer: its writer, the request and the letter's number.

        bringer: id of the peer that passed it on; of one writer, and of nonsense of one bringer,
        only so many letters are read a second.
        None for one that came before, and for one that a later one overtook: a letter goes by
        several ways at once, so its copies come late through nobody's fault. Raises `FrameRefused`
        (letter, crowd, or what a frame is refused for).
        """
        second = int(self._now())
        if second != self._second:
            self._second, self._taken, self._read = second, Counter(), set()
        digest = hashlib.sha256(data).digest()
        if digest in self._read:
            return None
        if self._taken[bringer] >= TAKEN_OF_ONE_PER_S:
            raise FrameRefused("crowd", f"{TAKEN_OF_ONE_PER_S} letters of a peer in a second")
        if self._taken.total() >= TAKEN_PER_S:
            raise FrameRefused("crowd", f"{TAKEN_PER_S} letters in a second")
        self._taken[bringer] += 1
        letter = self._opened("letter", data, self._identity.peer_id)
        writer = letter.owner
        self._taken[bringer] -= 1  # it is its writer's, whoever brings it
        if self._taken[writer] >= TAKEN_OF_ONE_PER_S:
            raise FrameRefused("crowd", f"{TAKEN_OF_ONE_PER_S} letters of a peer in a second")
        self._taken[writer] += 1
        sequence, _ = self._last.get(writer, (-1, 0.0))
        if letter.sequence <= sequence:
            return None
        request = _frame(letter.payload)
        if request.kind not in REQUEST_KINDS:
            raise FrameRefused("kind", f"{request.kind} in a letter")
        self._note(writer, letter)
        self._read.add(digest)
        return writer, request, letter.sequence

    def _note(self, writer: str, letter: Envelope) -> None:
        if len(self._last) >= self._max_writers and writer not in self._last:
            now = self._now()
            self._last = {peer: last for peer, last in self._last.items() if last[1] > now}
            if len(self._last) >= self._max_writers:
                raise FrameRefused("crowd", f"{self._max_writers} others wrote in the last seconds")
        self._last[writer] = letter.sequence, letter.expires_at

    def reply(self, to: str, number: int, answer: Frame) -> bytes:
        """The reply to a letter of this number."""
        return self._sealed("reply", to, number, answer)

    def read_reply(self, data: bytes, peer: str, number: int) -> Frame:
        """What this peer replies to our letter; raises `FrameRefused` as `take`."""
        reply = self._opened("reply", data, self._identity.peer_id)
        if reply.owner != peer or reply.sequence != number:
            raise FrameRefused("letter", "the reply is another one's, or to another letter")
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

    def check_passed_on(self, data: bytes, writer: str, to: str) -> None:
        """Refuse (letter) to pass on what this peer did not write to that one: nonsense would use
        up what the recipient takes of this one.
        """
        if self._opened("letter", data, to).owner != writer:
            raise FrameRefused("letter", "it is of somebody else")

    def _opened(self, what: str, data: bytes, to: str) -> Envelope:
        try:
            opened = unseal(data)
        except Refused as refused:
            raise FrameRefused("letter", str(refused)) from refused
        if opened.key != f"{self._run}/{what}/{to}":
            raise FrameRefused("letter", "it is for somebody else, or for another purpose")
        if not 0 < opened.expires_at - self._now() <= LIFE_S + AHEAD_S:
            raise FrameRefused("letter", "it is not of this moment")
        return opened


def _frame(data: bytes) -> Frame:
    """A frame without a tensor; raises `FrameRefused`."""
    header_bytes, payload_bytes = parse_prefix(data[:PREFIX_BYTES], NO_TENSORS)
    if len(data) != PREFIX_BYTES + header_bytes or payload_bytes:
        raise FrameRefused("length", f"{len(data)} bytes of a frame")
    return parse_header(data[PREFIX_BYTES:], 0, NO_TENSORS)
