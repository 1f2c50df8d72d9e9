"""From an invite to the swarm: open the DHT, fetch the manifest, prove it. Used by every command
that is given an invite.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator

MANIFEST_LIMIT_S = 20.0  # a bootstrap publishes it before it gives the invite away


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A place in the swarm of one run."""

    identity: Identity
    run: str
    manifest: Manifest
    clock: RunClock
    dht: RunDHT
    swarm: Swarm


@contextmanager
def joined(
    invite: Invite,
    identity: Identity,
    *,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    client_mode: bool = False,
) -> Generator[Joined]:
    """Join the DHT and read the run's manifest; leaves, with all processes, at the end.

    Raises:
        InvalidInput: the invite and the manifest do not belong together.
        EnvironmentFault: no bootstrap answers, or a port is in use.
    """
    # hivemind's processes work under fork only; Python's default will change
    multiprocessing.set_start_method("fork", force=True)
    clock = RunClock()
    dht = open_dht(
        identity=identity,
        bootstraps=invite.bootstraps,
        listen=listen,
        announce=announce,
        client_mode=client_mode,
        validator=RunRecordValidator(invite.run_id, identity),
        clock=clock,
    )
    try:
        swarm = Swarm(dht, invite.run_id, identity, clock)
        signed = swarm.fetch_manifest(invite.run_id, MANIFEST_LIMIT_S)
        yield Joined(
            identity=identity,
            run=invite.run_id,
            manifest=signed.verify(invite.run_id),
            clock=clock,
            dht=dht,
            swarm=swarm,
        )
    finally:
        dht.close()
