"""Stages with unequal numbers of peers, and a stage that loses all it has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.invite import Invite
from dilocox.peer.state_folder import StateFolder
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.small_run import MODEL

pytestmark = pytest.mark.swarm

STEP_S = 0.4  # of every replica, so that a dozen peers fit on two cores
START_LIMIT_S = 240.0
MOVE_LIMIT_S = 240.0
ROUNDS_LIMIT_S = 240.0
BLOCKED_LIMIT_S = 60.0
QUIET_S = 15.0
SOON_S = 4.0  # shorter than a round
# Sixty processes share the machine, so a living one may well be silent for some seconds.
DEADLINES = {"heartbeat_s": 3.0, "silence_s": 10.0, "matchmaking_s": 5.0, "vote_s": 8.0}


# ---- 5, 3 and 4 peers --------------------------------------------------------------------------
@pytest.mark.timeout(1200)
def test_of_5_3_4_peers_9_train_one_moves_and_then_12_train(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(
        stages=3,
        model=MODEL | {"num_hidden_layers": 3},
        deadlines=DEADLINES,
    )
    for count in range(1, 4):
        for stage in range(3):
            swarm.add_peer(stage=stage, step_s=STEP_S if stage == 0 else 0.0)
        swarm.wait_for_replicas(count, START_LIMIT_S)
    extra = swarm.add_peer(stage=2)
    movable = [_add_spare_head(swarm) for _ in range(2)]
    swarm.wait(
        lambda: all(_joined_as_spare(peer) for peer in (extra, *movable)),
        START_LIMIT_S,
        "5-3-4 peers have joined",
    )
    assert len(swarm.replicas()) == 3
    mover = swarm.wait(
        lambda: next((peer for peer in movable if _hosts(peer, 1)), None),
        MOVE_LIMIT_S,
        "a spare of stage 0 moves to stage 1",
    )
    (stayed,) = [peer for peer in movable if peer is not mover]
    mover.stage = 1
    moved_at = _began(mover, 1)
    print(f"{mover.name} moved {moved_at - _began(mover, 0):.1f} s after it came as a spare")
    swarm.wait(
        lambda: stayed in _heads(swarm) and len(_heads(swarm)) == 4,
        START_LIMIT_S,
        "4-4-4 peers are 4 replicas",
    )
    complete_at = time.time()
    swarm.wait(
        lambda: all(_contributed(peer, complete_at) for peer in swarm.peers),
        ROUNDS_LIMIT_S,
        "all 12 peers are in the records",
    )
    swarm.wait(lambda: time.time() > moved_at + QUIET_S, QUIET_S, "nobody else moves meanwhile")
    for peer in swarm.peers:
        hosted = {_stage_of(folder) for folder in peer.state.glob("*-stage?")}
        assert hosted == ({0, 1} if peer is mover else {peer.stage})
    _assert_equal_chains(swarm)


def _add_spare_head(swarm: ProcessSwarm) -> Peer:
    """A peer that may choose its stage, and was of stage 0 when it was here the last time."""
    folder = StateFolder(swarm.folder / f"peer-{len(swarm.peers)}")
    folder.path.mkdir()
    folder.note_stage(Invite.parse(swarm.invite).run_id, 0)
    return swarm.add_peer("--stage", "auto", step_s=STEP_S)


def _joined_as_spare(peer: Peer) -> bool:
    return bool(peer.of_kind("training")) and not peer.of_kind("replica")


def _hosts(peer: Peer, stage: int) -> bool:
    return any(peer.state.glob(f"*-stage{stage}/status.json"))


def _began(peer: Peer, stage: int) -> float:
    """When this peer, as one of this stage, was done with joining, or when it is now."""
    lines = _events(next(peer.state.glob(f"*-stage{stage}")))
    return next((line["time"] for line in lines if line["event"] == "training"), time.time())


def _heads(swarm: ProcessSwarm) -> list[Peer]:
    """The peers that lead a replica whose members are in no other one."""
    heads = [peer for peer in swarm.of_stage(0) if peer.status.get("members")]
    members = [each for peer in heads for each in peer.status["members"]]
    return heads if len(members) == len(set(members)) else []


def _contributed(peer: Peer, since: float) -> bool:
    """Whether a record of its stage holds progress of this peer, and it said so after that time."""
    lines = _events(next(peer.state.glob(f"*-stage{peer.stage}")))
    return any(line.get("outcome") == "counted" and line["time"] > since for line in lines)


def _rounds(swarm: ProcessSwarm, stage: int) -> dict[int, dict[str, Any]]:
    """What peers reported of a stage's rounds, one report of each."""
    folders = swarm.folder.glob(f"peer-*/*-stage{stage}")
    lines = [line for folder in folders for line in _events(folder) if line["event"] == "round"]
    return {line["round"]: line for line in lines}


def _assert_equal_chains(swarm: ProcessSwarm) -> None:
    """As the swarm's own check, also for peers that were of several stages."""
    for stage in range(swarm.manifest.stages):
        known = _rounds(swarm, stage)
        for folder in swarm.folder.glob(f"peer-*/*-stage{stage}"):
            for line in _events(folder):
                if line["event"] == "round":
                    same = known[line["round"]]
                    assert line["digest"] == same["digest"]
                    assert line["anchor_sha256"] == same["anchor_sha256"]


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _stage_of(folder: Path) -> int:
    return int(folder.name[-1])


