"""The command `dilocox peer`: everything from the invite to a clean leave.

The order matters. The DHT process and the averaging process are forked first, from the main thread
and before CUDA is touched; the manifest comes through the first and shapes the second. Then the
model is built, the last snapshot loaded, the coordinator's thread started, and training begins.

`Assembly` puts the parts together: the thread that deals with the swarm, the network of the
replica, and the loop that trains. `coordinator_of` gives that thread what it drives: the chain, the
driver of sends, the announcer.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from dilocox import __version__
from dilocox.dht.addresses import wait_for_bootstrap
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.join import Joined, join_run
from dilocox.dht.manifest import warnings
from dilocox.dht.reachability import described, reached_at
from dilocox.dht.reconnect import relays_between
from dilocox.dht.revisions import ManifestWatch
from dilocox.peer.averaging.announcer import Announcer
from dilocox.peer.averaging.averager import (
    AveragerConfig,
    AveragerStuck,
    StageAverager,
    StageBuffers,
    open_log,
)
from dilocox.peer.averaging.connectivity import LocalPeer
from dilocox.peer.averaging.coordinator import ChildDied, Coordinator, WorkerThread
from dilocox.peer.averaging.data_lease import PartLease
from dilocox.peer.averaging.driver import ExchangeDriver
from dilocox.peer.averaging.events import EventQueue
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.chain.rollback import newest_aside, peer_goes_back
from dilocox.peer.chain.store import RoundLog, keep_manifest
from dilocox.peer.http_pages import check_port, served
from dilocox.peer.options import PeerOptions
from dilocox.peer.os_process import RESTART_AFTER_S, StopRequested, StopSignal, start_again
from dilocox.peer.process.metrics import PeerMetrics
from dilocox.peer.process.prepare import StageNeeds, check_disk, held_out, local_model, open_corpus
from dilocox.peer.process.resting import Allowance, RestWatch
from dilocox.peer.process.stage_selection import announce_joining, chosen_stage
from dilocox.peer.resources import MAX_WINDOW, check_plan, window_limit
from dilocox.peer.rounds.adaptation import RoundPlan, stage_codec
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import RecordRefused
from dilocox.peer.rounds.vote import AloneWatch
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.training.data import BATCH_WINDOWS
from dilocox.peer.training.inner_optimizer import clip_factor
from dilocox.peer.training.loop import Learner, Move, Revised, Trainer
from dilocox.peer.training.merge import Merge
from dilocox.peer.training.report import LoopMeter, Reporter
from dilocox.peer.training.roles import Leading, Serving
from dilocox.peer.training.snapshots import Snapshots
from dilocox.pipeline.frames import FrameLimits
from dilocox.pipeline.head import Head
from dilocox.pipeline.link import LinkLimits, link_of
from dilocox.pipeline.member import Follower, Member
from dilocox.pipeline.network import Network
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.placement import Mover
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.reservation import Reservation
from dilocox.pipeline.stage import chosen_device, stage_layout
from dilocox.pipeline.stage_worker import StageWorker
from dilocox.pipeline.tuning import Tuning

logger = logging.getLogger(__name__)


def coordinator_of(
    local: LocalPeer,
    joined: Joined,
    *,
    averager: StageAverager,
    log: RoundLog,
    merge: Merge,
    lease: PartLease | None,
    mover: Mover | None,
    manifest_file: Path | None = None,
    first_round: int = 0,
) -> Coordinator:
    """The coordinator of a peer, with what it drives.

    lease: on a part of the data, for peers of stage 0. mover: for peers that may change their
    stage. manifest_file: where a newer manifest is kept. first_round: the least one to begin with.
    """
    deadlines = local.manifest.deadlines
    plan = RoundPlan(local.manifest, stage_codec(local.manifest, local.layout))
    events = EventQueue()
    alone = AloneWatch(
        record_lifetime_s=deadlines.record_lifetime_s, heartbeat_s=deadlines.heartbeat_s
    )
    chain = ChainFollower(
        averager=averager,
        log=log,
        events=events,
        clock=joined.clock,
        applied=merge.round,
        anchor_sha256=anchor_sha256(merge.anchor),
        state_bytes=2 * merge.anchor.nbytes,
        record_lifetime_s=deadlines.record_lifetime_s,
        sent_round=lambda: driver.sent_round,
        unsettled=lambda: merge.unsettled,
    )
    driver = ExchangeDriver(
        averager=averager,
        chain=chain,
        events=events,
        manifest=local.manifest,
        run=local.run,
        stage=local.stage,
        layout_digest=local.layout.digest,
        plan=plan,
        clock=joined.clock,
        alone=alone,
    )
    for round_number, send in merge.fly.items():
        driver.resume(round_number, send.tokens)
    return Coordinator(
        local=local,
        dht=joined.dht,
        announcer=Announcer(local, joined.swarm, joined.clock),
        clock=joined.clock,
        averager=averager,
        chain=chain,
        driver=driver,
        alone=alone,
        events=events,
        lease=lease,
        mover=mover,
        watch=ManifestWatch(joined.swarm, local.run, local.manifest, manifest_file),
        reader=WorkerThread("dht reads"),
        writer=WorkerThread("dht writes"),
        first_round=first_round,
    )


class Assembly:
    """The parts of one peer that train, after everything is forked.

    Attributes:
        coordinator: the thread that deals with the swarm, not started yet.
        network: the thread that deals with the replica, not started yet.
        trainer: the loop; to be run while both threads run.
        metrics: what can be asked of this peer over HTTP.
        allowance: what its volunteer allows it, of which the metrics tell.
    """

    def __init__(
        self,
        options: PeerOptions,
        joined: Joined,
        config: AveragerConfig,
        averager: StageAverager,
        buffers: StageBuffers,
        own: Path,
        device: torch.device,
        stop: StopSignal,
    ):
        manifest, layout = config.manifest, config.layout
        self._options = options
        self._joined = joined
        self._manifest = manifest
        self._stop = stop.event
        self._snapshots = Snapshots(config.snapshot_folder, layout=layout.digest)
        self._model = local_model(manifest, config.stage, layout, buffers, self._snapshots, device)
        self._local = self._local_peer(config, averager)
        self.allowance = Allowance(options)
        reporter = Reporter(own)
        self._tell = reporter.tell
        self._meter = LoopMeter(reporter=reporter, sent=buffers.sent.read, numel=layout.numel)
        self.coordinator = coordinator_of(
            self._local,
            joined,
            averager=averager,
            log=open_log(config),
            merge=self._model.merge,
            lease=self._lease(),
            mover=self._mover(),
            manifest_file=own.parent / f"{joined.run}.signed",
            first_round=1
            + max([newest_aside(own), *(s.round for s in self._snapshots.sent_since)]),
        )
        self._reservation = Reservation(
            me=self._local.me,
            stage=config.stage,
            num_stages=manifest.stages,
            on_change=self._wake,
        )
        batch = manifest.batch
        self._shape = (batch.microbatch_size, batch.sequence_length, hidden_size(manifest.model))
        self.network = Network(
            joined.dht,
            run=joined.run,
            limits=LinkLimits(
                frames=FrameLimits(
                    microbatch_size=batch.microbatch_size,
                    sequence_length=batch.sequence_length,
                    hidden_size=self._shape[2],
                    evaluate_windows=BATCH_WINDOWS,
                ),
                silence_s=manifest.deadlines.silence_s,
            ),
            letters=RelayedRequests(joined.identity, joined.run, joined.clock.time),
            relays=self._relays,
            answer=self._reservation.answer,
            admits=lambda _, hello: link_of(hello, config.stage),
        )
        self.metrics = PeerMetrics(
            local=self._local,
            joined=joined,
            averager=averager,
            buffers=buffers,
            meter=self._meter,
            coordinator=self.coordinator,
            reservation=self._reservation,
            network=self.network,
            allowance=self.allowance,
        )
        reporter.listeners.append(self.metrics)
        self.trainer = self._trainer()

    def _wake(self) -> None:
        """A head left an order: the loop should look at once."""
        self.network.wake()

    def _relays(self, peer: str) -> list[str]:
        """By whose way to ask this peer, if not directly."""
        local, stages = self._local, self.coordinator.view.stages
        return relays_between(stages, local.me, local.stage, peer, client_mode=local.client_mode)

    def _local_peer(self, config: AveragerConfig, averager: StageAverager) -> LocalPeer:
        joined, me = self._joined, self._joined.identity.peer_id
        addresses = reached_at(
            joined.reach, self._options.announce, joined.dht.visible_addresses(), me
        )
        level, text = described(joined.reach, self._options.announce, addresses)
        logger.log(level, "peer %s %s", me, text)
        return LocalPeer(
            me=me,
            run=joined.run,
            stage=config.stage,
            manifest=config.manifest,
            layout=config.layout,
            addresses=addresses,
            client_mode=averager.client_mode,
            reachability=joined.reach.kind,
            reached_by_others=joined.reach.by_others,
            memory_limit_bytes=self._options.memory_limit_bytes,
            name=self._options.name,
        )

    def _lease(self) -> PartLease | None:
        """A lease on a part of the run's data; who has no use for one, or own data, needs none."""
        if self._options.data or self._local.stage > 0:
            return None
        return PartLease(
            swarm=self._joined.swarm,
            run=self._joined.run,
            me=self._local.me,
            parts=self._manifest.data.parts,
            first=self._snapshots.found.data.get("part") if self._snapshots.found else None,
        )

    def _mover(self) -> Mover | None:
        """What tells a peer that may choose its stage when to change it."""
        if self._options.stage != "auto" or self._manifest.stages == 1:
            return None
        local = self._local
        return Mover(me=local.me, stage=local.stage, num_stages=self._manifest.stages)

    # ---- the loop --------------------------------------------------------------------------------
    def _trainer(self) -> Trainer:
        manifest, model = self._manifest, self._model
        learner = Learner(
            me=self._local.me,
            manifest=manifest,
            model=model,
            coordinator=self.coordinator,
            snapshots=self._snapshots,
            meter=self._meter,
            stop=self._stop,
        )
        worker = StageWorker(
            model.stage,
            model.optimizer,
            microbatches=manifest.batch.microbatches,
            recompute=manifest.pipeline.recompute,
        )
        self._meter.computing_s = lambda: worker.computing_s
        member = Member(
            stage=self._local.stage,
            num_stages=manifest.stages,
            worker=worker,
            network=self.network,
            anchors=learner,
            shape=self._shape,
            vocabulary=int(manifest.model["vocab_size"]),
            window_limit=lambda: self._window_limit(worker),
        )
        leads = self._local.stage == 0
        role = self._leading(learner, member) if leads else self._serving(learner, member)
        return Trainer(learner=learner, role=role, stop=self._stop)

    def _window_limit(self, worker: StageWorker) -> int:
        """Microbatches in flight that this peer has memory for; a last stage stores one."""
        if self._local.stage == self._manifest.stages - 1:
            return MAX_WINDOW
        limit = self._local.memory_limit_bytes
        return window_limit(worker.stored_bytes, limit, self._model.optimizer.device)

    def _leading(self, learner: Learner, member: Member) -> Leading:
        manifest = self._manifest
        clip_norm = manifest.inner.clip_norm
        head = Head(
            me=self._local.me,
            client_mode=self._local.client_mode,
            tuning=Tuning(
                microbatches=manifest.batch.microbatches,
                shape=self._shape,
                codec=manifest.pipeline.codec,
                window=manifest.pipeline.window,
            ),
            member=member,
            records=lambda: self.coordinator.view.stages,
            clip=lambda norm, loss: (
                clip_factor(norm, clip_norm) if math.isfinite(loss) else math.nan
            ),
            tell=self._tell,
            stopping=self._stop.is_set,
        )
        return Leading(
            manifest=manifest,
            learner=learner,
            head=head,
            reservation=self._reservation,
            corpus=open_corpus(manifest, self._options.data),
            held_out=held_out(manifest),
            coordinator=self.coordinator,
            meter=self._meter,
            me=self._local.me,
            stop=self._stop,
        )

    def _serving(self, learner: Learner, member: Member) -> Serving:
        follower = Follower(member=member, reservation=self._reservation, tell=self._tell)
        return Serving(
            learner=learner,
            follower=follower,
            member=member,
            reservation=self._reservation,
            coordinator=self.coordinator,
            num_stages=self._manifest.stages,
            window=lambda: self._window_limit(member.worker),
        )


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
            with join_run(
                options.invite,
                identity,
                listen=listen,
                announce=options.announce,
                kept=folder.manifest(options.invite.run_id),
            ) as joined:
                try:
                    _take_part(options, joined, folder, stop)
                finally:
                    stop.defer()  # closing is not to be left half-way
            if stop.event.is_set() and not stop.asked:  # to rest, which a new process does
                start_again()
        except StopRequested:
            logger.info("left: stopped on request, before training began")
        except RecordRefused as error:  # of our own log: what peers send is refused elsewhere
            raise EnvironmentFault(str(error)) from error
        except Move as move:
            if stop.asked:
                logger.info("left: stopped on request")
                return 0
            folder.note_stage(options.invite.run_id, move.stage)
            logger.warning("moving to stage %d, which has the fewest peers", move.stage)
            start_again()
        except Revised:
            if stop.asked:
                logger.info("left: stopped on request")
                return 0
            logger.warning("restarting with the revised manifest")
            start_again()
        except (ChildDied, AveragerStuck) as error:
            if stop.asked:
                logger.warning("left: stopped on request; %s", error)
                return 0
            if time.monotonic() - started < RESTART_AFTER_S:
                raise EnvironmentFault(
                    f"{error}, soon after the start; see more with --log-level debug"
                ) from error
            logger.warning("%s: restarting from the snapshot", error)
            start_again()
    return 0


