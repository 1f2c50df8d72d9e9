"""Inner steps: equal to plain PyTorch to the last bit, resumable, and never poisoned."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import (
    LEAST_LOSS_SCALE,
    MOST_LOSS_SCALE,
    InnerOptimizer,
    InnerState,
    clip_factor,
    learning_rate,
    usable_precision,
)
from dilocox.pipeline.stage_worker import next_token_loss
from tests.peer.training.small_models import (
    EITHER,
    SPEC,
    SPECS,
    VOCABULARY,
    batches,
    model,
    optimizer_of,
    same,
    weights,
)
from tests.pipeline.whole_model import train_step

SCALED_OR_NOT = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def hook(module: nn.Module, name: str, factor: float) -> RemovableHandle:
    """Multiply the gradient of a weight by a factor, in every backward."""
    return torch.Tensor.register_hook(module.get_parameter(name), lambda grad: grad * factor)


def through_files(state: InnerState, folder: Path) -> InnerState:
    """The same, written and read as a snapshot does."""
    save_file(state.tensors, folder / "inner.safetensors")
    values = json.loads(json.dumps(state.values))
    return InnerState(tensors=load_file(folder / "inner.safetensors"), values=values)


def plain_optimizers(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """As anybody would write them: for Muon the linear layers, told by their type, not by name."""
    parts = list(module.get_submodule("model.layers").modules()) if kind == "muon" else []
    linear = [part.weight for part in parts if isinstance(part, nn.Linear)]
    others = [each for each in module.parameters() if all(each is not taken for taken in linear)]
    groups = [
        {"params": [each for each in others if each.ndim == 2], "weight_decay": 0.1},
        {"params": [each for each in others if each.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=SPEC.betas, eps=SPEC.eps, fused=True)
    if kind == "adamw":
        return [adamw]
    muon = torch.optim.Muon(linear, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


def plain_step(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: list[Tensor],
    rate: float,
    *,
    clip_norm: float,
    scaler: torch.amp.GradScaler,
) -> tuple[float, float]:
    """Loss and norm of the gradients; fp16 where the scaler is enabled."""
    losses: list[Tensor] = []
    for windows in batch:
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            logits = module(windows[:, :-1])
        losses.append(next_token_loss(logits, windows) / len(batch))
        scaler.scale(losses[-1]).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
    for optimizer, of_the_rate in zip(optimizers, (1.0, 3e-3 / 1e-2), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * of_the_rate
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    return torch.stack(losses).sum().item(), float(norm)


# ---- equal to PyTorch ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "precision", "clip_norm"),
    [
        ("adamw", "fp32", 1e-3),
        ("adamw", "fp32", 0.5),
        ("adamw", "fp32", 1e6),
        ("adamw", "fp16", 0.5),
        ("muon", "fp32", 0.5),
        ("muon", "fp16", 0.5),
    ],
)
def test_steps_equal_those_of_torch_with_clipping_and_a_gradient_scaler_exactly(
    kind: str, precision: str, clip_norm: float
) -> None:
    ours, plain = model(kind), model(kind)
    optimizer = InnerOptimizer(
        ours.named_parameters(),
        replace(SPECS[kind], clip_norm=clip_norm),
        precision=precision,  # type: ignore[arg-type]
    )
    optimizers = plain_optimizers(plain, kind)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    # in a weight of each kind, because a plain scaler skips the step of each optimizer by itself
    names = {
        "adamw": ["2.weight"],
        "muon": ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"],
    }
    for step, batch in enumerate(batches(6)):
        rate, overflows = 1e-2 / (step + 1), precision == "fp16" and step == 2
        # which overflows fp32 once the gradients are scaled, not before
        factor = 1e38 if overflows else 1.0
        hooks = [hook(module, name, factor) for module in (ours, plain) for name in names[kind]]
        result = train_step(ours, optimizer, batch, rate)
        loss, norm = plain_step(plain, optimizers, batch, rate, clip_norm=clip_norm, scaler=scaler)
        for handle in hooks:
            handle.remove()
        assert result.skipped is overflows
        assert same(weights(ours), weights(plain))
        if precision == "fp32":
            assert (result.loss, math.sqrt(result.squared_norm)) == (loss, norm)
        else:
            assert optimizer.state_dict().values["scaler"] == scaler.state_dict()


def test_parameters_that_are_views_of_one_vector_are_stepped_in_place() -> None:
    module, plain = model(), model()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    start = 0
    for parameter in module.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    [batch] = batches(1)
    train_step(module, optimizer_of(module), batch, 1e-2)
    train_step(plain, optimizer_of(plain), batch, 1e-2)
    assert torch.equal(flat, torch.cat([p.detach().reshape(-1) for p in plain.parameters()]))


def test_vectors_have_no_weight_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    before = weights(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert optimizer_of(module).step(1.0, 1e-2)
    after = weights(module)
    assert torch.equal(before["0.bias"], after["0.bias"])
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 1e-2 * 0.1))


def test_a_stage_without_weights_for_muon_trains_with_adamw_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, plain = (nn.Sequential(nn.Embedding(32, 8), nn.LayerNorm(8)) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    for module, kind in ((ours, "muon"), (plain, "adamw")):
        module(torch.arange(5)).square().sum().backward()
        assert optimizer_of(module, kind).step(1.0, 1e-2)
    assert same(weights(ours), weights(plain))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "AdamW steps them all" in said


def test_in_the_norm_of_millions_of_values_no_small_one_is_lost() -> None:
    """torch adds fp32 squares up in one vector: beside a large one those of 2^22 ones are none, and
    an embedding of 2^28 values had a norm 4 % too small.
    """
    weight = nn.Parameter(torch.zeros(1 << 22))
    optimizer = InnerOptimizer([("weight", weight)], SPEC)
    weight.grad = torch.ones(1 << 22)
    weight.grad[:16] = 4096.0
    exact = float(weight.grad.double().square().sum())
    assert optimizer.squared_norm() == pytest.approx(exact, rel=1e-4)


@EITHER
def test_two_stages_with_one_clip_factor_equal_the_whole(kind: str) -> None:
    whole, halved = model(kind), model(kind)
    named = list(halved.named_parameters())
    cut = {"adamw": 3, "muon": 10}[kind]
    halves = [InnerOptimizer(part, SPECS[kind]) for part in (named[:cut], named[cut:])]
    together = optimizer_of(whole, kind)
    for batch in batches(3):
        for module in (whole, halved):
            for windows in batch:
                (next_token_loss(module(windows[:, :-1]), windows) / 2).backward()
        squared_norm = sum(half.squared_norm() for half in halves)
        assert squared_norm == pytest.approx(together.squared_norm())
        factor = clip_factor(squared_norm, SPEC.clip_norm)
        assert [each.step(factor, 1e-2) for each in (together, *halves)] == [True] * 3
        assert same(weights(whole), weights(halved))


def test_clip_factor_scales_down_to_the_norm_and_never_up() -> None:
    assert clip_factor(16.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(0.25, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert math.isnan(clip_factor(math.nan, 1.0))


# ---- nothing poisons the weights ----------------------------------------------------------------
@EITHER
@SCALED_OR_NOT
def test_a_step_that_is_not_finite_on_another_stage_leaves_weights_and_state(
    kind: str, precision: str
) -> None:
    module = model(kind)
    optimizer = optimizer_of(module, kind, precision=precision)
    first, second = batches(2)
    train_step(module, optimizer, first, 1e-2)
    before, scale = weights(module), optimizer.loss_scale
    state = {name: it.clone() for name, it in optimizer.state_dict().tensors.items()}
    optimizer.scale(module(second[0][:, :-1]).square().mean()).backward()
    assert not optimizer.step(clip_factor(math.inf, 1.0), 1e-2)
    assert same(weights(module), before)
    assert same(optimizer.state_dict().tensors, state)
    assert optimizer.loss_scale == (scale / 2 if precision == "fp16" else 1.0)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not train_step(module, optimizer, second, 1e-2).skipped


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_skips_the_step_and_training_goes_on(poison: float) -> None:
    module, undisturbed = model(), model()
    optimizer, other = optimizer_of(module), optimizer_of(undisturbed)
    first, second, third = batches(3)
    train_step(module, optimizer, first, 1e-2)
    result = train_step(lambda ids: module(ids) * poison, optimizer, second, 1e-2)
    train_step(module, optimizer, third, 1e-2)
    for batch in (first, third):
        train_step(undisturbed, other, batch, 1e-2)
    assert result.skipped
    assert not math.isfinite(result.loss)
    assert optimizer.steps == 2
    assert same(weights(module), weights(undisturbed))


def test_a_loss_that_is_not_finite_skips_the_step_although_the_norm_is_fine() -> None:
    module = model()
    before = weights(module)
    forbidden = torch.zeros(VOCABULARY)
    forbidden[3] = -math.inf  # infinite loss where 3 is the target, but a finite gradient
    windows = torch.full((1, 9), 3)
    result = train_step(lambda ids: module(ids) + forbidden, optimizer_of(module), [windows], 1e-2)
    assert math.isinf(result.loss)
    assert math.isfinite(result.squared_norm)
    assert result.skipped
    assert same(weights(module), before)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("adamw", "2.weight"),
        ("muon", "model.layers.0.mlp.up_proj.weight"),
        ("muon", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_one_gradient_that_is_not_finite_skips_the_step_of_all_though_the_loss_is_fine(
    kind: str, name: str, factor: float
) -> None:
    module = model(kind)
    before = weights(module)
    hook(module, name, factor)
    result = train_step(module, optimizer_of(module, kind), batches(1)[0], 1e-2)
    assert math.isfinite(result.loss)
    assert result.skipped
    assert same(weights(module), before)


# ---- precision and loss scale --------------------------------------------------------------------
def test_bf16_runs_matrix_products_in_bf16_and_the_loss_in_fp32() -> None:
    module = model()
    optimizer = optimizer_of(module, precision="bf16")
    seen: list[torch.dtype] = []

    def watched(ids: Tensor) -> Tensor:
        logits = module(ids)
        seen.append(logits.dtype)
        return logits

    losses = [train_step(watched, optimizer, batch, 1e-2).loss for batch in batches(1) * 20]
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    assert losses[-1] < losses[0] - 0.5
    bits = torch.tensor(losses).view(torch.int32)
    assert (bits & 0xFFFF).any(), "a mean in bf16 would have no low bits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_in_the_manifests_precision_and_resumes(precision: str) -> None:
    spec = replace(SPEC, precision=precision)
    steady, resumed = model().cuda(), model().cuda()
    optimizer = InnerOptimizer(steady.named_parameters(), spec)
    assert optimizer.precision == precision
    batch = batches(1)[0]
    losses = [train_step(steady, optimizer, batch, 1e-2).loss for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5
    other = InnerOptimizer(resumed.named_parameters(), spec)
    resumed.load_state_dict(weights(steady))
    state = optimizer.state_dict()
    on_cpu = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    other.load_state_dict(InnerState(tensors=on_cpu, values=state.values))
    ours = train_step(steady, optimizer, batch, 1e-2)
    assert train_step(resumed, other, batch, 1e-2).loss == pytest.approx(ours.loss, rel=1e-4)


def test_fp16_reports_the_norm_of_unscaled_gradients() -> None:
    module, plain = model(), model()
    [batch] = batches(1)
    scaled = train_step(module, optimizer_of(module, precision="fp16"), batch, 1e-2)
    exact = train_step(plain, optimizer_of(plain), batch, 1e-2)
    assert scaled.squared_norm == pytest.approx(exact.squared_norm, rel=0.02)


@SCALED_OR_NOT
@pytest.mark.parametrize("normed", [False, True])
def test_dropped_gradients_leave_no_trace(precision: str, normed: bool) -> None:
    disturbed, steady = model(), model()
    optimizers = [optimizer_of(it, precision=precision) for it in (disturbed, steady)]
    first, dropped, second = batches(3)
    for module, optimizer in zip((disturbed, steady), optimizers, strict=True):
        train_step(module, optimizer, first, 1e-2)
    loss = next_token_loss(disturbed(dropped[0][:, :-1]), dropped[0])
    optimizers[0].scale(loss).backward()
    if normed:  # which unscales, in fp16
        assert optimizers[0].squared_norm() > 0
    optimizers[0].drop()
    assert all(parameter.grad is None for parameter in disturbed.parameters())
    assert optimizers[0].squared_norm() == 0.0
    optimizers[0].drop()
    results = [
        train_step(module, optimizer, second, 1e-2)
        for module, optimizer in zip((disturbed, steady), optimizers, strict=True)
    ]
    assert results[0] == results[1]
    assert same(weights(disturbed), weights(steady))
    assert optimizers[0].state_dict().values == optimizers[1].state_dict().values
    assert optimizers[0].steps == 2


@pytest.mark.parametrize("run_precision", ["fp32", "bf16"])
def test_there_is_no_loss_scale_unless_the_run_is_in_fp16(run_precision: str) -> None:
    module = model()
    optimizer = InnerOptimizer(module.named_parameters(), replace(SPEC, precision=run_precision))
    optimizer.take_loss_scale(8.0)
    assert optimizer.loss_scale == 1.0
    assert float(optimizer.scale(torch.ones(()))) == 1.0


def test_a_fault_of_others_does_not_take_the_loss_scale_away() -> None:
    """It was halved for each step that a broken member spoilt, down to what loses all gradients."""
    module, other = model(), model()
    optimizer = optimizer_of(module, precision="fp16")
    batch = batches(1)[0]
    train_step(module, optimizer, batch, 1e-2)
    before = optimizer.loss_scale
    for _ in range(200):
        assert not optimizer.step(math.nan, 1e-2)
    assert optimizer.loss_scale == LEAST_LOSS_SCALE < before
    state = optimizer.state_dict()
    state.values["scaler"]["scale"] = 2.0**-41  # as an older one kept it
    again = optimizer_of(other, precision="fp16")
    again.load_state_dict(state)
    assert again.loss_scale == LEAST_LOSS_SCALE
    optimizer.restore_loss_scale()
    assert optimizer.loss_scale == before
    optimizer.restore_loss_scale()
    assert not train_step(module, optimizer, batch, 1e-2).skipped


def test_the_loss_scale_of_cpus_alone_has_a_bound() -> None:
    """Nothing overflows in fp32: it doubled until the head's frames were refused."""
    module = model()
    optimizer = InnerOptimizer(module.named_parameters(), replace(SPEC, precision="fp16"))
    optimizer.take_loss_scale(2.0**40)
    train_step(module, optimizer, batches(1)[0], 1e-2)
    assert optimizer.loss_scale == MOST_LOSS_SCALE


