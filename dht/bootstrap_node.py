"""The bootstrap node: the address that an invite names, and the keeper of the run's manifest. It
stands apart from the command, because it is a node of the DHT alone: no chain, no figures.

The operator's signs the manifest and renews it. A copy has an identity of its own and no key of the
operator: it keeps what the operator signed last, on disk and in the DHT, for as long as that is
valid (manifest_keeper.py). So any one of them may be away, or gone.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dilocox.dht.clock import RunClock
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import MAX_BOOTSTRAPS, Invite, invite_addresses
from dilocox.dht.manifest_keeper import ManifestKeeper
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.records import MANIFEST_REFRESH_S
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator

logger = logging.getLogger(__name__)

OTHERS_PERIOD_S = 20.0  # between pings of the other bootstraps, which also bring swarms together
OTHERS_LIMIT_S = 5.0
RENEWAL_PATIENCE_S = 300.0  # without a renewal until that is told; what is there is valid for days


@contextmanager
def bootstrap_node(
    *,
    keeper: ManifestKeeper,
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    others: Sequence[str],
    refresh_s: float = MANIFEST_REFRESH_S,
) -> Generator[BootstrapNode]:
    """A node of the DHT that has the signed manifest, until the context ends.

    `others`: addresses of other bootstraps of the run, of which one must be up if the keeper does
    not know the run yet. `refresh_s`: seconds between two renewals of the manifest. Raises what
    `keeper.publish` raises, and `EnvironmentFault` when the node cannot start.
    """
    run, clock = keeper.run, RunClock()
    dht = open_dht(
        identity=identity,
        bootstraps=others,
        listen=listen,
        announce=announce,
        client_mode=False,
        validator=RunRecordValidator(run, identity),
        clock=clock,
        alone=keeper.known,
        leads_time=keeper.own,
        keeps_all=True,
    )
    try:
        swarm = Swarm(dht, run, identity, clock)
        if not keeper.publish(swarm):
            raise EnvironmentFault(
                "the DHT does not take the manifest: check that no other bootstrap runs this key"
            )
        own = invite_addresses(announce, dht.visible_addresses(), identity.peer_id)
        invite = Invite(run, (*own, *others)[:MAX_BOOTSTRAPS])
        yield BootstrapNode(dht, swarm, invite, keeper, clock, refresh_s)
    finally:
        dht.close()


@dataclass(eq=False)
class BootstrapNode:
    """A running one. invite: a peer can join with it."""

    dht: RunDHT
    swarm: Swarm
    invite: Invite
    keeper: ManifestKeeper
    clock: RunClock
    refresh_s: float

    def __post_init__(self) -> None:
        self._published_at = self._pinged_at = self.clock.own_time()
        self._renewals = Renewals()

    def tick(self) -> None:
        """Renew the manifest where that is due, and see the others; call it every second or so.

        Raises `EnvironmentFault` when the node has ended by itself.
        """
        if not self.dht.running:
            raise EnvironmentFault("the DHT node has ended: start the bootstrap again")
        now = self.clock.own_time()
        if self.keeper.due or now - self._published_at > self.refresh_s:
            self._published_at = now
            self._renewals.note(self.keeper.publish(self.swarm), now)
        if now - self._pinged_at > OTHERS_PERIOD_S:
            self._pinged_at = now
            self.swarm.bootstrap_answers(OTHERS_LIMIT_S)


class Renewals:
    """Whether the DHT takes the manifest, told where it has not for a while.

    A single failure is none of the operator's: one busy node in the swarm, or one that has just
    got the manifest from another, is enough for it.
    """

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._told = False

    def note(self, taken: bool, now: float) -> None:
        """The manifest was published, or not, at `now`, in seconds."""
        if taken:
            if self._told:
                logger.info("the manifest is renewed again")
            self._failing_since, self._told = None, False
            return
        if self._failing_since is None:
            self._failing_since = now
        if not self._told and now - self._failing_since >= RENEWAL_PATIENCE_S:
            self._told = True
            logger.warning(
                "the manifest could not be renewed for %.0f minutes: is this machine overloaded or "
                "cut off? It stays valid for days; trying again",
                (now - self._failing_since) / 60,
            )
