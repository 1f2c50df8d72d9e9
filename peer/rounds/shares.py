"""What one member holds of an attempt: the sums it makes over its row and over all rows, the means.

This decides what to take from which member; exchange.py, when to wait and which to ask. Shares of
a later phase are taken at any time: a member that is ahead must not wait for those behind. Sums,
codecs and records are computed in the pool, everything else happens in the event loop.

The arithmetic comes first: parts in, a row's mean out (`Reduction`; robust.py says how far each is
believed); row means in, one mean out; means in, one record out. It runs in the averaging process's
one pool thread, so that what is in a mean is what is named in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec, NotEncodable, PayloadRefused
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.group import AttemptSetup, Mean, ShareRefused
from dilocox.peer.rounds.record import ReducedShare
from dilocox.peer.rounds.robust import (
    JUDGED,
    LEAST_GATED,
    Likeness,
    OrderedSum,
    belief,
    likeness,
    median_of,
    not_of_ours,
    products_of,
    row_factors,
    weighted_sum,
)
from dilocox.peer.rounds.signed_means import MeanSeal, unlike_words, words_of
from dilocox.peer.rounds.standing import bounded_weights, following_standings


@dataclass(frozen=True)
class RowMean:
    """The average of some members' values, fp32 [n], and their ids, sorted."""

    contributors: tuple[str, ...]
    values: Tensor = field(repr=False)


class Reduction:
    """Values that one member averages over its row: what came so far, encoded, and its senders.

    `add` and `finish` run in the pool; the sets of members, and whether it is `closed`, belong to
    the event loop.
    """

    def __init__(
        self,
        codec: GroupCodec,
        weight: Mapping[str, int],
        numel: int,
        rule: RobustRule,
        voters: Collection[str] = (),
        tokens: Mapping[str, int] | None = None,
    ):
        """weight: what each member of the row counts. codec: in which the values come. rule: how
        far they are believed, by what the voters send; without any, by what all do. tokens: that
        each states; its weight if left out, as where nobody is on probation.
        """
        self._codec = codec
        self._weight = weight
        self._tokens = weight if tokens is None else tokens
        self._numel = numel
        self._rule: RobustRule = rule
        self._voters = voters
        self._payloads: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}
        self.here: set[str] = set()  # members whose part is here and sound
        self.offered: set[str] = set()  # members whose part came, sound or not
        self.refused: set[str] = set()  # members whose part was malformed
        self.closed = False

    def add(self, peer: str, payload: bytes) -> None:
        """Take a member's encoded part; PayloadRefused, and nothing taken, if it is malformed."""
        part, squares = _payload(payload, self._numel), OrderedSum()

        def measure(place: slice, values: Tensor) -> None:
            squares.add(place, values.double().square().sum())

        self._codec.decode_pieces(part, self._numel, measure)
        self._norms[peer] = math.sqrt(float(squares.total))
        self._payloads[peer] = part
        self.here.add(peer)

    def finish(self) -> RowMean | None:
        """The mean of all that was added, as far as it is believed; None if nothing is."""
        names, payloads = sorted(self._payloads), self._payloads
        self.give_up()
        if not names:
            return None
        votes = [name in self._voters for name in names]
        if self._voters and not any(votes):  # nobody to judge them by
            return None
        parts = [payloads[name] for name in names]
        mean = torch.empty(self._numel)  # and the judges' median before it

        def products(judges: list[int]) -> Tensor:
            found = OrderedSum()

            def measure(place: slice, values: Tensor) -> None:
                mean[place] = median_of(values[judges])
                found.add(place, products_of(values, mean[place]))

            self._codec.decode_together(parts, self._numel, measure)
            return found.total

        stated = self._weight, self._tokens, self._norms
        weights, tokens, norms = ([of[name] for name in names] for of in stated)
        how = belief(self._rule, weights, tokens, norms, votes, products)

        def average(place: slice, values: Tensor) -> None:
            mean[place] = weighted_sum(values, mean[place], how)

        self._codec.decode_together(parts, self._numel, average)
        return RowMean(tuple(names[place] for place in how.believed), mean)

    def give_up(self) -> None:
        """Free the parts: an attempt is kept for a while after its end."""
        self._payloads = {}


