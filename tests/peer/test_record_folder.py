"""Records as files: what is kept when there are too many, and what two folders share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.files import write_atomically
from dilocox.peer.chain.store import Store
from dilocox.peer.rounds.record import RecordRefused, digest_of


def folder_of(path: Path, *sizes: int) -> Store:
    """A folder with a "record" of each size, from round 0 on, and a vote of each round."""
    path.mkdir()
    folder = Store(path)
    for number, size in enumerate(sizes):
        folder.write(number, bytes([number]) * size, f"votes {number}".encode())
        write_atomically(path / f"{number:08d}-0.vote", b"mine")
    return folder


def numbers(path: Path, pattern: str) -> list[int]:
    return sorted(int(each.name.split("-")[0].split(".")[0]) for each in path.glob(pattern))


@pytest.mark.parametrize(
    ("keep", "keep_bytes", "applied", "kept"),
    [
        (3, None, None, [7, 8, 9]),
        (99, None, None, [*range(10)]),
        (99, 55, None, [5, 6, 7, 8, 9]),
        (99, 50, None, [5, 6, 7, 8, 9]),
        (99, 49, None, [6, 7, 8, 9]),
        (99, 0, None, [6, 7, 8, 9]),  # whoever takes a state needs the newest, however large
        (2, 0, None, [8, 9]),
        (3, 99, 5, [5, 6, 7, 8, 9]),  # what is not applied yet is needed
        (3, 99, 9, [7, 8, 9]),
        (3, 99, 99, [7, 8, 9]),
    ],
)
def test_the_newest_records_are_kept_in_number_and_bytes(
    tmp_path: Path, keep: int, keep_bytes: int | None, applied: int | None, kept: list[int]
) -> None:
    folder = folder_of(tmp_path / "log", *[10] * 10)
    folder.prune(keep, keep_bytes, applied=applied)
    assert folder.rounds() == kept
    assert numbers(tmp_path / "log", "*.certificate") == kept
    assert numbers(tmp_path / "log", "*.vote") == kept


def test_one_large_record_does_not_cost_the_newer_ones(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "log", 10, 1000, 10, 10, 10, 10, 10, 10)
    folder.prune(99, 100)
    assert folder.rounds() == [2, 3, 4, 5, 6, 7]


def test_votes_and_certificates_outlive_an_empty_log(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "log")
    write_atomically(tmp_path / "log" / "00000003-0.vote", b"mine")
    folder.prune(1)
    assert numbers(tmp_path / "log", "*.vote") == [3]


def test_entries_say_what_is_there_without_reading_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "log", 5, 7)
    entries = folder.entries()
    assert [(each.round, each.record_bytes) for each in entries] == [(0, 5), (1, 7)]
    assert [each.digest for each in entries] == [digest_of(b"\0" * 5), digest_of(b"\1" * 7)]
    assert entries[1].data() == b"\1" * 7
    folder.prune(1)
    assert entries[0].data() is None
    assert entries[0].header() is None


def test_a_folder_that_is_not_there_is_empty_and_not_made(tmp_path: Path) -> None:
    folder = Store(tmp_path / "log")
    assert (folder.rounds(), folder.entries(), folder.find("f" * 64)) == ([], [], None)
    folder.prune(1)
    assert not (tmp_path / "log").exists()


def test_a_damaged_record_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "log", 5)
    (path,) = (tmp_path / "log").glob("*.record")
    path.write_bytes(b"\0" * 4)
    with pytest.raises(RecordRefused, match="damaged on disk"):
        folder.read_bytes(0)
    with pytest.raises(RecordRefused, match="damaged on disk"):
        folder.header(0)


# ---- sharing -------------------------------------------------------------------------------------
def test_shared_records_outlive_the_folder_they_came_from(tmp_path: Path) -> None:
    log = folder_of(tmp_path / "log", 5, 6, 7)
    older = Store(tmp_path / "older")
    older.share(log, [0, 1, 9])
    older.share(log, [1])  # again, as after a crash
    log.prune(1)
    assert older.rounds() == [0, 1]
    assert (older.read_bytes(1), older.certificate(1)) == (b"\1" * 6, b"votes 1")
    assert numbers(tmp_path / "older", "*.vote") == []


def test_without_hard_links_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    log = folder_of(tmp_path / "log", 5)
    monkeypatch.setattr(os, "link", none)
    older = Store(tmp_path / "older")
    older.share(log, [0])
    assert (older.read_bytes(0), older.certificate(0)) == (b"\0" * 5, b"votes 0")
