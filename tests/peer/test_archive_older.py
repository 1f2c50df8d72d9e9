"""The records before an archive's current generation: always of its chain, and without a gap."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.chain.archive import Generation, OlderRecords
from dilocox.peer.chain.store import Store
from tests.peer.kept_chains import ChainMaker, manifest_of


@pytest.fixture
def ours(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    made = ChainMaker(identities[0], tmp_path / "ours", manifest_of("dense"))
    made.train(*range(8))
    return made


@pytest.fixture
def theirs(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    made = ChainMaker(identities[1], tmp_path / "theirs", manifest_of("dense"))
    made.train(*range(0, 8, 2))
    return made


@pytest.fixture
def older(tmp_path: Path) -> OlderRecords:
    return OlderRecords(tmp_path, keep_bytes=1 << 30)


def generation(folder: Path, maker: ChainMaker, state_round: int, *rounds: int) -> Generation:
    """One with these records, the first of which its state stands on (-1: there is no state)."""
    log = Store(folder)
    log.share(maker.log, rounds)
    return cast("Generation", SimpleNamespace(log=log, state_round=state_round))


def digests(records: Store) -> list[str]:
    return [entry.digest for entry in records.entries()]


def test_they_end_where_the_next_generation_begins(
    ours: ChainMaker, older: OlderRecords, tmp_path: Path
) -> None:
    first = generation(tmp_path / "0", ours, -1, 0, 1, 2, 3)
    second = generation(tmp_path / "1", ours, 2, 2, 3, 4, 5)
    third = generation(tmp_path / "2", ours, 6, 6, 7)
    older.lead_to(second, first)
    assert older.records.rounds() == [0, 1]
    older.lead_to(third, second)  # it begins right after
    assert digests(older.records) == ours.digests[1:7]


def test_records_that_a_crash_left_in_both_are_dropped_when_another_chain_follows(
    ours: ChainMaker, theirs: ChainMaker, older: OlderRecords, tmp_path: Path
) -> None:
    older.records.share(ours.log, range(6))
    current = generation(tmp_path / "1", ours, 2, 2, 3, 4, 5)
    older.lead_to(current)
    assert older.records.rounds() == [0, 1]
    older.lead_to(generation(tmp_path / "2", theirs, 4, 4, 6), current)
    assert older.records.rounds() == []


def test_a_generation_from_the_start_leaves_nothing_of_another_chain(
    ours: ChainMaker, theirs: ChainMaker, older: OlderRecords, tmp_path: Path
) -> None:
    older.keep(ours.log)
    first = generation(tmp_path / "0", theirs, -1, 0, 2, 4, 6)
    older.lead_to(generation(tmp_path / "1", theirs, 6, 6), first)
    assert digests(older.records) == theirs.digests[1:4]


def test_what_is_kept_of_a_wrong_state_leads_to_the_next_right_one(
    ours: ChainMaker, older: OlderRecords, tmp_path: Path
) -> None:
    wrong = generation(tmp_path / "0", ours, 2, 2, 3, 4)
    older.records.share(ours.log, [0, 1])
    older.keep(wrong.log)
    empty = generation(tmp_path / "1", ours, -1)
    older.lead_to(generation(tmp_path / "2", ours, 4, 4, 5), empty)
    assert digests(older.records) == ours.digests[1:5]


def test_a_gap_or_a_start_from_the_initial_weights_empties_them(
    ours: ChainMaker, older: OlderRecords, tmp_path: Path
) -> None:
    older.keep(ours.log)
    older.records.drop_from(4)
    older.lead_to(generation(tmp_path / "0", ours, 5, 5, 6))
    assert older.records.rounds() == []
    older.keep(ours.log)
    older.lead_to(generation(tmp_path / "1", ours, -1, 0, 1))
    assert older.records.rounds() == []
