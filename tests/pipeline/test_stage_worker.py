"""Stages at work: they train like the whole model, and what each refuses, evaluates, measures."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilocox.compression.layout import FlatLayout
from dilocox.peer.training.inner_optimizer import InnerOptimizer, Precision
from dilocox.pipeline.frames import FrameRefused
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from dilocox.pipeline.stage_worker import Produced, StageWorker
from tests.pipeline.chains import (
    SEED,
    SPEC,
    Chain,
    Config,
    batches,
    chain,
    rate,
    same,
    weights,
    whole_run,
)


class TestEqualsTheWholeModel:
    def test_one_stage_equals_train_step_to_the_last_bit(self, llama_config: Config) -> None:
        expected, results = whole_run(tuple(llama_config.items()), 3)
        chained = chain(llama_config, 1)
        for step, batch in enumerate(batches(llama_config, 3)):
            loss, squared_norm, _ = chained.step(batch, rate(step))
            assert (loss, squared_norm) == (results[step].loss, results[step].squared_norm)
        assert same(weights(chained), expected)

    def test_the_weights_may_be_views_of_one_flat_vector(self, llama_config: Config) -> None:
        plain, flat = chain(llama_config, 2), chain(llama_config, 2)
        for stage, module in enumerate(flat.stages):
            flatten_parameters(module, FlatLayout.of(parameter_shapes(llama_config, 2, stage)))
        for chained in (plain, flat):
            for step, batch in enumerate(batches(llama_config, 2)):
                chained.step(batch, rate(step))
        assert same(weights(plain), weights(flat))
        measured = [[worker.stored_bytes for worker in made.workers] for made in (plain, flat)]
        assert measured[0] == measured[1]


class TestReplay:
    def test_a_finished_step_is_replayed_too(self, llama_config: Config) -> None:
        spec = replace(SPEC, precision="fp16")  # whose gradients are unscaled by `squared_norm`
        steady, disturbed = (chain(llama_config, 2, spec=spec) for _ in range(2))
        [batch] = batches(llama_config, 1)
        disturbed.run(batch)
        assert all(worker.squared_norm() > 0 for worker in disturbed.workers)
        disturbed.restart()
        assert disturbed.step(batch, 1e-2) == steady.step(batch, 1e-2)
        assert same(weights(steady), weights(disturbed))


class TestNotFinite:
    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_a_stage_that_saw_it_skips_whatever_factor_it_is_told(
        self, llama_config: Config, stage: int
    ) -> None:
        spoiled = (1, "forward", 0)
        chained = chain(
            llama_config, 3, spoil=lambda at, it: (at, it.kind, it.microbatch) == spoiled
        )
        chained.run(batches(llama_config, 1)[0])
        before = weights(chained)
        worker = chained.workers[stage]
        assert math.isnan(worker.squared_norm())
        assert not worker.go(1.0, 1e-2)
        assert same(weights(chained), before)
        assert not worker.finished


class TestLossScale:
    """fp16: the head's scale travels with its frames."""

    SPEC = replace(SPEC, precision="fp16")

    # A CPU in fp32 among GPUs in fp16: it must unscale what others scaled, and scale for them.
    @pytest.mark.parametrize(
        "precisions", [("fp16", "fp16", "fp16"), ("fp32", "fp16", "fp32"), ("fp16", "fp32", "fp32")]
    )
    def test_stages_of_different_scales_step_alike_with_that_of_the_head(
        self, llama_config: Config, precisions: tuple[Precision, ...]
    ) -> None:
        expected, results = whole_run(tuple(llama_config.items()), 2)
        chained = chain(llama_config, 3, spec=self.SPEC, precisions=precisions)
        for optimizer, scale in zip(chained.optimizers, (64.0, 1024.0, 4.0), strict=True):
            optimizer.take_loss_scale(scale)
        for step, batch in enumerate(batches(llama_config, 2)):
            for optimizer in chained.optimizers[1:]:
                optimizer.take_loss_scale(chained.optimizers[0].loss_scale)
            loss, squared_norm, taken = chained.step(batch, rate(step))
            assert taken == [True] * 3
            assert loss == pytest.approx(results[step].loss, rel=1e-3)
            assert squared_norm == pytest.approx(results[step].squared_norm, rel=0.02)
        close = [(tensor - expected[n]).abs().mean() for n, tensor in weights(chained).items()]
        assert max(close) < 1e-3

    def test_an_overflow_on_one_stage_lowers_the_scale_of_all(self, llama_config: Config) -> None:
        spoiled = (2, "gradient", 2)
        chained = chain(
            llama_config,
            3,
            spec=self.SPEC,
            spoil=lambda at, it: (at, it.kind, it.microbatch) == spoiled,
        )
        before = chained.optimizers[0].loss_scale
        assert chained.step(batches(llama_config, 1)[0], 1e-2)[2] == [False] * 3
        assert [optimizer.loss_scale for optimizer in chained.optimizers] == [before / 2] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_on_a_gpu_works_with_one_on_a_cpu(llama_config: Config, recompute: bool) -> None:
    expected, results = whole_run(tuple(llama_config.items()), 3)
    spec = replace(SPEC, precision="fp32")
    stages = [
        build_stage(llama_config, stage, 2, SEED, device)
        for stage, device in enumerate(("cuda", "cpu"))
    ]
    optimizers = [InnerOptimizer(stage.named_parameters(), spec) for stage in stages]
    chained = Chain(stages, optimizers, recompute=recompute)
    for step, batch in enumerate(batches(llama_config, 3)):
        loss, _, _ = chained.step(batch, rate(step))
        assert loss == pytest.approx(results[step].loss, rel=1e-4)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.cpu(), expected[name], rtol=0, atol=1e-3)


