"""A volunteer's peer rests: paused while it trains, outside its hours, with its traffic used up."""

from __future__ import annotations

import time

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

ROUNDS_LIMIT_S = 120.0
LEAVE_LIMIT_S = 30.0
ALLOWED_BYTES = 2e6  # a peer comes, trains a few rounds and goes


def test_a_paused_peer_leaves_the_swarm_to_the_others_and_contributes_again_once_resumed(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=fixed_steps(60))
    other, paused = [swarm.add_peer() for _ in range(2)]
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S)
    pid, began = paused.child.pid, time.time()
    swarm.run_command("pause", "--state", str(paused.state), limit_s=20)
    swarm.wait(lambda: paused.doing == "resting", LEAVE_LIMIT_S, "it rests")
    print(f"rests {time.time() - began:.1f} s after it was paused")
    swarm.wait(lambda: len(paused.processes()) == 1, LEAVE_LIMIT_S, "it holds nothing")
    assert paused.child.pid == pid
    assert paused.status["resting"].startswith("paused") and paused.status["resumes_at"] is None
    swarm.wait_for_rounds(3, ROUNDS_LIMIT_S, of=[other])
    assert other.rounds[-1]["members"] == 1
    last = max(swarm.chain())

    said = swarm.run_command(
        *("generate", swarm.invite, "def ", "--tokens", "20", "--temperature", "0"),
        *("--host", "127.0.0.1"),
        limit_s=60,
    )
    # after what it says of its way to the weights; the text may have several lines
    text = said.partition("\ndef ")[2].removesuffix("\n")
    print(repr(text))
    assert text, said

    began = time.time()
    swarm.run_command("resume", "--state", str(paused.state), limit_s=20)
    line = swarm.wait_for_counted(paused, after_round=last, limit_s=ROUNDS_LIMIT_S)
    print(f"in round {line['round']} {time.time() - began:.1f} s after it was resumed")
    assert paused.child.pid == pid and line["members"] == 2
    swarm.assert_equal_chains()


def test_a_peer_rests_outside_its_hours_and_once_its_months_traffic_is_used_up(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=fixed_steps(60))
    hour = time.localtime().tm_hour
    # neither this hour nor the next one, should it strike meanwhile
    sleeper = swarm.add_peer("--hours", f"{(hour + 3) % 24}-{(hour + 4) % 24}")
    frugal = swarm.add_peer("--monthly-traffic", str(ALLOWED_BYTES / 1e9))
    other = swarm.add_peer()
    swarm.wait(
        lambda: "resting: outside" in sleeper.log_text(), ROUNDS_LIMIT_S, "one rests from its start"
    )
    swarm.wait_for_counted(frugal, after_round=-1, limit_s=ROUNDS_LIMIT_S)
    swarm.wait(lambda: frugal.doing == "resting", ROUNDS_LIMIT_S, "one has used up its traffic")
    print(frugal.status["resting"])
    assert "month" in frugal.status["resting"]
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S, of=[other])
    assert other.rounds[-1]["members"] == 1 and not sleeper.rounds
    swarm.kill(frugal)
    swarm.wait_until_gone(frugal)
    swarm.restart(frugal)
    swarm.wait(lambda: "resting: 0.00" in frugal.log_text(), ROUNDS_LIMIT_S, "it rests again")
