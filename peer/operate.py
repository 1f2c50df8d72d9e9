"""The commands `dilocox bootstrap` and `dilocox export`."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite, run_id
from dilocox.dht.manifest import Manifest, warnings
from dilocox.peer.files import write_atomically
from dilocox.peer.signals import StopSignal
from dilocox.peer.state_folder import StateFolder

if TYPE_CHECKING:  # hivemind is heavy, and `dilocox --help` needs none of it
    from dilocox.dht.node import RunDHT
    from dilocox.dht.swarm import Swarm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """The options of `dilocox bootstrap`; see their help texts."""

    manifest: Path
    state: Path
    host: str
    port: int
    announce: tuple[str, ...]
    join: tuple[str, ...]


def run_bootstrap_command(options: BootstrapOptions) -> int:
    """Serve until a signal comes; the exit code."""
    manifest = checked_manifest(options.manifest)
    for line in warnings(manifest):
        logger.warning("%s", line)
    folder = StateFolder(options.state)
    with folder.locked(), StopSignal() as stop:
        from dilocox.dht.bootstrap import run_bootstrap
        from dilocox.peer.archive import Archive

        identity = Identity.load_or_create(folder.identity)
        run = run_id(identity.public_key, manifest.name)

        def archive(dht: RunDHT, swarm: Swarm) -> Archive:
            return Archive(
                dht=dht,
                swarm=swarm,
                run=run,
                me=identity.peer_id,
                manifest=manifest,
                # with another manifest nothing of it would fit
                folder=options.state / f"{run}-archive-{manifest.digest[:16]}",
            )

        def ready(invite: Invite) -> None:
            stop.defer()
            write_atomically(options.state / "invite", f"{invite}\n".encode())
            logger.info("run %s (%s) is up; volunteers join with", invite.run_id, manifest.name)
            typer.echo(f"dilocox peer {invite}")

        run_bootstrap(
            manifest=manifest,
            identity=identity,
            listen=[f"/ip4/{options.host}/tcp/{options.port}"],
            announce=options.announce,
            initial_peers=options.join,
            stop_event=stop.event,
            on_ready=ready,
            beside=archive,
        )
    return 0


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `dilocox export`; see their help texts."""

    invite: Invite
    folder: Path
    host: str
    timeout_s: float


def run_export_command(options: ExportOptions) -> int:
    """Download the newest anchors of a run and write a Hugging Face folder; the exit code."""
    with StopSignal():
        _export(options)
        return 0
    return 130  # stopped before it was done


def _export(options: ExportOptions) -> None:
    from dilocox.peer.download import download_anchors
    from dilocox.peer.export import write_checkpoint
    from dilocox.peer.join import joined

    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        listen = [f"/ip4/{options.host}/tcp/0"]
        with joined(options.invite, identity, listen=listen, client_mode=True) as place:
            manifest = place.manifest
            anchors = download_anchors(place, timeout_s=options.timeout_s)
            info = {
                "run": place.run,
                "name": manifest.name,
                "tokens": anchors[0].chain_tokens,
                "stages": [{"round": each.round, "digest": each.digest} for each in anchors],
            }
            write_checkpoint(
                options.folder,
                manifest.model,
                [(e.stage, manifest.stages, e.layout.view(e.anchor)) for e in anchors],
                manifest.data.tokenizer,
                info,
            )
    rounds = ", ".join(str(each.round) for each in anchors)
    typer.echo(f"wrote {options.folder}: round {rounds}, {anchors[0].chain_tokens:,} tokens")


def checked_manifest(path: Path) -> Manifest:
    """The run's description, completed by what only this machine can tell: that the model can be
    cut, and the digest of the held-out data.

    Raises:
        InvalidInput: a field is wrong, the model cannot be cut so, or the data are not as stated.
    """
    from dilocox.peer.data import held_out_digest
    from dilocox.pipeline.partition import plan_stages

    manifest = Manifest.load(path)
    plan_stages(manifest.model, manifest.stages)
    found = held_out_digest(manifest.data)
    if manifest.data.held_out not in ("", found):
        raise InvalidInput(
            f"{path}: data.held_out is {manifest.data.held_out[:12]}..., the data here give "
            f"{found[:12]}...; remove the field, or use the data it was made from"
        )
    return replace(manifest, data=replace(manifest.data, held_out=found))
