"""What a peer sends while its run is paused: the upkeep of the DHT, and what it tells the others.

Counted are the packets that leave a peer's host, with their headers: what its line carries. What
its daemon writes, which is what a month's traffic is reckoned by, is printed beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.links import Links
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps

PEERS = 8
STEP_S, INNER_STEPS = 0.5, 40
MOST_BYTES_PER_S = 5000.0
START_LIMIT_S = 300.0
SETTLE_S, WATCH_S = 60.0, 120.0
PAUSED = "the operator has paused the run"


def read(swarm: ProcessSwarm, links: Links) -> tuple[float, list[int], list[int]]:
    """Now, and by peer: bytes that left its host, and those that its p2pd wrote."""
    sent = [links.counters(swarm.host(peer)).sent_bytes for peer in swarm.peers]
    return time.monotonic(), sent, [peer.p2pd().written_bytes for peer in swarm.peers]


def rates(first: Sequence[int], last: Sequence[int], seconds: float) -> list[float]:
    """Bytes a second of each peer."""
    return [(after - before) / seconds for before, after in zip(first, last, strict=True)]


def shown(rates: Sequence[float]) -> str:
    """In kB/s."""
    return ", ".join(f"{rate / 1e3:.1f}" for rate in rates)


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_eight_peers_at_rest_send_little(start_swarm: StartSwarm) -> None:
    links = Links(PEERS + 1)
    swarm = start_swarm(links=links, rounds=fixed_steps(INNER_STEPS), deadlines=USUAL_DEADLINES)
    for _ in range(PEERS):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait(
        lambda: any(line["members"] == PEERS for peer in swarm.peers for line in peer.rounds),
        START_LIMIT_S,
        "a record of all of them",
    )
    swarm.operate("pause")
    swarm.wait(
        lambda: all(
            peer.status["blocked"] == PAUSED and peer.status["in_flight"] is None
            for peer in swarm.peers
        ),
        START_LIMIT_S,
        "all are at rest",
    )
    swarm.let_pass(SETTLE_S)
    began, sent_before, written_before = read(swarm, links)
    swarm.let_pass(WATCH_S)
    ended, sent, written = read(swarm, links)
    on_links = rates(sent_before, sent, ended - began)
    by_daemons = rates(written_before, written, ended - began)
    print(
        f"\n{PEERS} peers at rest send {shown(on_links)} kB/s in packets; "
        f"their daemons write {shown(by_daemons)} kB/s"
    )
    assert max(on_links) < MOST_BYTES_PER_S
