"""Records as files: what is kept when there are too many, what two folders share, and the log: a
chain on disk that survives crashes and takes nothing else.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.compression.group_quantization import GroupCodec
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import write_atomically
from dilocox.peer.chain import store
from dilocox.peer.chain.store import RoundLog, Store, Tip
from dilocox.peer.rounds.record import (
    Contribution,
    RecordRefused,
    ReducedShare,
    digest_of,
    parse_record,
)
from dilocox.peer.rounds.standing import MOST_CREDITED, Standing
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, MANIFEST_DIGEST, template

CODEC = codec_of(LAYOUT)
GROUPS = GroupCodec(4)

PROOF = b"the votes"


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


@pytest.mark.parametrize(("records", "kept"), [(0, [0, 5]), (3, [2, 5])])
def test_votes_that_may_still_count_are_kept(tmp_path: Path, records: int, kept: list[int]) -> None:
    folder = folder_of(tmp_path / "log", *[10] * records)
    for number in (0, 5):  # before the first record that stays, and after the last
        write_atomically(tmp_path / "log" / f"{number:08d}-0.vote", b"mine")
    for _ in range(2):
        folder.prune(1)
        assert numbers(tmp_path / "log", "*.vote") == kept


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


def test_half_a_record_of_a_writer_that_was_killed_goes_at_the_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "log")
    (tmp_path / "log" / ".00000001-ab.record.17.partial").write_bytes(b"half")
    folder.drop_damaged(applied=-1)
    assert not list((tmp_path / "log").iterdir())


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


# ---- the log -------------------------------------------------------------------------------------
def record_bytes(round_number: int, previous: str, chain_tokens: int, tokens: int = 10) -> bytes:
    numel = LAYOUT.numel
    mean = GROUPS.encode(torch.full((numel,), float(round_number))).numpy().tobytes()
    return template(
        round=round_number,
        previous=previous,
        members=(Contribution(peer="a", tokens=tokens, exchange_s=0.0, step_s=0.0),),
        chain_tokens=chain_tokens,
        parts=(ReducedShare(phase=0, reducer="a", start=0, stop=numel, contributors=("a",)),),
        standings=(
            Standing(peer="a", round=round_number, credited=min(MOST_CREDITED, chain_tokens // 10)),
        ),
        means=(mean,),
    ).to_bytes()


def chain(*rounds: int) -> list[bytes]:
    records: list[bytes] = []
    previous = MANIFEST_DIGEST
    for number, round_number in enumerate(rounds):
        records.append(record_bytes(round_number, previous, 10 * (number + 1)))
        previous = digest_of(records[-1])
    return records


def log_in(folder: Path) -> RoundLog:
    return RoundLog(folder, manifest_digest=MANIFEST_DIGEST, codec=CODEC)


@pytest.fixture
def log(tmp_path: Path) -> RoundLog:
    return log_in(tmp_path / "log")


def test_an_empty_log_ends_with_the_manifest(log: RoundLog) -> None:
    assert log.head() == Tip(round=-1, digest=MANIFEST_DIGEST, chain_tokens=0, record_bytes=0)
    assert log.find(MANIFEST_DIGEST) == -1
    assert (log.rounds(), log.read(0), log.certificate(0)) == ([], None, None)


def test_records_are_kept_in_order_with_their_certificates_and_found_again(
    log: RoundLog, tmp_path: Path
) -> None:
    records = chain(0, 1, 4)  # rounds 2 and 3 were void
    for data in records:
        log.append(data, PROOF)
    for reader in (log, log_in(tmp_path / "log")):
        assert reader.rounds() == [0, 1, 4]
        head = reader.head()
        assert (head.round, head.digest, head.chain_tokens) == (4, digest_of(records[2]), 30)
        assert reader.find(digest_of(records[1])) == 1
        assert reader.find("f" * 64) is None
        assert reader.read_bytes(4) == records[2]
        assert reader.certificate(4) == PROOF
        record = reader.read(1)
        assert record is not None and record.previous == digest_of(records[0])


def test_only_the_heads_successor_is_taken(log: RoundLog) -> None:
    first, second = chain(0, 1)
    with pytest.raises(RecordRefused, match="the log ends with round -1"):
        log.append(second, PROOF)
    log.append(first, PROOF)
    for wrong in (
        first,
        record_bytes(1, "f" * 64, 20),
        record_bytes(0, digest_of(first), 20),
        b"no record",
    ):
        with pytest.raises(RecordRefused):
            log.append(wrong, PROOF)
    with pytest.raises(RecordRefused, match="counts 21 tokens of the chain, they are 20"):
        log.append(record_bytes(1, digest_of(first), 21), PROOF)
    assert log.rounds() == [0]
    log.append(second, PROOF)


def test_a_crash_between_certificate_and_record_leaves_the_chain_as_it_was(
    log: RoundLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain(0, 1)
    log.append(first, PROOF)
    write = store.write_atomically

    def crash_before_record(path: Path, data: bytes) -> None:
        if path.suffix == ".record":
            raise EnvironmentFault("power is gone")
        write(path, data)

    monkeypatch.setattr(store, "write_atomically", crash_before_record)
    with pytest.raises(EnvironmentFault):
        log.append(second, PROOF)
    monkeypatch.undo()
    again = log_in(tmp_path / "log")
    assert again.head().round == 0
    again.append(second, b"other votes of the same majority")
    assert again.certificate(1) == b"other votes of the same majority"


def test_a_log_that_starts_from_a_foreign_record_forgets_its_own_and_goes_on_there(
    log: RoundLog,
) -> None:
    for data in chain(0, 1):
        log.append(data, PROOF)
    foreign = record_bytes(7, "f" * 64, 700)
    log.start_from(foreign, PROOF)
    head = log.head()
    assert (head.round, head.digest, head.chain_tokens) == (7, digest_of(foreign), 700)
    log.append(record_bytes(8, digest_of(foreign), 710), PROOF)
    assert log.rounds() == [7, 8]


def test_votes_of_each_attempt_are_kept_over_a_restart(log: RoundLog, tmp_path: Path) -> None:
    log.save_vote(3, 0, b"abort")
    log.save_vote(3, 1, b"digest")
    again = log_in(tmp_path / "log")
    assert (again.own_vote(3, 0), again.own_vote(3, 1)) == (b"abort", b"digest")
    assert again.own_vote(4, 0) is None


def test_a_record_that_gives_its_members_no_credit_is_not_appended(log: RoundLog) -> None:
    """Who votes follows from what it remembers: its maker alone would have been the majority."""
    first, second = chain(0, 1)
    log.append(first, PROOF)
    honest = parse_record(second, CODEC)
    (standing,) = honest.standings
    for forged in (
        (),
        (replace(standing, credited=9),),
        (replace(standing, times=1, left_out=1),),
        (*honest.standings, Standing(peer="b", round=1, credited=1)),
    ):
        with pytest.raises(RecordRefused, match="remembers of peers what does not follow"):
            log.append(replace(honest, standings=forged).to_bytes(), PROOF)
    out = Standing(peer="b", round=1, times=1, left_out=1)  # of a repeated attempt
    log.append(replace(honest, standings=(standing, out)).to_bytes(), PROOF)