# ---- a stage without peers -----------------------------------------------------------------------
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lost_stage", "comes_back"),
    [(1, True), (1, False), (0, False)],
    ids=["old", "new", "new head"],
)
def test_a_run_that_lost_all_peers_of_a_stage_says_so_and_goes_on_with_the_next_one(
    start_swarm: StartSwarm, lost_stage: int, comes_back: bool
) -> None:
    swarm = start_swarm(stages=2, deadlines={"silence_s": 6.0})
    lost = swarm.add_peer(stage=lost_stage, step_s=STEP_S)
    others = [swarm.add_peer(stage=1 - lost_stage, step_s=STEP_S) for _ in range(2)]
    swarm.wait_for_rounds(3, ROUNDS_LIMIT_S)
    members = swarm.wait_for_replicas(1, START_LIMIT_S)[0].members
    trainer = next(peer for peer in members if peer is not lost)

    def all_archived() -> bool:
        last = lost.rounds[-1]
        kept = swarm.archived(lost_stage)[-1:]
        return kept == [last["round"]] and time.time() < last["time"] + SOON_S

    # a record that the archive has not would die with its only holder, and be made anew
    swarm.wait(all_archived, ROUNDS_LIMIT_S, "all is archived, and the next record is not near")
    swarm.kill(lost)
    swarm.wait_until_gone(lost)
    said = f"stage {lost_stage} has no peer"
    swarm.wait(
        lambda: all(peer.status["blocked"] == said for peer in others),
        BLOCKED_LIMIT_S,
        "all others say what is missing",
    )
    swarm.wait(lambda: trainer.in_flight is None, BLOCKED_LIMIT_S, "the last send is decided")
    assert all(said in peer.log_text() for peer in others)
    before = {peer.name: _newest_round(swarm, peer) for peer in swarm.peers}
    trained = trainer.status["tokens"]
    swarm.let_pass(QUIET_S)
    assert {peer.name: _newest_round(swarm, peer) for peer in swarm.peers} == before

    came_at = time.time()
    if comes_back:
        swarm.restart(lost)
        comer = lost
    else:
        comer = swarm.add_peer(stage=lost_stage, step_s=STEP_S)
    swarm.wait_for_rounds(3, ROUNDS_LIMIT_S, of=[comer, *others])
    assert ("continuing from the snapshot of round" in comer.log_text()) == comes_back
    _assert_nothing_was_lost(swarm, [comer, *others], before)
    swarm.wait(
        lambda: sum(line["tokens"] for line in trainer.rounds) >= trained,
        ROUNDS_LIMIT_S,
        "what was learnt until the stage was lost is in the chain",
    )
    lines = (line for line in comer.of_kind("round") if line["time"] > came_at)
    first = next(line for line in lines if line["inner_steps"])
    print(f"round {first['round']} {first['time'] - came_at:.1f} s after the start of {comer.name}")
    swarm.assert_equal_chains()


def _assert_nothing_was_lost(
    swarm: ProcessSwarm, peers: list[Peer], before: dict[str, int]
) -> None:
    """All chains go on from the newest records; the model is as good as it was."""
    for peer in peers:
        known = _digests(swarm, peer.stage, max(before.values()))
        rounds = swarm.round_log(peer).rounds()
        newest_kept = max(number for number in rounds if number in known)
        if peer.name in before:
            assert newest_kept == before[peer.name] < max(rounds)
        else:
            assert newest_kept >= 1  # as far as the archive had come
        after = next(number for number in rounds if number > newest_kept)
        header = swarm.round_log(peer).header(after)
        assert header is not None
        assert header.previous == known[newest_kept]
    losses = {number: loss for peer in swarm.peers for number, loss in peer.losses.items()}
    later = [loss for number, loss in losses.items() if number > max(before.values())]
    assert later
    # with a stage from its seed it would be hardly better than at the start
    assert max(later) < losses[min(number for number in losses if number >= 0)] < losses[-1]


def _digests(swarm: ProcessSwarm, stage: int, last: int) -> dict[int, str]:
    """Of a stage's records up to a round."""
    return {n: line["digest"] for n, line in _rounds(swarm, stage).items() if n <= last}


def _newest_round(swarm: ProcessSwarm, peer: Peer) -> int:
    return max(swarm.round_log(peer).rounds())


@pytest.mark.timeout(600)
def test_a_stage_that_nobody_comes_to_is_taken_by_one_that_trained(
    start_swarm: StartSwarm,
) -> None:
    """Both others have progress that no record holds, and none will: there is no replica."""
    swarm = start_swarm(stages=2, deadlines={"silence_s": 6.0})
    lost = [swarm.add_peer(stage=1) for _ in range(2)]
    swarm.wait(lambda: all(_hosts(peer, 1) for peer in lost), START_LIMIT_S, "stage 1 is there")
    heads = [swarm.add_peer(step_s=STEP_S) for _ in range(2)]
    swarm.wait_for_replicas(2, START_LIMIT_S)
    assert all(_hosts(peer, 0) for peer in heads)
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S)
    for peer in lost:
        swarm.kill(peer)
    mover = swarm.wait(
        lambda: next((peer for peer in heads if _hosts(peer, 1)), None),
        MOVE_LIMIT_S,
        "a peer of stage 0 takes stage 1",
    )
    moved_at = time.time()
    mover.stage = 1
    (stayed,) = [peer for peer in heads if peer is not mover]
    swarm.wait(
        lambda: all(_contributed(peer, moved_at) for peer in heads),
        ROUNDS_LIMIT_S,
        "both are in a record of what they train now",
    )
    assert _hosts(stayed, 0)
