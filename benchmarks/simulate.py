"""How many rounds a swarm commits, under a simulated clock: rounds of hours in seconds.

    python benchmarks/simulate.py [--quick] [--out DIR]           a table of swarms and rounds
    python benchmarks/simulate.py --faults                        a kill or freeze in every fifth
    python benchmarks/simulate.py --heads 4 --round-s 600 --json  one swarm, one line of JSON
    python benchmarks/simulate.py --campaign 2000                 seeded schedules of every fault
    python benchmarks/simulate.py --campaign 60 --restless        small stages, hurt again and again
    python benchmarks/simulate.py --apply round_end               records wait for a round's end
    python benchmarks/simulate.py --liars [--quick]               members and bootstraps that lie

The control code is the product's; the clock, the DHT, the network, and the numbers that would be
averaged are simulated (benchmarks/simulation). Exits with 1 if tokens were not conserved, if a
chain has two records after the same one, or if a restless stage stands still at the end.

    committed          share of all rounds that ended with a record
    every head         share of the records that hold the head's tokens that is in the fewest
    a look takes       what a coordinator's step takes in a campaign's schedule; - of all

With --liars one member of each stage lies from the seventh round on, or one of one or two
bootstraps, to a swarm of five heads of which one joins later. The columns are what the others have:

    a record           how long one took, in minutes
    forks              how often a peer left its chain for another one
    lost               share of the tokens that will be in no record
    false              records of the liar's own making in one log, at most
    left               peers that went as if the run were over

It exits with 1 if a lying member had anybody take a record of its own, or leave its chain.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pool import pool
from benchmarks.report import Column, Report, parser
from benchmarks.simulation.liars import ARCHIVE_LIES, MEMBER_LIES, Lying, Who
from benchmarks.simulation.schedules import every_fifth_round, restless, schedule
from benchmarks.simulation.world import Outcome, Scenario, World
from dilocox.peer.rounds.round_end import MAX_AHEAD

HEADS = (4, 8, 32, 128)
ROUNDS_S = (60.0, 600.0, 3600.0)
ROUNDS = 20
HEAD_ROUNDS = 320  # of a cell of the table, for its time: large swarms play fewer rounds
COLUMNS = (
    Column("heads"),
    Column("round s", ".0f"),
    Column("rounds"),
    *(Column(name, ".1%") for name in ("committed", "every head")),
    Column("conserved"),
    Column("seconds", ".1f"),
)
CAMPAIGN_COLUMNS = (
    Column("records applied at"),
    Column("a look takes, s", "g"),
    Column("schedules", "d"),
    Column("rounds", "d"),
    Column("committed", ".1%"),
    Column("not sound", "d"),
)
LIAR_ROUNDS, QUICK_LIAR_ROUNDS = 14, 8
LIAR_COLUMNS = (
    *(Column(name) for name in ("who lies", "of", "how", "rounds", "committed")),
    Column("every head", ".0%"),
    Column("a record", ".2f"),
    Column("forks"),
    Column("lost", ".1%"),
    Column("false"),
    Column("left"),
)
QUICK_ROUNDS = 5
TOLD_EVERY = 100  # schedules of a campaign
LOST_ROUNDS = 20  # of 60, while a restless stage is hurt
FETCHED = 0.1  # of a round: what the archive takes for a record of theirs
ARCHIVED_BEHIND = 3  # records, that are on their way

Apply = Literal["arrival", "round_end"]


def steady(
    heads: int,
    round_s: float,
    *,
    rounds: int,
    rtt_ms: float,
    seed: int,
    slowest: float,
    faults: bool,
    apply: Apply,
) -> Scenario:
    """Heads of 1 to `slowest` seconds a step, all there from the start."""
    step_s = tuple(1 + (slowest - 1) * number / max(1, heads - 1) for number in range(heads))
    hurt = every_fifth_round(heads, round_s, rounds, random.Random(seed)) if faults else ()
    return Scenario(
        step_s=step_s,
        round_s=round_s,
        rounds=rounds,
        rtt_s=rtt_ms / 1000,
        seed=seed,
        apply=apply,
        faults=hurt,
    )


def as_json(scenario: Scenario, outcome: Outcome, seconds: float) -> str:
    """One line."""
    facts = {
        "heads": len(scenario.step_s),
        "round_s": scenario.round_s,
        "rtt_ms": scenario.rtt_s * 1000,
        "seed": scenario.seed,
        "apply": scenario.apply,
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


def sound(outcome: Outcome) -> bool:
    """Whether it kept what must never break."""
    return outcome.conserved and outcome.one_chain


def goes_on(outcome: Outcome) -> bool:
    """Whether the stage was at work at the end, and its records in the archive."""
    archived = outcome.archived >= outcome.last_rounds[0] - ARCHIVED_BEHIND
    return archived and outcome.committed >= outcome.rounds - LOST_ROUNDS


def _small(seed: int) -> Scenario:
    round_s = ROUNDS_S[seed % len(ROUNDS_S)]
    return restless(seed, round_s, fetch_s=FETCHED * round_s)


def play(scenario: Scenario) -> Outcome:
    """One schedule of a campaign."""
    logging.disable(logging.ERROR)
    return World(scenario).play()


def campaign(
    report: Report, first: int, schedules: int, apply: Apply | None, *, small: bool
) -> int:
    """Play seeded schedules, under the rule that they draw if none is given; the exit code. small:
    of small stages that are hurt again and again.
    """
    drawn = [_small(seed) if small else schedule(seed) for seed in range(first, first + schedules)]
    scenarios = [replace(each, apply=apply) if apply else each for each in drawn]
    broken: list[int] = []
    played: dict[tuple[Apply, float | None], list[int]] = {}
    began = time.monotonic()
    with pool() as processes:
        outcomes = zip(scenarios, processes.map(play, scenarios, chunksize=5), strict=True)
        for number, (scenario, outcome) in enumerate(outcomes, start=1):
            failed = not sound(outcome) or (small and not goes_on(outcome))
            if failed:
                broken.append(first + number - 1)
            for look_s in (None, scenario.tick_s):  # of all of the rule, and by what a look takes
                counts = played.setdefault((scenario.apply, look_s), [0, 0, 0, 0])
                for place, more in enumerate((1, outcome.rounds, outcome.committed, int(failed))):
                    counts[place] += more
            if number % TOLD_EVERY == 0 and number < schedules:
                seconds = time.monotonic() - began
                report.say(f"{number} schedules, {len(broken)} not sound, {seconds:.0f} s")
    rows = [
        (rule, look_s, count, rounds, committed / max(1, rounds), failed)
        for (rule, look_s), (count, rounds, committed, failed) in sorted(
            played.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1])
        )
    ]
    report.table(CAMPAIGN_COLUMNS, rows, part="restless" if small else "campaign")
    for seed in broken:
        report.say(f"seed {seed} is not sound")
    return 1 if broken else 0


def table(report: Report, arguments: argparse.Namespace) -> int:
    """Play every size of swarm with every length of round; the exit code."""
    rows: list[tuple[str | float, ...]] = []
    kept = True
    if arguments.quick:
        arguments.rounds = arguments.rounds or QUICK_ROUNDS
    sizes = [heads for heads in HEADS if heads <= arguments.up_to]
    for heads in sizes[:1] if arguments.quick else sizes:
        for round_s in ROUNDS_S[:2] if arguments.quick else ROUNDS_S:
            rounds = arguments.rounds or max(5, min(ROUNDS, HEAD_ROUNDS // heads))
            scenario = of(arguments, heads, round_s, rounds)
            began = time.monotonic()
            with report.console.status(f"{heads} heads, rounds of {round_s:.0f} s"):
                outcome = World(scenario).play()
            kept &= sound(outcome)
            shares = outcome.committed_share, outcome.every_head_share
            verdict = "yes" if sound(outcome) else "NO"
            seconds = time.monotonic() - began
            rows.append((heads, round_s, outcome.rounds, *shares, verdict, seconds))
    report.table(COLUMNS, rows, part="faults" if arguments.faults else "")
    return 0 if kept else 1


def with_liars(seed: int, rounds: int) -> dict[tuple[str, str, str], Scenario]:
    """By who lies, of how many, and how; beside each swarm the one in which nobody does."""
    found: dict[tuple[str, str, str], Scenario] = {}
    facts: dict[str, Any] = {"round_s": 60.0, "rounds": rounds, "seed": seed}
    for heads, stages in ((4, 1), (8, 2)):
        step_s = tuple(1 + number / (2 * heads) for number in range(heads))
        swarm = Scenario(step_s=step_s, stages=stages, **facts)
        of = f"{heads} a stage, {stages} of them" if stages > 1 else f"{heads}"
        found["nobody", of, ""] = swarm
        for how in MEMBER_LIES:
            found["member", of, how] = replace(swarm, lying=Lying(who="member", how=how))
        both = Lying(who="member", how="turns", members=2)
        found["two members", of, both.how] = replace(swarm, lying=both)
    joins = (0.0, 0.0, 0.0, 0.0, 60.0 * 8.5)
    swarm = Scenario(step_s=(1.0, 1.1, 1.2, 1.3, 1.4), joins=joins, **facts)
    found["nobody", "1", ""] = swarm
    bootstraps: tuple[tuple[Who, Literal[1, 2]], ...]
    bootstraps = ("bootstrap", 1), ("bootstrap", 2), ("copy", 2), ("copy alone", 2)
    for who, of in bootstraps:
        for how in ARCHIVE_LIES:
            lied_to = replace(swarm, bootstraps=of, lying=Lying(who=who, how=how))
            if how == "the end":  # stage 0 sees for itself
                lied_to = replace(lied_to, stages=2, spares=1)
            if how == "far run" and who == "bootstrap":  # who passes over so many with each record
                lied_to = replace(lied_to, rounds=(rounds - 6) * (MAX_AHEAD + 1))
            found[who, str(of), how] = lied_to
    return found


def liars(report: Report, arguments: argparse.Namespace) -> int:
    """Who lies, how, and what comes of it; the exit code."""
    usual = QUICK_LIAR_ROUNDS if arguments.quick else LIAR_ROUNDS
    scenarios = with_liars(arguments.seed, arguments.rounds or usual)
    if arguments.quick:
        kept = [each for each in scenarios if each[0] != "copy alone" and each[1] in ("4", "1")]
        scenarios = {each: scenarios[each] for each in kept}
    rows: list[tuple[Any, ...]] = []
    kept = True
    with pool() as processes, report.console.status(f"{len(scenarios)} swarms"):
        for told, outcome in zip(scenarios, processes.map(play, scenarios.values()), strict=True):
            if told[0] in ("nobody", "member"):
                kept &= sound(outcome) and not (outcome.false_records or outcome.forks)
            facts = (
                outcome.rounds,
                outcome.committed,
                outcome.every_head_share,
                outcome.seconds / 60 / max(1, outcome.committed),
                outcome.forks,
                outcome.lost_share,
                outcome.false_records,
                outcome.left,
            )
            rows.append((*told, *facts))
    report.table(LIAR_COLUMNS, rows, part="liars")
    for lies in (MEMBER_LIES, ARCHIVE_LIES):
        report.say("\n".join(f"{how}: {text}" for how, text in lies.items()))
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
        apply=arguments.apply or "arrival",
    )


def main() -> int:
    """Simulate what the arguments say."""
    made = parser(__doc__)
    made.add_argument("--heads", type=int, help="one swarm of so many heads")
    made.add_argument("--round-s", type=float, default=600.0, help="of that swarm")
    made.add_argument(
        "--rounds", type=int, help="rounds to play; 20, in the table fewer for many heads"
    )
    made.add_argument("--up-to", type=int, default=max(HEADS), help="heads, in the table")
    made.add_argument("--rtt-ms", type=float, default=200.0, help="round trip between peers")
    made.add_argument("--slowest", type=float, default=3.0, help="the slowest head's s a step")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--faults", action="store_true", help="a kill or freeze every fifth round")
    made.add_argument(
        "--apply",
        choices=("arrival", "round_end"),
        help="when a record is applied; at its arrival, in a campaign as each schedule draws it",
    )
    made.add_argument("--liars", action="store_true", help="members and bootstraps that lie")
    made.add_argument("--campaign", type=int, metavar="N", help="play N seeded schedules")
    made.add_argument(
        "--restless", action="store_true", help="a campaign of small stages, hurt again and again"
    )
    made.add_argument("--json", action="store_true", help="one line of it, which --heads prints")
    arguments = made.parse_args()
    if arguments.quick and (arguments.campaign or arguments.heads is not None):
        made.error("--quick shortens the table and --liars alone; give --campaign fewer schedules")
    logging.disable(logging.ERROR)
    if arguments.heads is not None:
        scenario = of(arguments, arguments.heads, arguments.round_s, arguments.rounds or ROUNDS)
        began = time.monotonic()
        outcome = World(scenario).play()
        sys.stdout.write(as_json(scenario, outcome, time.monotonic() - began) + "\n")
        return 0 if sound(outcome) else 1
    report = Report("simulate", arguments.out)
    if arguments.campaign:
        first, schedules, small = arguments.seed, arguments.campaign, arguments.restless
        code = campaign(report, first, schedules, arguments.apply, small=small)
    elif arguments.liars:
        code = liars(report, arguments)
    else:
        code = table(report, arguments)
    report.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
