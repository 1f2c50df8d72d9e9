"""Peers come late, leave, are killed, and come back: the others go on, and nothing is left."""

from __future__ import annotations

import time

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

JOIN_LIMIT_S = 120.0


def archive_begins_later(swarm: ProcessSwarm) -> bool:
    """Whether the archive of stage 0 has given up its first generation, of the initial weights."""
    (folder,) = (swarm.folder / "bootstrap").glob("*-archive-*/stage0")
    return not (folder / "00000000").exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("by", "kept"), [("records", {}), ("a state", {"records_kept": 2, "log_bytes": 0})]
)
def test_a_joiner_gets_what_it_missed_and_contributes(
    start_swarm: StartSwarm, by: str, kept: dict[str, int]
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 100, **kept})
    for _ in range(2):
        swarm.add_peer()
    swarm.wait_for_rounds(6, 200)
    if by == "a state":  # nobody has the first records any more, the bootstrap's archive neither
        swarm.wait(lambda: archive_begins_later(swarm), 300, "the archive begins at a state")
    began, first = time.time(), max(swarm.chain())
    joiner = swarm.add_peer()
    line = swarm.wait_for_counted(joiner, after_round=first, limit_s=JOIN_LIMIT_S)
    print(f"by {by}: in round {line['round']} {time.time() - began:.1f} s after its start")
    assert bool(joiner.of_kind("resynced")) == (by == "a state")
    swarm.wait_for_rounds(2, 60)
    swarm.assert_equal_chains()


def test_a_peer_that_is_told_to_leave_leaves_cleanly_and_the_others_go_on(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 100})
    leaver, *others = [swarm.add_peer() for _ in range(3)]
    swarm.wait_for_rounds(2, 200)
    began = time.time()
    assert swarm.terminate(leaver) == 0
    print(f"left {time.time() - began:.1f} s after SIGTERM")
    swarm.wait_until_gone(leaver)
    swarm.wait_for_rounds(3, 120, of=others)
    swarm.assert_equal_chains()
    assert others[0].rounds[-1]["members"] == 2


def test_nothing_of_killed_peers_is_left_and_one_that_comes_back_commits_alone(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 100})
    peers = [swarm.add_peer() for _ in range(2)]
    swarm.wait_for_rounds(2, 200)
    for peer in peers:
        swarm.kill(peer)
        print(f"{peer.name} was gone {swarm.wait_until_gone(peer):.1f} s after SIGKILL")
    swarm.look()
    last = max(swarm.chain())
    began = time.time()
    swarm.restart(peers[0])
    line = swarm.wait_for_counted(peers[0], after_round=last, limit_s=JOIN_LIMIT_S)
    print(f"alone: round {line['round']} committed {line['time'] - began:.1f} s after its start")
    assert line["members"] == 1
    lifetime_s = swarm.manifest.deadlines.record_lifetime_s
    training = peers[0].of_kind("training")[-1]["time"]
    assert line["time"] - training >= lifetime_s, "it did not wait for a record lifetime"
    swarm.wait_for_rounds(1, 60, of=peers[:1])
    swarm.assert_equal_chains()
