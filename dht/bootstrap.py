"""The bootstrap node: the address that an invite names, and the keeper of the run's manifest."""

import ipaddress
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from dilocox.dht.clock import RunClock
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite, bootstrap_address, run_id
from dilocox.dht.keys import MANIFEST_LIFETIME_S, MANIFEST_REFRESH_S
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 1.0
MAX_INVITE_ADDRESSES = 4


class Companion(Protocol):
    """What runs beside the node, in its thread."""

    def tick(self) -> None:
        """Called every second or so; raises nothing and returns after a few seconds."""
        ...

    def close(self) -> None:
        """Called before the node ends."""
        ...


def run_bootstrap(
    *,
    manifest: Manifest,
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    initial_peers: Sequence[str],
    stop_event: threading.Event,
    on_ready: Callable[[Invite], None],
    beside: Callable[[RunDHT, Swarm], Companion] | None = None,
) -> None:
    """Serve the DHT and keep the signed manifest alive in it until `stop_event` is set.

    `identity` is the operator's: it signs the manifest. `on_ready` gets the invite as soon as a
    peer can join with it; what `beside` makes then is called until the end. Raises `InvalidInput`
    for a manifest that is too large, `EnvironmentFault` when the node cannot start or ends by
    itself.
    """
    signed = SignedManifest.sign(identity, manifest)
    run = run_id(identity.public_key, manifest.name)
    clock = RunClock()
    dht = open_dht(
        identity=identity,
        bootstraps=initial_peers,
        listen=listen,
        announce=announce,
        client_mode=False,
        validator=RunRecordValidator(run, identity),
        clock=clock,
    )
    companion: Companion | None = None
    try:
        swarm = Swarm(dht, run, identity, clock)
        if not swarm.publish_manifest(signed):
            raise EnvironmentFault(
                "the DHT does not take the manifest: check that no other bootstrap runs this key"
            )
        on_ready(Invite(run, invite_addresses(announce, dht.visible_addresses(), identity.peer_id)))
        companion = None if beside is None else beside(dht, swarm)
        published_at = clock.own_time()
        while not stop_event.wait(WATCH_PERIOD_S):
            if not dht.running:
                raise EnvironmentFault("the DHT node has ended: start the bootstrap again")
            age_s = clock.own_time() - published_at
            if age_s > MANIFEST_REFRESH_S and swarm.publish_manifest(signed):
                published_at = clock.own_time()
            elif age_s > MANIFEST_LIFETIME_S:
                logger.warning("the manifest could not be renewed for %.0f s", age_s)
            if companion is not None:
                companion.tick()
    finally:
        if companion is not None:
            companion.close()
        dht.close()


def invite_addresses(
    announce: Sequence[str], visible: Sequence[str], peer_id: str
) -> tuple[str, ...]:
    """The addresses for the invite: those announced, else those that reach furthest.

    Public addresses stand before those of a local network; loopback ones are named only when there
    is nothing else, as for a swarm on one machine.
    """
    if announce:
        return tuple(f"{address}/p2p/{peer_id}" for address in announce)
    reaches = {address: _reach(address) for address in visible}
    useful = [address for address in visible if reaches[address] > 0] or list(visible)
    useful.sort(key=lambda address: -reaches[address])
    return tuple(useful[:MAX_INVITE_ADDRESSES])


def _reach(address: str) -> int:
    try:
        ip = ipaddress.ip_address(bootstrap_address(address).host)
    except ValueError:
        return 2  # a name
    return 2 if ip.is_global else 0 if ip.is_loopback or ip.is_link_local else 1
