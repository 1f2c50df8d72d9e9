"""Which weights of a model Muon takes, and what both optimizers make of a stated learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dilocox.dht.errors import InvalidInput
from dilocox.peer.training.inner_optimizer import InnerOptimizer, is_for_muon
from dilocox.pipeline.partition import build_skeleton
from dilocox.pipeline.stage import build_stage
from tests.peer.training.small_models import (
    EITHER,
    LLAMA,
    SPECS,
    batches,
    model,
    optimizer_of,
    same,
    weights,
)
from tests.pipeline.whole_model import train_step


def for_muon(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if is_for_muon(name, parameter)}


def test_muon_takes_the_matrices_of_a_llamas_layers_and_a_stage_its_part_of_them() -> None:
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    expected = [
        {
            f"model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}.weight"
            for name in matrices
        }
        for layer in range(2)
    ]
    assert [for_muon(build_stage(LLAMA, stage, 2, 0)) for stage in range(2)] == expected
    assert for_muon(model("muon")) == expected[0] | expected[1]


@pytest.mark.parametrize(
    "family",
    ["gpt_neox", "qwen3", "mistral", "olmo2", "phi3", "granite", "mixtral", "gpt_oss", "opt"],
)
def test_of_any_family_muon_takes_no_embedding_no_head_and_no_vector(family: str) -> None:
    sizes = {**LLAMA, "model_type": family, "pad_token_id": 0}
    skeleton = build_skeleton(sizes)
    chosen = for_muon(skeleton.model)
    ends = [skeleton.model.get_submodule(name) for name in skeleton.opening + skeleton.closing]
    outside = {id(parameter) for end in ends for parameter in end.parameters()}
    linear = {
        f"{name}.weight"
        for name, part in skeleton.model.named_modules()
        if isinstance(part, nn.Linear) and name.startswith(f"{skeleton.layers}.")
    }
    assert linear
    assert linear <= chosen
    for name in chosen:
        parameter = skeleton.model.get_parameter(name)
        assert parameter.ndim == 2
        assert id(parameter) not in outside


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.3.mamba.A_log",
        "model.layers.3.mlp.experts.down_proj_bias",
        "lm_head.0.weight",
        "2.weight",
    ],
)
def test_muon_takes_nothing_else_with_two_dimensions(name: str) -> None:
    assert not is_for_muon(name, nn.Parameter(torch.zeros(4, 4)))


def test_muon_does_not_take_stacked_experts() -> None:
    weight = nn.Parameter(torch.zeros(2, 4, 4))
    assert not is_for_muon("model.layers.0.mlp.experts.weight", weight)


def test_under_muon_a_matrix_has_one_tensor_and_everything_else_three() -> None:
    module = model("muon")
    optimizer = optimizer_of(module, "muon")
    train_step(module, optimizer, batches(1)[0], 1e-2)
    chosen = for_muon(module)
    rest = {name for name, _ in module.named_parameters()} - chosen
    expected = {f"momentum_buffer/{name}" for name in chosen}
    expected |= {f"{key}/{name}" for name in rest for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(optimizer.state_dict().tensors) == expected


def test_a_torch_without_muon_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InvalidInput, match=r"muon, which torch .* install torch 2\.9 or newer"):
        optimizer_of(model("muon"), "muon")
    optimizer_of(model("muon"), "adamw")


@EITHER
def test_a_head_that_states_a_larger_learning_rate_than_the_runs_gets_that_one(kind: str) -> None:
    """A stranger that recruits peers must not have them move their weights where it likes."""
    after: list[dict[str, Tensor]] = []
    for stated in (SPECS[kind].learning_rate, 10.0):
        module = model(kind)
        optimizer = InnerOptimizer(module.named_parameters(), SPECS[kind])
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.step(1.0, stated)
        after.append(weights(module))
    assert same(*after)
