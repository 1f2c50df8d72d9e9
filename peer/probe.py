"""What peers ask each other about the network between them: can I be reached, how fast, what time.

Every peer and every bootstrap answers. A dial-back opens fresh TCP connections (dialling.py); fresh
they must be, for libp2p would use the one that the caller has opened. A router may let in only
those whom the caller has dialled before, as it has the bootstraps; so a bootstrap has others dial,
too, and believes them more than itself. An asked peer works for strangers here, so all is bounded:
addresses, connections, bytes, seconds. The callers' side is reachability.py.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# hivemind and its generated protocol classes carry no types.

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, AsyncIterator, cast  # noqa: UP035 - hivemind knows this one only

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dilocox.peer.dialling import DIAL_LIMIT_S, connections, possible, working
from dilocox.peer.transport import FrameRefused, chunk_of, pack, reply, unpack

FORWARD_LIMIT_S = DIAL_LIMIT_S + 1.0
ANSWER_LIMIT_S = FORWARD_LIMIT_S + 0.5
MAX_NAMED = 16
OTHERS_ASKED = 3
DIAL_BACKS_AT_ONCE = 16
CALLS_IN_A_WHILE, A_WHILE_S = 6, 10.0  # dial-backs of one caller
BANDWIDTH_LIMIT_S, BANDWIDTH_LIMIT_BYTES = 10.0, 16 << 20
BANDWIDTH_HOUR_BYTES = 256 << 20  # for all callers: a volunteer may pay for its traffic
CHUNK = bytes(256 << 10)


class Probe(ServicerBase):
    """The service; one for each p2pd."""

    def __init__(
        self,
        p2p: P2P,
        *,
        now: Callable[[], float],
        busy: Callable[[], bool] = lambda: False,
        bootstraps: Collection[str] | None = (),
    ):
        """What it takes from its owner.

        now: run time. busy: whether this peer needs its link for itself, as in an exchange.
        bootstraps: peer ids on whose word others are dialled; None on a bootstrap itself.
        """
        self._p2p = p2p
        self._now = now
        self._busy = busy
        self._bootstraps = bootstraps
        self._calls: Counter[str] = Counter()
        self._calls_since = 0.0
        self._dialling = 0
        self._measuring_until = 0.0
        self._measured_bytes, self._measured_since = 0, time.monotonic()

    # ---- can the caller be reached ---------------------------------------------------------------
    async def rpc_dial_back(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Where the caller was seen, which of its addresses worked, and how many peers tried, or
        that this one was alone with it.
        """
        caller = str(context.remote_id)
        try:
            want = unpack(request)
            known = await connections(self._p2p)
            seen = known.get(caller, frozenset())
            if "seen" in want:  # of another one
                if caller not in (self._bootstraps or ()):
                    raise FrameRefused("only a bootstrap may ask for others")
                seen = frozenset(texts(want["seen"]))
            elif not self._admits(caller):
                raise FrameRefused("asked too often")
            if self._dialling >= DIAL_BACKS_AT_ONCE:
                raise FrameRefused("too many at once")
            # who was reached before is not declared unreachable on the word of strangers
            alone = self._bootstraps is not None or want.get("again") is True
            strangers = () if alone else _others(known, caller, seen)
            self._dialling += 1
            try:
                return reply(await self._dialled(texts(want.get("addresses")), seen, strangers))
            finally:
                self._dialling -= 1
        except FrameRefused as refused:
            return reply({"refused": str(refused)})

    async def _dialled(
        self, named: Sequence[str], seen: frozenset[str], others: Sequence[str]
    ) -> dict[str, Any]:
        question = {"addresses": list(named), "seen": sorted(seen)}
        own = asyncio.ensure_future(working(named, seen))
        try:
            verdict, count = await _first_yes(
                asked_to_dial(self._p2p, PeerID.from_base58(peer), question, FORWARD_LIMIT_S)
                for peer in random.sample(others, min(OTHERS_ASKED, len(others)))
            )
            if verdict is None:
                worked = await own
            else:
                places = possible(named, seen)
                worked = tuple(address for address in verdict if address in places)
        finally:
            own.cancel()
        told = {"seen": sorted(seen), "worked": list(worked), "asked": max(1, count)}
        return told | {"alone": count == 0}

    def _admits(self, caller: str) -> bool:
        """Whether this caller has not asked too often."""
        if time.monotonic() - self._calls_since > A_WHILE_S:
            self._calls.clear()
            self._calls_since = time.monotonic()
        self._calls[caller] += 1
        return self._calls[caller] <= CALLS_IN_A_WHILE

    # ---- how fast is the way ---------------------------------------------------------------------
    async def rpc_bandwidth_down(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Send until the time that was asked for is over, within the bounds."""
        try:
            with self._link():
                limit_s = unpack(request).get("seconds")
                if not isinstance(limit_s, (int, float)):
                    raise FrameRefused("no number of seconds")
                yield reply({})
                end = time.monotonic() + min(limit_s, BANDWIDTH_LIMIT_S)
                for _ in range(BANDWIDTH_LIMIT_BYTES // len(CHUNK)):
                    if time.monotonic() >= end:
                        break
                    yield reply({}, CHUNK)
        except FrameRefused as refused:
            yield reply({"refused": str(refused)})

    async def rpc_bandwidth_up(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Take what comes, within the bounds, and say how much it was in how many seconds."""
        try:
            with self._link():
                frames = aiter(request)
                await asyncio.wait_for(anext(frames), BANDWIDTH_LIMIT_S)
                taken, started = 0, time.monotonic()
                with contextlib.suppress(StopAsyncIteration, asyncio.TimeoutError):
                    while taken < BANDWIDTH_LIMIT_BYTES:
                        left_s = started + BANDWIDTH_LIMIT_S - time.monotonic()
                        frame = await asyncio.wait_for(anext(frames), max(0.0, left_s))
                        taken += len(chunk_of(frame))
                return reply({"bytes": taken, "seconds": time.monotonic() - started})
        except (FrameRefused, StopAsyncIteration, asyncio.TimeoutError) as refused:
            return reply({"refused": str(refused) or "nothing came"})

    @contextlib.contextmanager
    def _link(self) -> Generator[None]:
        now = time.monotonic()
        if now < self._measuring_until or self._busy():
            raise FrameRefused("this peer needs its link now: ask later")
        if now - self._measured_since > 3600.0:
            self._measured_bytes, self._measured_since = 0, now
        if self._measured_bytes >= BANDWIDTH_HOUR_BYTES:
            raise FrameRefused("this peer has measured enough for an hour: ask another one")
        self._measured_bytes += BANDWIDTH_LIMIT_BYTES
        # a time, not a flag: who stops reading never lets this go on to its end
        self._measuring_until = now + 2 * BANDWIDTH_LIMIT_S
        try:
            yield
        finally:
            self._measuring_until = 0.0

    # ---- what time is it -------------------------------------------------------------------------
    async def rpc_clock(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """This peer's run time."""
        return reply({"time": self._now()})


# ---- calls ---------------------------------------------------------------------------------------
async def asked_to_dial(
    p2p: P2P, peer: PeerID, question: dict[str, Any], limit_s: float
) -> dict[str, Any]:
    """What a peer answers to a dial-back; raises ConnectionError."""
    stub: Any = Probe.get_stub(p2p, peer)
    return answered(await called(peer, stub.rpc_dial_back(pack(question)), limit_s))


async def called(peer: PeerID, call: Any, limit_s: float) -> Any:
    """Await a call; whatever fails is a ConnectionError."""
    try:
        return await asyncio.wait_for(call, limit_s)
    except ConnectionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())  # p2pd's are long lists of addresses
        raise ConnectionError(f"{peer}: {type(error).__name__}: {reason}") from error


def answered(frame: Any) -> dict[str, Any]:
    """What an answer holds; ConnectionError if it is malformed or says no."""
    try:
        answer = unpack(frame)
    except FrameRefused as error:
        raise ConnectionError(f"a malformed answer: {error}") from error
    if "refused" in answer:
        raise ConnectionError(f"refused: {str(answer['refused'])[:200]}")
    return answer


def texts(value: object) -> tuple[str, ...]:
    """A list of texts from a stranger; what is none is left out."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return tuple(item for item in items[:MAX_NAMED] if isinstance(item, str) and len(item) < 300)


def _others(known: dict[str, frozenset[str]], caller: str, seen: frozenset[str]) -> tuple[str, ...]:
    """Whom to have dial: not those who share the caller's way to the world, and nobody where the
    caller is on this machine, for that address leads others to themselves.
    """
    if any(ipaddress.ip_address(ip).is_loopback for ip in seen):
        return ()
    return tuple(peer for peer, ips in known.items() if peer != caller and not ips & seen)


async def _first_yes(calls: Iterable[Any]) -> tuple[tuple[str, ...] | None, int]:
    """The addresses of the first answer that names some, else none of them; None without any
    answer. And how many have answered by then.
    """
    worked, count = None, 0
    tasks = [asyncio.ensure_future(call) for call in calls]
    for each in asyncio.as_completed(tasks):
        with contextlib.suppress(ConnectionError):
            worked, count = texts((await each).get("worked")), count + 1
            if worked:
                break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return worked, count
