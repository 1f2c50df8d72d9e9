"""What `dilocox doctor` must know of the run, from its DHT and its peers. It is a file of its own,
because it needs hivemind, and the doctor also runs where that cannot be loaded.

The doctor joins as a client under an identity of its own, which it forgets, and publishes nothing:
to the run it was never there. It listens as the peer would, so that others can dial it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any, TypeVar

from hivemind.p2p import PeerID

from dilocox.dht.addresses import Reachability
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined
from dilocox.dht.reachability import Bandwidth, ask_time, find_reach, measure_bandwidth
from dilocox.dht.records import ClaimRecord, StageRecord, claim_key
from dilocox.dht.rpc import LoopThread
from dilocox.dht.swarm_view import SwarmView, that_count
from dilocox.peer.process.starting_stage import look_at_stages, named_stage
from dilocox.pipeline.partition import plan_stages
from dilocox.pipeline.stage_choice import choose_stage, live_peers

logger = logging.getLogger(__name__)

HANDLE_LIMIT_S = 5.0
MAX_VERSION = 20  # letters of what a peer may have written there
REACH_LIMIT_S = 8.0
CLOCK_LIMIT_S = 2.0
BANDWIDTH_LIMIT_S = 8.0
PEERS_TRIED = 3  # for the bandwidth: one in an exchange needs its link for itself

T = TypeVar("T")


class SwarmFacts:
    """Asks the run, through a place in its DHT, until it is closed."""

    def __init__(self, joined: Joined, invite: Invite, own_id: str):
        """own_id: of the peer that may run elsewhere meanwhile; empty for one that is new."""
        self._joined = joined
        self._bootstraps = invite.peer_ids
        self._own_id = own_id
        self._thread = LoopThread("doctor's network", p2p=joined.dht.replicate_p2p)

    def close(self) -> None:
        self._thread.close()

    # ---- records ---------------------------------------------------------------------------------
    @cached_property
    def sizes(self) -> list[int]:
        """Parameters of each stage."""
        manifest = self._joined.manifest
        return [plan.num_parameters for plan in plan_stages(manifest.model, manifest.stages)]

    @cached_property
    def records(self) -> dict[int, dict[str, StageRecord]]:
        """What the others say of themselves, by stage."""
        found = look_at_stages(self._joined)
        return {
            stage: {peer: record for peer, record in here.items() if peer != self._own_id}
            for stage, here in found.items()
        }

    @property
    def trained(self) -> int:
        """How many of the run's tokens are in records, as peers take it to be."""
        manifest = self._joined.manifest
        claims = self._joined.swarm.read(claim_key(self._joined.run, 0), ClaimRecord) or {}
        counting = that_count(claims, manifest)
        view = SwarmView(me=self._own_id, stages=self.records, run_claims=counting)
        return view.run_tokens(self._joined.witness)

    @property
    def peers(self) -> dict[int, int]:
        """How many others host each stage."""
        return {stage: len(live_peers(here)) for stage, here in self.records.items()}

    @property
    def versions(self) -> Counter[str]:
        """How many of them have which version."""
        return Counter(
            record.version[:MAX_VERSION]
            for here in self.records.values()
            for record in here.values()
            if record.present
        )

    def stage(self, option: str, before: int | None) -> int:
        """The stage that this peer would take. Raises InvalidInput for one that is none."""
        stages = self._joined.manifest.stages
        if (named := named_stage(option, stages)) is not None:
            return named
        if before is not None:
            return before
        return choose_stage(self.records, me=self._own_id, num_stages=stages)

    # ---- questions -------------------------------------------------------------------------------
    def peer_clock(self, stage: int) -> float | None:
        """How far some peer's run time is ahead of ours, in seconds; None if nobody tells."""
        clock = self._joined.clock

        async def ask(peer: PeerID) -> float:
            began = clock.time()
            told = await ask_time(self._thread.p2p, peer, limit_s=CLOCK_LIMIT_S)
            return told - (began + clock.time()) / 2

        return self._first(ask, self._hosts(stage))

    def reach(self, announce: Sequence[str], port: int = 0) -> Reachability:
        """What others find that dial this machine: the doctor, or what listens at this port."""
        own = list(announce)
        for address in self._joined.dht.visible_addresses():
            told = address.partition("/p2p/")[0]
            own.append(f"{told.rpartition('/')[0]}/{port}" if port else told)
        asked = [PeerID.from_base58(peer) for peer in self._bootstraps]

        async def find() -> Reachability:
            return await find_reach(self._thread.p2p, asked, own, limit_s=REACH_LIMIT_S)

        return self._run(find(), REACH_LIMIT_S + 2.0) or Reachability(kind="unknown")

    def bandwidth(self, stage: int) -> Bandwidth | None:
        """Bytes a second from and to a peer of the run, None if nobody has time for that."""

        async def measure(peer: PeerID) -> Bandwidth:
            return await measure_bandwidth(self._thread.p2p, peer, limit_s=BANDWIDTH_LIMIT_S)

        return self._first(measure, self._hosts(stage))

    # ---- pieces ----------------------------------------------------------------------------------
    def _hosts(self, stage: int) -> list[PeerID]:
        """The peers to ask: those of the stage, then others, then the bootstraps."""
        hosts: list[str] = []
        for number in sorted(self.records, key=lambda number: number != stage):
            here = self.records[number]
            hosts += [peer for peer in live_peers(here) if not here[peer].client_mode]
        few = hosts[: PEERS_TRIED - 1]
        return [PeerID.from_base58(peer) for peer in (*few, *self._bootstraps[:PEERS_TRIED])]

    def _first(self, ask: Any, peers: Sequence[PeerID]) -> Any:
        """The first answer of peers that are asked one after the other."""

        async def first() -> Any:
            for peer in peers:
                try:
                    return await ask(peer)
                except ConnectionError as error:
                    logger.debug("no answer: %s", error)
            return None

        return self._run(first(), BANDWIDTH_LIMIT_S + 10.0)

    def _run(self, question: Coroutine[Any, Any, T], limit_s: float) -> T | None:
        """Ask within a deadline; None if nothing came."""

        try:
            if not self._thread.running:
                self._thread.start(HANDLE_LIMIT_S)
        except EnvironmentFault as error:
            question.close()
            logger.debug("not asked: %r", error)
            return None
        try:
            return self._thread.ask(question, limit_s)
        except (ConnectionError, asyncio.TimeoutError) as error:
            logger.debug("not asked: %r", error)
            return None
