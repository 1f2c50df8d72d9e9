"""What the rules of averaging and compression do to the loss, at equal tokens and side by side.

    python benchmarks/convergence.py [--worlds] [--tune] [--seeds 2] [--quick] [--out DIR]

One small model (116 thousand parameters over bytes) is trained on the standard library's source by
four workers in one process: the same seeds, the same text, the same number of inner steps for every
rule. Merge, outer step, codecs, adaptation and inner optimizer are the product's own classes; the
network is simulated (simulated_swarm.py): a record arrives a quarter of a round after its send,
under DiLoCoX (as published: reset at the round's end, fixed rank) at the end of the next round.
Losses are those of the anchor on held-out text when all that was sent has arrived; bytes are those
of the encoded payloads, sent by one worker, its part of the means included; `fp16` is their share
of what an all-reduce in fp16 would send each round. `tuned` is the outer step, learning rate and
momentum.

Before they are compared, every rule is tuned by itself: twelve settings of the outer step on one
seed, the best three of these on two more (AllReduce: inner learning rates instead). The residual's
decay was chosen for each scheme, and the inner learning rate of all other rules for synchronous
DiLoCo. DiLoCoX is given our residual too. No seed of a table was used to choose anything. What came
out stands in convergence_rules.py; --tune does it anew and prints it (most of an hour). --worlds
shows how the gaps change with more rounds, longer ones and a wider model, at the same settings
(a quarter of an hour).

Results are the same on every run of one machine. Differences under half a percent are chance.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_rules import (
    ADAPTIVE,
    FOUR_BIT,
    MUON,
    MUON_FOUR_BIT,
    MUON_TWO_BIT,
    PUBLISHED,
    SCALED,
    SIXTEEN_BIT,
    SYNCHRONOUS,
    WORLD,
    codec,
    rules,
    setting,
)
from benchmarks.convergence_runs import Runner, gaps, halfwidth, mean, tune
from benchmarks.report import SPREAD, Column, Report, parser
from benchmarks.simulated_swarm import Outcome, World, fp16_bytes

FIRST_SEED = 20  # of the tables
CURVE_POINTS = 12
QUICK_ROUNDS = 2
REFERENCES = {MUON_FOUR_BIT: MUON, MUON_TWO_BIT: MUON}  # of all others: SYNCHRONOUS


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The loss of `row` should be at most this share above that of `over`.

    bytes_share: of what every round's all-reduce in fp16 would send.
    """

    row: str
    over: str
    at_most: float
    bytes_share: float = 1.0


GOALS = (
    Goal(row=FOUR_BIT, over=SYNCHRONOUS, at_most=0.03),
    Goal(row=ADAPTIVE, over=SYNCHRONOUS, at_most=0.05, bytes_share=1 / 20),
    Goal(row=ADAPTIVE, over=PUBLISHED, at_most=-0.05),
)


def print_table(world: World, found: Mapping[str, Sequence[Outcome]], report: Report) -> None:
    """The main table."""
    fp16 = fp16_bytes(world)
    report.say(
        f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, "
        f"{world.tokens / 1e3:.0f} thousand tokens, a record {world.arrival} inner steps after its "
        f"send, {len(found[SYNCHRONOUS])} seeds (mean and half the spread)"
    )
    rows: list[tuple[str | float, ...]] = []
    for name, outcomes in found.items():
        over = gaps(outcomes, found[REFERENCES.get(name, SYNCHRONOUS)])
        losses = [outcome.loss for outcome in outcomes]
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        rule = outcomes[0].trial.rule
        rank = mean([mean(outcome.ranks) for outcome in outcomes if outcome.ranks] or [0])
        apart = mean(losses), halfwidth(losses), mean(over), halfwidth(over)
        rows.append((name, codec(rule, rank), setting(rule), *apart, sent / 1e6, sent / fp16))
    columns = [
        *(Column(name) for name in ("rule", "codec", "tuned")),
        Column("loss", ".3f"),
        Column(SPREAD, ".3f"),
        Column("over DiLoCo", "+.1%"),
        Column(SPREAD, ".1%"),
        Column("MB", ".1f"),
        Column("fp16", share),
    ]
    report.table(columns, rows)
    report.say(f"{', '.join(REFERENCES)}: over {MUON}")


def share(of_fp16: float) -> str:
    """A number of bytes over another one, as a fraction where it is smaller."""
    return f"1/{1 / of_fp16:.1f}" if of_fp16 < 1 else f"{of_fp16:.1f}"


def print_goals(world: World, found: Mapping[str, Sequence[Outcome]], report: Report) -> None:
    """Which goals were reached."""
    for goal in GOALS:
        over = mean(gaps(found[goal.row], found[goal.over]))
        sent = mean([outcome.bytes_sent for outcome in found[goal.row]]) / fp16_bytes(world)
        reached = over <= goal.at_most and sent <= goal.bytes_share
        bound = "" if goal.bytes_share == 1 else f", bytes at most 1/{1 / goal.bytes_share:.0f}"
        report.say(
            f"{goal.row} over {goal.over}: {over:+.1%}, goal {goal.at_most:+.0%}{bound}: "
            f"{'reached' if reached else 'MISSED'}"
        )


def print_scaling(runner: Runner, seeds: Sequence[int], report: Report) -> None:
    """How the gaps change with more rounds, longer ones and a wider model."""
    compared = (SIXTEEN_BIT, FOUR_BIT, ADAPTIVE, PUBLISHED)
    made: list[tuple[str | float, ...]] = []
    for label, world in SCALED.items():
        rows = {name: rules(world)[name] for name in (SYNCHRONOUS, *compared)}
        found = runner.compare(world, rows, seeds)
        over = {name: gaps(outcomes, found[SYNCHRONOUS]) for name, outcomes in found.items()}
        sent = mean([outcome.bytes_sent for outcome in found[ADAPTIVE]])
        gap = [figure(over[name]) for name in compared for figure in (mean, halfwidth)]
        loss = mean([outcome.loss for outcome in found[SYNCHRONOUS]])
        made.append((label, loss, *gap, sent / fp16_bytes(world)))
    report.table(
        [
            Column("world"),
            Column(SYNCHRONOUS, ".3f"),
            *(each for name in compared for each in (Column(name, "+.1%"), Column(SPREAD, ".1%"))),
            Column("bytes adaptive", share),
        ],
        made,
        title=f"loss over {SYNCHRONOUS}'s in other worlds, {len(seeds)} seeds",
        part="worlds",
    )


def main() -> None:
    """Train, compare, print."""
    made = parser(__doc__)
    made.add_argument("--worlds", action="store_true", help="a second table: other worlds")
    made.add_argument("--tune", action="store_true", help="tune every rule anew before")
    made.add_argument("--seeds", type=int, default=2, help="of the tables")
    made.add_argument("--processes", type=int, default=1, help="of one thread each")
    report, arguments = Report.parse(made, "convergence")
    torch.set_num_threads(1)
    world, count, points = WORLD, arguments.seeds, CURVE_POINTS
    if arguments.quick:
        world, count, points = replace(WORLD, rounds=QUICK_ROUNDS), 1, QUICK_ROUNDS
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    picture = report.picture()
    with Runner(arguments.processes, points=points if picture else 1) as runner:
        rows = tune(runner, world, report) if arguments.tune else rules(world)
        found = runner.compare(world, rows, seeds)
        print_table(world, found, report)
        print_goals(world, found, report)
        if arguments.worlds:
            print_scaling(runner, seeds, report)
    if picture:
        from benchmarks.convergence_plot import draw

        draw(found, picture)
    report.close()


if __name__ == "__main__":
    main()
