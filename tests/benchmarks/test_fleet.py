"""Replicas side by side, as the benchmarks' simulation trains them, step as each alone does."""

from __future__ import annotations

import pytest
import torch

from benchmarks.convergence_rules import MODEL
from benchmarks.fleet import Fleet
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor
from dilocox.pipeline.stage import build_stage, flatten_parameters
from dilocox.pipeline.stage_worker import next_token_loss

REPLICAS, STEPS, RATE = 3, 3, 1e-3


# Muon makes any rounding of small gradients large
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_fleet_steps_as_its_replicas_would_alone() -> None:
    inner = InnerSpec(learning_rate=RATE)
    fleet = Fleet(MODEL, [5] * REPLICAS, inner)
    torch.manual_seed(0)
    windows = torch.randint(3, 259, (STEPS, REPLICAS, 2, 9))
    for step in windows:
        fleet.step(step, RATE)
    for replica in range(REPLICAS):
        stage = build_stage(MODEL, 0, 1, 5)
        alone = InnerOptimizer(stage.named_parameters(), inner)
        for step in windows[:, replica]:
            next_token_loss(stage(step[:, :-1]), step).backward()
            alone.step(clip_factor(alone.squared_norm(), inner.clip_norm), RATE)
        expected = flatten_parameters(stage, fleet.layout)
        torch.testing.assert_close(fleet.weights[replica], expected, rtol=1e-4, atol=2e-6)


def test_strided_parameters_are_refused() -> None:
    strided = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match="wrong places"):
        InnerOptimizer([("w", strided)], InnerSpec())
