"""Which peers may exchange with each other: the plan that keys a group, and what each member states
when it joins.

The plan (run, rules of the manifest, stage, round, attempt, ranks, layout, digest of the last
record) keys the group in the DHT, so that peers that disagree never meet, and is compared once more
in the gathered tickets before a byte flows. Weights and modes come from the tickets alone: they are
the same for every member.

`AttemptSetup` is the group as an attempt knows it: its members and what they agreed on.
How they are reached is group_calls.py; the attempt itself is exchange.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from statistics import median_high
from typing import Annotated

from pydantic import Field, StrictBytes, StrictInt, TypeAdapter

from dilocox.compression.stage_codec import Phase, StageCodec
from dilocox.dht.identity import Identity, public_key_of, verify
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import DeadlineSpec, RobustRule
from dilocox.dht.streams import LEADER_BYTES
from dilocox.dht.wire import Malformed, Many, checked, pack, unpack
from dilocox.peer.rounds.ballots import excluded_by
from dilocox.peer.rounds.grid import Grid, Share
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import (
    Contribution,
    RoundRecord,
    SendFacts,
    bitmap_of,
    chosen_in,
    largest_group,
    part_bytes,
)
from dilocox.peer.rounds.standing import credits, most_tokens, sitting_out, voters
from dilocox.peer.rounds.vote_count import MAX_MEMBERS, Verdict, counted_by, may_start

MORE_MEMBERS = 2  # without a vote than voters that can be reached, which average for all
PHASE_SHARE = 0.25  # of the exchange's time that a phase has whatever its bytes


class ShareRefused(ValueError):
    """A part or a mean that does not belong where it was sent."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The encoded mean of one share, and the members whose values are in it.

    Of a row's mean on its way to the other rows both are empty where nobody's values came, and
    nothing is signed: it comes from its maker.
    """

    part: int  # the index of its share in the attempt's setup, and of its part in the record
    contributors: tuple[str, ...]
    payload: bytes = field(repr=False)
    signature: bytes = field(default=b"", repr=False)  # of its reducer, see signed_means.py


@dataclass(frozen=True, kw_only=True)
class AttemptSetup:
    """What all members of a group agree on, and which of them this one is.

    A *column* is numbered over all phases: those of phase 0 first. It has one share a row, and in
    each row one member that averages its values there and brings its means.
    """

    me: str
    members: tuple[Contribution, ...]  # sorted by peer
    credited: Mapping[str, int]  # by member: in how many records it was
    clients: frozenset[str]  # those of them that can only dial out
    grid: Grid
    template: RoundRecord  # without members, parts and means; its standings are the last record's
    shares: tuple[Share, ...]  # as `Grid.shares` orders them
    phases: tuple[Phase, ...]
    excluded: tuple[str, ...]  # the peers that this attempt, a repeated one, leaves out
    lacking: frozenset[str]  # voters of late that are there and did not come
    plan: RoundPlan
    robust: RobustRule
    deadlines: DeadlineSpec  # exchange_s: to move what these ranks move, in all phases together
    codec_s: float = 0.0  # beside that, at the start of each phase

    @cached_property
    def voters(self) -> frozenset[str]:
        """The members that judge the others, and whose votes count."""
        return voters(self.credited)

    @property
    def columns(self) -> range:
        return range(len(self.shares) // len(self.grid.rows))

    def shares_of(self, column: int) -> range:
        rows = len(self.grid.rows)
        return range(column * rows, (column + 1) * rows)

    def column_of(self, share: int) -> int:
        return share // len(self.grid.rows)

    def span(self, column: int) -> slice:
        """Where the values of a column lie in its phase's vector."""
        shares = self.shares_of(column)
        return slice(self.shares[shares[0]].start, self.shares[shares[-1]].stop)

    def phase_of(self, column: int) -> int:
        return self.shares[self.shares_of(column)[0]].phase

    def reducer_in(self, column: int, row: int) -> str:
        """The member of a row that averages a column there."""
        return self.shares[self.shares_of(column)[row]].reducer

    def collector(self, column: int) -> str:
        """The member of one's own row that averages a column there, and brings its means."""
        return self.reducer_in(column, self.grid.row_of[self.me])

    def sender(self, share: int) -> str:
        """The member that brings a share's mean: the one that encoded it, or one of one's row."""
        collector = self.collector(self.column_of(share))
        return self.shares[share].reducer if collector == self.me else collector

    def max_bytes(self, index: int, kind: str) -> int:
        """The most bytes of a payload: `index` is a column for a part, a share for row and mean."""
        if kind == "part":
            span = self.span(index)
            return part_bytes(self.phases[self.phase_of(index)].codec, span.stop - span.start)
        share = self.shares[index]
        phase = self.phases[share.phase]
        return part_bytes(phase.row_codec if kind == "row" else phase.codec, share.numel)

    def phase_spans_s(self) -> list[tuple[float, float]]:
        """The seconds from the start at which each phase should have computed, and be over.

        Each has codec_s first, and a quarter of exchange_s for the ways; the rest goes by bytes.
        """
        sizes = [0] * len(self.phases)
        for column in self.columns:
            sizes[self.phase_of(column)] += self.max_bytes(column, "part")
        for index, share in enumerate(self.shares):
            sizes[share.phase] += self.max_bytes(index, "mean")
        rest, late_s = 1 - PHASE_SHARE * len(sizes), self.codec_s
        spans = [PHASE_SHARE + rest * size / max(1, sum(sizes)) for size in sizes]
        ends = [self.deadlines.exchange_s * end for end in (0.0, *accumulate(spans[:-1]), 1.0)]
        return [(a + n * late_s, b + n * late_s) for n, (a, b) in enumerate(pairwise(ends), 1)]


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """How an attempt ended. `record` stands where it was committed, until it is `logged`: it is as
    large as the stage's update, and this goes to another process.
    """

    verdict: Verdict
    record: bytes | None = field(repr=False)
    digest: str = ""  # of the record that was committed
    certificate: bytes | None = field(repr=False)
    logged: bool = False
    abort: bytes = field(repr=False)  # this member's own, signed, for a repeated attempt
    blamed: tuple[str, ...] = ()  # peers it would leave out, as far as this member knows
    # by this one, or not heard to vote; of a committed one, those that gave means, but none to it
    missed: tuple[str, ...] = ()
    members: tuple[str, ...]
    seconds: float  # of the exchange, without what this member's codec took meanwhile
    codec_s: float = 0.0
    limit_s: float  # that the exchange could take, the same for all members
    matchmaking_s: float | None = None  # until its group stood; None of a peer alone


