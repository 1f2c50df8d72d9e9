"""Stages built alone: the same bytes and the same results as the whole model."""

import gc
import hashlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import InvalidInput
from dilocox.pipeline.partition import UNCUT, load_config, plan_stages
from dilocox.pipeline.stage import (
    StageModule,
    build_stage,
    chosen_device,
    constant_buffers,
    flatten_parameters,
    parameter_shapes,
)
from tests.pipeline.conftest import one_stage_config
from tests.pipeline.gradients import assert_gradients_equal
from tests.sweeps import sweep

Config = dict[str, Any]
SEED = 7


def build_all(config: Config, num_stages: int) -> list[StageModule]:
    return [build_stage(config, stage, num_stages, SEED) for stage in range(num_stages)]


def whole_model(config: Config, stages: list[StageModule]) -> nn.Module:
    """Plain transformers, with the weights of the stages; strict about names."""
    model = AutoModelForCausalLM.from_config(load_config(config))
    weights = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    return model.train()


def windows(config: Config) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config["vocab_size"], (2, 13), generator=generator)
    return ids[:, :-1], ids[:, 1:]  # [b, t] each


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_chain(stages: list[StageModule], ids: Tensor, targets: Tensor) -> Tensor:
    """Forward and backward as over a network: only hidden states and their gradients cross."""
    inputs: list[Tensor] = [ids]
    outputs: list[Tensor] = []
    for stage in stages:
        outputs.append(stage(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    loss = loss_of(outputs[-1], targets)
    loss.backward()
    for made, received in zip(outputs[-2::-1], inputs[-2:0:-1], strict=True):
        made.backward(received.grad)
    return loss


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_loss_and_gradients_of_the_chain_equal_the_whole_model(
    family_config: Config, num_stages: int
) -> None:
    assert_equals_the_whole_model(family_config, num_stages)


@pytest.mark.parametrize("family", sweep(UNCUT, list(UNCUT)[::5]))
def test_a_family_without_a_plan_runs_as_one_stage(family: str) -> None:
    config = one_stage_config(family)
    assert_equals_the_whole_model(config, 1)
    [stage] = build_all(config, 1)
    ids, _ = windows(config)
    later = ids.clone()
    later[:, -1] = (later[:, -1] + 1) % 67
    assert torch.equal(stage(ids)[:, :-1], stage(later)[:, :-1]), "sees what follows"
    with pytest.raises(InvalidInput, match=f"'{family}' model cannot be parted.*set stages to 1"):
        plan_stages(config, 2)


def assert_equals_the_whole_model(family_config: Config, num_stages: int) -> None:
    stages = build_all(family_config, num_stages)
    whole = whole_model(family_config, stages)
    ids, targets = windows(family_config)
    expected = loss_of(whole(input_ids=ids, use_cache=False).logits, targets)
    expected.backward()
    assert torch.equal(train_chain(stages, ids, targets), expected)
    assert_gradients_equal(stages, whole)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_initial_weights_are_bitwise_the_slices_of_one_stage(
    family_config: Config, num_stages: int
) -> None:
    whole = build_stage(family_config, 0, 1, SEED).state_dict()
    parts = [stage.state_dict() for stage in build_all(family_config, num_stages)]
    assert sorted(whole) == sorted(name for part in parts for name in part)
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in part)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_stage_holds_its_own_parameters_and_nothing_of_another(
    family_config: Config, num_stages: int
) -> None:
    plans = plan_stages(family_config, num_stages)
    for plan, stage in zip(plans, build_all(family_config, num_stages), strict=True):
        held = [*stage.parameters(), *stage.buffers()]
        assert {tensor.device.type for tensor in held} == {"cpu"}
        assert sum(p.numel() for p in stage.parameters()) == plan.num_parameters
        shapes = [(name, tuple(p.shape)) for name, p in stage.named_parameters()]
        assert parameter_shapes(family_config, num_stages, plan.stage) == shapes


def weights_in_memory() -> list[nn.Parameter]:
    return [each for each in gc.get_objects() if type(each) is nn.Parameter]


@pytest.mark.parametrize("family_config", ["llama", "gpt_neox", "deepseek_v2"], indirect=True)
def test_nothing_of_the_rest_of_the_model_is_hidden_behind_a_stage(family_config: Config) -> None:
    before = weights_in_memory()  # held, so that no id is given away again
    stage = build_stage(family_config, 1, 3, SEED)
    gc.collect()
    found = {id(each) for each in weights_in_memory() if not each.is_meta}
    assert found - {id(each) for each in before} == {id(each) for each in stage.parameters()}


def test_buffers_equal_those_of_plain_transformers(family_config: Config) -> None:
    plain = dict(AutoModelForCausalLM.from_config(load_config(family_config)).named_buffers())
    stages = build_all(family_config, 2)
    assert {name for stage in stages for name, _ in stage.named_buffers()} == set(plain)
    for stage in stages:
        for name, buffer in stage.named_buffers():
            assert torch.equal(buffer, plain[name]), name


def test_checkpoint_constants_are_those_of_the_built_stage(family_config: Config) -> None:
    for index, stage in enumerate(build_all(family_config, 2)):
        rest = stage.state_dict().keys() - dict(stage.named_parameters()).keys()
        constants = constant_buffers(family_config, 2, index)
        assert constants.keys() == rest
        assert all(torch.equal(stage.get_buffer(name), constants[name]) for name in rest)
    if family_config["model_type"] == "minimax":
        assert any(constant_buffers(family_config, 1, 0))


def test_initial_weights_are_the_same_on_every_machine(llama_config: Config) -> None:
    stage = build_stage(llama_config, 0, 2, SEED)
    values = b"".join(p.detach().numpy().tobytes() for p in stage.parameters())
    # Peers of a run must agree on this without a download: a change breaks runs under way.
    assert hashlib.sha256(values).hexdigest() == (
        "e5b19aed1be1b861db6cfb50b4e31aaded709aeb4d965a36ea62018acc4e070b"
    )


def test_initial_weights_follow_the_familys_rules_and_the_seed(llama_config: Config) -> None:
    llama_config["hidden_size"], llama_config["initializer_range"] = 256, 0.05
    weights = dict(build_stage(llama_config, 0, 1, SEED).named_parameters())
    table = weights["model.embed_tokens.weight"].detach()
    assert table.std().item() == pytest.approx(0.05, rel=0.02)
    assert table.mean().item() == pytest.approx(0, abs=0.001)
    assert 4 < (table.abs().max() / 0.05).item() <= 6
    assert torch.equal(weights["model.norm.weight"], torch.ones(256))
    assert not weights["model.layers.0.self_attn.q_proj.bias"].any()
    q, k = (weights[f"model.layers.{i}.self_attn.q_proj.weight"].detach() for i in (0, 1))
    assert abs(torch.corrcoef(torch.stack([q.flatten(), k.flatten()]))[0, 1]) < 0.05
    other = dict(build_stage(llama_config, 0, 1, SEED + 1).named_parameters())
    assert not torch.equal(other["model.embed_tokens.weight"], table)


def test_building_a_stage_leaves_the_callers_random_state(llama_config: Config) -> None:
    before = torch.get_rng_state()
    build_stage(llama_config, 1, 2, SEED)
    constant_buffers(llama_config, 2, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_without_a_rule_is_refused_instead_of_left_as_found() -> None:
    config = {"model_type": "apertus", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99}
    with pytest.raises(InvalidInput, match=r"'apertus' has no rule .*act_fn.*choose another"):
        build_stage(config, 0, 1, SEED)


def test_modes_reach_the_model_whose_forward_runs(llama_config: Config) -> None:
    stage = build_stage({**llama_config, "attention_dropout": 0.5}, 0, 2, SEED)
    ids, _ = windows(llama_config)
    stage.eval()
    assert torch.equal(stage(ids), stage(ids))
    stage.train()
    assert not torch.equal(stage(ids), stage(ids))


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_does_not_exist_is_refused(llama_config: Config, stage: int) -> None:
    with pytest.raises(InvalidInput, match=f"stage: {stage} does not exist; choose 0 to 1"):
        build_stage(llama_config, stage, 2, SEED)


def test_flat_parameters_keep_their_values_and_follow_the_flat_vector(
    llama_config: Config,
) -> None:
    stage = build_stage(llama_config, 0, 2, SEED)
    before = {name: p.detach().clone() for name, p in stage.named_parameters()}
    ids, _ = windows(llama_config)
    output = stage(ids).detach()
    layout = FlatLayout.of(parameter_shapes(llama_config, 2, 0))
    flat = flatten_parameters(stage, layout)
    assert flat.shape == (layout.numel,)
    assert flat.dtype == torch.float32
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.requires_grad
        assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    padding = torch.ones(layout.numel, dtype=torch.bool)
    for used in layout.view(padding).values():
        used.fill_(False)
    assert padding.any()
    assert not flat[padding].any()
    assert torch.equal(stage(ids), output)
    flat.mul_(2)
    assert all(torch.equal(p, 2 * before[name]) for name, p in stage.named_parameters())


def test_a_layout_of_another_stage_is_refused(llama_config: Config) -> None:
    stage = build_stage(llama_config, 0, 2, SEED)
    shapes = parameter_shapes(llama_config, 2, 0)
    with pytest.raises(ValueError, match="lm_head"):
        flatten_parameters(stage, FlatLayout.of(parameter_shapes(llama_config, 2, 1)))
    with pytest.raises(ValueError, match="only in their order"):
        flatten_parameters(stage, FlatLayout.of(reversed(shapes)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stage_on_the_gpu_starts_from_the_same_bytes(llama_config: Config) -> None:
    here, there = (build_stage(llama_config, 0, 2, SEED, device=name) for name in ("cpu", "cuda"))
    for (name, ours), theirs in zip(here.named_parameters(), there.parameters(), strict=True):
        assert theirs.is_cuda
        assert torch.equal(ours, theirs.cpu()), name
    ids, _ = windows(llama_config)
    torch.testing.assert_close(there(ids.cuda()).cpu(), here(ids), rtol=1e-4, atol=1e-5)


def test_a_gpu_that_cannot_be_used_leaves_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", full)
    assert chosen_device("auto") == torch.device("cpu")
    assert "no kernel image" in caplog.text and "computing on the CPU" in caplog.text
    with pytest.raises(InvalidInput, match="no kernel image"):
        chosen_device("cuda")
