"""Peers of a stage stay equal to the byte while ranks change, through a join and an absence, and
whoever replays the log finds the same anchors, on whatever machine."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.replaying import Machine, replay_on
from tests.swarm.small_run import fixed_steps

# An exchange begins two seconds after the round's end and is over within three: rounds of five let
# nobody skip one on a machine that is not too busy.
INNER_STEPS, STEP_S = 50, 0.1
ROUND_LIMIT_S = 30.0
START_LIMIT_S = 120.0
RETURN_LIMIT_S = 120.0
VERIFY_LIMIT_S = 120.0
MACHINES = (
    Machine(name="as it is"),
    Machine(name="3 threads", threads=3),
    Machine(name="terms in another order", permuted=1),
    Machine(name="without AVX", plain=True),
    Machine(name="without AVX, 2 threads, another order", plain=True, threads=2, permuted=2),
)

pytestmark = pytest.mark.swarm


@pytest.mark.timeout(1500)
def test_30_rounds_with_changing_ranks_a_joiner_and_a_peer_that_returns_by_records(
    start_swarm: StartSwarm,
) -> None:
    swarm = swarm_of_changing_ranks(start_swarm)
    lived_through(swarm, joins_at=10, away=(12, 20), rounds=30)
    assert_replays_agree(swarm, swarm.peers, MACHINES)
    for peer in swarm.peers:
        said = swarm.run_command("verify", str(peer.state), limit_s=VERIFY_LIMIT_S)
        assert peer.rounds[-1]["anchor_sha256"] in said.splitlines()[-1]


# ---- the swarm -----------------------------------------------------------------------------------
def swarm_of_changing_ranks(start_swarm: StartSwarm) -> ProcessSwarm:
    """Two peers; the first exchanges have far lower ranks than the energy asks for."""
    swarm = start_swarm(
        codec={"scheme": "low_rank", "rank": 2, "min_rank": 2, "energy": 0.95},
        rounds=fixed_steps(INNER_STEPS),
    )
    for _ in range(2):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(1, START_LIMIT_S)
    return swarm


def lived_through(
    swarm: ProcessSwarm, *, joins_at: int, away: tuple[int, int], rounds: int
) -> None:
    """So many rounds of the chain; a joiner comes after one of them, a peer is away for others.

    joins_at, away, rounds: counted in records, which need not be of successive rounds.
    """
    stays, leaver = swarm.peers
    wait_for_records(swarm, joins_at)
    joiner = swarm.add_peer(step_s=STEP_S)
    wait_for_records(swarm, away[0])
    assert swarm.terminate(leaver) == 0
    swarm.wait_until_gone(leaver)
    knew = {line["round"] for line in leaver.rounds}
    wait_for_records(swarm, away[1])
    missed = sorted(swarm.chain().keys() - knew)
    began = time.time()
    swarm.restart(leaver)
    for peer in (leaver, joiner):
        line = swarm.wait_for_counted(peer, after_round=max(missed), limit_s=RETURN_LIMIT_S)
        assert line["outcome"] == "counted"
    print(f"away for the records of {missed}, back {time.time() - began:.1f} s after its start")
    wait_for_records(swarm, rounds)
    assert_came_by_records(leaver, missed)
    assert_came_by_records(joiner, sorted(swarm.chain())[:joins_at])
    wait_for_same_end(swarm)
    swarm.assert_equal_chains()
    assert_ranks_changed(swarm, stays)


def wait_for_records(swarm: ProcessSwarm, count: int) -> None:
    """Wait until the chain has so many records."""
    limit_s = START_LIMIT_S + count * ROUND_LIMIT_S
    swarm.wait(lambda: len(swarm.chain()) >= count, limit_s, f"{count} records")


def wait_for_same_end(swarm: ProcessSwarm) -> None:
    """Let all peers leave; before, each must have merged what was the newest record just now."""
    last = max(swarm.chain())
    swarm.wait(
        lambda: all(peer.record(last) for peer in swarm.peers), ROUND_LIMIT_S, "all have the last"
    )
    for peer in swarm.peers:
        assert swarm.terminate(peer) == 0
    swarm.look()


# ---- what must hold ------------------------------------------------------------------------------
def assert_came_by_records(peer: Peer, rounds: list[int]) -> None:
    """It merged each of these records by itself, and never took a state."""
    assert not peer.of_kind("resynced")
    merged = [line["round"] for line in peer.rounds]
    assert set(rounds) <= set(merged), f"{peer.name} lacks some of {rounds}: {merged}"
    assert merged == sorted(merged), f"{peer.name} merged out of order: {merged}"


def assert_ranks_changed(swarm: ProcessSwarm, peer: Peer) -> None:
    """Several records have other ranks than the one before, and they went where they had to."""
    headers = [entry.header() for entry in swarm.round_log(peer).entries()]
    ranks = [header.ranks for header in headers if header is not None]
    changed = [n for n, (one, other) in enumerate(pairwise(ranks), 1) if one != other]
    print(f"ranks changed before records {changed} of {len(ranks)}: {ranks[0]} ... {ranks[-1]}")
    assert len(changed) >= 3
    assert sum(ranks[-1]) > 1.5 * sum(ranks[0])


def assert_replays_agree(
    swarm: ProcessSwarm, peers: list[Peer], machines: tuple[Machine, ...]
) -> None:
    """Every peer's log makes the anchors that all reported, from round 0 and on every machine."""
    anchors = {number: sha for number, ((_, sha),) in _pairs(swarm).items()}
    for peer in peers:
        rounds = swarm.round_log(peer).rounds()
        assert rounds == [number for number in sorted(anchors) if number <= rounds[-1]]
        for machine in machines:
            found = replay_on(machine, peer.state)
            where = f"{peer.name}, {machine.name}"
            assert found.replayed == found.checked == rounds, where
            assert not found.flaws, f"{where}: {found.flaws}"
            assert found.anchor_sha256 == anchors[rounds[-1]], where
            assert found.confirmed, f"{where}: the snapshot was not compared"
        print(f"{peer.name}: {len(rounds)} records, replayed on {len(machines)} machines")


def _pairs(swarm: ProcessSwarm) -> dict[int, list[tuple[str, str]]]:
    return {number: sorted(seen) for number, seen in swarm.chain().items()}