def _take_part(options: PeerOptions, joined: Joined, folder: StateFolder, stop: StopSignal) -> None:
    manifest = joined.manifest
    if manifest.operation.state == "ended":
        logger.info(
            "the operator has ended run %s (%s); `dilocox export` writes its model",
            joined.run,
            manifest.name,
        )
        return
    for line in warnings(manifest):
        logger.warning("%s", line)
    stage = chosen_stage(options.stage, joined, folder)
    layout = stage_layout(manifest, stage)
    check_plan(layout.numel, options.memory_limit_bytes)
    own = folder.run(joined.run, stage)
    check_disk(own, StageNeeds(manifest, stage))
    keep_manifest(own, manifest)
    peer_goes_back(own, manifest)
    config = AveragerConfig(
        run=joined.run,
        stage=stage,
        manifest=manifest,
        layout=layout,
        identity=joined.identity,
        log_folder=own / "log",
        snapshot_folder=own / "snapshots",
        max_upload_bytes_per_s=options.max_upload_mb_s * 1e6 or None,
        device=options.device,
        bootstraps=tuple({bootstrap_address(a).peer_id for a in options.invite.bootstraps}),
    )
    buffers = StageBuffers.allocate(layout.numel)
    with _averager(joined, config, buffers, stop) as averager:
        # from here on CUDA may be touched: everything is forked
        device = chosen_device(options.device)
        logger.info(
            "dilocox %s, run %s (%s), stage %d of %d, %s values, device %s, state in %s",
            __version__,
            joined.run,
            manifest.name,
            stage,
            manifest.stages,
            f"{layout.numel:,}",
            device,
            own,
        )
        assembly = Assembly(options, joined, config, averager, buffers, own, device, stop)
        stop.defer()
        with assembly.network:
            assembly.coordinator.start()
            try:
                pages = assembly.metrics.pages()
                watch = RestWatch(assembly.allowance, joined.dht.carried_bytes, stop)
                with served(options.metrics_host, options.metrics_port, pages), watch:
                    assembly.trainer.run()
            except Move as move:
                announce_joining(joined, move.stage)  # or another one would move there, too
                raise
            finally:
                assembly.coordinator.close()
        logger.info(
            "left: %s", "the run has ended" if not stop.event.is_set() else "stopped on request"
        )


@contextmanager
def _averager(
    joined: Joined, config: AveragerConfig, buffers: StageBuffers, stop: StopSignal
) -> Generator[StageAverager]:
    stop.defer()  # a process that was forked half-way could not be closed
    averager = StageAverager(dht=joined.dht, config=config, buffers=buffers)
    try:
        stop.resume()
        yield averager
    finally:
        stop.defer()
        averager.close()