def test_a_cpu_in_a_run_of_fp16_has_a_loss_scale_and_trains_as_without() -> None:
    scaled, plain = model(), model()
    optimizer = InnerOptimizer(scaled.named_parameters(), replace(SPEC, precision="fp16"))
    other = optimizer_of(plain)
    assert optimizer.precision == "fp32"
    assert optimizer.loss_scale > 1
    for batch in batches(3):
        ours, theirs = (
            train_step(it, by, batch, 1e-2) for it, by in ((scaled, optimizer), (plain, other))
        )
        assert ours == theirs  # powers of two cost no bit
    assert same(weights(scaled), weights(plain))


def test_the_scaler_is_asked_once_a_step_because_that_waits_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = optimizer_of(model(), precision="fp16")
    asked, get_scale = list[float](), torch.amp.GradScaler.get_scale

    def counted(scaler: torch.amp.GradScaler) -> float:
        asked.append(get_scale(scaler))
        return asked[-1]

    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", counted)
    for _ in range(5):
        optimizer.take_loss_scale(optimizer.loss_scale)
    assert asked == [optimizer.loss_scale]
    assert not optimizer.step(math.nan, 1e-2)
    assert optimizer.loss_scale == asked[0] / 2


def test_a_loss_scale_can_be_taken_over_also_after_a_dropped_step() -> None:
    module = model()
    optimizer = optimizer_of(module, precision="fp16")
    assert float(optimizer.scale(torch.ones(()))) == optimizer.loss_scale == 2.0**16
    assert optimizer.squared_norm() == 0.0
    optimizer.drop()
    optimizer.take_loss_scale(128.0)
    assert float(optimizer.scale(torch.ones(()))) == optimizer.loss_scale == 128.0
    assert not train_step(module, optimizer, batches(1)[0], 1e-2).skipped


