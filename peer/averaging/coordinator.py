"""A peer's dealings with the swarm, in a thread of its own, so that training never waits for them.

It drives the round clock (round_end.py), the exchange of a send (driver.py) and follows the chain
(follower.py). It looks at the others' records and publishes this peer's through two workers: over
far links each call to the DHT takes seconds, and no exchange may wait for one. What the training
loop must know comes to it as events; what it is doing it leaves in `status`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from dilocox.dht.errors import CannotFollow
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.dht.node import RunDHT
from dilocox.dht.records import Record, ReplicaRecord, replica_key
from dilocox.dht.swarm_view import Heads, SwarmView
from dilocox.peer.averaging.announcer import Announcer, replica_record
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.averaging.connectivity import Connectivity
from dilocox.peer.averaging.data_lease import PartLease
from dilocox.peer.averaging.driver import ExchangeDriver
from dilocox.peer.averaging.events import EventQueue, Failed
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.averaging.matchmaking import LATE_GROUP_S
from dilocox.peer.averaging.proven_heads import ProvenHeads, anybody_known, others_pace
from dilocox.peer.chain.rollback import last_rollback
from dilocox.peer.memory_and_disk import check_use
from dilocox.peer.rounds.record import SendFacts
from dilocox.peer.rounds.round_end import RoundKeeper
from dilocox.peer.rounds.standing import ever_credited
from dilocox.pipeline.stage_choice import Mover

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerThread:
    """One daemon thread: a call that hangs does not keep the process from its end."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Do this after all that was submitted before."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)


TICK_S = 0.1
CLOSE_LIMIT_S = 5.0
BOOTSTRAP_LIMIT_S = 3.0
BELLS_SHARE, CLAIM_SHARE = 0.2, 0.3  # of an announcement
FOLLOW_S = 1.0  # how often the round is followed without news
FADES = 0.8  # of the longest time that a call took, with every one that is faster
LONGEST_STEP_S = 3600.0  # that others are believed of themselves when a run ends
MOVE_TURN_S = 60.0  # whose turn it is to move changes that often


class ChildDied(RuntimeError):
    """A process of this peer is gone: it must start anew from its snapshot."""


@dataclass(frozen=True, kw_only=True)
class _Looked:
    """What a look at the DHT came to. bootstrap: whether one answers, None between heartbeats."""

    answered: bool
    revised: bool
    bootstrap: bool | None
    seconds: float


