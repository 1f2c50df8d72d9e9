"""What a peer three times slower costs the others: rounds per minute with and without it.

    python benchmarks/slow_peer.py [--rounds 8] [--merge rebase] [--quick] [--out DIR]

Two swarms of real processes on this machine, one after the other: of equal peers, and with one peer
whose inner steps take three times as long. All are bound by sleeps and not by the cores: a step
lasts at least --step-s. One row per swarm: `rounds/min` from the first committed round to the last,
`weight` the share of the last peer (the slow one) in the records' tokens, `its rounds` in how many
of the records it is, `waiting` the share of time that the fast peers' training loops waited.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.small_run import run_manifest

START_LIMIT_S = 180.0
ROUND_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one swarm did."""

    rounds_per_minute: float
    weight: float
    rounds: int
    its_rounds: int
    waiting: float


def measure(arguments: argparse.Namespace, slowdown: float) -> Figures:
    """Run one swarm; the last peer's steps take `slowdown` times as long."""
    manifest = run_manifest(
        rounds={"inner_steps": arguments.inner_steps}, outer={"merge": arguments.merge}
    )
    with tempfile.TemporaryDirectory() as folder:
        swarm = ProcessSwarm(Path(folder), manifest)
        try:
            fast = [swarm.add_peer(step_s=arguments.step_s) for _ in range(arguments.peers - 1)]
            last = swarm.add_peer(step_s=arguments.step_s * slowdown)
            peers = [*fast, last]
            swarm.wait(
                lambda: all(peer.of_kind("training") for peer in peers),
                START_LIMIT_S,
                "all peers train",
            )
            first = max(peer.status["round"] for peer in peers) + 1  # the first with all of them
            swarm.wait(
                lambda: all(len(_since(peer, first)) > arguments.rounds for peer in peers),
                START_LIMIT_S + ROUND_LIMIT_S * arguments.rounds,
                f"{arguments.rounds} rounds",
            )
            swarm.assert_equal_chains()
            return _figures(fast[0], last, first, arguments.rounds)
        finally:
            swarm.close()


def _since(peer: Peer, first: int) -> list[dict[str, float]]:
    return [line for line in peer.rounds if line["round"] >= first]


def _figures(fast: Peer, last: Peer, first: int, rounds: int) -> Figures:
    lines = _since(fast, first)[: rounds + 1]
    numbers = {line["round"] for line in lines[1:]}
    own = [line for line in last.rounds if line["round"] in numbers]
    seconds = lines[-1]["time"] - lines[0]["time"]
    return Figures(
        rounds_per_minute=60 * rounds / seconds,
        weight=statistics.fmean(line["tokens"] / line["record_tokens"] for line in own),
        rounds=rounds,
        its_rounds=sum(line["tokens"] > 0 for line in own),
        waiting=statistics.fmean(line["waiting_share"] for line in lines[1:]),
    )


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--peers", type=int, default=3, help="peers of each swarm, 2 or more")
    made.add_argument("--rounds", type=int, default=8, help="rounds to measure")
    made.add_argument("--inner-steps", type=int, default=60, help="inner steps of a round")
    made.add_argument("--step-s", type=float, default=0.15, help="a fast inner step, in seconds")
    made.add_argument("--slowdown", type=float, default=3.0, help="of the slow peer's steps")
    made.add_argument("--merge", default="rebase", help="rebase, reset or none")
    report, arguments = Report.parse(made, "slow-peer")
    if arguments.quick:
        arguments.peers, arguments.rounds = 2, 1
        arguments.inner_steps, arguments.step_s = 20, 0.05
    if arguments.peers < 2 or arguments.rounds < 1:
        made.error("--peers must be 2 or more, --rounds 1 or more")
    slowdowns = {"equal peers": 1.0, "one slower": arguments.slowdown}
    if arguments.quick:
        del slowdowns["equal peers"]
    found = {name: measure(arguments, slowdown) for name, slowdown in slowdowns.items()}
    rows = [
        (name, e.rounds_per_minute, e.weight, f"{e.its_rounds} of {e.rounds}", e.waiting)
        for name, e in found.items()
    ]
    columns = [
        Column("swarm"),
        Column("rounds/min", ".2f"),
        Column("weight", ".1%"),
        Column("its rounds"),
        Column("waiting", ".1%"),
    ]
    title = (
        f"{arguments.peers} peers, {arguments.inner_steps} inner steps of "
        f"{arguments.step_s:g} s, {arguments.merge}"
    )
    report.table(columns, rows, title=title)
    if not arguments.quick:
        equal, slower = (each.rounds_per_minute for each in found.values())
        report.say(f"with the slower peer: {slower / equal - 1:+.1%} rounds a minute")
    report.close()


if __name__ == "__main__":
    main()
