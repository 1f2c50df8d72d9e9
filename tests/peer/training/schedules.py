"""A peer's merge under any schedule of records, voids, doubles, kills and restarts.

A schedule is a list of numbers; each picks one of the events that are possible at that moment, so
that hypothesis can shrink it and no number is wasted. The world keeps its own account of what was
stepped, what records counted and what was lost, apart from the books of the merge.

A send is a line of the journal, then the submit, then its record. A snapshot may come at any time,
at once or in two pieces with inner steps between them (snapshot_taking.py); all else cuts that one
off.
Who is killed when a line has come since the last one has sent what its state does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilocox.peer.training.merge import Merge, MergeConfig, Outcome, RecordFacts, Remainder
from tests.peer.training.merging import unsent

Draw = tuple[int, int, int]
Schedule = list[tuple[int, Draw]]
FOREVER = 10**6
WHILE_A_SNAPSHOT_IS_READ = ("step", "step again", "snapshot begins", "rest of the snapshot")


@dataclass
class ToldRecord:
    """A record as the peer was told it, kept so that a restarted peer can be told again."""

    facts: RecordFacts
    anchor: Tensor
    own: Tensor | None  # what it holds of this peer
    left_out: Sequence[slice] = ()


@dataclass
class Torn:
    """A snapshot that is being read: the state as it was at its beginning, of which all but the
    first live weight is yet to be read.
    """

    tensors: dict[str, Tensor]
    facts: str
    truth: tuple[Any, ...]


@dataclass
class World:
    """A peer under a schedule, and the truth about it."""

    config: MergeConfig
    dtype: torch.dtype
    unit: float  # what an integer of the schedule is worth; 1/4 is exact in float64
    tokens_stepped: int = 0
    tokens_counted: int = 0
    told: list[ToldRecord] = field(default_factory=list[ToldRecord])
    newest_round: int = -1
    sent_since: dict[int, int] = field(default_factory=dict[int, int])  # what the journal holds
    trained_then: int = 0
    happened: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.given_up: set[int] = set()  # rounds of sends that are neither held nor known to count
        self.undone: set[int] = set()  # likewise, and what is unsent holds them once more
        self.torn: Torn | None = None
        self.live = self.vector(8, 8, 8)
        self.stepped = self.vector(0, 0, 0)
        self.counted = self.vector(0, 0, 0)
        self.forgone = self.vector(0, 0, 0)  # given up, as far as no record holds it
        self.merge = Merge(
            self.config,
            self.live,
            self.vector(8, 8, 8),
            self.vector(0, 0, 0),
            round_number=-1,
            digest="manifest",
        )
        self.save()

    def vector(self, *integers: int) -> Tensor:
        return torch.tensor(integers, dtype=self.dtype) * self.unit

    # ---- events ------------------------------------------------------------------------------
    def possible(self) -> dict[str, Callable[[Draw], None]]:
        """The events that can come now, more of them than one where they should come often."""
        merge = self.merge
        events: dict[str, Callable[[Draw], None]] = {
            "step": self.step,
            "step again": self.step,
            "record of others": lambda draw: self.record(self.newest_round + 1, draw, mine=False),
            "snapshot": lambda _: self.save(),
            "snapshot begins": lambda _: self.begin_to_save(),
            "killed": lambda _: self.restart_after_a_send() if self.sent_since else self.restart(),
        }
        if merge.can_send:
            events |= {
                "send": lambda _: self.send(),
                "send at once": lambda _: self.send(),
            }
        if self.torn is not None:
            events["rest of the snapshot"] = lambda _: self.save_the_rest()
        given_up = [number for number in self.given_up if number > merge.round]
        if given_up:
            events["record of a send that was given up"] = lambda draw: self.record(
                given_up[draw[0] % len(given_up)], draw, mine=True
            )
        for number in merge.in_flight:
            events |= {
                "commit": lambda draw, n=number: self.record(n, draw, mine=True),
                "commit, a part left out": lambda draw, n=number: self.record(
                    n, draw, mine=True, left_out=True
                ),
                "commit without me": lambda draw, n=number: self.record(n, draw, mine=False),
                "void": lambda _, n=number: self.void(n),
                "certain void": lambda _, n=number: merge.void(n, certain=True),
            }
            if number > merge.round + 1:
                events["record before mine"] = lambda draw, n=number: self.record(
                    n - 1, draw, mine=False
                )
        undone = [number for number in self.undone if number > merge.round]
        if undone:
            events["record of an undone send"] = lambda draw: self.record(
                undone[draw[0] % len(undone)], draw, mine=True
            )
        if self.told:
            events["doubled"] = lambda draw: self.tell(self.told[draw[0] % len(self.told)])
        return events

    def run(self, schedule: Schedule, check: Callable[[], None]) -> None:
        for number, draw in schedule:
            events = self.possible()
            name = sorted(events)[number % len(events)]
            self.happened.append(name)
            events[name](draw)
            if name not in WHILE_A_SNAPSHOT_IS_READ:
                self.torn = None
            check()

    def step(self, draw: Draw) -> None:
        step = self.vector(*draw)
        self.live -= step
        self.stepped += step
        self.tokens_stepped += abs(draw[0]) + 1
        self.merge.trained(abs(draw[0]) + 1)

    def send(self) -> None:
        self.newest_round += 2  # numbers may be skipped
        number = self.newest_round
        send = self.merge.send(number)
        self.sent_since[number] = send.tokens
        self.trained_then = self.merge.trained_tokens

    def void(self, number: int) -> None:
        rounds = self.given_up if self.merge.in_flight[number].dropped else self.undone
        self.merge.void(number)
        rounds.add(number)

    def record(self, number: int, draw: Draw, *, mine: bool, left_out: bool = False) -> None:
        self.newest_round = max(self.newest_round, number)
        facts = RecordFacts(
            round=number,
            digest=f"{len(self.told)}: {number}",
            previous=self.merge.digest,
            contributor=mine,
        )
        anchor, own = self.vector(*(4 * n + 8 for n in draw)), self.vector(*draw)
        self.tell(
            ToldRecord(facts, anchor, own if mine else None, [slice(0, 1)] if left_out else [])
        )

    def tell(self, record: ToldRecord) -> None:
        number, merge = record.facts.round, self.merge
        tokens, send = merge.tokens_of(number), merge.in_flight.get(number)
        last_closed = number - 1 if record.facts.contributor else number
        closed = {n: send.dropped for n, send in merge.in_flight.items() if n <= last_closed}
        own = None
        if send is not None and record.own is not None:
            own = Remainder(send.message - record.own, record.left_out)
        outcome = merge.commit(record.facts, record.anchor, self.vector(0, 0, 0), own)
        if outcome is Outcome.REPEATED:
            return
        for n, dropped in closed.items():
            (self.given_up if dropped else self.undone).add(n)
        self.told.append(record)
        doubled = record.facts.contributor and number in self.undone
        if self.config.max_age == FOREVER:  # else what was undone may have been dropped since
            assert (outcome is Outcome.RESET) == doubled
        assert (outcome in (Outcome.COUNTED, Outcome.RESET)) == record.facts.contributor
        if record.facts.contributor and tokens is not None:
            self.tokens_counted += tokens
        if send is not None and record.own is not None and not send.dropped:
            self.counted += record.own
        if outcome is Outcome.RESET:
            self.gone_back()
        elif send is not None and record.facts.contributor:  # it had taken all that was unsent
            self.given_up, self.undone = self.given_up | self.undone, set()
        self.given_up.discard(number)  # what is in it is neither the peer's nor lost

    def gone_back(self) -> None:
        """The peer stands on the anchor: what was its own is nobody's any more."""
        assert torch.equal(self.live, self.merge.anchor)
        assert not self.merge.can_send
        self.given_up |= self.undone
        self.undone = set()
        self.forgone = self.stepped - self.counted

    # ---- snapshots ---------------------------------------------------------------------------
    def save(self) -> None:
        self.snapshot, self.truth = self.state(), self.truth_now()
        self.sent_since, self.trained_then = {}, 0

    def begin_to_save(self) -> None:
        self.torn = Torn(*self.state(), self.truth_now())

    def save_the_rest(self) -> None:
        torn = self.torn
        assert torn is not None
        for then, now in (torn.tensors["live"], self.live), (torn.truth[0], self.stepped):
            then[1:] = now[1:]
        self.snapshot, self.truth, self.torn = (torn.tensors, torn.facts), torn.truth, None
        self.sent_since, self.trained_then = {}, 0

    def state(self) -> tuple[dict[str, Tensor], str]:
        tensors, facts = self.merge.state()
        return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(facts)

    def truth_now(self) -> tuple[Any, ...]:
        return (
            self.stepped.clone(),
            self.counted.clone(),
            self.forgone.clone(),
            self.tokens_stepped,
            self.tokens_counted,
            set(self.given_up),
            set(self.undone),
            len(self.told),
        )

    def reborn(self, tensors: dict[str, Tensor], facts: str) -> None:
        self.live = torch.full_like(self.live, float("nan"))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.merge = Merge.from_state(self.config, self.live, copies, json.loads(facts))

    def restart(self) -> None:
        """Killed and started from the newest snapshot; the chain is followed again from there."""
        self.reborn(*self.snapshot)
        stepped, counted, forgone, tokens_stepped, tokens_counted, *sets, position = self.truth
        self.stepped, self.counted, self.forgone = stepped.clone(), counted.clone(), forgone.clone()
        self.tokens_stepped, self.tokens_counted = tokens_stepped, tokens_counted
        self.given_up, self.undone = map(set, sets)
        again, self.told = self.told[position:], self.told[:position]
        for record in again:
            self.tell(record)

    def restart_after_a_send(self) -> None:
        """Killed when sends were in the journal and not in the snapshot; records may name them."""
        trained, sends = self.trained_then, dict(self.sent_since)
        self.reborn(*self.snapshot)
        held = set(self.merge.in_flight)
        self.merge.start_over(sends, trained)
        assert not self.merge.in_flight
        _, counted, _, _, tokens_counted, given_up, undone, position = self.truth
        self.given_up, self.undone = given_up | held | sends.keys(), set(undone)
        # all that was ever stepped is counted or lost: nothing of it is the peer's any more
        self.counted, self.tokens_counted = counted.clone(), tokens_counted
        self.gone_back()
        self.tokens_stepped = trained
        again, self.told = self.told[position:], self.told[:position]
        for record in again:
            self.tell(record)

    # ---- what must be zero -------------------------------------------------------------------
    def gap(self) -> Tensor:
        held = [send.message for send in self.merge.in_flight.values() if not send.dropped]
        flying = sum(held, self.vector(0, 0, 0))
        kept = self.merge.residual.values + flying + unsent(self.merge)
        return self.stepped - (self.counted + kept + self.forgone)

    def tokens_gap(self) -> int:
        flying = sum(send.tokens for send in self.merge.in_flight.values())
        kept = flying + self.merge.tokens + self.merge.lost_tokens
        return self.tokens_stepped - (self.tokens_counted + kept)


def event_of(number: int) -> tuple[int, Draw]:
    """An event of a schedule out of one number, for hypothesis takes its time for each it draws."""
    rest, third = divmod(number, 17)
    rest, second = divmod(rest, 17)
    which, first = divmod(rest, 17)
    return which, (first - 8, second - 8, third - 8)


EVENT = st.integers(0, 5040 * 17**3 - 1).map(event_of)
SCHEDULE = st.lists(EVENT, min_size=20, max_size=60)
