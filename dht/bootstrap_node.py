"""The bootstrap node: the address that an invite names, and the keeper of the run's manifest. It
stands apart from the command, because it is a node of the DHT alone: no chain, no figures.

The operator's signs the manifest and renews it. A copy has an identity of its own and no key of the
operator: it keeps what the operator signed last, on disk and in the DHT, for as long as that is
valid (manifest_keeper.py). So any one of them may be away, or gone.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

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

WATCH_PERIOD_S = 1.0
OTHERS_PERIOD_S = 20.0  # between pings of the other bootstraps, which also bring swarms together
OTHERS_LIMIT_S = 5.0
RENEWAL_PATIENCE_S = 300.0  # without a renewal until that is told; what is there is valid for days


class Companion(Protocol):
    """What runs beside the node, in its thread."""

    def tick(self) -> None:
        """Called every second or so; raises nothing and returns after a few seconds."""
        ...

    def close(self) -> None: ...


def run_bootstrap(
    *,
    keeper: ManifestKeeper,
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    others: Sequence[str],
    alone: bool,
    stop_event: threading.Event,
    on_ready: Callable[[Invite], None],
    beside: Callable[[RunDHT, Swarm], Companion] | None = None,
    look_s: float = WATCH_PERIOD_S,
    refresh_s: float = MANIFEST_REFRESH_S,
) -> None:
    """Serve the DHT and keep the signed manifest alive in it until `stop_event` is set.

    `others`: addresses of other bootstraps of the run; `alone`: none of them needs to be up.
    `on_ready` gets the invite as soon as a peer can join with it; what `beside` makes then is
    called until the end. `look_s`: seconds between two looks at the node; `refresh_s`: between two
    renewals of the manifest. Raises what `keeper.publish` raises at first, and `EnvironmentFault`
    when the node cannot start or ends by itself.
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
        alone=alone,
        leads_time=keeper.own,
    )
    companion: Companion | None = None
    try:
        swarm = Swarm(dht, run, identity, clock)
        if not keeper.publish(swarm):
            raise EnvironmentFault(
                "the DHT does not take the manifest: check that no other bootstrap runs this key"
            )
        own = invite_addresses(announce, dht.visible_addresses(), identity.peer_id)
        on_ready(Invite(run, (*own, *others)[:MAX_BOOTSTRAPS]))
        companion = None if beside is None else beside(dht, swarm)
        published_at = pinged_at = clock.own_time()
        renewals = Renewals()
        while not stop_event.wait(look_s):
            if not dht.running:
                raise EnvironmentFault("the DHT node has ended: start the bootstrap again")
            now = clock.own_time()
            if keeper.due or now - published_at > refresh_s:
                published_at = now
                renewals.note(keeper.publish(swarm), now)
            if now - pinged_at > OTHERS_PERIOD_S:
                pinged_at = now
                swarm.bootstrap_answers(OTHERS_LIMIT_S)
            if companion is not None:
                companion.tick()
    finally:
        if companion is not None:
            companion.close()
        dht.close()


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
