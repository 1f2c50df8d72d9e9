"""The averaging process without numbers: who meets, who is left out, how the votes fall, what is
logged (chain.py).

Meetings follow hivemind's matchmaking: the group of a plan closes at its scheduled time, or at the
first caller's time plus the least time of matchmaking where that is later; who comes after it is
told nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hivemind.averaging.matchmaking import MatchmakingException

from benchmarks.simulation.chain import RECORD_BYTES, SimulatedLog, SimulatedRecord
from benchmarks.simulation.clock import Scheduled, SimulatedFuture, ThreadClock
from benchmarks.simulation.dht import Network
from dilocox.compression.stage_codec import MARGIN
from dilocox.dht.addresses import Reachability
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.averager import Applied
from dilocox.peer.chain.chain_client import NoState, Reached, TakenState, WantedState
from dilocox.peer.rounds.group import (
    AttemptResult,
    ExchangeOrder,
    GroupRefused,
    Plan,
    TooFew,
    attempt_times,
    taking_part,
)
from dilocox.peer.rounds.rank_choice import facts_of, following_window, next_inner_steps
from dilocox.peer.rounds.record import Contribution, RecordRefused
from dilocox.peer.rounds.round_end import CLOCK_ERROR_S
from dilocox.peer.rounds.standing import (
    credits,
    following_standings,
    most_tokens,
    voters,
)
from dilocox.peer.rounds.vote_count import Verdict, Vote, decide, exclusion

PHASES = 2
JOIN_TRIPS = (2.0, 4.0)  # round trips: declare oneself, find the leader, be taken
LEADER_PATIENCE_S = 10.0  # until a follower gives up a leader that does not answer


class Donor(Protocol):
    """Who gives records and states: another peer, or a bootstrap."""

    @property
    def log(self) -> SimulatedLog: ...

    @property
    def answers(self) -> bool: ...

    @property
    def has_state(self) -> bool: ...


class Honest:
    """What a peer tells the others of what it should; a liar's is another one (liars.py)."""

    silent = False  # in the exchange

    def says(self, records: Mapping[str, Any]) -> Mapping[str, Any]:
        """What it stores in the DHT."""
        return records

    def states(self, order: ExchangeOrder) -> ExchangeOrder:
        """What it brings to its group."""
        return order

    def votes(self, hearer: str, vote: Vote) -> Vote:
        """What one of the group hears as its vote."""
        return vote

    def gives(self, averager: SimulatedAverager) -> Donor:
        """From what it answers who asks for records and states."""
        return averager


@dataclass(kw_only=True)
class Lines:
    """What an exchange costs. stage_bytes: of a message; late: chance that a member's parts come
    too late to be in the means; codec_s: what a member computes before its group meets, and as much
    in the second phase of the exchange; outer_step_s: to apply a record.
    """

    network: Network
    stage_bytes: float = 2.5e6
    bytes_per_s: float = 1.25e6
    late: float = 0.0
    codec_s: float = 0.0
    outer_step_s: float = 0.1
    vote_loss: float = 0.0

    def exchange_s(self, members: int) -> float:
        """Seconds from the group's start until all have all means."""
        moved = 2 * (members - 1) / members * self.stage_bytes
        return moved / self.bytes_per_s + 6 * self.network.rtt_s


@dataclass
class _Meeting:
    """A group that forms."""

    closes_at: float
    closing: Scheduled
    comers: dict[str, SimulatedAverager] = field(default_factory=dict[str, "SimulatedAverager"])


class Meetings:
    """Where the averaging processes of a swarm find each other, and exchange."""

    def __init__(self, lines: Lines, manifest: Manifest):
        self.lines = lines
        self.manifest = manifest
        self._open: dict[str, list[_Meeting]] = {}

    def come(self, averager: SimulatedAverager, order: ExchangeOrder) -> None:
        """A process looks for the group of its plan."""
        key = order.plan.key
        here = self._open.setdefault(key, [])
        network, now = self.lines.network, self.lines.network.timeline.now
        for meeting in here:
            leader = next(iter(meeting.comers))
            blamed = averager.peer_id in meeting.comers[leader].order.blamed
            blamed = blamed or leader in order.blamed
            if blamed:
                continue
            apart_s = abs(averager.clock_error_s - meeting.comers[leader].clock_error_s)
            reached = network.connected(leader, averager.peer_id) and apart_s < CLOCK_ERROR_S
            if now <= meeting.closes_at and reached:
                meeting.comers[averager.peer_id] = averager
                if self._complete(meeting):
                    meeting.closing.cancel()
                    self._close(key, meeting)
                return
        scheduled_at = order.scheduled_at - averager.clock_error_s
        closes_at = max(scheduled_at, now + self.manifest.deadlines.matchmaking_s)
        timeline = network.timeline
        closing = timeline.at(closes_at, lambda: self._close(key, meeting))
        meeting = _Meeting(closes_at, closing, {averager.peer_id: averager})
        here.append(meeting)

    def leave(self, averager: SimulatedAverager, order: ExchangeOrder) -> bool:
        """A process looks no further, unless its group stands or somebody else gathers it."""
        for meeting in self._open.get(order.plan.key, []):
            leader, *others = meeting.comers.values()
            if leader is averager:
                meeting.closing.cancel()
                self._open[order.plan.key].remove(meeting)
                for each in others:
                    each.let_go()
                return True
            if averager in others:
                return False
        return not averager.let_in

    def _complete(self, meeting: _Meeting) -> bool:
        """Whether as many are in as each of them expects."""
        stated = [each.order.whole_with for each in meeting.comers.values()]
        return None not in stated and len(stated) >= max(stated)

    def _close(self, key: str, meeting: _Meeting) -> None:
        self._open[key].remove(meeting)
        if not self._open[key]:
            del self._open[key]
        comers = meeting.comers
        leader = next(iter(comers.values()))
        if not leader.answers:
            for each in comers.values():
                each.let_in = True
                each.fail("its leader does not answer", after_s=LEADER_PATIENCE_S)
            return
        connected = self.lines.network.connected
        group = {
            peer: each
            for peer, each in comers.items()
            if each.answers and connected(peer, leader.peer_id)
        }
        for peer, each in comers.items():
            if peer not in group:
                each.fail("cut off from the leader")
        if len(group) == 1:
            leader.fail("nobody came")
            return
        self.start(group)

    def start(self, group: dict[str, SimulatedAverager]) -> None:
        """The group stands: what attempt_setup checks of it, then the exchange."""
        orders = {peer: each.order for peer, each in group.items()}
        aborts = [order.abort for order in orders.values() if order.plan.attempt]
        blamed = _excluded(aborts, orders.keys(), _voters(orders))
        for peer in blamed & group.keys():
            group[peer].fail("the others leave this peer out of the repeated attempt")
        group = {peer: each for peer, each in sorted(group.items()) if peer not in blamed}
        if not group:
            return
        order = next(iter(orders.values()))
        before = () if order.last is None else order.last.standings
        tickets = {peer: orders[peer].ticket() for peer in group}
        try:
            part = taking_part(order, tickets, credits(orders, before, order.plan.round), blamed)
        except TooFew as error:
            for each in group.values():
                each.fail(str(error))
            return
        for peer in group.keys() - part.tickets.keys():
            group[peer].fail("this peer sits out")
        _Exchange(self, {peer: group[peer] for peer in part.tickets}, {*part.excluded}).begin()


