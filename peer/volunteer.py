"""The command `dilocox peer`: everything from the invite to a clean leave.

The order matters. The DHT process and the averaging process are forked first, from the main thread
and before CUDA is touched; the manifest comes through the first and shapes the second. Then the
model is built, the last snapshot loaded, the coordinator's thread started, and training begins.
"""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dilocox import __version__
from dilocox.compression.layout import FlatLayout
from dilocox.dht import sockets
from dilocox.dht.bootstrap import invite_addresses
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest, warnings
from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import AveragerConfig, AveragerStuck, StageBuffers, open_log
from dilocox.peer.coordinator import ChildDied, Coordinator
from dilocox.peer.files import make_folder
from dilocox.peer.join import Joined, joined
from dilocox.peer.lease import PartLease
from dilocox.peer.memory import check_plan
from dilocox.peer.place import Place
from dilocox.peer.prepare import chosen_device, held_out, local_model, open_corpus
from dilocox.peer.record import RecordRefused
from dilocox.peer.report import Reporter
from dilocox.peer.signals import StopRequested, StopSignal
from dilocox.peer.snapshots import Snapshots
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.tally import Tally
from dilocox.peer.trainer import Trainer
from dilocox.pipeline.stage import parameter_shapes

logger = logging.getLogger(__name__)

RESTART_AFTER_S = 20.0  # a peer whose processes die sooner than that does not try again


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """The options of `dilocox peer`; see their help texts."""

    invite: Invite
    state: Path
    stage: str
    host: str
    port: int
    announce: tuple[str, ...]
    device: str
    threads: int
    max_upload_mb_s: float
    memory_limit_gb: float
    data: str

    @property
    def memory_limit_bytes(self) -> float | None:
        """The memory limit in bytes, None without one."""
        return self.memory_limit_gb * 1e9 or None


def run_peer(options: PeerOptions) -> int:
    """Take part in a run until it ends or a signal comes; the exit code."""
    folder = StateFolder(options.state)
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.monotonic()
    with folder.locked(), StopSignal() as stop:
        identity = Identity.load_or_create(folder.identity)
        listen = [f"/ip4/{options.host}/tcp/{options.port}"]
        try:
            with joined(
                options.invite, identity, listen=listen, announce=options.announce
            ) as place:
                try:
                    _take_part(options, place, folder, stop)
                finally:
                    stop.defer()  # closing is not to be left half-way
        except StopRequested:
            logger.info("left: as asked, before training began")
        except RecordRefused as error:  # of our own log: what peers send is refused elsewhere
            raise EnvironmentFault(str(error)) from error
        except (ChildDied, AveragerStuck) as error:
            if stop.event.is_set():
                logger.warning("left: as asked; %s", error)
                return 0
            if time.monotonic() - started < RESTART_AFTER_S:
                raise EnvironmentFault(
                    f"{error}, soon after the start; see more with --log-level debug"
                ) from error
            logger.warning("%s: starting again from the snapshot", error)
            sockets.remove(sockets.shared_memory_folder())  # no exit, so nobody else would
            os.execv(sys.executable, [sys.executable, "-m", "dilocox", *sys.argv[1:]])
    return 0


def _take_part(options: PeerOptions, place: Joined, folder: StateFolder, stop: StopSignal) -> None:
    manifest = place.manifest
    for line in warnings(manifest):
        logger.warning("%s", line)
    stage = _chosen_stage(options.stage, manifest)
    layout = FlatLayout.of(parameter_shapes(manifest.model, manifest.stages, stage))
    check_plan(layout.numel, options.memory_limit_bytes)
    own = folder.run(place.run, stage)
    make_folder(own)
    config = AveragerConfig(
        run=place.run,
        stage=stage,
        manifest=manifest,
        layout=layout,
        identity=place.identity,
        log_folder=own / "log",
        snapshot_folder=own / "snapshots",
        max_upload_bytes_per_s=options.max_upload_mb_s * 1e6 or None,
    )
    buffers = StageBuffers.allocate(layout.numel)
    with _averager(place, config, buffers, stop) as averager:
        # from here on CUDA may be touched: everything is forked
        device = chosen_device(options.device)
        logger.info(
            "dilocox %s, run %s (%s), stage %d of %d, %s values, device %s, state in %s",
            __version__,
            place.run,
            manifest.name,
            stage,
            manifest.stages,
            f"{layout.numel:,}",
            device,
            own,
        )
        coordinator, trainer = _loops(options, place, config, averager, buffers, own, device, stop)
        stop.defer()
        coordinator.start()
        try:
            trainer.run()
        finally:
            coordinator.close()
        logger.info("left: %s", "the run has ended" if not stop.event.is_set() else "as asked")


def _loops(
    options: PeerOptions,
    place: Joined,
    config: AveragerConfig,
    averager: StageAverager,
    buffers: StageBuffers,
    own: Path,
    device: torch.device,
    stop: StopSignal,
) -> tuple[Coordinator, Trainer]:
    """The thread that deals with the swarm and the loop that trains, ready to run."""
    manifest, layout, me = config.manifest, config.layout, place.identity.peer_id
    visible = place.dht.visible_addresses()
    addresses = invite_addresses(options.announce, visible, me)
    logger.info("peer %s, reached at %s", me, ", ".join(addresses))
    snapshots = Snapshots(config.snapshot_folder, layout=layout.digest)
    model = local_model(manifest, config.stage, layout, buffers, snapshots, device)
    coordinator = Coordinator.of(
        Place(
            me=me,
            run=place.run,
            stage=config.stage,
            manifest=manifest,
            layout=layout,
            addresses=addresses,
            client_mode=averager.client_mode,
            memory_limit_bytes=options.memory_limit_bytes,
        ),
        place,
        averager=averager,
        log=open_log(config),
        merge=model.merge,
        lease=_lease(options, place, snapshots),
    )
    trainer = Trainer(
        me=me,
        manifest=manifest,
        model=model,
        corpus=open_corpus(manifest, options.data),
        held_out=held_out(manifest),
        coordinator=coordinator,
        snapshots=snapshots,
        tally=Tally(reporter=Reporter(own), sent_bytes=buffers.sent_bytes, numel=layout.numel),
        stop=stop.event,
    )
    return coordinator, trainer


def _lease(options: PeerOptions, place: Joined, snapshots: Snapshots) -> PartLease | None:
    """A lease on a part of the run's data; a volunteer's own data need none."""
    if options.data:
        return None
    return PartLease(
        swarm=place.swarm,
        run=place.run,
        me=place.identity.peer_id,
        parts=place.manifest.data.parts,
        lifetime_s=place.manifest.deadlines.record_lifetime_s,
        first=snapshots.data_state().get("part") if snapshots.found else None,
    )


@contextmanager
def _averager(
    place: Joined, config: AveragerConfig, buffers: StageBuffers, stop: StopSignal
) -> Generator[StageAverager]:
    stop.defer()  # a process that was forked half-way could not be closed
    averager = StageAverager(dht=place.dht, config=config, buffers=buffers)
    try:
        stop.resume()
        yield averager
    finally:
        stop.defer()
        averager.close()


def _chosen_stage(option: str, manifest: Manifest) -> int:
    if manifest.stages != 1:
        raise InvalidInput(
            f"the run has {manifest.stages} stages; this version trains models in one stage only"
        )
    if option not in ("auto", "0"):
        raise InvalidInput(f"--stage {option}: the run has stage 0 only; leave it at auto")
    return 0
