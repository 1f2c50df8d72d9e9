"""What liars among the members of an exchange do to the loss, under several rules of averaging.

    python benchmarks/attacks.py [--seeds 3] [--rounds 30] [--codec defaults] [--processes 2]
                                 [--quick] [--json] [--out DIR]

Eight workers train one small model in one process, as in benchmarks/convergence.py, under the rules
that a manifest may name (`rounds.robust`; peer/rounds/robust.py) and under centered clipping; every
worker reduces one part of each phase, by itself. One or two of the eight lie. Figures are how far
the validation loss at the end is above that of the honest run in which everybody is believed, from
the same seed; and, of the honest runs, how many bytes and seconds of a processor more the exchanges
took. --quick: one seed, five rows, two rules (two minutes; seconds with --rounds 3). --json: one
line and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_rules import ADAPTIVE, DEFAULTS, FOUR_BIT, WORLD, rules
from benchmarks.convergence_runs import Runner, gaps, mean
from benchmarks.report import Column, Report, parser
from benchmarks.simulated_exchange import Attack, Averaging
from benchmarks.simulated_swarm import Outcome, Rule, World

FIRST_SEED = 40
CODECS = {"defaults": DEFAULTS, "adaptive": ADAPTIVE, "dense": FOUR_BIT}
HONEST = "nobody"
ATTACKS: dict[str, Attack | None] = {
    HONEST: None,
    "1 flips, times ten": Attack(kind="flip", liars=1, factor=10.0),
    "2 flip, times ten": Attack(kind="flip", liars=2, factor=10.0),
    "2 flip": Attack(kind="flip", liars=2),
    "1 noise of ten": Attack(kind="noise", liars=1, factor=10.0),
    "2 noise of ten": Attack(kind="noise", liars=2, factor=10.0),
    "1 a constant, ten": Attack(kind="constant", liars=1, factor=10.0),
    "2 a constant, ten": Attack(kind="constant", liars=2, factor=10.0),
    "1 flips, states ten": Attack(kind="flip", liars=1, weight=10),
    "2 flip, state ten": Attack(kind="flip", liars=2, weight=10),
    "2 a little": Attack(kind="little", liars=2, factor=1.5),
    "1 reduces, reversed": Attack(kind="reverse", liars=1, factor=10.0),
    "1 reduces, biased": Attack(kind="bias", liars=1),
    "2 reduce, biased": Attack(kind="bias", liars=2),
}
RULES: tuple[Averaging, ...] = ("none", "gate", "clip", "centered")
QUICK = (
    HONEST,
    "1 flips, times ten",
    "2 flip, times ten",
    "1 reduces, reversed",
    "1 reduces, biased",
)

Found = Mapping[str, Mapping[str, Sequence[Outcome]]]
"""The outcomes by attack and rule, one a seed."""


def found_of(
    runner: Runner,
    world: World,
    base: Rule,
    attacks: Sequence[str],
    names: Sequence[Averaging],
    seeds: Sequence[int],
) -> Found:
    rows = {
        (attack, name): replace(base, robust=name, attack=ATTACKS[attack])
        for attack in attacks
        for name in names
    }
    found: dict[str, dict[str, Sequence[Outcome]]] = {attack: {} for attack in attacks}
    outcomes = runner.run(world, list(rows.values()), seeds)
    for (attack, name), each in zip(rows, outcomes, strict=True):
        found[attack][name] = each
    return found


def over(found: Found) -> dict[str, dict[str, float]]:
    """Losses over the honest run's, by attack and rule: means over the seeds."""
    reference = found[HONEST]["none"]
    return {
        attack: {name: mean(gaps(outcomes, reference)) for name, outcomes in by_rule.items()}
        for attack, by_rule in found.items()
    }


def costs(found: Found) -> dict[str, dict[str, float]]:
    """Bytes and seconds of the honest exchanges over those in which everybody is believed."""
    honest = found[HONEST]

    def added(amounts: Mapping[str, float]) -> dict[str, float]:
        return {name: amount / amounts["none"] - 1 for name, amount in amounts.items()}

    return {
        "bytes": added({name: mean([e.bytes_sent for e in each]) for name, each in honest.items()}),
        "seconds": added(
            {name: mean([e.exchange_s for e in each]) for name, each in honest.items()}
        ),
    }


def draw(figures: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Bars of losses by attack and rule."""
    from matplotlib.figure import Figure  # not all who measure draw

    figure = Figure(figsize=(10, 6), layout="constrained")
    bars: Any = figure.add_subplot(1, 1, 1)
    names = list(figures[HONEST])
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [row + index * height for row in range(len(figures))]
        values = [100 * by_rule[name] for by_rule in figures.values()]
        bars.barh(places, values, height, label=name)
    middle = 0.4 - height / 2
    bars.set_yticks([row + middle for row in range(len(figures))], list(figures))
    bars.invert_yaxis()
    bars.set_xscale("symlog", linthresh=1.0)
    bars.set(xlabel="validation loss over that of the honest run, % (linear up to 1)")
    bars.axvline(0.0, color="black", linewidth=0.8)
    bars.legend(title="rounds.robust")
    figure.savefig(file, dpi=150)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--codec", choices=list(CODECS), default="defaults")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--json", action="store_true", help="one line of JSON and nothing else")
    options = made.parse_args()
    report = None if options.json else Report("attacks", options.out)
    torch.set_num_threads(1)
    world = replace(WORLD, workers=8, rounds=options.rounds)
    base = rules(world)[CODECS[options.codec]]
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if options.quick else options.seeds))
    names = RULES[:2] if options.quick else RULES
    attacks = QUICK if options.quick else tuple(ATTACKS)
    with Runner(options.processes, points=1) as runner:
        found = found_of(runner, world, base, attacks, names, seeds)
    figures, added = over(found), costs(found)
    if report is None:
        sys.stdout.write(json.dumps({"loss": figures, **added}) + "\n")
        return
    report.say(
        f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, codec "
        f"{options.codec}, {len(seeds)} seeds; loss over that of "
        f"{mean([each.loss for each in found[HONEST]['none']]):.3f}"
    )
    told = figures | {f"{what}, {HONEST}": by_rule for what, by_rule in added.items()}
    rows = [(what, *(by_rule[name] for name in names)) for what, by_rule in told.items()]
    report.table([Column("who lies"), *(Column(name, "+.1%") for name in names)], rows)
    if file := report.picture():
        draw(figures, file)
    report.close()


if __name__ == "__main__":
    main()
