"""Liars who have a part in the run: a member of each stage, who has been in records and in groups
goes on with them, and bootstraps. What they tell is false; the rules of all others are the
product's.

A liar can make what it is asked for: records of its own with a certificate of its own key, and any
claim or bell. It cannot sign for others, nor find another record of the same digest.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.simulation.averaging import Donor, Honest
from benchmarks.simulation.chain import SimulatedLog, SimulatedRecord
from benchmarks.simulation.strangers import ALL_TOKENS, FAR_ROUNDS
from benchmarks.simulation.witness import BOOTSTRAP, Keeping, SimulatedArchive
from dilocox.dht.clock import MOST_SLEW, OffsetSample, agreed_offset
from dilocox.dht.records import (
    MAX_INDEX,
    BellRecord,
    ClaimRecord,
    Record,
    ReplicaRecord,
    bell_key,
    claim_key,
    replica_key,
)
from dilocox.peer.chain.fork_choice import SETTLED_RECORDS
from dilocox.peer.rounds.group import ExchangeOrder, tokens_cap
from dilocox.peer.rounds.record import Contribution
from dilocox.peer.rounds.standing import following_standings
from dilocox.peer.rounds.vote_count import Vote

if TYPE_CHECKING:
    from benchmarks.simulation.averaging import SimulatedAverager
    from benchmarks.simulation.world import World

Who = Literal["member", "bootstrap", "copy", "copy alone"]
LONG_S = 1e4
MEMBER_LIES = {
    "two votes": "yes to half of the group, an abort that blames them to the others",
    "own record": "votes for, claims and gives a record of the group that it made by itself",
    "claims": "claims rounds that do not exist, and forks that it alone certified",
    "far bells": "rings this round and one far on, at once",
    "times": "bells too early, too late or in the future; steps, codec and tokens without end",
    "silence": "comes to its groups, sends nothing there, and gives nothing to who asks",
    "turns": "likewise, in the first attempts of rounds or in the second ones",
    "all": "another one with every round",
}
ARCHIVE_LIES = {
    "fork of 3": "once, instead of the last three records, one of its own",
    "fork of 4": "likewise, of the last four",
    "late fork": "claims nothing for four rounds; then as the first, from before these",
    "forks": "three records back, again and again",
    "own records": "one of its own after every record",
    "far rounds": "claims rounds that do not exist",
    "far run": "says that some stage has a record of a round that is far from its own",
    "silence": "claims and gives nothing",
    "the end": "says that the run has its tokens",
    "time": "tells every other peer a time ten minutes ahead, the rest one ten minutes behind",
}
LATE_ROUNDS = 4
TIME_LIE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Lying:
    """who: of each stage the last members, the operator's bootstrap, or its copy, with or without
    the operator's beside it. how: of MEMBER_LIES or ARCHIVE_LIES. members: that lie, of each stage.
    after: rounds; lasts: likewise.
    """

    who: Who
    how: str
    members: int = 1
    after: float = 6.0
    lasts: float = math.inf

    def of_bootstrap(self, name: str) -> str:
        """How a bootstrap lies, empty if it does not."""
        if self.who == "copy alone" and name == BOOTSTRAP:
            return "silence"
        lies = self.who == "bootstrap" if name == BOOTSTRAP else self.who.startswith("copy")
        return self.how if lies else ""


def clock_error_s(ahead: bool, lied_s: float, *, joins: bool, bootstraps: int) -> float:
    """How far run time is off for who is told a false one by one of the bootstraps, for so long
    now: who joins takes what all say, the others go there slowly (RunClock)."""
    told_s = TIME_LIE_S if ahead else -TIME_LIE_S
    told = [told_s, *[0.0] * (bootstraps - 1)]
    error_s = agreed_offset(([OffsetSample(each, 0.1)] for each in told), 0.0) or 0.0
    most_s = abs(error_s) if joins else min(abs(error_s), MOST_SLEW * max(0.0, lied_s))
    return most_s if error_s > 0 else -most_s


def forged(
    log: SimulatedLog, back: int, maker: str, tokens: int, *, named: Collection[str] = ()
) -> SimulatedLog:
    """A log with a record of the maker's own instead of the last `back` ones.

    named: as its members; nobody but the maker votes for it. Without any the maker is alone.
    """
    given = log.up_to(log.chain[-1 - back][0])
    assert given is not None, "what this log holds"
    last, newest = given.chain[-1][1], log.head().round
    members = tuple(Contribution(peer=peer, tokens=tokens) for peer in sorted(named or {maker}))
    record = SimulatedRecord(
        stage=last.stage,
        round=newest + 1 if back == 0 else newest,
        previous=given.head().digest,
        members=members,
        chain_tokens=last.chain_tokens + tokens * len(members),
        standings=following_standings(
            last.standings, newest, {each.peer: 1.0 for each in members}, ()
        ),
        window=last.window,
        next_inner_steps=last.next_inner_steps,
        certificate=frozenset({maker}),
    )
    given.append(record)
    return given


class LyingMember(Honest):
    """A member that is in records, and lies from then on."""

    def __init__(self, world: World, name: str, how: str):
        self._world = world
        self._name = name
        self._told = how
        self._draw = random.Random(f"{world.scenario.seed} {name}")
        self._forged: tuple[str, SimulatedLog] | None = None

    @property
    def _how(self) -> str:
        world = self._world
        if not (world.lies and self._log.chain):
            return ""
        kinds = [each for each in MEMBER_LIES if each != "all"]
        return kinds[int(world.lied_rounds) % len(kinds)] if self._told == "all" else self._told

    @property
    def _log(self) -> SimulatedLog:
        return self._world.peers[self._name].log

    @property
    def silent(self) -> bool:
        if self._how == "turns":
            order = self._world.peers[self._name].averager.order
            return order is not None and order.plan.attempt == int(self._name[-3:]) % 2
        return self._how == "silence"

    def votes(self, hearer: str, vote: Vote) -> Vote:
        if hearer == self._name:
            return vote
        if self._how == "two votes" and int(hearer[-3:]) % 2:
            return Vote(voter=self._name, digest=None, missed=(hearer,))
        if self._how == "own record":
            return Vote(voter=self._name, digest=self._own().head().digest)
        return vote

    def states(self, order: ExchangeOrder) -> ExchangeOrder:
        if self._how != "times":
            return order
        times = {"exchange_s": LONG_S, "step_s": LONG_S, "stall_s": LONG_S, "codec_s": LONG_S}
        return replace(order, tokens=ALL_TOKENS, **times)

    def gives(self, averager: SimulatedAverager) -> Donor:
        lies = self._how in ("own record", "claims")
        return _Given(self._own() if lies else averager.log, not self.silent)

    def says(self, records: Mapping[str, Any]) -> Mapping[str, Any]:
        how, told = self._how, dict(records)
        run, number = self._world.run, self._world.peers[self._name].coordinator.round
        claim = claim_key(run, self._world.peers[self._name].stage) if how else ""
        if how in ("own record", "claims") and claim in told:
            told[claim] = self._claim(told[claim])
        if how == "far bells":
            told |= self._bells(number)
        if how == "times":
            told = {key: self._mistimed(record) for key, record in told.items()}
            leading = told.get(replica_key(run))
            if leading is not None:
                far = number + self._draw.choice((-1, 0, FAR_ROUNDS))
                told[replica_key(run)] = replace(leading, round=far)
        return told

    def _bells(self, number: int) -> dict[str, Record]:
        now = self._world.timeline.now
        bell = BellRecord(
            round=number, finished_at=now, round_s=1.0, send_after=now, scheduled_at=now
        )
        rung = (bell, replace(bell, round=number + FAR_ROUNDS))
        return {bell_key(self._world.run, each.round): each for each in rung}

    def _mistimed(self, record: Any) -> Any:
        if isinstance(record, BellRecord):
            off_s = self._draw.choice((-LONG_S, 0.0, LONG_S))
            at = record.finished_at + self._draw.choice((0.0, LONG_S))
            return replace(
                record,
                finished_at=record.finished_at + off_s,
                round_s=LONG_S,
                send_after=at,
                scheduled_at=at,
            )
        if isinstance(record, ReplicaRecord):
            return replace(record, step_s=LONG_S, hear_s=LONG_S)
        return record

    def _claim(self, claim: ClaimRecord) -> ClaimRecord:
        if self._how == "claims" and self._draw.random() < 0.5:
            return _far(claim, self._draw)
        own = self._own().head()
        return replace(claim, round=own.round, digest=own.digest, chain_tokens=ALL_TOKENS)

    def _own(self) -> SimulatedLog:
        """Its own chain beside the one on its newest record."""
        log, world = self._log, self._world
        digest = log.head().digest
        if self._forged is None or self._forged[0] != digest:
            named = set[str]()
            back = 0
            if self._how == "own record":
                named = {each.peer for each in log.chain[-1][1].members}
            else:
                back = self._draw.randrange(min(len(log.chain), SETTLED_RECORDS + 2))
            most = tokens_cap(world.manifest)
            self._forged = digest, forged(log, back, self._name, most, named=named)
            world.false_digests.add(self._forged[1].head().digest)
        return self._forged[1]


@dataclass(frozen=True)
class _Given:
    """What a liar gives to who asks."""

    log: SimulatedLog
    answers: bool
    has_state: bool = True


class LyingArchive(SimulatedArchive):
    """A bootstrap that lies; a copy stays on its own chain from then on."""

    def __init__(self, world: World, how: str, *facts: Any):
        super().__init__(*facts)
        self._world = world
        self._how = how
        self._draw = random.Random(f"{world.scenario.seed} {self.me}")
        # by stage: the record that it is on, since when, and how many it had when it began to lie
        self._since: dict[int, tuple[str, float]] = {}
        self._had: dict[int, int] = {}

    def _take(self, kept: Keeping, view: Any, head: Any) -> None:
        if not (self._world.lies and self.me != BOOTSTRAP):
            super()._take(kept, view, head)

    def _claim(self, kept: Keeping) -> ClaimRecord | None:
        lies = self._world.lies and bool(kept.log.chain)
        if lies:
            self._had.setdefault(kept.stage, len(kept.log.chain))
            self._forge(kept)
        claim = super()._claim(kept)
        silent = self._how == "silence" or (
            self._how == "late fork" and self._world.lied_rounds < LATE_ROUNDS
        )
        kept.answers = not (lies and silent)
        if claim is None or not lies:
            return claim
        if silent:
            return None
        if self._how == "the end":
            return replace(claim, chain_tokens=self._world.manifest.end_tokens)
        if self._how == "far run":
            return replace(claim, run_round=MAX_INDEX)
        return _far(claim, self._draw) if self._how == "far rounds" else claim

    def _forge(self, kept: Keeping) -> None:
        """Make a record of its own where its lie wants one now."""
        chain, false, now = kept.log.chain, self._world.false_digests, self._world.timeline.now
        head = kept.log.head().digest
        if self._since.get(kept.stage, ("", now))[0] != head:
            self._since[kept.stage] = head, now
        heard = now - self._since[kept.stage][1] > 2 * self._world.manifest.deadlines.heartbeat_s
        own = [digest in false for digest, _ in chain]
        others = own[::-1].index(True) if any(own) else len(own)  # since the last one of its own
        late = self._world.lied_rounds >= LATE_ROUNDS
        back = {
            "fork of 3": SETTLED_RECORDS if heard and not any(own) else None,
            "fork of 4": SETTLED_RECORDS + 1 if heard and not any(own) else None,
            "late fork": len(chain) - self._had[kept.stage] + SETTLED_RECORDS
            if late and not any(own)
            else None,
            "forks": SETTLED_RECORDS if others >= SETTLED_RECORDS else None,
            "own records": 0 if others else None,
        }.get(self._how)
        if back is not None and len(chain) > back:
            kept.log = forged(kept.log, back, f"{self.me}'s", tokens_cap(self._world.manifest))
            false.add(kept.log.head().digest)


def _far(claim: ClaimRecord, draw: random.Random) -> ClaimRecord:
    """One of a record that does not exist."""
    digest, far = hashlib.sha256(draw.randbytes(8)).hexdigest(), claim.round + FAR_ROUNDS
    return replace(claim, round=far, digest=digest, chain_tokens=ALL_TOKENS)
