"""A peer three times slower than the others takes part with what it has, and delays nobody."""

from __future__ import annotations

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.small_run import fixed_steps

INNER_STEPS = 40
FAST_S, SLOW_S = 0.15, 0.45
ROUNDS = 4


@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_a_slow_peer_is_in_every_round_with_its_own_weight(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS))
    fast = [swarm.add_peer(step_s=FAST_S) for _ in range(2)]
    slow = swarm.add_peer(step_s=SLOW_S)
    first = swarm.wait_until_all_train(120)

    def whole_rounds() -> list[int]:
        """The rounds that began when all three were there."""
        return [number for number in sorted(swarm.chain()) if number > first]

    swarm.wait(
        lambda: sum(all(p.record(n) for p in swarm.peers) for n in whole_rounds()) >= ROUNDS,
        200,
        f"{ROUNDS} whole rounds on all peers",
    )
    swarm.assert_equal_chains()
    for number in whole_rounds()[:ROUNDS]:
        slow_line, *fast_lines = (peer.record(number) for peer in (slow, *fast))
        assert slow_line
        assert slow_line["outcome"] == "counted", f"round {number}: the slow peer is not in it"
        tokens = slow_line["tokens"]
        for line in fast_lines:
            assert line
            assert line["inner_steps"] >= INNER_STEPS
            tokens += line["tokens"]
            assert 0.2 < slow_line["tokens"] / line["tokens"] < 0.5
        assert tokens == slow_line["record_tokens"]
        shares = [slow_line["tokens"] / tokens, slow_line["inner_steps"]]
        print(f"round {number}: the slow peer has {shares[0]:.0%} of the weight, {shares[1]} steps")