class Coordinator(threading.Thread):
    """The thread, with the driver of sends and the follower of the chain. Attributes without
    underscore are for the training loop; each is set whole.
    """

    def __init__(
        self,
        local: LocalPeer,
        averager: StageAverager,
        *,
        watch: ManifestWatch,
        applied: int,
        anchor_sha256: str,
        sent: Mapping[int, int],
        unsettled: Callable[[], Collection[int]] = tuple,
        lease: PartLease | None = None,
        mover: Mover | None = None,
        first_round: int = 0,
        events: EventQueue | None = None,
        reader: WorkerThread | None = None,
        writer: WorkerThread | None = None,
    ):
        """applied, anchor_sha256: the round of the last record in the anchor, and its digest.
        sent: tokens by round of sends from before a restart. unsettled: rounds whose records may
        name this peer, as far as it knows. lease: on a part of the data, for peers of stage 0.
        mover: for peers that may change their stage. first_round: the least one to begin with.
        events, reader, writer: a simulation brings its own; the latter two call the DHT.
        """
        super().__init__(name="coordinator", daemon=True)
        self._local = local
        self._dht: RunDHT = local.dht
        self._clock = local.clock
        self._averager = averager
        self.events = events or EventQueue()
        self.chain = ChainFollower(
            local,
            averager,
            self.events,
            applied=applied,
            anchor_sha256=anchor_sha256,
            unsettled=unsettled,
        )
        self.driver = ExchangeDriver(local, averager, self.events, self.chain)
        for round_number, tokens in sent.items():
            self.driver.resume(round_number, tokens)
        self._announcer = Announcer(local, self.chain)
        self._lease = lease
        self._mover = mover
        self._watch = watch
        self._closing = threading.Event()
        self._leaving = False
        self._bootstrap_answered = True
        self._connectivity = Connectivity(local, averager)
        self._reader = reader or WorkerThread("dht reads")
        self._writer = writer or WorkerThread("dht writes")
        self._reading: Future[_Looked] | None = None
        self._writing: Future[float] | None = None
        self._read_s = self._write_s = 0.0  # what such calls take
        self._ring_now = self._hurry = False
        self._published_at = self._followed_at = float("-inf")
        self._published_for_s = 0.0  # that what was announced last lives
        self._told_record = ""  # the digest of the newest one then, or since
        self._heard_at = self._beat_at = float("-inf")
        self._paused_at = float("inf")
        self._stood_still_since: float | None = None
        self._pending_send: Callable[[], None] | None = None
        self._rounds = RoundKeeper(
            local.me,
            local.clock,
            meeting_s=local.manifest.deadlines.group_s,
            first=first_round,
        )
        self.proven_heads = ProvenHeads()
        self._heads: Heads = None  # that count
        self._heads_view = SwarmView(me=local.me)  # what they say
        self.joined = threading.Event()
        self.status = LoopStatus()
        self.data_part: tuple[int, int] = (0, 0) if lease is None else (lease.part, 0)
        self.heard_val_loss: tuple[int, float] | None = None
        self._run_ended = False
        # of the replica that this peer leads
        self._all_unsent = False  # every stage took a step that it has not sent
        self._stopped_at: float | None = None
        self._led: tuple[str, ...] = ()  # its members, also once it is dissolved
        self.move_to: int | None = None
        self.moves_with_progress = False

    # ---- for the training loop -------------------------------------------------------------------
    @property
    def revised(self) -> bool:
        """Whether this peer must not go on under the rules of the manifest that it began with."""
        newer = self._watch.manifest.rules > self._local.manifest.rules
        return newer or self.cannot_follow is not None

    @property
    def cannot_follow(self) -> CannotFollow | None:
        """Why the run goes on without this peer under the operator's newest manifest, if so."""
        admission = self._local.swarm.admission
        refused = None if admission is None else admission.refusal(self._local.me)
        return self._watch.unreadable or refused

    @property
    def revision(self) -> int:
        return self._watch.manifest.operation.revision

    @property
    def paused(self) -> bool:
        return self._watch.manifest.operation.state == "paused"

    @property
    def ending(self) -> bool:
        """Whether the run ends, by its operator or its tokens: what was learnt is sent, then all
        leave.

        It counts its tokens on stage 0, whose peers believe their own chain alone; another stage's
        may be a little ahead or behind.
        """
        if self._watch.manifest.operation.state == "ended":
            return True
        if self._local.stage:
            return self._run_ended
        return self._local.manifest.ended_at(self.chain.head.chain_tokens)

    @property
    def stopped(self) -> bool:
        """Whether the run ends and this peer makes no more inner steps: its replica has made its
        last one, or it is in none."""
        return self.ending and (self._stopped_at is not None or not self.status.head)

    def stops(self, *, stages: int, has_text: bool) -> bool:
        """Whether the replica that this peer leads, of so many stages, is to stand still from now
        on; asked before each inner step, which is made if there is text for it.

        A run's last step is one that was made while no send was undecided: so every stage has
        something for the last round, and all end with the same one. And it is made before any stage
        can take that send, or one that hears of the group sooner would have steps left that the
        head's send holds.
        """
        decided = not (self.undecided or self._awaited)
        complete = decided and (self._all_unsent or stages <= 1) and not self._rounds.sending
        if not self.ending:
            self._stopped_at = None
        elif self._stopped_at is None and complete:
            self._stopped_at = self._clock.monotonic()
        self._all_unsent = decided and has_text  # once the step is made that begins now
        return self._stopped_at is not None

    @property
    def inner_steps(self) -> int:
        """H of this round: the largest that the last records of this replica's stages name."""
        stages = self.view.stages
        stated = [
            record.inner_steps
            for stage, peer in enumerate(self.status.members)
            if (record := stages.get(stage, {}).get(peer)) is not None
        ]
        return self.driver.plan.inner_steps_of(self.chain.last_record, stated)

    @property
    def tokens_at_start(self) -> int:
        return self.chain.tokens_at_start

    @property
    def others_pace(self) -> float:
        """On how many tokens all other replicas train while this peer's trains on one."""
        return others_pace(self.view, self.chain.last_record)

    @property
    def applying(self) -> bool:
        """Whether a record or a state is on its way here, or from here into the training loop."""
        return self.chain.busy

    @property
    def newest_round(self) -> int:
        """Of the records here, -1 before the first one."""
        return self.chain.head.round

    @property
    def outcome_limit_s(self) -> float:
        """How long it can take at most until a send is decided."""
        deadlines = self._local.manifest.deadlines
        group_s = deadlines.group_s + LATE_GROUP_S
        return deadlines.attempts_s + 2 * deadlines.record_lifetime_s + group_s

    @property
    def end_limit_s(self) -> float:
        """How long a `stopped` peer waits for its last record; others may take two steps yet."""
        steps = (min(each.step_s, LONGEST_STEP_S) for each in self._heads_view.leading.values())
        return self.outcome_limit_s + 2 * max(steps, default=0.0)

    @property
    def undecided(self) -> bool:
        """Whether a send of this peer is in no record yet, and not void. A round does not end
        before, but where what decides it is here, and waits for that end."""
        outer = self._local.manifest.outer
        waits = outer.apply == "round_end" and outer.merge != "none" and self.chain.delivering
        return self._pending_send is not None or (self.driver.undecided and not waits)

    @property
    def archived(self) -> bool:
        """Whether a bootstrap keeps this peer's newest record; true where none answers."""
        if not (self._bootstrap_answered and self._dht.bootstraps):
            return True
        return self.view.held_by(self._dht.bootstraps, self.chain.head.round)

    @property
    def holds_alone(self) -> bool:
        """Whether this peer is the last one of its stage, and the operator's archive has not its
        newest record: any other peer that claims it may be a stranger.
        """
        alone = self.joined.is_set() and not self.driver.rivals(self.view)
        return alone and not self.archived

    @property
    def round(self) -> int:
        return self._rounds.round

    @property
    def view(self) -> SwarmView:
        return self._announcer.view

    def send_due(self) -> tuple[int, float] | None:
        """The round and the time of its group if this replica must take its send now."""
        return None if self._leaving else self._rounds.send_due(self._clock.time())

    def submit(
        self, round_number: int, facts: SendFacts, *, scheduled_at: float, states_taken: int
    ) -> None:
        """A send was taken (see `ExchangeDriver.submit`); the next round begins."""
        self._pending_send = partial(
            self.driver.submit,
            round_number,
            facts,
            scheduled_at=scheduled_at,
            states_taken=states_taken,
        )
        self.skip(round_number)

    def skip(self, round_number: int) -> None:
        """The next round begins without a send in this one."""
        self._all_unsent = False
        self._rounds.end(round_number)

    def announce(self) -> None:
        """Something changed that the others should know: tell them as soon as that is paid for."""
        self._hurry = True

    def finish_part(self) -> None:
        """The part of the data was read to its end: another one is leased at the next heartbeat."""
        if self._lease is not None:
            self._lease.finish()

    def leave(self) -> None:
        """The loop has ended: tell the others, and start no new round."""
        self._leaving = True
        self._published_at = float("-inf")

    def close(self) -> None:
        self._closing.set()
        self.join(CLOSE_LIMIT_S)

    # ---- the thread ------------------------------------------------------------------------------
    def run(self) -> None:
        """Tick until closed; what goes wrong is the training loop's to hear."""
        try:
            while not self._closing.wait(TICK_S):
                self.tick()
            if self._leaving and self._published_at == float("-inf"):
                self._announce_all()  # a peer that leaves at once says so all the same
            if self._writing is not None:
                self._writing.result(timeout=CLOSE_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - it is raised again in the training loop
            self.events.put(Failed(error=error))

    def tick(self) -> None:
        """Look, tell, and go on with round, send and chain where that is due; waits for nothing."""
        now = self._clock.monotonic()
        if not self._dht.running:
            raise ChildDied("the DHT process or p2pd has died")
        if not self._averager.is_alive():
            raise ChildDied("the averaging process has died")
        if self._connectivity.lost(now):
            raise ChildDied("other peers expect to reach this one, and no longer can")
        news = self._take_answers()
        self._look(now)
        if self._takes_part and (news or now >= self._followed_at):
            self._followed_at = now + FOLLOW_S
            self._follow_round()
        self._tell(now)
        if (send := self._pending_send) is not None:
            self._pending_send = None
            send()
        self.chain.tick(
            self.view, exchanging=self.driver.exchanging, sent_round=self.driver.sent_round
        )
        self.driver.closed_by_chain(self.chain.applied)
        self.driver.tick(self.view, meets_at=self._rounds.meets_at, search_s=self._read_s)

    @property
    def _takes_part(self) -> bool:
        return self.joined.is_set() and not self._leaving

    # ---- looking ---------------------------------------------------------------------------------
    def _look(self, now: float) -> None:
        """Have the DHT read if that is due: the bells in the measure of the round, and so all else
        while a record is missing; else that when the others' heartbeats may have changed it."""
        if self._reading is not None:
            return
        deadlines = self._local.manifest.deadlines
        stays = self._takes_part and not self.ending
        beat = now - self._beat_at >= (deadlines.heartbeat_s if stays else FOLLOW_S)
        resting = now - self._paused_at > deadlines.record_lifetime_s
        if beat or now - self._heard_at >= self._rounds.look_s(resting=resting):
            self._heard_at = now
            self._beat_at = now if beat else self._beat_at
            wanted = self._rounds.wanted_bells(self._heads_view)
            # a peer that waits for a record or for the outcome of a send looks at least as often
            eager = not stays or self.driver.undecided
            look = partial(
                self._announcer.look,
                wanted,
                self.round,
                whole=beat or self.driver.lacks_record,
                eager=eager,
                searching=self._goes_by_others,
            )
            self._reading = self._reader.submit(partial(self._read, look, beat=beat))

    @property
    def _goes_by_others(self) -> bool:
        """Whether this peer looks for members of a replica, or is about to move."""
        lacks = not (self._local.stage or self.status.members or self.paused)
        return self._takes_part and (lacks or (self._mover is not None and self._mover.named))

    def _read(self, look: Callable[[], bool], *, beat: bool) -> _Looked:
        began = self._clock.monotonic()
        answered = look()
        seconds = self._clock.monotonic() - began
        heartbeat_s = self._local.manifest.deadlines.heartbeat_s
        revised = self._watch.follow(self._announcer.revision, heartbeat_s, began)
        if (admission := self._local.swarm.admission) is not None:
            admission.remind(self._local.me)
        bootstrap: bool | None = None
        if beat:
            bootstrap = self._local.swarm.bootstrap_answers(BOOTSTRAP_LIMIT_S)
            lease = None if self._leaving else self._lease
            last = self.chain.last_record
            credited = ever_credited(last.standings) if last else set[str]()
            if lease is not None and lease.settle(credited):
                self.data_part = (lease.part, lease.position)
                self.announce()
        return _Looked(answered=answered, revised=revised, bootstrap=bootstrap, seconds=seconds)

    def _take_answers(self) -> bool:
        """Take what the workers have done by now; whether there is news of the others."""
        if self._writing is not None and self._writing.done():
            self._write_s = max(self._writing.result(), FADES * self._write_s)
            self._writing = None
        if self._reading is None or not self._reading.done():
            return False
        looked = self._reading.result()
        self._reading = None
        self._read_s = max(looked.seconds, FADES * self._read_s)
        view, newest = self.view, self.chain.last_record
        self.proven_heads.see(newest, view.stage)
        self._heads = self.proven_heads.counting(view, newest, stage=self._local.stage)
        archives = {*self._dht.bootstraps, self._local.witness}
        said = self._heads_view = view.of_heads(self._heads, archives)
        if looked.revised:
            self.announce()  # others hear of it from this peer, too
        if looked.bootstrap is not None:
            self._bootstrap_answered = looked.bootstrap
            self.driver.alone.observe(
                self._clock.monotonic(),
                others_in_view=len(self.driver.rivals(view)),
                bootstrap_answered=looked.bootstrap,
            )
            members = newest.members if newest is not None else ()
            self._connectivity.look(view, {member.peer for member in members})
        evaluated = [
            (record.val_round, record.val_loss)
            for record in said.replicas.values()
            if record.val_loss is not None and record.val_round <= self.chain.head.round
        ]
        if evaluated:
            self.heard_val_loss = max(evaluated)
        if not self.joined.is_set():
            # training begins when nobody has a record that this peer lacks
            ready = looked.answered and not self.chain.busy and self._stands_on_base()
            if ready and not self.chain.behind(view):
                self._rounds.start(view, self.chain.head.round, heads=self._heads)
                self.joined.set()
                self.announce()
        elif self._mover is not None and not self._leaving:
            free = not self.status.head and self.status.in_flight is None
            unsent, turn = self.status.unsent_tokens > 0, int(self._clock.time() / MOVE_TURN_S)
            fresh = self._announcer.sees_others
            self.move_to = self._mover.observe(
                view.stages, free=free, turn=turn, unsent=unsent, fresh=fresh
            )
            self.moves_with_progress = unsent
        manifest, witness = self._local.manifest, self._local.witness
        # before anybody is known a crowd would end what has not begun
        self._run_ended = said.says_ended(manifest, witness, by_peers=anybody_known(newest))
        return True

    @property
    def _awaited(self) -> bool:
        """Whether a send of another member is undecided, or it may still take one for a round that
        this peer has left, of which it hears later; what it says of that holds its head back for no
        longer than a send can take."""
        oldest = self.status.oldest_anchor
        lags = oldest is not None and self._rounds.may_meet(after=oldest)
        undecided = self.status.undecided or lags
        return undecided and self._rounds.lasted_s < self.outcome_limit_s

    def _rings_last(self, now: float) -> bool:
        """Whether what is left is to be sent: all other heads in view have heard of the end, too.

        A head that had not would send with this round, train on, and need another one of its own.
        """
        if not self.stopped:
            return False
        manifest, claims = self._watch.manifest, self.view.claims
        by_operator, end = manifest.operation.state == "ended", self._local.manifest.end_tokens
        heard = all(
            (claim := claims.get(head)) is not None
            and (claim.revision >= self.revision if by_operator else claim.chain_tokens >= end)
            for head in self._heads_view.leading.keys() - {self._local.me}
        )
        waited_s = now - (self._stopped_at or now)
        overdue = waited_s > manifest.deadlines.record_lifetime_s
        return heard or overdue or self._rounds.meets_at(self.round) is not None

    def _follow_round(self) -> None:
        status = self.status
        now, last = self._clock.monotonic(), self.chain.head.round
        if self._stood_still_since is not None:
            self._rounds.stood_still(now - self._stood_still_since)
        self._stood_still_since = now if self.paused else None
        self._paused_at = min(self._paused_at, now) if self.paused else float("inf")
        self._ring_now |= self._rounds.follow(
            self.view,
            self._replica_record(status),
            self._clock.time(),
            heads=self._heads,
            beginning=not anybody_known(self.chain.last_record),
            head=status.head,
            last_record=last,
            run_record=max(last, self._heads_view.run_round(self._local.witness)),
            inner_steps=None if self.ending else self.inner_steps,
            tokens=status.unsent_tokens,
            undecided=self.undecided or self._awaited,
            stopped=self._rings_last(now),
        )

    def _stands_on_base(self) -> bool:
        """Whether this chain holds the record that the operator went back to, if to any."""
        manifest = self._local.manifest
        return self.chain.stands_on(manifest.base(self._local.stage), last_rollback(manifest))

    # ---- telling ---------------------------------------------------------------------------------
    def _tell(self, now: float) -> None:
        """Have what is due published: all at a heartbeat, a bell at once, and a record that this
        peer was in if that leaves enough for what else may have to be told before its time."""
        if self._writing is not None:
            return
        cadence = self._announcer.cadence
        if cadence.due(now - self._published_at, self._published_for_s):
            self._announce_all()
        elif self._hurry and cadence.may_hurry(now):
            cadence.hurried(now)
            self._announce_all()
        elif self._ring_now:
            self._ring_now = False
            self._tell_at_once(self._announcer.of_bells(self._rounds.bells), BELLS_SHARE, now)
        elif self._has_news and cadence.may_hurry(now, CLAIM_SHARE):
            self._told_record = self.chain.head.digest
            stuck, revision = self.driver.stuck, self.revision
            claim = self._announcer.of_record(self.status, stuck=stuck, revision=revision)
            self._tell_at_once(claim, CLAIM_SHARE, now)

    def _tell_at_once(self, records: dict[str, Record], share: float, now: float) -> None:
        cadence = self._announcer.cadence
        cadence.hurried(now, share)
        self._writing = self._writer.submit(partial(self._write, records, None, cadence.lifetime_s))

    @property
    def _has_news(self) -> bool:
        """Whether it was not told yet that this peer has a record that it took part in."""
        last, told = self.chain.last_record, self._told_record == self.chain.head.digest
        return not told and last is not None and last.member(self._local.me) is not None

    def _announce_all(self) -> None:
        self._told_record = self.chain.head.digest
        self._published_at = self._clock.monotonic()
        self._published_for_s = self._announcer.cadence.lifetime_s
        self._ring_now = self._hurry = False
        status, announcer, present = self.status, self._announcer, self._takes_part
        trains = "training" if status.head else "spare"
        records = announcer.of_stage(
            "left" if self._leaving else trains if present else "joining",
            round_number=self.round,
            inner_steps=self.driver.plan.inner_steps_after(self.chain.last_record),
            voids=self.driver.voids,
            stuck=self.driver.stuck,
            own=status,
            revision=self.revision,
        )
        lease = self._lease if present else None
        if present:
            self._led = status.members or self._led
            records |= announcer.of_bells(self._rounds.bells)
        # the loss of the run's last anchor is known only once the replica is gone
        led = status.members if present else self._led if self.ending else ()
        if (replica := self._replica_record(replace(status, members=led))) is not None:
            records[replica_key(self._local.run)] = replica
        if lease is not None:
            records |= lease.announcement(status.data_part, status.data_position)
        write = partial(self._write, records, lease, self._published_for_s)
        self._writing = self._writer.submit(write)

    def _write(self, records: dict[str, Record], lease: PartLease | None, lives_s: float) -> float:
        """In the writer's thread; seconds that the DHT took."""
        began = self._clock.monotonic()
        stored = self._local.swarm.publish_many(records, lives_s)
        seconds = self._clock.monotonic() - began
        if lease is not None:
            lease.published(stored)
        dht_pid = cast("int | None", self._dht.pid)
        pids = (os.getpid(), dht_pid, self._dht.p2pd_pid, self._averager.pid)
        check_use([pid for pid in pids if pid], self._local.options.memory_limit_bytes)
        return seconds

    def _replica_record(self, status: LoopStatus) -> ReplicaRecord | None:
        # a bell that is written now is heard after the write, a look interval, and the look
        hear_s = self._write_s + self._rounds.look_s() + self._read_s
        hear_s = max(hear_s, self.driver.encoding_s)  # and its send encoded when the group meets
        hear_s += status.caught_up_s  # before it takes that
        return replica_record(self.round, status, hear_s=round(hear_s, 3))
