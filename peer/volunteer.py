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
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from dilocox import __version__
from dilocox.dht import sockets
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.manifest import warnings
from dilocox.dht.reach import wait_for_bootstrap
from dilocox.peer.assembly import Assembly
from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import AveragerConfig, AveragerStuck, StageBuffers
from dilocox.peer.branch import peer_goes_back
from dilocox.peer.coordinator import ChildDied
from dilocox.peer.device import chosen_device
from dilocox.peer.join import Joined, joined
from dilocox.peer.kept_chain import keep_manifest
from dilocox.peer.layouts import stage_layout
from dilocox.peer.learner import Revised
from dilocox.peer.memory import check_plan
from dilocox.peer.metrics_server import check_port, served
from dilocox.peer.needs import StageNeeds, check_disk
from dilocox.peer.options import PeerOptions
from dilocox.peer.record import RecordRefused
from dilocox.peer.resting import RestWatch
from dilocox.peer.signals import StopRequested, StopSignal, hold_back
from dilocox.peer.stage_option import announce_joining, chosen_stage
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.trainer import Move

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
            if folder.took_part(options.invite.run_id):  # who starts again is not to be lost
                wait_for_bootstrap(options.invite.bootstraps)
            with joined(
                options.invite,
                identity,
                listen=listen,
                announce=options.announce,
                kept=folder.manifest(options.invite.run_id),
            ) as place:
                try:
                    _take_part(options, place, folder, stop)
                finally:
                    stop.defer()  # closing is not to be left half-way
            if stop.event.is_set() and not stop.asked:  # to rest, which a new process does
                _start_again()
        except StopRequested:
            logger.info("left: as asked, before training began")
        except RecordRefused as error:  # of our own log: what peers send is refused elsewhere
            raise EnvironmentFault(str(error)) from error
        except Move as move:
            if stop.asked:
                logger.info("left: as asked")
                return 0
            folder.note_stage(options.invite.run_id, move.stage)
            logger.warning("moving to stage %d, which has the fewest peers", move.stage)
            _start_again()
        except Revised:
            if stop.asked:
                logger.info("left: as asked")
                return 0
            logger.warning("starting again under the new values of the manifest")
            _start_again()
        except (ChildDied, AveragerStuck) as error:
            if stop.asked:
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
    hold_back()
    sockets.remove(sockets.shared_memory_folder())  # no exit, so nobody else would
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if int(descriptor.name) > 2:  # or the new process holds what the old one shared
                os.set_inheritable(int(descriptor.name), False)
    os.execv(sys.executable, [sys.executable, "-m", "dilocox", *sys.argv[1:]])


def _take_part(options: PeerOptions, place: Joined, folder: StateFolder, stop: StopSignal) -> None:
    manifest = place.manifest
    if manifest.operation.state == "ended":
        logger.info(
            "the operator has ended run %s (%s); `dilocox export` writes its model",
            place.run,
            manifest.name,
        )
        return
    for line in warnings(manifest):
        logger.warning("%s", line)
    stage = chosen_stage(options.stage, place, folder)
    layout = stage_layout(manifest, stage)
    check_plan(layout.numel, options.memory_limit_bytes)
    own = folder.run(place.run, stage)
    check_disk(own, StageNeeds(manifest, stage))
    keep_manifest(own, manifest)
    peer_goes_back(own, manifest)
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
        bootstraps=tuple({bootstrap_address(a).peer_id for a in options.invite.bootstraps}),
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
                pages = assembly.figures.pages()
                watch = RestWatch(assembly.allowance, place.dht.carried_bytes, stop)
                with served(options.metrics_host, options.metrics_port, pages), watch:
                    assembly.trainer.run()
            except Move as move:
                announce_joining(place, move.stage)  # or another one would move there, too
                raise
            finally:
                assembly.coordinator.close()
        logger.info("left: %s", "the run has ended" if not stop.event.is_set() else "as asked")


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