def test_taking_the_same_loss_scale_again_forgets_nothing() -> None:
    module = model()
    optimizer = optimizer_of(module, precision="fp16")
    [[windows]] = batches(1, microbatches=1)
    optimizer.scale(next_token_loss(module(windows[:, :-1]), windows)).backward()
    squared_norm = optimizer.squared_norm()
    optimizer.take_loss_scale(optimizer.loss_scale)
    assert optimizer.step(1.0, 1e-2)  # would unscale twice
    plain = model()
    other = optimizer_of(plain)
    next_token_loss(plain(windows[:, :-1]), windows).backward()
    assert squared_norm == other.squared_norm()
    other.step(1.0, 1e-2)
    assert same(weights(module), weights(plain))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60])
def test_a_loss_scale_that_is_none_is_refused(scale: float) -> None:
    optimizer = optimizer_of(model(), precision="fp16")
    with pytest.raises(ValueError, match="loss scale must be positive and finite"):
        optimizer.take_loss_scale(scale)
    assert optimizer.loss_scale == 2.0**16


# ---- resume --------------------------------------------------------------------------------------
@EITHER
@SCALED_OR_NOT
def test_a_run_resumed_from_a_file_equals_one_that_never_stopped(
    kind: str, precision: str, tmp_path: Path
) -> None:
    steady, resumed = model(kind), model(kind, seed=9)
    optimizer, other = (optimizer_of(it, kind, precision=precision) for it in (steady, resumed))
    steps = batches(6)
    for batch in steps[:3]:
        train_step(steady, optimizer, batch, 1e-2)
    resumed.load_state_dict(weights(steady))
    state = through_files(optimizer.state_dict(), tmp_path)
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    other.load_state_dict(state)
    assert same(other.state_dict().tensors, state.tensors)
    for batch in steps[3:]:
        train_step(steady, optimizer, batch, 1e-2)
        train_step(resumed, other, batch, 1e-2)
    assert same(weights(steady), weights(resumed))
    assert other.steps == optimizer.steps == 6
    assert same(other.state_dict().tensors, optimizer.state_dict().tensors)
    assert other.state_dict().values == optimizer.state_dict().values
    assert same(state.tensors, kept), "a step has changed what the state was loaded from"


