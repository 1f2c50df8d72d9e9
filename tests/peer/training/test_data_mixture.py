"""Several sources mixed by weight: shares, ends, and places in the mixture that can be saved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec, Manifest
from dilocox.dht.manifest_sections import SourceSpec
from dilocox.peer.training import data
from dilocox.peer.training.data import held_out_digest, held_out_windows
from dilocox.peer.training.data_mixture import open_mixture
from dilocox.peer.training.data_sources import open_source
from tests.peer.corpora import LENGTH, corpus, documents, take, write_json, write_text


@pytest.fixture
def mixture(tmp_path: Path) -> DataSpec:
    """Lower-case text three times as heavy as upper-case text, of which there is less."""
    for name in ("lower", "upper"):
        (tmp_path / name).mkdir()
    lower = write_json(tmp_path / "lower", [documents(200, file) for file in range(2)])
    many = [[text.upper() for text in documents(25, file)] for file in range(9)]
    upper = write_text(tmp_path / "upper", many)
    more = SourceSpec(source=upper.source, format="text", weight=1)
    return replace(lower, weight=3.0, more=(more,))


def read_epoch(spec: DataSpec, part: int = 0) -> list[bytes]:
    stream = open_mixture(spec).part(part, "0/0")
    return list(iter(stream.read, None))


class TestShares:
    def test_bytes_come_by_weight_from_the_start_on(self, mixture: DataSpec) -> None:
        read, upper, total = read_epoch(mixture), 0, 0
        largest = max(map(len, read))
        for document in read:
            total += len(document)
            upper += len(document) * document.isupper()
            assert abs(upper - total / 4) <= largest

    def test_an_epoch_holds_every_document_and_the_parts_share_none(
        self, mixture: DataSpec
    ) -> None:
        parts = [set(read_epoch(mixture, part)) for part in range(3)]
        held_out = set(open_mixture(mixture).held_out_documents())
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert not held_out & set().union(*parts)
        plain = [
            replace(mixture, more=()),
            replace(mixture, source=mixture.more[0].source, format="text", more=()),
        ]
        for part, together in enumerate(parts):
            for spec in plain:
                assert together.issuperset(iter(open_source(spec).part(part, "0/0").read, None))

    def test_what_is_held_out_is_of_all_sources(self, mixture: DataSpec) -> None:
        held_out = list(open_mixture(mixture).held_out_documents())
        assert {document.isupper() for document in held_out} == {True, False}
        windows = held_out_windows(mixture, LENGTH, 400)
        assert (windows == ord("A") + 3).any()
        assert (windows == ord("a") + 3).any()
        other = replace(mixture, more=())
        assert held_out_digest(mixture) != held_out_digest(other)


class TestPlaces:
    @pytest.mark.parametrize("before", [1, 40, 300])
    def test_what_follows_a_resume_is_the_same_to_the_bit(
        self, mixture: DataSpec, before: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data, "BUFFER_TOKENS", 700)
        steady = corpus(mixture, part=1)
        take(steady, before)
        resumed = corpus(mixture)
        assert resumed.load_state_dict(json.loads(json.dumps(steady.state_dict())))
        successor = corpus(mixture)
        successor.open_part(1, steady.position)
        assert successor.position == steady.position
        assert torch.equal(take(steady, 150), take(resumed, 150))

    def test_a_place_is_not_of_other_weights(self, mixture: DataSpec) -> None:
        state = corpus(mixture).state_dict()
        other = corpus(replace(mixture, weight=2.0))
        assert not other.load_state_dict(state)


class TestMistakes:
    def test_a_source_without_text_is_named(self, mixture: DataSpec, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        empty = write_json(tmp_path / "empty", [["held out", *[""] * 60]])
        more = SourceSpec(source=empty.source, format="json")
        with pytest.raises(InvalidInput, match="empty' holds no text"):
            read_epoch(replace(mixture, more=(more,)))

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ([{"source": "b.txt", "wieght": 2}], r"data\.more\[0\]\.wieght .* did you mean weight"),
            ([{"source": "b.txt", "weight": 0}], r"data\.more\[0\]\.weight is 0; it must be"),
            ([{"source": "b.txt"}, {"source": "b"}], r"data\.more\[1\]\.format is missing"),
            ([{"format": "text"}], r"data\.more\[0\]\.format is 'text' with"),
            ("b.txt", r"data\.more is 'b\.txt'; it must be a list of at most 15"),
        ],
    )
    def test_a_mistake_in_the_manifest_names_the_place(self, more: object, message: str) -> None:
        run = {"name": "t", "model": "tiny", "end_tokens": 1000, "data": {"more": more}}
        with pytest.raises(InvalidInput, match=message):
            Manifest.from_dict(run)

    def test_a_manifest_with_several_sources_comes_back_from_its_bytes(self) -> None:
        more = [{"source": "b.txt", "weight": 0.5}, {"source": "x/y", "format": "hub"}]
        run = {"name": "t", "model": "tiny", "end_tokens": 1000, "data": {"more": more}}
        manifest = Manifest.from_dict(run)
        assert manifest.data.more[0] == SourceSpec(source="b.txt", format="text", weight=0.5)
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest
