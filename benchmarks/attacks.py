"""What liars among the members of an exchange do to the loss, under several rules of averaging.

    python benchmarks/attacks.py [--seeds 3] [--rounds 30] [--codec defaults] [--quick] [--json]

Eight workers train one small model in one process, as in benchmarks/convergence.py, under the rules
that a manifest may name (`rounds.robust`; peer/rounds/robust.py) and under centered clipping; every
worker reduces one part of each phase, by itself. One or two of the eight lie. Figures are how far
the validation loss at the end is above that of the honest run in which everybody is believed, from
the same seed.

A reducer that returns another mean than that of what it got is not among the attacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_rules import ADAPTIVE, DEFAULTS, FOUR_BIT, WORLD, rules
from benchmarks.convergence_runs import Runner, gaps, mean
from benchmarks.simulated_exchange import Averaging
from benchmarks.simulated_swarm import Attack, Outcome, Rule, World
from benchmarks.tables import narrow

FIRST_SEED = 40
CODECS = {"defaults": DEFAULTS, "adaptive": ADAPTIVE, "dense": FOUR_BIT}
HONEST = "nobody"
ATTACKS: dict[str, Attack | None] = {
    HONEST: None,
    "1 flips, times ten": Attack(kind="flip", liars=1, factor=10.0),
    "2 flip, times ten": Attack(kind="flip", liars=2, factor=10.0),
    "2 flip": Attack(kind="flip", liars=2),
    "1 flips, states ten": Attack(kind="flip", liars=1, weight=10),
    "2 noise of ten": Attack(kind="noise", liars=2, factor=10.0),
    "2 a constant, ten": Attack(kind="constant", liars=2, factor=10.0),
    "2 a little": Attack(kind="little", liars=2, factor=1.5),
}
RULES: tuple[Averaging, ...] = ("none", "gate", "clip", "centered")
QUICK = (HONEST, "1 flips, times ten", "2 flip, times ten")


def found_of(
    world: World,
    base: Rule,
    attacks: Sequence[str],
    names: Sequence[Averaging],
    seeds: Sequence[int],
) -> dict[str, dict[str, list[Outcome]]]:
    """The outcomes by attack and rule, one a seed."""
    rows = {
        (attack, name): replace(base, robust=name, attack=ATTACKS[attack])
        for attack in attacks
        for name in names
    }
    with Runner(processes=2, points=1) as runner:
        outcomes = runner.run(world, list(rows.values()), seeds)
    found: dict[str, dict[str, list[Outcome]]] = {attack: {} for attack in attacks}
    for (attack, name), each in zip(rows, outcomes, strict=True):
        found[attack][name] = each
    return found


def over(found: Mapping[str, Mapping[str, list[Outcome]]]) -> dict[str, dict[str, float]]:
    """Losses over the honest run's, by attack and rule: means over the seeds."""
    reference = found[HONEST]["none"]
    return {
        attack: {name: mean(gaps(outcomes, reference)) for name, outcomes in by_rule.items()}
        for attack, by_rule in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--codec", choices=list(CODECS), default="defaults")
    parser.add_argument("--quick", action="store_true", help="one seed, three rows, two rules")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    world = replace(WORLD, workers=8, rounds=options.rounds)
    base = rules(world)[CODECS[options.codec]]
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if quick else options.seeds))
    names = RULES[:2] if quick else RULES
    found = found_of(world, base, QUICK if quick else tuple(ATTACKS), names, seeds)
    figures = over(found)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console(highlight=False)
    console.print(
        f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, codec "
        f"{options.codec}, {len(seeds)} seeds; loss over that of "
        f"{mean([each.loss for each in found[HONEST]['none']]):.3f}"
    )
    table = narrow()
    table.add_column("who lies", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for attack, by_rule in figures.items():
        table.add_row(attack, *(f"{by_rule[name]:+.1%}" for name in names))
    console.print(table)


if __name__ == "__main__":
    main()
