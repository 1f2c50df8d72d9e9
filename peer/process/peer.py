"""The command `dilocox peer`: everything from the invite to a clean leave. Apart from cli.py, which
imports nothing large before the command is known.

The order matters. The DHT process and the averaging process are forked first, from the main thread
and before CUDA is touched; the manifest comes through the first and shapes the second. Then the
model is built, the last snapshot loaded, the coordinator's thread started, and training begins:
`Assembly` puts these parts together.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from dilocox import __version__
from dilocox.dht.addresses import BETWEEN_TRIES_S, NO_FALLBACK, kept_fallback, wait_for_entry
from dilocox.dht.errors import AdmissionLapsed, BootstrapsSilent, EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.join import Joined, join_run
from dilocox.dht.manifest import warnings
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.dht.reachability import described, reached_at
from dilocox.dht.reconnect import relays_between
from dilocox.peer.averaging.averager import AveragerStuck, StageAverager, StageBuffers
from dilocox.peer.averaging.coordinator import ChildDied, Coordinator
from dilocox.peer.averaging.data_lease import PartLease
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.chain.rollback import newest_aside, peer_goes_back
from dilocox.peer.chain.store import keep_manifest
from dilocox.peer.http_pages import check_port, served
from dilocox.peer.memory_and_disk import (
    MemoryNeeds,
    available_bytes,
    check_memory,
    window_limit,
)
from dilocox.peer.options import PeerOptions
from dilocox.peer.os_process import RESTART_AFTER_S, StopRequested, StopSignal, start_again
from dilocox.peer.process.initial_weights import load_initial
from dilocox.peer.process.metrics import PeerMetrics
from dilocox.peer.process.prepare import (
    StageNeeds,
    check_disk,
    held_out,
    local_model,
    open_corpus,
    unfit,
)
from dilocox.peer.process.resting import Allowance, rest_watch
from dilocox.peer.process.run_tokenizer import reachable_tokenizer
from dilocox.peer.process.starting_stage import announce_joining, chosen_stage, said_to_join
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import RecordRefused
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.training.data import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    evaluated_at_once,
    written_text,
)
from dilocox.peer.training.data_sources import HubAway
from dilocox.peer.training.inner_optimizer import clip_factor
from dilocox.peer.training.loop import Learner, Move, Revised
from dilocox.peer.training.offload import gpu_memory
from dilocox.peer.training.report import LoopMeter, Reporter
from dilocox.peer.training.roles import (
    HANDOVER_LIMIT_S,
    REST_LIMIT_S,
    Leading,
    Serving,
    train,
)
from dilocox.peer.training.snapshot_taking import Snapshots
from dilocox.pipeline.frames import Frame, FrameLimits
from dilocox.pipeline.head import Head
from dilocox.pipeline.link import LinkLimits, link_of
from dilocox.pipeline.member import Follower, Member
from dilocox.pipeline.network import Network
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.reservation import Reservation
from dilocox.pipeline.stage import chosen_device, compiler_faults, stage_layout
from dilocox.pipeline.stage_choice import Mover
from dilocox.pipeline.stage_worker import StageWorker
from dilocox.pipeline.tuning import Tuning

logger = logging.getLogger(__name__)


class Assembly:
    """The parts of one peer that train, after everything is forked: `coordinator` and `network`,
    two threads that are not started yet, `train`, the loop that is to be run while both run, and
    `metrics` and `allowance`, of which its pages tell.
    """

    def __init__(
        self,
        local: LocalPeer,
        averager: StageAverager,
        buffers: StageBuffers,
        memory: MemoryNeeds,
        device: torch.device,
        stop: StopSignal,
    ):
        manifest, layout, stage = local.manifest, local.layout, local.stage
        self._local = local
        self._memory = memory
        self._manifest = manifest
        self._stop = stop.event
        self._leave_limit_s = lambda: REST_LIMIT_S if stop.patient else HANDOVER_LIMIT_S
        self._snapshots = snapshots = Snapshots(
            local.snapshots, layout=layout.digest, period_s=60 * local.options.snapshot_minutes
        )
        local.open_log().drop_damaged(applied=snapshots.round)
        start = partial(load_initial, local) if manifest.initial.anchors else None
        self._model = local_model(
            manifest,
            stage,
            layout,
            buffers,
            snapshots,
            device,
            offload=local.options.offload and device.type != "cpu",
            start=start,
        )
        if local.options.compile_layers:
            self._model.stage.compile_layers()
        merge = self._model.merge
        self.allowance = Allowance(local.options)
        reporter = Reporter(local.folder)
        self._tell = reporter.tell
        reporter.shown = lambda peer: self.coordinator.view.shown(peer)  # noqa: PLW0108 - of now
        self._meter = LoopMeter(reporter=reporter, sent=buffers.sent.read, numel=layout.numel)
        self._unfit = dict[int, str]()  # why not, by stage
        newer_manifest = StateFolder(local.options.state).manifest(local.run)
        chooses = local.options.stage == "auto" and manifest.stages > 1
        self.coordinator = Coordinator(
            local,
            averager,
            watch=ManifestWatch(local.swarm, local.run, manifest, newer_manifest),
            applied=merge.round,
            anchor_sha256=anchor_sha256(merge.anchor),
            sent={number: send.tokens for number, send in merge.in_flight.items()},
            unsettled=lambda: merge.unsettled,
            lease=self._lease(),
            mover=Mover(me=local.me, stage=stage, num_stages=manifest.stages, fits=self._fits)
            if chooses
            else None,
            first_round=1
            + max([newest_aside(local.folder), *(s.round for s in snapshots.sent_since)]),
        )
        self._reservation = Reservation(
            me=local.me,
            stage=stage,
            num_stages=manifest.stages,
            proven=lambda: self.coordinator.proven_heads.peers,
            turn_s=manifest.deadlines.record_lifetime_s,
            on_change=lambda: self.network.wake(),  # noqa: PLW0108 - the loop looks at once
        )
        batch = manifest.batch
        self._shape = (batch.microbatch_size, batch.sequence_length, hidden_size(manifest.model))
        self._tuning = Tuning(
            microbatches=batch.microbatches,
            shape=self._shape,
            codec=manifest.pipeline.codec,
            window=manifest.pipeline.window,
        )
        self.network = Network(
            local.dht,
            run=local.run,
            limits=LinkLimits(
                frames=FrameLimits(
                    microbatch_size=batch.microbatch_size,
                    sequence_length=batch.sequence_length,
                    hidden_size=self._shape[2],
                    evaluate_windows=evaluated_at_once(self._shape),
                ),
                silence_s=manifest.deadlines.silence_s,
                room=lambda: available_bytes() / 4,
            ),
            relayed=RelayedRequests(local.identity, local.run, local.clock.time),
            relays=self._relays,
            knows=self._knows,
            answer=self._answer,
            admits=lambda peer, hello: link_of(hello, stage) if local.swarm.admits(peer) else None,
        )
        self.metrics = PeerMetrics(
            local=local,
            averager=averager,
            buffers=buffers,
            meter=self._meter,
            coordinator=self.coordinator,
            reservation=self._reservation,
            network=self.network,
            allowance=self.allowance,
        )
        reporter.on_event, reporter.on_status = self.metrics.on_event, self.metrics.on_status
        self._meter.sample = lambda: self.coordinator.view.written(local.witness)
        self.train = self._loop()

    def _answer(self, peer: str, request: Frame) -> Frame:
        """To a head that asks for this peer; in the network thread."""
        if not self._local.swarm.admits(peer):
            return Frame(kind="no", facts={"reason": "the run has not admitted you"})
        return self._reservation.answer(peer, request)

    def _relays(self, peer: str) -> list[str]:
        """By whose way to ask this peer, if not directly."""
        local, stages = self._local, self.coordinator.view.stages
        return relays_between(stages, local.me, local.stage, peer, client_mode=local.client_mode)

    def _knows(self, peer: str) -> bool:
        """Whether a peer has something to do with this one: it is of its replica, leads one that is
        known to learn, or was admitted by the operator.
        """
        if self._manifest.admission == "listed" and self._local.swarm.admits(peer):
            return True
        assignment, coordinator = self._reservation.assignment, self.coordinator
        mine = coordinator.status.members if assignment is None else assignment.members
        return peer in mine or peer in coordinator.proven_heads.peers

    def _lease(self) -> PartLease | None:
        """A lease on a part of the run's data; None where this peer has no use for one."""
        if self._local.options.data or self._local.stage > 0:
            return None
        return PartLease(self._local, first=self._snapshots.data.get("part"))

    # ---- the loop --------------------------------------------------------------------------------
    def _loop(self) -> Callable[[], None]:
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
            recompute=manifest.pipeline.recompute or self._local.options.recompute,
            document_end=manifest.document_end,
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
            first_window=self._tuning.first_window(manifest.stages),
        )
        leads = self._local.stage == 0
        role = self._leading(learner, member) if leads else self._serving(learner, member)
        return partial(train, learner, role, self._stop)

    def _fits(self, stage: int) -> bool:
        """Whether this machine could host another stage; else it stays, and says so once."""
        if stage not in self._unfit:
            local, device = self._local, self._model.optimizer.device
            folder = StateFolder(local.options.state).run(local.run, stage)
            self._unfit[stage] = unfit(local.options, self._manifest, folder, stage, device)
            if self._unfit[stage]:
                words = "stage %d needs a peer, but does not fit here: %s"
                logger.warning(words, stage, self._unfit[stage])
        return not self._unfit[stage]

    def _window_limit(self, worker: StageWorker) -> int:
        """Microbatches in flight that this peer has memory for; of those a last stage stores what
        comes in.
        """
        optimizer = self._model.optimizer
        is_last = self._local.stage == self._manifest.stages - 1
        stored_on = torch.device("cpu") if is_last else optimizer.device
        return window_limit(
            4 * math.prod(self._shape) if is_last else worker.stored_bytes,
            self._memory,
            self._local.options.memory_limit_bytes,
            stored_on,
            computes_on=optimizer.device,
            untaken_bytes=optimizer.untaken_bytes(stored_on),
        )

    def _leading(self, learner: Learner, member: Member) -> Leading:
        local, manifest = self._local, self._manifest
        clip_norm = manifest.inner.clip_norm
        tokenizer = reachable_tokenizer(local, local.options.invite.bootstraps, local.folder)
        # what is read of it here only
        text = replace(manifest, data=replace(manifest.data, tokenizer=tokenizer))
        head = Head(
            me=self._local.me,
            client_mode=self._local.client_mode,
            tuning=self._tuning,
            member=member,
            records=lambda: self.coordinator.view.stages,
            clip=lambda norm, loss: (
                clip_factor(norm, clip_norm) if math.isfinite(loss) else math.nan
            ),
            tell=self._tell,
            stopping=self._stop.is_set,
            leave_limit_s=self._leave_limit_s,
        )
        corpus, windows = open_corpus(text, local.options.data), held_out(text)
        if manifest.stages == 1 and not local.options.compile_layers:  # each length anew
            after = member.worker.next_logits
            self._meter.sample = partial(written_text, after, corpus.tokenizer, windows)
        return Leading(
            manifest=manifest,
            learner=learner,
            head=head,
            reservation=self._reservation,
            corpus=corpus,
            held_out=windows,
            coordinator=self.coordinator,
            meter=self._meter,
            me=self._local.me,
            stop=self._stop,
        )

    def _serving(self, learner: Learner, member: Member) -> Serving:
        deadlines, waits = self._manifest.deadlines, self._manifest.outer.merge == "none"
        follower = Follower(
            member=member,
            reservation=self._reservation,
            tell=self._tell,
            # two attempts, and what comes before and between them
            longest_wait_s=1.5 * deadlines.attempts_s * waits,
        )
        return Serving(
            learner=learner,
            follower=follower,
            member=member,
            reservation=self._reservation,
            coordinator=self.coordinator,
            leave_limit_s=self._leave_limit_s,
        )


