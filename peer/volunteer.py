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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dilocox import __version__
from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import DataSpec, Manifest, warnings
from dilocox.dht.manifest_defaults import ENDINGS
from dilocox.peer.averager import AveragerConfig, StageAverager, StageBuffers, open_log
from dilocox.peer.coordinator import ChildDied, Coordinator
from dilocox.peer.data import Corpus, held_out_digest, held_out_windows
from dilocox.peer.driver import AveragerStuck
from dilocox.peer.files import make_folder
from dilocox.peer.inner import InnerOptimizer
from dilocox.peer.join import Joined, joined
from dilocox.peer.memory import check_plan
from dilocox.peer.merge import Merge, MergeConfig
from dilocox.peer.place import Place
from dilocox.peer.report import Reporter
from dilocox.peer.signals import StopRequested, StopSignal
from dilocox.peer.snapshots import Snapshots
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.tally import Tally
from dilocox.peer.trainer import LocalModel, Trainer
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes

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
        except (ChildDied, AveragerStuck) as error:
            if time.monotonic() - started < RESTART_AFTER_S:
                raise EnvironmentFault(
                    f"{error}, soon after the start; see more with --log-level debug"
                ) from error
            logger.warning("%s: starting again from the snapshot", error)
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
        device = _device(options.device)
        addresses = place.dht.visible_addresses()
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
        logger.info("peer %s, reached at %s", place.identity.peer_id, ", ".join(addresses))
        snapshots = Snapshots(own / "snapshots", layout=layout.digest)
        model = _local_model(manifest, stage, layout, buffers, snapshots, device)
        tally = Tally(reporter=Reporter(own), sent_bytes=buffers.sent_bytes, numel=layout.numel)
        coordinator = Coordinator.of(
            Place(
                me=place.identity.peer_id,
                run=place.run,
                stage=stage,
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
        )
        trainer = Trainer(
            me=place.identity.peer_id,
            manifest=manifest,
            model=model,
            corpus=_corpus(manifest, options.data),
            held_out=_held_out(manifest),
            coordinator=coordinator,
            snapshots=snapshots,
            tally=tally,
            stop=stop.event,
        )
        stop.defer()
        coordinator.start()
        try:
            trainer.run()
        finally:
            coordinator.close()
        logger.info("left: %s", "the run has ended" if not stop.event.is_set() else "as asked")


@contextmanager
def _averager(
    place: Joined, config: AveragerConfig, buffers: StageBuffers, stop: StopSignal
) -> Generator[StageAverager]:
    stop.defer()  # a process that was forked half-way could not be closed
    averager = StageAverager(dht=place.dht, config=config, buffers=buffers)
    stop.install()  # hivemind has set SIGINT to be ignored
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


def _device(option: str) -> torch.device:
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"--device {option}: {reason}; choose cpu or auto") from error
    return device


def _local_model(
    manifest: Manifest,
    stage: int,
    layout: FlatLayout,
    buffers: StageBuffers,
    snapshots: Snapshots,
    device: torch.device,
) -> LocalModel:
    """The stage with its weights: those of the snapshot, or those of the manifest's seed."""
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed, device)
    live = flatten_parameters(module, layout)
    optimizer = InnerOptimizer(module.named_parameters(), manifest.inner)
    rule = MergeConfig.of(
        manifest.outer.merge,
        rebase_weight=manifest.outer.rebase_weight,
        decay=manifest.codec.residual_decay,
        max_age=manifest.rounds.max_age,
    )
    if snapshots.found is not None:
        tensors, facts = snapshots.merge_state()
        buffers.anchors[0].copy_(tensors["anchor"])
        buffers.momenta[0].copy_(tensors["momentum"])
        tensors |= {"anchor": buffers.anchors[0], "momentum": buffers.momenta[0]}
        merge = Merge.from_state(rule, live, tensors, facts)
        optimizer.load_state_dict(snapshots.inner_state())
        for send in merge.fly.values():
            buffers.message.copy_(send.message)
        logger.info("going on from the snapshot of round %d", merge.round)
    else:
        buffers.anchors[0].copy_(live)
        merge = Merge(
            rule,
            live,
            buffers.anchors[0],
            buffers.momenta[0],
            round_number=-1,
            digest=manifest.digest,
        )
    return LocalModel(
        layout=layout, stage=module, optimizer=optimizer, merge=merge, buffers=buffers
    )


def own_data(data: DataSpec, option: str) -> DataSpec:
    """What `--data` names in place of the run's data: files, in the format of their ending, else of
    the run's, else text.
    """
    if not option:
        return data
    local = data.format if data.format in ("text", "json", "parquet") else "text"
    return replace(data, source=option, format=ENDINGS.get(Path(option).suffix, local))


def _corpus(manifest: Manifest, option: str) -> Corpus:
    batch = manifest.batch
    return Corpus(
        own_data(manifest.data, option),
        sequence_length=batch.sequence_length,
        microbatch_size=batch.microbatch_size,
        seed=manifest.seed,
    )


def _held_out(manifest: Manifest) -> torch.Tensor:
    """The windows of the validation loss, of the run's data whatever this peer trains on."""
    found = held_out_digest(manifest.data)
    if manifest.data.held_out and found != manifest.data.held_out:
        logger.warning(
            "the held-out part here (%s) is not the run's (%s): validation losses of this peer "
            "do not compare with those of others; for the data `stdlib` use the operator's "
            "version of Python",
            found[:12],
            manifest.data.held_out[:12],
        )
    return held_out_windows(
        manifest.data, manifest.batch.sequence_length, manifest.data.held_out_windows
    )
