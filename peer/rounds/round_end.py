"""Rounds and the bell: which round a replica is in, when its group meets, and when it sends.

Round numbers belong to the run. A head *rings the bell* of round R (writes a BellRecord) when its
replica made H inner steps in it, and the replica trains on. Once a quorum of heads has rung, T_R
is known: the one moment at which all groups of the round form. (Without a common time 0 of 8 rounds
formed one group when peers came 3 s apart; with it 8 of 8.) Slower replicas get a grace, then stop
at their next inner step. So nobody waits for the slowest, and nobody comes alone to a group.

    q    half of the replicas known from their records, rounded up, at least 2 where 2 are known;
         of those whose heads count (averaging/proven_heads.py)
    T_R  finish of the q-th + grace + the longest inner step that the replicas state + the notice;
         now + that inner step + the notice once all known replicas have rung

The *notice* is the time until all have heard a bell that is written now: the longest that a head
states of itself (`hear_s`: how often it looks, and how long its calls to the DHT take; where
records wait for a round's end, also how long it takes to apply one), within bounds, and at least
2 s.

A head that has rung, sees q bells and finds no T_R writes it into its bell, with the end of the
grace; all use the smallest T_R that they ever found for the round (`RoundKeeper`), so it only
ever moves to an earlier time, and that with notice. Pure rules over records: `now_s` is run time
(dht/clock.py), equal on all peers within CLOCK_ERROR_S. Statements are believed within bounds:

- a bell that finished later than now + CLOCK_ERROR_S does not count (yet);
- a T_R before its own bell's finish or beyond the horizon does not count, nor does one without
  the end of its grace, or before half of the heads are seen to have rung, or earlier than that, or
  later than any head can have named by now (a round and the longest notice after the grace); a T_R
  in the past does: a late peer finds no group and sends with the next. What one's own head says
  is believed;
- the round's time is the lower median of what the first q bells state, and a replica whose one
  inner step takes longer than that is not waited for: no single statement delays the others;
- equal finish times need no order: only the q-th smallest time enters, and no peer is preferred.
  Of equal T_R the one with the earlier end of grace counts;
- a round far beyond the newest record and beyond what most replicas state is nobody's round; that
  after the newest record of any stage is everybody's, as one's own chain and the operator's archive
  say: a stage that a cut kept ahead of the others commits nothing before they have come to it;
- before anybody counts, all do, but a head that is silent for four round times after the bells of
  others is waited for no longer: keys that say that they lead replicas, and never ring, stop
  nobody;
- of heads that do not count yet, inner steps and notice are waited for within a small share of the
  round: a new and slow head must come to a group, or it would never count.

`RoundKeeper` keeps the round of a peer: when a head rings, when to send, when to go on.

What it has seen of a round stays seen until its group has met, also by peers that have gone on:
bells in the DHT live for three announcements, and a round may last an hour. For the same reason a
head keeps its own bell of a round alive until then. (With bells that were forgotten as they
expired, 4 heads committed every third round of 600 s: slower ones found nobody to average with.)

Two threads use it: the coordinator's, which looks at the others' bells, and the training loop,
which ends a round by its send.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low

from dilocox.dht.clock import Clock
from dilocox.dht.records import MAX_INDEX, BellRecord, ReplicaRecord
from dilocox.dht.swarm_view import Heads, SwarmView

BELLS_READ = 8  # bell keys a head reads at most, so that strange round numbers cost it little
MAX_AHEAD = 64  # rounds beyond the newest record that others may lead a peer to
MAX_AHEAD_OF_MOST = 100_000  # the same, where half of all state that they are there
GRACE_SHARE = 0.25  # of the round's time: what slower replicas get after the quorum
NOTICE_S = 2.0  # to spread T_R, at least
# A longer notice that others state is believed up to the larger of these: what a bad line takes,
# and a share of the round's time.
NOTICE_BOUND_S, NOTICE_BOUND_SHARE = 20.0, 0.125
SILENT_ROUNDS = 4  # round times, for which silent heads are waited for before any of them counts
NEW_SHARE = 0.05  # of the round's time, that each of both is believed of heads that do not count
CLOCK_ERROR_S = 3.0  # how far run times may be apart; hivemind refuses peers that are further off
HORIZON_S = 24 * 3600.0  # nothing sensible is announced further ahead, and nothing takes longer


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The times of one round, in run time."""

    send_after: float
    """End of the grace: a replica that has not rung stops at its next inner step after it."""
    scheduled_at: float
    """T_R: when the group forms."""


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What one head or peer sees of a round."""

    round: int
    bells: Mapping[str, BellRecord]
    """By head: the bells of this round, one's own included once it has rung."""
    replicas: Mapping[str, ReplicaRecord]
    """By head: the replicas known, one's own included while it stands."""
    silent: Collection[ReplicaRecord] = ()
    """Those that are waited for no longer; one that hears of T_R makes its inner step first."""
    new: Collection[ReplicaRecord] = ()
    """Those of heads that do not count."""
    head: str = ""
    """Of the replica that this peer is in."""
    known: Schedule | None = None
    """The times found before: they stand, also where nobody tells of them any more."""

    def rung(self, now_s: float) -> dict[str, BellRecord]:
        latest = now_s + CLOCK_ERROR_S
        return {
            head: bell
            for head, bell in self.bells.items()
            if bell.round == self.round and bell.finished_at <= latest
        }

    def reached(self, now_s: float) -> bool:
        return len(self.rung(now_s)) >= self._quorum

    def schedule(self, now_s: float) -> Schedule | None:
        """The smallest T_R that a bell carries or carried, with its end of grace; None if none."""
        rung, half = self.rung(now_s), max(1, (len(self.replicas) + 1) // 2)
        finishes = sorted(bell.finished_at for bell in rung.values())
        soonest = finishes[half - 1] - CLOCK_ERROR_S if len(finishes) >= half else math.inf
        latest = self._latest(rung, now_s)
        found = [
            (bell.scheduled_at, bell.send_after)
            for head, bell in rung.items()
            if bell.scheduled_at is not None
            and bell.send_after is not None
            and (head == self.head or soonest <= bell.scheduled_at <= latest)
            and bell.finished_at <= bell.scheduled_at <= now_s + HORIZON_S
            and bell.send_after <= bell.scheduled_at
        ]
        if self.known is not None:
            found.append((self.known.scheduled_at, self.known.send_after))
        if not found:
            return None
        scheduled_at, send_after = min(found)
        return Schedule(send_after=send_after, scheduled_at=scheduled_at)

    def proposal(self, me: str, now_s: float) -> Schedule | None:
        """The times that this head should write into its bell now; None if it has nothing to add.

        A head that has not rung has no bell to write into. Once it is found, T_R moves for one
        reason: when all have rung, nobody needs the rest of the grace.
        """
        rung = self.rung(now_s)
        if me not in rung or not self.reached(now_s):
            return None
        found = self.schedule(now_s)
        round_s = self._round_s(rung)
        # a head that rang trains on: it takes its send only at the end of its inner step
        wait_s = self._step_s(round_s) + self._notice_s(round_s)
        soonest = now_s + min(wait_s, HORIZON_S)
        if self.replicas.keys() <= rung.keys():
            if found is not None and found.scheduled_at <= soonest:
                return None
            return Schedule(send_after=now_s, scheduled_at=soonest)
        return self._after_grace(rung, round_s, soonest, now_s) if found is None else None

    def _after_grace(
        self, rung: Mapping[str, BellRecord], round_s: float, soonest: float, now_s: float
    ) -> Schedule:
        finishes = sorted(bell.finished_at for bell in rung.values())
        send_after = finishes[self._quorum - 1] + GRACE_SHARE * round_s
        wanted = send_after + self._step_s(round_s) + self._notice_s(round_s)
        scheduled_at = min(max(wanted, soonest), now_s + HORIZON_S)
        return Schedule(send_after=min(send_after, scheduled_at), scheduled_at=scheduled_at)

    def _latest(self, rung: Mapping[str, BellRecord], now_s: float) -> float:
        """The latest T_R that a head can have named by now, whatever inner steps and notice it knew
        of: one that names the next day, and rings no more, would stop the others."""
        if not rung:
            return now_s
        round_s = self._round_s(rung)
        finishes = sorted(bell.finished_at for bell in rung.values())[: self._quorum]
        grace_ends_at = finishes[-1] + GRACE_SHARE * round_s
        bound_s = round_s + max(NOTICE_BOUND_S, NOTICE_BOUND_SHARE * round_s)
        return max(grace_ends_at, now_s) + bound_s + CLOCK_ERROR_S

    def _round_s(self, rung: Mapping[str, BellRecord]) -> float:
        """How long the round took the first q heads, by the lower median."""
        first = sorted(rung.values(), key=lambda bell: bell.finished_at)[: self._quorum]
        return min(max(median_low(bell.round_s for bell in first), 0.0), HORIZON_S)

    def _step_s(self, round_s: float) -> float:
        """The longest inner step that the replicas state; one absurd record delays nobody."""
        # none are known to a head that has rung and then lost its replica
        longest = max((replica.step_s for replica in self._standing), default=0.0)
        new = max((replica.step_s for replica in self.new), default=0.0)
        return max(0.0, min(longest, round_s), min(new, NEW_SHARE * round_s))

    def _notice_s(self, round_s: float) -> float:
        """Until all have heard of what is written now."""
        stated = max((replica.hear_s for replica in self._standing), default=0.0)
        bound = max(NOTICE_BOUND_S, NOTICE_BOUND_SHARE * round_s)
        new = max((replica.hear_s for replica in self.new), default=0.0)
        return max(NOTICE_S, min(stated, bound), min(new, NEW_SHARE * round_s))

    @property
    def _standing(self) -> list[ReplicaRecord]:
        return [*self.replicas.values(), *self.silent]

    @property
    def _quorum(self) -> int:
        """Half of the replicas, rounded up, at least 2 where 2 are known."""
        known = max(1, len(self.replicas))
        return max((known + 1) // 2, min(2, known))


def waited_for(
    replicas: Collection[str], bells: Mapping[str, BellRecord], *, head: str, now_s: float
) -> set[str]:
    """Of the replicas those that this `head` waits for where none is known from records.

    Once it has rung, and most that have rung did so four times as long ago as their round had
    taken, those that have a bell; after twice that at the latest. bells: of one round; by what all
    see, so that heads find the same time.
    """
    own = bells.get(head)
    if own is not None:
        over = [
            bell.finished_at + SILENT_ROUNDS * bell.round_s
            for bell in bells.values()
            if bell.finished_at <= now_s + CLOCK_ERROR_S
        ]
        latest = own.finished_at + 2 * SILENT_ROUNDS * own.round_s
        if over and now_s > min(median_high(over), latest):
            return set(replicas) & bells.keys()
    return set(replicas)


def newest_credible(own: int, last_record: int, stated: Iterable[int]) -> int:
    """The newest round that others can lead a peer in round `own` to.

    So many rounds after the newest record that it knows, or, where the swarm has gone on without
    records, the next one after what half of all state, itself included: a crowd of strangers must
    not lead it to where there are no keys any more. `stated`: by replicas.
    """
    usual = min(median_low([own, *stated]) + 1, last_record + MAX_AHEAD_OF_MOST)
    return min(max(last_record + MAX_AHEAD, own + 1, usual), MAX_INDEX)


def bells_to_read(own: int, replicas: Iterable[ReplicaRecord]) -> list[int]:
    """The rounds whose bells a peer in round `own` should look at, newest first.

    Its own and the next, and those that other replicas state: such a statement alone moves nobody,
    the bell does. `replicas`: those in credible rounds.
    """
    stated = {replica.round for replica in replicas}
    ahead = {number for stating in stated for number in (stating - 1, stating) if number > own}
    following = [own + 1] if own < MAX_INDEX else []
    return [*sorted(ahead - {own + 1}, reverse=True)[: BELLS_READ - 2], *following, own]


LOOKS = 32  # at others' bells in the time of a round
LOOK_S, LONGEST_LOOK_S = 1.0, 60.0  # between two of them


@dataclass
class _Round:
    """What is known of one round. own: this head's bell. times: the smallest ever seen."""

    bells: dict[str, BellRecord] = field(default_factory=dict[str, BellRecord])
    own: BellRecord | None = None
    times: Schedule | None = None


class RoundKeeper:
    """The round that this peer is in, its own bells, and the times of the groups once known."""

    def __init__(self, me: str, clock: Clock, *, meeting_s: float, first: int = 0):
        """meeting_s: how long after its time a group may still form. first: the least round that it
        can be in, whatever is seen of the run.
        """
        self._me = me
        self._clock = clock
        self._meeting_s = meeting_s
        self._lock = threading.Lock()
        self._began = clock.monotonic()
        self._lasted_s = 0.0  # the round before
        self._carried_s = 0.0  # of earlier ones, whose steps count in this one
        self._finished = False
        self._heads: Heads = None  # that count
        self._head = ""  # of the replica that this peer is in
        self._beginning = False
        self._known: dict[int, _Round] = {first: _Round()}  # this round, and those yet to meet
        self.round = first

    # ---- the training loop -----------------------------------------------------------------------
    def send_due(self, now: float) -> tuple[int, float] | None:
        """The round and the time of its group if the send is to be taken at this inner step."""
        with self._lock:
            times = self._here.times
            if times is None or not (self._finished or now >= times.send_after):
                return None
            return self.round, times.scheduled_at

    def end(self, round_number: int) -> None:
        """The send of this round was taken, or skipped."""
        with self._lock:
            if round_number >= self.round:  # else the others' bells have led on already
                self._go_to(round_number + 1)

    # ---- the coordinator -------------------------------------------------------------------------
    @property
    def bells(self) -> list[BellRecord]:
        """This head's bells, to be kept alive in the DHT."""
        with self._lock:
            return [each.own for each in self._known.values() if each.own is not None]

    @property
    def sending(self) -> bool:
        """Whether members of this head's replica may have taken their send of its round."""
        with self._lock:
            own, times = self._here.own, self._here.times
        return times is not None and (own is not None or self._clock.time() >= times.send_after)

    @property
    def lasted_s(self) -> float:
        """Of the round that it is in."""
        return self._clock.monotonic() - self._began

    def may_meet(self, *, after: int) -> bool:
        """Whether the group of a round later than that one, which it has left, may still meet."""
        with self._lock:
            return any(after < number < self.round for number in self._known)

    def meets_at(self, round_number: int) -> float | None:
        """The time of a round's group, also of one that it has sent in; None if not known."""
        known = self._known.get(round_number)
        return None if known is None or known.times is None else known.times.scheduled_at

    def start(self, view: SwarmView, last_record: int, *, heads: Heads = None) -> None:
        """The round in which a peer begins that joins or comes back. heads: that count."""
        with self._lock:
            self._heads = heads
            self._hear(view)
            stated = [each.round for each in self._replicas(view, None).values()]
            self._go_to(max(self.round, last_record + 1, self._led_to(view, None, stated)))

    def stood_still(self, seconds: float) -> None:
        """So many seconds of this round nobody trained: its grace is not to grow by them."""
        with self._lock:
            self._began += seconds

    def wanted_bells(self, view: SwarmView) -> list[int]:
        wanted = bells_to_read(self.round, view.replicas.values())
        return [*wanted, *sorted(self._known.keys() - set(wanted), reverse=True)]

    def look_s(self, *, resting: bool = False) -> float:
        """Seconds between two looks at the others' bells.

        In the measure of a round's time: a head that rings gives the others a grace of a quarter of
        it, and a notice that counts with this. Infinity in a run that has been paused (`resting`)
        for longer than a bell lives: bells from before it have been heard, and nobody rings now.
        """
        if resting:
            return math.inf
        lasted_s = max(self.lasted_s, self._lasted_s)
        return min(max(lasted_s / LOOKS, LOOK_S), LONGEST_LOOK_S)

    def follow(
        self,
        view: SwarmView,
        own: ReplicaRecord | None,
        now: float,
        *,
        head: str,
        heads: Heads = None,
        beginning: bool = False,
        last_record: int = -1,
        run_record: int = -1,
        inner_steps: int | None,
        tokens: int,
        undecided: bool,
        stopped: bool = False,
    ) -> bool:
        """Move with the others, ring when it is time; whether `bells` are to be published at once.

        Only heads ring, after so many `inner_steps`; in a run that ends (None) once their replica
        has `stopped`. When the last replica is gone, a peer that is left with `tokens` that no
        record holds rings, too. Other members (`own` is None) take their send once their `head` has
        rung; a peer in no replica, which learns nothing more, once the group's time is known.

        A head does not ring while the last send is `undecided`, its own or a member's: it trains
        on, and the round lasts as long as the exchange. If it rang, a peer that waits for an
        outcome would have to skip this round's send, and two that skip in turn would never meet.

        heads: that count. Another one rings, too, and goes by the times of these. beginning: nobody
        is known from records yet, so that all count.
        last_record: the round of the newest record that this peer has. run_record: of the newest
        that it is told of, of any stage. The group of that has met, and its stage averages in no
        earlier round: where a cut had kept one ahead, the others come to it, by so many rounds a
        record that a false word leads nobody away.
        """
        with self._lock:
            self._heads, self._head, self._beginning = heads, head, beginning
            self._hear(view)
            following = min(run_record, last_record + MAX_AHEAD) + 1
            if following == self.round + 1 and last_record < self.round:
                # its own stage has none: where the group may still meet, a send is in time
                times = self._view(self.round, view, own, now).schedule(now)
                if times is not None and now <= times.scheduled_at + self._meeting_s:
                    following = self.round
            if (newest := max(self._led_to(view, own), following)) > self.round:
                carried_s = 0.0 if own is None else self.lasted_s + self._carried_s
                self._go_to(newest)
                self._carried_s = carried_s
            here = self._here
            before = here.own
            # steps since its last send count, also those made in rounds that it skipped
            steps = own and inner_steps is not None and own.inner_step >= inner_steps
            last = stopped and tokens > 0 and (own or not (head or view.leading))
            if (steps or last) and not undecided and before is None:
                here.own = BellRecord(
                    round=self.round,
                    finished_at=now,
                    round_s=self.lasted_s + self._carried_s,
                    send_after=None,
                    scheduled_at=None,
                )
            proposed = self._view(self.round, view, own, now).proposal(self._me, now)
            if proposed is not None and here.own is not None:
                here.own = replace(here.own, **vars(proposed))
            urgent = here.own != before
            self._set_times(view, own, now)
            own_rung = head == self._me and here.own is not None
            self._finished = not head or own_rung or head in here.bells
            return urgent

    def _hear(self, view: SwarmView) -> None:
        for number, bells in view.bells.items():
            if number in self._known or (number > self.round and bells):
                known = self._known.setdefault(number, _Round())
                known.bells |= {
                    head: bell
                    for head, bell in bells.items()
                    # of our own, what the DHT has may be older than what we know
                    if head != self._me and bell.round == number
                }

    def _led_to(
        self, view: SwarmView, own: ReplicaRecord | None, stated: Iterable[int] = ()
    ) -> int:
        """The newest round to which the others lead, this one if to none.

        A bell of R says that that of R-1 reached its quorum, so a replica in an earlier round goes
        to R at once and keeps its steps. It is believed where as many heads are seen to have rung
        R-1 or to be in R as are half of all. stated: rounds that may be such without a bell.
        """
        replicas = self._replicas(view, own)
        rung = [(number, head) for number in self._known for head in self._bells(number)]
        told = {number for number, _ in rung} | set(stated)
        for newest in sorted((number for number in told if number > self.round), reverse=True):
            there = {head for number, head in rung if number >= newest - 1}
            there |= {head for head, each in replicas.items() if each.round >= newest}
            if 2 * len(there) >= max(1, len(replicas)):
                return newest
        return self.round

    def _set_times(self, view: SwarmView, own: ReplicaRecord | None, now: float) -> None:
        for number, known in list(self._known.items()):
            known.times = self._view(number, view, own, now).schedule(now)
            over = known.times is None or now > known.times.scheduled_at + self._meeting_s
            if over and number < self.round:
                del self._known[number]
                continue
            if known.own is not None and known.times is not None:
                # should the one that wrote them be gone, others learn them from here
                known.own = replace(known.own, **vars(known.times))

    def _view(
        self, number: int, view: SwarmView, own: ReplicaRecord | None, now: float
    ) -> RoundView:
        everybody = dict(view.leading) | ({} if own is None else {self._me: own})
        replicas, bells = self._replicas(view, own), self._bells(number)
        awaited = set(replicas)
        if self._beginning:
            awaited = waited_for(replicas, bells, head=self._head, now_s=now)
        return RoundView(
            round=number,
            bells=bells,
            replicas={head: replicas[head] for head in awaited},
            silent=[each for head, each in replicas.items() if head not in awaited],
            new=[each for head, each in everybody.items() if head not in replicas],
            head=self._head,
            known=self._known[number].times,
        )

    def _replicas(self, view: SwarmView, own: ReplicaRecord | None) -> dict[str, ReplicaRecord]:
        """Those that count, one's own as it is."""
        known = {head: each for head, each in view.leading.items() if head != self._me}
        known |= {} if own is None else {self._me: own}
        return {head: each for head, each in known.items() if self._counts(head)}

    def _bells(self, number: int) -> dict[str, BellRecord]:
        """Likewise, and that of one's own head."""
        known = self._known[number]
        bells = known.bells | ({} if known.own is None else {self._me: known.own})
        return {
            head: bell
            for head, bell in bells.items()
            if self._counts(head) or (head == self._head != self._me)
        }

    def _counts(self, head: str) -> bool:
        return self._heads is None or head in self._heads

    @property
    def _here(self) -> _Round:
        return self._known[self.round]

    def _go_to(self, round_number: int) -> None:
        round_number = min(round_number, MAX_INDEX)  # no key names a later one
        if round_number != self.round:
            self._lasted_s = self.lasted_s
        self._carried_s = 0.0
        self.round = round_number
        self._known.setdefault(round_number, _Round())
        self._finished = False
        self._began = self._clock.monotonic()
