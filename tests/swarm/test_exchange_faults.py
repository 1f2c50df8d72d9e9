"""Faults at chosen points of an exchange of two phases, on real processes: the others commit one
record or none, and the peer that was hurt comes back to their chain."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.swarm import disks
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.outcomes import comes_back, halt, newest_round, others_decide
from tests.swarm.processes import send_signal
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

INNER_STEPS, STEP_S = 60, 0.1
DEADLINES = {"exchange_s": 8.0, "vote_s": 4.0, "silence_s": 3.0}
LEFT_LIMIT_S = 60.0
DISK_BYTES = 48 << 20  # a snapshot has 5 MB
POINTS = ("between phases", "decoding", "appending")


def swarm_of_three(start_swarm: StartSwarm) -> ProcessSwarm:
    """Three peers in low rank that have committed together; the last one can be halted."""
    swarm = start_swarm(
        codec={"scheme": "low_rank", "rank": 6, "min_rank": 2},
        rounds=fixed_steps(INNER_STEPS),
        deadlines=DEADLINES,
    )
    for _ in range(2):
        swarm.add_peer(step_s=STEP_S)
    swarm.add_peer(step_s=STEP_S, halting=True)
    wait_for_common_round(swarm)
    return swarm


def wait_for_common_round(swarm: ProcessSwarm) -> None:
    """Wait for a new record that holds all three, so that each is in the group of the next."""
    swarm.look()
    known = set(swarm.chain())

    def found() -> bool:
        lines = [line for peer in swarm.peers for line in peer.rounds]
        return any(line["members"] == 3 for line in lines if line["round"] not in known)

    swarm.wait(found, 200, "a record of all three")


def test_a_peer_killed_between_the_phases_or_decoding_or_appending_leaves_one_record_or_none(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    for point in POINTS:
        number = halt(swarm, victim, point)
        hit_at = time.time()
        swarm.kill(victim)
        print(f"\nkilled {point}, round {number}")
        swarm.wait_until_gone(victim)
        chosen = {vote.digest for vote in victim.votes(number)}
        if point == "appending":
            assert chosen, "it took a record of a round in which it had not voted"
        else:  # on a busy machine its exchange may have timed out before the kill
            assert chosen <= {None}, "it voted for a record that it could not have"
        ends = others_decide(swarm, victim, number, hit_at)
        passed = newest_round(swarm)
        swarm.restart(victim)
        comes_back(swarm, victim, passed)
        assert not victim.of_kind("resynced")
        if point == "appending":
            assert ends[0]["event"] == "round"
            line = victim.record(number)
            assert line is not None
            if ends[0]["digest"] in chosen:
                assert line["outcome"] == "counted", "its send was forgotten"
        wait_for_common_round(swarm)


def test_a_peer_frozen_between_the_phases_or_decoding_or_appending_leaves_one_record_or_none(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    assert victim.halt is not None
    for point in POINTS:
        number = halt(swarm, victim, point)
        hit_at = time.time()
        frozen = victim.processes()
        send_signal(frozen, signal.SIGSTOP)
        victim.halt.release()  # it goes on where it was when it thaws
        print(f"\nfroze {point}, round {number}")
        ends = others_decide(swarm, victim, number, hit_at)
        passed = newest_round(swarm)
        send_signal(frozen, signal.SIGCONT)
        comes_back(swarm, victim, passed)
        if point == "appending":
            assert ends[0]["event"] == "round"
            line = victim.record(number)
            assert line is not None and line["outcome"] == "counted", "its send was forgotten"
        wait_for_common_round(swarm)


@pytest.mark.timeout(600)
def test_a_peer_with_another_plan_is_not_in_the_record_and_follows_it(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_three(start_swarm)
    victim = swarm.peers[2]
    number = halt(swarm, victim, "planning")
    others = swarm.peers[:2]
    swarm.wait(
        lambda: all(peer.decided(number) for peer in swarm.peers), 60, f"round {number} is decided"
    )
    for peer in others:
        line = peer.record(number)
        assert line is not None, f"void on {peer.name}: two of three could commit"
        assert (line["members"], line["outcome"]) == (2, "counted")
    swarm.wait(lambda: victim.record(number), 60, "it has followed the others' record")
    line = victim.record(number)
    assert line is not None and line["outcome"] in ("undone", "followed")
    comes_back(swarm, victim, number)


def test_a_disk_that_is_full_at_the_vote_or_at_the_record_ends_one_peer_and_no_round(
    start_swarm: StartSwarm, tmp_path: Path
) -> None:
    if reason := disks.available():
        pytest.skip(reason)
    with disks.small_disk(tmp_path / "peer-2", DISK_BYTES) as disk:
        swarm = swarm_of_three(start_swarm)
        victim = swarm.peers[2]
        assert victim.halt is not None
        try:
            for point in ("voting", "appending"):
                number = halt(swarm, victim, point)
                hit_at = time.time()
                victim.expected = False
                filler = disks.fill(disk)
                victim.halt.release()
                print(f"\nfull disk {point}, round {number}")
                ends = others_decide(swarm, victim, number, hit_at)
                assert ends[0]["event"] == "round", "two of three could commit"
                swarm.wait(
                    lambda: victim.child.returncode is not None, LEFT_LIMIT_S, "it has given up"
                )
                assert victim.child.returncode != 0
                assert "no space left on the disk" in victim.log_text()
                filler.unlink()
                passed = newest_round(swarm)
                swarm.restart(victim)
                comes_back(swarm, victim, passed)
                wait_for_common_round(swarm)
        finally:
            swarm.close()  # before its disk goes
