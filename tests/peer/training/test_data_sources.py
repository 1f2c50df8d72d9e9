"""Where documents come from: disjoint parts, text as it is, and mistakes that are named."""

import gzip
import hashlib
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.training import data_sources
from dilocox.peer.training.data import held_out_digest, held_out_windows, open_tokenizer
from dilocox.peer.training.data_sources import (
    HubAway,
    library_files,
    open_source,
    with_formats,
)
from tests.peer.corpora import (
    FORMATS,
    LENGTH,
    Writer,
    corpus,
    documents,
    epoch_documents,
    take,
    write_hub,
    write_json,
    write_parquet,
    write_source,
    write_text,
)


@pytest.fixture(params=FORMATS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> DataSpec:
    return write_source(request.param, tmp_path)


class TestParts:
    def test_parts_and_the_held_out_part_are_disjoint_and_together_everything(
        self, spec: DataSpec
    ) -> None:
        parts = [epoch_documents(spec, part) for part in range(spec.parts)]
        held_out = list(open_source(spec).held_out_documents())
        together = [document for part in [*parts, held_out] for document in part]
        assert all(parts)
        assert held_out
        assert len(together) == len(set(together))
        folder = Path(spec.source)
        if spec.format == "text":
            written = {path.read_bytes() for path in folder.iterdir()}
        elif spec.format == "json":
            lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
            written = {json.loads(line)["text"].encode() for line in lines}
        else:
            tables = [pq.read_table(path) for path in folder.rglob("*.parquet")]
            texts = [text for table in tables for text in table["text"].to_pylist()]
            written = {text.encode() for text in texts if text != "never"}
        assert set(together) == written

    def test_every_file_of_the_standard_library_is_in_the_part_of_its_names_hash(self) -> None:
        spec = DataSpec(parts=7)
        training, held_out = library_files()
        read = {each.name: Path(each.path).read_bytes() for each in [*training, *held_out]}
        for part in range(7):
            expected = [
                read[file.name]
                for file in training
                if int(hashlib.sha256(json.dumps([file.name]).encode()).hexdigest(), 16) % 7 == part
            ]
            assert sorted(epoch_documents(spec, part)) == sorted(expected)
        assert list(open_source(spec).held_out_documents()) == [read[f.name] for f in held_out]

    def test_a_long_text_in_one_file_is_cut_into_pieces_for_all_parts(self, tmp_path: Path) -> None:
        text = "".join(f"line {i}\n" for i in range(40_000)).encode()
        (tmp_path / "one.txt").write_bytes(text)
        spec = DataSpec(source=str(tmp_path / "one.txt"), format="text", parts=8)
        source = open_source(spec)
        pieces = [*source.held_out, *(piece for part in source.parts for piece in part)]
        ranges = sorted((piece.start, piece.stop) for piece in pieces)
        assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
        assert (ranges[0][0], ranges[-1][1]) == (0, len(text))
        sizes = [sum(map(len, epoch_documents(spec, part))) for part in range(8)]
        assert min(sizes) > 0.7 * max(sizes)

    def test_text_does_not_depend_on_where_its_folder_lies(self, tmp_path: Path) -> None:
        specs: list[DataSpec] = []
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
            specs.append(write_text(tmp_path / name, [documents(5, file) for file in range(9)]))
        assert epoch_documents(specs[0], 2) == epoch_documents(specs[1], 2)
        assert held_out_digest(specs[0]) == held_out_digest(specs[1])

    def test_switching_parts_goes_on_with_the_new_one(self, spec: DataSpec) -> None:
        source = corpus(spec, part=0)
        take(source, 3)
        source.open_part(2)
        assert source.part == 2
        assert torch.equal(take(source, 5), take(corpus(spec, part=2), 5))

    @pytest.mark.parametrize("part", [-1, 3])
    def test_a_part_that_the_run_has_not_is_refused(self, tmp_path: Path, part: int) -> None:
        spec = write_text(tmp_path, [documents(9, file) for file in range(9)])
        with pytest.raises(InvalidInput, match=f"{part} is not one of 0 to 2"):
            corpus(spec, part=part)

    def test_a_part_smaller_than_a_window_is_refused_with_the_mend(self, spec: DataSpec) -> None:
        with pytest.raises(
            InvalidInput, match=r"less than one window.*lower data\.parts \(now 3\)"
        ):
            corpus(spec, length=20_000)

    def test_a_part_without_any_file_is_refused_with_the_mend(self, tmp_path: Path) -> None:
        spec = replace(write_text(tmp_path, [documents(9, file) for file in range(4)]), parts=5)
        with pytest.raises(InvalidInput, match=r"part 4 of .* is empty; lower data\.parts"):
            corpus(spec, part=4)

    def test_a_part_of_exactly_one_window_is_enough(self, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [["held out", "a" * LENGTH, "b" * LENGTH, "c" * LENGTH]])
        rows = {tuple(window.tolist()) for window in take(corpus(spec), 3).reshape(-1, LENGTH + 1)}
        assert len(rows) == 1
        with pytest.raises(InvalidInput, match="less than one window"):
            corpus(spec, length=LENGTH + 1)


class TestText:
    """What is in the files reaches the model as it is."""

    HARD = b"def f():\r\n\treturn '\xff\xfe'\n\n</s> <pad>\x00 \xc3\xa9\n"

    def read(self, spec: DataSpec) -> bytes:
        return b"".join(open_source(spec).held_out_documents()) + b"".join(
            document for part in range(spec.parts) for document in epoch_documents(spec, part)
        )

    def test_newlines_special_words_and_invalid_utf8_of_a_text_file_stay(
        self, tmp_path: Path
    ) -> None:
        for index in range(3):
            (tmp_path / f"{index}.txt").write_bytes(self.HARD * 9)
        spec = DataSpec(source=str(tmp_path), format="text", parts=1)
        assert self.read(spec) == self.HARD * 27
        [window] = held_out_windows(spec, len(self.HARD) - 1, 1)
        assert (window - 3).tolist() == list(self.HARD)

    def test_json_keeps_newlines_replaces_invalid_utf8_and_passes_over_nothing(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "a.jsonl").write_bytes(
            b'{"text": "held out"}\n{"text": "two\\nlines\\r\\n"}\n{"text": null}\n'
            b'{"text": ""}\n{"text": "bad \xff here </s>"}\n'
        )
        spec = DataSpec(source=str(tmp_path / "a.jsonl"), format="json", parts=1)
        expected = [b"two\nlines\r\n", "bad \N{REPLACEMENT CHARACTER} here </s>".encode()]
        assert epoch_documents(spec, 0) == expected

    def test_compressed_json_lines_are_read(self, tmp_path: Path) -> None:
        lines = "\n".join(json.dumps({"text": text}) for text in documents(9))
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        spec = DataSpec(source=str(tmp_path), format="json", parts=1)
        assert self.read(spec) == "".join(documents(9)).encode()

    def test_text_files_of_a_hub_data_set_stay_whole(self, tmp_path: Path) -> None:
        for index in range(2):
            (tmp_path / f"train-{index}.txt").write_bytes(b"one\n\ntwo\n\xff")
        spec = DataSpec(source=str(tmp_path), format="hub", parts=1)
        assert epoch_documents(spec, 0) == ["one\n\ntwo\n\N{REPLACEMENT CHARACTER}".encode()]

    def test_another_text_field_is_read_where_it_is_named(self, tmp_path: Path) -> None:
        rows = [{"text": "wrong", "body": body} for body in documents(5)]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        spec = DataSpec(source=str(tmp_path), format="json", parts=1, text_field="body")
        assert self.read(spec) == "".join(documents(5)).encode()

    def test_a_pattern_names_the_files_it_matches(self, tmp_path: Path) -> None:
        write_text(tmp_path, [[f"text {index}"] for index in range(4)])
        spec = DataSpec(source=str(tmp_path / "[12].txt"), format="text", parts=1)
        assert sorted([self.read(spec)[:6], self.read(spec)[6:]]) == [b"text 1", b"text 2"]

    def test_hidden_files_and_other_endings_in_a_folder_are_passed_over(
        self, tmp_path: Path
    ) -> None:
        spec = replace(write_json(tmp_path, [documents(5)]), parts=1)
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache" / "x.jsonl").write_text("no json")
        (tmp_path / "README.md").write_text("no json")
        assert self.read(spec) == "".join(documents(5)).encode()

    def test_a_file_name_with_pattern_characters_is_taken_literally(self, tmp_path: Path) -> None:
        write_json(tmp_path, [documents(5)])
        odd = (tmp_path / "0.jsonl").rename(tmp_path / "a[0]*.jsonl")
        spec = DataSpec(source=str(odd), format="json", parts=1)
        assert self.read(spec) == "".join(documents(5)).encode()


class TestMistakes:
    @pytest.mark.parametrize("kind", ["text", "json", "parquet"])
    def test_a_source_that_matches_nothing_is_named(self, tmp_path: Path, kind: Any) -> None:
        (tmp_path / f"empty.{kind}").touch()
        for source in (tmp_path, tmp_path / "*.nothing", tmp_path / "absent"):
            with pytest.raises(InvalidInput, match=rf"data\.source '{re.escape(str(source))}'"):
                open_source(DataSpec(source=str(source), format=kind))

    @pytest.mark.parametrize("writer", [write_json, write_parquet])
    def test_a_missing_field_is_named_with_those_that_exist(
        self, tmp_path: Path, writer: Writer
    ) -> None:
        spec = replace(writer(tmp_path, [documents(5)]), text_field="content")
        with pytest.raises(
            InvalidInput, match=r"no field 'content'; it has '(id|text)', '(id|text)'"
        ):
            open_source(spec)

    def test_a_field_that_holds_no_text_is_named(self, tmp_path: Path) -> None:
        spec = replace(write_json(tmp_path, [documents(5)]), text_field="id")
        with pytest.raises(InvalidInput, match=r"'id' of .* holds int"):
            open_source(spec)

    @pytest.mark.parametrize(("kind", "ending"), [("json", "jsonl"), ("parquet", "parquet")])
    def test_a_broken_file_is_a_fault_that_names_the_source(
        self, tmp_path: Path, kind: Any, ending: str
    ) -> None:
        (tmp_path / f"a.{ending}").write_text('{"text": "fine"}\n{"te')
        with pytest.raises(EnvironmentFault, match=rf"{re.escape(str(tmp_path))}.*data\.format"):
            open_source(DataSpec(source=str(tmp_path), format=kind))

    def test_a_file_that_goes_away_while_training_is_a_fault(self, tmp_path: Path) -> None:
        spec = write_text(tmp_path, [documents(9, file) for file in range(9)])
        source = corpus(spec)
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(EnvironmentFault, match="No such file"):
            take(source, 1000)

    def test_compressed_text_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
        with pytest.raises(InvalidInput, match="unpack"):
            open_source(DataSpec(source=str(tmp_path), format="text"))

    def test_a_hub_data_set_without_training_split_or_subset_is_refused(
        self, tmp_path: Path
    ) -> None:
        spec = write_hub(tmp_path, [documents(5)])
        with pytest.raises(InvalidInput, match=r"data\.subset.*'nosuch'"):
            open_source(replace(spec, subset="nosuch"))
        (tmp_path / "data" / "train-0.parquet").unlink()
        with pytest.raises(InvalidInput, match=r"data\.split: .* no split 'train', only test"):
            open_source(spec)

    def test_a_hub_data_set_is_trained_on_in_the_split_that_is_named(self, tmp_path: Path) -> None:
        spec = replace(write_hub(tmp_path, [documents(5)]), split="test", parts=1)
        assert list(open_source(spec).held_out_documents()) == [b"never"]


class TestFormats:
    @pytest.mark.parametrize(
        ("names", "found"),
        [
            (["a.txt", "deep/b.txt"], "text"),
            (["a.jsonl", "b.json.gz", "README.md"], "json"),
            (["a.parquet", ".hidden.txt"], "parquet"),
        ],
    )
    def test_a_folder_says_its_format_by_what_is_inside(
        self, names: list[str], found: str, tmp_path: Path
    ) -> None:
        folder = filled(tmp_path, names)
        given = {"data": {"source": folder, "more": [{"source": folder, "weight": 2}]}}
        data = with_formats(given)["data"]
        assert (data["format"], data["more"][0]["format"]) == (found, found)
        assert "format" not in given["data"], "what was given stays"

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (["a.txt", "b.txt", "c.jsonl"], r"found: 2 \.txt, 1 \.jsonl"),
            (["a.txt", "picture.png"], r"found: 1 \.png, 1 \.txt"),
            (["a.py", "LICENSE"], r"found: 1 \.py, 1 without an ending"),
            ([], "found: no files"),
        ],
    )
    def test_a_mixture_is_refused_with_what_was_found(
        self, names: list[str], told: str, tmp_path: Path
    ) -> None:
        folder = filled(tmp_path, names)
        for given, where in [
            ({"source": folder}, r"data\.format"),
            ({"more": [{"source": folder}]}, r"data\.more\[0\]\.format"),
        ]:
            with pytest.raises(InvalidInput, match=f"{where} is missing.*{told}") as caught:
                with_formats({"data": given})
            assert "\n" not in str(caught.value)
        assert with_formats({"data": {"source": folder, "format": "text"}})

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            ({"source": "/no/where", "format": "text"}, "'/no/where' is not on this machine"),
            ({"source": "/no/*.jsonl"}, "is not on this machine; check the path"),
            ({"source": "some/name"}, r"check the path, or for a name on the hub add data\.format"),
        ],
    )
    def test_a_path_that_is_not_there_is_said(self, data: dict[str, str], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            with_formats({"data": data})

    @pytest.mark.parametrize(
        "data",
        [
            None,
            7,
            {},
            {"source": "stdlib"},
            {"source": "a/b", "format": "hub"},
            {"source": 3},
            {"more": 3},
            {"more": [3]},
        ],
    )
    def test_what_names_no_path_is_left_to_the_checks(self, data: object) -> None:
        assert with_formats({"data": data}) == {"data": data}
        assert with_formats({}) == {}

    def test_a_path_that_is_not_there_is_said_before_torch_is_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text(
            "{name: x, model: tiny, end_tokens: 10, data: {source: /no/where}}"
        )
        script = (
            "import sys\nfrom pathlib import Path\n"
            "from dilocox.peer.commands.operate import checked_manifest\n"
            "try:\n    checked_manifest(Path('run.yaml'))\n"
            "except Exception as error:\n    print(error, 'torch' in sys.modules)"
        )
        root = Path(__file__).parents[3]
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.startswith("run.yaml: data.source '/no/where' is not on this machine")
        assert done.stdout.strip().endswith("False")


def filled(folder: Path, names: list[str]) -> str:
    """A folder of files with a byte each."""
    for name in names:
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (folder / "texts").mkdir(exist_ok=True)
    return str(folder / "texts")


def answered(status: int) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"status {status}", response=cast("Any", response))


