"""Leases on data parts: heads on one DHT, whose answers can be late, lost or out of date."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dilocox.dht.records import PartRecord, part_key
from dilocox.peer.averaging.data_lease import MOST_EPOCHS, PartLease, place_of, position_of
from tests.peer.local_peers import MANIFEST, RUN, local_peer

LIFETIME_S = 15.0


class Dht:
    """Records with an expiry, and a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = True
        self.searches = 0
        self._records: dict[str, dict[str, tuple[float, PartRecord]]] = {}

    def publish(self, peer: str, key: str, record: PartRecord) -> None:
        self._records.setdefault(key, {})[peer] = (self.now + LIFETIME_S, record)

    def read(self, key: str) -> dict[str, PartRecord] | None:
        if not self.answers:
            return None
        held = self._records.get(key, {})
        return {peer: record for peer, (expires, record) in held.items() if expires > self.now}

    def read_many(
        self, keys: Mapping[str, type[Any]], *, thorough: bool
    ) -> dict[str, dict[str, PartRecord] | None]:
        assert set(keys.values()) == {PartRecord}
        self.searches += 1
        return {key: self.read(key) for key in keys}


class Head(PartLease):
    """A lease, and what its peer does with it at each heartbeat."""

    def __init__(self, dht: Dht, peer: str, parts: int = 8, first: int | None = None):
        manifest = replace(MANIFEST, data=replace(MANIFEST.data, parts=parts))
        super().__init__(local_peer(peer, swarm=dht, manifest=manifest), first)
        self._peer, self._dht = peer, dht
        self.reads = -1  # the part that it has opened

    def renew(self, position: int, credited: str = "") -> bool:
        """Whether it reads another part now. credited: heads whose values are in the chain."""
        changed = self.settle(credited)
        for key, record in self.announcement(self.reads, position).items():
            assert isinstance(record, PartRecord)
            self._dht.publish(self._peer, key, record)
            self.published(True)
        self.reads = self.part
        return changed


def test_heads_that_come_one_by_one_take_different_parts_and_keep_them() -> None:
    dht = Dht()
    heads = [Head(dht, peer) for peer in "abcdef"]
    assert all(lease.renew(0) for lease in heads)
    taken = [lease.part for lease in heads]
    assert len(set(taken)) == len(heads)
    for _ in range(5):
        dht.now += LIFETIME_S / 3
        assert not any(lease.renew(100) for lease in heads)
    assert [lease.part for lease in heads] == taken


def same_first_part(count: int, parts: int) -> list[str]:
    """Heads whose own order begins with the same part, smallest id first."""
    by_part: dict[int, list[str]] = {}
    for number in range(1000):
        peer = f"peer{number:04d}"
        found = by_part.setdefault(Head(Dht(), peer, parts).part, [])
        found.append(peer)
        if len(found) == count:
            return found
    raise AssertionError("no such heads")


def test_of_two_that_took_a_part_at_once_the_smaller_id_keeps_it() -> None:
    small, large = same_first_part(2, 8)
    dht = Dht()
    first, second = Head(dht, small), Head(dht, large)
    dht.answers = False  # neither sees the other
    first.renew(0)
    second.renew(0)
    assert first.part == second.part
    dht.answers = True
    kept = first.part
    assert second.renew(0)
    assert not first.renew(0)
    assert first.part == kept != second.part


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_lost_heads_end_with_parts_of_their_own(seed: int) -> None:
    dice, dht = random.Random(seed), Dht()
    heads = [Head(dht, f"{dice.random()}", parts=12) for _ in range(6)]
    for _ in range(4):  # some answers are lost
        for lease in dice.sample(heads, len(heads)):
            dht.answers = dice.random() < 0.5
            lease.renew(0)
        dht.now += LIFETIME_S / 3
    dht.answers = True
    for _ in range(6):
        for lease in dice.sample(heads, len(heads)):
            lease.renew(0)
        dht.now += LIFETIME_S / 3
    assert len({lease.part for lease in heads}) == len(heads)
    assert not any(lease.renew(0) for lease in heads)


