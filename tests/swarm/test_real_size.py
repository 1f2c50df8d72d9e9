"""Two peers of a stage as large as this machine's memory allows, under the rules of a run that
names none: they commit, one is killed and comes back, and the bootstrap follows by records alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_size import model_of
from dilocox.dht.manifest import Manifest
from dilocox.peer.memory_and_disk import available_bytes
from dilocox.peer.process.prepare import StageNeeds
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps, run_manifest

SIZES = (300e6, 250e6, 200e6, 150e6, 100e6)  # parameters, the largest that fits twice
INNER_STEPS = 5
ROUND_LIMIT_S = 400.0
A_CONTAINERS_SHARED_MEMORY = 64 << 20  # bytes that it may use of /dev/shm, if nobody asks for more


def manifest_of(parameters: float) -> dict[str, Any]:
    return run_manifest(
        model=model_of(parameters),
        batch={"sequence_length": 32, "microbatch_size": 1},
        rounds=fixed_steps(INNER_STEPS),
        data={"held_out_windows": 1},
        deadlines=USUAL_DEADLINES,
    )


def needed_bytes(parameters: float) -> int:
    """Of two peers, and a bootstrap that replays records."""
    needs = StageNeeds(Manifest.from_dict(manifest_of(parameters)), 0)
    return 2 * needs.memory.on_cpu + 4 * needs.values + 10**9


@pytest.mark.swarm
@pytest.mark.timeout(1800)
def test_a_stage_of_real_size_commits_survives_a_kill_and_is_kept(tmp_path: Path) -> None:
    fitting = [size for size in SIZES if needed_bytes(size) < available_bytes()]
    if not fitting:
        pytest.skip(f"this machine has no {needed_bytes(SIZES[-1]) / 1e9:.0f} GB of memory free")
    with ProcessSwarm(tmp_path, manifest_of(fitting[0])) as swarm:
        numel = swarm.stage_codec(0).layout.numel
        print(f"{numel:,} parameters, needing {needed_bytes(fitting[0]) / 1e9:.1f} GB")
        period = "--snapshot-minutes", "1"
        first, second = (swarm.add_peer("--threads", "1", *period) for _ in range(2))
        swarm.wait_for_rounds(1, 2 * ROUND_LIMIT_S)
        swarm.kill(first)
        swarm.wait_until_gone(first)
        before = max(swarm.chain())
        swarm.restart(first)
        swarm.wait_for_counted(first, after_round=before, limit_s=2 * ROUND_LIMIT_S)
        swarm.wait_for_rounds(2, 2 * ROUND_LIMIT_S)
        swarm.assert_equal_chains()
        assert len(swarm.chain()) >= 3
        for peer in (first, second):
            assert shared_memory_bytes(peer) < A_CONTAINERS_SHARED_MEMORY / 64
        newest = max(swarm.chain())
        swarm.wait(lambda: max(swarm.archived(0)) >= newest, ROUND_LIMIT_S, "the archive follows")
        log = "".join(path.read_text() for path in tmp_path.glob("bootstrap*.log"))
        assert "taking the state" not in log
        for peer in (first, second):
            print([(line["round"], line["outcome"], line["members"]) for line in peer.rounds])


def shared_memory_bytes(peer: Peer) -> int:
    """What a peer's processes map of /dev/shm: flags of futures between them, a page each."""
    total = 0
    for process in peer.processes():
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                low, high = line.split(maxsplit=1)[0].split("-")
                total += int(high, 16) - int(low, 16)
    return total
