"""Inner steps: equal to plain PyTorch to the last bit, resumable, and never poisoned."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import (
    InnerOptimizer,
    InnerState,
    clip_factor,
    learning_rate,
)
from dilocox.pipeline.stage_worker import next_token_loss
from tests.pipeline.whole_model import train_step

VOCABULARY = 32
SPEC = InnerSpec(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5, warmup_tokens=100)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=True)
    )


def batches(steps: int, microbatches: int = 2, seed: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(VOCABULARY, (3, 9), generator=generator, dtype=torch.int64)
            for _ in range(microbatches)
        ]
        for _ in range(steps)
    ]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def hook(module: nn.Module, factor: float) -> RemovableHandle:
    """Multiply the gradient of the last matrix by a factor, in every backward."""
    weight = module.get_parameter("2.weight")
    return torch.Tensor.register_hook(weight, lambda gradient: gradient * factor)


def optimizer_of(module: nn.Module, **options: str) -> InnerOptimizer:
    return InnerOptimizer(module.named_parameters(), SPEC, **options)  # type: ignore[arg-type]


def through_files(state: InnerState, folder: Path) -> InnerState:
    """The same, written and read as a snapshot does."""
    save_file(state.tensors, folder / "inner.safetensors")
    values = json.loads(json.dumps(state.values))
    return InnerState(tensors=load_file(folder / "inner.safetensors"), values=values)


class TestEqualsPlainPyTorch:
    @pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e6])
    def test_five_steps_equal_adamw_with_clip_grad_norm_exactly(self, clip_norm: float) -> None:
        spec = InnerSpec(learning_rate=1e-2, weight_decay=0.1, clip_norm=clip_norm)
        ours, plain = model(), model()
        optimizer = InnerOptimizer(ours.named_parameters(), spec)
        embedding, norm, linear = plain
        adamw = torch.optim.AdamW(
            [
                {"params": [embedding.weight, linear.weight], "weight_decay": 0.1},
                {"params": [norm.weight, norm.bias, linear.bias], "weight_decay": 0.0},
            ],
            betas=spec.betas,
            eps=spec.eps,
        )
        for step, batch in enumerate(batches(5)):
            rate = 1e-2 / (step + 1)
            result = train_step(ours, optimizer, batch, rate)

            losses = [next_token_loss(plain(windows[:, :-1]), windows) / 2 for windows in batch]
            for loss in losses:
                loss.backward()
            total = nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            adamw.zero_grad()

            assert result.loss == torch.stack(losses).sum().item()
            assert math.sqrt(result.squared_norm) == float(total)
            assert not result.skipped
            assert same(weights(ours), weights(plain))

    def test_accumulated_microbatches_give_the_gradients_of_one_large_batch(self) -> None:
        accumulated, at_once = model(), model()
        [batch] = batches(1, microbatches=4)
        train_step(accumulated, optimizer_of(accumulated), batch, 1e-2)
        train_step(at_once, optimizer_of(at_once), [torch.cat(batch)], 1e-2)
        for ours, theirs in zip(accumulated.parameters(), at_once.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_parameters_that_are_views_of_one_vector_are_stepped_in_place(self) -> None:
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

    def test_tokens_count_the_predicted_ones(self) -> None:
        module = model()
        [batch] = batches(1)
        assert train_step(module, optimizer_of(module), batch, 1e-2).tokens == 2 * 3 * 8

    def test_vectors_have_no_weight_decay(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2))
        before = weights(module)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert optimizer_of(module).step(1.0, 0.1)
        after = weights(module)
        assert torch.equal(before["0.bias"], after["0.bias"])
        torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.1))


class TestStagesStepTogether:
    def test_two_halves_with_one_clip_factor_equal_the_whole(self) -> None:
        whole, halved = model(), model()
        named = list(halved.named_parameters())
        halves = [InnerOptimizer(named[:3], SPEC), InnerOptimizer(named[3:], SPEC)]
        together = optimizer_of(whole)
        for batch in batches(3):
            train_step(whole, together, batch, 1e-2)
            for windows in batch:
                (next_token_loss(halved(windows[:, :-1]), windows) / 2).backward()
            squared_norm = sum(half.squared_norm() for half in halves)
            factor = clip_factor(squared_norm, SPEC.clip_norm)
            taken = [half.step(factor, 1e-2) for half in halves]
            assert taken == [True, True]
        for ours, theirs in zip(halved.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    def test_a_norm_that_is_not_finite_on_another_stage_skips_the_step_here(self) -> None:
        module = model()
        before = weights(module)
        optimizer = optimizer_of(module)
        [[windows]] = batches(1, microbatches=1)
        next_token_loss(module(windows[:, :-1]), windows).backward()
        assert not optimizer.step(clip_factor(math.inf, 1.0), 1e-2)
        assert same(weights(module), before)
        assert all(parameter.grad is None for parameter in module.parameters())

    def test_clip_factor_scales_down_to_the_norm_and_never_up(self) -> None:
        assert clip_factor(16.0, 1.0) == pytest.approx(0.25)
        assert clip_factor(0.25, 1.0) == 1.0
        assert clip_factor(0.0, 1.0) == 1.0
        assert math.isnan(clip_factor(math.nan, 1.0))


class TestNothingPoisonsTheWeights:
    @pytest.mark.parametrize("poison", [math.inf, math.nan])
    def test_a_loss_that_is_not_finite_skips_the_step_and_training_goes_on(
        self, poison: float
    ) -> None:
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
        assert (optimizer.steps, optimizer.skipped) == (2, 1)
        assert same(weights(module), weights(undisturbed))

    def test_a_loss_that_is_not_finite_skips_the_step_although_the_norm_is_fine(self) -> None:
        module = model()
        before = weights(module)
        forbidden = torch.zeros(VOCABULARY)
        forbidden[3] = -math.inf  # infinite loss where 3 is the target, but a finite gradient
        windows = torch.full((1, 9), 3)
        result = train_step(
            lambda ids: module(ids) + forbidden, optimizer_of(module), [windows], 1e-2
        )
        assert math.isinf(result.loss)
        assert math.isfinite(result.squared_norm)
        assert result.skipped
        assert same(weights(module), before)

    def test_a_gradient_that_is_not_finite_skips_the_step_although_the_loss_is_fine(self) -> None:
        module = model()
        before = weights(module)
        hook(module, math.nan)
        [batch] = batches(1)
        result = train_step(module, optimizer_of(module), batch, 1e-2)
        assert math.isfinite(result.loss)
        assert result.skipped
        assert same(weights(module), before)


class TestPrecision:
    def test_a_cpu_computes_in_fp32_whatever_the_manifest_says_for_gpus(self) -> None:
        assert SPEC.precision == "bf16"
        assert optimizer_of(model()).precision == "fp32"

    def test_bf16_runs_matrix_products_in_bf16_and_the_loss_in_fp32(self) -> None:
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
    def test_a_gpu_trains_in_the_manifests_precision_and_resumes(self, precision: str) -> None:
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

    def test_fp16_takes_the_steps_of_a_plain_gradient_scaler(self) -> None:
        ours, plain = model(), model()
        optimizer = optimizer_of(ours, precision="fp16")
        adamw = torch.optim.AdamW(
            [
                {"params": [plain[0].weight, plain[2].weight], "weight_decay": 0.1},
                {"params": [plain[1].weight, plain[1].bias, plain[2].bias], "weight_decay": 0.0},
            ],
            lr=1e-2,
            betas=SPEC.betas,
            eps=SPEC.eps,
        )
        scaler = torch.amp.GradScaler("cpu")
        skips = []
        for step, batch in enumerate(batches(6)):
            # Gradients of the third step overflow fp32 once they are scaled, not before.
            factor = 1e35 if step == 2 else 1.0
            hooks = [hook(module, factor) for module in (ours, plain)]
            result = train_step(ours, optimizer, batch, 1e-2)
            skips.append(result.skipped)

            for windows in batch:
                with torch.autocast("cpu", torch.float16):
                    logits = plain(windows[:, :-1])
                scaler.scale(next_token_loss(logits, windows) / 2).backward()
            scaler.unscale_(adamw)
            nn.utils.clip_grad_norm_(plain.parameters(), SPEC.clip_norm)
            scaler.step(adamw)
            scaler.update()
            adamw.zero_grad()
            for handle in hooks:
                handle.remove()

            assert same(weights(ours), weights(plain))
            values = optimizer.state_dict().values["scaler"]
            assert values == scaler.state_dict()
        assert skips == [False, False, True, False, False, False]
        assert optimizer.skipped == 1

    def test_fp16_reports_the_norm_of_unscaled_gradients(self) -> None:
        module, plain = model(), model()
        [batch] = batches(1)
        scaled = train_step(module, optimizer_of(module, precision="fp16"), batch, 1e-2)
        exact = train_step(plain, optimizer_of(plain), batch, 1e-2)
        assert scaled.squared_norm == pytest.approx(exact.squared_norm, rel=0.02)

    def test_fp16_backs_off_on_a_stage_whose_own_gradients_were_finite(self) -> None:
        module = model()
        optimizer = optimizer_of(module, precision="fp16")
        before = optimizer.state_dict().values["scaler"]["scale"]
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert not optimizer.step(math.nan, 1e-2)
        assert optimizer.state_dict().values["scaler"]["scale"] == before / 2


class TestDrop:
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("normed", [False, True])
    def test_dropped_gradients_leave_no_trace(self, precision: str, normed: bool) -> None:
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
        assert (optimizers[0].steps, optimizers[0].skipped) == (2, 0)


class TestLossScale:
    @pytest.mark.parametrize("run_precision", ["fp32", "bf16"])
    def test_there_is_none_unless_the_run_is_in_fp16(self, run_precision: str) -> None:
        module = model()
        optimizer = InnerOptimizer(
            module.named_parameters(), replace(SPEC, precision=run_precision)
        )
        optimizer.take_loss_scale(8.0)
        assert optimizer.loss_scale == 1.0
        assert float(optimizer.scale(torch.ones(()))) == 1.0

    def test_a_cpu_in_a_run_of_fp16_has_one_and_trains_as_without(self) -> None:
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

    def test_it_can_be_taken_over_also_after_a_dropped_step(self) -> None:
        module = model()
        optimizer = optimizer_of(module, precision="fp16")
        assert float(optimizer.scale(torch.ones(()))) == optimizer.loss_scale == 2.0**16
        assert optimizer.squared_norm() == 0.0
        optimizer.drop()
        optimizer.take_loss_scale(128.0)
        assert float(optimizer.scale(torch.ones(()))) == optimizer.loss_scale == 128.0
        assert not train_step(module, optimizer, batches(1)[0], 1e-2).skipped

    def test_taking_the_same_one_again_forgets_nothing(self) -> None:
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
    def test_one_that_is_no_scale_is_refused(self, scale: float) -> None:
        optimizer = optimizer_of(model(), precision="fp16")
        with pytest.raises(ValueError, match="loss scale must be positive and finite"):
            optimizer.take_loss_scale(scale)
        assert optimizer.loss_scale == 2.0**16


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
        other.load_state_dict(through_files(optimizer.state_dict(), tmp_path))
        for batch in steps[3:]:
            train_step(steady, optimizer, batch, 1e-2)
            train_step(resumed, other, batch, 1e-2)
        assert same(weights(steady), weights(resumed))
        assert (other.steps, other.skipped) == (optimizer.steps, optimizer.skipped) == (6, 0)
        assert other.state_dict().values == optimizer.state_dict().values

    def test_a_loaded_state_shares_no_memory_with_what_it_came_from(self) -> None:
        module = model()
        optimizer = optimizer_of(module)
        first, second = batches(2)
        train_step(module, optimizer, first, 1e-2)
        state = optimizer.state_dict()
        saved = {name: tensor.clone() for name, tensor in state.tensors.items()}
        kept = {name: tensor.clone() for name, tensor in saved.items()}
        other_module = model()
        other = optimizer_of(other_module)
        other.load_state_dict(InnerState(tensors=saved, values=state.values))
        train_step(other_module, other, second, 1e-2)
        assert same(saved, kept)

    def test_a_state_before_the_first_step_can_be_saved_and_loaded(self) -> None:
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
    def test_a_state_of_other_parameters_is_refused_by_name(self, change) -> None:  # type: ignore[no-untyped-def]
        module = model()
        optimizer = optimizer_of(module)
        train_step(module, optimizer, batches(1)[0], 1e-2)
        state = optimizer.state_dict()
        with pytest.raises(InvalidInput, match=r"holds (exp_avg|velocity)/\d\.\w+ of shape"):
            optimizer.load_state_dict(
                InnerState(tensors=change(state.tensors), values=state.values)
            )


class TestSchedule:
    SPEC = InnerSpec(learning_rate=2e-3, warmup_tokens=1000, final_fraction=0.1)

    @pytest.mark.parametrize(
        ("tokens", "rate"),
        [
            (0, 0.0),
            (250, 0.5e-3),
            (1000, 2e-3),
            (5500, 1.1e-3),  # half way: the mean of peak and end
            (10_000, 0.2e-3),
            (10**9, 0.2e-3),
        ],
    )
    def test_values_at_the_corners(self, tokens: int, rate: float) -> None:
        assert learning_rate(self.SPEC, 10_000, tokens) == pytest.approx(rate, abs=1e-12)

    def test_it_rises_to_the_warmup_and_falls_from_there(self) -> None:
        rates = [learning_rate(self.SPEC, 10_000, tokens) for tokens in range(0, 10_001, 100)]
        assert rates[:11] == sorted(rates[:11])
        assert rates[10:] == sorted(rates[10:], reverse=True)

    def test_without_warmup_it_starts_at_the_peak(self) -> None:
        spec = InnerSpec(learning_rate=2e-3, warmup_tokens=0)
        assert learning_rate(spec, 10_000, 0) == 2e-3

    def test_a_run_that_ends_within_its_warmup_never_divides_by_zero(self) -> None:
        assert learning_rate(self.SPEC, 1000, 1000) == pytest.approx(0.2e-3)
        assert learning_rate(self.SPEC, 500, 500) == pytest.approx(1e-3)
