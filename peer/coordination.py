"""Puts a coordinator together with what it drives: the chain, the driver of sends, the herald."""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path

from dilocox.peer.averager import StageAverager
from dilocox.peer.chain import ChainFollower
from dilocox.peer.coordinator import Coordinator
from dilocox.peer.driver import ExchangeDriver
from dilocox.peer.events import EventQueue
from dilocox.peer.herald import Herald
from dilocox.peer.join import Joined
from dilocox.peer.lease import PartLease
from dilocox.peer.merge import Merge
from dilocox.peer.outer import anchor_sha256
from dilocox.peer.place import Place
from dilocox.peer.plan import RoundPlan, stage_codec
from dilocox.peer.revision import ManifestWatch
from dilocox.peer.roundlog import RoundLog
from dilocox.peer.vote import AloneWatch
from dilocox.peer.worker import WorkerThread
from dilocox.pipeline.stage_choice import Mover


def coordinator_of(
    place: Place,
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
    deadlines = place.manifest.deadlines
    plan = RoundPlan(place.manifest, stage_codec(place.manifest, place.layout))
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
        manifest=place.manifest,
        run=place.run,
        stage=place.stage,
        layout_digest=place.layout.digest,
        plan=plan,
        clock=joined.clock,
        alone=alone,
    )
    for round_number, send in merge.fly.items():
        driver.resume(round_number, send.tokens)
    return Coordinator(
        place=place,
        dht=joined.dht,
        herald=Herald(place, joined.swarm, joined.clock),
        clock=joined.clock,
        averager=averager,
        chain=chain,
        driver=driver,
        alone=alone,
        events=events,
        lease=lease,
        mover=mover,
        watch=ManifestWatch(joined.swarm, place.run, place.manifest, manifest_file),
        reader=WorkerThread("dht reads"),
        writer=WorkerThread("dht writes"),
        first_round=first_round,
    )
