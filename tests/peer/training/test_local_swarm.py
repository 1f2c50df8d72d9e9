"""Workers in one process, as who studies the method has them: any model, any rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilocox import CodecSpec, OuterSpec, RoundSpec, local_swarm
from dilocox.peer.training.local_swarm import LocalSwarm

H, WORKERS = 4, 3
RAW: Any = {"scheme": "dense", "bits": 32}


def replicas() -> list[nn.Linear]:
    found: list[nn.Linear] = []
    for _ in range(WORKERS):
        torch.manual_seed(1)
        found.append(nn.Linear(48, 96))
    return found


def train(swarm: LocalSwarm, models: list[nn.Linear], steps: int) -> None:
    """Worker n takes n + 1 hundredths off each weight, a step."""
    for _ in range(steps):
        for worker, model in enumerate(models):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_((worker + 1) / 100)
        swarm.trained(8)


def swarm_of(models: list[nn.Linear], arrival: int, **sections: Any) -> LocalSwarm:
    rounds = RoundSpec(inner_steps=H, robust="none")
    return local_swarm(models, rounds=rounds, arrival=arrival, **sections)


def weight(swarm: LocalSwarm) -> Tensor:
    return swarm.layout.view(swarm.anchor)["weight"]


def test_a_round_of_none_moves_all_to_the_mean() -> None:
    models = replicas()
    first = models[0].weight.detach().clone()
    outer = OuterSpec(merge="none", learning_rate=1.0, momentum=0.0)
    swarm = swarm_of(models, 2, outer=outer, codec=CodecSpec(**RAW))
    train(swarm, models, H)
    for found in (weight(swarm), *(model.weight for model in models)):
        torch.testing.assert_close(found, first - H * 0.02)
    values = swarm.layout.numel
    assert 2 * (WORKERS - 1) * 4 * values <= swarm.bytes_sent <= 2 * (WORKERS - 1) * 4 * values + 99


@pytest.mark.parametrize(
    ("merge", "apply", "keeps"), [("rebase", "arrival", 0.75), ("reset", "round_end", 0)]
)
def test_what_a_worker_learnt_meanwhile_goes_on_top_as_the_rule_says(
    merge: Any, apply: Any, keeps: float
) -> None:
    models = replicas()
    first = models[0].weight.detach().clone()
    outer = OuterSpec(merge=merge, apply=apply, learning_rate=1.0, momentum=0.0)
    swarm = swarm_of(models, 1, outer=outer, codec=CodecSpec(**RAW))
    late = 1 if apply == "arrival" else H
    train(swarm, models, H + late - 1)
    torch.testing.assert_close(weight(swarm), first)  # nothing has arrived
    train(swarm, models, 1)
    anchor = first - H * 0.02
    torch.testing.assert_close(weight(swarm), anchor)
    for worker, model in enumerate(models):
        learnt = late * (worker + 1) / 100
        torch.testing.assert_close(model.weight.detach(), anchor - keeps * learnt)


def test_what_is_in_flight_arrives_when_it_is_asked_for() -> None:
    models = replicas()
    swarm = swarm_of(models, 1)  # all sections by default: low rank, 4 bits
    assert swarm.ranks == (16, 0)  # the bias is in no factors
    train(swarm, models, H)
    assert swarm.ranks == (8, 0)  # all values fell alike: one column holds that
    before = swarm.anchor.clone()
    swarm.arrive()
    moved = (swarm.anchor - before).norm()
    assert moved > 0
    swarm.arrive()
    assert (swarm.anchor - before).norm() == moved


def test_an_arrival_beyond_the_round_is_refused() -> None:
    with pytest.raises(ValueError, match="arrival 5: choose from 0 to the 4"):
        swarm_of(replicas(), 5)
