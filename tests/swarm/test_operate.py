"""The operator pauses, revises, turns back and ends a run of real peers, who stay equal."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import yaml

from dilocox.dht.manifest import PROTOCOL_VERSION
from dilocox.peer.chain.store import Store, kept_run
from dilocox.peer.os_process import start_process
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import OPERATE_LIMIT_S, Peer, ProcessSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

STEP_S = 0.05
ROUNDS = {"inner_steps": 20, "min_inner_steps": 20, "max_inner_steps": 20}
TRAIN_LIMIT_S = 120.0


def edited(swarm: ProcessSwarm, **sections: Any) -> str:
    """The path of the run.yaml with other values."""
    manifest = yaml.safe_load((swarm.folder / "run.yaml").read_text())
    for name, value in sections.items():
        manifest[name] = manifest.get(name, {}) | value if isinstance(value, dict) else value
    path = swarm.folder / "edited.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return str(path)


def verify_paused(swarm: ProcessSwarm) -> None:
    """What a peer and the bootstrap keep can be replayed to their anchors.

    The run is paused for it, and stays so: the archive must not go on while it is read.
    """
    swarm.operate("pause")
    swarm.let_pass(8.0)
    for folder in (swarm.peers[0].state, swarm.folder / "bootstrap"):
        swarm.run_command("verify", str(folder), limit_s=OPERATE_LIMIT_S)


def newest(peers: list[Peer]) -> int:
    """The newest round that any of them reported."""
    return max(peer.rounds[-1]["round"] for peer in peers)


def pause_and_resume(swarm: ProcessSwarm) -> None:
    """Nothing is committed while the run is paused, and all of it goes on."""
    began = time.time()
    swarm.operate("pause")
    paused = "the operator has paused the run"
    heads = [peer for peer in swarm.peers if peer.stage == 0]
    swarm.wait(
        lambda: all(peer.status.get("blocked") == paused for peer in heads), 30, "all are paused"
    )
    print(f"paused after {time.time() - began:.1f} s")
    swarm.let_pass(5.0)  # a round whose bell had rung is sent yet
    deadlines = swarm.manifest.deadlines
    swarm.wait(
        lambda: all(peer.status.get("in_flight") is None for peer in swarm.peers),
        2 * (deadlines.exchange_s + deadlines.vote_s),
        "nothing is in flight",
    )
    rounds = {peer.name: len(peer.rounds) for peer in swarm.peers}
    steps = {peer.name: peer.status["inner_step"] for peer in swarm.peers}
    swarm.let_pass(10.0)  # three rounds of this run
    assert rounds == {peer.name: len(peer.rounds) for peer in swarm.peers}
    assert steps == {peer.name: peer.status["inner_step"] for peer in swarm.peers}
    began = time.time()
    swarm.operate("resume")
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
    print(f"two rounds {time.time() - began:.1f} s after resume")
    swarm.assert_equal_chains()


def revise(swarm: ProcessSwarm) -> None:
    """Another outer learning rate: both go on with it, on one chain that can be replayed."""
    began, before = time.time(), newest(swarm.peers)
    starts = {peer.name: len(peer.of_kind("training")) for peer in swarm.peers}
    said = swarm.operate("revise", edited(swarm, outer={"learning_rate": 0.4}))
    assert "outer.learning_rate: 0.7 -> 0.4" in said
    swarm.wait(
        lambda: all(len(peer.of_kind("training")) > starts[peer.name] for peer in swarm.peers),
        60,
        "all have started again under the new rules",
    )
    print(f"all train under the new rules {time.time() - began:.1f} s after the command")
    swarm.wait_for_rounds(3, TRAIN_LIMIT_S)
    swarm.assert_equal_chains()
    assert newest(swarm.peers) > before
    verify_paused(swarm)
    records = swarm.round_log(swarm.peers[0])
    rules = {header.rules for number in records.rounds() if (header := records.header(number))}
    assert rules == {0, 3}, "pause and resume are no new rules, the learning rate is"


def records_under(swarm: ProcessSwarm, peer: Peer, rules: int) -> dict[str, str]:
    """What a peer's log holds that was made under these rules: digest by the digest before it."""
    log = swarm.round_log(peer)
    headers = {entry.digest: entry.header() for entry in log.entries()}
    return {
        header.previous: digest
        for digest, header in headers.items()
        if header is not None and header.rules == rules
    }


