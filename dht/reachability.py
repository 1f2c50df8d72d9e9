"""Can others reach this peer, how fast is the way to them, and what time is it: what peers ask each
other about the network between them.

Every peer and every bootstrap answers. A dial-back opens fresh TCP connections to the addresses
that the caller names, and looks whether a greeting comes: that a libp2p listener answers is
evidence enough. They must be fresh, for libp2p would use the one that the caller has opened. A
router may let in only peers that the caller has dialled before, as it has the bootstraps; so a
bootstrap has others dial, too, and believes them more than itself. An asked peer works for
strangers here, so all is bounded: addresses (public ones, or where the caller is seen to come from;
on the word of another peer others only where the run is one of a local network), connections,
bytes, seconds.

The callers' side, for a peer that starts and for the doctor, stands at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, AsyncIterator, cast  # noqa: UP035 - hivemind knows this one only

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dilocox.dht.addresses import Reachability, ReachKind
from dilocox.dht.errors import InvalidInput, in_one_line
from dilocox.dht.invite import MAX_INVITE_ADDRESSES, TcpAddress, invite_addresses, listen_address
from dilocox.dht.rpc import (
    CallRefused,
    RequestLimit,
    answer_of,
    chunk_of,
    facts_of,
    refusal_kind,
    request_of,
)
from dilocox.dht.streams import accept
from dilocox.dht.upload_limit import CHUNK_BYTES

logger = logging.getLogger(__name__)

GREETING = b"\x13/multistream/1.0.0\n"  # with which both ends of a libp2p connection begin
DIAL_LIMIT_S = 2.5  # a connection and its greeting; a host that drops packets answers nothing
MAX_DIALLED = 4
MAX_NAMES, NAMES_AT_ONCE = 2, 2  # of hosts that are looked up: for one question, for all


async def connections(p2p: P2P) -> dict[str, frozenset[str]]:
    """The IP addresses at the other ends of this p2pd's connections, by peer id."""
    found: dict[str, frozenset[str]] = {}
    for info in await p2p.list_peers():
        texts = [str(address) for address in info.addrs]
        direct = [text.split("/") for text in texts if "circuit" not in text]
        ips = {words[2] for words in direct if words[1] in ("ip4", "ip6") and words[3:4] == ["tcp"]}
        found[str(info.peer_id)] = found.get(str(info.peer_id), frozenset()) | ips
    return found


class _Resolver:
    """Looks up names of strangers, two at once: their owners may never answer, and what looks up
    other names in this process must not wait for them.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NAMES_AT_ONCE, thread_name_prefix="names")
        self._jobs = set[Future[Any]]()  # which a thread ends

    @property
    def busy(self) -> bool:
        return len(self._jobs) >= NAMES_AT_ONCE

    async def look_up(self, host: str, port: int, *, family: int, type: int) -> Any:
        """As an event loop's `getaddrinfo`."""
        job = self._threads.submit(socket.getaddrinfo, host, port, family=family, type=type)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(job)


@functools.cache
def _resolver_of(process: int) -> _Resolver:
    """Its threads are none in a process that is forked later."""
    return _Resolver()


async def working(named: Sequence[str], seen: frozenset[str]) -> tuple[str, ...] | None:
    """Those of these multiaddrs that may be dialled and at which a libp2p listener answers; None
    where that cannot be said, since names cannot be looked up now.

    seen: IP addresses that the stranger comes from. There its ports are tried, too: behind a mapped
    port it may not know its own address.
    """
    places = possible(named, seen)
    names = [text for text, place in places.items() if not _is_ip(place.host)]
    resolver = _resolver_of(os.getpid())
    if names and resolver.busy:
        return None
    for text in names[MAX_NAMES:]:
        del places[text]
    asked = (allowed_ips(place, seen, look_up=resolver.look_up) for place in places.values())
    checked = await asyncio.gather(*asked)
    allowed = {text: ips for text, ips in zip(places, checked, strict=True) if ips}
    dialled = list(allowed)[:MAX_DIALLED]
    greets = await asyncio.gather(*(_greets(allowed[text], places[text].port) for text in dialled))
    return tuple(text for text, yes in zip(dialled, greets, strict=True) if yes)


