"""The network thread's way to p2pd: streams to other peers, and those that others open here. Apart
from network.py: this is what goes over streams, that is the thread and its deadlines.

A short request (ping, reserve, assign, release) is a fresh stream with one frame there and one
back; to a peer that can only dial out, and has not dialled this one, it goes sealed, by way of
others (relayed_requests.py), and every peer passes such requests on. A stream whose first frame is
a `hello` may become a link: that is for network.py to say.
A peer that opens a stream is a stranger until its first frame has been answered, and strangers get
little time, little memory and a limited number of streams. libp2p has proved their peer ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from pydantic import Field

from dilocox.dht.errors import in_one_line
from dilocox.dht.invite import MAX_PEER_ID
from dilocox.pipeline.frames import (
    ANSWER_KINDS,
    NO_TENSORS,
    REQUEST_KINDS,
    Facts,
    Frame,
    FrameRefused,
    encode_prefix_and_header,
)
from dilocox.pipeline.link import Answer, Stream, Traffic
from dilocox.pipeline.relayed_requests import RelayedRequests

logger = logging.getLogger(__name__)

CLOSING_S = 0.5  # for each step of it
RELAYS_ASKED = 2  # at once, with the same request: the first that arrives is answered
PASSING_LIMIT_S = 2.0  # a sealed request to its recipient and the reply back
_REPLIES = frozenset({"reply", "no"})


class _Relay(Facts):
    to: Annotated[str, Field(max_length=MAX_PEER_ID)]  # the recipient of the request


class _No(Facts):
    reason: str


class Unreachable(ConnectionError):
    """A peer could not be asked, or did not answer in time, or not in frames."""


@dataclass(frozen=True, kw_only=True)
class StrangerLimits:
    """What streams of strangers may take.

    opening_s: for a stranger's first frame and our answer. strangers: of all peers and of one.
    known: of peers that have something to do with this one, in all and of one: keys cost nothing,
        and fill the places of strangers.
    passed_on: sealed requests on their way at once, of all peers and of one; few, for each takes
        the place of a stranger.
    """

    opening_s: float = 10.0
    strangers: int = 256
    strangers_of_a_peer: int = 16
    known: int = 1024
    known_of_a_peer: int = 16
    passed_on: int = 64
    passed_on_of_a_peer: int = 8


class RequestServer:
    """Asks and answers under one handler name; all in the network thread.

    answer: the reply to a request, by peer id; it must be quick. welcome: takes a stream that began
    with a hello, answers it, and says whether it keeps the stream. relays: the peers by way of
    which to ask one that cannot be called from here, in any order; none for all others. knows:
    whether a peer has something to do with this one.
    """

    def __init__(
        self,
        name: str,
        traffic: Traffic,
        *,
        relayed: RelayedRequests,
        answer: Callable[[str, Frame], Frame],
        welcome: Callable[[str, Frame, Stream], Awaitable[bool]],
        relays: Callable[[str], Sequence[str]],
        knows: Callable[[str], bool],
        limits: StrangerLimits,
    ):
        self._name = name
        self._traffic = traffic
        self._relayed = relayed
        self._relays = relays
        self._limits = limits
        self._answer = answer
        self._welcome = welcome
        self._knows = knows
        self._strangers: Counter[str] = Counter()
        self._known: Counter[str] = Counter()
        self._passing: Counter[str] = Counter()  # sealed requests on their way, by asker
        self._address: Any = None
        self._p2p: Any = None

    async def open(self, address: Any) -> None:
        """Let others in, through the p2pd at this address."""
        self._address = address
        self._p2p = await P2P.replicate(address)
        await self._p2p.add_binary_stream_handler(self._name, self._handle)

    async def close(self) -> None:
        if self._p2p is None:
            return
        with contextlib.suppress(Exception):  # p2pd may be gone
            remove = self._p2p.remove_binary_stream_handler(self._name)
            await asyncio.wait_for(remove, CLOSING_S)
        await self._p2p.shutdown()
        self._p2p = None

    # ---- to others -------------------------------------------------------------------------------
    async def ask_all(
        self, frames: Mapping[str, Frame], timeout_s: float
    ) -> dict[str, Answer | None]:
        """Ask peers at the same time, by way of others where it must be.

        None for those that do not answer.
        """

        async def ask(peer: str, frame: Frame) -> Answer | None:
            relays = self._relays(peer)[:RELAYS_ASKED]
            try:
                with self._reached(peer):
                    by_relay = self._asked_by_relay(peer, frame, relays) if relays else None
                    return await asyncio.wait_for(by_relay or self._asked(peer, frame), timeout_s)
            except Unreachable as error:
                logger.debug("not reached: %s", error)
                return None

        answers = await asyncio.gather(*(ask(peer, frame) for peer, frame in frames.items()))
        return dict(zip(frames, answers, strict=True))

    async def dial(self, peer: str, hello: Frame) -> Stream | None:
        """A stream that the peer has taken as a link; None if it says no. Raises `Unreachable`."""
        with self._reached(peer):
            stream = await self._opened(peer)
            taken = False
            try:
                await stream.write(encode_prefix_and_header(hello))
                taken = (await stream.read(NO_TENSORS)).kind == "yes"
            finally:
                if not taken:
                    stream.abort()
            return stream if taken else None

    async def _asked(self, peer: str, frame: Frame, kinds: frozenset[str] = ANSWER_KINDS) -> Answer:
        stream = await self._opened(peer)
        try:
            await stream.write(encode_prefix_and_header(frame))
            asked = time.monotonic()
            answer = await stream.read(NO_TENSORS)
            if answer.kind not in kinds:
                raise FrameRefused("kind", f"{answer.kind} as an answer")
            return Answer(frame=answer, round_trip_s=time.monotonic() - asked)
        finally:
            stream.abort()

    async def _asked_by_relay(self, peer: str, frame: Frame, relays: Sequence[str]) -> Answer:
        """Ask by way of these; the first reply that the peer itself has signed counts."""
        sealed, number = self._relayed.ask(peer, frame)
        carried = Frame(kind="relay", sealed=sealed, facts={"to": peer})
        asking = [asyncio.ensure_future(self._asked(relay, carried, _REPLIES)) for relay in relays]
        failed: list[str] = []
        try:
            for next_one in asyncio.as_completed(asking):
                try:
                    relayed = await next_one
                    if relayed.frame.kind == "no":
                        raise Unreachable(_No.from_facts(relayed.frame.facts).reason)
                    reply = self._relayed.read_reply(relayed.frame.sealed, peer, number)
                    return Answer(frame=reply, round_trip_s=relayed.round_trip_s)
                except Exception as error:  # noqa: BLE001 - see `_reached`; another may do it
                    if isinstance(error, FrameRefused):
                        self._traffic.refused[error.kind] += 1
                    failed.append(f"{type(error).__name__}: {error}")
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise Unreachable(f"by way of {len(relays)} others: {'; '.join(failed)}")

    async def _opened(self, peer: str) -> Stream:
        """As hivemind's `call_binary_stream_handler`, which leaves a socket open when it fails."""
        reader, writer = await DaemonConnector(self._address).open_connection()
        stream = Stream(reader, writer, self._traffic)
        try:
            wanted = p2pd_pb2.StreamOpenRequest(
                peer=PeerID.from_base58(peer).to_bytes(), proto=[self._name]
            )
            kind = p2pd_pb2.Request.STREAM_OPEN
            await write_pbmsg(writer, p2pd_pb2.Request(type=kind, streamOpen=wanted))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException:
            stream.abort()
            raise
        return stream

    @contextmanager
    def _reached(self, peer: str) -> Generator[None]:
        """Whatever p2pd, hivemind and asyncio call it: the peer was not reached."""
        try:
            yield
        except FrameRefused as refused:
            self._traffic.refused[refused.kind] += 1
            raise Unreachable(f"{peer}: {refused}") from refused
        except Exception as error:
            reason = in_one_line(error)  # p2pd's are long lists of addresses
            raise Unreachable(f"{peer}: {type(error).__name__}: {reason}") from error

    # ---- from others -----------------------------------------------------------------------------
    async def _handle(self, info: Any, reader: Any, writer: Any) -> None:
        """A stream that another peer has opened."""
        peer, stream = str(info.peer_id), Stream(reader, writer, self._traffic)
        adopted = False
        try:
            limits = self._limits
            if self._knows(peer):
                place = _place(self._known, peer, limits.known, limits.known_of_a_peer)
            else:
                place = _place(self._strangers, peer, limits.strangers, limits.strangers_of_a_peer)
            with place:
                received = self._received(peer, stream)
                adopted = await asyncio.wait_for(received, limits.opening_s)
        except FrameRefused as refused:
            self._traffic.refused[refused.kind] += 1
        except (EOFError, OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # it went away, or we do
        except Exception:  # hivemind's server would swallow it
            logger.exception("a request of %s failed", peer)
        finally:
            if not adopted:
                await stream.close(CLOSING_S)

    async def _received(self, peer: str, stream: Stream) -> bool:
        """Answer a stream's first frame; whether it was kept as a link."""
        frame = await stream.read(NO_TENSORS)
        if frame.kind == "hello":
            return await self._welcome(peer, frame, stream)
        if frame.kind in REQUEST_KINDS:
            answer = self._answer(peer, frame)
        elif frame.kind == "sealed":
            answer = self._answered(peer, frame)
        elif frame.kind == "relay":
            answer = await self._passed_on(peer, frame)
        else:
            raise FrameRefused("kind", f"{frame.kind} as the first frame")
        await stream.write(encode_prefix_and_header(answer))
        return False

    def _answered(self, bringer: str, frame: Frame) -> Frame:
        """The sealed answer to a sealed request, whichever peer brought it first."""
        taken = self._relayed.take(frame.sealed, bringer)
        if taken is None:
            return Frame(kind="no", facts={"reason": "it came before, or a later one did"})
        asker, request, number = taken
        reply = self._relayed.reply(asker, number, self._answer(asker, request))
        return Frame(kind="reply", sealed=reply)

    async def _passed_on(self, asker: str, frame: Frame) -> Frame:
        """What the recipient of a sealed request replies; it has dialled this peer, if any."""
        peer = _Relay.from_facts(frame.facts).to
        self._relayed.check_passed_on(frame.sealed, asker, peer)
        limits, sealed = self._limits, Frame(kind="sealed", sealed=frame.sealed)
        try:
            with (
                self._reached(peer),
                _place(self._passing, asker, limits.passed_on, limits.passed_on_of_a_peer),
            ):
                passing = self._asked(peer, sealed, _REPLIES)
                return (await asyncio.wait_for(passing, PASSING_LIMIT_S)).frame
        except Unreachable as error:
            return Frame(kind="no", facts={"reason": str(error)[:200]})


@contextmanager
def _place(present: Counter[str], peer: str, most: int, most_of_a_peer: int) -> Generator[None]:
    """Count this peer as present; raises FrameRefused (crowded) where as many are as may be."""
    if present[peer] >= most_of_a_peer or present.total() >= most:
        raise FrameRefused(
            "crowded", f"too many at once: at most {most_of_a_peer} a peer and {most} in all"
        )
    present[peer] += 1
    try:
        yield
    finally:
        present[peer] -= 1
        present += Counter()  # forgets peers that have none