def combine(
    part: int,
    rows: Sequence[RowMean],
    codec: GroupCodec,
    weight: Mapping[str, int],
    *,
    rule: RobustRule = "none",
    own: int | None = None,
) -> Mean | None:
    """The mean of a share over all rows, encoded once; None where no row has any, or
    none that can be encoded.

    rows: at most one of each row, in the order of the rows; `own` is the place of one's own.
    weight: what each member counts. rule: how far the rows are believed.
    """
    if not rows:
        return None
    by = row_factors(rule, [math.sqrt(float(row.values @ row.values)) for row in rows], own)
    tokens = [sum(weight[peer] for peer in row.contributors) for row in rows]
    total = torch.zeros_like(rows[0].values)
    for row, count, each in zip(rows, tokens, by, strict=True):
        total.add_(row.values, alpha=count / sum(tokens) * each)
    contributors = tuple(sorted(peer for row in rows for peer in row.contributors))
    try:
        payload = encode(codec, total)
    except NotEncodable:  # of the only row that came, which is another's
        return None
    return Mean(part=part, contributors=contributors, payload=payload)


def assemble_record(setup: AttemptSetup, means: Mapping[int, Mean]) -> bytes:
    """The record's canonical bytes, from the mean of every share that holds values."""
    names = tuple(member.peer for member in setup.members)
    empty = Mean(part=-1, contributors=names, payload=b"")
    record = replace(
        setup.template,
        members=setup.members,
        parts=tuple(
            ReducedShare(**vars(share), contributors=means.get(index, empty).contributors)
            for index, share in enumerate(setup.shares)
        ),
        means=tuple(means.get(index, empty).payload for index in range(len(setup.shares))),
    )
    counted = replace(
        record,
        chain_tokens=record.chain_tokens + record.tokens,
        standings=following_standings(
            record.standings, record.round, record.heard(), setup.excluded
        ),
    )
    return setup.plan.finished(counted).to_bytes()


def encode(codec: GroupCodec, values: Tensor) -> bytes:
    """The payload of these values [n] fp32."""
    return codec.encode(values).numpy().tobytes()


def decode(codec: GroupCodec, payload: bytes, numel: int) -> Tensor:
    """The values of a payload, a new vector [numel]; PayloadRefused if it is malformed."""
    return codec.decode(_payload(payload, numel), numel)


def _payload(payload: bytes, numel: int) -> Tensor:
    if not payload:  # which torch takes for no buffer
        raise PayloadRefused("length", f"no bytes for {numel} values")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@dataclass
class _Rows:
    """A share that this member averages over all rows."""

    means: dict[int, RowMean | None] = field(default_factory=dict[int, RowMean | None])
    offered: set[int] = field(default_factory=set[int])  # rows whose mean came, sound or not
    refused: set[int] = field(default_factory=set[int])  # rows whose mean was malformed
    closed: bool = False