def test_a_microbatch_is_refused_the_second_time_even_when_it_is_done(llama_config: Config) -> None:
    worker = chain(llama_config, 2).workers[1]
    for _ in range(2):
        worker.feed(0, torch.zeros(2, 8, 32), torch.zeros(2, 9).long())
        for _ in range(2):
            with pytest.raises(FrameRefused, match="microbatch 0 came twice"):
                worker.feed(0, torch.zeros(2, 8, 32), torch.zeros(2, 9).long())
            worker.run_one()
        worker.restart()  # and welcome again after it


def evaluated(chained: Chain, windows: Tensor) -> float:
    hidden: Tensor | None = None
    for worker in chained.workers[:-1]:
        made = worker.evaluate(hidden, windows)
        assert isinstance(made, Tensor) and not made.requires_grad
        hidden = made
    summed = chained.workers[-1].evaluate(hidden, windows)
    assert isinstance(summed, float)
    return summed


class TestEvaluate:
    @pytest.mark.parametrize("num_stages", [1, 3])
    def test_nothing_is_dropped_out_of_what_is_evaluated_and_training_goes_on_as_before(
        self, llama_config: Config, num_stages: int
    ) -> None:
        config = {**llama_config, "attention_dropout": 0.5}
        chained, steady = chain(config, num_stages), chain(config, num_stages)
        windows = batches(config, 1)[0][0]
        expected = evaluated(chain(llama_config, num_stages), windows)
        assert [evaluated(chained, windows) for _ in range(3)] == [expected] * 3
        without = chain(llama_config, num_stages)
        for step, batch in enumerate(batches(config, 2)):
            for each in (chained, steady, without):
                torch.manual_seed(step)
                each.step(batch, rate(step))
            evaluated(chained, windows)
        assert same(weights(chained), weights(steady))
        assert not same(weights(chained), weights(without)), "no dropout in training any more"

    def test_in_the_middle_of_a_step_it_changes_nothing(self, llama_config: Config) -> None:
        steady, disturbed = chain(llama_config, 2), chain(llama_config, 2)
        [batch] = batches(llama_config, 1)
        first, last = disturbed.workers
        evaluate = last.run_one

        def run_one(most: int = 1) -> Produced | None:
            first.evaluate(None, batch[0])
            return evaluate(most)

        last.run_one = run_one
        assert disturbed.step(batch, 1e-2) == steady.step(batch, 1e-2)
        assert same(weights(steady), weights(disturbed))