@pytest.mark.parametrize("known", [False, True])
def test_a_part_whose_head_is_gone_is_free_after_its_expiry_and_goes_on_where_it_was(
    known: bool,
) -> None:
    first, second = same_first_part(2, 8)
    credited = first + second if known else ""  # the run has a record
    dht = Dht()
    gone, stays = Head(dht, first), Head(dht, second)
    gone.renew(0, credited)
    gone.renew(500, credited)
    stays.renew(0, credited)
    assert stays.part != gone.part
    assert stays.position != 500
    dht.now += LIFETIME_S + 1
    heir = Head(dht, "heir")
    while stays.part != gone.part:  # its own parts are read to their ends, one after the other
        stays.finish()
        stays.renew(0, credited)
    assert stays.position == 500
    assert dht.read(part_key(RUN, gone.part)) == {second: PartRecord(part=gone.part, position=500)}
    heir.renew(0)
    assert heir.part != gone.part


def test_nobody_begins_where_those_began_of_whom_nothing_is_left() -> None:
    """Volunteers who stayed for hours each read the beginning of a part, and nobody its end."""
    dht = Dht()
    begun = list[int]()
    for name in ("a", "b", "c"):
        lease = Head(dht, name, parts=1)
        lease.renew(0, "z")  # the run has a record
        begun.append(lease.position)
        lease.renew(lease.position + 500, name)
        dht.now += LIFETIME_S + 1
    places = [place_of(position) for position in begun]
    assert len(set(places)) == 3
    assert all(0 < epoch < MOST_EPOCHS and rows == 0 for epoch, rows in places)


@pytest.mark.parametrize("stated", [2**53 - 1, 2**53])
def test_who_takes_a_part_over_goes_on_from_no_position_that_cannot_be(stated: int) -> None:
    """The heir read on from 2^53 and its own record had no room for that: the peer ended."""
    first, second = same_first_part(2, 8)
    dht = Dht()
    gone, stays = Head(dht, first), Head(dht, second)
    gone.renew(0)
    gone.renew(500)
    dht.publish("a stranger", part_key(RUN, gone.part), PartRecord(part=gone.part, position=stated))
    stays.renew(0)  # it hears of both
    dht.now += LIFETIME_S + 1
    while stays.part != gone.part:
        stays.finish()
        stays.renew(0)
    epoch, rows = place_of(stays.position)
    assert (epoch, rows) == (0, 500)


def test_a_record_has_room_for_what_an_heir_reads_after_the_last_credible_position() -> None:
    PartRecord(part=0, position=position_of(MOST_EPOCHS) + position_of(1 << 18)).encode()


def test_a_restarted_head_takes_the_part_of_its_snapshot_if_it_is_still_free() -> None:
    dht = Dht()
    for part in range(8):
        lease = Head(Dht(), "a", first=part)
        lease.renew(0)
        assert lease.part == part
    other = Head(dht, "b")
    other.renew(0)
    back = Head(dht, "a", first=other.part)
    back.renew(0)
    assert back.part != other.part


def test_after_a_restart_the_parts_behind_that_of_the_snapshot_are_next() -> None:
    """It went back to its first one, and with a restart a day never came to the last ones."""
    read, first = list[int](), None
    for _ in range(3):  # restarts
        lease = Head(Dht(), "a", first=first)
        lease.renew(0)
        for _ in range(3):
            read.append(first := lease.part)
            lease.finish()
            lease.renew(0)
        first = lease.part
    assert len(set(read)) == 8


def test_a_write_that_fails_once_costs_no_lease_that_still_stands() -> None:
    """Of more heads than parts another one was there at once, and the first reader moved away."""
    dht = Dht()
    first, second = (Head(dht, peer, parts=1) for peer in "ab")
    first.renew(0)
    second.renew(0)
    first.announcement(0, 9)
    first.published(False)
    assert not first.renew(9)


def test_a_lease_that_could_not_be_told_begins_its_part_no_second_time() -> None:
    """It was opened where a newcomer would begin, and what was read of it read again."""
    lease = Head(Dht(), "a", parts=1)
    lease.settle()
    begun = lease.position
    lease.announcement(0, 9)
    lease.published(False)
    assert lease.settle("a")  # the run has a record now
    assert lease.position == begun


