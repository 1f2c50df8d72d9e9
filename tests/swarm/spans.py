"""What the peers of a swarm did in a span of it: which rounds they sent, what became of them, and
how they spent the time."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.swarm.harness import Peer, ProcessSwarm

START_LIMIT_S = 240.0
PAUSE_STEPS = 2.0  # so many inner steps without the end of one are a pause


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one peer since it began to train, by its own account."""

    at: float  # seconds since the epoch
    waiting_s: float
    computing_s: float  # evaluations included

    @classmethod
    def by_now(cls, peer: Peer) -> Spent:
        """As its newest status says."""
        (path,) = peer.state.glob("*-stage*/status.json")
        at = path.stat().st_mtime
        began = peer.of_kind("training")[0]["time"]
        formed = next((event["time"] for event in peer.of_kind("replica")), began)
        return cls(
            at=at,
            waiting_s=peer.status["waiting_share"] * (at - began),
            computing_s=peer.status["computing_share"] * (at - formed),
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one peer did in a span.

    counted: rounds whose record holds its progress. waiting, computing: shares of the time, by its
    own account. stepping: share of the time in inner steps, by their ends as seen from outside;
    None where they are not shown.
    """

    name: str
    sent: int
    counted: int
    void: int
    seconds: float
    waiting: float
    computing: float
    stepping: float | None

    def __str__(self) -> str:
        shares = f"waiting {self.waiting:.2%}, computing {self.computing:.2%}"
        if self.stepping is not None:
            shares += f", in inner steps {self.stepping:.2%}"
        return (
            f"{self.name}: {self.sent} sent in {self.seconds:.0f} s, {self.counted} counted, "
            f"{self.void} void; {shares}"
        )


@dataclass(frozen=True, kw_only=True)
class Span:
    """Some rounds of a swarm. sent: their numbers; committed: of these, those with a record."""

    sent: Sequence[int]
    committed: Sequence[int]
    accounts: Sequence[Account]

    def __str__(self) -> str:
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        lines = [f"{len(self.committed)} of {len(self.sent)} rounds committed; load {load}"]
        return "\n".join([*lines, *map(str, self.accounts)])


def watch_rounds(swarm: ProcessSwarm, count: int, *, limit_s: float) -> Span:
    """Wait until every peer has sent so many rounds that began when all of them trained, and knows
    what became of them.

    limit_s: for one round.
    """
    everybody = swarm.peers
    first = swarm.wait_until_all_train(START_LIMIT_S)
    swarm.wait(
        lambda: all(peer.status["round"] > first for peer in everybody),
        START_LIMIT_S + 2 * limit_s,
        f"round {first} has been sent by all",
    )
    before = {peer.name: Spent.by_now(peer) for peer in everybody}

    def ended(peer: Peer) -> list[int]:
        numbers = [event["round"] for event in peer.of_kind("sent") if event["round"] > first]
        return [number for number in numbers if peer.decided(number)]

    swarm.wait(
        lambda: all(len(ended(peer)) >= count for peer in everybody),
        START_LIMIT_S + count * limit_s,
        f"{count} rounds of every peer",
    )
    numbers = sorted({number for peer in everybody for number in ended(peer)})[:count]
    chain = swarm.chain()
    return Span(
        sent=numbers,
        committed=[number for number in numbers if number in chain],
        accounts=[_account(peer, numbers, before[peer.name]) for peer in everybody],
    )


def _account(peer: Peer, numbers: Sequence[int], before: Spent) -> Account:
    now = Spent.by_now(peer)
    seconds = now.at - before.at
    lines = [line for number in numbers if (line := peer.record(number)) is not None]
    return Account(
        name=peer.name,
        sent=sum(event["round"] in numbers for event in peer.of_kind("sent")),
        counted=sum(line["outcome"] == "counted" for line in lines),
        void=sum(event["round"] in numbers for event in peer.of_kind("void")),
        seconds=seconds,
        waiting=(now.waiting_s - before.waiting_s) / seconds,
        computing=(now.computing_s - before.computing_s) / seconds,
        stepping=None
        if peer.shown is None
        else stepping_share(peer.shown.steps, before.at, now.at),
    )


def stepping_share(ends: Sequence[float], since: float, until: float) -> float:
    """Share of the time in inner steps: all but what a pause between two ends has over the usual.

    A little slower is no pause: the exchange computes on the same machine.
    """
    inside = [end for end in ends if since <= end <= until]
    gaps = [end - before for before, end in pairwise(inside)]
    usual = statistics.median(gaps)
    paused_s = sum(gap - usual for gap in gaps if gap > PAUSE_STEPS * usual)
    return 1.0 - paused_s / sum(gaps)
