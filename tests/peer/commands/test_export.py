"""The exported folder, loaded by plain transformers as a stranger would."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands import export
from dilocox.peer.commands.export import (
    CheckpointDraft,
    continue_text,
    evaluate_checkpoint,
    model_card,
    shown_rounds,
)
from dilocox.pipeline.stage import build_stage, parameter_shapes
from tests.peer.commands.checkpoints import INFO, LLAMA, RUN, Config, stage_tensors, write
from tests.sweeps import sweep

FAMILIES: dict[str, Config] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2},
    "gpt_neox": {},
    # Published checkpoints name the experts otherwise; ours must load all the same.
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    # Insists on a bos id, which the byte tokenizer does not have.
    "cwm": {"num_key_value_heads": 2, "head_dim": 8},
    # Has buffers in its checkpoint.
    "minimax": {"num_key_value_heads": 2, "num_local_experts": 4, "block_size": 4},
}


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", sweep(FAMILIES, 2))
def test_plain_transformers_loads_bit_equal_weights(
    tmp_path: Path, family: str, num_stages: int
) -> None:
    config = {**LLAMA, **FAMILIES[family], "model_type": family}
    write(tmp_path / "out", config, num_stages)
    loader: Any = AutoModelForCausalLM
    model, faults = loader.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not any(faults.values()), faults
    expected = build_stage(config, 0, 1, seed=3).state_dict()
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype, name


def test_the_folder_holds_one_shard_per_stage_and_an_index_of_all(tmp_path: Path) -> None:
    write(tmp_path / "out", num_stages=3)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == shards
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    shapes = [parameter_shapes(LLAMA, 3, stage) for stage in range(3)]
    assert index["weight_map"] == {
        name: shard for shard, named in zip(shards, shapes, strict=True) for name, _ in named
    }
    numbers = sum(torch.Size(shape).numel() for named in shapes for _, shape in named)
    assert index["metadata"]["total_size"] == 4 * numbers
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float32", False)
    assert json.loads((tmp_path / "out/dilocox.json").read_text()) == INFO


def test_the_umask_says_who_may_read_each_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o640"}


def test_the_rounds_of_all_stages_are_told_apart() -> None:
    assert shown_rounds([14]) == "round 14"
    assert shown_rounds([14, 14]) == "round 14"
    assert shown_rounds([3, 4, 4]) == "rounds 3, 4 and 4 of its stages"


def test_the_folder_has_the_byte_tokenizer_and_its_special_ids(tmp_path: Path) -> None:
    write(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "def né():\n\treturn 1"
    assert tokenizer(text, add_special_tokens=False).input_ids == [b + 3 for b in text.encode()]
    settings = GenerationConfig.from_pretrained(tmp_path / "out", local_files_only=True)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    for holder in (settings, config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (None, 1, 0)
    assert settings.suppress_tokens == [0, 2, *range(259, 384)]


def test_a_tokenizer_folder_can_take_the_place_of_the_byte_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer")
    spec = str(tmp_path / "tokenizer")
    write(tmp_path / "out", {**LLAMA, "vocab_size": 400}, 1, tokenizer=spec)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 1
    settings = GenerationConfig.from_pretrained(tmp_path / "out", local_files_only=True)
    assert settings.suppress_tokens == [0, 2, *range(384, 400)]


def test_a_tokenizer_that_cannot_be_had_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "tokenizer" / "here")
    with pytest.raises(EnvironmentFault, match=r"tokenizer .*here.* name its folder"):
        write(tmp_path / "out", tokenizer=missing)
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_or_an_empty_folder_is_replaced_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", num_stages=3, seed=3)
    write(tmp_path / "out", num_stages=2, seed=4)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    expected = build_stage(LLAMA, 0, 1, seed=4).state_dict()
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_earlier_export_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    precious = target if kind == "file" else target / "chapter.tex"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("years of work")
    with pytest.raises(InvalidInput, match=r"thesis.*not an earlier export.*choose a new"):
        write(target)
    assert precious.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_failure_half_way_leaves_the_earlier_export_and_what_the_next_one_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a" / "b" / "out"  # whose parents are made
    write(out, seed=3)
    before = files(out)
    place = {"stage": 0, "round": 7}
    with pytest.raises(ConnectionError), CheckpointDraft(out, LLAMA, 2, "byt5", RUN) as checkpoint:
        checkpoint.add(place, stage_tensors(LLAMA, 2, 0, seed=4))
        (checkpoint.draft / "half a state").mkdir()
        raise ConnectionError("the peer of stage 1 left")
    assert files(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.partial", "out"]
    rename = Path.rename

    def refuse_drafts(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    with CheckpointDraft(out, LLAMA, 2, "byt5", RUN) as checkpoint:
        assert checkpoint.stages == {0: place}
        checkpoint.add({"stage": 1}, stage_tensors(LLAMA, 2, 1, seed=4))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuse_drafts)
            with pytest.raises(EnvironmentFault, match=r"Permission denied.*you may write"):
                checkpoint.finish(INFO, "")
    assert files(out) == before
    with CheckpointDraft(out, LLAMA, 2, "byt5", RUN) as checkpoint:
        assert set(checkpoint.stages) == {0, 1}
    write(tmp_path / "whole", seed=4)
    write(out, seed=4)
    assert files(out) == files(tmp_path / "whole")
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("other", ["run", "dtype", "stages"])
def test_what_another_kind_of_export_left_is_not_gone_on_with(tmp_path: Path, other: str) -> None:
    out = tmp_path / "out"
    with CheckpointDraft(out, LLAMA, 2, "byt5", RUN) as checkpoint:
        checkpoint.add({"stage": 1}, stage_tensors(LLAMA, 2, 1))
    with CheckpointDraft(
        out,
        LLAMA,
        3 if other == "stages" else 2,
        "byt5",
        "cd" * 16 if other == "run" else RUN,
        torch.bfloat16 if other == "dtype" else torch.float32,
    ) as checkpoint:
        assert checkpoint.stages == {}
        assert [path.name for path in checkpoint.draft.iterdir()] == ["lock"]


def test_two_exports_to_one_folder_do_not_meet(tmp_path: Path) -> None:
    with CheckpointDraft(tmp_path / "out", LLAMA, 2, "byt5", RUN):
        other = CheckpointDraft(tmp_path / "out", LLAMA, 2, "byt5", RUN)
        with pytest.raises(EnvironmentFault, match="another export writes there"), other:
            pass


def test_a_place_where_no_folder_can_be_is_named_with_an_exports_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault) as refused:
        write(tmp_path / "file" / "out")
    assert "choose another folder" in str(refused.value)
    assert "--state" not in str(refused.value)


def test_a_full_disk_gives_a_message_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(EnvironmentFault, match=r"No space left on device; free space"):
        write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_half_the_bytes_round_the_weights_to_the_nearest(tmp_path: Path) -> None:
    config = {**LLAMA, **FAMILIES["minimax"], "model_type": "minimax"}
    write(tmp_path / "out", config, dtype=torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    expected = build_stage(config, 0, 1, seed=3)
    for name, parameter in expected.named_parameters():
        loaded = model.state_dict()[name]
        assert loaded.dtype == torch.bfloat16, name
        assert torch.equal(loaded, parameter.to(torch.bfloat16)), name
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    weights = sum(parameter.numel() for parameter in expected.parameters())
    assert 2 * weights <= index["metadata"]["total_size"] < 2 * weights + 1000
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("fault", ["missing", "renamed", "reshaped"])
def test_tensors_that_are_not_those_of_the_stages_are_refused(tmp_path: Path, fault: str) -> None:
    tensors = dict(stage_tensors(LLAMA, 2, 0))
    name = "model.embed_tokens.weight"
    weights = tensors.pop(name)
    tensors |= {"renamed": {"transformer.wte": weights}, "reshaped": {name: weights[:-1]}}.get(
        fault, {name: weights}
    )
    with (
        CheckpointDraft(tmp_path / "out", LLAMA, 2, "byt5", RUN) as checkpoint,
        pytest.raises(ValueError, match=r"missing are \[1\]|stage 0 of 2 has other"),
    ):
        checkpoint.add({"stage": 0}, tensors)
        checkpoint.finish(INFO, "")
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_it_is_and_names_contributors_by_choice() -> None:
    run = {"name": "tales", "model": "tiny", "stages": 2, "end_tokens": 10**6}
    info = {"run": RUN, "tokens": 12345, "stages": [{"round": 3}, {"round": 3}]}
    card = model_card(Manifest.from_dict(run), info, {})
    for words in ("# tales", "12,345 of 1,000,000 tokens", "`stdlib`", RUN, "from_pretrained"):
        assert words in card
    assert "contributor" not in card
    assert "license:" not in card and "started from" not in card
    for licence, known in (("apache-2.0", "apache-2.0"), ("Ours, see LICENCE", "other")):
        told = run | {"licence": licence, "about": "Tales for children."}
        card = model_card(Manifest.from_dict(told), info, {})
        assert f"\nlicense: {known}\n---\n# tales\n\nTales for children.\n" in card
        assert f"| licence | {licence} |" in card
    card = model_card(Manifest.from_dict(run), info, {"QmFew": 5, "QmMany": 7000})
    assert card.endswith("| QmMany | 7,000 |\n| QmFew | 5 |\n")


def test_evaluation_is_the_mean_loss_per_token_for_any_count_of_windows(tmp_path: Path) -> None:
    write(tmp_path / "out")
    drawn = torch.randint(3, 259, (19, 17), generator=torch.Generator().manual_seed(0))
    for count in (1, 8, 19):
        windows = drawn[:count]
        with torch.no_grad():
            logits = build_stage(LLAMA, 0, 1, seed=3)(windows[:, :-1])
        expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
        assert expected == pytest.approx(5.95, abs=0.2)
        assert evaluate_checkpoint(tmp_path / "out", windows) == pytest.approx(expected)


def test_continuations_depend_on_the_seed_alone_and_at_temperature_zero_not_on_it(
    tmp_path: Path,
) -> None:
    write(tmp_path / "out")
    before = torch.get_rng_state()

    def texts(temperature: float | None, *seeds: int) -> list[str]:
        return [
            continue_text(tmp_path / "out", "ab", 30, seed, temperature=temperature)
            for seed in seeds
        ]

    first, again, other = texts(None, 1, 1, 2)
    assert first == again != other
    assert len(set(texts(0.0, 1, 2, 3))) == 1 and len(set(texts(5.0, 1, 2, 3))) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_is_told_word_by_word_and_whole(tmp_path: Path) -> None:
    write(tmp_path / "out")
    pieces: list[str] = []
    text = continue_text(tmp_path / "out", "né ", 600, 3, temperature=3.0, tell=pieces.append)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1


def test_a_model_without_room_for_so_many_tokens_says_so(tmp_path: Path) -> None:
    write(tmp_path / "out", {**LLAMA, "max_position_embeddings": 16})
    with pytest.raises(InvalidInput, match=r"8 tokens and --tokens 9 .* the 16 tokens"):
        continue_text(tmp_path / "out", "12345678", 9, 0)
    with pytest.raises(InvalidInput, match=r"16 tokens and --tokens 1 "):
        continue_text(tmp_path / "out", "1234567812345678", None, 0)
    text = continue_text(tmp_path / "out", "1234567", None, 0, temperature=0.0)
    assert len(text.encode(errors="replace")) <= 9


def test_special_tokens_written_out_in_a_prompt_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out")
    seen: list[int] = []

    class Model:
        config = generation_config = None

        def eval(self) -> "Model":
            return self

        def generate(self, input_ids: Tensor, streamer: Any, **_: Any) -> None:
            seen.extend(input_ids[0].tolist())
            for ids in (input_ids, torch.tensor([ord("!") + 3])):
                streamer.put(ids)
            streamer.end()

    monkeypatch.setattr(export, "load_model", lambda _: Model())
    assert continue_text(tmp_path / "out", "a</s>b", 1, 0) == "!"
    assert seen == [byte + 3 for byte in b"a</s>b"]


def test_sampling_by_the_folders_settings_gives_bytes_only(tmp_path: Path) -> None:
    write(tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(torch.full((4, 1), 100), max_new_tokens=50)
    # An untrained model finds every third id, those from 259 up, as likely as a byte.
    assert all(3 <= int(i) < 259 or int(i) in (0, 1) for i in ids.flatten())
    assert len(ids.unique()) > 20


@pytest.mark.parametrize("damage", ["absent", "shard", "cut", "key"])
def test_an_incomplete_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    write(out)
    shard = out / "model-00002-of-00002.safetensors"
    if damage == "absent":
        out = tmp_path / "nowhere"
    elif damage == "shard":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        index = out / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"lm_head.weight"', '"head.weight"'))
        shard.write_bytes(shard.read_bytes().replace(b'"lm_head.weight"', b'"lm_had.weight" '))
    with pytest.raises(InvalidInput, match=r"is no complete checkpoint.*export the run again"):
        evaluate_checkpoint(out, torch.ones(1, 5, dtype=torch.long))
