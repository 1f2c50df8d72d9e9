"""The Pareto front: the loss at equal tokens against the bytes sent, for every codec and both inner
optimizers.

    python benchmarks/pareto.py [--seeds 3] [--processes 1] [--quick] [--out folder]

The small model, the workers and the rules are those of convergence.py, each with the outer step
that was tuned for it; its docstring says what is simulated. `over` is the loss over that of the
synchronous rule (DiLoCo, 16 bit) with the same inner optimizer, `bits` what each worker sends for
each parameter in a round: its message's parts to those that average them, and their means to the
others. A row is on the front if no other row has both a lower loss and fewer bytes. Ranks of
`adaptive` fit the matrices of this model, which have 64 rows. `signs` and `three levels` are not
in the product (trial_averages.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_rules import (
    ADAPTIVE,
    ALL_REDUCE,
    DEFAULTS,
    FOUR_BIT,
    MUON,
    MUON_FOUR_BIT,
    MUON_TWO_BIT,
    PUBLISHED,
    SIXTEEN_BIT,
    SYNCHRONOUS,
    TWO_BIT,
    WORLD,
    codec,
    muon_rules,
    rules,
)
from benchmarks.convergence_runs import Runner, gaps, halfwidth, mean
from benchmarks.report import Column, Report, parser
from benchmarks.simulated_swarm import Outcome, Rule, World, bits_a_value
from benchmarks.trial_averages import Way

EIGHT_BIT, MUON_EIGHT_BIT = "ours, 8 bit", "ours, Muon 8 bit"
ADAMW = (
    ALL_REDUCE,
    SYNCHRONOUS,
    PUBLISHED,
    SIXTEEN_BIT,
    EIGHT_BIT,
    FOUR_BIT,
    TWO_BIT,
    ADAPTIVE,
    DEFAULTS,
)
WAYS: tuple[Way, ...] = ("signs", "three levels")
WAYS_DECAY = 0.9
FIRST_SEED = 30  # none of convergence.py's
QUICK = replace(WORLD, rounds=2, held_out=32)
COLUMNS = (
    Column("rule"),
    Column("codec"),
    Column("loss", ".3f"),
    Column("±", ".3f"),
    Column("over", "+.1%"),
    Column("±", ".1%"),
    Column("MB", ".1f"),
    Column("bits", ".2f"),
    Column("front"),
)


def compared(world: World) -> dict[str, Rule]:
    """All rows of the table."""
    found, muon = rules(world), muon_rules(world)
    eight_bits = {
        name: replace(four_bit, compression=replace(four_bit.compression, bits=8))
        for name, four_bit in ((EIGHT_BIT, found[FOUR_BIT]), (MUON_EIGHT_BIT, muon[MUON_FOUR_BIT]))
    }
    two_bit = replace(muon[MUON_TWO_BIT], decay=WAYS_DECAY)
    fewer = {f"ours, Muon, {way}": replace(two_bit, way=way) for way in WAYS}
    return {name: (found | eight_bits)[name] for name in ADAMW} | muon | eight_bits | fewer


def front(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """The names of those points (bytes, loss) that no other one beats in both."""
    return {
        name
        for name, (sent, loss) in points.items()
        if not any(
            other != (sent, loss) and other[0] <= sent and other[1] <= loss
            for other in points.values()
        )
    }


def point(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Bytes sent by a worker, and the loss: means over the seeds."""
    return (
        mean([outcome.bytes_sent for outcome in outcomes]),
        mean([outcome.loss for outcome in outcomes]),
    )


def main() -> None:
    """Train, print, draw."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--processes", type=int, default=1, help="of one thread each")
    report, arguments = Report.parse(made, "pareto")
    torch.set_num_threads(1)
    world, seeds = (QUICK, 1) if arguments.quick else (WORLD, arguments.seeds)
    with Runner(arguments.processes, points=1) as runner:
        found = runner.compare(world, compared(world), range(FIRST_SEED, FIRST_SEED + seeds))
    points = {name: point(outcomes) for name, outcomes in found.items()}
    best = front(points)
    rows = list[tuple[object, ...]]()
    for name, outcomes in found.items():
        muon = outcomes[0].trial.rule.inner.optimizer == "muon"
        over = gaps(outcomes, found[MUON if muon else SYNCHRONOUS])
        losses = [outcome.loss for outcome in outcomes]
        rank = mean([mean(outcome.ranks) for outcome in outcomes if outcome.ranks] or [0])
        sent = points[name][0]
        spread = (mean(losses), halfwidth(losses), mean(over), halfwidth(over))
        row = (name, codec(outcomes[0].trial.rule, rank), *spread, sent / 1e6)
        rows.append((*row, bits_a_value(world, sent), "*" if name in best else ""))
    report.table(
        COLUMNS,
        rows,
        title=f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, "
        f"{world.tokens / 1e3:.0f} thousand tokens, {seeds} seeds (mean and half the spread)",
    )
    lines = {
        "AdamW": [points[name] for name in found if name in ADAMW],
        "Muon": [points[name] for name in found if name not in ADAMW],
        "the front": [points[name] for name in best],
    }
    megabytes = {
        name: sorted((sent / 1e6, loss) for sent, loss in each) for name, each in lines.items()
    }
    report.plot("MB sent by a worker", "validation loss", megabytes, log_x=True)
    report.close()


if __name__ == "__main__":
    main()