@contextmanager
def hub_that_answers(
    monkeypatch: pytest.MonkeyPatch, status: Callable[[str], int]
) -> Generator[None]:
    """With this status to a path, and without any content."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status(self.path))
            self.send_header("X-Error-Code", "RevisionNotFound" if status(self.path) == 404 else "")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        try:
            yield
        finally:
            server.shutdown()


class TestHubOutOfReach:
    SPEC = DataSpec(source="somebody/stories", format="hub")

    @pytest.fixture
    def unanswered(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A hub that takes the connection and never says a word."""
        monkeypatch.setattr(data_sources, "HUB_ANSWER_S", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
            yield

    @pytest.fixture
    def closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)

    @pytest.mark.parametrize("hub", ["unanswered", "closed"])
    def test_a_hub_name_is_a_fault_within_seconds(
        self, hub: str, request: pytest.FixtureRequest
    ) -> None:
        request.getfixturevalue(hub)
        began = time.monotonic()
        with pytest.raises(HubAway, match=r"'somebody/stories'.*check the network, or set"):
            open_source(self.SPEC)
        assert time.monotonic() - began < 10

    @pytest.mark.parametrize(("status", "passes"), [(429, True), (503, True), (400, False)])
    def test_only_what_the_hub_may_answer_otherwise_later_is_worth_another_try(
        self, monkeypatch: pytest.MonkeyPatch, status: int, passes: bool
    ) -> None:
        with hub_that_answers(monkeypatch, lambda _: status), pytest.raises(EnvironmentFault) as it:
            open_source(self.SPEC)
        assert isinstance(it.value, HubAway) is passes

    def test_a_revision_that_the_hub_does_not_have_is_the_users_mistake(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = "/api/datasets/somebody/stories"
        hub = hub_that_answers(monkeypatch, lambda path: 200 if path == known else 404)
        with hub, pytest.raises(InvalidInput, match="'somebody/stories' has no revision 'v9'"):
            open_source(replace(self.SPEC, revision="v9"))

    @pytest.mark.usefixtures("closed")
    def test_a_tokenizer_that_is_not_here_is_a_fault_within_seconds(self) -> None:
        with pytest.raises(EnvironmentFault, match=r"data\.tokenizer 'somebody/tokens'"):
            open_tokenizer("somebody/tokens")

    @pytest.mark.usefixtures("closed")
    def test_a_name_that_the_hub_cannot_have_is_the_users_mistake(self) -> None:
        with pytest.raises(InvalidInput, match="neither here nor on the Hugging Face hub"):
            open_source(replace(self.SPEC, source="./no/such folder"))

    @pytest.mark.parametrize(
        ("error", "passes"),
        [
            (PermissionError(13, "Permission denied: '/home/x/.cache'"), False),
            (FileNotFoundError("no data files"), False),
            (answered(403), False),
            (answered(504), True),
            (ConnectionResetError("reset by peer"), True),
            (LocalEntryNotFoundError("not here, and the hub cannot be reached"), True),
        ],
    )
    def test_what_no_later_try_mends_is_a_fault_that_names_hf_home(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, passes: bool
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(data_sources, "require_hub", lambda *_, **__: None)
        monkeypatch.setattr("datasets.load_dataset_builder", refuse)
        with pytest.raises(EnvironmentFault, match=rf"{re.escape(str(error))}.*HF_HOME") as it:
            open_source(self.SPEC)
        assert isinstance(it.value, HubAway) is passes

    def test_who_has_switched_the_hub_off_is_told_so_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def offline(*_: object, **__: object) -> None:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE=1")

        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", offline)
        with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE") as it:
            open_source(self.SPEC)
        assert not isinstance(it.value, HubAway), "no later try helps"

    @pytest.mark.sweep  # a process that reads all kinds
    def test_local_data_needs_neither_network_nor_a_home_that_can_be_written(
        self, tmp_path: Path
    ) -> None:
        write_json(tmp_path, [documents(60)])
        program = f"""
from dilocox.dht.manifest import DataSpec
from dilocox.peer.training.data import Corpus, held_out_digest
for spec in (DataSpec(), DataSpec(source={str(tmp_path)!r}, format="json", parts=2)):
    corpus = Corpus(spec, sequence_length=16, microbatch_size=2, seed=0)
    corpus.open_part(1)
    print(tuple(next(corpus).shape), len(held_out_digest(spec)))
"""
        environment = {"HF_HOME": "/dev/null/home", "HOME": "/dev/null", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.split("\n") == ["(2, 17) 64", "(2, 17) 64", ""], done.stderr
        assert done.returncode == 0, done.stderr

    def test_opening_leaves_no_files_behind(self, tmp_path: Path, spec: DataSpec) -> None:
        datasets = importlib.import_module("datasets")
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        before = set(cache.iterdir()) if cache.exists() else set[Path]()
        take(corpus(spec), 3)
        assert (set(cache.iterdir()) if cache.exists() else set[Path]()) == before