class _Exchange:
    """One attempt of one group."""

    def __init__(
        self,
        meetings: Meetings,
        group: dict[str, SimulatedAverager],
        excluded: set[str],
    ):
        self._meetings = meetings
        self._excluded = excluded
        self._lines = meetings.lines
        self._group = group
        self._orders = {peer: each.order for peer, each in group.items()}
        self._voters = _voters(self._orders)
        self._beats = {peer: each.stumbles for peer, each in group.items()}
        self._began = self._lines.network.timeline.now
        self._codec_s = self._limit_s = 0.0
        self._late = False
        self.votes: dict[str, Vote] = {}
        self.record: SimulatedRecord | None = None

    def begin(self) -> None:
        """Bytes move; a reducer that is gone is missed once its silence is noticed."""
        for each in self._group.values():
            each.let_in = True
        deadlines, codec_s = attempt_times(
            self._meetings.manifest.deadlines,
            PHASES,
            growth=1.0,
            stated=[self._orders[peer].codec_s for peer in self._voters],
        )
        self._limit_s = deadlines.exchange_s + PHASES * codec_s
        encoded_at = max(each.encoded_at for each in self._group.values())
        self._codec_s = max(0.0, encoded_at - self._began) + self._lines.codec_s
        seconds = self._lines.exchange_s(len(self._group)) + self._codec_s
        self._late = seconds > self._limit_s
        self._lines.network.timeline.after(min(seconds, self._limit_s), self._end)

    def _lost(self) -> set[str]:
        """Members that died, froze or were cut off since the group stood."""
        side = self._lines.network.side_of
        sides = [side(peer) for peer in self._group]
        main = max(set(sides), key=sides.count)
        return {
            peer
            for peer, each in self._group.items()
            if not each.answers
            or each.conduct.silent
            or each.stumbles != self._beats[peer]
            or side(peer) != main
        }

    def _end(self) -> None:
        lost = self._lost()
        deadlines = self._meetings.manifest.deadlines
        if lost & self._voters:
            # their means are missing: all the others abort, and say whom they missed
            missed = tuple(sorted(lost))
            for peer in self._group:
                if self._group[peer].answers:
                    others = missed if peer not in lost else tuple(sorted(set(self._group) - lost))
                    self.votes[peer] = Vote(
                        voter=peer,
                        digest=None,
                        missed=tuple(each for each in others if each != peer),
                    )
            self._lines.network.timeline.after(deadlines.silence_s, self._tell)
            return
        if self._late:
            self.votes = {peer: Vote(voter=peer, digest=None) for peer in self._group}
            self._lines.network.timeline.after(self._lines.network.rtt_s, self._tell)
            return
        record = self._make_record(lost)
        here = self._group.keys() - lost
        self.votes = {peer: Vote(voter=peer, digest=record.digest) for peer in sorted(here)}
        heard = [self._heard(peer, peer) for peer in self.votes]
        certificate = frozenset(vote.voter for vote in heard if vote.digest == record.digest)
        self.record = replace(record, certificate=certificate)
        self._lines.network.timeline.after(self._lines.network.rtt_s, self._tell)

    def _make_record(self, lost: Collection[str]) -> SimulatedRecord:
        orders, network = self._orders, self._lines.network
        order = next(iter(orders.values()))
        here = [peer for peer in orders if peer not in lost]
        timely = [peer for peer in here if network.random.random() >= self._lines.late]
        timely = {peer: orders[peer] for peer in timely or here}
        stated = {peer: each.tokens for peer, each in timely.items()}
        most = most_tokens(stated, _voters(timely), order.tokens_cap)
        members = [
            Contribution(peer=peer, tokens=min(each.tokens, most[peer]), **each.times)
            for peer, each in timely.items()
        ]
        last: Any = order.last
        window = () if last is None else last.window
        rounds = self._meetings.manifest.rounds
        current = rounds.inner_steps if last is None else last.next_inner_steps
        times = [each for each in members if each.peer in self._voters]
        facts = facts_of(ranks=(), needed=(), times=times)
        window = following_window(window, facts)
        steps = next_inner_steps(
            current, window, low=rounds.min_inner_steps, high=rounds.max_inner_steps
        )
        return SimulatedRecord(
            stage=order.plan.stage,
            round=order.plan.round,
            previous=order.plan.previous,
            members=tuple(members),
            chain_tokens=(0 if last is None else last.chain_tokens)
            + sum(each.tokens for each in members),
            standings=following_standings(
                () if last is None else last.standings,
                order.plan.round,
                {each.peer: 1.0 for each in members},
                self._excluded,
            ),
            window=window,
            next_inner_steps=steps,
        )

    def _tell(self) -> None:
        """Every member decides by the votes that reached it."""
        network = self._lines.network
        for peer, each in self._group.items():
            each.known[self._orders[peer].plan.round, self._orders[peer].plan.attempt] = self
            if not each.answers:  # once it goes on, it finds that all is over, and asks
                each.once_awake(lambda each=each, peer=peer: each.resolve(self.settle(peer)))
                continue
            heard = [
                self._heard(peer, voter)
                for voter in self.votes
                if voter == peer
                or (
                    network.connected(peer, voter)
                    and network.random.random() >= self._lines.vote_loss
                )
            ]
            each.resolve(self.result(peer, heard))

    def _heard(self, peer: str, voter: str) -> Vote:
        return self._group[voter].conduct.votes(peer, self.votes[voter])

    def settle(self, peer: str) -> AttemptResult:
        """What a member finds that asks all others how they voted."""
        network = self._lines.network
        heard = [
            self._heard(peer, voter)
            for voter in self.votes
            if voter == peer or (network.connected(peer, voter) and self._group[voter].answers)
        ]
        return self.result(peer, heard)

    def _blamed(self, peer: str, heard: Collection[Vote]) -> tuple[str, ...]:
        counting = [vote for vote in heard if vote.voter in self._voters]
        silent = set(self._group) - {vote.voter for vote in heard}
        found = exclusion(counting, silent, self._voters)
        return tuple(each for each in found if each != peer)

    def result(self, peer: str, heard: Collection[Vote]) -> AttemptResult:
        """The verdict as these votes show it; a record that is committed is logged."""
        decision = decide(self._voters, heard)
        logged = self.record is not None and decision.digest == self.record.digest
        if self.record is not None and logged:
            self._group[peer].log.append(self.record)
        own = self.votes.get(peer)
        missed = set(own.missed if own else ())
        if decision.verdict is Verdict.UNDECIDED:
            missed |= self._voters - {vote.voter for vote in heard}
        abort = b"" if own is None or own.digest is not None else _packed(own)
        return AttemptResult(
            verdict=decision.verdict,
            record=None,
            certificate=None,
            logged=logged,
            abort=abort,
            blamed=self._blamed(peer, heard) if decision.verdict is Verdict.VOID else (),
            missed=() if decision.verdict is Verdict.COMMITTED else tuple(sorted(missed - {peer})),
            members=tuple(self._group),
            seconds=self._lines.network.timeline.now - self._began - self._codec_s,
            codec_s=self._codec_s,
            limit_s=self._limit_s,
        )


