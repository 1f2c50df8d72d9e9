"""Peers across oceans: 300 ms there and back and 5 Mbit/s, between all of them and the bootstrap.

Set FAR_LINKS_ROUNDS=6 for a look of about ten minutes; the full form takes half an hour.
"""

from __future__ import annotations

import os

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.exchange_costs import WIDE_MODEL
from tests.swarm.links import Links
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps
from tests.swarm.spans import watch_rounds

PEERS = 4
DELAY_MS, MBIT = 150.0, 5.0
STEP_S, INNER_STEPS = 0.5, 120  # rounds of a minute
ROUNDS = int(os.environ.get("FAR_LINKS_ROUNDS", "20"))
COMMITTED = 0.95
WAITING = 0.01
ROUND_LIMIT_S = 120.0


@pytest.mark.swarm
@pytest.mark.timeout(600 + ROUNDS * ROUND_LIMIT_S)
def test_far_peers_on_slow_links_commit_their_rounds_and_hardly_wait(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(
        links=Links(PEERS + 1, mbit=MBIT, delay_ms=DELAY_MS),
        in_memory=True,
        model=WIDE_MODEL,
        batch={"sequence_length": 32, "microbatch_size": 1},
        codec={"scheme": "low_rank"},
        rounds=fixed_steps(INNER_STEPS),
        deadlines=USUAL_DEADLINES,
    )
    for _ in range(PEERS):
        swarm.add_peer(step_s=STEP_S)
    span = watch_rounds(swarm, ROUNDS, limit_s=ROUND_LIMIT_S)
    print(f"\n{span}")
    swarm.assert_equal_chains()
    # of fewer rounds than 20 one may be void, too
    lost = max(1, round(ROUNDS * (1 - COMMITTED)))
    assert len(span.committed) >= ROUNDS - lost
    for account in span.accounts:
        assert account.counted >= ROUNDS - lost, f"rounds passed by without {account.name}"
        assert account.waiting < WAITING