class Squash(nn.Module):
    """A stage of one layer, of which one can say what autograd saves."""

    is_first = is_last = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight * self.get_buffer("mask"))

    def hidden_states(self, inputs: Tensor, positions: None) -> tuple[Tensor, None]:
        return self(inputs), None


class TestMeasurements:
    def squash(self, precision: Precision | None = None, **options: Any) -> StageWorker:
        torch.manual_seed(0)
        module: Any = Squash()
        optimizer = InnerOptimizer(module.named_parameters(), SPEC, precision=precision)
        return StageWorker(module, optimizer, microbatches=2, **options)

    def test_stored_bytes_are_the_saved_activations_without_weights(self) -> None:
        worker = self.squash()
        assert worker.stored_bytes == 0
        for microbatch, length in enumerate((5, 50)):
            worker.feed(microbatch, torch.randn(2, length, 4), torch.zeros(2, length + 1).long())
            worker.run_one()
            # the input (for the weight's gradient) and the output (for that of tanh), in fp32
            assert worker.stored_bytes == 2 * (2 * 5 * 4) * 4

    def test_the_norm_of_the_gradients_is_computing_too(self) -> None:
        class Slow(InnerOptimizer):
            def squared_norm(self) -> float:
                end = time.perf_counter() + 0.05
                while time.perf_counter() < end:
                    pass
                return super().squared_norm()

        module: Any = Squash()
        optimizer = Slow(module.named_parameters(), SPEC)
        worker = StageWorker(module, optimizer, microbatches=1)
        worker.feed(0, torch.randn(2, 5, 4), torch.zeros(2, 6).long())
        worker.run_one()
        worker.feed_gradient(0, torch.ones(2, 5, 4))
        worker.run_one()
        before = worker.computing_s
        assert worker.squared_norm() > 0
        assert worker.computing_s >= before + 0.05

    def test_what_is_fed_is_neither_changed_nor_tied_to_what_is_produced(self) -> None:
        worker, fed = self.squash(), torch.randn(2, 5, 4)
        kept = fed.clone()
        worker.feed(0, fed, torch.zeros(2, 6).long())
        produced = worker.run_one()
        assert produced is not None
        assert produced.tensor is not None
        assert not produced.tensor.requires_grad
        worker.feed_gradient(0, torch.ones(2, 5, 4, dtype=torch.bfloat16))
        back = worker.run_one()
        assert back is not None
        assert back.tensor is not None
        assert back.tensor.dtype == torch.float32
        assert not fed.requires_grad
        assert torch.equal(fed, kept)

    def test_steps_and_evaluations_run_in_the_optimizers_precision(self) -> None:
        hidden, windows = torch.randn(2, 5, 4), torch.zeros(2, 6).long()
        made: list[Tensor] = []
        for precision in ("fp32", "bf16"):
            worker = self.squash(precision)
            worker.feed(0, hidden, windows)
            produced = worker.run_one()
            assert produced is not None
            assert produced.tensor is not None
            evaluated = worker.evaluate(hidden, windows)
            assert isinstance(evaluated, Tensor)
            assert torch.equal(evaluated, produced.tensor)
            made.append(produced.tensor)
        exact, rounded = made
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02, check_dtype=False)
        assert not torch.equal(rounded.float(), exact)

    def test_times_and_counts(self, llama_config: Config) -> None:
        chained = chain(llama_config, 2)
        first, second = batches(llama_config, 2)
        chained.run(first)
        for worker in chained.workers:
            assert worker.finished
            assert worker.in_flight == 0
            assert 0 < worker.compute_s < worker.computing_s
        chained.go(1.0, 1e-2)
        head = chained.workers[0]
        assert not head.finished
        head.feed(0, None, second[0])
        head.feed(1, None, second[1])
        head.run_one()
        assert head.in_flight == 2
        assert head.run_one() is not None
        assert head.run_one() is None


def test_a_whole_model_says_what_may_come_next_and_keeps_nothing(llama_config: Config) -> None:
    [worker], [stage] = (made := chain(llama_config, 1)).workers, made.stages
    ids = torch.arange(6)[None]
    logits = worker.next_logits(ids)
    torch.testing.assert_close(logits, stage(ids)[0, -1].detach())
    assert not logits.requires_grad and stage.training and worker.stored_bytes == 0