def merged_under(swarm: ProcessSwarm, peer: Peer, rules: int) -> list[dict[str, Any]]:
    """The rounds made under these rules that a peer has merged into its anchor."""
    digests = set(records_under(swarm, peer, rules).values())
    return [line for line in peer.rounds if line["digest"] in digests]


def roll_back(swarm: ProcessSwarm) -> None:
    """All go on from an earlier round, with equal digests, and not from what came after it."""
    began = time.time()
    target, left = swarm.peers[0].rounds[2], newest(swarm.peers)
    swarm.operate("rollback", "--yes", "--round", str(target["round"]))
    swarm.wait(
        lambda: all(len(merged_under(swarm, peer, 1)) >= 2 for peer in swarm.peers),
        TRAIN_LIMIT_S,
        "two rounds on the new branch",
    )
    print(f"two rounds from round {target['round']} of {left} on: {time.time() - began:.1f} s")
    first, second = (records_under(swarm, peer, 1) for peer in swarm.peers)
    assert target["digest"] in first, "the branch begins at the round that was named"
    assert all(second.get(before, digest) == digest for before, digest in first.items())
    for peer in swarm.peers:
        entries = swarm.round_log(peer).entries()
        old = [each for each in entries if (header := each.header()) and header.rules == 0]
        assert {each.round for each in old} <= set(range(target["round"] + 1))
        (aside,) = peer.state.glob("*-stage0/before-*/log")
        assert Store(aside).find(target["digest"]) is not None, "nothing was removed"
    anchors: dict[str, set[str]] = {}
    for peer in swarm.peers:
        for line in peer.rounds:
            anchors.setdefault(line["digest"], set()).add(line["anchor_sha256"])
    assert all(len(each) == 1 for each in anchors.values())
    verify_paused(swarm)


def end(swarm: ProcessSwarm) -> None:
    """All commit what they have, the bootstrap keeps it, and they leave with exit code 0."""
    began = time.time()
    for peer in swarm.peers:
        peer.expected = False
    swarm.operate("end", "--yes")
    wait_until_all_have_left(swarm)
    print(f"all have left {time.time() - began:.1f} s after the command")
    assert "is ended already" in swarm.operate("end")


def wait_until_all_have_left(swarm: ProcessSwarm) -> None:
    """All stages end with the same round, and hold all that their peers have learnt."""
    swarm.wait(
        lambda: all(peer.child.returncode is not None for peer in swarm.peers), 90, "all have left"
    )
    assert [peer.child.returncode for peer in swarm.peers] == [0] * len(swarm.peers)
    kept = kept_run(swarm.folder / "bootstrap").stages
    last = {peer.name: peer.rounds[-1]["round"] for peer in swarm.peers}
    assert len({max(last[peer.name] for peer in swarm.of_stage(s)) for s in kept}) == 1, last
    for stage in range(swarm.manifest.stages):
        peers = swarm.of_stage(stage)
        longest = max(peers, key=lambda peer: peer.rounds[-1]["chain_tokens"])
        log = swarm.round_log(longest)  # who had nothing to send left before the last round
        assert all(log.find(peer.rounds[-1]["digest"]) is not None for peer in peers)
        assert kept[stage].records[-1].digest == log.head().digest
    assert all(peer.status["in_flight"] is None for peer in swarm.peers)
    assert all(peer.status["unsent_tokens"] == 0 for peer in swarm.peers)


