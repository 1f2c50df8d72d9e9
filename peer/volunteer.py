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
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dilocox import __version__
from dilocox.compression.layout import FlatLayout
from dilocox.dht import sockets
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import warnings
from dilocox.peer.assembly import Assembly
from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import AveragerConfig, AveragerStuck, StageBuffers
from dilocox.peer.coordinator import ChildDied
from dilocox.peer.device import chosen_device
from dilocox.peer.join import Joined, joined
from dilocox.peer.kept_chain import keep_manifest
from dilocox.peer.memory import check_plan
from dilocox.peer.metrics_server import DEFAULT_PORT, Pages, PageServer, check_port
from dilocox.peer.options import PeerOptions
from dilocox.peer.record import RecordRefused
from dilocox.peer.signals import StopRequested, StopSignal
from dilocox.peer.stage_option import announce_joining, chosen_stage
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.trainer import Move
from dilocox.pipeline.stage import parameter_shapes

logger = logging.getLogger(__name__)

RESTART_AFTER_S = 20.0  # a peer whose processes die sooner than that does not try again


def run_peer(options: PeerOptions) -> int:
    """Take part in a run until it ends or a signal comes; the exit code."""
    folder = StateFolder(options.state)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.metrics_port:
        check_port(options.metrics_host, options.metrics_port)
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
        except Move as move:
            if stop.event.is_set():
                logger.info("left: as asked")
                return 0
            folder.note_stage(options.invite.run_id, move.stage)
            logger.warning("moving to stage %d, which has the fewest peers", move.stage)
            _start_again()
        except (ChildDied, AveragerStuck) as error:
            if stop.event.is_set():
                logger.warning("left: as asked; %s", error)
                return 0
            if time.monotonic() - started < RESTART_AFTER_S:
                raise EnvironmentFault(
                    f"{error}, soon after the start; see more with --log-level debug"
                ) from error
            logger.warning("%s: starting again from the snapshot", error)
            _start_again()
    return 0


def _start_again() -> None:
    """Become a new process with the same options: what is forked cannot be exchanged."""
    sockets.remove(sockets.shared_memory_folder())  # no exit, so nobody else would
    os.execv(sys.executable, [sys.executable, "-m", "dilocox", *sys.argv[1:]])


def _take_part(options: PeerOptions, place: Joined, folder: StateFolder, stop: StopSignal) -> None:
    manifest = place.manifest
    for line in warnings(manifest):
        logger.warning("%s", line)
    stage = chosen_stage(options.stage, place, folder)
    layout = FlatLayout.of(parameter_shapes(manifest.model, manifest.stages, stage))
    check_plan(layout.numel, options.memory_limit_bytes)
    own = folder.run(place.run, stage)
    keep_manifest(own, manifest)
    config = AveragerConfig(
        run=place.run,
        stage=stage,
        manifest=manifest,
        layout=layout,
        identity=place.identity,
        log_folder=own / "log",
        snapshot_folder=own / "snapshots",
        max_upload_bytes_per_s=options.max_upload_mb_s * 1e6 or None,
        device=options.device,
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
        assembly = Assembly(options, place, config, averager, buffers, own, device, stop)
        stop.defer()
        with assembly.network:
            assembly.coordinator.start()
            try:
                with _shown(options, assembly.figures.pages()):
                    assembly.trainer.run()
            except Move as move:
                announce_joining(place, move.stage)  # or another one would move there, too
                raise
            finally:
                assembly.coordinator.close()
        logger.info("left: %s", "the run has ended" if not stop.event.is_set() else "as asked")


def _shown(options: PeerOptions, pages: Pages) -> AbstractContextManager[object]:
    """A server of these pages. A peer that was given no port goes on without where it is taken."""
    host, port = options.metrics_host, options.metrics_port
    if port == 0:
        return nullcontext()
    try:
        server = PageServer(host, DEFAULT_PORT if port is None else port, pages)
    except EnvironmentFault:
        if port is not None:
            raise
        logger.warning(
            "no metrics: port %d is taken, by another peer perhaps; --metrics-port takes another "
            "one, or 0 for none",
            DEFAULT_PORT,
        )
        return nullcontext()
    logger.info("metrics at http://%s:%d/metrics, health at /healthz", host, server.port)
    return server


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
