"""Muon as the inner optimizer: for which weights, equal to torch's own, resumable."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import InnerOptimizer, is_for_muon
from dilocox.pipeline.partition import build_skeleton
from dilocox.pipeline.stage import build_stage
from tests.peer.test_inner_optimizer import batches, same, through_files, weights
from tests.pipeline.whole_model import train_step

MUON = InnerSpec(
    optimizer="muon",
    learning_rate=1e-2,
    muon_learning_rate=3e-3,
    muon_momentum=0.9,
    weight_decay=0.1,
    clip_norm=0.5,
)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model(seed: int = 0, stage: int = 0, num_stages: int = 1) -> nn.Module:
    return build_stage(LLAMA, stage, num_stages, seed)


def for_muon(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if is_for_muon(name, parameter)}


def optimizer_of(module: nn.Module, spec: InnerSpec = MUON, **options: Any) -> InnerOptimizer:
    return InnerOptimizer(module.named_parameters(), spec, **options)


def plain_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """What anybody would write for this llama: told apart by the modules, not by their names."""
    layers = module.get_submodule("model.layers")
    linear = [part.weight for part in layers.modules() if isinstance(part, nn.Linear)]
    embedding = module.get_parameter("model.embed_tokens.weight")
    head = module.get_parameter("lm_head.weight")
    norms = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    groups = [
        {"params": [embedding, head], "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(linear, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=MUON.betas, eps=MUON.eps),
    ]


def plain_step(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: list[Tensor],
    rate: float,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    for windows in batch:
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            logits = module(windows[:, :-1])
        targets = windows[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets) / len(batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), MUON.clip_norm)
    for optimizer, learning_rate in zip(optimizers, (rate * (3e-3 / 1e-2), rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()
    if scaler is not None:
        scaler.update()


class TestWhichWeights:
    def test_of_a_llama_the_matrices_of_its_layers(self) -> None:
        expected = {
            f"model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}.weight"
            for layer in range(2)
            for name in MATRICES
        }
        assert for_muon(model()) == expected

    def test_a_stage_has_its_part_of_those_of_the_whole_model(self) -> None:
        stages = [for_muon(model(stage=stage, num_stages=2)) for stage in range(2)]
        assert [len(stage) for stage in stages] == [7, 7]
        assert stages[0] | stages[1] == for_muon(model())

    @pytest.mark.parametrize(
        "family", ["gpt_neox", "qwen3", "mistral", "olmo2", "phi3", "granite", "mixtral", "gpt_oss"]
    )
    def test_of_any_family_no_embedding_no_head_and_no_vector(self, family: str) -> None:
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
    def test_nothing_else_with_two_dimensions(self, name: str) -> None:
        assert not is_for_muon(name, nn.Parameter(torch.zeros(4, 4)))

    def test_stacked_experts_stay_with_adamw(self) -> None:
        weight = nn.Parameter(torch.zeros(2, 4, 4))
        assert not is_for_muon("model.layers.0.mlp.experts.weight", weight)


class TestEqualsTorch:
    def test_steps_equal_muon_and_adamw_of_torch_exactly(self) -> None:
        ours, plain = model(), model()
        optimizer, optimizers = optimizer_of(ours), plain_optimizers(plain)
        for step, batch in enumerate(batches(5)):
            rate = 1e-2 / (step + 1)
            assert not train_step(ours, optimizer, batch, rate).skipped
            plain_step(plain, optimizers, batch, rate)
            assert same(weights(ours), weights(plain))

    def test_fp16_takes_the_steps_of_one_plain_gradient_scaler(self) -> None:
        ours, plain = model(), model()
        optimizer, optimizers = optimizer_of(ours, precision="fp16"), plain_optimizers(plain)
        scaler = torch.amp.GradScaler("cpu")
        skips = []
        for step, batch in enumerate(batches(4)):
            # The second step overflows in a weight of each kind, because a plain scaler skips the
            # step of each optimizer by itself.
            factor = math.inf if step == 1 else 1.0
            hooks = [
                torch.Tensor.register_hook(
                    module.get_parameter(name), lambda grad, by=factor: grad * by
                )
                for module in (ours, plain)
                for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight")
            ]
            skips.append(train_step(ours, optimizer, batch, 1e-2).skipped)
            plain_step(plain, optimizers, batch, 1e-2, scaler)
            for handle in hooks:
                handle.remove()
            assert same(weights(ours), weights(plain))
            assert optimizer.state_dict().values["scaler"] == scaler.state_dict()
        assert skips == [False, True, False, False]

    def test_two_stages_with_one_clip_factor_equal_the_whole(self) -> None:
        whole, halved = model(), model()
        named = list(halved.named_parameters())
        is_first = [name.startswith(("model.embed", "model.layers.0")) for name, _ in named]
        halves = [
            InnerOptimizer(
                [item for item, first in zip(named, is_first, strict=True) if first == wanted], MUON
            )
            for wanted in (True, False)
        ]
        together = optimizer_of(whole)
        for batch in batches(3):
            for module in (whole, halved):
                for windows in batch:
                    logits = module(windows[:, :-1])
                    F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
            together.step(0.5, 1e-2)
            assert [half.step(0.5, 1e-2) for half in halves] == [True, True]
            assert same(weights(whole), weights(halved))

    def test_the_loss_falls(self) -> None:
        module = model()
        optimizer = optimizer_of(module)
        [batch] = batches(1)
        losses = [train_step(module, optimizer, batch, 1e-2).loss for _ in range(30)]
        assert losses[-1] < 0.5 * losses[0]

    def test_a_stage_without_such_matrices_trains_all_the_same(self) -> None:
        module = nn.Sequential(nn.Embedding(32, 8), nn.LayerNorm(8))
        ours, plain = optimizer_of(module), nn.Sequential(nn.Embedding(32, 8), nn.LayerNorm(8))
        plain.load_state_dict(module.state_dict())
        adamw = optimizer_of(plain, replace(MUON, optimizer="adamw"))
        for net, optimizer in ((module, ours), (plain, adamw)):
            net(torch.arange(5)).square().sum().backward()
            assert optimizer.step(1.0, 1e-2)
        assert same(weights(module), weights(plain))


class TestSkips:
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_step_that_is_not_finite_elsewhere_leaves_weights_and_momentum(
        self, precision: str
    ) -> None:
        module = model()
        optimizer = optimizer_of(module, precision=precision)
        first, second = batches(2)
        train_step(module, optimizer, first, 1e-2)
        before = weights(module)
        state = {name: it.clone() for name, it in optimizer.state_dict().tensors.items()}
        logits = module(second[0][:, :-1])
        optimizer.scale(logits.square().mean()).backward()
        assert not optimizer.step(math.nan, 1e-2)
        assert same(weights(module), before)
        assert same(optimizer.state_dict().tensors, state)
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not train_step(module, optimizer, second, 1e-2).skipped

    @pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
    def test_one_gradient_that_is_not_finite_stops_both(self, name: str) -> None:
        module = model()
        optimizer = optimizer_of(module)
        before = weights(module)
        torch.Tensor.register_hook(module.get_parameter(name), lambda grad: grad * math.inf)
        assert train_step(module, optimizer, batches(1)[0], 1e-2).skipped
        assert same(weights(module), before)


class TestResume:
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_run_resumed_from_a_file_equals_one_that_never_stopped(
        self, precision: str, tmp_path: Path
    ) -> None:
        steady = model()
        optimizer = optimizer_of(steady, precision=precision)
        steps = batches(6)
        for batch in steps[:3]:
            train_step(steady, optimizer, batch, 1e-2)
        resumed = model(seed=9)
        resumed.load_state_dict(weights(steady))
        other = optimizer_of(resumed, precision=precision)
        state = through_files(optimizer.state_dict(), tmp_path)
        other.load_state_dict(state)
        assert same(other.state_dict().tensors, state.tensors)
        for batch in steps[3:]:
            train_step(steady, optimizer, batch, 1e-2)
            train_step(resumed, other, batch, 1e-2)
        assert same(weights(steady), weights(resumed))
        assert same(other.state_dict().tensors, optimizer.state_dict().tensors)
        assert other.state_dict().values == optimizer.state_dict().values

    def test_a_matrix_has_one_tensor_and_everything_else_three(self) -> None:
        module = model()
        optimizer = optimizer_of(module)
        train_step(module, optimizer, batches(1)[0], 1e-2)
        chosen = for_muon(module)
        rest = {name for name, _ in module.named_parameters()} - chosen
        expected = {f"momentum_buffer/{name}" for name in chosen}
        expected |= {f"{key}/{name}" for name in rest for key in ("step", "exp_avg", "exp_avg_sq")}
        assert set(optimizer.state_dict().tensors) == expected

    def test_a_state_of_adamw_is_refused(self) -> None:
        module = model()
        adamw = optimizer_of(module, replace(MUON, optimizer="adamw"))
        train_step(module, adamw, batches(1)[0], 1e-2)
        optimizer = optimizer_of(module)
        with pytest.raises(InvalidInput, match=r"holds step/model\.layers\.\S+ of shape"):
            optimizer.load_state_dict(adamw.state_dict())
        assert not optimizer.state_dict().tensors


def test_a_torch_without_muon_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InvalidInput, match=r"muon, which torch .* install torch 2\.9 or newer"):
        optimizer_of(model())
    optimizer_of(model(), replace(MUON, optimizer="adamw"))
