"""A stage's passes: the loss in pieces, layers that run again, and what no microbatch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.partition import plan_stages
from dilocox.pipeline.stage import StageModule, build_stage
from dilocox.pipeline.stage_worker import StagePasses, StageWorker, next_token_loss, summed_loss
from tests.pipeline.chains import SEED, SPEC, Config, batches, chain, same, weights
from tests.sweeps import sweep

PIECES = 1  # logits at once: pieces of as few tokens as there may be, 256
MANY = (12, 33)  # windows whose 384 tokens make two such pieces


def passes_of(stage: StageModule, **options: Any) -> StagePasses:
    optimizer = InnerOptimizer(stage.named_parameters(), SPEC)
    return StagePasses(stage, optimizer, **{"recompute": False, **options})


def random_windows(config: Config, shape: tuple[int, int] = MANY) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config["vocab_size"], shape, generator=generator)


def gradients(stage: StageModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


class Watching(TorchDispatchMode):
    """Shows `look` every tensor that an operation makes, and how often a value was asked for."""

    def __init__(self, look: Callable[[Tensor], None] = lambda _: None) -> None:
        super().__init__()
        self._look = look
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor):
                self._look(each)
        return made


# ---- the loss in pieces --------------------------------------------------------------------------
def test_a_loss_in_pieces_is_that_of_all_logits_whatever_the_family(family_config: Config) -> None:
    pieced, plain = (build_stage(family_config, 0, 1, SEED) for _ in range(2))
    windows = random_windows(family_config)
    loss, _ = passes_of(pieced, logits_at_once=PIECES).forward_backward(None, windows, 2)
    expected = next_token_loss(plain(windows[:, :-1]), windows) / 2
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    ours, theirs = gradients(pieced), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * scale + 1e-9)


def test_a_loss_in_one_piece_is_the_plain_one_to_the_last_bit(llama_config: Config) -> None:
    stage, plain = (build_stage(llama_config, 0, 1, SEED) for _ in range(2))
    worker = StageWorker(stage, InnerOptimizer(stage.named_parameters(), SPEC), microbatches=1)
    windows = random_windows(llama_config, (2, 9))
    worker.feed(0, None, windows)
    worker.run_one()
    next_token_loss(plain(windows[:, :-1]), windows).backward()
    assert same(gradients(stage), gradients(plain))


def test_a_validation_loss_in_pieces_is_that_of_all_logits(llama_config: Config) -> None:
    stage, windows = build_stage(llama_config, 0, 1, SEED), random_windows(llama_config)
    with torch.no_grad():
        expected = float(summed_loss(stage(windows[:, :-1]), windows[:, 1:].reshape(-1)))
    found = passes_of(stage, logits_at_once=PIECES).evaluate(None, windows)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_logits_of_a_microbatch_are_never_there_at_once(
    llama_config: Config, evaluates: bool
) -> None:
    config = {**llama_config, "vocab_size": 1 << 16}
    windows = random_windows(config, (16, 65))
    passes = passes_of(build_stage(config, 0, 1, SEED))
    largest = 0

    def look(tensor: Tensor) -> None:
        nonlocal largest
        largest = max(largest, tensor.numel())

    with Watching(look):
        if evaluates:
            passes.evaluate(None, windows)
        else:
            passes.forward_backward(None, windows, 1)
    assert largest == 256 * config["vocab_size"]  # of 1024 tokens


# ---- layers that run again -----------------------------------------------------------------------
@pytest.mark.parametrize("num_stages", sweep([2, 1]))
def test_layers_that_run_again_give_the_same_gradients_to_the_last_bit(
    family_config: Config, num_stages: int
) -> None:
    plain, again = (chain(family_config, num_stages, recompute=r) for r in (False, True))
    [batch] = batches(family_config, 1)
    for each in (plain, again):
        each.run(batch)
    for ours, theirs in zip(again.stages, plain.stages, strict=True):
        assert same(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_layers_that_run_again_drop_the_same_values_and_keep_only_their_inputs(
    llama_config: Config, num_stages: int
) -> None:
    config = {**llama_config, "attention_dropout": 0.5}
    runs: list[dict[str, Tensor]] = []
    stored: list[list[int]] = []
    for recompute in (False, True):
        chained = chain(config, num_stages, recompute=recompute)
        torch.manual_seed(3)
        chained.step(batches(config, 1)[0], 1e-2)
        runs.append(weights(chained))
        stored.append([worker.stored_bytes for worker in chained.workers])
    assert same(*runs)
    without = chain(llama_config, num_stages)
    without.step(batches(config, 1)[0], 1e-2)
    assert not same(runs[0], weights(without)), "no dropout: a weak test"
    assert all(less < more / 3 for more, less in zip(*stored, strict=True))
    for plan, kept in zip(plan_stages(config, num_stages)[1:-1], stored[1][1:-1], strict=True):
        assert kept == (plan.stop - plan.start + 1) * (2 * 8 * 32 * 4)  # and what goes out


# ---- what a microbatch does not do ---------------------------------------------------------------
@pytest.mark.parametrize("recompute", [False, True])
def test_no_microbatch_asks_the_device_for_a_value(llama_config: Config, recompute: bool) -> None:
    chained = chain(llama_config, 2, recompute=recompute)
    [batch] = batches(llama_config, 1)
    # transformers looks whether a row holds several documents, once for every forward
    with Watching() as alone:
        chained.stages[0](batch[0][:, :-1])
        chained.stages[1](torch.zeros(2, 8, 32))
    with Watching() as watching:
        chained.run(batch)
    assert watching.asked == alone.asked * len(batch)


def test_a_step_without_memory_is_dropped_as_a_whole_and_can_be_taken_again(
    llama_config: Config,
) -> None:
    steady, disturbed = chain(llama_config, 1), chain(llama_config, 1)
    first, second = batches(llama_config, 2)
    for each in (steady, disturbed):
        each.step(first, 1e-2)
    before = weights(disturbed)
    [worker], [stage] = disturbed.workers, disturbed.stages
    calls = 0

    def full(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = stage.get_submodule("model.layers.1").register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        disturbed.run(second)
    hook.remove()
    assert not worker.finished
    assert same(weights(disturbed), before)
    worker.restart()
    assert not gradients(stage)
    assert disturbed.step(second, 1e-2) == steady.step(second, 1e-2)
    assert same(weights(disturbed), weights(steady))
