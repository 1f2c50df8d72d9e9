"""Peers that are killed at any moment, twenty times: the run goes on and counts nothing twice."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer
from tests.swarm.small_run import fixed_steps

KILLS = 20
INNER_STEPS, PACE_S = 50, 0.02  # rounds of some four seconds: each part of one is met
ROUND_S = 4.0
BACK_LIMIT_S = 90.0


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_after_twenty_kills_at_random_moments_nothing_was_counted_twice(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS))
    for _ in range(3):
        swarm.add_peer(shown_s=PACE_S)
    swarm.wait_for_rounds(2, 120)
    moments, began = random.Random(14), time.monotonic()
    killed_at: dict[str, list[float]] = {peer.name: [] for peer in swarm.peers}
    for number in range(KILLS):
        victim = swarm.peers[number % 2]
        swarm.let_pass(moments.uniform(0.0, ROUND_S))
        before = swarm.chain()
        swarm.kill(victim)
        killed_at[victim.name].append(time.time())
        swarm.wait_until_gone(victim)
        swarm.restart(victim)
        swarm.wait_for_counted(victim, after_round=max(before), limit_s=BACK_LIMIT_S)
    print(f"{KILLS} kills in {time.monotonic() - began:.0f} s")
    swarm.wait_for_rounds(2, 120)
    swarm.assert_equal_chains()
    for peer in swarm.peers:
        _assert_nothing_twice(
            peer, swarm.manifest.batch.tokens_per_step, killed_at[peer.name], swarm.chain()
        )


def _assert_nothing_twice(
    peer: Peer, tokens_per_step: int, killed_at: list[float], chain: Mapping[int, object]
) -> None:
    """Each send that a record counts holds no more than the inner steps since the last such send.

    A peer that was killed before it could tell of a send had made it by then.
    """
    assert peer.shown is not None
    peer.look()
    sends = {event["round"]: event for event in peer.of_kind("sent")}
    lines = {line["round"]: line for line in peer.rounds if line["outcome"] == "counted"}
    assert lines.keys() <= chain.keys()
    since, untold = 0.0, 0
    for number in sorted(lines):
        send = sends.get(number)
        if send is None:
            untold += 1
            later = [event["time"] for n, event in sends.items() if n > number]
            since = max(at for at in killed_at if at < min(later, default=time.time()))
            continue
        steps = sum(since < at <= send["time"] for at in peer.shown.steps)
        assert lines[number]["tokens"] <= send["tokens"] <= tokens_per_step * steps, number
        since = send["time"]
    print(f"{peer.name}: {len(lines)} sends counted, of {untold} it could not tell")