def test_a_part_that_was_taken_while_the_last_one_was_told_begins_where_it_should() -> None:
    """It was told with the position of the part before it, for whoever would take it over."""
    small, large = same_first_part(2, 8)
    dht = Dht()
    lease, other = Head(dht, large), Head(dht, small)
    lease.renew(0)
    dht.answers = False
    other.renew(0)  # the same part, which the smaller id keeps
    dht.answers = True
    lease.announcement(lease.part, 77)  # is under way
    before = lease.part
    assert lease.settle() and lease.part != other.part
    lease.published(True)
    told = lease.announcement(before, 77)
    assert told == {part_key(RUN, lease.part): PartRecord(part=lease.part, position=0)}


def test_a_head_tells_how_far_it_has_read_its_own_part() -> None:
    dht = Dht()
    lease = Head(dht, "a")
    lease.renew(33)  # of another part, from before
    assert dht.read(part_key(RUN, lease.part)) == {"a": PartRecord(part=lease.part, position=0)}
    lease.renew(44)
    assert dht.read(part_key(RUN, lease.part)) == {"a": PartRecord(part=lease.part, position=44)}


def test_more_heads_than_parts_are_spread_and_each_reads_in_an_order_of_its_own() -> None:
    """They read the same windows in the same order, in parts that eight tries had found."""
    dht = Dht()
    heads = [Head(dht, f"{number:02d}", parts=16) for number in range(48)]
    for _ in range(3):
        for lease in heads:
            lease.renew(0)
        dht.now += LIFETIME_S / 3
    assert set(Counter(lease.part for lease in heads).values()) == {3}
    assert len({(lease.part, lease.position) for lease in heads}) == len(heads)
    assert not any(lease.renew(0) for lease in heads)


def test_the_last_free_part_of_many_is_found_in_few_searches() -> None:
    dht = Dht()
    heads = [Head(dht, f"{number:02d}", parts=64) for number in range(64)]
    for lease in heads:
        before = dht.searches
        lease.renew(0)
        assert dht.searches - before <= 1 + 64 // 16
    assert len({lease.part for lease in heads}) == 64


def test_who_shared_a_part_takes_a_free_one_at_the_end_of_its_own() -> None:
    dht = Dht()
    heads = {name: Head(dht, name, parts=2) for name in "abc"}
    for lease in heads.values():
        lease.renew(0)
    sharer = heads["c"]
    gone = next(name for name in "ab" if heads[name].part != sharer.part)
    dht.now += LIFETIME_S + 1  # it has left
    stays = next(name for name in "ab" if name != gone)
    heads[stays].renew(0)
    sharer.finish()
    sharer.renew(0)
    assert sharer.part == heads[gone].part
    assert sharer.position == 0


def test_keys_that_train_nothing_keep_nobody_from_a_part() -> None:
    """They say that they read every part, under the smallest ids, and from where nobody was."""
    dht = Dht()
    honest, strangers = [Head(dht, peer, 8) for peer in "mno"], ("A", "B")

    def held_by_strangers() -> None:
        for part in range(8):
            lie = PartRecord(part=part, position=position_of(MOST_EPOCHS - 1))
            for stranger in strangers:
                dht.publish(stranger, part_key(RUN, part), lie)

    held_by_strangers()
    for credited in ("z", "mno"):
        for lease in honest:
            lease.renew(0, credited)
    taken = [lease.part for lease in honest]
    assert len(set(taken)) == 3
    for _ in range(5):
        dht.now += LIFETIME_S / 3
        held_by_strangers()
        assert not any(lease.renew(100, "mno") for lease in honest)
    assert [lease.part for lease in honest] == taken
    honest[0].finish()
    assert honest[0].renew(100, "mno")
    epoch, rows = place_of(honest[0].position)
    assert epoch < MOST_EPOCHS - 1 and rows == 0


def test_who_is_new_yields_to_who_was_in_a_record() -> None:
    large, small = same_first_part(2, 8)[::-1]
    dht = Dht()
    new, old = Head(dht, small), Head(dht, large)
    new.renew(0, large)
    assert old.renew(0, large) and old.part == new.part
    assert new.renew(0, large) and new.part != old.part
    assert not old.renew(0, large)
