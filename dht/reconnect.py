"""Connections that a peer which only dials out keeps open: others cannot open them.

libp2p does not dial again by itself after a cut, and routers forget a way that is not used. So such
a peer dials everybody who may have to call it, and asks them the time now and then; where no answer
comes for long, the connection is given up, for it may hang after the cut has healed, and made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from dilocox.dht.addresses import MAX_ENTRIES
from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.names import shown_peer
from dilocox.dht.reachability import allowed_ips, ask_time
from dilocox.dht.records import StageRecord
from dilocox.dht.rpc import SILENCE_S, Silence
from dilocox.dht.swarm_view import own_order

logger = logging.getLogger(__name__)

BEAT_S = 20.0  # routers forget a mapping after 30 s at the earliest
SOON_S = 5.0  # to the next try where one failed
LOOK_S = 0.5
CONNECT_LIMIT_S = 5.0
MAX_DIALLED = 64
COMMON = 8  # of them dialled by everybody, so that any two peers have dialled some in common
AT_ONCE = 8  # dialled

Targets = Mapping[str, Sequence[str]]
"""Multiaddrs by peer id."""


def dial_targets(
    stages: Mapping[int, Mapping[str, StageRecord]], me: str, own_stage: int
) -> dict[str, tuple[str, ...]]:
    """The targets of a peer that only dials out: it must have dialled them, so they can call it.

    Those of its stage watch it while they average, each the next members in the order of peer ids,
    so those just before it come first. The heads of stage 0 recruit it. The rest passes requests on
    to it. It dials its neighbours in a replica itself. Where there is not room for all, these take
    turns, and each peer draws others, so that only the common ones are dialled by all.
    """
    hosts = {stage: _hosts(here, me) for stage, here in stages.items()}
    own, heads = hosts.get(own_stage, {}), hosts.get(0, {}) if own_stage else {}
    everybody = {peer: there for here in hosts.values() for peer, there in here.items()}
    rest = [peer for peer in everybody if peer not in own and peer not in heads]

    def drawn(peers: Iterable[str], by: str) -> list[str]:
        return sorted(peers, key=lambda peer: _draw(by, peer))

    before_me_first = sorted(own, key=lambda peer: (peer < me, peer), reverse=True)
    turns = zip_longest(before_me_first, drawn(heads, me), drawn(rest, me))
    order = [*drawn(everybody, "")[:COMMON], *(peer for turn in turns for peer in turn if peer)]
    return {peer: everybody[peer] for peer in list(dict.fromkeys(order))[:MAX_DIALLED]}


def entries_among(
    stages: Mapping[int, Mapping[str, StageRecord]],
    me: str,
    own_stage: int,
    proven: Collection[str],
    *,
    local_network: bool,
) -> tuple[str, ...]:
    """Peers that a peer may come back by (addresses.py): two addresses of a peer at most, each
    peer's first one before the second of any; only numeric ones, which lead nowhere else later.

    proven: only these, where there are any: others may be strangers, which would tell it the time.
    """
    known = {stage: {p: here[p] for p in here if p in proven} for stage, here in stages.items()}
    targets = dial_targets(known, me, own_stage) or dial_targets(stages, me, own_stage)
    usable = [
        [each for each in addresses if _is_number(each, local_network=local_network)][:2]
        for addresses in targets.values()
    ]
    turns = zip_longest(*usable)
    return tuple(each for turn in turns for each in turn if each is not None)[:MAX_ENTRIES]


def relays_between(
    stages: Mapping[int, Mapping[str, StageRecord]],
    me: str,
    own_stage: int,
    peer: str,
    *,
    client_mode: bool,
) -> list[str]:
    """The peers that pass this peer's requests on to that one, in any order; none where it can be
    called.

    Only peers that it has dialled can call a peer that only dials out, so they pass on what others
    ask it. client_mode: whether this peer only dials out, too; then those that it dials itself.
    """
    theirs = [stage for stage, here in stages.items() if peer in here and here[peer].client_mode]
    if not theirs:
        return []
    dialled = dial_targets(stages, peer, theirs[0])
    if me in dialled and not client_mode:
        return []
    routes = dial_targets(stages, me, own_stage) if client_mode else dialled
    known = [each for each in dialled if each in routes]  # never empty: both dial the common ones
    return random.sample(known, len(known))  # others at the next try: some may be gone


class Redialler:
    """Keeps connections to its targets open; lives in one event loop.

    local_network: whether the targets may be at addresses that the internet does not route. In a
    run on the internet these would be hosts of this peer's own network, which a stranger's record
    has no business to name.
    """

    def __init__(self, p2p: P2P, *, local_network: bool):
        self._p2p = p2p
        self._local_network = local_network
        self._targets: Targets = {}
        self._next: dict[str, float] = {}
        self._silence = Silence()
        self._busy: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    def aim(self, targets: Targets) -> None:
        """Dial these from now on, those that are new at once."""
        self._targets = targets
        self._next = {peer: at for peer, at in self._next.items() if peer in targets}
        self._silence.only(targets)
        if self._task is None:
            self._task = asyncio.ensure_future(self._live())

    async def _live(self) -> None:
        beats: set[asyncio.Task[None]] = set()
        while True:
            now = time.monotonic()
            for peer, addresses in self._targets.items():
                if peer not in self._busy and self._next.get(peer, 0.0) <= now:
                    self._busy.add(peer)
                    beat = asyncio.ensure_future(self._beat(peer, addresses))
                    beats.add(beat)
                    beat.add_done_callback(beats.discard)
            await asyncio.sleep(LOOK_S)

    async def _beat(self, peer: str, addresses: Sequence[str]) -> None:
        try:
            answered = await self._answers(PeerID.from_base58(peer), addresses)
            if not answered and self._silence.too_long(peer):
                logger.info("peer %s does not answer; dialling it again", shown_peer(peer))
                await self._hang_up(PeerID.from_base58(peer))
                answered = await self._answers(PeerID.from_base58(peer), addresses)
            self._next[peer] = time.monotonic() + (BEAT_S if answered else SOON_S)
        finally:
            self._busy.discard(peer)

    async def _answers(self, peer: PeerID, addresses: Sequence[str]) -> bool:
        try:
            async with self._slots:
                places = await self._places(addresses)
                # does nothing where a connection stands
                await asyncio.wait_for(self._p2p._client.connect(peer, places), CONNECT_LIMIT_S)
            self._silence.asked(str(peer))
            await ask_time(self._p2p, peer, limit_s=SILENCE_S)
        except Exception as error:  # noqa: BLE001 - p2pd has many names for a peer that is gone
            logger.debug("%s not dialled: %r", peer, error)
            return False
        self._silence.ended(str(peer))
        return True

    async def _places(self, addresses: Sequence[str]) -> list[Multiaddr]:
        """Where to dial these; raises ConnectionError where that is nowhere."""
        found = dict[str, None]()
        for address in addresses:
            place = bootstrap_address(address)
            for ip in await allowed_ips(place, local_network=self._local_network):
                found[f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{place.port}"] = None
        if not found:
            raise ConnectionError(f"none of {', '.join(addresses)} is an address on the internet")
        return [Multiaddr(each) for each in found]

    async def _hang_up(self, peer: PeerID) -> None:
        try:
            await asyncio.wait_for(self._p2p._client.disconnect(peer), CONNECT_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("no connection to %s to give up: %r", peer, error)


def _is_number(address: str, *, local_network: bool) -> bool:
    """Whether an address names no host, and none that the internet does not route but where all may
    be at such."""
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(bootstrap_address(address).host)
        return local_network or ip.is_global
    return False


def _hosts(here: Mapping[str, StageRecord], me: str) -> dict[str, tuple[str, ...]]:
    """The addresses of those of a stage that can be dialled, by peer."""
    found: dict[str, tuple[str, ...]] = {}
    for peer, record in here.items():
        if peer != me and record.present and not record.client_mode:
            there = tuple(each for each in record.addresses if _is_of(peer, each))
            if there:
                found[peer] = there
    return found


_draw = lru_cache(maxsize=1 << 15)(own_order)  # as below


@lru_cache(maxsize=4096)  # for each look and each request to a peer at home
def _is_of(peer: str, address: str) -> bool:
    try:
        return bootstrap_address(address).peer_id == peer
    except InvalidInput:
        return False
