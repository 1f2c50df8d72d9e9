"""The round log: a chain on disk that survives crashes and takes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilocox.compression.group_codec import GroupCodec
from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.chain import store
from dilocox.peer.chain.store import RoundLog, Tip
from dilocox.peer.rounds.record import (
    Contribution,
    RecordRefused,
    ReducedShare,
    digest_of,
)
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, MANIFEST_DIGEST, template

CODEC = codec_of(LAYOUT)
GROUPS = GroupCodec(4)

PROOF = b"the votes"


def record_bytes(round_number: int, previous: str, chain_tokens: int, tokens: int = 10) -> bytes:
    numel = LAYOUT.numel
    mean = GROUPS.encode(torch.full((numel,), float(round_number))).numpy().tobytes()
    return template(
        round=round_number,
        previous=previous,
        members=(Contribution(peer="a", tokens=tokens, exchange_s=0.0, step_s=0.0),),
        chain_tokens=chain_tokens,
        parts=(ReducedShare(phase=0, reducer="a", start=0, stop=numel, contributors=("a",)),),
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
    with pytest.raises(RecordRefused, match="miscounts the tokens"):
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


def test_pruning_keeps_the_newest_records_and_the_votes_that_may_still_count(
    log: RoundLog,
) -> None:
    for data in chain(0, 1, 2, 3):
        log.append(data, PROOF)
    for number in range(6):
        log.save_vote(number, 0, b"vote")
    log.prune(keep=2)
    assert log.rounds() == [2, 3]
    assert log.certificate(1) is None and log.certificate(2) == PROOF
    assert [number for number in range(6) if log.own_vote(number, 0)] == [2, 3, 4, 5]
    log.prune(keep=2)
    assert log.rounds() == [2, 3]


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
