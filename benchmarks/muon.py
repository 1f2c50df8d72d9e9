"""Muon under dense codecs in several worlds, and what of the overlap costs it how much.

    python benchmarks/muon.py [--part worlds] [--only NAME] [--seeds 2] [--quick] [--out folder]

Model, text and rules are convergence.py's, and nothing is tuned anew but where a row says so. Part
`worlds`: loss over that of synchronous Muon (DiLoCo, 16 bit) with 16, 4 and 2 bits overlapped, and
that of synchronous AdamW, with more workers, longer rounds, a wider model, more rounds. Part
`overlap`: in the first world, 2 bits with one setting changed at a time. Part `momenta`: Muon's own
momentum, shorter or forgotten where a record arrives, in rounds of 8 and of 64 steps. Part
`replicas`: outer steps, which MuLoCo (without overlap) lets grow with the replicas: 0.7/0.6 at one,
0.9/0.8 at eight, 1.0/0.9 at sixteen; each of them for synchronous Muon and 4 bits, too. Part
`ways`: averages that the product does not have (trial_averages.py), with fewer bits, a length of
its own, or another momentum.

Muon's losses are chaotic: of one seed they end up to 1.5 % apart where it is computed beside other
rows. The mean of two seeds is good to about a percent. What is done is printed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_rules import (
    LARGER,
    MUON,
    MUON_FOUR_BIT,
    MUON_SIXTEEN_BIT,
    MUON_TWO_BIT,
    SYNCHRONOUS,
    WORLD,
    muon_rules,
    rules,
)
from benchmarks.convergence_runs import Runner, gaps, halfwidth, mean
from benchmarks.report import Column, Report, parser
from benchmarks.simulated_swarm import Outcome, Rule, World, bits_a_value
from benchmarks.trial_averages import Way

FIRST_SEED = 30  # none of convergence.py's
HALF = replace(WORLD, rounds=30)
WORLDS = {
    "8 workers": replace(HALF, workers=8),
    "H x 2": replace(HALF, inner_steps=16, arrival=4),
    "width x 2": replace(HALF, model=LARGER | {"num_key_value_heads": 4}),
    "16 workers": replace(HALF, workers=16, rounds=15),
    "rounds x 2": replace(WORLD, rounds=120),
}
LONG = replace(WORLD, rounds=12, inner_steps=64, arrival=16)
OUTER = ((0.7, 0.6), (0.9, 0.5), (0.9, 0.8), (1.0, 0.9))
QUICK = {"workers": 2, "rounds": 3, "held_out": 16}

Rows = Mapping[str, Rule]


def worlds() -> Iterator[tuple[str, World, Rows]]:
    """Other worlds, each with the same rules."""
    for name, world in WORLDS.items():
        found = rules(world) | muon_rules(world)
        names = (MUON, MUON_SIXTEEN_BIT, MUON_FOUR_BIT, MUON_TWO_BIT, SYNCHRONOUS)
        yield name, world, {each: found[each] for each in names}


def overlap() -> Iterator[tuple[str, World, Rows]]:
    """Two bits in the first world, with one setting changed at a time."""
    found = rules(WORLD)
    muon, rule = found[MUON], found[MUON_TWO_BIT]
    yield "arrival 1", replace(WORLD, arrival=1), {MUON: muon, MUON_TWO_BIT: rule}
    changed = {f"rebase_weight {w:g}": replace(rule, weight=w) for w in (0.5, 1.0)}
    changed |= {f"residual_decay {d:g}": replace(rule, decay=d) for d in (0.9, 1.0)}
    yield "arrival 2", WORLD, {MUON: muon, MUON_TWO_BIT: rule} | changed


def momenta() -> Iterator[tuple[str, World, Rows]]:
    """Muon's momentum shorter, or forgotten as a record arrives; in short and long rounds."""
    for name, world in {"H": WORLD, "H x 8": LONG}.items():
        found = rules(world)
        rows = {each: found[each] for each in (MUON, MUON_TWO_BIT)}
        changed = {
            f"{each}, {momentum:g}, kept {kept:g}": replace(
                rule, inner=replace(rule.inner, muon_momentum=momentum), momentum_kept=kept
            )
            for each, rule in rows.items()
            for momentum, kept in ((0.95, 0.0), (0.85, 1.0), (0.85, 0.0))
        }
        yield name, world, rows | changed


