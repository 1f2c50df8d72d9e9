"""Tokenizers: no text becomes a special token."""

import gc
import importlib
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec, Manifest
from dilocox.peer.commands.operate import checked_manifest
from dilocox.peer.process.prepare import open_corpus
from dilocox.peer.training import data as data_module
from dilocox.peer.training.data import check_tokenizer, open_tokenizer, tokenizer_digest
from tests.peer.corpora import (
    LENGTH,
    corpus,
    documents,
    epoch_documents,
    take,
    write_json,
    write_tokenizer,
)
from tests.peer.loops import MODEL


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of text in each call of a Hugging Face tokenizer."""
    gc.collect()  # the corpora of other tests, whose threads would call it, too
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(10)
    base = importlib.import_module("transformers").PreTrainedTokenizerBase
    given, call = list[int](), base.__call__

    def counted(self: object, text: str | list[str], **options: object) -> object:
        texts = [text] if isinstance(text, str) else text
        given.append(sum(len(each.encode()) for each in texts))
        return call(self, text, **options)

    monkeypatch.setattr(base, "__call__", counted)
    return given


class TestTokenizers:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder)
        return folder

    def test_byte_ids_are_those_of_the_byt5_tokenizer(self) -> None:
        theirs = importlib.import_module("transformers").ByT5Tokenizer()
        ours = open_tokenizer("byt5")
        text = "def café():\n\treturn 'naïve \N{SNOWMAN}'\r\n"
        assert (
            ours.encode(text.encode()).tolist() == theirs(text, add_special_tokens=False).input_ids
        )
        assert ours.eos_id == theirs.eos_token_id
        assert ours.vocab_size == len(theirs)

    def test_its_ids_become_text_again_and_others_are_passed_over(self) -> None:
        tokenizer = open_tokenizer("byt5")
        ids = tokenizer.encode("naïve\n".encode()).tolist()
        assert tokenizer.decode(ids) == "naïve\n"
        assert tokenizer.decode([1, *ids[:3], 383, 0]) == "na\ufffd"

    def test_special_words_in_text_make_no_special_ids(self) -> None:
        ids = open_tokenizer("byt5").encode(b"</s><pad><unk>")
        assert ids.min() >= 3

    def test_a_tokenizer_folder_is_used_without_special_tokens(self, folder: Path) -> None:
        tokenizer = open_tokenizer(str(folder))
        ids = tokenizer.encode(b"x </s> \xff y")
        decode = (
            importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder).decode
        )
        assert tokenizer.eos_id not in ids
        assert decode(ids.tolist()) == "x </s> \N{REPLACEMENT CHARACTER} y"
        assert 257 <= tokenizer.vocab_size <= 300
        assert tokenizer.decode([*tokenizer.encode(b"def f").tolist(), tokenizer.eos_id]) == "def f"

    def test_a_corpus_with_it_resumes_to_the_bit(self, folder: Path, tmp_path: Path) -> None:
        spec = replace(write_json(tmp_path, [documents(90)]), tokenizer=str(folder))
        steady = corpus(spec)
        take(steady, 5)
        resumed = corpus(spec, part=1)
        assert resumed.load_state_dict(json.loads(json.dumps(steady.state_dict())))
        assert torch.equal(take(steady, 60), take(resumed, 60))

    def test_short_documents_share_a_call(
        self, folder: Path, tmp_path: Path, calls: list[int]
    ) -> None:
        """With one for each a buffer of few words a row took seconds, most of them under the lock
        of the training thread."""
        spec = replace(write_json(tmp_path, [documents(900)]), tokenizer=str(folder))
        next(corpus(spec))
        assert 0 < len(calls) < 60

    def test_a_buffer_ends_where_one_document_after_the_other_would_fill_it(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data_module, "BUFFER_TOKENS", 700)
        texts = [text[: 1 + index % 70] for index, text in enumerate(documents(400))]
        spec = replace(write_json(tmp_path, [texts]), tokenizer=str(folder))
        tokenizer = open_tokenizer(str(folder))
        buffers = list[list[int]]([[]])
        for document in epoch_documents(spec, 0):
            buffers[-1] += [*tokenizer.encode(document).tolist(), tokenizer.eos_id]
            if len(buffers[-1]) >= 700:
                buffers.append([])
        expected = [
            buffer[start : start + LENGTH + 1]
            for buffer in buffers
            for start in range(0, len(buffer) - LENGTH, LENGTH)
        ]
        found = take(corpus(spec), len(expected)).flatten(0, 1)[: len(expected)].tolist()
        assert len(buffers) > 3
        assert sorted(found) == sorted(expected)

    @pytest.mark.parametrize(
        "text",
        [
            "a line of text\n" * 20,
            "no line but words " * 15,
            "\N{SNOWMAN}" * 100,
            "\N{SNOWMAN}\n" + "x" * 63 + "\N{SNOWMAN}" * 90,
            "x" * 300,
        ],
        ids=["lines", "words", "characters", "short_and_long_line", "one_word"],
    )
    def test_a_long_document_is_tokenized_in_slices_of_whole_characters(
        self,
        folder: Path,
        tmp_path: Path,
        calls: list[int],
        monkeypatch: pytest.MonkeyPatch,
        text: str,
    ) -> None:
        """A row of 50 MB took gigabytes in one call; the peer, killed, began before it again."""
        monkeypatch.setattr(data_module, "ENCODED_BYTES", 64, raising=False)
        spec = replace(write_json(tmp_path, [["held out", *3 * [text]]]), tokenizer=str(folder))
        [window, _] = next(corpus(spec, length=200)).tolist()  # one of each epoch
        assert max(calls) <= 64
        begun = open_tokenizer(str(folder)).decode(window).rstrip("\N{REPLACEMENT CHARACTER}")
        assert len(begun) > 60 and text.startswith(begun)

    def test_a_state_of_another_tokenizer_is_refused(self, folder: Path, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [documents(90)])
        state = corpus(spec).state_dict()
        assert not corpus(replace(spec, tokenizer=str(folder))).load_state_dict(state)

    def test_a_folder_without_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="holds no tokenizer"):
            open_tokenizer(str(tmp_path))

    def test_a_tokenizer_without_end_of_text_is_refused(self, folder: Path, tmp_path: Path) -> None:
        transformers = importlib.import_module("transformers")
        shutil.copytree(folder, tmp_path / "copy")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
        tokenizer.eos_token = None
        tokenizer.save_pretrained(tmp_path / "without")
        with pytest.raises(InvalidInput, match="no end-of-text token"):
            open_tokenizer(str(tmp_path / "without"))

    def test_a_tokenizer_that_was_changed_since_the_run_began_is_refused(
        self, folder: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(folder, tmp_path / "copy")
        ours = open_tokenizer(str(tmp_path / "copy"))
        model = dict(MODEL, vocab_size=ours.vocab_size)
        spec = DataSpec(tokenizer=str(folder), tokenizer_digest=tokenizer_digest(ours))
        check_tokenizer(spec, open_tokenizer(str(folder)), model)
        file = tmp_path / "copy" / "tokenizer.json"
        content = json.loads(file.read_text())
        a, b = list(content["model"]["vocab"])[40:42]
        ids = content["model"]["vocab"]
        ids[a], ids[b] = ids[b], ids[a]
        file.write_text(json.dumps(content))
        with pytest.raises(InvalidInput, match="makes other ids than the run's"):
            check_tokenizer(spec, open_tokenizer(str(tmp_path / "copy")), model)

    def test_what_becomes_of_text_is_in_the_digest(self, folder: Path, tmp_path: Path) -> None:
        """The vocabulary alone does not tell: a normalizer could replace words."""
        shutil.copytree(folder, tmp_path / "copy")
        file = tmp_path / "copy" / "tokenizer.json"
        content = json.loads(file.read_text())
        word = max(content["model"]["vocab"], key=len)
        replaced = {"type": "Replace", "pattern": {"String": word}, "content": "x"}
        for changed in ({"normalizer": replaced}, {"model": {**content["model"], "merges": []}}):
            file.write_text(json.dumps(content | changed))
            changed_digest = tokenizer_digest(open_tokenizer(str(tmp_path / "copy")))
            assert changed_digest != tokenizer_digest(open_tokenizer(str(folder)))

    @pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"model": {"type": "X"}}'])
    def test_damaged_files_are_named(
        self, folder: Path, tmp_path: Path, file: str, content: str
    ) -> None:
        shutil.copytree(folder, tmp_path / "copy")
        (tmp_path / "copy" / file).write_text(content)
        with pytest.raises(InvalidInput, match="copy"):
            open_tokenizer(str(tmp_path / "copy"))

    @pytest.mark.parametrize(("rows", "fits"), [(4000, True), (258, False)])
    def test_a_run_whose_model_lacks_rows_for_its_tokenizer_is_refused_before_it_begins(
        self, folder: Path, tmp_path: Path, rows: int, fits: bool
    ) -> None:
        ids = open_tokenizer(str(folder)).vocab_size
        assert 258 < ids < 4000
        data = write_json(tmp_path, [documents(90)])
        run = {
            "name": "t",
            "model": dict(MODEL, vocab_size=rows),
            "end_tokens": 1000,
            "batch": {"sequence_length": 8},
            "data": {"source": data.source, "format": "json", "tokenizer": str(folder)},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run))
        if fits:
            checked = checked_manifest(path).data
            assert checked.held_out
            assert checked.tokenizer_digest == tokenizer_digest(open_tokenizer(str(folder)))
            return
        said = f"has {ids} ids, and model.vocab_size is {rows}: set model.vocab_size to {ids}"
        with pytest.raises(InvalidInput, match=said):
            checked_manifest(path)
        # nor does a volunteer of such a run begin, who would fail at the first step
        with pytest.raises(InvalidInput, match=said):
            open_corpus(Manifest.load(path), "")

    def test_document_masks_go_by_the_tokenizers_token_whatever_the_model_says(
        self, folder: Path, tmp_path: Path
    ) -> None:
        data = write_json(tmp_path, [documents(90)])
        source = {"source": data.source, "format": "json", "tokenizer": str(folder)}
        model = dict(MODEL, vocab_size=4000, eos_token_id=[7, 8])  # as checkpoints name several
        run = {"name": "t", "model": model, "end_tokens": 1000, "batch": {"sequence_length": 8}}
        path = tmp_path / "run.yaml"

        def checked(model: Mapping[str, object] = model, **fields: object) -> Manifest:
            path.write_text(yaml.safe_dump(run | {"model": model, "data": source | fields}))
            return checked_manifest(path)

        assert checked().document_end is None
        end = open_tokenizer(str(folder)).eos_id
        manifest = checked(document_masks=True)
        assert manifest.document_end == end == manifest.data.end_of_text
        with pytest.raises(InvalidInput, match=f"ends documents with {end}: leave it out"):
            checked(document_masks=True, end_of_text=end + 1)
        with pytest.raises(
            InvalidInput, match=r"data\.document_masks: nobody .* that falcon keeps"
        ):
            checked({"model_type": "falcon", "vocab_size": 4000}, document_masks=True)

    def test_a_run_with_a_tokenizer_that_does_not_exist_is_refused_before_it_begins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_such(kind: str, name: str, field: str) -> None:
            raise InvalidInput(f"{field} {name!r} is neither here nor on the Hugging Face hub")

        monkeypatch.setattr(data_module, "require_hub", no_such)
        path = tmp_path / "run.yaml"
        run = {"name": "t", "model": "tiny", "end_tokens": 1000}
        path.write_text(yaml.safe_dump(run | {"data": {"tokenizer": "nobody/nothing"}}))
        with pytest.raises(InvalidInput, match=r"data\.tokenizer 'nobody/nothing' is neither here"):
            checked_manifest(path)