MAX_COUNTED = 1024  # peers that a ticket may name
MAX_UNRELIABLE = MAX_MEMBERS  # peers that a ticket may name as unreliable
TICKET_BYTES, TICKET_BYTES_OF_PEER = 8 << 10, 128
MAX_TICKETS_BYTES = LEADER_BYTES // 2  # of a group, which its leader tells each member
UNKNOWN_TICKETS_BYTES = 64 << 10  # of these, of keys that cost nothing: hundreds of honest ones
UNKNOWN_TICKET_BYTES = 1 << 10  # and for each place that the group has; an honest one is a fifth
ABORT_BYTES = 1 << 10  # of a ticket with an abort that names some peers
ID_BYTES = 42  # of a peer, beside its ticket
MAX_TIME_S = 1e6
_Time = Annotated[float, Field(strict=True, ge=0, lt=MAX_TIME_S, allow_inf_nan=False)]
# as `Ticket.pack` has them
_TICKET = TypeAdapter(
    tuple[
        StrictBytes,
        StrictInt,
        _Time,
        _Time,
        _Time,
        _Time,
        StrictBytes,
        Annotated[Many[StrictBytes], Field(max_length=MAX_COUNTED)],
        StrictInt | None,
        StrictBytes,
        Annotated[Many[StrictBytes], Field(max_length=MAX_UNRELIABLE)],
    ]
)


TICKET_DOMAIN = "dilocox ticket"  # so that a signature of one can be taken for nothing else
_SIGNED = TypeAdapter(tuple[StrictBytes, StrictBytes])


