"""The plan of a stage's memory, against what processes that train it really take."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.memory import in_fresh_process, run_description
from dilocox.dht.manifest import Manifest
from dilocox.peer.memory_and_disk import available_bytes
from dilocox.peer.process.prepare import StageNeeds

MILLIONS = {"30": (8, 512), "93": (12, 768), "308": (24, 1024)}  # layers and width


@pytest.mark.swarm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("millions", list(MILLIONS))
def test_a_plan_is_within_fifteen_percent_of_the_peak(millions: str, recompute: bool) -> None:
    layers, width = MILLIONS[millions]
    shape = {"sequence_length": 256, "microbatch_size": 2, "microbatches": 2}
    sizes = {"layers": layers, "hidden_size": width, "vocabulary": 4096}
    description = run_description(Namespace(**shape, **sizes), 1)
    needed = StageNeeds(Manifest.from_dict(description), 0).memory.on_cpu
    if needed > 0.9 * available_bytes():
        pytest.skip(f"this machine has no {needed / 1e9:.0f} GB of memory to spare")
    found = in_fresh_process(description, 0, recompute)
    risen = found.peak_bytes - found.before_bytes
    print(f"{found.parameters:,}: plan {found.planned_bytes / risen:.2f} of the peak")
    assert found.planned_bytes == pytest.approx(risen, rel=0.15)
