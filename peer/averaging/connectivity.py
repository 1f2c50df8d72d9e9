"""The connections between a peer and the others of its swarm, kept open while it runs. Apart from
coordinator.py: it talks to p2pd and knows no rounds.

Its coordinator says which peers to dial and when to ask whether others still reach it; its
averaging process, which has the handle to p2pd, does so and answers those that ask the same
(averager.py, dht/reachability.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from dilocox.dht.addresses import NO_FALLBACK, FallbackPeers
from dilocox.dht.reachability import REACHED, ReachWatch
from dilocox.dht.reconnect import Targets, dial_targets, entries_among
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.state_folder import StateFolder
from dilocox.pipeline.candidates import cannot_be_reached

logger = logging.getLogger(__name__)

NOTE_AGAIN_S = 20.0


class Connectivity:
    """The part of the coordinator, in its thread."""

    def __init__(self, local: LocalPeer, averager: StageAverager):
        self._local = local
        self._averager = averager
        self._dialled: Targets = {}
        self._shut = False
        self._noted = NO_FALLBACK
        self._noted_at = local.clock.monotonic()  # the first views may show few
        self._watch = ReachWatch(
            averager.check_reach,
            reached=local.reach.kind in REACHED,
            by_others=local.reach.by_others,
            now=local.clock.monotonic(),
            told=local.addresses,
        )

    def look(self, view: SwarmView, proven: Collection[str] = ()) -> None:
        """Keep those to others open where they cannot open them; say where there are none. Note the
        peers to come back by at the next start; proven: only these, where they can be dialled.
        """
        local = self._local
        self._note(view, proven)
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

    def _note(self, view: SwarmView, proven: Collection[str]) -> None:
        local, now = self._local, self._local.clock.monotonic()
        if now < self._noted_at + NOTE_AGAIN_S:
            return
        self._noted_at = now
        near = local.dht.local_network
        found = entries_among(view.stages, local.me, local.stage, proven, local_network=near)
        fallback = FallbackPeers(addresses=found, client_mode=local.client_mode, local_network=near)
        if fallback and fallback != self._noted:
            self._noted = fallback
            fallback.keep(StateFolder(local.options.state).fallback_peers(local.run))

    def lost(self, now: float) -> bool:
        """Whether others do not reach this peer, which did not start as one that they cannot."""
        return not self._local.client_mode and self._watch.lost(now)
