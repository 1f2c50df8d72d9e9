"""Training data: deterministic, endless, and resumable to the last bit."""

import gc
import json
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.training import data
from dilocox.peer.training.data import Corpus, held_out_digest, held_out_windows
from dilocox.peer.training.data_sources import (
    DocumentStream,
    HubAway,
    library_files,
    open_source,
    reading,
)
from tests.peer.corpora import (
    EOS,
    FORMATS,
    LENGTH,
    corpus,
    decoded,
    documents,
    epoch_documents,
    take,
    write_json,
    write_source,
    write_text,
)
from tests.sweeps import sweep


@pytest.fixture(params=sweep(FORMATS, {"text", "hub"}))
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> DataSpec:
    return write_source(request.param, tmp_path)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes fill several."""
    monkeypatch.setattr(data, "BUFFER_TOKENS", 700)


def buffers() -> list[object]:
    """All that are in memory."""
    return [each for each in gc.get_objects() if type(each).__name__ == "TokenBuffer"]


class TestMicrobatches:
    def test_shape_and_type(self, spec: DataSpec) -> None:
        microbatch = next(corpus(spec))
        assert microbatch.shape == (2, LENGTH + 1)
        assert microbatch.dtype == torch.int64

    def test_they_are_the_same_for_the_same_seed_part_and_epoch(self, spec: DataSpec) -> None:
        assert torch.equal(take(corpus(spec), 200), take(corpus(spec), 200))

    def test_another_seed_gives_another_order(self, spec: DataSpec) -> None:
        assert not torch.equal(take(corpus(spec), 20), take(corpus(spec, seed=1), 20))

    @pytest.mark.usefixtures("small_buffers")
    def test_an_epoch_predicts_every_token_once_but_for_the_buffers_ends(
        self, spec: DataSpec
    ) -> None:
        source = corpus(spec)
        windows: list[torch.Tensor] = []
        while source.epoch == 0:
            windows += next(source)
        windows = windows[:-2]  # the last microbatch has a window of the second epoch, or two
        tokens = sum(len(document) + 1 for document in epoch_documents(spec, 0))
        buffers = tokens // 700 + 1
        assert tokens - buffers * (LENGTH + 1) - 2 * LENGTH <= len(windows) * LENGTH <= tokens
        assert len({tuple(window.tolist()) for window in windows}) == len(windows)

    def test_every_epoch_has_its_own_order_of_the_same_documents(self, tmp_path: Path) -> None:
        spec = write_text(tmp_path, [documents(3, file) for file in range(30)])
        first, second = epoch_documents(spec, 1, "0/0"), epoch_documents(spec, 1, "0/1")
        assert first != second
        assert sorted(first) == sorted(second)

    def test_a_microbatch_mixes_documents_of_a_buffer(self) -> None:
        source = Corpus(DataSpec(parts=16), sequence_length=64, microbatch_size=16, seed=0)
        source.open_part(0)
        texts = epoch_documents(DataSpec(parts=16), 0)
        [microbatch] = take(source, 1)
        found = {
            index
            for window in decoded(microbatch)
            for index, text in enumerate(texts)
            if window in text
        }
        assert len(found) >= 4

    def test_documents_are_joined_by_the_end_of_text_id(self, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [["x" * 30] * 60])
        windows = take(corpus(spec), 30).reshape(-1, LENGTH + 1)
        assert set(windows.unique().tolist()) == {EOS, ord("x") + 3}
        assert (windows == EOS).float().mean().item() == pytest.approx(1 / 31, abs=0.02)

    def test_no_part_open_is_said(self, tmp_path: Path) -> None:
        source = Corpus(DataSpec(), sequence_length=4, microbatch_size=1, seed=0)
        with pytest.raises(RuntimeError, match="open_part"):
            next(source)


class TestReadAhead:
    @pytest.mark.usefixtures("small_buffers")
    def test_a_fault_comes_after_the_text_before_it_and_stays(self, tmp_path: Path) -> None:
        spec = replace(write_json(tmp_path, [documents(300)]), parts=1)
        file = tmp_path / "0.jsonl"
        lines = file.read_text().splitlines()
        lines[250] = json.dumps({"id": 0, "text": 5})
        file.write_text("\n".join(lines))
        source = corpus(spec)
        take(source, 100)
        for _ in range(2):
            with pytest.raises(InvalidInput, match=r"'text' of .* holds int"):
                take(source, 1000)

    @pytest.mark.usefixtures("small_buffers")
    def test_a_hub_that_is_away_for_a_while_costs_no_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        spec = write_source("hub", tmp_path)
        expected = take(corpus(spec), 300)
        read, calls = DocumentStream.read, count()

        def now_and_then(stream: DocumentStream) -> bytes | None:
            if next(calls) in (3, 4, 40, 41, 90):
                raise HubAway("data.source: no answer")
            return read(stream)

        monkeypatch.setattr(DocumentStream, "read", now_and_then)
        monkeypatch.setattr(data, "FIRST_PAUSE_S", 0.01)
        assert torch.equal(take(corpus(spec), 300), expected)
        assert caplog.text.count("no answer; trying again") == 5

    @pytest.mark.usefixtures("small_buffers")
    @pytest.mark.parametrize(
        ("source", "error"),
        [("text", OSError(5, "it is so")), ("hub", ValueError("it is so, the file is damaged"))],
    )
    def test_what_will_never_heal_is_told_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: Exception
    ) -> None:
        def fails(_: DocumentStream) -> bytes | None:
            with reading(spec):
                raise error

        spec = write_source(source, tmp_path)
        monkeypatch.setattr(DocumentStream, "read", fails)
        with pytest.raises(EnvironmentFault, match="it is so"):
            corpus(spec)

    @pytest.mark.usefixtures("small_buffers")
    def test_a_part_that_was_left_holds_no_text(self, spec: DataSpec) -> None:
        gc.collect()
        source, before = corpus(spec), set(map(id, buffers()))
        for part in (1, 2, 0, 1, 2, 0):
            time.sleep(0.05)  # its thread waits with the next one
            source.open_part(part)
        readers = [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
        source.open_part(0)
        for thread in readers:
            thread.join(10)
        gc.collect()
        here = [each for each in buffers() if id(each) not in before]
        assert len(here) <= 4, "the current one, two ahead, and one that waits"

    @pytest.mark.usefixtures("small_buffers")
    def test_the_thread_ends_with_its_part_and_with_the_corpus(self, spec: DataSpec) -> None:
        def readers() -> set[threading.Thread]:
            return {thread for thread in threading.enumerate() if thread.name == "read-ahead"}

        others = readers()
        source = corpus(spec)
        first = readers() - others
        source.open_part(1)
        second = readers() - others - first
        assert len(first) == len(second) == 1
        for thread in first:
            thread.join(10)
            assert not thread.is_alive()
        next(source)
        del source
        gc.collect()
        for thread in second:
            thread.join(10)
            assert not thread.is_alive()


class TestResume:
    @pytest.mark.parametrize("before", [1, 7, 40, 90])
    @pytest.mark.usefixtures("small_buffers")
    def test_what_follows_a_resume_is_the_same_to_the_bit(
        self, spec: DataSpec, before: int
    ) -> None:
        steady = corpus(spec, part=1)
        take(steady, before)
        state = json.loads(json.dumps(steady.state_dict()))
        resumed = corpus(spec, part=0)
        assert resumed.load_state_dict(state)
        assert resumed.part == 1
        assert torch.equal(take(steady, 150), take(resumed, 150))

    @pytest.mark.usefixtures("small_buffers")
    def test_every_position_around_an_epochs_end_resumes(self, spec: DataSpec) -> None:
        steady = corpus(spec)
        last = steady.state_dict()
        while steady.epoch == 0:
            last = steady.state_dict()
            next(steady)
        steady.load_state_dict(last)
        for _ in range(4):
            state = json.loads(json.dumps(steady.state_dict()))
            resumed = corpus(spec, part=2)
            assert resumed.load_state_dict(state)
            assert torch.equal(next(steady), next(resumed))
        assert steady.epoch == 1

    @pytest.mark.usefixtures("small_buffers")
    def test_an_epoch_used_up_to_its_last_window_resumes_in_the_next(self, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [["held out", "a" * 64, "b" * 64, "c" * 64]])
        steady = corpus(spec)
        take(steady, 2)  # four windows: all that 65 tokens hold
        state = steady.state_dict()
        assert (state["epoch"], state["used"]) == (0, 4)
        resumed = corpus(spec)
        assert resumed.load_state_dict(state)
        assert torch.equal(take(steady, 9), take(resumed, 9))

    @pytest.mark.usefixtures("small_buffers")
    def test_another_microbatch_size_goes_on_with_the_next_window(self, spec: DataSpec) -> None:
        steady = corpus(spec)
        take(steady, 5)
        wider = Corpus(spec, sequence_length=LENGTH, microbatch_size=8, seed=0)
        assert wider.load_state_dict(steady.state_dict())
        assert torch.equal(next(wider), take(steady, 4).reshape(8, -1))

    @pytest.mark.parametrize("change", ["file", "seed", "length"])
    def test_a_state_of_other_files_seed_or_length_is_refused_with_a_warning(
        self, spec: DataSpec, change: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = corpus(spec, part=1).state_dict()
        if change == "file":
            file = next(path for path in Path(spec.source).rglob("*0.*") if "test" not in path.name)
            if file.suffix == ".parquet":
                pq.write_table(pa.table({"text": ["more"] * 500, "id": range(500)}), file)
            else:
                file.write_bytes(file.read_bytes() + file.read_bytes())
        other = corpus(
            spec, part=2, seed=int(change == "seed"), length=LENGTH + (change == "length")
        )
        expected = take(other, 1)
        other.open_part(2)
        assert not other.load_state_dict(state)
        assert "the saved data position is not of the files" in caplog.text
        assert other.part == 2
        assert torch.equal(take(other, 1), expected)

    @pytest.mark.usefixtures("small_buffers")
    def test_a_peer_that_takes_a_part_over_starts_at_the_buffer_of_its_position(
        self, spec: DataSpec
    ) -> None:
        steady = corpus(spec, part=1)
        while steady.epoch < 2 or steady.state_dict()["shelf_start"]["rows"] == 0:
            next(steady)
        successor = corpus(spec, part=0)
        successor.open_part(1, steady.position)
        used = steady.state_dict()["used"]
        windows = take(successor, 30).reshape(-1, LENGTH + 1)[used:]
        assert successor.position >= steady.position > 2 << 32
        assert torch.equal(take(steady, 10).reshape(-1, LENGTH + 1), windows[:20])

    @pytest.mark.usefixtures("small_buffers")
    def test_a_part_that_was_read_to_its_end_begins_in_the_next_epoch(self, spec: DataSpec) -> None:
        """Also after a restart in another part: each of these began anew."""
        steady = corpus(spec, part=1)
        while steady.epoch == 0:
            next(steady)
        steady.open_part(2)
        state = json.loads(json.dumps(steady.state_dict()))
        again = corpus(spec, part=0)
        assert not again.load_state_dict(state, 0)
        assert again.part == 0
        for source in (steady, again):
            source.open_part(1)
            assert (source.epoch, source.part) == (1, 1)
        assert torch.equal(take(steady, 20), take(again, 20))

    @pytest.mark.usefixtures("small_buffers")
    def test_what_is_opened_is_read_as_soon_as_it_is_here(self, spec: DataSpec) -> None:
        steady, expected = corpus(spec, part=1), corpus(spec, part=2)
        steady.open_part(2, wait=False)
        assert steady.part == 1 and steady.ready
        end = time.monotonic() + 30
        while not steady.arrived():
            next(steady)
            assert time.monotonic() < end
            time.sleep(0.01)
        assert steady.part == 2
        assert torch.equal(take(steady, 5), take(expected, 5))


class TestHeldOut:
    def test_windows_have_their_shape_and_are_the_same_every_time(self, spec: DataSpec) -> None:
        windows = held_out_windows(spec, LENGTH, 5)
        assert windows.shape == (5, LENGTH + 1)
        assert windows.dtype == torch.int64
        assert torch.equal(windows, held_out_windows(spec, LENGTH, 5))

    def test_windows_of_the_standard_library_span_all_held_out_modules(self) -> None:
        windows = decoded(held_out_windows(DataSpec(), 200))
        assert len(windows) == len(set(windows)) == 64
        _, held_out = library_files()
        text = b"".join(Path(file.path).read_bytes() for file in held_out)
        assert windows[0] == text[:201]
        assert text.endswith(windows[-1])
        assert all(window in text for window in windows[:3])

    def test_a_short_held_out_part_gives_overlapping_windows(self, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [["0123456789abcdefgh", *documents(4)]])
        windows = decoded(held_out_windows(spec, LENGTH, 4))
        assert windows == [
            b"0123456789abcdefg", b"0123456789abcdefg", b"123456789abcdefgh", b"23456789abcdefgh"
        ]  # fmt: skip

    def test_no_window_of_training_is_in_the_held_out_part(self, spec: DataSpec) -> None:
        held_out = b"\n".join(open_source(spec).held_out_documents())
        for part in range(spec.parts):
            for text in decoded(take(corpus(spec, part=part), 50).reshape(-1, LENGTH + 1)):
                assert text not in held_out

    def test_a_held_out_part_shorter_than_a_window_is_refused_with_the_mend(
        self, spec: DataSpec
    ) -> None:
        with pytest.raises(InvalidInput, match=r"held-out part.*lower batch\.sequence_length"):
            held_out_windows(spec, 100_000)

    def test_it_is_a_twentieth_of_a_small_source_and_at_most_a_mebibyte(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = write_json(tmp_path, [documents(400)])
        total = sum(map(len, documents(400)))
        held_out = sum(map(len, open_source(spec).held_out_documents()))
        assert 0.04 * total < held_out < 0.08 * total
        monkeypatch.setattr("dilocox.peer.training.data_sources.HELD_OUT_BYTES", 500)
        assert 500 <= sum(map(len, open_source(spec).held_out_documents())) < 620

    def test_of_a_large_held_out_file_only_the_first_documents_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = write_json(tmp_path, [documents(200, file) for file in range(4)])
        monkeypatch.setattr("dilocox.peer.training.data_sources.HELD_OUT_BYTES", 500)
        source = open_source(spec)
        [held_out] = source.held_out
        texts = [json.loads(line)["text"] for line in Path(held_out.path).read_text().splitlines()]
        read = [document.decode() for document in source.held_out_documents()]
        assert read == texts[: len(read)]
        assert 500 <= sum(map(len, read)) < 620

    def test_the_digest_changes_with_the_held_out_documents_only(self, tmp_path: Path) -> None:
        spec = write_json(tmp_path, [documents(60)])
        before = held_out_digest(spec)
        assert len(before) == 64
        write_json(tmp_path, [[*documents(59), "another last one"]])
        assert held_out_digest(spec) == before
        write_json(tmp_path, [["another first one", *documents(60)[1:]]])
        assert held_out_digest(spec) != before

    def test_the_digest_of_the_standard_library_covers_names_and_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digests: list[str] = []
        for held_out, text in (("bisect", b"a"), ("queue", b"a"), ("queue", b"b")):
            library = tmp_path / f"{held_out}{text.decode()}"
            library.mkdir()
            (library / "os.py").write_bytes(b"training")
            (library / f"{held_out}.py").write_bytes(text)
            monkeypatch.setattr("sysconfig.get_paths", lambda path=library: {"stdlib": str(path)})
            digests.append(held_out_digest(DataSpec(parts=1)))
        assert len(set(digests)) == 3