def replicas() -> Iterator[tuple[str, World, Rows]]:
    """Outer steps by number of replicas: synchronous, and overlapped with four and two bits."""
    for name in ("8 workers", "16 workers"):
        found = rules(WORLDS[name]) | muon_rules(WORLDS[name])
        alike = {each: found[each] for each in (MUON, MUON_FOUR_BIT, MUON_TWO_BIT)}
        outer = {
            f"{each}, {rate:g}/{momentum:g}": replace(rule, learning_rate=rate, momentum=momentum)
            for rate, momentum in OUTER
            for each, rule in alike.items()
        }
        yield name, WORLDS[name], alike | outer


def ways() -> Iterator[tuple[str, World, Rows]]:
    """Ways to average that the product does not have, in the first world."""
    found = rules(WORLD)
    rule = found[MUON_TWO_BIT]
    tried = {way: replace(rule, way=way) for way in get_args(Way)}
    for way in ("signs", "three levels", "halves"):
        for decay in (0.9, 1.0):
            tried[f"{way}, decay {decay:g}"] = replace(tried[way], decay=decay)
    yield "ways", WORLD, {MUON: found[MUON], MUON_TWO_BIT: rule} | tried


PARTS = {
    "worlds": worlds,
    "overlap": overlap,
    "momenta": momenta,
    "replicas": replicas,
    "ways": ways,
}
COLUMNS = (
    Column("world"),
    Column("rule"),
    Column("loss", ".3f"),
    Column("±", ".3f"),
    Column("over", "+.1%"),
    Column("±", ".1%"),
    Column("bits", ".2f"),
)


def cells(
    world: str, here: World, found: Mapping[str, Sequence[Outcome]]
) -> list[tuple[object, ...]]:
    """The rows of a world; `over` is over synchronous Muon, `bits` as in pareto.py."""
    rows = list[tuple[object, ...]]()
    for name, outcomes in found.items():
        losses = [outcome.loss for outcome in outcomes]
        over = gaps(outcomes, found[MUON])
        spread = (mean(losses), halfwidth(losses), mean(over), halfwidth(over))
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        rows.append((world, name, *spread, bits_a_value(here, sent)))
    return rows


def main() -> None:
    """Train, print each world's rows, and all of them at the end."""
    made = parser(__doc__)
    made.add_argument("--part", choices=tuple(PARTS), default="worlds")
    made.add_argument("--only", help="of the worlds only those with this in their names")
    made.add_argument("--seeds", type=int, default=2)
    made.add_argument("--processes", type=int, default=1, help="of one thread each")
    report, arguments = Report.parse(made, "muon")
    torch.set_num_threads(1)
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if arguments.quick else arguments.seeds))
    rows = list[tuple[object, ...]]()
    with Runner(arguments.processes, points=1) as runner:
        for name, world, compared in PARTS[arguments.part]():
            if arguments.only and arguments.only not in name:
                continue
            here = replace(world, **QUICK) if arguments.quick else world
            done = cells(name, here, runner.compare(here, compared, seeds))
            rows += done
            for row in done:
                shown = (column.shown(cell) for column, cell in zip(COLUMNS, row, strict=True))
                report.say(" ".join(shown))
    title = f"{len(seeds)} seeds (mean and half the spread); over: synchronous Muon"
    report.table(COLUMNS, rows, title=title, part=arguments.part)
    report.close()


if __name__ == "__main__":
    main()