def test_a_state_before_the_first_step_can_be_saved_and_loaded() -> None:
    optimizer = optimizer_of(model())
    optimizer.load_state_dict(optimizer_of(model()).state_dict())
    assert optimizer.steps == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "exp_avg/9.weight": torch.zeros(2)},
        lambda tensors: {**tensors, "exp_avg/2.bias": torch.zeros(2)},
        lambda tensors: {**tensors, "velocity/2.bias": torch.zeros(VOCABULARY)},
    ],
)
def test_a_state_of_other_parameters_is_refused_by_name(change) -> None:  # type: ignore[no-untyped-def]
    module = model()
    optimizer = optimizer_of(module)
    train_step(module, optimizer, batches(1)[0], 1e-2)
    state = optimizer.state_dict()
    with pytest.raises(InvalidInput, match=r"holds (exp_avg|velocity)/\d\.\w+ of shape"):
        optimizer.load_state_dict(InnerState(tensors=change(state.tensors), values=state.values))


def test_muon_refuses_a_state_of_adamw() -> None:
    module = model("muon")
    adamw = optimizer_of(module, "adamw")
    train_step(module, adamw, batches(1)[0], 1e-2)
    optimizer = optimizer_of(module, "muon")
    with pytest.raises(InvalidInput, match=r"holds step/model\.layers\.\S+ of shape"):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state_dict().tensors