class GroupRefused(Exception):
    """This peer may not exchange with the group that formed; nor may others, but for `LeftOut`."""


class LeftOut(GroupRefused):
    """The others go on without this peer."""


class TooFew(GroupRefused):
    """Others that must be there did not come."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an attempt is about; peers with unequal plans never meet."""

    run: str
    rules: int = 0
    stage: int
    round: int
    attempt: int
    ranks: tuple[int, ...]
    layout: str
    previous: str

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Ticket(SendFacts):
    """What a member states when it joins a group."""

    plan: str
    counted: tuple[str, ...]  # the peers that must be reckoned with, in its view
    codec_s: float = 0.0  # that it computes at the start of a phase, at most
    expected: int | None  # members with which its group is whole; None: it does not know
    abort: bytes  # its signed one of the attempt before, empty if there is none
    # peers that it missed in that of the last record, or in those since that came to nothing
    unreliable: tuple[str, ...] = ()
    client_mode: bool = False

    def pack(self, last: Collection[str]) -> list[object]:
        """As hivemind gathers it; the mode is hivemind's own field.

        Every member gets the tickets of all, so they are short: of the counted peers those among
        `last`, the voters of late, as a bitmap; of the others a hash each, and only
        where they matter to `may_start`, because none of `last` is counted.
        """
        among = sorted(set(last))
        there = set(among) & set(self.counted)
        others = [] if there else [_short(peer) for peer in self.counted]
        return [
            bytes.fromhex(self.plan),
            self.tokens,
            *self.times.values(),
            self.codec_s,
            bitmap_of(among, there),
            others,
            self.expected,
            self.abort,
            [_short(peer) for peer in self.unreliable[:MAX_UNRELIABLE]],
        ]

    @classmethod
    def unpack(cls, facts: object, last: Collection[str], *, client_mode: bool) -> Ticket:
        """Read what a member stated; GroupRefused if it is malformed, or of another record.

        Counted peers that are not among `last` are named by their hash: see `resolved`.
        """
        try:
            told = checked(facts, _TICKET)
        except Malformed as error:
            raise GroupRefused(f"a member's ticket is malformed: {error}") from error
        plan, tokens, *times, bits, hashes, expected, abort, unreliable = told
        exchange_s, step_s, stall_s, codec_s = times
        try:
            counted = chosen_in(sorted(set(last)), bits)
        except ValueError as error:
            raise GroupRefused(f"a member has another last record: {error}") from error
        return cls(
            plan=plan.hex(),
            tokens=tokens,
            exchange_s=exchange_s,
            step_s=step_s,
            stall_s=stall_s,
            codec_s=codec_s,
            counted=counted + tuple(map(_named, hashes)),
            expected=expected,
            abort=abort,
            unreliable=tuple(map(_named, unreliable)),
            client_mode=client_mode,
        )

    def signed(self, last: Collection[str], mode: int, identity: Identity) -> list[object]:
        """What hivemind gathers: `pack` and its owner's signature, since the leader passes it on.

        mode: hivemind's, as it travels beside it.
        """
        data = pack(self.pack(last))
        return [data, identity.sign(pack([TICKET_DOMAIN, mode, data]))]

    @classmethod
    def of_peer(
        cls, peer: str, sent: object, last: Collection[str], *, mode: int, client_mode: bool
    ) -> Ticket:
        """As `unpack`, of what that peer signed; GroupRefused if it did not."""
        try:
            data, signature = checked(sent, _SIGNED)
            facts = unpack(data, TICKET_BYTES + TICKET_BYTES_OF_PEER * MAX_COUNTED)
            signed = pack([TICKET_DOMAIN, mode, data])
        except Malformed as error:
            raise GroupRefused(f"a member's ticket is malformed: {error}") from error
        if not verify(public_key_of(peer), signed, signature):
            raise GroupRefused(f"{peer} did not sign what is told of it")
        return cls.unpack(facts, last, client_mode=client_mode)

    def is_of(self, plan: Plan) -> bool:
        """Whether its owner means this attempt, and has something to give."""
        return self.plan == plan.key and self.tokens > 0

    def resolved(self, group: Collection[str]) -> frozenset[str]:
        """The counted peers; of those that are named by a hash the members of a group by name."""
        names = {_named(_short(peer)): peer for peer in group}
        return frozenset(names.get(peer, peer) for peer in self.counted)


