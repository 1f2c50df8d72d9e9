"""The connections between a peer and the others of its swarm, kept open while it runs.

Its coordinator says whom to dial and when to ask whether others still reach it; its averaging
process, which has the handle to p2pd, does so and answers those who ask the same
(dht/reachability.py).

`LocalPeer` says which peer this is: all parts of the coordinator share it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from hivemind.averaging import control as hivemind_control
from hivemind.p2p import PeerID

from dilocox.compression.layout import FlatLayout
from dilocox.dht.addresses import Reachability, ReachKind
from dilocox.dht.clock import Clock
from dilocox.dht.manifest import Manifest
from dilocox.dht.reachability import REACHED, Probe, ReachWatch, find_reach
from dilocox.dht.reconnect import Redialler, Targets, dial_targets
from dilocox.dht.swarm_view import SwarmView
from dilocox.pipeline.placement import cannot_be_reached

if TYPE_CHECKING:
    from dilocox.peer.rounds.exchange import Attempt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LocalPeer:
    """Which peer this is, in which run."""

    me: str
    run: str
    stage: int
    manifest: Manifest
    layout: FlatLayout
    addresses: tuple[str, ...]
    client_mode: bool
    memory_limit_bytes: float | None
    name: str = ""
    reachability: ReachKind = "unknown"
    reached_by_others: bool = False  # not only by a bootstrap


class ConnectivityService:
    """The part of the averaging process; it gives this the attributes below."""

    attempts: dict[bytes, Attempt]
    config: Any
    client_mode: bool
    prefix: str
    _p2p: Any

    async def answer_others(self) -> None:
        """hivemind's clients answer nobody, but here means and votes are sent to all members."""
        probe = Probe(
            self._p2p,
            now=hivemind_control.get_dht_time,
            busy=lambda: any(attempt.running for attempt in self.attempts.values()),
            bootstraps=self.config.bootstraps,
        )
        await probe.add_p2p_handlers(self._p2p)
        if self.client_mode:
            averager: Any = self
            await averager.add_p2p_handlers(self._p2p, namespace=self.prefix)

    async def _serve_redial(self, targets: Targets) -> None:
        self._redialler.aim(targets)

    async def _serve_check_reach(self, again: bool) -> Reachability:
        found = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        own = [address.rpartition("/p2p/")[0] for address in found]
        asked = [PeerID.from_base58(peer) for peer in self.config.bootstraps]
        return await find_reach(self._p2p, asked, own, again=again)

    @cached_property
    def _redialler(self) -> Redialler:
        return Redialler(self._p2p)


class DialsOthers(Protocol):
    """What the coordinator asks of the averaging process."""

    def redial(self, targets: Targets) -> None:
        """Keep connections to these peers open."""
        ...

    def check_reach(self, again: bool) -> Any:
        """Ask whether others reach this peer, `again` where they did; a future of Reachability."""
        ...


class Connectivity:
    """The part of the coordinator, in its thread."""

    def __init__(self, local: LocalPeer, averager: DialsOthers, clock: Clock):
        self._local = local
        self._averager = averager
        self._dialled: Targets = {}
        self._shut = False
        self._watch = ReachWatch(
            averager.check_reach,
            reached=local.reachability in REACHED,
            by_others=local.reached_by_others,
            now=clock.monotonic(),
        )

    def look(self, view: SwarmView) -> None:
        """Keep those to others open where they cannot open them; say where there are none."""
        local = self._local
        if not local.client_mode:
            return
        targets = dial_targets(view.stages, local.me, local.stage)
        if targets != self._dialled:
            self._dialled = targets
            self._averager.redial(targets)
        shut = cannot_be_reached(view.stage) and len(view.stage) > 1
        if shut and not self._shut:
            logger.warning(
                "all %d peers of stage %d can only dial out, so they cannot average: one that "
                "others reach is needed (see --port and --announce)",
                len(view.stage),
                local.stage,
            )
        self._shut = shut

    def lost(self, now: float) -> bool:
        """Whether others do not reach this peer, which did not start as one that they cannot."""
        return not self._local.client_mode and self._watch.lost(now)
