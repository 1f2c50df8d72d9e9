"""The run's tokenizer as the bootstrap keeps it, and as a peer finds it again."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.wire import unpack
from dilocox.peer.chain.store import TOKENIZER_NAME, archive_folder
from dilocox.peer.process import run_tokenizer
from dilocox.peer.process.run_tokenizer import MAX_BYTES, archive_tokenizer, reachable_tokenizer
from dilocox.peer.training.data import open_tokenizer, tokenizer_digest
from dilocox.peer.training.data_sources import HubAway
from tests.peer.corpora import write_tokenizer
from tests.peer.loops import MODEL

RUN = "f" * 32


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder)
    return folder


def manifest_of(source: Path) -> Manifest:
    tokenizer = open_tokenizer(str(source))
    data = {"tokenizer": str(source), "tokenizer_digest": tokenizer_digest(tokenizer)}
    facts: dict[str, Any] = {"name": "t", "model": MODEL, "end_tokens": 1000, "data": data}
    return Manifest.from_dict(facts | {"batch": {"sequence_length": 8}})


def archived(state: Path, manifest: Manifest) -> Path:
    return archive_folder(state, RUN, manifest) / "stage0" / TOKENIZER_NAME


def test_what_is_kept_opens_again_and_stays(source: Path, tmp_path: Path) -> None:
    manifest = manifest_of(source)
    archive_tokenizer(tmp_path, RUN, manifest)
    kept = archived(tmp_path, manifest)
    files = cast("dict[str, bytes]", unpack(kept.read_bytes(), MAX_BYTES))
    folder = tmp_path / "again"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert tokenizer_digest(open_tokenizer(str(folder))) == manifest.data.tokenizer_digest
    shutil.rmtree(source)
    before = kept.stat().st_mtime_ns
    archive_tokenizer(tmp_path, RUN, manifest)
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_a_bootstrap_without_the_runs_tokenizer_says_so_and_starts(
    source: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of(source)
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    if how == "gone":
        shutil.rmtree(source)
    with caplog.at_level(logging.WARNING):
        archive_tokenizer(tmp_path, RUN, manifest)
    assert not archived(tmp_path, manifest).exists()
    assert "peers must reach data.tokenizer by themselves" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_what_a_bootstrap_gave_is_used_again_unless_it_is_damaged(
    source: Path, tmp_path: Path, damaged: bool
) -> None:
    place = cast("Joined", SimpleNamespace(run=RUN, manifest=manifest_of(source)))
    kept = tmp_path / "folder" / TOKENIZER_NAME
    shutil.copytree(source, kept)
    if damaged:  # a power cut after the rename
        (kept / "tokenizer.json").write_bytes(b"")
    found = reachable_tokenizer(place, (), tmp_path / "folder")
    assert found == (str(source) if damaged else str(kept))


def test_one_that_only_the_hub_has_may_come_once_that_is_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str) -> None:
        raise HubAway("no answer")

    async def handle() -> SimpleNamespace:
        return SimpleNamespace(shutdown=handle)

    dht = SimpleNamespace(replicate_p2p=handle)
    place = cast("Joined", SimpleNamespace(run=RUN, manifest=manifest_of(source), dht=dht))
    monkeypatch.setattr(run_tokenizer, "open_tokenizer", away)
    for name in ("WAIT_S", "PAUSE_S"):
        monkeypatch.setattr(run_tokenizer, name, 0.0)
    with pytest.raises(HubAway, match="no bootstrap gives the run's tokenizer"):
        reachable_tokenizer(place, (), tmp_path / "folder")
