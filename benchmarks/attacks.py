"""What liars among the members of an exchange do to the loss, under several rules of averaging, and
what the rules do to honest members that have little or other data.

    python benchmarks/attacks.py [--part liars] [--seeds 3] [--rounds 30] [--codec defaults]
                                 [--rules gate] [--uneven fastest] [--processes 2] [--quick]
                                 [--json] [--out DIR]

Eight workers train one small model in one process, as in benchmarks/convergence.py, under the rules
that a manifest may name (`rounds.robust`; peer/rounds/robust.py); every worker reduces one part of
each phase, by itself. One or two of the eight lie, or are absent, which tells what their tokens are
worth. Figures are how far the validation loss at the end is above that of the honest run in which
everybody is believed, from the same seed; and, of the honest runs, how many bytes and seconds of a
processor more the exchanges took.

Nobody lies in the second table (--part unusual), and the first worker is another one than the rest,
which learn from the source code of Python's library: it makes a tenth of the inner steps, or learns
from prose (the reference of the language that the library holds), or from code whose bytes are no
other worker's, as another script's would be. Beside the loss over that of everybody believed are
the shares of values that the gate left out, and of those in a mean that were more than twice as far
from it as the median member's, of this worker and of the others, the rounds whose average mostly
lacked its values, and how often the chain would have had it sit out for that.

--uneven: the workers of the first table make a quarter of the inner steps to all of them; the two
liars make all and three quarters (fastest), 35 % of what all make, or three quarters and a half
(usual), 25 %. --quick: one seed, five rows, two rules (two minutes; seconds with --rounds 3).
--json: one line and nothing else.
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

from benchmarks.convergence_rules import ADAPTIVE, DEFAULTS, FOUR_BIT, TWO_BIT, WORLD, rules
from benchmarks.convergence_runs import Runner, gaps, mean
from benchmarks.report import Column, Report, parser
from benchmarks.simulated_exchange import Attack
from benchmarks.simulated_swarm import Outcome, Rule, World
from dilocox.dht.manifest_sections import RobustRule

FIRST_SEED = 40
CODECS = {"defaults": DEFAULTS, "adaptive": ADAPTIVE, "dense": FOUR_BIT, "two_bits": TWO_BIT}
HONEST = "nobody"
WORKERS = 8
ATTACKS: dict[str, Attack | None] = {
    HONEST: None,
    "1 is absent": Attack(kind="absent", liars=1),
    "2 are absent": Attack(kind="absent", liars=2),
    "1 flips, times ten": Attack(kind="flip", liars=1, factor=10.0),
    "2 flip, times ten": Attack(kind="flip", liars=2, factor=10.0),
    "2 flip": Attack(kind="flip", liars=2),
    "1 noise of ten": Attack(kind="noise", liars=1, factor=10.0),
    "2 noise of ten": Attack(kind="noise", liars=2, factor=10.0),
    "1 a constant, ten": Attack(kind="constant", liars=1, factor=10.0),
    "2 a constant, ten": Attack(kind="constant", liars=2, factor=10.0),
    "1 flips, states ten": Attack(kind="flip", liars=1, weight=10),
    "2 flip, state ten": Attack(kind="flip", liars=2, weight=10),
    "2 a constant, state ten": Attack(kind="constant", liars=2, factor=10.0, weight=10),
    "2 a little": Attack(kind="little", liars=2, factor=1.5),
    "2 a little, state ten": Attack(kind="little", liars=2, factor=1.5, weight=10),
    "1 reduces, reversed": Attack(kind="reverse", liars=1, factor=10.0),
    "1 reduces, biased": Attack(kind="bias", liars=1),
    "2 reduce, biased": Attack(kind="bias", liars=2),
}
RULES: tuple[RobustRule, ...] = ("none", "gate", "centered", "clip")
QUICK = (
    HONEST,
    "1 flips, times ten",
    "2 flip, times ten",
    "1 reduces, reversed",
    "1 reduces, biased",
)
UNEVEN = ("fastest", "usual")  # who lies among workers of unlike speeds
TENTH = 10  # of the inner steps of others, which are as many
UNUSUAL: dict[str, dict[str, Any]] = {
    HONEST: {},
    "a tenth of the steps": {"paces": (1, *[TENTH] * (WORKERS - 1))},
    "prose": {"other": "prose"},
    "another script": {"other": "script"},
}
TREATED = (
    Column("who is unusual"),
    Column("loss", "+.1%"),
    *(Column(name, ".1%") for name in ("left out", "others", "drawn", "others")),
    Column("rounds unheard", ".1%"),
    Column("sits out"),
)

Found = Mapping[str, Mapping[str, Sequence[Outcome]]]
"""The outcomes by attack and rule, one a seed."""


def found_of(
    runner: Runner,
    world: World,
    base: Rule,
    attacks: Sequence[str],
    names: Sequence[RobustRule],
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


def uneven(world: World, liars: str) -> tuple[int, ...]:
    """Inner steps of each worker in a round: all, three quarters, half and a quarter, in turn."""
    places = range(UNEVEN.index(liars), UNEVEN.index(liars) + world.workers)
    return tuple(max(1, world.inner_steps * (4 - place % 4) // 4) for place in places)


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


def unusual(
    runner: Runner, world: World, codec: str, seeds: Sequence[int]
) -> dict[str, dict[str, float]]:
    """What the gate did, by who is unusual: means over the seeds, of the others over them too, but
    how often the first sits out in all of them.
    """
    rows: dict[str, tuple[World, Rule]] = {}
    for who, changes in UNUSUAL.items():
        one = replace(world, inner_steps=TENTH, **changes)
        base = rules(one)[codec]
        rows |= {f"{who} {name}": (one, replace(base, robust=name)) for name in RULES[:2]}
    found = runner.run_worlds(rows, seeds)
    told: dict[str, dict[str, float]] = {}
    for who in UNUSUAL:
        gated = found[f"{who} gate"]
        first = [each.hearings[0] for each in gated]
        others = [hearing for each in gated for hearing in each.hearings[1:]]
        told[who] = {
            "loss": mean(gaps(gated, found[f"{who} none"])),
            "left_out": mean([each.left_out for each in first]),
            "others_left_out": mean([each.left_out for each in others]),
            "drawn": mean([each.drawn for each in first]),
            "others_drawn": mean([each.drawn for each in others]),
            "unheard": mean([each.unheard for each in first]),
            "sits_out": sum(each.sat_out for each in first),
        }
    return told


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


def tell_liars(report: Report, world: World, codec: str, found: Found) -> None:
    honest = found[HONEST]
    steps = "a quarter to all of " * bool(world.paces) + str(world.inner_steps)
    report.say(
        f"{world.workers} workers, {world.rounds} rounds of {steps} inner steps, codec "
        f"{codec}, {len(honest['none'])} seeds; loss over that of "
        f"{mean([each.loss for each in honest['none']]):.3f}"
    )
    figures = over(found)
    told = figures | {f"{what}, {HONEST}": by_rule for what, by_rule in costs(found).items()}
    rows = [(what, *(by_rule[name] for name in honest)) for what, by_rule in told.items()]
    report.table([Column("who lies"), *(Column(name, "+.1%") for name in honest)], rows)
    if file := report.picture():
        draw(figures, file)


def tell_unusual(
    report: Report,
    world: World,
    codec: str,
    seeds: int,
    treated: Mapping[str, Mapping[str, float]],
) -> None:
    report.say(
        f"{world.workers} honest workers, {world.rounds} rounds of {TENTH} inner steps, codec "
        f"{codec}, {seeds} seeds; with the gate, over the loss of everybody believed"
    )
    report.table(TREATED, [(who, *each.values()) for who, each in treated.items()], part="unusual")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--part", choices=("liars", "unusual"), help="this table only")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--codec", choices=list(CODECS), default="defaults")
    made.add_argument(
        "--rules", nargs="+", choices=RULES, default=RULES, help="these rules, beside none"
    )
    made.add_argument("--uneven", choices=UNEVEN, help="workers of unlike speeds; these lie")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--json", action="store_true", help="one line of JSON and nothing else")
    options = made.parse_args()
    report = None if options.json else Report("attacks", options.out)
    torch.set_num_threads(1)
    world = replace(WORLD, workers=WORKERS, rounds=options.rounds)
    codec = CODECS[options.codec]
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if options.quick else options.seeds))
    told: dict[str, Any] = {}
    with Runner(options.processes, points=1) as runner:
        if options.part != "unusual":
            unwanted = set(RULES[1:]) - set(("gate",) if options.quick else options.rules)
            names: list[RobustRule] = [each for each in RULES if each not in unwanted]
            attacks = QUICK if options.quick else tuple(ATTACKS)
            played = world
            if options.uneven is not None:
                played = replace(world, paces=uneven(world, options.uneven))
            found = found_of(runner, played, rules(world)[codec], attacks, names, seeds)
            told |= {"loss": over(found), **costs(found)}
            if report is not None:
                tell_liars(report, played, options.codec, found)
        if options.part != "liars":
            told["unusual"] = treated = unusual(runner, world, codec, seeds)
            if report is not None:
                tell_unusual(report, world, options.codec, len(seeds), treated)
    if report is None:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        report.close()


if __name__ == "__main__":
    main()
