"""Stages at work together train like the whole model, whatever happens on the way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dilocox.compression.layout import FlatLayout
from dilocox.peer.training.inner_optimizer import InnerOptimizer, Precision
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from dilocox.pipeline.stage_worker import StageWorker
from tests.pipeline.chains import (
    MICROBATCHES,
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


class TestRecompute:
    def test_it_takes_the_same_steps_and_keeps_only_the_input(self, llama_config: Config) -> None:
        # Dropout must drop the same values in the second forward.
        config = {**llama_config, "attention_dropout": 0.5}
        runs: list[Weights] = []
        stored: list[list[int]] = []
        for recompute in (False, True):
            chained = chain(config, 3, recompute=recompute)
            torch.manual_seed(3)
            for step, batch in enumerate(batches(config, 2)):
                chained.step(batch, rate(step))
            runs.append(weights(chained))
            stored.append([worker.stored_bytes for worker in chained.workers])
        assert same(*runs)
        undisturbed, _ = whole_run(tuple(llama_config.items()), 2)
        assert not same(runs[0], undisturbed), "no dropout: a weak test"
        assert stored[1][0] == 2 * 9 * 8  # windows
        assert stored[1][1] == 2 * 8 * 32 * 4  # hidden states in fp32
        assert stored[1][2] == stored[0][2] > 10 * stored[1][1]
        assert stored[0][1] > 10 * stored[1][1]


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
    workers = [
        StageWorker(
            stage,
            optimizer,
            microbatches=MICROBATCHES,
            stage_index=index,
            num_stages=2,
            recompute=recompute,
        )
        for index, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True))
    ]
    chained = Chain(stages, workers, optimizers, window=2)
    for step, batch in enumerate(batches(llama_config, 3)):
        loss, _, _ = chained.step(batch, rate(step))
        assert loss == pytest.approx(results[step].loss, rel=1e-4)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.cpu(), expected[name], rtol=0, atol=1e-3)
