"""Puts a peer's parts together: the thread that deals with the swarm, the network of its replica,
and the loop that trains."""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import AveragerConfig, StageBuffers, open_log
from dilocox.peer.branch import newest_aside
from dilocox.peer.coordination import coordinator_of
from dilocox.peer.figures import Figures
from dilocox.peer.inner import clip_factor
from dilocox.peer.join import Joined
from dilocox.peer.leading import Leading
from dilocox.peer.learner import Learner
from dilocox.peer.lease import PartLease
from dilocox.peer.memory import MAX_WINDOW, window_limit
from dilocox.peer.options import PeerOptions
from dilocox.peer.place import Place
from dilocox.peer.prepare import held_out, local_model, open_corpus
from dilocox.peer.reachability import described, reached_at
from dilocox.peer.redial import relays_between
from dilocox.peer.report import Reporter
from dilocox.peer.resting import Allowance
from dilocox.peer.serving import Serving
from dilocox.peer.signals import StopSignal
from dilocox.peer.snapshots import Snapshots
from dilocox.peer.tally import Tally
from dilocox.peer.trainer import Trainer
from dilocox.peer.validation import BATCH_WINDOWS
from dilocox.pipeline.desk import Desk
from dilocox.pipeline.following import Follower
from dilocox.pipeline.frames import FrameLimits
from dilocox.pipeline.head import Head
from dilocox.pipeline.letters import Letters
from dilocox.pipeline.member import Member
from dilocox.pipeline.network import Network
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.ports import link_of
from dilocox.pipeline.recruiting import Recruiter
from dilocox.pipeline.stage_choice import Mover
from dilocox.pipeline.tuning import Tuning
from dilocox.pipeline.worker import StageWorker

logger = logging.getLogger(__name__)


