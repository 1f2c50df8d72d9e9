"""A peer dies or freezes in the middle of an exchange: the others decide the round and train on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.outcomes import comes_back, newest_round, others_decide
from tests.swarm.processes import send_signal
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

# 16 bits of 131 thousand values: a peer sends 350 kB a round, in about four seconds. Rounds must be
# longer than that, or peers skip some: twelve seconds, whatever the machine's speed.
UPLOAD = ("--max-upload", "0.09")
IN_THE_MIDDLE_BYTES = 120_000
INNER_STEPS, STEP_S = 120, 0.1
AIM_LIMIT_S = 120.0
STOPPED_S = 60.0  # three times the limit for detecting a frozen peer


def swarm_of_three(start_swarm: StartSwarm) -> ProcessSwarm:
    """Three peers with slow uploads that have committed together."""
    swarm = start_swarm(
        codec={"bits": 16},
        rounds=fixed_steps(INNER_STEPS),
        deadlines={"exchange_s": 15.0, "vote_s": 5.0},
    )
    for _ in range(3):
        swarm.add_peer(*UPLOAD, step_s=STEP_S)
    swarm.wait_for_rounds(2, 200)
    assert any(line["members"] == 3 for line in swarm.peers[0].rounds)
    return swarm


def wait_for_mid_exchange(swarm: ProcessSwarm, victim: Peer) -> int:
    """Wait until all peers have sent a third of their bytes of a round; the round."""
    averagers = [peer.averager() for peer in swarm.peers]
    before: dict[int, list[int]] = {}

    def aimed() -> tuple[int] | None:
        number = victim.in_flight
        if number is None or not all(peer.in_flight == number for peer in swarm.peers):
            return None
        written = [averager.written_bytes for averager in averagers]
        first = before.setdefault(number, written)
        sent = [now - then for now, then in zip(written, first, strict=True)]
        voted = any(peer.voted(number) for peer in swarm.peers)
        return (number,) if min(sent) > IN_THE_MIDDLE_BYTES and not voted else None

    return swarm.wait(aimed, AIM_LIMIT_S, "an exchange of all three is in its middle")[0]


def assert_in_the_middle(swarm: ProcessSwarm, number: int) -> None:
    """Nobody has voted: the fault met the exchange itself."""
    voted = [peer.name for peer in swarm.peers if peer.voted(number)]
    assert not voted, f"round {number}: {voted} had voted before the fault"


@pytest.mark.faults
def test_a_peer_killed_in_mid_exchange_is_left_out_and_resumes_from_its_snapshot(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    number = wait_for_mid_exchange(swarm, victim)
    hit_at = time.time()
    swarm.kill(victim)
    assert_in_the_middle(swarm, number)
    gone_s = swarm.wait_until_gone(victim)
    print(f"killed in round {number}; all its processes were gone {gone_s:.1f} s later")
    others_decide(swarm, victim, number, hit_at)
    swarm.restart(victim)
    comes_back(swarm, victim, newest_round(swarm))
    assert "continuing from the snapshot" in victim.log_text()


def test_a_peer_frozen_in_mid_exchange_is_left_out_and_catches_up_when_it_thaws(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    number = wait_for_mid_exchange(swarm, victim)
    hit_at = time.time()
    frozen = victim.processes()
    send_signal(frozen, signal.SIGSTOP)
    assert_in_the_middle(swarm, number)
    print(f"froze {', '.join(process.name for process in frozen)} in round {number}")
    others_decide(swarm, victim, number, hit_at)
    swarm.wait(lambda: time.time() - hit_at >= STOPPED_S, STOPPED_S, "three detection limits")
    passed = newest_round(swarm)
    send_signal(frozen, signal.SIGCONT)
    comes_back(swarm, victim, passed)
    assert victim.rounds[-1]["round"] > passed


def test_a_peer_whose_p2pd_is_killed_in_mid_exchange_starts_itself_again(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    began = victim.of_kind("training")[0]["time"]
    swarm.wait(lambda: time.time() - began > 20.0, 60, "it has run long enough to start again")
    number = wait_for_mid_exchange(swarm, victim)
    hit_at = time.time()
    os.kill(victim.p2pd().pid, signal.SIGKILL)
    assert_in_the_middle(swarm, number)
    others_decide(swarm, victim, number, hit_at)
    comes_back(swarm, victim, newest_round(swarm))
    assert "restarting from the snapshot" in victim.log_text()
    assert len(victim.of_kind("training")) == 2


@pytest.mark.faults
def test_peers_of_a_later_stage_that_lost_step_meet_again(start_swarm: StartSwarm) -> None:
    """Rounds much shorter than the search for a group that nobody comes to: their heads' stage
    commits all of them, while these two sent in turns, each into an empty room.
    """
    swarm = start_swarm(stages=2)
    for number in range(4):
        swarm.add_peer(stage=number % 2)
    swarm.wait_for_rounds(2, 200)
    victim = swarm.of_stage(1)[0]
    for seconds in (6.0, 7.5):
        send_signal([victim.averager()], signal.SIGSTOP)
        swarm.let_pass(seconds)
        send_signal([victim.averager()], signal.SIGCONT)
        before = len(victim.of_kind("void"))
        swarm.wait_for_rounds(3, 60)
        assert len(victim.of_kind("void")) - before <= 2
