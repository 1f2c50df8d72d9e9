"""From an invite to the swarm: open the DHT, fetch the manifest, prove it. Used by every command
that is given an invite.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer

from dilocox.dht.addresses import NO_FALLBACK, FallbackPeers, Reachability
from dilocox.dht.clock import RunClock
from dilocox.dht.errors import BootstrapsSilent, EnvironmentFault, UnknownRun
from dilocox.dht.identity import Identity, peer_id_of
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import kept_manifest, newer_of
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator

MANIFEST_LIMIT_S = 20.0  # a bootstrap publishes it before it gives the invite away


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A place in the swarm of one run.

    witness: peer id of the operator's bootstrap, whose archive vouches for the chains of the run:
    it has the key that the run id was made of. Empty: nobody does.
    """

    identity: Identity
    run: str
    manifest: Manifest
    clock: RunClock
    dht: RunDHT
    swarm: Swarm
    reach: Reachability = field(default_factory=Reachability)
    witness: str = ""


def check_node(joined: Joined) -> None:
    """Raise EnvironmentFault if this program's own DHT node has ended."""
    if not joined.dht.running:
        raise EnvironmentFault("this program's own DHT node has ended; start it again")


@contextmanager
def visiting(invite: Invite, host: str = "") -> Generator[Joined]:
    """Join as a visitor, which only reads, under a one-time identity; raises as `join_run`.

    host: address to listen on, if any.
    """
    typer.echo(f"looking for the run {invite.run_id} ...", err=True)
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        listen = [f"/ip4/{host}/tcp/0"] if host else []
        with join_run(invite, identity, listen=listen, client_mode=True) as joined:
            yield joined


@contextmanager
def join_run(
    invite: Invite,
    identity: Identity,
    *,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    client_mode: bool = False,
    kept: Path | None = None,
    fallback: FallbackPeers = NO_FALLBACK,
) -> Generator[Joined]:
    """Join the DHT and read the run's manifest; leaves, with all processes, at the end.

    kept: file of a manifest that was seen before (manifest_revisions.py); the DHT's may be an
    older one. fallback: peers to join by instead of the bootstraps; the kept manifest will do then,
    and whether others reach this peer is taken as it was.

    Raises:
        InvalidInput: the invite and the manifest do not belong together.
        BootstrapsSilent: no bootstrap answers.
        EnvironmentFault: a port is in use.
    """
    # hivemind's processes work under fork only; Python's default will change
    multiprocessing.set_start_method("fork", force=True)
    from dilocox.dht.reachability import find_reach  # hivemind is heavy

    clock = RunClock()
    if fallback.client_mode:
        client_mode, listen, announce = True, (), ()
    dht = open_dht(
        identity=identity,
        bootstraps=invite.bootstraps,
        listen=listen,
        announce=announce,
        client_mode=client_mode,
        find_reach=None if client_mode else find_reach,
        validator=RunRecordValidator(invite.run_id, identity),
        clock=clock,
        fallback=fallback,
    )
    try:
        swarm = Swarm(dht, invite.run_id, identity, clock)
        before = kept_manifest(kept, invite.run_id) if kept is not None else None
        try:
            found = swarm.fetch_manifest(MANIFEST_LIMIT_S)
        except (BootstrapsSilent, UnknownRun):
            if before is None or not fallback:
                raise
            found = before
        signed = newer_of(found, before, invite.run_id)
        manifest, witness = signed.verify(invite.run_id), peer_id_of(signed.run_key)
        swarm.admit_by(manifest, witness, kept)
        yield Joined(
            identity=identity,
            run=invite.run_id,
            manifest=manifest,
            clock=clock,
            dht=dht,
            swarm=swarm,
            reach=Reachability(kind="dial_out") if fallback.client_mode else dht.reach(),
            witness=witness,
        )
    finally:
        dht.close()
