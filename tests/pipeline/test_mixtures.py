"""Mixtures of experts: the auxiliary loss of a cut model's routers, and families refused for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dilocox.dht.errors import InvalidInput
from dilocox.pipeline.partition import load_config, plan_stages
from dilocox.pipeline.stage_worker import next_token_loss, summed_loss
from tests.pipeline.chains import Chain, Config, batches, chain, gradients
from tests.pipeline.conftest import FAMILIES, MIXTURES
from tests.sweeps import sweep


def of_transformers(chained: Chain, config: Config, batch: list[Tensor], spans: list[range]) -> Any:
    """The plain model after backwards of each microbatch's cross-entropy, and of transformers' own
    auxiliary loss over the routers of each span, weighed by their number.
    """
    model: Any = AutoModelForCausalLM.from_config(load_config(config)).train()
    parts = [stage.state_dict() for stage in chained.stages]
    model.load_state_dict({name: each for part in parts for name, each in part.items()})
    dense = config.get("mlp_only_layers", [])
    layers = [layer for layer in range(config["num_hidden_layers"]) if layer not in dense]
    balance = vars(__import__(type(model).__module__, fromlist=["_"]))["load_balancing_loss_func"]
    for windows in batch:
        output = model(input_ids=windows[:, :-1], use_cache=False)
        loss, found = next_token_loss(output.logits, windows), torch.zeros(())
        routed = dict(zip(layers, output.router_logits, strict=True))
        for span in spans:
            logits = tuple(routed[layer] for layer in span if layer in routed)
            found = balance(logits, model.num_experts, model.num_experts_per_tok)
            loss = loss + model.router_aux_loss_coef * found * len(logits) / len(layers)
        if len(spans) == 1:
            whole = model(input_ids=windows[:, :-1], labels=windows[:, :-1], use_cache=False)
            torch.testing.assert_close(whole.aux_loss, found)
        (loss / len(batch)).backward()
    return model


def spans(config: Config, num_stages: int) -> list[range]:
    return [range(plan.start, plan.stop) for plan in plan_stages(config, num_stages)]


@pytest.mark.parametrize(("num_stages", "recompute"), sweep([(2, True), (1, False), (2, False)]))
def test_each_stages_auxiliary_loss_is_in_its_backward(
    mixture_config: Config, num_stages: int, recompute: bool
) -> None:
    chained = chain(mixture_config, num_stages, recompute=recompute)
    [batch] = batches(mixture_config, 1)
    chained.run(batch)
    model = of_transformers(chained, mixture_config, batch, spans(mixture_config, num_stages))
    ours, theirs = gradients(chained), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-5 * scale + 1e-9)
    # without it they are others: the comparison is no weak one
    without = chain({**mixture_config, "router_aux_loss_coef": 0.0}, num_stages)
    without.run(batch)
    routers = [name for name in ours if name.endswith((".gate.weight", ".router.weight"))]
    assert routers
    assert not any(torch.allclose(gradients(without)[n], ours[n], rtol=1e-2) for n in routers)


def test_a_reported_loss_is_the_cross_entropy_alone(mixture_config: Config) -> None:
    asked, unasked = (
        chain({**mixture_config, "output_router_logits": asks}, 2) for asks in (True, False)
    )
    [batch] = batches(mixture_config, 1)
    for each in (asked, unasked):
        each.run(batch)
    assert asked.workers[-1].loss == unasked.workers[-1].loss


def test_an_evaluation_asks_no_router(mixture_config: Config) -> None:
    chained = chain(mixture_config, 1)
    [[windows, *_]] = batches(mixture_config, 1)
    with torch.no_grad():
        hidden, auxiliary = chained.stages[0].hidden_states(windows[:, :-1])
        logits = chained.stages[0].logits(hidden)
    assert auxiliary is None
    expected = float(summed_loss(logits, windows[:, 1:].reshape(-1)))
    assert chained.workers[0].evaluate(None, windows) == pytest.approx(expected, rel=1e-6)


def test_a_loss_scale_reaches_the_auxiliary_loss_of_every_stage(mixture_config: Config) -> None:
    plain, scaled = (chain(mixture_config, 2, precisions=(p,) * 2) for p in ("fp32", "fp16"))
    [batch] = batches(mixture_config, 1)
    for each in (plain, scaled):
        each.run(batch)
    factor = scaled.optimizers[0].loss_scale
    assert factor > 1
    for name, gradient in gradients(plain).items():
        if name.endswith((".gate.weight", ".router.weight")):
            found = gradients(scaled)[name] / factor
            assert torch.cosine_similarity(found.flatten(), gradient.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "afmoe", "ernie4_5_moe"])
def test_a_bias_that_nothing_updates_is_refused_with_the_familys_name(family: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{family}' keeps its experts .* mixtral or qwen3_moe"):
        plan_stages({"model_type": family, "num_hidden_layers": 4}, 1)


@pytest.mark.parametrize("family", ["deepseek_v2", "llama"])
def test_an_auxiliary_loss_that_there_is_not_is_refused(family: str) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    plan_stages(config, 1)
    with pytest.raises(InvalidInput, match=rf"output_router_logits: '{family}' .*remove the field"):
        plan_stages({**config, "output_router_logits": True}, 1)


def test_a_published_configuration_that_asks_for_no_loss_has_none() -> None:
    chained = chain({"model_type": "mixtral", **MIXTURES["mixtral"]}, 1)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert chained.stages[0].hidden_states(ids)[1] is None
