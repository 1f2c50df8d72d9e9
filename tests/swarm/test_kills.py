"""Peers that are killed at any moment, twenty times: the run goes on and counts nothing twice."""

from __future__ import annotations

import random
import time

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer
from tests.swarm.small_run import fixed_steps

KILLS = 20
INNER_STEPS, STEP_S = 60, 0.05  # rounds of three seconds: each part of one is met
BACK_LIMIT_S = 90.0


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_after_twenty_kills_at_random_moments_nothing_was_counted_twice(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS))
    for _ in range(3):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(2, 120)
    moments, began = random.Random(14), time.monotonic()
    for number in range(KILLS):
        victim = swarm.peers[number % 2]
        swarm.let_pass(moments.uniform(0.0, INNER_STEPS * STEP_S))
        before = swarm.chain()
        swarm.kill(victim)
        swarm.wait_until_gone(victim)
        swarm.restart(victim)
        swarm.wait_for_counted(victim, after_round=max(before), limit_s=BACK_LIMIT_S)
    print(f"{KILLS} kills in {time.monotonic() - began:.0f} s")
    swarm.wait_for_rounds(2, 120)
    swarm.assert_equal_chains()
    for victim in swarm.peers[:2]:
        _assert_nothing_twice(victim)
        assert "continuing from the snapshot" in victim.log_text()
        print(f"{victim.name}: {victim.status['lost_tokens']} tokens lost since its last start")


def _assert_nothing_twice(peer: Peer) -> None:
    """No record holds more of a peer's tokens than it sent for it, and its books are not negative:
    a send that counted twice is missing in them.
    """
    sent = {event["round"]: event["tokens"] for event in peer.of_kind("sent")}
    for line in peer.rounds:
        if line["outcome"] == "counted":
            assert line["tokens"] <= sent[line["round"]]
    assert peer.status["lost_tokens"] >= 0
