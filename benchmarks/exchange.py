"""What an exchange costs on slow links, beside the arithmetic: seconds, bytes, and time waited.

    python benchmarks/exchange.py [--peers 4] [--mbit 10] [--rounds 2] [--quick] [--out DIR]

For each scheme a swarm of real processes, each peer behind a link of its own (it needs Linux and
root: network namespaces), with a model of 3.4 million parameters. All values go in 4 bits. A row
has medians over peers and rounds, in kB and seconds:

    payload   what a peer's averaging streams have to carry in a round
    fp16      how many times as much a ring all-reduce of fp16 values would have sent
    streams   what it wrote into them, for each byte of payload
    exchange  from the start of the group to the decision
    least     what the bytes alone take at that rate, part after part and phase after phase
    burst     all that the peer's link sent while the round was averaged, headers and all
    link      and all that it sent in a round: heartbeats, DHT, records for the bootstrap
    waiting   the share of their time that training loops stood still
"""

from __future__ import annotations

import sys
from pathlib import Path

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from tests.swarm.exchange_costs import SCHEMES, Costs, measure
from tests.swarm.links import available

COLUMNS = (
    Column("scheme"),
    Column("rank", ".1f"),
    Column("payload", ",.0f"),
    Column("fp16", ".1f"),
    Column("streams", ".3f"),
    *(Column(name, ".2f") for name in ("exchange", "least")),
    *(Column(name, ",.0f") for name in ("burst", "link")),
    Column("waiting", ".2%"),
)


def row(name: str, costs: Costs) -> tuple[str | float | None, ...]:
    """The cells of one scheme."""
    return (
        name,
        costs.rank or None,
        costs.payload_bytes / 1e3,
        costs.fp16_bytes / costs.payload_bytes,
        costs.overhead,
        costs.exchange_s,
        costs.least_s,
        costs.burst_bytes / 1e3,
        costs.link_bytes / 1e3,
        costs.waiting,
    )


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--peers", type=int, default=4, help="peers of each swarm, 2 or more")
    made.add_argument("--mbit", type=float, default=10.0, help="of each link, both ways, Mbit/s")
    made.add_argument("--delay-ms", type=float, default=20.0, help="between two hosts, one way")
    made.add_argument("--rounds", type=int, default=2, help="rounds to measure")
    made.add_argument("--inner-steps", type=int, default=80, help="inner steps of a round")
    made.add_argument("--step-s", type=float, default=0.5, help="an inner step, in seconds")
    made.add_argument("--scheme", choices=list(SCHEMES), help="only this one")
    report, arguments = Report.parse(made, "exchange")
    if arguments.quick:
        arguments.scheme, arguments.peers, arguments.mbit = "low rank", 2, 100.0
        arguments.rounds, arguments.inner_steps, arguments.step_s = 1, 10, 0.3
    if arguments.peers < 2 or arguments.rounds < 1:
        made.error("--peers must be 2 or more, --rounds 1 or more")
    if reason := available():
        made.error(f"no links here: {reason}")
    rows: list[tuple[str | float | None, ...]] = []
    for name in [arguments.scheme] if arguments.scheme else SCHEMES:
        costs = measure(
            SCHEMES[name],
            mbit=arguments.mbit,
            delay_ms=arguments.delay_ms,
            peers=arguments.peers,
            rounds=arguments.rounds,
            inner_steps=arguments.inner_steps,
            step_s=arguments.step_s,
        )
        rows.append(row(name, costs))
    title = (
        f"{arguments.peers} peers on links of {arguments.mbit:g} Mbit/s, "
        f"{arguments.delay_ms:g} ms apart, rounds of {arguments.inner_steps * arguments.step_s:g} s"
    )
    report.table(COLUMNS, rows, title=title)
    report.close()


if __name__ == "__main__":
    main()