def _short(peer: str) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:8]


def _named(short: bytes) -> str:
    return f"#{short.hex()}"


@dataclass(frozen=True, kw_only=True)
class ExchangeOrder(SendFacts):
    """What the trainer's process asks of the averaging process for one attempt."""

    plan: Plan
    scheduled_at: float  # run time at which the group starts, the same for all
    codec_s: float = 0.0  # as in `Ticket`; the averaging process knows it
    matchmaking_limit_s: float
    tokens_cap: int
    counted: tuple[str, ...]
    recent_voters: tuple[str, ...]
    expected: int | None = None  # peers that should come: with them the group need not wait
    leaders: tuple[str, ...] = ()  # those that may gather the group; empty: anybody
    anchor_before: str
    last: RoundRecord | None = field(repr=False)  # the chain's newest, without its means
    alone: bool = False
    abort: bytes = field(default=b"", repr=False)  # its own, of the attempt before
    blamed: tuple[str, ...] = ()  # for that, as far as it knows: nobody waits for them
    unreliable: tuple[str, ...] = ()  # as in `Ticket`

    @property
    def whole_with(self) -> int | None:
        """How many members make the group whole, so that it does not wait for its time; None where
        that is not known. Never fewer than could start it.
        """
        if self.expected is None:
            return None
        there = set(self.recent_voters) & set(self.counted) - set(self.blamed)
        return max(2, self.expected, len(there))

    def may_lead(self, peer: str) -> bool:
        return not self.leaders or peer in self.leaders

    @property
    def known(self) -> frozenset[str]:
        """The peers that this one reckons with, or that the chain proves."""
        return frozenset(self.counted).union(self.recent_voters)

    def told_bytes(self, ticket: int) -> int:
        """About how much its group's leader tells, if all known peers come: each of them the
        tickets of all. ticket: bytes of this peer's own.
        """
        if self.plan.attempt:  # others have an abort, even if this one has none
            ticket = max(ticket, ABORT_BYTES)
        return len(self.known) ** 2 * (ticket + ID_BYTES)

    def knows(self, peer: str) -> bool:
        return peer in self.counted or peer in self.recent_voters

    def check_length(self, peer: str, ticket: bytes, asked: Mapping[str, bytes]) -> None:
        """Raise GroupRefused for a peer's ticket that is too long, by itself or beside those of
        `asked`: a leader tells each member all of them.

        A ticket names counted peers, and its abort peers of the attempt before.
        """
        peers = len(self.known)
        if len(ticket) > TICKET_BYTES + TICKET_BYTES_OF_PEER * peers:
            raise GroupRefused(f"a ticket of {len(ticket)} bytes in a swarm of {peers} peers")
        every = {**asked, peer: ticket}
        if sum(map(len, every.values())) > MAX_TICKETS_BYTES:
            raise GroupRefused("the tickets of this group are too long")
        unknown = sum(len(each) for name, each in every.items() if not self.knows(name))
        places = 2 * len(self.recent_voters) + MORE_MEMBERS
        most = min(UNKNOWN_TICKETS_BYTES, UNKNOWN_TICKET_BYTES * places)
        if self.last and unknown > most and not self.knows(peer):
            raise GroupRefused("too many ask for this group whom this peer does not know")

    def ticket(self) -> Ticket:
        return Ticket(
            plan=self.plan.key,
            tokens=min(self.tokens, self.tokens_cap),
            exchange_s=round(self.exchange_s, 3),
            step_s=round(self.step_s, 4),
            stall_s=round(self.stall_s, 4),
            codec_s=round(self.codec_s, 3),
            counted=self.counted,
            expected=self.whole_with,
            abort=self.abort,
            unreliable=self.unreliable,
        )


