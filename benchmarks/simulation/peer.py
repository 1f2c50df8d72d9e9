"""One simulated peer: the product's coordinator, and a training loop of which steps and tokens are
left.

The loop's books follow peer/training (loop.py, merge.py): what was trained is unsent, in flight, in
a record, or lost, and no token is in two of them. Of tokens `rebase` and `reset` make the same.
Inner steps cost no event: they are counted when somebody asks, and the loop is woken only where
something waits for it between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from benchmarks.simulation.averaging import SimulatedAverager
from benchmarks.simulation.chain import SimulatedLog, SimulatedRecord
from benchmarks.simulation.clock import Scheduled, Threads
from benchmarks.simulation.dht import SimulatedSwarm
from benchmarks.simulation.witness import BOOTSTRAP
from dilocox.compression.layout import FlatLayout
from dilocox.dht.addresses import Reachability
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.peer.averaging.coordinator import TICK_S, Coordinator
from dilocox.peer.averaging.events import (
    AnchorLease,
    Committed,
    Event,
    EventQueue,
    Failed,
    Resynced,
    Voided,
)
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.rounds.record import SendFacts
from dilocox.peer.training.loop import CATCH_UP_LIMIT_S, FADES

if TYPE_CHECKING:
    from benchmarks.simulation.world import World

NEAR_S = 1.0  # between two ticks where something may be due
SOON_S = 35.0  # before a group's time: the driver may begin to look for it
REPLICA_S = 3.0  # to form a replica


class _Lease(AnchorLease):
    """Asks whether the loop lends the anchor when it is to be taken: the loop need not run to say
    so."""

    def __init__(self, lends: Callable[[], bool]):
        super().__init__()
        self._lends = lends

    def take(self) -> bool:
        if self._lends():
            self.offer()
        else:
            self.withdraw()
        return super().take()


class _Events(EventQueue):
    """Tells the loop that something has come."""

    def __init__(self, come: Callable[[], None], lends: Callable[[], bool]):
        super().__init__()
        self.lease = _Lease(lends)
        self._come = come
        self.waiting = 0

    def put(self, event: Event) -> None:
        super().put(event)
        self.waiting += 1
        self._come()


@dataclass
class Books:
    """Where the tokens are that a peer trained on: as Merge counts them."""

    trained: int = 0
    unsent: int = 0
    lost: int = 0
    fly: dict[int, int] = field(default_factory=dict[int, int])
    undone: dict[int, int] = field(default_factory=dict[int, int])
    counted: dict[int, int] = field(default_factory=dict[int, int])
    round: int = -1
    age: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every token is in one place."""
        held = self.unsent + sum(self.fly.values()) + sum(self.counted.values())
        return self.trained == held + self.lost

    def send(self, number: int) -> int:
        """Take all unsent tokens."""
        tokens = self.fly[number] = self.unsent
        self.unsent = self.age = 0
        return tokens

    def void(self, number: int) -> None:
        """Undo a send."""
        self.unsent += self.fly.pop(number)

    def commit(self, record: SimulatedRecord, me: str, max_age: int) -> None:
        """The next record of the chain."""
        if record.round <= self.round:
            return
        for number in [number for number in self.fly if number < record.round]:
            self.void(number)
        member = record.member(me)
        if record.round in self.counted:  # before it went back behind this record
            pass
        elif member is not None:
            self._count(record.round, member.tokens)
        elif record.round in self.fly:
            self.void(record.round)
        self.round = record.round
        self._grow_old(1, max_age)

    def resync(self, chain: list[SimulatedRecord], since: int, me: str, max_age: int) -> None:
        """Go over to another state, whose chain says which sends it holds."""
        named = {
            record.round: member.tokens
            for record in chain
            if record.round > since and (member := record.member(me)) is not None
        }
        for number in [n for n in self.counted if n > since and n not in named]:
            self.lost += self.counted.pop(number)
        for number in [number for number in self.fly if number not in named]:
            self.void(number)
        for number in sorted(named.keys() - self.counted.keys()):
            self._count(number, named[number])
        self.round = chain[-1].round if chain else -1
        self._grow_old(1, max_age)

    def forget(self) -> None:
        """What a process that is killed had not written down."""
        self.lost += self.unsent
        self.unsent = 0

    def _count(self, number: int, tokens: int) -> None:
        if number in self.fly:
            held = self.fly.pop(number)
        else:  # a send that this peer undid or lost, and what was unsent may be in it
            self.lost += self.unsent
            self.unsent, held = 0, tokens
            self.lost -= tokens
        self.counted[number] = tokens
        self.lost += held - tokens

    def _grow_old(self, records: int, max_age: int) -> None:
        self.age += records if self.unsent else 0
        if self.age >= max_age:
            self.forget()
            self.age = 0