def possible(named: Sequence[str], seen: frozenset[str]) -> dict[str, TcpAddress]:
    places = {text: place for text in named if (place := _place(text)) is not None}
    for ip in sorted(seen):
        for port in sorted({place.port for place in places.values()}):
            kind = "ip6" if ":" in ip else "ip4"
            places.setdefault(f"/{kind}/{ip}/tcp/{port}", TcpAddress(host=ip, port=port))
    return places


def _place(text: str) -> TcpAddress | None:
    try:
        return listen_address(text)
    except InvalidInput:
        return None


async def allowed_ips(
    place: TcpAddress,
    seen: frozenset[str] = frozenset(),
    *,
    local_network: bool = False,
    look_up: Callable[..., Awaitable[Any]] | None = None,
) -> list[str]:
    """The IP addresses to dial for this; none if a stranger may not have us do so.

    It may name what the internet routes and the addresses `seen`; on a local network all. A name is
    looked up but once: its owner could answer the second time with another address. look_up: what
    does that, if not the event loop.
    """
    if _is_ip(place.host):
        ips = [place.host]
    else:
        look_up = look_up or asyncio.get_running_loop().getaddrinfo
        asking = look_up(place.host, place.port, family=place.family, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.wait_for(asking, DIAL_LIMIT_S)
        except (OSError, asyncio.TimeoutError, UnicodeError):
            return []
        ips = [str(each[4][0]) for each in found]
    if local_network or all(ip in seen or _is_global(ip) for ip in ips):
        return ips
    return []


def _is_ip(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_global(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_global
    except ValueError:
        return False


async def _greets(ips: Sequence[str], port: int) -> bool:
    """Whether one of these answers; all together have the limit of one."""
    end = asyncio.get_running_loop().time() + DIAL_LIMIT_S
    for ip in ips:
        left_s = end - asyncio.get_running_loop().time()
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            if await asyncio.wait_for(greeting_of(ip, port), left_s) == GREETING:
                return True
    return False


async def greeting_of(ip: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(GREETING)
        return await reader.readexactly(len(GREETING))
    finally:
        writer.transport.abort()


FORWARD_LIMIT_S = DIAL_LIMIT_S + 1.0
ANSWER_LIMIT_S = FORWARD_LIMIT_S + 0.5
MAX_NAMED = 16
OTHERS_ASKED = 3
DIAL_BACKS_AT_ONCE = 16
CALLS_IN_A_WHILE, A_WHILE_S = 6, 10.0  # dial-backs of one caller
BANDWIDTH_LIMIT_S, BANDWIDTH_LIMIT_BYTES = 10.0, 16 << 20
BANDWIDTH_HOUR_BYTES = 256 << 20  # for all callers: a volunteer may pay for its traffic
CHUNK = bytes(CHUNK_BYTES)
PROBE_REFUSALS = ("question", "often", "busy")
"""Why a peer refuses to dial back, or to measure."""


class Probe(ServicerBase):
    """The service; one for each p2pd."""

    def __init__(
        self,
        p2p: P2P,
        *,
        now: Callable[[], float],
        refuse: Callable[[str], object],
        busy: Callable[[], bool] = lambda: False,
        admits: Callable[[str], bool] = lambda peer: True,
        knows: Callable[[str], bool] = lambda peer: False,
        bootstraps: Collection[str] | None = (),
        local_network: bool = False,
    ):
        """What it takes from its owner.

        now: run time. refuse: counts what is refused, by reason. busy: whether this peer needs its
        link for itself, as in an exchange. admits: whether a peer takes part in the run, for which
        alone a link is measured. knows: whether a peer is known to take part: where any such peer
        is connected, only their word tells whether another one is reached.
        bootstraps: peer ids on whose word others are dialled; None on a bootstrap itself.
        local_network: whether they may have any address dialled, none but public ones otherwise.
        """
        self._p2p = p2p
        self._now = now
        self._refuse = refuse
        self._busy = busy
        self._admits = admits
        self._knows = knows
        self._bootstraps = bootstraps
        self._local_network = local_network
        self._dial_backs = RequestLimit(CALLS_IN_A_WHILE, A_WHILE_S)
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
            want = facts_of(request)
            of_another = "seen" in want
            if not of_another:
                self._dial_backs.check(caller)
            elif caller not in (self._bootstraps or ()):
                raise CallRefused("only a bootstrap may ask for others")
            known = await connections(self._p2p)
            seen = known.get(caller, frozenset())
            if of_another:
                told = texts(want["seen"])
                seen = frozenset(ip for ip in told if self._local_network or _is_global(ip))
            if self._dialling >= DIAL_BACKS_AT_ONCE:
                raise CallRefused("too many at once", "busy")
            # a peer that was reached before is not declared unreachable on the word of strangers
            alone = self._bootstraps is not None or want.get("again") is True
            others = () if alone else _others(known, caller, seen)
            others = [peer for peer in others if self._knows(peer)] or others
            self._dialling += 1
            try:
                return answer_of(await self._verdict(texts(want.get("addresses")), seen, others))
            finally:
                self._dialling -= 1
        except CallRefused as refused:
            return self._refused(refused)

    async def _verdict(
        self, named: Sequence[str], seen: frozenset[str], others: Sequence[str]
    ) -> dict[str, Any]:
        question = {"addresses": list(named), "seen": sorted(seen)}
        own = asyncio.ensure_future(working(named, seen))
        try:
            drawn = random.sample(others, min(OTHERS_ASKED, len(others)))
            asked = [PeerID.from_base58(peer) for peer in drawn]
            verdict = await _dialled(self._p2p, asked, question, FORWARD_LIMIT_S, Reachability())
            if not verdict.asked:
                worked = await own
                if worked is None:
                    raise CallRefused("names cannot be looked up now: ask later", "busy")
            else:
                places = possible(named, seen)
                worked = tuple(address for address in verdict.addresses if address in places)
        finally:
            own.cancel()
        told = {"seen": sorted(seen), "worked": list(worked), "asked": max(1, verdict.asked)}
        return told | {"alone": verdict.asked == 0}

    def _refused(self, error: Exception) -> runtime_pb2.ExpertResponse:
        self._refuse(refusal_kind(error))
        return answer_of({"refused": str(error) or "nothing came"})

    # ---- how fast is the way ---------------------------------------------------------------------
    async def rpc_bandwidth_down(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Send until the time that was asked for is over, within the bounds."""
        try:
            with self._link(context):
                limit_s = facts_of(request).get("seconds")
                if not isinstance(limit_s, (int, float)):
                    raise CallRefused("no number of seconds")
                yield answer_of({})
                end = time.monotonic() + min(limit_s, BANDWIDTH_LIMIT_S)
                for _ in range(BANDWIDTH_LIMIT_BYTES // len(CHUNK)):
                    if time.monotonic() >= end:
                        break
                    yield answer_of({}, CHUNK)
        except CallRefused as refused:
            yield self._refused(refused)

    async def rpc_bandwidth_up(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Take what comes, within the bounds, and say how much it was in how many seconds.

        It is read to its end: p2pd resets a stream whose reader leaves earlier, the answer with it.
        """
        try:
            with self._link(context):
                frames = aiter(request)
                await asyncio.wait_for(anext(frames), BANDWIDTH_LIMIT_S)
                accept()
                taken, started = 0, time.monotonic()
                with contextlib.suppress(StopAsyncIteration, asyncio.TimeoutError):
                    while taken <= BANDWIDTH_LIMIT_BYTES:
                        left_s = started + BANDWIDTH_LIMIT_S - time.monotonic()
                        frame = await asyncio.wait_for(anext(frames), max(0.0, left_s))
                        taken += len(chunk_of(frame))
                return answer_of({"bytes": taken, "seconds": time.monotonic() - started})
        except (CallRefused, StopAsyncIteration, asyncio.TimeoutError) as refused:
            return self._refused(refused)

    @contextlib.contextmanager
    def _link(self, context: P2PContext) -> Generator[None]:
        now = time.monotonic()
        if not self._admits(str(context.remote_id)):
            raise CallRefused("this run takes only peers that are admitted")
        if now < self._measuring_until or self._busy():
            raise CallRefused("this peer needs its link now: ask later", "busy")
        if now - self._measured_since > 3600.0:
            self._measured_bytes, self._measured_since = 0, now
        if self._measured_bytes >= BANDWIDTH_HOUR_BYTES:
            raise CallRefused("this peer has measured enough for an hour: ask another one", "busy")
        self._measured_bytes += BANDWIDTH_LIMIT_BYTES
        # a time, not a flag: a caller that stops reading never lets this go on to its end
        self._measuring_until = now + 2 * BANDWIDTH_LIMIT_S
        try:
            yield
        finally:
            self._measuring_until = 0.0

    # ---- what time is it -------------------------------------------------------------------------
    async def rpc_clock(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        return answer_of({"time": self._now()})


# ---- calls ---------------------------------------------------------------------------------------
async def asked_to_dial(
    p2p: P2P, peer: PeerID, question: dict[str, Any], limit_s: float
) -> dict[str, Any]:
    """What a peer answers to a dial-back; raises ConnectionError."""
    stub: Any = Probe.get_stub(p2p, peer)
    return answered(await called(peer, stub.rpc_dial_back(request_of(question)), limit_s))


async def called(peer: PeerID, call: Any, limit_s: float) -> Any:
    """Await a call; whatever fails is a ConnectionError."""
    try:
        return await asyncio.wait_for(call, limit_s)
    except ConnectionError:
        raise
    except Exception as error:
        reason = in_one_line(error)  # p2pd's are long lists of addresses
        raise ConnectionError(f"{peer}: {type(error).__name__}: {reason}") from error


def answered(frame: Any) -> dict[str, Any]:
    """What an answer holds; ConnectionError if it is malformed or says no."""
    try:
        answer = facts_of(frame)
    except CallRefused as error:
        raise ConnectionError(f"a malformed answer: {error}") from error
    if "refused" in answer:
        raise ConnectionError(f"refused: {str(answer['refused'])[:200]}")
    return answer


def texts(value: object) -> tuple[str, ...]:
    """A list of texts from a stranger; what is none is left out."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return tuple(item for item in items[:MAX_NAMED] if isinstance(item, str) and len(item) < 300)


def _others(known: dict[str, frozenset[str]], caller: str, seen: frozenset[str]) -> tuple[str, ...]:
    """The peers to have dial: none that shares the caller's way to the world, and none at all where
    the caller is on this machine, for that address leads others to themselves.
    """
    if any(ipaddress.ip_address(ip).is_loopback for ip in seen):
        return ()
    return tuple(peer for peer, ips in known.items() if peer != caller and not ips & seen)


ASK_AGAIN_S = 0.3  # a bootstrap that starts at the same moment does not answer this yet
TRIES = 2
CHECK_S, CHECK_AGAIN_S = 300.0, 60.0
REACHED: tuple[ReachKind, ...] = ("public", "mapped")


async def find_reach(
    p2p: P2P,
    candidates: Sequence[PeerID],
    own_addresses: Sequence[str],
    *,
    limit_s: float = 10.0,
    patience_s: float = 3.0,
    again: bool = False,
    busy: Callable[[], bool] = lambda: False,
) -> Reachability:
    """Have these peers dial this one, all at the same time; the first that succeeds decides.

    own_addresses: TCP multiaddrs without peer id, the announced ones first. Ask a bootstrap, which
    has others dial, or peers that this one has not dialled before. While none of them answers they
    are asked again, for `patience_s`; where nothing gets in once more, for a busy machine may be
    late. Ends within `limit_s`. again: others reached it before, so a bootstrap's own word is
    enough. busy: whether this peer fills its line, as in an exchange: then nobody is asked, and it
    is no evidence that nothing got in.
    """
    if busy():
        return Reachability()
    started = time.monotonic()
    question = {"addresses": list(own_addresses[:MAX_NAMED]), "again": again}
    found, failures = Reachability(), 0
    while candidates and not found.addresses and failures < TRIES:
        spent_s = time.monotonic() - started
        if spent_s > (limit_s if found.asked else patience_s):
            break
        span_s = max(0.1, min(limit_s - spent_s, ANSWER_LIMIT_S))
        before = found.asked
        found = await _dialled(p2p, candidates, question, span_s, found)
        if found.asked > before:
            failures += 1
        else:
            await asyncio.sleep(ASK_AGAIN_S)
    if found.addresses:
        own = any(_is_own(address) for address in found.addresses)
        return replace(found, kind="public" if own else "mapped")
    return replace(found, kind="dial_out" if found.asked and not busy() else "unknown")


async def _dialled(
    p2p: P2P, peers: Sequence[PeerID], question: dict[str, Any], span_s: float, before: Reachability
) -> Reachability:
    """Ask all of them; what was found, added to what was known, with the kind still open."""
    seen, asked = set(before.seen), before.asked
    worked: tuple[str, ...] = ()
    by_others = False
    calls = [asyncio.ensure_future(asked_to_dial(p2p, peer, question, span_s)) for peer in peers]
    for call in asyncio.as_completed(calls):
        try:
            answer = await call
        except ConnectionError as error:
            logger.debug("no dial-back: %s", error)
            continue
        asked += _count(answer.get("asked"))
        seen |= set(texts(answer.get("seen")))
        told = texts(answer.get("worked"))
        if worked := tuple(address for address in told if _place(address) is not None):
            by_others = answer.get("alone") is not True  # older ones do not say it
            break
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return Reachability(
        addresses=worked, asked=asked, seen=tuple(sorted(seen)), by_others=by_others
    )


class ReachWatch:
    """Whether others reach a peer that did not start as one that only dials out.

    reached: whether they did when it started; else nobody could try, and that is made up for soon.
    by_others: whether more than a bootstrap did. Until then others are asked, too, as at the start;
    from then on strangers can take nothing back. ask: begins a dial-back of one that others reached
    before, or not; a future of `Reachability`. told: the addresses that others have of it. A laptop
    that moves, or a line that gets another address, must start anew: in a swarm that takes it for
    reachable all others wait for it in vain.
    """

    def __init__(
        self,
        ask: Callable[[bool], Any],
        *,
        reached: bool,
        by_others: bool,
        now: float,
        told: Collection[str] = (),
    ):
        """now: of the monotonic clock, as in `lost`."""
        self._ask = ask
        self._told = {address.partition("/p2p/")[0] for address in told}
        self._reached = reached
        self._by_others = by_others
        self._asked: Any = None
        self._next = now + (CHECK_S if reached else CHECK_AGAIN_S)
        self._failed = False

    def lost(self, now: float) -> bool:
        """To be called often: true when nothing got in twice, a minute apart."""
        if self._asked is None:
            if now >= self._next:
                self._asked = self._ask(self._by_others)
            return False
        if not self._asked.done():
            return False
        asked, self._asked = self._asked, None
        reach = Reachability() if asked.exception() is not None else asked.result()
        if reach.kind == "unknown":  # nobody could tell, so what was seen before still stands
            self._next = now + CHECK_AGAIN_S
            return False
        self._reached |= reach.kind in REACHED
        self._by_others |= reach.kind in REACHED and reach.by_others
        # where others come from they try its port, too, and may get in at an address nobody knows
        known = not (self._told and reach.addresses) or self._told & set(reach.addresses)
        failed = reach.kind == "dial_out" or (reach.kind in REACHED and not known)
        self._next = now + (CHECK_S if self._reached and not failed else CHECK_AGAIN_S)
        before, self._failed = self._failed, failed
        return failed and before


def reached_at(
    reach: Reachability, announced: Sequence[str], visible: Sequence[str], peer_id: str
) -> tuple[str, ...]:
    """The multiaddrs, with peer id, that a peer tells others, those that were tried first."""
    if reach.kind == "dial_out":
        return ()
    tried = tuple(f"{address}/p2p/{peer_id}" for address in reach.addresses)
    told = dict.fromkeys((*tried, *invite_addresses(announced, visible, peer_id)))
    return tuple(told)[:MAX_INVITE_ADDRESSES]


def described(
    reach: Reachability, announced: Sequence[str], told: Sequence[str]
) -> tuple[int, str]:
    """What a volunteer should know of it, with the level at which to log it."""
    at = ", ".join(told)
    if reach.kind == "unknown":
        return logging.INFO, f"is reached at {at} as far as it knows; nobody could try"
    if reach.kind != "dial_out":
        through = ", which its router maps to it" if reach.kind == "mapped" else ""
        return logging.INFO, f"is reached at {at}{through}"
    where = ", ".join(announced or reach.seen) or "any of its addresses"
    host = next((ip for ip in reach.seen if ":" not in ip), "ADDRESS")
    return logging.WARNING, (
        f"only dials out: nobody gets in at {where}. It trains all the same, beside peers that "
        "can be reached. To be one of those, forward a TCP port of the router to this machine, "
        f"say 31337, and start with --port 31337 --announce /ip4/{host}/tcp/31337"
    )


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes a second from and to a peer."""

    down_bytes_per_s: float
    up_bytes_per_s: float


async def measure_bandwidth(p2p: P2P, peer: PeerID, *, limit_s: float = 10.0) -> Bandwidth:
    """Bytes a second from and to a peer, each measured for half of `limit_s`.

    Raises ConnectionError if it does not answer or needs its link for itself.
    """
    span_s = limit_s / 2
    return Bandwidth(
        down_bytes_per_s=await called(peer, _down(p2p, peer, span_s), span_s + ANSWER_LIMIT_S),
        up_bytes_per_s=await called(peer, _up(p2p, peer, span_s), span_s + ANSWER_LIMIT_S),
    )


async def ask_time(p2p: P2P, peer: PeerID, *, limit_s: float = 3.0) -> float:
    """A peer's run time in seconds; raises ConnectionError if it does not answer."""
    stub: Any = Probe.get_stub(p2p, peer)
    told = answered(await called(peer, stub.rpc_clock(request_of({})), limit_s)).get("time")
    if not isinstance(told, float):
        raise ConnectionError(f"{peer} told no time")
    return told


async def _down(p2p: P2P, peer: PeerID, span_s: float) -> float:
    stub: Any = Probe.get_stub(p2p, peer)
    frames = await stub.rpc_bandwidth_down(request_of({"seconds": span_s}))
    answered(await anext(frames))
    taken, started = 0, time.monotonic()
    async for frame in frames:
        taken += len(chunk_of(frame))
        if taken > BANDWIDTH_LIMIT_BYTES:
            raise ConnectionError("it sends more than was asked for")
    return taken / max(1e-6, time.monotonic() - started)


async def _up(p2p: P2P, peer: PeerID, span_s: float) -> float:
    stub: Any = Probe.get_stub(p2p, peer)

    async def frames() -> AsyncIterator[runtime_pb2.ExpertRequest]:
        yield request_of({})
        end = time.monotonic() + span_s
        for _ in range(BANDWIDTH_LIMIT_BYTES // len(CHUNK)):
            if time.monotonic() > end:
                return
            yield request_of({}, CHUNK)

    answer = answered(await stub.rpc_bandwidth_up(frames()))
    return float(answer["bytes"]) / max(1e-6, float(answer["seconds"]))


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value < MAX_NAMED else 1


def _is_own(address: str) -> bool:
    host = listen_address(address).host
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(target)
            return True
    return False
