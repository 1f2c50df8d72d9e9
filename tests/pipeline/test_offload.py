"""Weights and moments in the machine's memory: the same steps, and copies that are narrow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dilocox.peer.training.offload import OffloadedOptimizer
from dilocox.pipeline.stage import build_stage
from tests.pipeline.chains import (
    SEED,
    SPEC,
    Chain,
    Config,
    Weights,
    batches,
    chain,
    rate,
    same,
    weights,
)
from tests.pipeline.conftest import FAMILIES
from tests.sweeps import sweep

CPU, NARROW = torch.device("cpu"), torch.bfloat16
STEPS = 3


def offloaded(config: Config, num_stages: int, **options: Any) -> Chain:
    stages = [build_stage(config, stage, num_stages, SEED) for stage in range(num_stages)]
    optimizers = [OffloadedOptimizer(stage, SPEC, CPU, precision="bf16") for stage in stages]
    return Chain(stages, [*optimizers], **options)


def plain(config: Config, num_stages: int, **options: Any) -> Chain:
    return chain(config, num_stages, precisions=("bf16",) * num_stages, **options)


def refreshed(chained: Chain) -> Weights:
    """What the stages compute with."""
    for optimizer in chained.optimizers:
        optimizer.refresh()
    named = [item for stage in chained.stages for item in stage.named_parameters()]
    return {name: parameter.detach() for name, parameter in named}


@pytest.mark.parametrize(("num_stages", "recompute"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("family", sweep(["gpt2", "llama", "gemma2"]))  # but llama: tied tables
def test_steps_are_those_of_autocast_over_wide_weights(
    family: str, num_stages: int, recompute: bool
) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    there = plain(config, num_stages, recompute=recompute)
    here = offloaded(config, num_stages, recompute=recompute)
    for step, batch in enumerate(batches(config, STEPS)):
        assert here.step(batch, rate(step)) == there.step(batch, rate(step))
    expected, computed_with = weights(there), refreshed(here)
    narrowed = {name: expected[name].to(copy.dtype) for name, copy in computed_with.items()}
    assert same(computed_with, narrowed)


def test_experts_are_narrow_and_learn_as_well(mixture_config: Config) -> None:
    there, here = plain(mixture_config, 2), offloaded(mixture_config, 2)
    for step, batch in enumerate(batches(mixture_config, STEPS)):
        losses = [each.step(batch, rate(step))[0] for each in (here, there)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert {p.dtype for s in here.stages for p in s.parameters() if p.dim() == 3} == {NARROW}


def test_stage_keeps_neither_gradients_nor_wide_matrices(llama_config: Config) -> None:
    chained = offloaded(llama_config, 1)
    chained.run(batches(llama_config, 1)[0])
    stage = chained.stages[0]
    assert all(parameter.grad is None for parameter in stage.parameters())
    tables = {id(m.weight) for m in stage.modules() if isinstance(m, nn.Embedding)}
    wide = {
        name
        for name, parameter in stage.named_parameters()
        if parameter.dtype == torch.float32 and parameter.dim() > 1
    }
    assert wide == {name for name, p in stage.named_parameters() if id(p) in tables}
    assert any(parameter.dtype == NARROW for parameter in stage.parameters())


def test_weights_that_were_changed_from_outside_are_taken_up(llama_config: Config) -> None:
    """As a merge does, between two inner steps."""
    stage = build_stage(llama_config, 0, 1, SEED)
    outside = dict(stage.named_parameters())["model.norm.weight"].data
    chained = Chain([stage], [OffloadedOptimizer(stage, SPEC, CPU, precision="bf16")])
    batch = batches(llama_config, 1)[0]
    chained.run(batch)
    before = chained.workers[0].loss
    chained.restart()
    outside.zero_()
    chained.run(batch)
    assert chained.workers[0].loss != before
    # all logits are zero
    assert chained.workers[0].evaluate(None, batch[0]) == pytest.approx(
        batch[0][:, 1:].numel() * torch.tensor(float(llama_config["vocab_size"])).log().item()
    )


def test_restart_drops_what_was_gathered(llama_config: Config) -> None:
    one, other = (offloaded(llama_config, 1) for _ in range(2))
    first, second = batches(llama_config, 2)
    one.run(first)
    one.restart()
    assert one.step(second, 1e-2) == other.step(second, 1e-2)


def test_state_goes_from_one_kind_to_the_other(llama_config: Config) -> None:
    """A volunteer may choose anew at each start."""
    batch = batches(llama_config, 2)
    here = offloaded(llama_config, 1)
    here.step(batch[0], 1e-2)
    there = plain(llama_config, 1)
    there.step(batch[0], 1e-2)
    state = here.optimizers[0].state_dict()
    assert {tensor.dtype for tensor in state.tensors.values()} == {torch.float32}
    there.optimizers[0].load_state_dict(state)
    assert here.step(batch[1], 1e-2) == there.step(batch[1], 1e-2)
