"""What a node keeps for others: bounded by owner and altogether, and what was here first stays."""

from __future__ import annotations

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import timed_storage

from dilocox.dht import storage as bounds
from dilocox.dht.rpc import NODE_REFUSALS, Counts
from dilocox.dht.storage import BoundedStorage
from tests.clocks import TestClock

NOW = 1_000_000.0
LATER = NOW + 60.0
VALUE = bytes(1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TestClock:
    clock = TestClock(NOW)
    monkeypatch.setattr(timed_storage, "get_dht_time", clock.time)
    return clock


@pytest.fixture
def refused() -> Counts:
    return Counts(NODE_REFUSALS)


@pytest.fixture
def kept(clock: TestClock, refused: Counts) -> BoundedStorage:
    return BoundedStorage(refused)


def key(number: int) -> DHTID:
    return DHTID(number)


def owners_of(kept: BoundedStorage, number: int) -> set[bytes]:
    found = kept.get(key(number))
    if found is None:
        return set()
    assert isinstance(found.value, DictionaryDHTValue)
    return {owner for owner, _ in found.value.items()}


def held(kept: BoundedStorage) -> int:
    """The bytes that are held, counted anew."""
    return sum(
        len(each.value) + bounds.VALUE_BYTES
        for _, stored in kept.items()
        if isinstance(stored.value, DictionaryDHTValue)
        for _, each in stored.value.items()
    )


def test_values_are_kept_and_replaced_by_later_ones(kept: BoundedStorage, clock: TestClock) -> None:
    assert kept.store_subkey(key(1), b"a", b"first", LATER)
    assert kept.store_subkey(key(1), b"b", b"other", LATER)
    assert not kept.store_subkey(key(1), b"a", b"same time", LATER)
    assert kept.store_subkey(key(1), b"a", b"second", LATER + 1)
    found = kept.get(key(1))
    assert found is not None and isinstance(found.value, DictionaryDHTValue)
    assert {owner: each.value for owner, each in found.value.items()} == {
        b"a": b"second",
        b"b": b"other",
    }
    assert kept.bytes_held == held(kept)
    clock.now = LATER + 2
    assert not kept.store_subkey(key(1), b"a", b"past", LATER)
    assert kept.get(key(1)) is None


def test_an_owner_of_many_keys_loses_its_own_first_to_expire(
    kept: BoundedStorage, refused: Counts
) -> None:
    assert kept.store_subkey(key(0), b"honest", VALUE, NOW + 1)
    keys = range(bounds.KEYS_OF_OWNER + 6)
    for number in keys:
        assert kept.store_subkey(key(number), b"greedy", VALUE, LATER + number)
    assert [n for n in keys if b"greedy" in owners_of(kept, n)] == [*keys][6:]
    assert owners_of(kept, 0) == {b"honest"}
    assert kept.get(key(3)) is None  # not an empty dictionary
    assert refused.read()["crowded"] == refused.total == 6
    assert kept.bytes_held == held(kept)


def test_an_owner_has_no_more_than_its_bytes(kept: BoundedStorage) -> None:
    third = bytes(bounds.BYTES_OF_OWNER // 3 - bounds.VALUE_BYTES)
    for number in range(5):
        kept.store_subkey(key(number), b"greedy", third, LATER + number)
    assert [number for number in range(5) if owners_of(kept, number)] == [2, 3, 4]
    assert not kept.store_subkey(key(9), b"greedy", 4 * third, LATER)
    assert [number for number in range(5) if owners_of(kept, number)] == [2, 3, 4]


def test_a_crowd_of_new_keys_takes_no_place_of_those_before_it(
    kept: BoundedStorage, refused: Counts, clock: TestClock
) -> None:
    value = bytes(bounds.BYTES_OF_ALL // 128 - bounds.VALUE_BYTES)
    honest = [b"peer-%d" % number for number in range(64)]
    for peer in honest:
        assert kept.store_subkey(key(0), peer, value, LATER)
    taken = [kept.store_subkey(key(0), b"sybil-%d" % n, value, LATER) for n in range(500)]
    assert sum(taken) == 64  # while there is room
    for peer in honest:  # they go on
        assert kept.store_subkey(key(0), peer, value, LATER + 1)
        assert kept.store_subkey(key(1), peer, value, LATER + 1)
    assert owners_of(kept, 1) == set(honest) <= owners_of(kept, 0)
    assert kept.bytes_held == held(kept) <= bounds.BYTES_OF_ALL
    assert refused.read()["full"] == 500
    clock.now = LATER + 10  # what nobody renews makes room
    assert kept.store_subkey(key(0), b"new", VALUE, clock.now + 60)


def test_what_is_written_again_and_again_takes_no_more_room(kept: BoundedStorage) -> None:
    """hivemind notes each expiry, and forgets it when that has come: 540 MB an hour of one key."""
    for number in range(2000):
        kept.store_subkey(key(0), b"busy", VALUE, LATER + number)
        kept.store_subkey(key(0), b"busy", VALUE, LATER)  # which is older
    found = kept.get(key(0))
    assert found is not None and isinstance(found.value, DictionaryDHTValue)
    assert len(kept.expiration_heap) < 200 and len(found.value.expiration_heap) < 200
    assert kept.bytes_held == held(kept)


def test_owners_have_their_place_in_the_order_in_which_they_came(
    kept: BoundedStorage, clock: TestClock
) -> None:
    for owner in (b"first", b"second", b"third"):
        kept.store(key(1), VALUE, LATER, subkey=owner)
    for after_s in (1.0, 2.0):
        kept.store(key(1), VALUE, LATER + after_s, subkey=b"first")
        assert kept.came(b"first") < kept.came(b"second") < kept.came(b"third")
    clock.now = LATER + 1.5  # but for the first one all are gone
    kept.store(key(2), VALUE, LATER + 60.0, subkey=b"second")
    kept.store(key(2), VALUE, LATER + 60.0, subkey=b"first")
    assert kept.came(b"first") < kept.came(b"second")
    assert kept.came(None) == 0
