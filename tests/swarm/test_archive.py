"""A run survives that all peers of a stage vanish with their disks: the bootstrap has it all."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.processes import family, send_signal

SHARED_MEMORY = Path("/dev/shm")
STEP_S = 0.05
TRAIN_LIMIT_S = 300.0
JOIN_LIMIT_S = 180.0
FOLLOWING_LIMIT_S = 60.0  # it looks once a heartbeat, and rounds are as short here
MAX_MEMORY = 1e9  # bytes, of all processes of the bootstrap


@pytest.mark.swarm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("by", ["records", "a state"])
def test_a_stage_that_loses_all_its_peers_goes_on_from_what_the_bootstrap_keeps(
    start_swarm: StartSwarm, by: str
) -> None:
    # with 32 bits six records are more bytes than a state, and who joins takes what is fewer
    codec = {"bits": 32} if by == "a state" else {}
    swarm = start_swarm(stages=2, rounds={"inner_steps": 20}, codec=codec)
    head, lost = (swarm.add_peer(stage=stage, step_s=STEP_S) for stage in range(2))
    swarm.wait_for_rounds(3, TRAIN_LIMIT_S)
    if by == "a state":
        swarm.wait(lambda: kept_states(swarm, 1), TRAIN_LIMIT_S, "the bootstrap keeps a state")
        swarm.wait_for_rounds(6, TRAIN_LIMIT_S)
    told = memory(swarm)
    print(f"the bootstrap takes {sum(told.values()) / 1e6:.0f} MB: {told}")
    assert sum(told.values()) < MAX_MEMORY

    swarm.wait(
        lambda: max(swarm.archived(1), default=-1) >= lost.rounds[-1]["round"] - 1,
        FOLLOWING_LIMIT_S,
        "the bootstrap follows within a round",
    )
    swarm.kill(lost)
    swarm.wait_until_gone(lost)
    swarm.look()
    shutil.rmtree(lost.state)
    before = {stage: dict(swarm.chain(stage)) for stage in range(2)}
    kept = max(swarm.archived(1))

    began = time.time()
    joiner = swarm.add_peer(stage=1, step_s=STEP_S)
    line = swarm.wait_for_counted(joiner, after_round=kept, limit_s=JOIN_LIMIT_S)
    print(f"by {by}: {time.time() - began:.1f} s after its start it is in round {line['round']}")
    assert bool(joiner.of_kind("resynced")) == (by == "a state")
    swarm.wait_for_rounds(2, 120, of=[head, joiner])
    swarm.assert_equal_chains()
    (last,) = (each for each in lost.rounds if each["round"] == kept)
    assert line["chain_tokens"] > last["chain_tokens"]  # none of what is kept was done anew
    assert before[0].items() <= swarm.chain(0).items(), "the other stage has kept its progress"
    assert head.rounds[-1]["chain_tokens"] > line["chain_tokens"] / 2
    assert not [event for event in head.events if event["event"] == "resynced"]

    folder = swarm.folder / "export"
    arguments = (swarm.invite, str(folder), "--host", "127.0.0.1")
    swarm.run_command("export", *arguments, limit_s=120)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_after_a_power_cut_all_go_on_from_the_newest_records_and_from_the_bootstraps_disk_alone(
    start_swarm: StartSwarm,
) -> None:
    memory = set(SHARED_MEMORY.iterdir())
    swarm = start_swarm(stages=2, rounds={"inner_steps": 20})
    first = [swarm.add_peer(stage=stage, step_s=STEP_S) for stage in (0, 0, 1, 1)]
    swarm.wait_for_rounds(3, TRAIN_LIMIT_S)

    kill_all(swarm, first, memory)
    newest = {stage: newest_round(swarm, stage) for stage in range(2)}
    began = time.time()
    swarm.restart_bootstrap()
    for peer in first:
        swarm.restart(peer)
    tell_going_on(swarm, first, newest, began)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S, of=first)

    kill_all(swarm, first, memory)
    kept = {stage: max(swarm.archived(stage)) for stage in range(2)}
    lost = {stage: newest_round(swarm, stage)[0] - kept[stage] for stage in range(2)}
    print(f"rounds by stage that only the peers' disks had: {lost}")
    held = {stage: (number, tokens_behind(swarm, stage, number)) for stage, number in kept.items()}
    for peer in first:
        shutil.rmtree(peer.state)
        swarm.peers.remove(peer)  # what it told of the rounds that are lost does not count
    began = time.time()
    swarm.restart_bootstrap()
    others = [swarm.add_peer(stage=stage, step_s=STEP_S) for stage in (0, 0, 1, 1)]
    tell_going_on(swarm, others, held, began)


def kill_all(swarm: ProcessSwarm, peers: list[Peer], memory: set[Path]) -> None:
    """SIGKILL all processes of the run at once, as a power cut ends them. Nobody is left to tidy
    up: nothing may stay in shared memory. memory: what was there before they were started.
    """
    everybody = {process.pid: process for process in family(swarm.tag)}
    for peer in peers:
        swarm.kill(peer)
        del everybody[peer.child.pid]
    bootstrap = {process.pid for process in family(f"{swarm.tag}.bootstrap")}
    others = [process for pid, process in everybody.items() if pid not in bootstrap]
    assert len(others) > 2 * len(peers), "each has a p2pd and an averaging process at least"
    send_signal(others, signal.SIGKILL)
    swarm.kill_bootstrap()
    for peer in peers:
        swarm.wait_until_gone(peer)
    swarm.look()
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - memory}
    assert not left, f"{left} stay in shared memory"


def newest_round(swarm: ProcessSwarm, stage: int) -> tuple[int, int]:
    """Of those that a stage's peers told of, and its chain's tokens."""
    number = max(swarm.chain(stage))
    return number, tokens_behind(swarm, stage, number)


def tokens_behind(swarm: ProcessSwarm, stage: int, number: int) -> int:
    told = [line for peer in swarm.of_stage(stage) for line in peer.rounds]
    return next(line["chain_tokens"] for line in told if line["round"] == number)


def tell_going_on(
    swarm: ProcessSwarm, peers: list[Peer], held: dict[int, tuple[int, int]], began: float
) -> None:
    """That each peer is in a record after the one that its stage held, on top of its tokens."""
    for peer in peers:
        number, tokens = held[peer.stage]
        line = swarm.wait_for_counted(peer, after_round=number, limit_s=JOIN_LIMIT_S)
        print(f"{peer.name}: round {number}, then {line['round']} {line['time'] - began:.0f} s on")
        assert line["chain_tokens"] > tokens, "what was held is done anew"
    swarm.assert_equal_chains()


def kept_states(swarm: ProcessSwarm, stage: int) -> bool:
    """Whether a proved state is all that the bootstrap keeps of a stage."""
    found = list(swarm.folder.glob(f"bootstrap/*-archive-*/stage{stage}/[0-9]*[0-9]"))
    return bool(found) and all((folder / "state").exists() for folder in found)


def memory(swarm: ProcessSwarm) -> dict[str, int]:
    """Bytes of each process of the bootstrap: its proportional set size."""
    told: dict[str, int] = {}
    for process in family(f"{swarm.tag}.bootstrap"):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        pss = next(line for line in lines if line.startswith("Pss:"))
        told[f"{process.name} {process.pid}"] = int(pss.split()[1]) * 1024
    return told