class Shares:
    """The parts and means of one attempt as they come in."""

    def __init__(self, setup: AttemptSetup, compute: Callable[..., Awaitable[Any]], seal: MeanSeal):
        """compute: calls a function with its arguments in the pool."""
        self._setup = setup
        self._compute = compute
        self._seal = seal
        tokens = {each.peer: each.tokens for each in setup.members}
        self._weight = bounded_weights(tokens, setup.credited)
        row = {peer: self._weight[peer] for peer in setup.grid.row(setup.me)}
        self.columns = {  # those that this member averages over its row
            column: Reduction(codec, row, numel, setup.robust, setup.voters, tokens)
            for column in setup.columns
            if setup.collector(column) == setup.me
            if (numel := setup.span(column).stop - setup.span(column).start)
            if (codec := setup.phases[setup.phase_of(column)].codec)
        }
        self._rows = {
            part: _Rows()
            for part, share in enumerate(setup.shares)
            if share.reducer == setup.me and share.numel
        }
        self._decoded: dict[int, Tensor] = {}  # means that a later phase builds on
        self._in_check = Counter[int]()  # calls that decode a mean of this share
        self.means: dict[int, Mean] = {}
        self.lied: dict[int, str] = {}  # the sender of a share's malformed mean
        self.two_faced: set[str] = set()  # reducers that signed two means of one share
        self.own: dict[int, Tensor] = {}  # this member's vector of each phase, once it is known
        self.taken: set[int] = set()  # columns whose reducer took our part
        self._judges = setup.robust in JUDGED and len(setup.members) >= LEAST_GATED
        self._alike: dict[int, Likeness] = {}  # means of others beside our own values

    # ---- what it is ours to average over our row -------------------------------------------------
    async def add_part(self, peer: str, column: int, payload: bytes) -> None:
        """Take a member's part for the mean of its row.

        Raises:
            ShareRefused: not our column, a stranger, a second part, or one that comes too late.
            PayloadRefused: malformed; the member is left out of this part.
        """
        duty = self.check_sender(peer, column)
        duty.offered.add(peer)
        try:
            await self._compute(duty.add, peer, payload)
        except PayloadRefused:
            duty.refused.add(peer)
            raise

    def check_sender(self, peer: str, column: int) -> Reduction:
        """What would take a member's part; ShareRefused as `add_part` would."""
        duty = self.columns.get(column)
        if peer not in self._setup.grid.row(self._setup.me) or duty is None:
            raise ShareRefused(f"part {column} is not ours to average for {peer}")
        if peer in duty.offered or duty.closed:
            raise ShareRefused(f"the part of {peer} is not waited for any more")
        return duty

    def awaited(self, column: int) -> set[str]:
        """The members of our row whose part is neither here nor given up."""
        duty = self.columns[column]
        return set(self._setup.grid.row(self._setup.me)) - duty.here - duty.refused

    async def reduce(self, column: int) -> RowMean | None:
        """Our row's mean; None if nothing came. Nothing is taken after that."""
        duty = self.columns[column]
        duty.closed = True
        mean = await self._compute(duty.finish)
        own = self._setup.grid.row_of[self._setup.me]
        for part in self._setup.shares_of(column):
            if part in self._rows:
                piece = mean and RowMean(mean.contributors, mean.values[self._piece(part)])
                self._rows[part].means[own] = piece
        return mean

    async def row_mean(self, part: int, mean: RowMean | None) -> Mean:
        """Our row's mean of a share as another row gets it."""
        if mean is None:
            return Mean(part=part, contributors=(), payload=b"")
        codec = self._setup.phases[self._setup.shares[part].phase].row_codec
        values = mean.values[self._piece(part)]
        payload = await self._compute(encode, codec, values)
        return Mean(part=part, contributors=mean.contributors, payload=payload)

    def _piece(self, part: int) -> slice:
        """Where the values of a share lie in its column's part."""
        share = self._setup.shares[part]
        first = self._setup.span(self._setup.column_of(part)).start
        return slice(share.start - first, share.stop - first)

    # ---- what it is ours to average over all rows ------------------------------------------------
    async def add_row(self, peer: str, mean: Mean) -> None:
        """Take another row's mean of a share that is ours to average over all rows.

        Raises:
            ShareRefused: not our share, not from the one that averages it there, a second one, one
                that comes too late, or contributors that are not of that row.
            PayloadRefused: malformed; that row is left out of this share.
        """
        duty = self.check_row(peer, mean.part)
        row, members = self._setup.grid.row_of[peer], self._setup.grid.row(peer)
        duty.offered.add(row)
        try:
            if not _are_of(members, mean.contributors):
                raise ShareRefused("a row's mean names strangers, or somebody twice")
            if not mean.contributors:
                duty.means[row] = None
                return
            share = self._setup.shares[mean.part]
            codec = self._setup.phases[share.phase].row_codec
            values = await self._compute(decode, codec, mean.payload, share.numel)
        except (PayloadRefused, ShareRefused):
            duty.refused.add(row)
            raise
        if not duty.closed:
            duty.means[row] = RowMean(mean.contributors, values)

    def check_row(self, peer: str, part: int) -> _Rows:
        """What a row's mean would be added to; ShareRefused as `add_row` would."""
        duty, row = self._rows.get(part), self._setup.grid.row_of.get(peer)
        if duty is None or row is None:
            raise ShareRefused(f"part {part} is not ours to average for {peer}")
        averaging = self._setup.reducer_in(self._setup.column_of(part), row)
        if peer == self._setup.me or averaging != peer:
            raise ShareRefused(f"part {part} is not averaged by {peer} in its row")
        if row in duty.offered or duty.closed:
            raise ShareRefused(f"the row of {peer} is not waited for any more")
        return duty

    def awaited_rows(self, part: int) -> set[str]:
        """The reducers of other rows whose mean of our share is neither here nor given up."""
        duty, column = self._rows[part], self._setup.column_of(part)
        rows = set(range(len(self._setup.grid.rows))) - duty.means.keys() - duty.refused
        return {self._setup.reducer_in(column, row) for row in rows}

    async def combine(self, part: int) -> Mean | None:
        """The mean of our share over all rows that came; None if nothing did."""
        duty = self._rows[part]
        duty.closed = True
        rows = {row: mean for row, mean in sorted(duty.means.items()) if mean is not None}
        duty.means = {}
        codec = self._setup.phases[self._setup.shares[part].phase].codec
        own = self._setup.grid.row_of[self._setup.me]
        place = [*rows].index(own) if own in rows else None
        combining = partial(combine, rule=self._setup.robust, own=place)
        mean = await self._compute(combining, part, [*rows.values()], codec, self._weight)
        if mean is not None:
            mean = await self._compute(self._seal.sign, mean)
            await self._keep(mean, checked=True)
        return mean

    def give_up(self) -> None:
        """Take nothing more and free all sums: the attempt is over, and kept for its means."""
        for column in self.columns.values():
            column.closed = True
            column.give_up()
        for rows in self._rows.values():
            rows.closed = True
            rows.means = {}
        self._decoded, self.own = {}, {}

    # ---- the means -------------------------------------------------------------------------------
    async def add_mean(self, mean: Mean) -> bool:
        """Take an averaged share, whichever member brings it; False if it was here already.

        Raises:
            ShareRefused: no share of this attempt, contributors that cannot be, or another one than
                its reducer signed.
            PayloadRefused: malformed.
        """
        if not self.known(mean.part) or not self._setup.shares[mean.part].numel:
            raise ShareRefused(f"part {mean.part} has no mean")
        names = mean.contributors
        if not names or not _are_of(self._weight.keys(), names):
            raise ShareRefused("an averaged part names nobody, strangers, or somebody twice")
        await self._compute(self._seal.check, mean, self._setup.shares[mean.part].reducer)
        return await self._keep(mean)

    async def _keep(self, mean: Mean, *, checked: bool = False) -> bool:
        """Keep the first mean of a share, decoded too where a later phase needs it."""
        share = self._setup.shares[mean.part]
        needed = share.phase + 1 < len(self._setup.phases)
        if mean.part not in self.means and (needed or not checked):
            codec = self._setup.phases[share.phase].codec
            self._in_check[mean.part] += 1
            try:
                values = await self._compute(decode, codec, mean.payload, share.numel)
                if not checked:
                    await self._compare(mean, values)
            finally:
                self._in_check[mean.part] -= 1
            if needed and mean.part not in self.means:
                self._decoded[mean.part] = values
        return self.means.setdefault(mean.part, mean) is mean

    async def _compare(self, mean: Mean, values: Tensor) -> None:
        """Note how a mean lies beside our own values, if there are any yet."""
        share, me = self._setup.shares[mean.part], self._setup.me
        own = self.own.get(share.phase)
        if own is None or not self._judges:
            return
        total = sum(self._weight[peer] for peer in mean.contributors)
        weight = self._weight[me] / total if me in mean.contributors else 0.0
        beside = values, own[share.start : share.stop], weight, len(mean.contributors)
        if (found := await self._compute(likeness, *beside)) is not None:
            self._alike.setdefault(mean.part, found)

    def coming(self, part: int) -> bool:
        """Whether a mean of this share came and is not here only because it is being checked."""
        return part not in self.means and self._in_check[part] > 0

    def known(self, part: int) -> bool:
        return 0 <= part < len(self._setup.shares)

    def words(self) -> bytes:
        """What this member tells others of the means that it holds; runs in the pool."""
        return words_of(self.means, len(self._setup.shares))

    async def compare_words(
        self, words: bytes, theirs: bytes, fetch: Callable[[int], Awaitable[Mean | None]]
    ) -> None:
        """Look for reducers that gave a member another mean than us; `fetch` asks it for that.

        A member that told a word without such a mean is asked for nothing more.
        """
        for part in unlike_words(words, theirs):
            ours, reducer = self.means.get(part), self._setup.shares[part].reducer
            if ours is None or reducer in self.two_faced:
                continue
            other = await fetch(part)
            if other is None or replace(other, signature=ours.signature) == ours:
                return
            try:
                await self._compute(self._seal.check, other, reducer)
            except ShareRefused:
                return
            self.two_faced.add(reducer)

    def missing(self, phase: int) -> set[int]:
        return {
            part
            for part, share in enumerate(self._setup.shares)
            if share.phase == phase and share.numel and part not in self.means
        }

    def vector(self, phase: int) -> Tensor:
        """The decoded mean of a phase whose means are all here; may be called once."""
        parts = [part for part, share in enumerate(self._setup.shares) if share.phase == phase]
        found = [self._decoded.pop(part) for part in parts if self._setup.shares[part].numel]
        return torch.cat(found) if found else torch.empty(0)

    # ---- the members to blame --------------------------------------------------------------------
    def refused(self) -> set[str]:
        senders = {peer for duty in self.columns.values() for peer in duty.refused}
        for part, duty in self._rows.items():
            column = self._setup.column_of(part)
            senders |= {self._setup.reducer_in(column, row) for row in duty.refused}
        return senders | set(self.lied.values()) | self.two_faced

    def unlike(self) -> set[str]:
        """The reducers whose means cannot be what they say, as far as our own values show."""
        shares, voters, blamed = self._setup.shares, self._setup.voters, set[str]()
        for phase in range(len(self._setup.phases)):
            there = {
                part: each for part, each in self._alike.items() if shares[part].phase == phase
            }
            blamed |= {shares[part].reducer for part in not_of_ours(there)}
        if self._judges and len(self._setup.grid.rows) == 1:
            # a reducer that took our part has those of others, too
            most = {
                part
                for part, mean in self.means.items()
                if 2 * len(voters & set(mean.contributors)) >= len(voters)
            }
            few = {
                part
                for part in self.means.keys() - most
                if self._setup.column_of(part) in self.taken
            }
            blamed |= {shares[part].reducer for part in few}
        return blamed

    def silent(self) -> set[str]:
        """The reducers whose mean is missing in the first phase that lacks one.

        Nobody can be blamed for a later phase: its means are made of what is missing.
        """
        for phase in range(len(self._setup.phases)):
            if missing := self.missing(phase):
                return {self._setup.shares[part].reducer for part in missing}
        return set()


def _are_of(members: Collection[str], names: Sequence[str]) -> bool:
    return list(names) == sorted(set(names) & set(members))
