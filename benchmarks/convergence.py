"""What the rules of averaging and compression do to the loss, at equal tokens and side by side.

    python benchmarks/convergence.py [--worlds] [--tune] [--seeds 2] [--plot convergence.svg]

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

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

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
from benchmarks.report import narrow
from benchmarks.simulated_swarm import Outcome, World, fp16_bytes
from dilocox.peer.os_process import wide_console

FIRST_SEED = 20  # of the tables
CURVE_POINTS = 12
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


def print_table(world: World, found: Mapping[str, Sequence[Outcome]], console: Console) -> None:
    """The main table."""
    fp16 = fp16_bytes(world)
    console.print(
        f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, "
        f"{world.tokens / 1e3:.0f} thousand tokens, a record {world.arrival} inner steps after its "
        f"send, {len(found[SYNCHRONOUS])} seeds (mean and half the spread)"
    )
    table = narrow()
    for heading in ("rule", "codec", "tuned"):
        table.add_column(heading, no_wrap=True)
    for heading in ("loss", "over DiLoCo", "MB", "fp16"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, outcomes in found.items():
        over = gaps(outcomes, found[REFERENCES.get(name, SYNCHRONOUS)])
        losses = [outcome.loss for outcome in outcomes]
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        rule = outcomes[0].trial.rule
        table.add_row(
            name,
            codec(
                rule, mean([mean(outcome.ranks) for outcome in outcomes if outcome.ranks] or [0])
            ),
            setting(rule),
            f"{mean(losses):.3f} ±{halfwidth(losses):.3f}",
            f"{mean(over):+.1%} ±{halfwidth(over):.1%}",
            f"{sent / 1e6:.1f}",
            f"1/{fp16 / sent:.1f}" if sent < fp16 else f"{sent / fp16:.1f}",
        )
    console.print(table)
    console.print(f"{', '.join(REFERENCES)}: over {MUON}", highlight=False)


def print_goals(world: World, found: Mapping[str, Sequence[Outcome]], console: Console) -> None:
    """Which goals were reached."""
    for goal in GOALS:
        over = mean(gaps(found[goal.row], found[goal.over]))
        sent = mean([outcome.bytes_sent for outcome in found[goal.row]]) / fp16_bytes(world)
        reached = over <= goal.at_most and sent <= goal.bytes_share
        bound = "" if goal.bytes_share == 1 else f", bytes at most 1/{1 / goal.bytes_share:.0f}"
        console.print(
            f"{goal.row} over {goal.over}: {over:+.1%}, goal {goal.at_most:+.0%}{bound}: "
            f"{'reached' if reached else 'MISSED'}",
            highlight=False,
        )


def print_scaling(runner: Runner, seeds: Sequence[int], console: Console) -> None:
    """How the gaps change with more rounds, longer ones and a wider model."""
    console.print(f"loss over {SYNCHRONOUS}'s in other worlds, {len(seeds)} seeds")
    compared = (SIXTEEN_BIT, FOUR_BIT, ADAPTIVE, PUBLISHED)
    table = narrow()
    for heading in ("", SYNCHRONOUS, *compared, "bytes adaptive"):
        table.add_column(heading, justify="right")
    for label, world in SCALED.items():
        rows = {name: rules(world)[name] for name in (SYNCHRONOUS, *compared)}
        found = runner.compare(world, rows, seeds)
        over = {name: gaps(outcomes, found[SYNCHRONOUS]) for name, outcomes in found.items()}
        sent = mean([outcome.bytes_sent for outcome in found[ADAPTIVE]])
        table.add_row(
            label,
            f"{mean([outcome.loss for outcome in found[SYNCHRONOUS]]):.3f}",
            *(f"{mean(over[name]):+.1%} ±{halfwidth(over[name]):.1%}" for name in compared),
            f"1/{fp16_bytes(world) / sent:.1f}",
        )
    console.print(table)


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--worlds", action="store_true", help="a second table: other worlds")
    parser.add_argument("--tune", action="store_true", help="tune every rule anew before")
    parser.add_argument("--seeds", type=int, default=2, help="of the tables")
    parser.add_argument("--processes", type=int, default=1, help="of one thread each")
    parser.add_argument("--plot", type=Path, help="draw the loss curves into this file")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: install the dev extra")
    torch.set_num_threads(1)
    console = wide_console()
    begun = time.monotonic()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    with Runner(arguments.processes, points=CURVE_POINTS if arguments.plot else 1) as runner:
        rows = tune(runner, WORLD, console) if arguments.tune else rules(WORLD)
        found = runner.compare(WORLD, rows, seeds)
        print_table(WORLD, found, console)
        print_goals(WORLD, found, console)
        if arguments.worlds:
            print_scaling(runner, seeds, console)
    if arguments.plot:
        from benchmarks.convergence_plot import draw

        draw(found, arguments.plot)
    console.print(
        f"{time.monotonic() - begun:.0f} s, {time.process_time():.0f} s of them computing"
    )


if __name__ == "__main__":
    main()
