"""How many rounds a swarm commits, under a simulated clock: rounds of hours in seconds.

    python benchmarks/simulate.py                                 a table of swarms and rounds
    python benchmarks/simulate.py --faults                        a kill or freeze in every fifth
    python benchmarks/simulate.py --heads 4 --round-s 600 --json  one swarm, one line of JSON
    python benchmarks/simulate.py --campaign 2000                 seeded schedules of every fault

The control code is the product's; the clock, the DHT, the network, and the numbers that would be
averaged are simulated (benchmarks/simulation). Exits with 1 if tokens were not conserved, or if a
chain has two records after the same one.

    committed          share of all rounds that ended with a record
    every head         share of the records that hold the head's tokens that is in the fewest
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulation.schedules import every_fifth_round, schedule
from benchmarks.simulation.world import Outcome, Scenario, World
from dilocox.peer.os_process import wide_console

HEADS = (4, 8, 32, 128)
ROUNDS_S = (60.0, 600.0, 3600.0)
ROUNDS = 20
HEAD_ROUNDS = 320  # of a cell of the table, for its time: large swarms play fewer rounds
WIDTHS = (6, 9, 8, 11, 12, 11, 9)
TOLD_EVERY = 100  # schedules of a campaign


def steady(
    heads: int,
    round_s: float,
    *,
    rounds: int,
    rtt_ms: float,
    seed: int,
    slowest: float,
    faults: bool,
) -> Scenario:
    """Heads of 1 to `slowest` seconds a step, all there from the start."""
    step_s = tuple(1 + (slowest - 1) * number / max(1, heads - 1) for number in range(heads))
    hurt = every_fifth_round(heads, round_s, rounds, random.Random(seed)) if faults else ()
    return Scenario(
        step_s=step_s, round_s=round_s, rounds=rounds, rtt_s=rtt_ms / 1000, seed=seed, faults=hurt
    )


def as_json(scenario: Scenario, outcome: Outcome, seconds: float) -> str:
    """One line."""
    facts = {
        "heads": len(scenario.step_s),
        "round_s": scenario.round_s,
        "rtt_ms": scenario.rtt_s * 1000,
        "seed": scenario.seed,
        "rounds": outcome.rounds,
        "committed_share": round(outcome.committed_share, 4),
        "every_head_share": round(outcome.every_head_share, 4),
        "conserved": outcome.conserved,
        "one_chain": outcome.one_chain,
        "voids": outcome.voids,
        "events": outcome.events,
        "seconds": round(seconds, 2),
    }
    return json.dumps(facts)


def row(cells: tuple[str, ...]) -> str:
    """One line of the table, printed as soon as it is known."""
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def sound(outcome: Outcome) -> bool:
    """Whether it kept what must never break."""
    return outcome.conserved and outcome.one_chain


def play(seed: int) -> Outcome:
    """One schedule of a campaign."""
    logging.disable(logging.ERROR)
    return World(schedule(seed)).play()


def campaign(first: int, schedules: int, console: Console) -> int:
    """Play seeded schedules; the exit code."""
    broken: list[int] = []
    committed = rounds = 0
    began = time.monotonic()
    with ProcessPoolExecutor() as pool:
        played = pool.map(play, range(first, first + schedules), chunksize=5)
        for number, outcome in enumerate(played):
            committed, rounds = committed + outcome.committed, rounds + outcome.rounds
            if not sound(outcome):
                broken.append(first + number)
            if (number + 1) % TOLD_EVERY == 0 or number + 1 == schedules:
                console.print(
                    f"{number + 1} schedules, {rounds} rounds, {committed / max(1, rounds):.1%} "
                    f"committed, {len(broken)} not conserved or forked, "
                    f"{time.monotonic() - began:.0f} s",
                    highlight=False,
                )
    for seed in broken:
        console.print(f"seed {seed} is not sound")
    return 1 if broken else 0


def table(arguments: argparse.Namespace, console: Console) -> int:
    """Play every size of swarm with every length of round; the exit code."""
    names = ("heads", "round s", "rounds", "committed", "every head", "conserved", "seconds")
    console.print(row(names), highlight=False)
    kept = True
    for heads in HEADS:
        for round_s in ROUNDS_S:
            rounds = arguments.rounds or max(5, min(ROUNDS, HEAD_ROUNDS // heads))
            scenario = of(arguments, heads, round_s, rounds)
            began = time.monotonic()
            outcome = World(scenario).play()
            kept &= sound(outcome)
            cells = (
                str(heads),
                f"{round_s:.0f}",
                str(outcome.rounds),
                f"{outcome.committed_share:.1%}",
                f"{outcome.every_head_share:.1%}",
                "yes" if sound(outcome) else "NO",
                f"{time.monotonic() - began:.1f}",
            )
            console.print(row(cells), highlight=False)
    return 0 if kept else 1


def of(arguments: argparse.Namespace, heads: int, round_s: float, rounds: int) -> Scenario:
    """The scenario that was asked for."""
    return steady(
        heads,
        round_s,
        rounds=rounds,
        rtt_ms=arguments.rtt_ms,
        seed=arguments.seed,
        slowest=arguments.slowest,
        faults=arguments.faults,
    )


def main() -> int:
    """Simulate what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, help="one swarm of so many heads")
    parser.add_argument("--round-s", type=float, default=600.0, help="of that swarm")
    parser.add_argument(
        "--rounds", type=int, help="rounds to play; 20, in the table fewer for many heads"
    )
    parser.add_argument("--rtt-ms", type=float, default=200.0, help="round trip between peers")
    parser.add_argument("--slowest", type=float, default=3.0, help="the slowest head's s a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="a kill or freeze every fifth round")
    parser.add_argument("--campaign", type=int, metavar="N", help="play N seeded schedules")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    console = wide_console()
    if arguments.campaign:
        return campaign(arguments.seed, arguments.campaign, console)
    if arguments.heads is None:
        return table(arguments, console)
    scenario = of(arguments, arguments.heads, arguments.round_s, arguments.rounds or ROUNDS)
    began = time.monotonic()
    outcome = World(scenario).play()
    sys.stdout.write(as_json(scenario, outcome, time.monotonic() - began) + "\n")
    return 0 if sound(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