RENEWED_LOOK_S = 300.0  # whose admission is over looks so often whether it was renewed
HUB_PAUSE = "_DILOCOX_HUB_PAUSE_S"  # an environment variable, for the process that comes next


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
        run = options.invite.run_id
        returns = folder.took_part(run)  # a peer that starts again is not to be lost
        hub_pause_s = float(os.environ.pop(HUB_PAUSE, FIRST_PAUSE_S))
        try:
            fallback = NO_FALLBACK
            if returns:
                fallback = wait_for_entry(
                    options.invite.bootstraps, kept_fallback(folder.fallback_peers(run))
                )
            with join_run(
                options.invite,
                identity,
                listen=listen,
                announce=options.announce,
                kept=folder.manifest(run),
                fallback=fallback,
            ) as joined:
                try:
                    _take_part(options, joined, folder, stop)
                finally:
                    stop.defer()  # closing is not to be left half-way
            if stop.event.is_set() and not stop.asked:  # to rest, which a new process does
                start_again()
        except StopRequested:
            logger.info("left: stopped on request, before training began")
        except (BootstrapsSilent, HubAway) as error:  # they went away while this peer joined
            if not returns:
                raise
            pause_s = BETWEEN_TRIES_S
            if isinstance(error, HubAway):
                pause_s = hub_pause_s
                os.environ[HUB_PAUSE] = str(min(2 * pause_s, LONGEST_PAUSE_S))
            logger.warning("%s; trying again in %.0f s", error, pause_s)
            if stop.event.wait(pause_s):
                logger.info("left: stopped on request")
                return 0
            start_again()
        except AdmissionLapsed as error:  # a new process finds it renewed
            logger.warning("%s; this peer looks again every %.0f s", error, RENEWED_LOOK_S)
            if stop.event.wait(RENEWED_LOOK_S) and stop.asked:  # else it is to rest
                logger.info("left: stopped on request")
                return 0
            start_again()
        except RecordRefused as error:  # of our own log: what peers send is refused elsewhere
            raise EnvironmentFault(str(error)) from error
        except (Move, Revised) as reason:
            if stop.asked:
                logger.info("left: stopped on request")
                return 0
            if isinstance(reason, Move):
                folder.note_stage(run, reason.stage)
                logger.warning("moving to stage %d, which has the fewest peers", reason.stage)
            else:
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
    me = joined.identity.peer_id
    if (admission := joined.swarm.admission) and (refusal := admission.refusal(me)):
        raise refusal
    for line in warnings(manifest):
        logger.warning("%s", line)
    stage = chosen_stage(options, joined, folder)
    layout = stage_layout(manifest, stage)
    own = folder.run(joined.run, stage)
    needs = StageNeeds(manifest, stage, recompute=options.recompute, offload=options.offload)
    peer_goes_back(own, manifest)  # what it puts aside is not held any more, or gone
    check_disk(own, needs)
    keep_manifest(own, manifest)
    addresses = reached_at(joined.reach, options.announce, joined.dht.visible_addresses(), me)
    local = LocalPeer(
        **vars(joined),
        stage=stage,
        layout=layout,
        addresses=addresses,
        options=options,
        folder=own,
    )
    buffers = StageBuffers.allocate(layout.numel)
    given = {
        "--recompute": manifest.pipeline.recompute or options.recompute,
        "--offload": options.offload,
    }
    with (
        _averager(local, buffers, stop) as averager,
        gpu_memory([option for option, is_given in given.items() if not is_given]),
        compiler_faults(),
    ):
        # from here on CUDA may be touched: everything is forked
        device = chosen_device(options.device)
        for words in check_memory(needs.memory, options.memory_limit_bytes, device):
            logger.warning(words)
        if options.offload and device.type == "cpu":
            logger.warning("--offload does nothing: this peer computes on the CPU, not on a GPU")
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
        level, text = described(joined.reach, options.announce, addresses)
        logger.log(level, "peer %s %s", me, text)
        with said_to_join(joined, options, stage):
            assembly = Assembly(local, averager, buffers, needs.memory, device, stop)
            stop.defer()
        with assembly.network:
            assembly.coordinator.start()
            try:
                pages = assembly.metrics.pages()
                watch = rest_watch(assembly.allowance, joined.dht.carried_bytes, stop)
                page = assembly.allowance.page()
                at = options.metrics_host, options.metrics_port
                with served(*at, pages, answer=page.answer, query=page.query), watch:
                    assembly.train()
            except Move as move:
                # or another one would move there, too
                announce_joining(joined, options, move.stage)
                raise
            finally:
                assembly.coordinator.close()
        asked = "stopped on request" if stop.asked else "to rest"
        logger.info("left: %s", asked if stop.event.is_set() else "the run has ended")


@contextmanager
def _averager(
    local: LocalPeer, buffers: StageBuffers, stop: StopSignal
) -> Generator[StageAverager]:
    stop.defer()  # a process that was forked half-way could not be closed
    averager = StageAverager(local, buffers)
    try:
        averager.begin()
        stop.resume()
        yield averager
    finally:
        stop.defer()
        averager.close()
