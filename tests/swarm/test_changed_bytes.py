"""A disk changes bytes of what a peer or a bootstrap keeps: who starts from it names the file and
goes on from others. Which bytes, and files of all kinds: tests/peer/chain/test_changed_bytes.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.swarm.conftest import StartSwarm

STEP_S = 0.05
TRAIN_LIMIT_S = 300.0
BACK_LIMIT_S = 120.0
OF_A_PEER = {  # in its folder of a stage: what is changed, and what its log must name
    "snapshots/*/anchor.safetensors": "is damaged (anchor.safetensors is not what was written)",
    "snapshots/*/local.safetensors": "is damaged (local.safetensors is not what was written)",
    "snapshots/journal": "snapshots/journal cannot be read",
    "log/*.record": ".record or its certificate is damaged",
    "*/**/*": ".record or its certificate is damaged",
}


def change(files: Iterable[Path]) -> None:
    """Change the byte in the middle of each file."""
    changed = 0
    for path in files:
        if path.is_file() and (data := bytearray(path.read_bytes())):
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            changed += 1
    assert changed


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_who_starts_from_a_disk_that_changed_bytes_names_them_and_goes_on_from_others(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 20})
    for _ in range(3):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(4, TRAIN_LIMIT_S)
    victim = swarm.peers[0]
    for files, words in OF_A_PEER.items():
        swarm.kill(victim)
        swarm.wait_until_gone(victim)
        (folder,) = victim.state.glob("*-stage0")
        change(folder.glob(files))
        newest, began = max(swarm.chain()), time.monotonic()
        swarm.restart(victim)
        swarm.wait_for_counted(victim, after_round=newest, limit_s=BACK_LIMIT_S)
        print(f"{files} changed: it contributes again {time.monotonic() - began:.0f} s later")
        assert words in victim.log_text()

    swarm.wait(lambda: len(swarm.archived(0)) > 3, TRAIN_LIMIT_S, "the archive keeps records")
    swarm.kill_bootstrap()
    change(swarm.folder.glob("bootstrap/*-archive-*/stage0/*/log/*"))
    newest = max(swarm.archived(0))
    swarm.restart_bootstrap()
    swarm.wait(
        lambda: max(swarm.archived(0), default=-1) > newest, BACK_LIMIT_S, "the archive goes on"
    )
    joiner = swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_counted(joiner, after_round=newest, limit_s=BACK_LIMIT_S)
    swarm.wait_for_rounds(2, TRAIN_LIMIT_S)
    swarm.assert_equal_chains()
    logs = [path.read_text() for path in swarm.folder.glob("bootstrap-*.log")]
    assert any(re.search(r"/stage0/\d{8}: damaged \(", log) for log in logs)