def test_the_operator_pauses_and_revises_a_run(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(rounds=ROUNDS)
    for _ in range(2):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
    pause_and_resume(swarm)
    revise(swarm)


def test_the_operator_goes_back_to_an_earlier_round_and_ends_the_run(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=ROUNDS)
    for _ in range(2):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(5, TRAIN_LIMIT_S)
    roll_back(swarm)
    end(swarm)


def test_a_pipeline_is_paused_turned_back_and_ended(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(stages=2, rounds=ROUNDS)
    for stage in range(2):
        swarm.add_peer(stage=stage, step_s=STEP_S)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
    pause_and_resume(swarm)
    target = swarm.peers[0].rounds[0]["round"]
    swarm.operate("rollback", "--yes", "--round", str(target))
    swarm.wait(
        lambda: all(records_under(swarm, peer, 3) for peer in swarm.peers),
        TRAIN_LIMIT_S,
        "both stages go on",
    )
    for peer in swarm.peers:
        base = max(
            (entry for entry in swarm.round_log(peer).entries() if entry.round <= target),
            key=lambda entry: entry.round,
        )
        assert base.digest in records_under(swarm, peer, 3)
    end(swarm)


def two_replicas(start_swarm: StartSwarm, **sections: Any) -> ProcessSwarm:
    """Two stages of two peers each."""
    swarm = start_swarm(stages=2, rounds=ROUNDS, **sections)
    for stage in (0, 0, 1, 1):
        swarm.add_peer(stage=stage, step_s=STEP_S)
    return swarm


def assert_all_is_counted(swarm: ProcessSwarm) -> None:
    """Every token that a peer trained on is in a record."""
    for peer in swarm.peers:
        counted = sum(line["tokens"] for line in peer.rounds if line["outcome"] == "counted")
        assert counted == peer.status["tokens"], peer.name


@pytest.mark.parametrize("moment", ["in a round", "in an exchange", "paused"])
def test_whenever_two_replicas_are_ended_nothing_that_they_learnt_is_lost(
    start_swarm: StartSwarm, moment: str
) -> None:
    swarm = two_replicas(start_swarm)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
    head = swarm.peers[0]
    if moment == "paused":
        swarm.operate("pause")
    else:
        wanted = moment == "in an exchange"
        swarm.wait(
            lambda: head.status["inner_step"] > 2 and (head.in_flight is not None) is wanted,
            TRAIN_LIMIT_S,
            moment,
        )
    end(swarm)
    assert_all_is_counted(swarm)


def test_a_run_ends_with_its_tokens_and_what_was_learnt_meanwhile(
    start_swarm: StartSwarm,
) -> None:
    swarm = two_replicas(start_swarm, end_tokens=3 * 2 * 20 * 256)
    for peer in swarm.peers:
        peer.expected = False
    swarm.wait(lambda: all(peer.rounds for peer in swarm.peers), TRAIN_LIMIT_S, "all train")
    wait_until_all_have_left(swarm)
    assert_all_is_counted(swarm)


@pytest.mark.timeout(240)
def test_a_peer_of_another_protocol_is_refused_by_name(start_swarm: StartSwarm) -> None:
    swarm = start_swarm()
    program = (
        "import dilocox.dht.manifest as m; m.PROTOCOL_VERSION = 99; "
        "from dilocox.peer.cli import main; main()"
    )
    state = str(swarm.folder / "stranger")
    child = start_process(
        [sys.executable, "-c", program, "peer", swarm.invite, "--state", state],
        swarm.folder / "stranger.log",
        env=swarm.environment("stranger"),
    )
    child.wait(120)
    said = (swarm.folder / "stranger.log").read_text()
    assert child.returncode == 2, said
    assert f"protocol is {PROTOCOL_VERSION}; this dilocox speaks protocol 99: install" in said


def test_a_peer_that_cannot_read_a_revision_leaves_in_order_with_the_reason(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds=ROUNDS)
    swarm.add_peer(step_s=STEP_S)
    older = swarm.add_peer(older=True)
    swarm.wait_for_counted(older, limit_s=TRAIN_LIMIT_S)
    older.expected = False
    swarm.operate("pause")
    for _ in range(2):
        older.child.wait(90)
        older.look()
        said = older.child.last_line()
        assert older.child.returncode == 2, said
        assert "cannot read revision 1 of the operator's manifest: wings is not a field" in said
        assert said.endswith("install the version that the operator runs")
        assert older.status["state"] == "leaving"
        swarm.restart(older)  # which helps nothing
        older.expected = False
    older.child.wait(90)
    swarm.operate("resume")
    swarm.peers.remove(older)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