# ---- schedule ------------------------------------------------------------------------------------
SCHEDULE = InnerSpec(learning_rate=2e-3, warmup_tokens=1000, final_fraction=0.1)


@pytest.mark.parametrize(
    ("warmup_tokens", "end_tokens", "tokens", "rate"),
    [
        (1000, 10_000, 0, 0.0),
        (1000, 10_000, 250, 0.5e-3),
        (1000, 10_000, 1000, 2e-3),
        (1000, 10_000, 3250, 1.736e-3),
        (1000, 10_000, 5500, 1.1e-3),  # half way: the mean of peak and end
        (1000, 10_000, 10_000, 0.2e-3),
        (1000, 10_000, 10**9, 0.2e-3),
        (0, 10_000, 0, 2e-3),
        (1000, 1000, 1000, 0.2e-3),  # a run that ends within its warmup
        (1000, 500, 500, 1e-3),
    ],
)
def test_the_learning_rate_rises_to_the_peak_and_falls_to_the_end(
    warmup_tokens: int, end_tokens: int, tokens: int, rate: float
) -> None:
    spec = replace(SCHEDULE, warmup_tokens=warmup_tokens)
    assert learning_rate(spec, end_tokens, tokens) == pytest.approx(rate, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "tokens", "rate"),
    [
        ("linear", 1000, 2e-3),
        ("linear", 5500, 1.1e-3),
        ("linear", 10_000, 0.2e-3),
        ("wsd", 500, 1e-3),
        ("wsd", 5500, 2e-3),
        ("wsd", 8000, 2e-3),  # the last fifth begins
        ("wsd", 9000, 1.1e-3),
        ("wsd", 10**9, 0.2e-3),
        ("constant", 500, 1e-3),
        ("constant", 5500, 2e-3),
        ("constant", 10**9, 2e-3),
    ],
)
def test_the_learning_rate_follows_the_schedule_of_the_run(
    schedule: Literal["linear", "wsd", "constant"], tokens: int, rate: float
) -> None:
    spec = replace(SCHEDULE, schedule=schedule)
    assert learning_rate(spec, 10_000, tokens) == pytest.approx(rate)