class SimulatedPeer:
    """A peer of one stage; a head trains by itself, others with the head that recruited them."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        stage: int = 0,
        step_s: float = 1.0,
        books: Books | None = None,
        log: SimulatedLog | None = None,
    ):
        """books, log: of a peer that comes back after it was killed."""
        manifest = world.manifest
        self.world = world
        self.name = name
        self.stage = stage
        self.step_s = step_s
        self.books = books or Books()
        self.alive = True
        self.frozen = False
        self.members: list[SimulatedPeer] = []  # of the replica that this head leads, without it
        self.leader: SimulatedPeer | None = None  # the head of the replica that it is in
        self.sends: list[int] = []  # the rounds that it took a send of
        self.first_round = 0
        self.voids: list[str] = []
        self._threads = Threads(world.timeline, lambda: world.clock_error_s(self))
        self.log = log or SimulatedLog(manifest.root)
        self.forks = 0  # for which it left its chain
        self.joined_at = world.timeline.now
        self.conduct = world.conduct_of(name)
        self.averager = SimulatedAverager(
            name,
            world.meetings,
            self.log,
            lambda: self._threads.running,
            lambda peer: world.process(peer, stage),
            self.conduct,
        )
        self.averager.woken = self._wake
        self.swarm = SimulatedSwarm(
            world.dht,
            name,
            lambda: self._threads.running,
            lambda now: world.revision_for(name, now),
            self.conduct.says,
        )
        self.events = _Events(self._arm, lambda: self._lends)
        self.coordinator = self._new_coordinator()
        self.chain, self.driver = self.coordinator.chain, self.coordinator.driver
        self._inner_step = self._epoch = 0
        self._longest_step_s = 0.0
        self._origin: float | None = None  # when the inner step under way began
        self._tick: Scheduled | None = None
        self._loop: Scheduled | None = None
        self._meets_at = 0.0  # the group of its last send
        self._busy_until = 0.0  # the coordinator's thread
        self._loop_busy_until = 0.0
        # the end of a round that waits for records, the time of its group, and since when it waits
        self._due: tuple[int, float, float] | None = None
        self._caught_up_s = 0.0
        self._joined = False
        self._stopped_since: float | None = None
        # once it has nothing more to do here: with its last record archived, and without
        self._leaves_by: tuple[float, float] | None = None
        self._begin_tick(world.random.uniform(0.0, TICK_S))

    def _new_coordinator(self) -> Coordinator:
        world = self.world
        bootstraps = tuple(world.archives)
        facts = {"running": True, "local_network": False, "pid": 0, "p2pd_pid": 0}
        dht = SimpleNamespace(bootstraps=bootstraps, **facts)
        local = SimpleNamespace(
            me=self.name,
            run=world.run,
            stage=self.stage,
            manifest=world.manifest,
            # so large a stage that no state saves bytes, without a matrix whose rank were chosen
            layout=FlatLayout.of([("w", (1 << 50,))]),
            addresses=(),
            client_mode=False,
            options=SimpleNamespace(memory_limit_bytes=None, name="", team=""),
            reach=Reachability(kind="public", by_others=True),
            clock=self._threads,
            dht=dht,
            swarm=self.swarm,
            witness=BOOTSTRAP,
            open_log=lambda: self.log,
        )
        return Coordinator(
            cast("LocalPeer", local),
            cast(Any, self.averager),
            watch=ManifestWatch(cast(Any, self.swarm), world.run, world.manifest),
            applied=self.books.round,
            anchor_sha256="",
            sent=self.books.fly,
            events=self.events,
            reader=cast(Any, self._threads.worker(self._wake)),
            writer=cast(Any, self._threads.worker(lambda: None)),
        )

    # ---- what happens to it ----------------------------------------------------------------------
    def kill(self) -> None:
        """Everything ends at once."""
        self.count_steps()
        self.alive = self.averager.answers = False
        self.averager.gone = True
        self._stop_threads()
        self.world.left_replica(self)

    def freeze(self, seconds: float) -> None:
        """All its processes stand still for a while."""
        self.count_steps()
        self.frozen, self.averager.answers = True, False
        self.averager.stumbles += 1
        self._stop_threads()
        self.world.left_replica(self)
        self.world.timeline.after(seconds, self._thaw)

    def _stop_threads(self) -> None:
        for event in (self._tick, self._loop):
            if event is not None:
                event.cancel()
        self._tick = self._loop = None

    def _thaw(self) -> None:
        if self.alive:
            self.frozen, self.averager.answers = False, True
            if self._origin is not None:
                self._origin = self.world.timeline.now
            self._begin_tick(0.0)
            self._arm()

    # ---- training --------------------------------------------------------------------------------
    @property
    def trains(self) -> bool:
        """Whether it is in a replica that makes inner steps."""
        return self.leader is not None and not self.frozen and self.leader._origin is not None

    @property
    def free(self) -> bool:
        """Whether a head may recruit it."""
        here = self.alive and self._joined and not (self.frozen or self.leaving)
        return here and self.leader is None

    @property
    def leaving(self) -> bool:
        """Whether it has nothing more to do in a run that has ended."""
        return self._leaves_by is not None

    def start_training(self) -> None:
        """This head's replica is complete."""
        for peer in (self, *self.members):
            peer.leader = self
            peer._epoch += 1
        self._origin = self.world.timeline.now
        self._arm()

    def stop_training(self) -> None:
        """The replica is not complete any more."""
        self.count_steps()
        self._origin = None

    def count_steps(self) -> None:
        """Note the inner steps that its replica has made by now."""
        head = self.leader
        if head is None or head._origin is None or head.frozen or head._stands:
            return
        steps = int((self.world.timeline.now - head._origin) / head.step_s + 1e-9)
        if steps > 0:
            head._origin += steps * head.step_s
            tokens = steps * self.world.tokens_per_step
            for peer in (head, *head.members):
                peer._inner_step += steps
                peer._longest_step_s = head.step_s
                peer.books.trained += tokens
                peer.books.unsent += tokens

    @property
    def _stands(self) -> bool:
        """Whether the replica that this head leads waits for a member that ends its round."""
        return any(peer._due is not None for peer in (self, *self.members))

    @property
    def _lends(self) -> bool:
        """Whether records may move the anchor now: as Learner's loop does, whose head lends it
        while it has no replica, too."""
        if self.world.takes_at_once or not self._joined or self._due is not None:
            return True
        return self.coordinator.ending or (self.stage == 0 and self.leader is None)

    def _between_steps(self) -> None:
        self._loop = None
        timeline, coordinator, at_once = self.world.timeline, self.coordinator, self._lends
        if timeline.now < self._loop_busy_until:
            self._arm()
            return
        self.count_steps()
        due, self._due = self._due, None
        if due is None:
            if at_once:
                self._take_events()
            if self._joined and (found := coordinator.send_due()) is not None:
                due = *found, timeline.now
        if due is not None and not self.world.takes_at_once:
            due = self._caught_up(due)
            if due is None:
                return
        if due is not None:
            number, scheduled_at, _ = due
            self._end_round(number, scheduled_at)
        if self._joined:
            self._follow_the_run()

    def _take_events(self) -> None:
        while (event := self.events.get()) is not None:
            self.events.waiting -= 1
            self._take(event)
            if isinstance(event, Committed | Resynced):
                self.events.lease.give_back()
            event.taken.set()
            self._wake()

    def _caught_up(self, due: tuple[int, float, float]) -> tuple[int, float, float] | None:
        """The end of a round once the records that are here are in the anchor; None until then."""
        now, since, head = self.world.timeline.now, due[2], self.leader
        self._take_events()
        if self.coordinator.applying and now < since + CATCH_UP_LIMIT_S:
            self._due = due
            self._wake()
            self._arm()
            return None
        self._caught_up_s = max(now - since, FADES * self._caught_up_s)
        if now > since and head is not None and head._origin is not None:
            head._origin = now
        return due

    def _follow_the_run(self) -> None:
        """Stand still where it is paused, and leave where it has ended (peer/training/roles.py)."""
        coordinator, timeline = self.coordinator, self.world.timeline
        if self._leaves_by is not None:
            first, last = self._leaves_by
            if timeline.now > (first if coordinator.archived else last):
                self._go()
            else:
                self._arm()
            return
        if not (coordinator.ending or coordinator.paused):
            return
        if self.leader is self:
            still = coordinator.paused or coordinator.stops(
                stages=1 + len(self.members), has_text=True
            )
            if still:
                self.stop_training()
            elif self._origin is None:
                self._origin = timeline.now
        if coordinator.ending:
            self.world.ends()
        if self._finished:
            self.world.release(self)
            coordinator.leave()
            deadlines = self.world.manifest.deadlines
            waits_s = max(deadlines.record_lifetime_s, deadlines.exchange_s)
            # nobody goes before it has said that it leaves
            self._leaves_by = timeline.now + 2 * NEAR_S, timeline.now + waits_s
        self._arm()

    @property
    def _finished(self) -> bool:
        """As Learner's, in no replica that another peer leads."""
        coordinator, books, now = self.coordinator, self.books, self.world.timeline.now
        if not coordinator.stopped or self.leader not in (None, self):
            self._stopped_since = None
            return False
        if self._stopped_since is None:
            self._stopped_since = now
        overdue = now > self._stopped_since + coordinator.end_limit_s
        return overdue or not (books.fly or books.unsent > 0)

    def _go(self) -> None:
        """The process ends, in order."""
        self.alive = self.averager.answers = False
        self.averager.gone = True
        self._stop_threads()
        self.world.gone(self)

    def _take(self, event: Event) -> None:
        books, max_age = self.books, self.world.manifest.rounds.max_age
        match event:
            case Committed():
                books.commit(cast(SimulatedRecord, event.record), self.name, max_age)
            case Voided():
                if event.round in books.fly:
                    books.void(event.round)
                    self.voids.append(event.reason)
            case Resynced():
                self.forks += event.fork_round is not None
                since = books.round if event.fork_round is None else event.fork_round
                chain = [record for _, record in self.log.chain]
                books.resync(chain, since, self.name, max_age)
            case Failed():
                raise event.error
            case _:
                raise TypeError(f"unknown event {event}")

    def _end_round(self, number: int, scheduled_at: float) -> None:
        books = self.books
        if not books.fly and books.unsent > 0 and number > books.round:
            states_taken = self.chain.states_taken
            tokens = books.send(number)
            self.sends.append(number)
            write_s = self.world.write_s
            self._meets_at = scheduled_at - self.world.clock_error_s(self)

            def submit() -> None:
                if self.alive:
                    self.coordinator.submit(
                        number,
                        SendFacts(tokens=tokens, step_s=self.step_s),
                        scheduled_at=scheduled_at,
                        states_taken=states_taken,
                    )
                    self._wake()

            if write_s:
                self._loop_busy_until = self.world.timeline.now + write_s
                if self._origin is not None:
                    self._origin += write_s
                self.world.timeline.after(write_s, submit)
            else:
                submit()
        else:
            self.coordinator.skip(number)
        self._inner_step = 0

    # ---- its threads -----------------------------------------------------------------------------
    def _arm(self) -> None:
        """Let the loop run between this inner step and the next one."""
        if self._loop is not None or self.frozen or not self.alive:
            return
        timeline, head = self.world.timeline, self.leader
        when = timeline.now + TICK_S
        if head is not None and head._origin is not None and not head.frozen:
            self.count_steps()
            when = timeline.now + TICK_S if head._stands else head._origin + head.step_s
        # a step is complete a moment after its time as floats have it, or it would be looked for on
        when = max(when, self._loop_busy_until, timeline.now + 0.001)
        self._loop = timeline.at(when, self._between_steps)

    def _wake(self) -> None:
        """Something has come for the coordinator's thread: it looks at its next tick."""
        if self._tick is not None and not self.frozen and self.alive:
            due = max(self.world.timeline.now + TICK_S, self._busy_until)
            if self._tick.at > due:
                self._tick.cancel()
                self._begin_tick(due - self.world.timeline.now)

    def _begin_tick(self, delay_s: float) -> None:
        self._tick = self.world.timeline.after(delay_s, self._run_tick)

    def _run_tick(self) -> None:
        clock, coordinator = self._threads.control, self.coordinator
        clock.spent = 0.0
        coordinator.status = self.loop_status()
        coordinator.tick()
        blocked_s, clock.spent = clock.spent + self.world.tick_s, 0.0
        self._busy_until = self.world.timeline.now + blocked_s
        if not self._joined and coordinator.joined.is_set():
            self._joined = True
            self.first_round = coordinator.round
            self.world.joined(self)
        delay_s = self._delay_s()
        # the loop looks after every inner step; here it is woken only where it would find something
        clock.spent = delay_s + blocked_s
        if coordinator.send_due() is not None or coordinator.ending or coordinator.paused:
            self._arm()
        clock.spent = 0.0
        self._begin_tick(blocked_s + delay_s)

    def _delay_s(self) -> float:
        """Until something may be due, if nothing comes; the product ticks every tenth of a second,
        of which most find nothing."""
        now = self.world.timeline.now
        held = self.chain.delivering and not self._lends  # until the round's end
        if self.driver.sent_round is not None and not (self.driver.exchanging or held):
            return min(max(self._meets_at - SOON_S - now, TICK_S), self.world.far_s)
        waits = not held and (self.driver.sent_round is not None or self.chain.busy)
        if not self._joined or waits or self.coordinator.ending:
            return NEAR_S
        head = self.leader
        if head is not self:
            return self.world.far_s
        left_s = (self.coordinator.inner_steps - self._inner_step) * self.step_s
        # after that a bell of its own, or an end that is not decided yet
        return min(left_s, self.world.far_s) if left_s > 0 else NEAR_S

    def loop_status(self) -> LoopStatus:
        self.count_steps()
        books, head = self.books, self.leader
        members: tuple[str, ...] = ()
        if head is self:
            members = tuple(peer.name for peer in (self, *self.members))
        return LoopStatus(
            inner_step=self._inner_step,
            unsent_tokens=max(0, books.unsent) + sum(books.fly.values()),
            step_s=self._longest_step_s,
            caught_up_s=self._caught_up_s,
            tokens_per_s=0.0 if head is None else self.world.tokens_per_step / head.step_s,
            head="" if head is None else head.name,
            members=members,
            epoch=self._epoch,
            undecided=head is self and any(peer.coordinator.undecided for peer in self.members),
            oldest_anchor=min((peer.books.round for peer in self.members), default=None),
        )
