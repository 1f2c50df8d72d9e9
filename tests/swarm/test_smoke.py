"""The one swarm that every test run starts: two peers learn, agree, and give a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.peer.real_commands import run_here
from tests.swarm.conftest import StartSwarm


@pytest.mark.swarm
@pytest.mark.smoke
@pytest.mark.timeout(240)
def test_two_peers_train_a_model_that_transformers_loads(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = start_swarm()
    for _ in range(2):
        swarm.add_peer(step_s=0.05)  # other tests run beside it
    swarm.wait_for_rounds(3, 120)
    swarm.assert_equal_chains()
    folder = swarm.folder / "export"
    # in this process, which has imported all that it takes
    assert run_here(monkeypatch, "export", swarm.invite, str(folder), "--host", "127.0.0.1") == 0
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    logits = model(torch.arange(3, 19)[None]).logits
    assert logits.shape == (1, 16, 384)
    assert logits.isfinite().all()
    facts = json.loads((folder / "dilocox.json").read_text())
    assert facts["stages"][0]["digest"] in {
        digest for seen in swarm.chain().values() for digest, _ in seen
    } or (facts["stages"][0]["round"] > max(swarm.chain()))
