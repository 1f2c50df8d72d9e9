"""Ways that a peer which only dials out keeps open: others cannot open them.

libp2p does not dial again by itself after a cut, and routers forget a way that is not used. So such
a peer dials everybody who may have to call it, and asks them the time now and then; where no answer
comes, the connection is given up, for it may hang for long after the cut has healed, and made anew.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# hivemind carries no types.

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.records import StageRecord
from dilocox.peer.reachability import ask_time

logger = logging.getLogger(__name__)

BEAT_S = 20.0  # routers forget a mapping after 30 s at the earliest
SOON_S = 5.0  # to the next try where one failed
LOOK_S = 0.5
CONNECT_LIMIT_S, ANSWER_LIMIT_S = 5.0, 3.0
PATIENCE = 3  # failed questions, after which the connection is given up
MAX_DIALLED = 64
AT_ONCE = 8

Targets = Mapping[str, Sequence[str]]
"""Multiaddrs by peer id."""


def dial_targets(
    stages: Mapping[int, Mapping[str, StageRecord]], me: str, own_stage: int
) -> dict[str, tuple[str, ...]]:
    """Whom a peer that only dials out must have dialled, so that they can call it.

    Those of its stage, with whom it averages; of the stages beside it, which may become its
    neighbours; and of stage 0, whose heads recruit. The rest of the swarm if there is room.
    """

    def order(stage: int) -> tuple[bool, int]:
        return stage > 0 and abs(stage - own_stage) > 1, abs(stage - own_stage)

    found: dict[str, tuple[str, ...]] = {}
    for stage in sorted(stages, key=order):
        for peer, record in sorted(stages[stage].items()):
            there = tuple(each for each in record.addresses if _is_of(peer, each))
            if peer != me and record.state != "left" and not record.client_mode and there:
                found[peer] = there
    return dict(list(found.items())[:MAX_DIALLED])


def relays_between(
    stages: Mapping[int, Mapping[str, StageRecord]], me: str, own_stage: int, peer: str
) -> list[str]:
    """Who passes requests of a peer that only dials out on to this one, in any order.

    Nobody where it can be dialled. Of two that can only dial out neither can call the other, but
    both have dialled these.
    """
    theirs = [stage for stage, here in stages.items() if peer in here and here[peer].client_mode]
    if not theirs:
        return []
    dialled = dial_targets(stages, me, own_stage)
    both = [each for each in dial_targets(stages, peer, theirs[0]) if each in dialled]
    return random.sample(both, len(both))  # others at the next try: some may be gone


class Redialler:
    """Keeps the ways to its targets open; lives in one event loop."""

    def __init__(self, p2p: P2P):
        self._p2p = p2p
        self._targets: Targets = {}
        self._next: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._busy: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    def aim(self, targets: Targets) -> None:
        """Dial these from now on, those that are new at once."""
        self._targets = targets
        self._next = {peer: at for peer, at in self._next.items() if peer in targets}
        self._failures = {peer: n for peer, n in self._failures.items() if peer in targets}
        if self._task is None:
            self._task = asyncio.ensure_future(self._live())

    def close(self) -> None:
        """Dial nobody any more."""
        if self._task is not None:
            self._task.cancel()

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
            async with self._slots:
                answered = await self._answers(PeerID.from_base58(peer), addresses)
                failures = self._failures[peer] = 0 if answered else self._failures.get(peer, 0) + 1
                if failures and failures % PATIENCE == 0:
                    logger.info("%s gives no answer: dialling it anew", peer)
                    await self._hang_up(PeerID.from_base58(peer))
                    answered = await self._answers(PeerID.from_base58(peer), addresses)
            self._next[peer] = time.monotonic() + (BEAT_S if answered else SOON_S)
        finally:
            self._busy.discard(peer)

    async def _answers(self, peer: PeerID, addresses: Sequence[str]) -> bool:
        places = [Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses]
        try:
            # does nothing where a connection stands
            await asyncio.wait_for(self._p2p._client.connect(peer, places), CONNECT_LIMIT_S)
            await ask_time(self._p2p, peer, limit_s=ANSWER_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - p2pd has many names for a peer that is gone
            logger.debug("%s not dialled: %r", peer, error)
            return False
        return True

    async def _hang_up(self, peer: PeerID) -> None:
        try:
            await asyncio.wait_for(self._p2p._client.disconnect(peer), CONNECT_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("no connection to %s to give up: %r", peer, error)


@lru_cache(maxsize=4096)  # for each look and each request of a head at home
def _is_of(peer: str, address: str) -> bool:
    try:
        return bootstrap_address(address).peer_id == peer
    except InvalidInput:
        return False
