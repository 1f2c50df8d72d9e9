"""On lines of a home, peers of 3.4 million parameters compute nearly all of the time."""

from __future__ import annotations

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.exchange_costs import WIDE_MODEL
from tests.swarm.links import Links
from tests.swarm.small_run import USUAL_DEADLINES
from tests.swarm.spans import Span, watch_rounds

pytestmark = pytest.mark.swarm

ROUNDS = 10
ROUND_LIMIT_S = 240.0  # H may grow to 440
COMPUTING = 0.975


def ten_rounds(start_swarm: StartSwarm, *, mbit: float, codec: dict[str, object]) -> Span:
    """Two peers, their steps as fast as the machine is and H as the records say."""
    swarm = start_swarm(
        links=Links(3, mbit=mbit, delay_ms=20),
        in_memory=True,
        model=WIDE_MODEL,
        data={"source": "stdlib", "parts": 8, "held_out_windows": 64, "validation_share": 0.005},
        batch={"sequence_length": 128, "microbatch_size": 4},
        codec=codec,
        rounds={"inner_steps": 110},
        deadlines=USUAL_DEADLINES,
    )
    for _ in range(2):
        swarm.add_peer(shown_s=0.0)
    span = watch_rounds(swarm, ROUNDS, limit_s=ROUND_LIMIT_S)
    steps = [line["inner_steps"] for line in swarm.peers[0].rounds]
    print(f"\n{mbit:g} Mbit/s, {codec}: {steps} inner steps a round\n{span}")
    swarm.assert_equal_chains()
    return span


@pytest.mark.timeout(600 + ROUNDS * ROUND_LIMIT_S)
def test_peers_at_ten_mbit_compute_nearly_all_of_the_time(start_swarm: StartSwarm) -> None:
    span = ten_rounds(start_swarm, mbit=10.0, codec={"scheme": "low_rank"})
    assert len(span.committed) == ROUNDS
    for account in span.accounts:
        assert account.computing >= COMPUTING, "by the peer's own account"
        assert account.stepping is not None and account.stepping >= COMPUTING, "by its inner steps"


@pytest.mark.timeout(600 + ROUNDS * ROUND_LIMIT_S)
def test_peers_at_one_mbit_with_dense_means_commit_nine_of_ten_rounds(
    start_swarm: StartSwarm,
) -> None:
    span = ten_rounds(start_swarm, mbit=1.0, codec={"scheme": "dense", "bits": 4})
    assert len(span.committed) >= ROUNDS - 1
