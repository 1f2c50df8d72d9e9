"""A checkpoint of plain transformers, read a stage at a time; of the hub's only the local cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.pipeline.pretrained import Checkpoint, described_by
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from tests.pipeline.conftest import FAMILIES
from tests.pipeline.gradients import assert_gradients_equal
from tests.sweeps import sweep

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def saved(
    folder: Path, family: str, *, tied: bool, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A random model as `save_pretrained` leaves it in the folder."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def read(checkpoint: Checkpoint, stages: int) -> dict[str, Tensor]:
    """All tensors by name, each read with its stage."""
    model, found = checkpoint.model(stages), dict[str, Tensor]()
    for stage in range(stages):
        layout = FlatLayout.of(parameter_shapes(model, stages, stage))
        found |= layout.view(checkpoint.stage(model, stages, stage))
    return found


@pytest.mark.parametrize("stages", sweep([1, 2, 3], {1, 3}))
@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True), ("opt", True)]
)
def test_every_stage_has_the_tensors_that_from_pretrained_loads(
    tmp_path: Path, family: str, tied: bool, stages: int
) -> None:
    saved(tmp_path, family, tied=tied, max_shard_size="20KB")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = read(Checkpoint(str(tmp_path)), stages)
    whole = dict(plain.named_parameters(remove_duplicate=not (tied and stages > 1)))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_one_stage_keeps_tied_embeddings_tied_and_computes_what_transformers_does(
    tmp_path: Path, family: str
) -> None:
    saved(tmp_path, family, tied=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    checkpoint = Checkpoint(str(tmp_path))
    model = checkpoint.model(1)
    stage = build_stage(model, 0, 1, seed=0)
    live = flatten_parameters(stage, FlatLayout.of(parameter_shapes(model, 1, 0)))
    live.copy_(checkpoint.stage(model, 1, 0))
    ids = torch.arange(12).view(2, 6)
    ours, theirs = stage(ids), plain(input_ids=ids, use_cache=False).logits
    assert torch.equal(ours, theirs)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    assert_gradients_equal([stage], plain)


def test_values_of_16_bits_become_fp32_as_they_are(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", tied=False, dtype=torch.bfloat16)
    found = read(Checkpoint(str(tmp_path)), 2)
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], parameter.float()), name


def test_a_stage_needs_no_file_but_those_with_its_tensors(tmp_path: Path) -> None:
    saved(tmp_path, "llama", tied=False, max_shard_size="20KB")
    checkpoint = Checkpoint(str(tmp_path))
    model = checkpoint.model(2)
    before = checkpoint.stage(model, 2, 1)
    names = {name for name, _ in parameter_shapes(model, 2, 1)}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(index.values()) - {index[name] for name in names}
    assert others
    for file in others:
        (tmp_path / file).unlink()
    assert torch.equal(Checkpoint(str(tmp_path)).stage(model, 2, 1), before)
    with pytest.raises(InvalidInput, match=r"the file .* is missing; fetch it again"):
        Checkpoint(str(tmp_path)).stage(model, 2, 0)


def test_a_file_of_the_decoder_alone_is_read_by_the_names_it_has(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole", "gpt2", tied=True)
    model.transformer.save_pretrained(tmp_path / "decoder")
    found = read(Checkpoint(str(tmp_path / "decoder")), 2)
    whole = read(Checkpoint(str(tmp_path / "whole")), 2)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_name_of_the_hub_at_a_commit_is_read_from_its_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    saved(snapshot, "llama", tied=False, max_shard_size="20KB")
    found = read(Checkpoint(f"some/model@{COMMIT}", tmp_path), 2)
    here = read(Checkpoint(str(snapshot)), 2)
    assert all(torch.equal(found[name], here[name]) for name in here)


def test_the_hub_that_does_not_answer_is_a_fault_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match=r"hub does not answer; check the network"):
        Checkpoint(f"some/model@{COMMIT}", tmp_path).model(1)


def test_run_yaml_is_completed_by_configuration_and_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2", tied=True)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    given = {"name": "t", "model": {"from": str(tmp_path)}, "stages": 2, "data": {"parts": 3}}
    found = described_by(given)
    assert found["initial"] == {"source": str(tmp_path)}
    assert found["data"] == {"parts": 3, "tokenizer": str(tmp_path)}
    assert (found["model"]["model_type"], found["model"]["vocab_size"]) == ("gpt2", 67)
    assert found["model"]["tie_word_embeddings"] is False  # two stages
    assert not {"dtype", "architectures", "transformers_version"} & found["model"].keys()
    assert described_by(given | {"stages": 1})["model"]["tie_word_embeddings"] is True
    named = described_by(given | {"data": {"tokenizer": "byt5"}})
    assert named["data"]["tokenizer"] == "byt5"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert described_by(given)["data"]["tokenizer"] == "byt5"
    other = {"name": "t", "model": "tiny"}
    assert described_by(other) is other


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return act


def _replaced(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return _changed(lambda tensors: tensors.update({name: value(tensors[name])}))


NORM = "model.norm.weight"


def _without_norm(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (shutil.rmtree, r"there is no such folder here; check the path, or .*40 hex digits"),
        (lambda f: (f / "config.json").unlink(), "has no config.json; name a folder"),
        (lambda f: (f / "config.json").write_text("{"), "no valid JSON .*; fetch it again"),
        (_pickled, r"has no model.safetensors, and pickled weights are not read: convert it"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "damaged .*; fetch it again"),
        (_changed(_without_norm), rf"the tensor {NORM} is missing; .* and save it with"),
        (_replaced(NORM, lambda t: t[:-1].clone()), rf"{NORM} has the shape \(31,\), the model's"),
        (_replaced(NORM, lambda t: t.double()), f"{NORM} is of F64, which fp32 does not hold"),
        (_replaced(NORM, lambda t: t / 0), f"{NORM} holds values that are not finite; choose"),
        (lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../../b"}}'), "index.json is damaged; fetch it again"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_started_from_is_refused_with_the_mend(
    tmp_path: Path, act: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "checkpoint"
    saved(folder, "llama", tied=False)
    act(folder)
    with pytest.raises(InvalidInput, match=said):
        read(Checkpoint(str(folder)), 2)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"from": "some/model"}, r"no such folder here; .* some/model@ and its 40 hex digits"),
        ({"from": "some/model@main"}, r"'main' is no commit, .*; pin it: some/model@"),
        ({"from": "x", "hidden_size": 3}, "model.from stands alone, .*; remove hidden_size"),
    ],
)
def test_what_is_not_pinned_or_says_too_much_is_refused(model: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        described_by({"name": "t", "model": model})


def test_without_a_tokenizer_one_must_be_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama", tied=False)
    with pytest.raises(InvalidInput, match=r"holds no tokenizer; name .* in data\.tokenizer"):
        described_by({"name": "t", "model": {"from": str(tmp_path)}})


def test_a_constant_that_was_trained_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, "minimax", tied=False)
    with pytest.raises(InvalidInput, match="save_original_format=False"):
        read(Checkpoint(str(tmp_path)), 1)  # each expert has tensors of its own in this format
    shutil.rmtree(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    read(Checkpoint(str(tmp_path)), 1)
    trained = [buffer for name, buffer in model.named_buffers() if "slope_rate" in name]
    trained[0].add_(1.0)
    model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(InvalidInput, match=r"is no parameter, but was trained; .*choose another"):
        read(Checkpoint(str(tmp_path)), 1)
