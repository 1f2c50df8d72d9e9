"""What the papers' experiments (papers.py) have in common: world, rows, table, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.convergence_rules import WORLD, rules
from benchmarks.convergence_runs import Runner, gaps, halfwidth, mean
from benchmarks.report import SPREAD, Column, Report
from benchmarks.simulated_swarm import Outcome, Rule, World, fp16_bytes

ROUNDS = 40  # two thirds of the main table's, so that all parts fit into minutes
QUICK_ROUNDS = 4
QUICK_ROWS = 2
CHANCE = 0.005  # of the loss, between runs of one rule

Rows = Mapping[str, tuple[World, Rule]]
"""What is compared: a world and a rule by the row's name."""
Found = Mapping[str, Sequence[Outcome]]
"""The outcomes of the rows, one a seed."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says, and what was seen; reached: None where this script cannot tell."""

    source: str
    says: str
    seen: str
    reached: bool | None

    def line(self) -> str:
        """For the terminal."""
        verdict = {True: "reached", False: "NOT REACHED", None: "not measured here"}[self.reached]
        return f"{self.source}: {self.says}: {self.seen}: {verdict}"


@dataclass(kw_only=True)
class Study:
    """One run of the script: runs rows, prints their tables, keeps the claims."""

    report: Report
    runner: Runner
    seeds: Sequence[int]
    quick: bool = False
    claims: list[Claim] = field(default_factory=list[Claim])

    @property
    def world(self) -> World:
        """The world of most rows; that of convergence.py, for a shorter time."""
        return replace(WORLD, rounds=QUICK_ROUNDS if self.quick else ROUNDS)

    def rules(self, world: World | None = None) -> dict[str, Rule]:
        """The rules of convergence.py with their settings, for a world."""
        return rules(world or self.world)

    def compare(
        self, part: str, title: str, rows: Rows, over: Mapping[str, str] | str
    ) -> Found | None:
        """Run the rows, print their table; with --quick two of them, and nothing comes back.

        over: the row that each row's loss is compared with, or one for all.
        """
        if self.quick:
            rows = dict(list(rows.items())[:QUICK_ROWS])
        found = self.runner.run_worlds(rows, self.seeds)
        columns = (
            Column("", str),
            Column("loss", ".3f"),
            Column(SPREAD, ".3f"),
            Column("over", "+.1%"),
            Column(SPREAD, ".1%"),
            Column("tokens", lambda count: f"{count / 1e3:.0f}k"),
            Column("MB", ".2f"),
            Column("of fp16"),
        )
        lines: list[tuple[str | float | None, ...]] = []
        for name, outcomes in found.items():
            losses = [outcome.loss for outcome in outcomes]
            reference = over if isinstance(over, str) else over.get(name, name)
            apart = gaps(outcomes, found[reference]) if reference in found else None
            sent = mean([outcome.bytes_sent for outcome in outcomes])
            share = fp16_bytes(rows[name][0]) / sent
            lines.append(
                (
                    name,
                    mean(losses),
                    halfwidth(losses),
                    None if apart is None else mean(apart),
                    None if apart is None else halfwidth(apart),
                    rows[name][0].tokens,
                    sent / 1e6,
                    f"1/{share:.1f}" if share >= 1 else f"{1 / share:.1f}",
                )
            )
        self.report.say(f"{part}: {title}" + (f"; over {over}" if isinstance(over, str) else ""))
        self.report.table(columns, lines, part=part)
        self.report.say("")
        return None if self.quick else found

    def claim(self, source: str, says: str, seen: str, reached: bool | None) -> None:
        """Keep it for the end."""
        self.claims.append(Claim(source=source, says=says, seen=seen, reached=reached))


def gap(found: Found, row: str, over: str) -> float:
    """By which share a row's loss is above another's: the mean over the seeds."""
    return mean(gaps(found[row], found[over]))


def loss(found: Found, row: str) -> float:
    """A row's loss: the mean over the seeds."""
    return mean([outcome.loss for outcome in found[row]])


def sent(found: Found, row: str) -> float:
    """Bytes that a worker sends, on the average."""
    return mean([outcome.bytes_sent for outcome in found[row]])