def attempt_times(
    deadlines: DeadlineSpec, phases: int, growth: float, stated: Collection[float]
) -> tuple[DeadlineSpec, float]:
    """The deadlines of an attempt that moves `growth` times what the run's first one does, and for
    how long its members compute at the start of a phase, of which most `stated` no more.
    """
    longest = deadlines.longest_exchange_s
    exchange_s = min(max(1.0, growth) * deadlines.exchange_s, longest / 2)
    codec_s = min(median_high(stated), (longest - exchange_s) / phases)
    return replace(deadlines, exchange_s=exchange_s), codec_s


def attempt_setup(
    order: ExchangeOrder,
    manifest: Manifest,
    codec: StageCodec,
    me: str,
    tickets: Mapping[str, Ticket],
    *,
    group: bytes,
) -> AttemptSetup:
    """The agreed facts of an attempt, from what its members stated.

    A repeated attempt leaves out the peers that the signed aborts of the first one blame;
    `taking_part` says which of the others take part. Where more come than a record holds, or than
    the voters can average for, those that were in the most records stay. `group`: the id of the
    group, from which its rows follow, and which of the new ones stay.

    Raises:
        GroupRefused: there is nobody to reduce.
        LeftOut: it is to be left out, or there is no place for it.
        TooFew: of those that must be there.
    """
    plan = order.plan
    last = order.last
    before = () if last is None else last.standings
    credited = credits(tickets, before, plan.round)
    aborts = [ticket.abort for ticket in tickets.values() if ticket.abort and plan.attempt]
    excluded = excluded_by(
        aborts,
        tickets,
        voters(credited),
        {each.peer for each in before},
        run=plan.run,
        stage=plan.stage,
        round_number=plan.round,
    )
    if me in excluded:
        raise LeftOut("the others leave this peer out of the repeated attempt")
    if me not in tickets or not tickets[me].is_of(plan):
        raise GroupRefused("what the others heard of this peer is not what it stated")
    part = taking_part(order, tickets, credited, excluded)
    tickets = part.tickets
    if me not in tickets:
        raise LeftOut(
            "this peer sits out: exchanges with it had to be repeated, or most of what it sent was "
            "left out or came too late"
        )
    voting = voters({peer: credited[peer] for peer in tickets})
    averaging = [peer for peer in voting if not tickets[peer].client_mode]
    room = min(len(voting) + len(averaging) + MORE_MEMBERS, largest_group(codec))
    if len(tickets) > room:
        tickets = dict(sorted(tickets.items(), key=partial(_place, group, credited))[:room])
    if me not in tickets:
        raise LeftOut(
            f"{len(part.tickets)} members came, this group takes {room}, first those that were in "
            "the most records; if that lasts, start new peers on another stage with --stage"
        )
    credited = {peer: credited[peer] for peer in tickets}
    voting = voters(credited)
    stated = {peer: each.tokens for peer, each in tickets.items()}
    most = most_tokens(stated, voting, order.tokens_cap)
    members = tuple(
        Contribution(peer=peer, tokens=min(each.tokens, most[peer]), **each.times)
        for peer, each in sorted(tickets.items())
    )
    clients = {peer for peer, each in tickets.items() if each.client_mode}
    if len(members) == 1:  # alone, a peer that can only dial out averages its own part
        clients = set[str]()
    reducers = tickets.keys() - clients
    reducers = reducers & voting or reducers  # any key could void the attempt, or make its means
    if not reducers:
        raise GroupRefused("no member can be reached from outside, so nobody can reduce")
    phases = codec.phases(plan.ranks)
    at_first = sum(phase.numel for phase in codec.phases(codec.first_ranks))
    growth = sum(phase.numel for phase in phases) / at_first
    codec_times = [tickets[peer].codec_s for peer in voting]
    deadlines, codec_s = attempt_times(manifest.deadlines, len(phases), growth, codec_times)
    grid = Grid.of(group, tickets.keys(), reducers, manifest.rounds.group_size, voting)
    rounds = RoundPlan(manifest, codec)
    template = RoundRecord(
        run=plan.run,
        stage=plan.stage,
        round=plan.round,
        previous=plan.previous,
        anchor_before=order.anchor_before,
        rules=plan.rules,
        layout=plan.layout,
        ranks=plan.ranks,
        chain_tokens=0 if last is None else last.chain_tokens,
        standings=before,
        window=() if last is None else last.window,
        next_inner_steps=rounds.inner_steps_after(last),
    )
    return AttemptSetup(
        me=me,
        members=members,
        credited=credited,
        clients=frozenset(clients),
        grid=grid,
        template=template,
        shares=grid.shares(phases),
        phases=phases,
        excluded=part.excluded,
        lacking=part.lacking,
        plan=rounds,
        deadlines=deadlines,
        codec_s=codec_s,
        robust=manifest.rounds.robust,
    )