class Assembly:
    """The parts of one peer that train, after everything is forked.

    Attributes:
        coordinator: the thread that deals with the swarm, not started yet.
        network: the thread that deals with the replica, not started yet.
        trainer: the loop; to be run while both threads run.
        figures: what can be asked of this peer over HTTP.
        allowance: what its volunteer allows it, of which the figures tell.
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
        self._place = self._make_place(config, averager)
        self.allowance = Allowance(options)
        reporter = Reporter(own)
        self._tell = reporter.tell
        self._tally = Tally(reporter=reporter, sent=buffers.sent.read, numel=layout.numel)
        self.coordinator = coordinator_of(
            self._place,
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
        self._desk = Desk(
            me=self._place.me,
            stage=config.stage,
            num_stages=manifest.stages,
            on_change=self._wake,
        )
        batch = manifest.batch
        self._shape = (batch.microbatch_size, batch.sequence_length, hidden_size(manifest.model))
        self.network = Network(
            joined.dht,
            run=joined.run,
            limits=FrameLimits(
                microbatch_size=batch.microbatch_size,
                sequence_length=batch.sequence_length,
                hidden_size=self._shape[2],
                evaluate_windows=BATCH_WINDOWS,
            ),
            silence_s=manifest.deadlines.silence_s,
            letters=Letters(joined.identity, joined.run, joined.clock.time),
            relays=self._relays,
            answer=self._desk.answer,
            admits=lambda _, hello: link_of(hello, config.stage),
        )
        self.figures = Figures(
            place=self._place,
            joined=joined,
            averager=averager,
            buffers=buffers,
            tally=self._tally,
            coordinator=self.coordinator,
            desk=self._desk,
            network=self.network,
            allowance=self.allowance,
        )
        reporter.listeners.append(self.figures.metrics)
        self.trainer = self._trainer()

    def _wake(self) -> None:
        """A head left an order: the loop should look at once."""
        self.network.wake()

    def _relays(self, peer: str) -> list[str]:
        """By whose way to ask this peer, if not directly."""
        place, stages = self._place, self.coordinator.view.stages
        return relays_between(stages, place.me, place.stage, peer, client_mode=place.client_mode)

    def _make_place(self, config: AveragerConfig, averager: StageAverager) -> Place:
        joined, me = self._joined, self._joined.identity.peer_id
        addresses = reached_at(
            joined.reach, self._options.announce, joined.dht.visible_addresses(), me
        )
        level, text = described(joined.reach, self._options.announce, addresses)
        logger.log(level, "peer %s %s", me, text)
        return Place(
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
        )

    def _lease(self) -> PartLease | None:
        """A lease on a part of the run's data; who has no use for one, or own data, needs none."""
        if self._options.data or self._place.stage > 0:
            return None
        return PartLease(
            swarm=self._joined.swarm,
            run=self._joined.run,
            me=self._place.me,
            parts=self._manifest.data.parts,
            first=self._snapshots.found.data.get("part") if self._snapshots.found else None,
        )

    def _mover(self) -> Mover | None:
        """What tells a peer that may choose its stage when to change it."""
        if self._options.stage != "auto" or self._manifest.stages == 1:
            return None
        place = self._place
        return Mover(me=place.me, stage=place.stage, num_stages=self._manifest.stages)

    # ---- the loop --------------------------------------------------------------------------------
    def _trainer(self) -> Trainer:
        manifest, model = self._manifest, self._model
        learner = Learner(
            me=self._place.me,
            manifest=manifest,
            model=model,
            coordinator=self.coordinator,
            snapshots=self._snapshots,
            tally=self._tally,
            stop=self._stop,
        )
        worker = StageWorker(
            model.stage,
            model.optimizer,
            microbatches=manifest.batch.microbatches,
            stage_index=self._place.stage,
            num_stages=manifest.stages,
            policy=manifest.pipeline.schedule,
            recompute=manifest.pipeline.recompute,
        )
        self._tally.computing_s = lambda: worker.computing_s
        member = Member(
            stage=self._place.stage,
            num_stages=manifest.stages,
            worker=worker,
            optimizer=model.optimizer,
            links=self.network,
            anchors=learner,
            shape=self._shape,
            vocabulary=int(manifest.model["vocab_size"]),
            window_limit=lambda: self._window_limit(worker),
        )
        leads = self._place.stage == 0
        part = self._leading(learner, member) if leads else self._serving(learner, member)
        return Trainer(learner=learner, part=part, stop=self._stop)

    def _window_limit(self, worker: StageWorker) -> int:
        """Microbatches in flight that this peer has memory for; a last stage stores one."""
        if self._place.stage == self._manifest.stages - 1:
            return MAX_WINDOW
        limit = self._place.memory_limit_bytes
        return window_limit(worker.stored_bytes, limit, self._model.optimizer.device)

    def _leading(self, learner: Learner, member: Member) -> Leading:
        manifest = self._manifest
        clip_norm = manifest.inner.clip_norm
        head = Head(
            me=self._place.me,
            num_stages=manifest.stages,
            client_mode=self._place.client_mode,
            tuning=Tuning(
                microbatches=manifest.batch.microbatches,
                shape=self._shape,
                codec=manifest.pipeline.codec,
                window=manifest.pipeline.window,
            ),
            member=member,
            network=self.network,
            recruiter=Recruiter(
                me=self._place.me,
                num_stages=manifest.stages,
                network=self.network,
                records=lambda: self.coordinator.view.stages,
            ),
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
            desk=self._desk,
            corpus=open_corpus(manifest, self._options.data),
            held_out=held_out(manifest),
            coordinator=self.coordinator,
            tally=self._tally,
            me=self._place.me,
            stop=self._stop,
        )

    def _serving(self, learner: Learner, member: Member) -> Serving:
        follower = Follower(member=member, network=self.network, desk=self._desk, tell=self._tell)
        return Serving(
            learner=learner,
            follower=follower,
            member=member,
            desk=self._desk,
            coordinator=self.coordinator,
            num_stages=self._manifest.stages,
            window=lambda: self._window_limit(member.worker),
        )
