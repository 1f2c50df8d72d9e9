"""Twelve real peers in groups of four: ten equal records, then a reducer that is killed, and one
that is frozen, in the middle of an exchange."""

from __future__ import annotations

import signal

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.outcomes import comes_back, halt, newest_round
from tests.swarm.processes import send_signal
from tests.swarm.small_run import fixed_steps

PEERS, GROUP_SIZE, ROUNDS = 12, 4, 10
INNER_STEPS, STEP_S = 30, 0.6  # sixty processes on two cores
DEADLINES = {
    "heartbeat_s": 5.0,
    "silence_s": 6.0,
    "matchmaking_s": 4.0,
    "exchange_s": 20.0,
    "vote_s": 8.0,
}
START_LIMIT_S, ROUND_LIMIT_S = 400.0, 120.0


@pytest.mark.swarm
@pytest.mark.timeout(2400)
def test_twelve_peers_in_groups_of_four_agree_and_lose_a_reducer_at_the_cost_of_one_attempt(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(
        in_memory=True,
        rounds=fixed_steps(INNER_STEPS) | {"group_size": GROUP_SIZE},
        data={"held_out_windows": 2, "validation_share": 0.005},
        deadlines=DEADLINES,
    )
    for number in range(PEERS):
        swarm.add_peer(step_s=STEP_S, halting=number < 2)
    began = wait_for_all(swarm, START_LIMIT_S)
    swarm.wait(
        lambda: len(rounds_of_all(swarm, began)) >= ROUNDS,
        ROUNDS * ROUND_LIMIT_S,
        f"{ROUNDS} records of all {PEERS}",
    )
    swarm.assert_equal_chains()
    record = swarm.round_log(swarm.peers[-1]).read(rounds_of_all(swarm, began)[-1])
    assert record is not None
    names = {member.peer for member in record.members}
    assert all(set(part.contributors) == names for part in record.parts)
    assert len({part.reducer for part in record.parts}) == PEERS, "no grid of three rows"
    voids = sum(len(peer.of_kind("void")) for peer in swarm.peers)
    print(f"\nrounds {rounds_of_all(swarm, began)}, voids {voids}")
    for victim, hurt in zip(swarm.peers[:2], (signal.SIGKILL, signal.SIGSTOP), strict=True):
        number = halt(swarm, victim, "decoding")
        frozen = victim.processes()
        victim.expected = False
        if hurt is signal.SIGKILL:
            swarm.kill(victim)
        else:
            send_signal(frozen, hurt)
        assert victim.halt is not None
        victim.halt.release()
        others = [peer for peer in swarm.peers if peer is not victim and peer.expected]
        swarm.wait(
            lambda number=number, others=others: all(peer.decided(number) for peer in others),
            2 * ROUND_LIMIT_S,
            f"round {number} is decided",
        )
        lines = [peer.record(number) for peer in others]
        assert all(lines), f"round {number} is void on some: more than one attempt was lost"
        print(f"{hurt.name} in round {number}: {[line and line['members'] for line in lines]}")
        assert {line["digest"] for line in lines if line} and len(others) >= PEERS - 2
        passed = newest_round(swarm)
        if hurt is signal.SIGSTOP:
            send_signal(frozen, signal.SIGCONT)
            victim.expected = True
        else:
            swarm.wait_until_gone(victim)
            swarm.restart(victim)
        comes_back(swarm, victim, passed)
    swarm.assert_equal_chains()


def wait_for_all(swarm: ProcessSwarm, limit_s: float) -> int:
    """The first round whose record holds all peers."""
    return swarm.wait(lambda: rounds_of_all(swarm, -1), limit_s, "a record of all")[0]


def rounds_of_all(swarm: ProcessSwarm, after: int) -> list[int]:
    """The rounds after this one whose record holds all peers, as the last peer reports them."""
    last: Peer = swarm.peers[-1]
    return [
        line["round"] for line in last.rounds if line["members"] == PEERS and line["round"] > after
    ]