def _place(
    group: bytes, credited: Mapping[str, int], one: tuple[str, Ticket]
) -> tuple[int, bool, bytes]:
    """By what the members of a group are sorted where not all have a place in it."""
    peer, ticket = one
    return -credited[peer], ticket.client_mode, hashlib.sha256(group + peer.encode()).digest()


@dataclass(frozen=True, kw_only=True)
class TakingPart:
    """Those that came and take part in an attempt: the same for all that saw their tickets.

    tickets: theirs. excluded, lacking: as in `AttemptSetup`.
    """

    tickets: dict[str, Ticket]
    excluded: tuple[str, ...]
    lacking: frozenset[str]


def taking_part(
    order: ExchangeOrder,
    tickets: Mapping[str, Ticket],
    credited: Mapping[str, int],
    excluded: Collection[str],
) -> TakingPart:
    """The peers that take part, of those that the aborts of the attempt before do not exclude.

    A peer that was left out, or unheard, again and again sits out, where the others can go on
    without it. So does one that most voters missed in the attempt of the last record or in those
    since: two that fall silent in turns would void both of every round, and no record would say so.
    A peer that states another plan, or no tokens, is left out: all have the same tickets, and one
    that makes no sense stops nobody.

    order: of any of them. credited: see `credits`. Raises TooFew of those that must be there.
    """
    plan, last = order.plan, order.recent_voters
    before = () if order.last is None else order.last.standings
    tickets = {
        peer: ticket
        for peer, ticket in tickets.items()
        if peer not in excluded and ticket.is_of(plan)
    }
    # each peer that is here counts itself: one that counts nobody stops no group
    views = {peer: ticket.resolved(tickets) | {peer} for peer, ticket in tickets.items()}
    there = counted_by(tickets, views, last) & set(last)
    lacking = frozenset(there - tickets.keys() - set(excluded))
    present = tickets.keys() - sitting_out(before, plan.round)
    told = {peer: tickets[peer].unreliable for peer in present}
    unreliable = missed_by_most(told, credited)
    if may_start(present - unreliable, views, last):
        present -= unreliable
        excluded = [*excluded, *sorted(unreliable)]
    if may_start(present, views, last):
        tickets = {peer: ticket for peer, ticket in tickets.items() if peer in present}
    elif not may_start(tickets, views, last):
        raise TooFew(f"{len(tickets)} members are too few of those that must be there")
    return TakingPart(tickets=tickets, excluded=tuple(excluded), lacking=lacking)


def missed_by_most(told: Mapping[str, Collection[str]], credited: Mapping[str, int]) -> set[str]:
    """Those of a group that more than half of its voters missed. told: by member, the peers that it
    missed, by name or hash."""
    voting = voters({peer: credited[peer] for peer in told})
    names = {name: peer for peer in told for name in (peer, _named(_short(peer)))}
    missed = Counter[str]()
    for peer in voting:
        missed.update({names[name] for name in told[peer] if name in names})
    return {peer for peer, count in missed.items() if 2 * count > len(voting)}


def tokens_cap(manifest: Manifest) -> int:
    """The largest weight a member may state: all that its unsent progress can hold."""
    rounds = manifest.rounds
    return rounds.max_age * rounds.max_inner_steps * manifest.batch.tokens_per_step