class SimulatedAverager:
    """One peer's averaging process, as the driver and the chain follower call it."""

    pid = 0

    def __init__(
        self,
        peer: str,
        meetings: Meetings,
        log: SimulatedLog,
        clock: Callable[[], ThreadClock],
        peers: Callable[[str], Donor | None],
        conduct: Honest,
    ):
        """peers: the process of another peer, None if it is gone."""
        self.peer_id = peer
        self.log = log
        self.conduct = conduct
        self.order: Any = None
        self.encoded_at = 0.0
        self.let_in = self.gives_up = False  # let in: to a group, or by one that never begins it
        self._come: Callable[[], None] = lambda: None
        self.answers = True  # neither killed nor frozen
        self.has_state = True
        self.gone = False  # killed
        self.stumbles = 0  # how often it was frozen
        self.known: dict[tuple[int, int], _Exchange] = {}
        self.woken: Callable[[], None] = lambda: None
        self._meetings = meetings
        self._clock = clock
        self._peers = peers
        self._future: SimulatedFuture | None = None

    # ---- the driver's ----------------------------------------------------------------------------
    def exchange(self, order: ExchangeOrder) -> SimulatedFuture:
        """Look for the group of this attempt, and exchange."""
        network, codec_s = self._meetings.lines.network, self._meetings.lines.codec_s
        self.order = order = self.conduct.states(replace(order, codec_s=MARGIN * codec_s))
        future = self._future = self._new_future()
        self.let_in = self.gives_up = False
        starts_at = self._clock().monotonic()
        if order.alone:
            network.timeline.at(starts_at, lambda: self._meetings.start({self.peer_id: self}))
            return future
        arrives_at = starts_at + network.takes(JOIN_TRIPS)

        def come() -> None:
            if self._future is future:
                self._meetings.come(self, order)

        self._come = come
        network.timeline.at(arrives_at, lambda: self.once_awake(come))
        return future

    def give_up_group(self) -> None:
        """Look no further for the group, unless it stands or another peer gathers it."""
        future, self.gives_up = self._future, True
        if future is not None and self._meetings.leave(self, self.order):
            self._future = None
            future.set(error=MatchmakingException("given up"))

    def let_go(self) -> None:
        """The peer that gathered its group gave that up."""
        self.once_awake(self.give_up_group if self.gives_up else self._come)

    def encode(self, plan: Plan, last: Any) -> SimulatedFuture:
        """Compute what does not need the group."""
        codec_s, future = self._meetings.lines.codec_s, self._new_future()
        self.encoded_at = self._clock().monotonic() + codec_s
        self._later(codec_s, lambda: future.set(codec_s))
        return future

    @property
    def clock_error_s(self) -> float:
        """How far its run time is ahead."""
        return self._clock().time() - self._clock().monotonic()

    def once_awake(self, action: Callable[[], None]) -> None:
        """Do this now, or when it is not frozen any more; never if it is gone."""
        if self.answers:
            action()
        elif not self.gone:
            self._meetings.lines.network.timeline.after(1.0, lambda: self.once_awake(action))

    def fail(self, reason: str, after_s: float = 0.0) -> None:
        """No group."""
        future = self._future
        if future is not None:
            failed = TooFew(reason) if "too few" in reason else GroupRefused(reason)
            self._later(after_s, lambda: self.once_awake(lambda: future.set(error=failed)))

    def resolve(self, result: AttemptResult) -> None:
        """How the attempt ended."""
        if self._future is not None:
            self._future.set(result)

    def settle(self, round_number: int, attempt: int) -> SimulatedFuture:
        """Ask the others of an attempt again."""
        future, known = self._new_future(), self.known.get((round_number, attempt))
        rtt_s = self._meetings.lines.network.rtt_s
        self._later(2 * rtt_s, lambda: future.set(known and known.settle(self.peer_id)))
        return future

    # ---- the chain follower's --------------------------------------------------------------------
    def apply(self, round_number: int, *, with_own: bool) -> SimulatedFuture:
        """The outer step of a record."""
        record = self.log.header(round_number)
        if record is None:
            raise ValueError(f"no record of round {round_number}")
        done = Applied(
            digest=record.digest, anchor_sha256=record.digest, payload_bytes=RECORD_BYTES
        )
        future = self._new_future()
        self._later(self._meetings.lines.outer_step_s, lambda: future.set(done))
        return future

    def catch_up(
        self, peers: Sequence[str], digest: str, *, limit_bytes: int | None, back_to: int | None
    ) -> SimulatedFuture:
        """Take the records that another peer has and this one lacks."""
        future, peer = self._new_future(), peers[0]
        lines = self._meetings.lines

        def arrive() -> None:
            donor = self._donor(peer)
            if donor is None:
                future.set(error=ConnectionError(f"{peer} does not answer"))
                return
            theirs = donor.log.up_to(digest)
            if theirs is None:
                future.set(error=ConnectionError(f"{peer} has not the record that is claimed"))
                return
            shared = self.log.after_common(theirs)
            if shared < len(self.log.chain):
                future.set(
                    Reached(
                        fork_round=self.log.chain[shared - 1][1].round if shared else -1,
                        fork_digest=theirs.chain[shared][0]
                        if shared < len(theirs.chain)
                        else digest,
                        chain_tokens=theirs.head().chain_tokens,
                        too_far=False,
                    )
                )
                return
            for _, record in theirs.chain[shared:]:
                if not record.sound:
                    future.set(error=RecordRefused(f"{peer} gave a record that nobody certified"))
                    return
                self.log.append(record)
            future.set(Reached(fork_round=None, too_far=False))

        seconds = 6 * lines.network.rtt_s + RECORD_BYTES / lines.bytes_per_s
        self._later(seconds, arrive)
        return future

    def fetch_state(self, peers: Sequence[str], wanted: WantedState) -> SimulatedFuture:
        """Download another peer's state: its chain, as far as somebody vouches for it."""
        future, peer, end = self._new_future(), peers[0], wanted.end

        def arrive() -> None:
            donor = self._donor(peer)
            if donor is None or not donor.log.chain:
                future.set(error=ConnectionError(f"{peer} has no state"))
                return
            theirs = None if end is None else donor.log.up_to(end.digest)
            if theirs is None or not theirs.chain:
                future.set(error=NoState(f"{peer} has no state that anybody vouches for"))
                return
            if not theirs.chain[-1][1].sound:
                future.set(error=RecordRefused(f"{peer} gave a state of what nobody certified"))
            elif donor.has_state:
                future.set(theirs.chain)
            elif wanted.or_initial and end is not None and peer == end.teller:
                future.set([])
            else:
                future.set(error=NoState(f"{peer} has no state yet"))

        self._later(10 * self._meetings.lines.network.rtt_s + 5.0, arrive)
        return future

    def take_state(self, chain: list[tuple[str, SimulatedRecord]]) -> SimulatedFuture:
        """Go on from a state that was downloaded."""
        future = self._new_future()

        def take() -> None:
            self.log.chain = chain
            head = self.log.head()
            state = TakenState(
                round=head.round,
                digest=head.digest,
                anchor_sha256=head.digest,
                chain_tokens=head.chain_tokens,
            )
            future.set(state)

        self._later(0.1, take)
        return future

    # ---- the coordinator's -----------------------------------------------------------------------
    def is_alive(self) -> bool:
        """A process that dies takes its peer with it."""
        return True

    def redial(self, targets: Any) -> None:
        """All ways are open."""

    def check_reach(self, again: bool) -> SimulatedFuture:
        """Others reach this peer."""
        future = SimulatedFuture()
        future.set(Reachability(kind="public", by_others=True))
        return future

    # ---- pieces ----------------------------------------------------------------------------------
    def _donor(self, peer: str) -> Donor | None:
        donor = self._peers(peer)
        if donor is None or not donor.answers:
            return None
        return donor if self._meetings.lines.network.connected(peer, self.peer_id) else None

    def _new_future(self) -> SimulatedFuture:
        future = SimulatedFuture()
        future.watch(self.woken)
        return future

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._meetings.lines.network.timeline.at(self._clock().monotonic() + seconds, action)


def _packed(abort: Vote) -> bytes:
    return json.dumps([abort.voter, list(abort.missed)]).encode()


def _voters(orders: Mapping[str, ExchangeOrder]) -> frozenset[str]:
    """Those of a group, of whom each brings its order, whose votes count."""
    order = next(iter(orders.values()))
    before = () if order.last is None else order.last.standings
    return voters(credits(orders, before, order.plan.round))


def _excluded(stated: Iterable[bytes], members: Iterable[str], voting: Collection[str]) -> set[str]:
    """Whom the aborts of the first attempt blame, as the members of the second one state them."""
    votes: dict[str, Vote] = {}
    for data in stated:
        if data:
            voter, missed = json.loads(data)
            if voter in voting:
                votes[voter] = Vote(voter=voter, digest=None, missed=tuple(missed))
    return set(exclusion(votes.values(), set(members) - votes.keys(), voting))