def test_old_gpus_that_only_emulate_bf16_compute_in_fp32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability, precision in ((7, 5), "fp32"), ((8, 0), "bf16"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert usable_precision("bf16", gpu) == precision
    assert "(7.5) has no bf16" in caplog.text
    assert usable_precision("fp16", gpu) == "fp16"
    assert usable_precision("bf16", torch.device("cpu")) == "fp32"


@EITHER
def test_what_a_step_is_still_to_take_is_its_gradients_and_at_first_the_state(kind: str) -> None:
    module = model(kind)
    optimizer = optimizer_of(module, kind)
    cpu, weights_bytes = torch.device("cpu"), sum(each.nbytes for each in module.parameters())
    assert optimizer.untaken_bytes(torch.device("cuda")) == 0
    first = optimizer.untaken_bytes(cpu)
    train_step(module, optimizer, batches(1)[0], 1.0)
    state = optimizer.state_dict().tensors
    taken = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("step/"))
    assert optimizer.untaken_bytes(cpu) == weights_bytes
    assert first == taken + weights_bytes
    next(module.parameters()).grad = torch.zeros_like(next(module.parameters()))
    assert optimizer.untaken_bytes(cpu) == weights_bytes - next(module.parameters()).nbytes
    optimizer.reset()
    assert optimizer.untaken_bytes(cpu) == first
