"""A run that takes only the peers that its operator admits."""

from __future__ import annotations

import time

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.outcomes import newest_round
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(420)]

INNER_STEPS, STEP_S = 40, 0.05
END_LIMIT_S, TOGETHER_LIMIT_S = 60.0, 120.0


def ends_unadmitted(swarm: ProcessSwarm, peer: Peer) -> None:
    """It ends by itself, and tells its volunteer what to ask for."""
    began = time.monotonic()
    swarm.wait(lambda: peer.child.returncode is not None, END_LIMIT_S, f"{peer.name} has ended")
    print(f"{peer.name} ended after {time.monotonic() - began:.1f} s: {peer.child.last_line()}")
    assert peer.child.returncode == 2
    assert f"ask for `dilocox operate admit {peer.peer_id}`" in peer.log_text()


def members_since(swarm: ProcessSwarm, peer: Peer, round_number: int) -> list[set[str]]:
    """Whom the records that a peer keeps name, of the rounds after one."""
    headers = [entry.header() for entry in swarm.round_log(peer).entries()]
    return [
        {member.peer for member in record.members}
        for record in headers
        if record is not None and record.round > round_number
    ]


def wait_for_a_record_of(swarm: ProcessSwarm, *wanted: Peer) -> None:
    """Wait for a new record whose members are these and nobody else."""
    began, before = time.monotonic(), max(swarm.chain(), default=-1)
    names = {peer.peer_id for peer in wanted}
    swarm.wait(
        lambda: names in members_since(swarm, wanted[0], before),
        TOGETHER_LIMIT_S,
        f"a record of {', '.join(peer.name for peer in wanted)}",
    )
    print(f"{len(wanted)} are together after {time.monotonic() - began:.1f} s")


def test_in_a_listed_run_those_who_are_admitted_train_and_nobody_hears_another_one(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(admission="listed", rounds=fixed_steps(INNER_STEPS))
    first, second = (swarm.add_peer(step_s=STEP_S) for _ in range(2))
    first.expected = second.expected = False
    for peer in (first, second):
        ends_unadmitted(swarm, peer)
    said = swarm.operate("admit", first.peer_id, second.peer_id, "--days", "1")
    assert said.count("is admitted until") == 2
    for peer in (first, second):
        swarm.restart(peer)
    swarm.wait_for_rounds(1, TOGETHER_LIMIT_S)
    wait_for_a_record_of(swarm, first, second)

    intruder = swarm.add_peer(step_s=STEP_S, lies="intrudes")
    before = newest_round(swarm)
    swarm.wait(lambda: intruder.doing == "training", TOGETHER_LIMIT_S, "it trains by itself")
    swarm.wait_for_rounds(4, TOGETHER_LIMIT_S, of=[first, second])
    together = members_since(swarm, first, before)
    print(f"with the intruder: {[len(each) for each in together]} members")
    assert len(together) >= 4
    assert all(each <= {first.peer_id, second.peer_id} for each in together)
    assert sum(len(each) == 2 for each in together) >= len(together) - 1, "it stopped exchanges"

    swarm.operate("admit", intruder.peer_id)
    wait_for_a_record_of(swarm, first, second, intruder)
    second.expected = False
    assert "from now on the operator's key is" in swarm.operate("rotate")
    swarm.operate("revoke", second.peer_id)  # signed with the new one
    ends_unadmitted(swarm, second)
    wait_for_a_record_of(swarm, first, intruder)
    assert second.peer_id not in swarm.operate("admitted")
