"""The demo as a stranger runs it, with its figures checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dilocox.dht.manifest import Manifest
from dilocox.peer.data import held_out_windows

LIMIT_S = 300
ROUNDS = 10


@pytest.mark.swarm
@pytest.mark.demo
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_demo_learns_and_its_checkpoint_has_the_loss_that_it_reports(tmp_path: Path) -> None:
    figures = tmp_path / "demo.json"
    arguments = ["demo", "--rounds", str(ROUNDS), "--folder", str(tmp_path / "demo")]
    ran = subprocess.run(
        [sys.executable, "-m", "dilocox", *arguments, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(figures.read_text())
    assert result["rounds_committed"] >= ROUNDS
    assert result["digests_equal"]
    assert 5.4 <= result["val_loss_first"] <= 6.1
    assert result["val_loss_last"] < 2.5
    assert result["waiting_share"] < 0.03
    assert result["bytes_sent_per_round"] < 0.5 * result["bytes_fp16_per_round"]
    # the loss of the exported anchor: by a peer, by the demo, and by plain transformers here
    loss = plain_loss(Path(result["export"]), Manifest.load(tmp_path / "demo" / "run.yaml"))
    assert round(result["val_loss_export"], 4) == round(loss, 4)
    assert abs(result["val_loss_last"] - loss) < 1e-3


def plain_loss(export: Path, manifest: Manifest) -> float:
    windows = held_out_windows(
        manifest.data, manifest.batch.sequence_length, manifest.data.held_out_windows
    )
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(input_ids=window[None, :-1]).logits[0], window[1:]
            )
            for window in windows
        ]
    return float(torch.stack(losses).double().mean())
