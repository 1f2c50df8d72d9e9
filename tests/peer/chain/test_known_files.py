"""What a bootstrap has hashed it does not hash again, under new rules of the run, unless somebody
wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.files import KnownFiles
from dilocox.peer.chain import snapshot_files, store
from dilocox.peer.chain.snapshot_files import STATE_FILE
from tests.peer.chain.archives import Kept
from tests.peer.kept_chains import ChainMaker


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed as a whole."""
    found = list[Path]()
    chunk_digests, read_file = snapshot_files.chunk_digests, store.read_file

    def counted(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def called(path: Path) -> Any:
            if path.suffix != ".certificate":
                found.append(path)
            return function(path)

        return called

    monkeypatch.setattr(snapshot_files, "chunk_digests", counted(chunk_digests))
    monkeypatch.setattr(store, "read_file", counted(read_file))
    return found


def followed(folder: Path, donor: ChainMaker) -> Kept:
    kept = Kept(folder, donor)
    for number in range(6):
        donor.train(number)
        kept.look(donor)
    assert kept.state_round == 3
    return kept


def test_under_new_rules_an_archive_is_taken_up_again_without_a_byte_being_hashed(
    donor: ChainMaker, tmp_path: Path, hashed: list[Path]
) -> None:
    """Seventy GB were, while nothing was given to anybody."""
    kept = followed(tmp_path / "kept", donor)
    hashed.clear()
    again = Kept(tmp_path / "kept", donor)
    assert hashed == [] and again.state_round == 3
    assert again.look(donor) == kept.archive.claim


def test_another_process_and_whoever_finds_a_file_written_looks_at_all_of_it(
    donor: ChainMaker, tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed(tmp_path / "kept", donor)
    for module in (snapshot_files, store):
        monkeypatch.setattr(module, "known_files", KnownFiles())  # as after a start
    hashed.clear()
    Kept(tmp_path / "kept", donor)
    assert sum(path.name == STATE_FILE for path in hashed) == 1
    assert sum(path.suffix == ".record" for path in hashed) == 3
    hashed.clear()
    (newest,) = (tmp_path / "kept").glob("0*/log/00000005-*.record")
    data = newest.read_bytes()
    newest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = Kept(tmp_path / "kept", donor)
    assert newest in hashed and damaged.state_round == -1
