"""Peers behind routers that nobody can dial: real address translation between namespaces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.swarm.harness import ProcessSwarm
from tests.swarm.nat import Homes, available
from tests.swarm.processes import Program
from tests.swarm.small_run import MODEL, fixed_steps, run_manifest

START_LIMIT_S = 150.0
ROUND_LIMIT_S = 60.0
BOOTSTRAP_PORT = 31337
USED_AGAIN_S = 30.0

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(290)]


@contextmanager
def swarm_on(kinds: str, folder: Path, *bootstrap: str, stages: int) -> Iterator[ProcessSwarm]:
    """A bootstrap on host 0 and room for peers on the others; see nat.py for their kinds."""
    if reason := available():
        pytest.skip(reason)
    manifest = run_manifest(
        stages=stages, model=MODEL | {"num_hidden_layers": max(2, stages)}, rounds=fixed_steps(30)
    )
    with Homes(kinds) as net:
        if kinds[0] == "h":
            net.map_port(0, BOOTSTRAP_PORT)
            address = f"/ip4/{net.seen_at(0)}/tcp/{BOOTSTRAP_PORT}"
            bootstrap = ("--port", str(BOOTSTRAP_PORT), "--announce", address, *bootstrap)
        with ProcessSwarm(folder, manifest, links=net, bootstrap=bootstrap) as swarm:
            yield swarm


def test_peers_that_only_dial_out_train_with_those_that_can_be_reached(tmp_path: Path) -> None:
    with swarm_on("pphhhp", tmp_path, stages=2) as swarm:
        head = swarm.add_peer(stage=0, step_s=0.1)
        ends = [swarm.add_peer(stage=1, step_s=0.1) for _ in range(2)]  # at home, one is a spare
        swarm.wait(lambda: head.of_kind("replica"), START_LIMIT_S, "a public head has a replica")
        far = swarm.add_peer(stage=0, step_s=0.1)  # at home
        near = swarm.add_peer(stage=1, step_s=0.1)
        swarm.wait(lambda: far.of_kind("replica"), START_LIMIT_S, "a head at home has a replica")
        at_home = {peer.peer_id for peer in (*ends, far)}
        for peer in swarm.peers:
            said = "only dials out" if peer.peer_id in at_home else "is reached at"
            assert said in peer.log_text()
            assert ("forward a TCP port" in peer.log_text()) == (peer.peer_id in at_home)
        (first,) = (peer for peer in ends if peer.peer_id in head.of_kind("replica")[0]["members"])
        (spare,) = (peer for peer in ends if peer is not first)
        for peer in (head, far, first, near):
            last = max((line["round"] for line in peer.rounds), default=-1)
            swarm.wait_for_counted(peer, after_round=last, limit_s=ROUND_LIMIT_S)
        swarm.wait_for_rounds(2, ROUND_LIMIT_S)
        assert {line["members"] for peer in swarm.peers for line in peer.rounds[-1:]} == {2}
        # the spare at home takes over, and so all five have been in a record
        swarm.terminate(first)
        last = max(swarm.chain(1))
        swarm.wait_for_counted(spare, after_round=last, limit_s=2 * ROUND_LIMIT_S)
        swarm.assert_equal_chains()
        for replica in (event for peer in (head, far) for event in peer.of_kind("replica")):
            assert not set(replica["members"]) <= at_home, "neighbours that only dial out"


@pytest.mark.faults
def test_a_head_at_home_recruits_peers_at_home_by_way_of_one_that_can_be_reached(
    tmp_path: Path,
) -> None:
    with swarm_on("phphh", tmp_path, stages=3) as swarm:
        head = swarm.add_peer(stage=0, step_s=0.1)
        middle = swarm.add_peer(stage=1, step_s=0.1)
        ends = [swarm.add_peer(stage=2, step_s=0.1) for _ in range(2)]  # one is a spare
        swarm.wait(lambda: head.of_kind("replica"), START_LIMIT_S, "the head has a replica")
        for peer in (head, *ends):
            assert "only dials out" in peer.log_text()
        members = head.of_kind("replica")[0]["members"]
        (first,) = (peer for peer in ends if peer.peer_id in members)
        (spare,) = (peer for peer in ends if peer is not first)
        swarm.wait_for_rounds(2, 2 * ROUND_LIMIT_S, of=[head, middle, first])
        swarm.kill(first)
        swarm.wait(lambda: head.of_kind("healed"), ROUND_LIMIT_S, "the spare is in its place")
        (healed,) = head.of_kind("healed")
        assert healed["members"] == [head.peer_id, middle.peer_id, spare.peer_id]
        print(f"healed by way of the middle after {healed['seconds']:.2f} s")
        last = max(swarm.chain(2))
        swarm.wait_for_counted(spare, after_round=last, limit_s=2 * ROUND_LIMIT_S)
        swarm.assert_equal_chains()


def test_a_bootstrap_behind_a_mapped_port_and_a_peer_that_was_cut_off(tmp_path: Path) -> None:
    with swarm_on("hph", tmp_path, stages=1) as swarm:
        net = swarm.links
        assert isinstance(net, Homes)
        assert f"/ip4/{net.seen_at(0)}/tcp/{BOOTSTRAP_PORT}/" in swarm.invite
        public, home = (swarm.add_peer(step_s=0.1) for _ in range(2))

        def together() -> bool:
            return any(line["members"] == 2 and line["tokens"] for line in home.rounds)

        swarm.wait(together, START_LIMIT_S, "both are in a record")
        assert "only dials out" in home.log_text() and "is reached at" in public.log_text()
        cut_in = max(swarm.chain())
        net.cut(2)
        swarm.wait(
            lambda: any(r["members"] == 1 for r in public.rounds if r["round"] > cut_in),
            2 * ROUND_LIMIT_S,
            "the other one commits alone",
        )
        net.heal(2)
        healed, last = time.monotonic(), max(swarm.chain())
        line = swarm.wait_for_counted(home, after_round=last, limit_s=2 * ROUND_LIMIT_S)
        print(f"in round {line['round']} {time.monotonic() - healed:.1f} s after the cut healed")
        swarm.assert_equal_chains()


@pytest.mark.parametrize("cut_s", [8.0, 45.0])  # connections outlive the first, but not the second
def test_a_way_that_was_cut_and_healed_is_used_again(cut_s: float) -> None:
    if reason := available():
        pytest.skip(reason)
    with Homes("ph") as net, ExitStack() as ended:

        def start(host: int, *arguments: str) -> Program:
            command = [sys.executable, "-m", "tests.swarm.nat_node", *arguments]
            program = Program(net.command(host, command))
            ended.callback(program.end)
            return program

        far = start(0, "public", net.address(0))
        start(1, "home", far.line(60))
        _wait(far, "yes", 60)
        net.cut(1)
        _wait(far, "no", 10)
        time.sleep(cut_s)
        net.heal(1)
        while line := far.line(0.0):
            assert line == "no", "it was called while the way was cut"
        used_s = _wait(far, "yes", USED_AGAIN_S)
        print(f"cut for {cut_s:.0f} s, called again {used_s:.1f} s after it healed")


def _wait(program: Program, wanted: str, limit_s: float) -> float:
    """Wait for a line; after how many seconds it came."""
    began = time.monotonic()
    while (line := program.line(began + limit_s - time.monotonic())) != wanted:
        assert line, f"not {wanted!r} within {limit_s:.0f} s"
    return time.monotonic() - began
