"""What an exchange costs on slow links, beside the arithmetic: seconds, bytes, and time waited.

    python benchmarks/exchange.py [--peers 4] [--mbit 10] [--rounds 2]

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

import argparse
import sys
from pathlib import Path

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import narrow
from dilocox.peer.os_process import wide_console
from tests.swarm.exchange_costs import SCHEMES, Costs, measure
from tests.swarm.links import available


def row(name: str, costs: Costs) -> list[str]:
    """The cells of one scheme."""
    return [
        name,
        f"{costs.rank:.1f}" if costs.rank else "-",
        f"{costs.payload_bytes / 1e3:,.0f}",
        f"{costs.fp16_bytes / costs.payload_bytes:.1f}",
        f"{costs.overhead:.3f}",
        f"{costs.exchange_s:.2f}",
        f"{costs.least_s:.2f}",
        f"{costs.burst_bytes / 1e3:,.0f}",
        f"{costs.link_bytes / 1e3:,.0f}",
        f"{costs.waiting:.2%}",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--peers", type=int, default=4, help="peers of each swarm, 2 or more")
    parser.add_argument("--mbit", type=float, default=10.0, help="of each link, both ways, Mbit/s")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="between two hosts, one way")
    parser.add_argument("--rounds", type=int, default=2, help="rounds to measure")
    parser.add_argument("--inner-steps", type=int, default=80, help="inner steps of a round")
    parser.add_argument("--step-s", type=float, default=0.5, help="an inner step, in seconds")
    parser.add_argument("--scheme", choices=list(SCHEMES), help="only this one")
    arguments = parser.parse_args()
    if arguments.peers < 2 or arguments.rounds < 1:
        parser.error("--peers must be 2 or more, --rounds 1 or more")
    if reason := available():
        parser.error(f"no links here: {reason}")
    console = wide_console()
    table = narrow(
        f"{arguments.peers} peers on links of {arguments.mbit:g} Mbit/s, "
        f"{arguments.delay_ms:g} ms apart, rounds of {arguments.inner_steps * arguments.step_s:g} s"
    )
    table.add_column("scheme")
    headings = ("rank", "payload", "fp16", "streams", "exchange", "least", "burst", "link")
    for heading in (*headings, "waiting"):
        table.add_column(heading, justify="right")
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
        table.add_row(*row(name, costs))
    console.print(table)


if __name__ == "__main__":
    main()
