"""Each preset is as large as its name says, and can be cut into as many stages as it is for."""

from __future__ import annotations

import re

import pytest

from dilocox.dht.manifest import Manifest, preset_names
from dilocox.pipeline.partition import build_skeleton, plan_skeleton

PARAMETERS = {
    "tiny": 902_272,
    "small": 3_361_024,
    "llama-150m": 214_983_680,
    "llama-400m": 438_081_024,
    "llama-1b": 1_100_048_384,
    "qwen3-0.6b-like": 751_632_384,  # Qwen3-0.6B has 596,049,920: here the head is no embedding
}
UNITS = {"m": 1e6, "b": 1e9}


def test_every_preset_is_looked_at() -> None:
    assert set(preset_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_parameters_of_its_name_and_can_be_cut(name: str) -> None:
    manifest = Manifest.from_dict({"name": "run", "model": name, "end_tokens": 10**10})
    skeleton = build_skeleton(manifest.model)  # on the meta device: no memory is taken
    layers = skeleton.model.get_submodule(skeleton.layers)
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    if said := re.search(r"([\d.]+)([mb])\b", name):
        # papers name the layers alone, or all
        assert in_layers <= float(said[1]) * UNITS[said[2]] <= PARAMETERS[name]
    most = min(8, len(list(layers.children())))
    assert most == 8 or name in ("tiny", "small")
    for stages in range(1, most + 1):
        plans = plan_skeleton(skeleton, stages)
        assert sum(plan.num_parameters for plan in plans) == PARAMETERS[name]
        dearest, all_of_them = max(p.cost for p in plans), sum(p.cost for p in plans)
        # whole layers, and a head that cannot be cut, make no even stages
        assert dearest <= 2.1 * all_of_them / stages
