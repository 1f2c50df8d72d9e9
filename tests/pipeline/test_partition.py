"""The cut: even, complete, and refused where a model cannot be cut."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from dilocox.dht.errors import InvalidInput
from dilocox.pipeline import partition
from dilocox.pipeline.partition import build_skeleton, load_config, plan_stages, split_layers

Config = dict[str, Any]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
def test_no_split_has_a_cheaper_dearest_stage_nor_a_more_even_one_as_cheap(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def rank(bounds: list[int]) -> tuple[int, int, list[int]]:
        runs = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
        return max(runs), sum(run * run for run in runs), bounds

    inner = combinations(range(1, len(costs)), num_stages - 1)
    best = min(rank([0, *bounds, len(costs)]) for bounds in inner)
    assert split_layers(costs, num_stages) == best[2]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_are_contiguous_and_hold_every_parameter_once(
    llama_config: Config, num_stages: int
) -> None:
    plans = plan_stages(llama_config, num_stages)
    assert [plan.stage for plan in plans] == list(range(num_stages))
    assert [plan.start for plan in plans] == [0, *(plan.stop for plan in plans[:-1])]
    assert plans[-1].stop == 4
    assert all(plan.start < plan.stop for plan in plans)
    model = build_skeleton(llama_config).model
    assert sum(plan.num_parameters for plan in plans) == sum(p.numel() for p in model.parameters())


def test_embedding_costs_half_its_parameters_and_the_head_all_of_them(llama_config: Config) -> None:
    first, *_, last = plan_stages(llama_config, 4)
    table = 384 * 32
    norm = 32
    assert first.num_parameters - first.cost == table // 2
    assert last.num_parameters == last.cost
    assert last.cost - first.cost == table // 2 + norm


def test_a_heavy_head_moves_layers_to_earlier_stages(llama_config: Config) -> None:
    plans = plan_stages({**llama_config, "num_hidden_layers": 8, "vocab_size": 2000}, 2)
    assert plans[1].stop - plans[1].start < plans[0].stop - plans[0].start


def test_planning_gives_memory_to_nothing(family_config: Config) -> None:
    model = build_skeleton(family_config).model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_families_that_tie_by_default_are_untied() -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99}
    names = [name for name, _ in build_skeleton(config).model.named_parameters()]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(names)


def test_the_callers_configuration_is_not_changed(llama_config: Config) -> None:
    llama_config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    before = repr(llama_config)
    build_skeleton(llama_config)
    assert repr(llama_config) == before


def test_fields_of_a_published_config_json_are_accepted(family_config: Config) -> None:
    published = load_config(family_config).to_dict()
    published.update(_name_or_path="some/model", torch_dtype="bfloat16", architectures=["X"])
    model = build_skeleton(published).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "rwkv"}, "'rwkv' declares no pipeline plan .* choose another family"),
        ({"model_type": "lama"}, "no model family 'lama'; did you mean 'llama'"),
        ({"model_type": None}, "no model family None"),
        ({"model_type": "esmc"}, "'esmc' has no causal language model"),
        ({"model_type": "hrm_text"}, "names 0 lists of layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: .* set it to false"),
        ({"hiden_size": 64}, "hiden_size: .* did you mean 'hidden_size'"),
        ({"hidden_size": "wide"}, "no 'llama' model .*hidden_size.* expected int"),
        ({"hidden_act": "nope"}, "no 'llama' model .*nope"),
        ({"num_attention_heads": 0}, "no 'llama' model .*ZeroDivisionError"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation: .* remove the field"),
        ({"auto_map": {"AutoConfig": "x--y.Z"}}, "auto_map: .* remove the field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configuration_that_cannot_be_cut_is_refused_with_its_mend(
    llama_config: Config, change: Config, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        plan_stages({**llama_config, **change}, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [["llama"], "llama", None, 3])
def test_a_configuration_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(InvalidInput, match=r"expected a mapping .*\{model_type: llama"):
        plan_stages(config, 1)


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_and_none_at_all_are_refused(
    llama_config: Config, num_stages: int
) -> None:
    with pytest.raises(InvalidInput, match=f"stages: {num_stages} .* choose 1 to 4 stages"):
        plan_stages(llama_config, num_stages)


def test_tensors_that_stay_tied_against_the_configuration_are_refused(
    llama_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn:
        @staticmethod
        def from_config(config: Any, **options: Any) -> nn.Module:
            model = AutoModelForCausalLM.from_config(config, **options)
            model.lm_head.weight = model.model.embed_tokens.weight
            return model

    monkeypatch.setattr(partition, "AutoModelForCausalLM", Stubborn)
    with pytest.raises(InvalidInput, match=r"leaves lm_head.weight tied .* choose another family"):
        plan_stages(llama_config, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma4_text"}, "keeps .*per_layer.* outside its pipeline plan"),
        (
            {
                "model_type": "gemma4_unified_text",
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "keys and values",
        ),
        ({"model_type": "bloom", "n_layer": 4}, "word_embeddings.* outside its pipeline plan"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_layers_that_share_more_than_the_hidden_state_stay_on_one_stage(
    config: Config, message: str
) -> None:
    config = {**config, "num_hidden_layers": 4}
    with pytest.raises(InvalidInput, match=f"cannot be parted.*{message}.* set stages to 1"):
        plan_stages(config, 2)
    assert plan_stages(config, 1)[0].stop == 4
