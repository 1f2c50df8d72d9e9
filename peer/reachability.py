"""How others reach this peer, found by asking them; and how fast the way to one of them is.

The callers' side of probe.py, for a peer that starts and for the doctor.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# hivemind and its generated protocol classes carry no types.

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, AsyncIterator  # noqa: UP035 - as in probe.py

from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from dilocox.dht.bootstrap import MAX_INVITE_ADDRESSES, invite_addresses
from dilocox.dht.invite import listen_address
from dilocox.dht.reach import Reach, Reachability
from dilocox.peer.probe import (
    ANSWER_LIMIT_S,
    BANDWIDTH_LIMIT_BYTES,
    CHUNK,
    MAX_NAMED,
    Probe,
    answered,
    asked_to_dial,
    called,
    texts,
)
from dilocox.peer.transport import chunk_of, pack

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.3  # a bootstrap that starts at the same moment does not answer this yet
TRIES = 2
CHECK_S, CHECK_AGAIN_S = 300.0, 60.0
REACHED: tuple[Reachability, ...] = ("public", "mapped")


async def find_reach(
    p2p: P2P,
    candidates: Sequence[PeerID],
    own_addresses: Sequence[str],
    *,
    limit_s: float = 10.0,
    patience_s: float = 3.0,
    again: bool = False,
) -> Reach:
    """Have these peers dial this one, all at the same time; the first that succeeds decides.

    own_addresses: TCP multiaddrs without peer id, the announced ones first. Ask a bootstrap, which
    has others dial, or peers that this one has not dialled before. While none of them answers they
    are asked again, for `patience_s`; where nothing gets in once more, for a busy machine may be
    late. Ends within `limit_s`. again: others reached it before, so a bootstrap's own word is
    enough.
    """
    started = time.monotonic()
    question = {"addresses": list(own_addresses[:MAX_NAMED]), "again": again}
    found, failures = Reach(), 0
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
    return replace(found, kind="dial_out" if found.asked else "unknown")


async def _dialled(
    p2p: P2P, peers: Sequence[PeerID], question: dict[str, Any], span_s: float, before: Reach
) -> Reach:
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
        if worked := texts(answer.get("worked")):
            by_others = answer.get("alone") is not True  # older ones do not say it
            break
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return Reach(addresses=worked, asked=asked, seen=tuple(sorted(seen)), by_others=by_others)


class ReachWatch:
    """Whether others reach a peer that did not start as one that only dials out.

    reached: whether they did when it started; else nobody could try, and that is made up for soon.
    by_others: whether more than a bootstrap did. Until then others are asked, too, as at the start;
    from then on strangers can take nothing back. ask: begins a dial-back of one that others reached
    before, or not; a future of Reach. A laptop that is carried elsewhere must start anew: in a
    swarm that takes it for reachable all others wait for it in vain.
    """

    def __init__(self, ask: Callable[[bool], Any], *, reached: bool, by_others: bool, now: float):
        """now: of the monotonic clock, as in `lost`."""
        self._ask = ask
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
        reach = Reach() if asked.exception() is not None else asked.result()
        self._reached |= reach.kind in REACHED
        self._by_others |= reach.kind in REACHED and reach.by_others
        failed = reach.kind == "dial_out"
        self._next = now + (CHECK_S if self._reached and not failed else CHECK_AGAIN_S)
        before, self._failed = self._failed, failed
        return failed and before


def reached_at(
    reach: Reach, announced: Sequence[str], visible: Sequence[str], peer_id: str
) -> tuple[str, ...]:
    """The multiaddrs, with peer id, that a peer tells others, those that were tried first."""
    if reach.kind == "dial_out":
        return ()
    tried = tuple(f"{address}/p2p/{peer_id}" for address in reach.addresses)
    told = dict.fromkeys((*tried, *invite_addresses(announced, visible, peer_id)))
    return tuple(told)[:MAX_INVITE_ADDRESSES]


def described(reach: Reach, announced: Sequence[str], told: Sequence[str]) -> tuple[int, str]:
    """What a volunteer should know of it, with the level at which to log it."""
    at = ", ".join(told)
    if reach.kind == "unknown":
        return logging.INFO, f"is reached at {at} as far as it knows; nobody could try"
    if reach.kind != "dial_out":
        through = ", which its router maps to it" if reach.kind == "mapped" else ""
        return logging.INFO, f"is reached at {at}{through}"
    where = ", ".join(announced or reach.seen)
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
    told = answered(await called(peer, stub.rpc_clock(pack({})), limit_s)).get("time")
    if not isinstance(told, float):
        raise ConnectionError(f"{peer} told no time")
    return told


async def _down(p2p: P2P, peer: PeerID, span_s: float) -> float:
    stub: Any = Probe.get_stub(p2p, peer)
    frames = await stub.rpc_bandwidth_down(pack({"seconds": span_s}))
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
        yield pack({})
        end = time.monotonic() + span_s
        for _ in range(BANDWIDTH_LIMIT_BYTES // len(CHUNK)):
            if time.monotonic() > end:
                return
            yield pack({}, CHUNK)

    answer = answered(await stub.rpc_bandwidth_up(frames()))
    return float(answer["bytes"]) / max(1e-6, float(answer["seconds"]))


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value < MAX_NAMED else 1


def _is_own(address: str) -> bool:
    """Whether an address is one of this machine's interfaces."""
    host = listen_address(address).host
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(target)
            return True
    return False
