"""Questions that the main process puts to its DHT child: coroutines that run beside the node."""

# hivemind carries no type stubs and leaves much unannotated.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from dilocox.dht.keepers import Keepers
from dilocox.dht.protocol import Entry
from dilocox.dht.reach import Reach
from dilocox.dht.wire import pack

PAUSE_S = 0.2  # between two pings


@dataclass(frozen=True)
class StoredValue:
    """A value as it goes into the DHT: under a key, or under one of the key's subkeys."""

    key: str
    value: bytes
    expires_at: float  # run time, in seconds
    subkey: bytes | None = None


async def reach(dht: DHT, _node: DHTNode) -> Reach:
    """How others reached the node when it started."""
    return getattr(dht, "_reach", Reach())


async def visible_addresses(_dht: DHT, node: DHTNode) -> tuple[str, ...]:
    """Multiaddrs, with peer id, that the node is reached at as far as it knows."""
    try:
        return tuple(str(address) for address in await node.get_visible_maddrs(latest=True))
    except ValueError:  # a node that listens nowhere
        return ()


async def known_nodes(_dht: DHT, node: DHTNode) -> int:
    """How many other nodes stand in the node's routing table."""
    return len(node.protocol.routing_table.uid_to_peer_id)


async def refused_values(_dht: DHT, node: DHTNode) -> Counter[str]:
    """How many values the node's validators refused, by reason."""
    counts: Counter[str] = Counter()
    for validator in getattr(node.protocol.record_validator, "_validators", ()):
        counts.update(getattr(validator, "refused", ()))
    return counts


async def latest_values(
    _dht: DHT, node: DHTNode, keys: tuple[str, ...], timeout_s: float
) -> dict[str, Any]:
    """The newest value under each key, None where nobody has one, in one search for all of them.

    Keys whose search did not end in time are left out; a frozen node delays only those it is near.
    """
    searches: Any = await node.get_many(
        keys, sufficient_expiration_time=float("inf"), return_futures=True
    )
    if searches:
        await asyncio.wait(searches.values(), timeout=timeout_s)
    found: dict[str, Any] = {}
    for key, search in searches.items():
        if search.done() and not search.cancelled() and search.exception() is None:
            found[key] = None if search.result() is None else search.result().value
        else:
            search.cancel()
    return found


async def news(
    dht: DHT,
    node: DHTNode,
    known: Mapping[str, Collection[bytes]],
    thorough: bool,
    timeout_s: float,
) -> dict[str, list[Entry]]:
    """The values under each key that are not among the known marks (keepers.py)."""
    keys = {DHTID.generate(key): key for key in known}
    asked = {key_id: known[key] for key_id, key in keys.items()}
    found = await _keepers(dht, node).news(asked, thorough=thorough, timeout_s=timeout_s)
    return {keys[key_id]: entries for key_id, entries in found.items()}


async def store_values(
    dht: DHT, node: DHTNode, values: tuple[StoredValue, ...], timeout_s: float
) -> bool:
    """Give these values to the keepers of their keys; whether all were taken in time."""
    entries = {
        DHTID.generate(each.key): Entry(each.subkey, pack(each.value), each.expires_at)
        for each in values
    }
    try:
        return await asyncio.wait_for(_keepers(dht, node).store(entries), timeout_s)
    except asyncio.TimeoutError:
        return False


def _keepers(dht: Any, node: DHTNode) -> Keepers:
    if dht.keepers is None:
        dht.keepers = Keepers(node)
    return dht.keepers


async def any_answers(_dht: DHT, node: DHTNode, peers: tuple[str, ...], timeout_s: float) -> bool:
    """Whether one of these peers answers a ping in time."""
    calls: list[Awaitable[object]] = [
        node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers
    ]
    for call in asyncio.as_completed(calls, timeout=timeout_s):
        try:
            if await call is not None:
                return True
        except asyncio.TimeoutError:
            return False
    return False


async def meet(dht: DHT, node: DHTNode, peers: tuple[str, ...], timeout_s: float) -> bool:
    """Whether the node knows another one; while it does not, these are pinged again and again.

    hivemind pings each of them once as it starts, and a machine that is busy answers too late.
    """
    known = node.protocol.routing_table.uid_to_peer_id
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not known and loop.time() < end:
        answered = await any_answers(dht, node, peers, end - loop.time())
        await asyncio.sleep(PAUSE_S)  # who answers is entered in a task of its own
        if answered and known:
            with contextlib.suppress(asyncio.TimeoutError):
                neighbours = node.find_nearest_nodes([node.node_id])
                await asyncio.wait_for(neighbours, max(PAUSE_S, end - loop.time()))
    return bool(known)


async def who_answers(
    _dht: DHT, node: DHTNode, peers: tuple[str, ...], timeout_s: float
) -> tuple[str, ...]:
    """Those of these peers that answer a ping in time."""
    calls = {
        asyncio.ensure_future(node.protocol.call_ping(PeerID.from_base58(peer))): peer
        for peer in peers
    }
    done, late = await asyncio.wait(calls, timeout=timeout_s) if calls else (set(), set())
    for call in late:
        call.cancel()
    return tuple(
        calls[call] for call in done if call.exception() is None and call.result() is not None
    )
