"""benchmarks/gpu.py on a CPU with a tiny model, so that it is ready where a GPU is."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import gpu
from dilocox.pipeline.partition import load_config


def test_a_tiny_model_on_a_cpu_fills_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["gpu.py", "--quick", "--recompute", "--device", "cpu", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    # a process of its own would import torch and transformers again; `make bench-quick` has one
    monkeypatch.setattr(
        gpu, "in_fresh_process", lambda *of: pickle.loads(pickle.dumps(gpu.measure(*of)))
    )
    gpu.main()
    [found] = json.loads(file.read_text())
    config = load_config(gpu.SIZES["quick"].description()["model"])
    whole = AutoModelForCausalLM.from_config(config)
    assert found["parameters"] == sum(each.numel() for each in whole.parameters())
    for speed in (found["dilocox"], found["plain"]):
        assert speed["tokens_per_s"] > 0
        assert speed["of_peak"] > 0  # how much of it, only a GPU's own run can say
    assert found["codec"]["same_bytes"]
    assert found["codec"]["products_differ"] == 0  # the device is the CPU
    places = {kind: place for kind, (place, _) in found["vectors"].items()}
    assert places["weights"] == places["gradients"] == places["AdamW moments"] == "cpu"
    shown = capsys.readouterr().out
    assert "of peak" in shown
    assert "AdamW moments" in shown
