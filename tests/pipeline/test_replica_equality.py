"""A replica of real members trains like the whole model in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilocox.pipeline.link import LinkFacts
from dilocox.pipeline.stage import StageModule
from tests.pipeline.chains import SPEC, Config, batches, chain, rate, whole_run
from tests.pipeline.peers import TINY, Peer, Plan
from tests.pipeline.replicas import Swarm
from tests.sweeps import sweep


def trained(plan: Plan, steps: int, seed: int = 0) -> Swarm:
    """A replica after so many inner steps."""
    swarm = Swarm(plan, seed=seed)
    assert swarm.leader.form() == ""
    for step, batch in enumerate(batches(plan.config, steps, plan.microbatches)):
        stepped = swarm.leader.step(batch, rate(step))
        assert stepped is not None
        assert stepped.step == step
    swarm.settle()
    assert all(peer.clean for peer in swarm.alive)
    assert not swarm.wires.refused
    return swarm


def weights(swarm: Swarm) -> list[Tensor]:
    return [tensor for peer in swarm.alive for tensor in peer.weights()]


def chained_weights(plan: Plan, steps: int) -> list[Tensor]:
    """Of workers that hand each other what they produce."""
    chained = chain(plan.config, plan.num_stages, microbatches=plan.microbatches)
    for step, batch in enumerate(batches(plan.config, steps, plan.microbatches)):
        chained.step(batch, rate(step))
    return [parameter.detach() for stage in chained.stages for parameter in stage.parameters()]


class TestEqualsTheWholeModel:
    @pytest.mark.parametrize(
        ("family_config", "num_stages"),
        sweep([("llama", 4), ("gpt_neox", 3), ("llama", 1), ("llama", 2), ("qwen3", 3)], 2),
        indirect=["family_config"],
    )
    def test_after_twenty_inner_steps(self, family_config: Config, num_stages: int) -> None:
        expected, results = whole_run(tuple(family_config.items()), 20)
        swarm = trained(Plan(config=family_config, num_stages=num_stages), 20, seed=num_stages)
        for peer in swarm.alive:
            for name, parameter in peer.module.named_parameters():
                torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-5)
        assert results[-1].loss < results[0].loss - 0.5, "nothing was learnt: a weak test"

    @pytest.mark.parametrize(("window", "microbatches"), [(1, 4), (2, 4), (5, 4), (5, 1)])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_whatever_the_window(self, window: int, microbatches: int, recompute: bool) -> None:
        plan = Plan(window=window, microbatches=microbatches, recompute=recompute)
        ours, theirs = weights(trained(plan, 2, seed=window)), chained_weights(plan, 2)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @pytest.mark.parametrize("seed", range(4))
    def test_in_any_order_of_delivery_the_losses_are_those_of_the_chain(self, seed: int) -> None:
        chained = chain(TINY, 3)
        swarm = Swarm(Plan(), seed=seed)
        swarm.leader.form()
        for step, batch in enumerate(batches(TINY, 2)):
            stepped = swarm.leader.step(batch, rate(step))
            loss, _, _ = chained.step(batch, rate(step))
            assert stepped is not None
            assert stepped.loss == loss

    @pytest.mark.parametrize("clients", [(0,), (1,), (2,)])
    def test_with_peers_that_can_only_dial_out(self, clients: tuple[int, ...]) -> None:
        expected = chained_weights(Plan(), 1)
        swarm = Swarm(Plan())
        leader = swarm.lead("dials" if 0 in clients else "head2", client=0 in clients)
        for stage in (1, 2):
            swarm.add(f"new{stage}", stage, client=stage in clients)
            swarm.wires.kill(f"{stage}a", flushed=False)
        swarm.wires.kill("head", flushed=False)
        assert leader.form() == ""
        assert leader.step(batches(TINY, 1)[0], rate(0)) is not None
        swarm.settle()
        ours = [tensor for name in leader.members for tensor in swarm.peers[name].weights()]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


class TestCodecs:
    @pytest.mark.parametrize(("codec", "near"), [("bf16", 2e-3), ("int8", 5e-3), ("int4", 5e-2)])
    def test_coded_activations_train_nearly_as_well(self, codec: str, near: float) -> None:
        exact, coded = weights(trained(Plan(), 4)), weights(trained(Plan(codec=codec), 4))
        apart = [float((a - b).abs().mean()) for a, b in zip(exact, coded, strict=True)]
        assert 0 < max(apart) < near

    def test_a_slow_link_gets_a_smaller_codec_at_once_on_both_of_its_ends(self) -> None:
        swarm = Swarm(Plan(codec="auto"))
        swarm.leader.form()
        seen: list[set[str]] = []
        swarm.wires.on_frame = lambda frame: seen[-1].add(frame.codec)
        for batch in batches(TINY, 3):
            seen.append(set())
            swarm.leader.step(batch)
            swarm.settle()
            facts = LinkFacts(round_trip_s=0.01, received_bytes_per_s=1.0)
            swarm.peers["1a"].box.measured = facts
        # what the second step measured counts from the third on
        assert [codecs - {""} for codecs in seen] == [{"bf16"}, {"bf16"}, {"int4"}]
        assert swarm.leader.head.codec == "int4"


class TestNotFinite:
    @pytest.mark.parametrize("stage", [0, 1, 2])
    @pytest.mark.parametrize("backward", [False, True])
    def test_the_step_is_skipped_everywhere_and_training_goes_on(
        self, stage: int, backward: bool
    ) -> None:
        first, second, third = batches(TINY, 3)
        swarm = Swarm(Plan())
        swarm.leader.form()
        swarm.leader.step(first)
        swarm.settle()
        before = weights(swarm)
        moments = [peer.optimizer.state_dict().tensors for peer in swarm.alive]
        kept = [{name: tensor.clone() for name, tensor in each.items()} for each in moments]
        spoil(swarm.alive[stage].module, backward=backward)
        stepped = swarm.leader.step(second)
        assert stepped is not None
        assert stepped.skipped
        assert math.isnan(stepped.loss) != backward
        swarm.settle()
        assert all(torch.equal(a, b) for a, b in zip(before, weights(swarm), strict=True))
        for peer, tensors in zip(swarm.alive, kept, strict=True):
            state = peer.optimizer.state_dict()
            assert state.values["steps"] == 1
            assert all(torch.equal(state.tensors[name], tensors[name]) for name in tensors)
        swarm.leader.step(third)
        swarm.settle()
        steady = chain(TINY, 3)
        steady.step(first, 1e-2)
        steady.step(third, 1e-2)
        expected = [p.detach() for module in steady.stages for p in module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(weights(swarm), expected, strict=True))
        assert swarm.leader.head.last_fault == ""


def spoil(stage: StageModule, *, backward: bool) -> None:
    """The next output, or its gradient, is not a number."""
    nan = math.nan
    [*_, last] = (name for name, _ in stage.named_parameters() if ".layers." in name)
    layer = ".".join(last.split(".")[:3])
    module: nn.Module = stage.get_submodule("lm_head" if stage.is_last else layer)

    def once(_module: Any, _inputs: Any, output: Tensor) -> Tensor | None:
        handle.remove()
        if not backward:
            return output * nan
        output.register_hook(lambda gradient: gradient * nan)
        return None

    handle = module.register_forward_hook(once)


class TestLossScale:
    def test_all_stages_use_that_of_the_head(self) -> None:
        spec = replace(SPEC, precision="fp16")
        exact = weights(trained(Plan(), 2))
        swarm = Swarm(Plan(spec=spec))
        scales = dict(zip(swarm.alive, (64.0, 1024.0, 4.0), strict=True))
        for peer, scale in scales.items():
            peer.optimizer.take_loss_scale(scale)
        swarm.leader.form()
        for step, batch in enumerate(batches(TINY, 2)):
            stepped = swarm.leader.step(batch, rate(step))
            assert stepped is not None
            assert not stepped.skipped
        swarm.settle()
        assert {scale_of(peer) for peer in swarm.alive} == {64.0}
        ours = weights(swarm)
        assert max(float((a - b).abs().max()) for a, b in zip(exact, ours, strict=True)) < 1e-4


def scale_of(peer: Peer) -> float:
    return peer.optimizer.loss_scale
