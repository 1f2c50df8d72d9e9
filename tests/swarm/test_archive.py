"""A run survives that all peers of a stage vanish with their disks: the bootstrap has it all."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.processes import family

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
