"""How long members look for each other before an exchange, and how many bytes they send for it.

Real averaging processes on loopback, each with a DHT process and a p2pd of its own; every member
calls a little after the one before it, as far ahead of the group's time as a driver does. Printed
are the medians over the rounds: seconds from a member's call to its group, the seconds that were
left to the group's time, and what all p2pd together sent meanwhile, a member (socket_bytes.py).

    python benchmarks/matchmaking.py [--quick] [--out DIR]
    python benchmarks/matchmaking.py --members 4 --ahead-s 5 --spread-s 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import socket_bytes
from benchmarks.report import Column, Report, parser
from benchmarks.socket_bytes import Members, Sought
from dilocox.compression.layout import FlatLayout
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest

NUMEL = 4096
COLUMNS = (
    Column("members"),
    *(Column(f" {name}", ".2f") for name in ("call to group, s", "longest", "left to its time")),
    Column(" kB a member", ".1f"),
    Column(" groups"),
)
MODEL = {"name": "matchmaking", "model": "tiny", "end_tokens": 10**9}


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--ahead-s", type=float, default=3.0, help="of the group's time")
    made.add_argument("--spread-s", type=float, default=0.3, help="first to last call")
    made.add_argument("--settle-s", type=float, default=5.0)
    report, arguments = Report.parse(made, "matchmaking")
    if arguments.quick:
        arguments.members, arguments.rounds = [2], 2
    if reason := socket_bytes.available():
        raise SystemExit(reason)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes work so only
    rows: list[tuple[Any, ...]] = []
    for count in arguments.members:
        with report.console.status(f"{count} members"):
            rows.append((count, *figures(searched(count, arguments))))
    report.table(COLUMNS, rows)
    seconds = [(count, median) for count, median, *_ in rows]
    report.plot("members", "s from a call to its group", {"median": seconds})
    report.close()


def searched(count: int, arguments: argparse.Namespace) -> list[Sought]:
    """The searches of so many members."""
    manifest = Manifest.from_dict(MODEL | {"codec": {"scheme": "dense"}})
    layout = FlatLayout.of([("weights", (NUMEL,))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identities = [Identity.load_or_create(folder / f"{index}.key") for index in range(count)]
        with Members(folder, identities, layout) as members:
            time.sleep(arguments.settle_s)  # nodes still meet each other after their start
            return members.searches(
                manifest,
                rounds=arguments.rounds,
                ahead_s=arguments.ahead_s,
                spread_s=arguments.spread_s,
            )


def figures(found: list[Sought]) -> tuple[Any, ...]:
    """A row of the table."""
    waits = [seconds for each in found for seconds in each.seconds]
    members = len(found[0].seconds)
    sent = statistics.median(each.sent_bytes / members for each in found)
    whole = sum(each.together == members for each in found)
    return (
        statistics.median(waits),
        max(waits),
        statistics.median(each.left_s for each in found),
        sent / 1000,
        f"{whole} of {len(found)} whole",
    )


if __name__ == "__main__":
    main()
