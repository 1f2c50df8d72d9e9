"""A swarm's answers may be late, old, forged or missing; readers see what owners last said."""

import tracemalloc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dilocox.dht.clock import RunClock
from dilocox.dht.errors import EnvironmentFault, InvalidInput, UnknownRun
from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_revisions import admitting
from dilocox.dht.node import NoAnswer, RunDHT, StoredValue
from dilocox.dht.protocol import Entry
from dilocox.dht.records import (
    BellRecord,
    PartRecord,
    StageRecord,
    bell_key,
    manifest_key,
    part_key,
    stage_key,
)
from dilocox.dht.swarm import Swarm
from dilocox.dht.wire import pack, seal


class FakeDHT:
    """A DHT in a dict; it answers what it is told to."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.silent = False
        self.reachable = True
        self.late: set[str] = set()
        self.searches = self.stores = 0
        self.expiries: list[float] = []

    def put_many(self, values: Sequence[StoredValue], *, timeout_s: float) -> bool:
        if self.silent:
            raise NoAnswer("silent")
        self.stores += 1
        for each in values:
            self.expiries.append(each.expires_at)
            entry = Entry(each.subkey, pack(each.value), each.expires_at)
            self.values.setdefault(each.key, {})[each.subkey] = entry
        return True

    def find_news(
        self, known: Mapping[str, Collection[bytes]], *, thorough: bool, timeout_s: float
    ) -> dict[str, list[Entry]]:
        if self.silent:
            raise NoAnswer("silent")
        self.searches += 1
        return {
            key: [each for each in self.values.get(key, {}).values() if each.mark not in marks]
            for key, marks in known.items()
            if key not in self.late
        }

    def bootstrap_answers(self, timeout_s: float) -> bool:
        return self.reachable


class StandingClock(RunClock):
    """Run time that moves only when told."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def dht() -> FakeDHT:
    return FakeDHT()


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture
def member(run: str, dht: FakeDHT, clock: StandingClock) -> Callable[[Identity], Swarm]:
    return lambda identity: Swarm(cast(RunDHT, dht), run, identity, clock)


Member = Callable[[Identity], Swarm]


def at(position: int) -> PartRecord:
    return PartRecord(part=0, position=position)


def test_in_a_listed_run_only_those_on_the_list_are_heard(
    member: Member, identities: list[Identity], run: str
) -> None:
    reader, friend, stranger = (member(each) for each in identities[:3])
    operator, friends, _ = (each.peer_id for each in identities[:3])
    listed = replace(
        Manifest.from_dict({"name": "run", "model": "tiny", "end_tokens": 1000}), admission="listed"
    )
    reader.admit_by(admitting(listed, {friends: 1}, 0), operator)
    for swarm in (friend, stranger):
        swarm.publish(part_key(run, 0), at(7), 15)
    assert reader.read(part_key(run, 0), PartRecord) == {friends: at(7)}
    assert reader.refused["admission"] == 1
    assert reader.admission is not None
    reader.admission.take(listed)  # who was on the list is no longer
    assert reader.read(part_key(run, 0), PartRecord) == {}


def test_many_records_are_published_in_one_store(
    member: Member, dht: FakeDHT, volunteer: Identity, run: str
):
    records = {part_key(run, part): PartRecord(part=part, position=7) for part in range(3)}
    swarm = member(volunteer)
    assert swarm.publish_many(records, 15)
    assert dht.stores == 1
    assert swarm.read_many(dict.fromkeys(records, PartRecord)) == {
        key: {volunteer.peer_id: record} for key, record in records.items()
    }
    with pytest.raises(ValueError, match="does not belong under"):
        swarm.publish_many(records | {stage_key(run, 0): at(1)}, 15)


def test_values_published_and_read_are_counted_in_bytes(
    member: Member, operator: Identity, volunteer: Identity, run: str
):
    key, writer, reader = part_key(run, 0), member(operator), member(volunteer)
    writer.publish(key, at(1), 15)
    assert writer.sent_bytes > 100  # a record, its signature and who signed it
    assert (reader.sent_bytes, reader.received_bytes) == (0, 0)
    for _ in range(2):  # what is known already is not told again
        assert reader.read(key, PartRecord) == {operator.peer_id: at(1)}
        assert writer.sent_bytes <= reader.received_bytes <= writer.sent_bytes + 3


def test_nothing_there_is_empty_and_no_answer_is_none(
    member: Member, dht: FakeDHT, operator: Identity, run: str
):
    swarm = member(operator)
    assert swarm.read(part_key(run, 0), PartRecord) == {}
    dht.silent = True
    assert swarm.read(part_key(run, 0), PartRecord) is None
    assert not swarm.publish(part_key(run, 0), at(1), 15)


def test_many_keys_are_read_in_one_search_and_a_late_one_has_no_answer(
    member: Member, dht: FakeDHT, operator: Identity, volunteer: Identity, run: str
):
    keys = [part_key(run, index) for index in range(4)]
    wanted = dict.fromkeys(keys, PartRecord)
    member(operator).publish(keys[0], at(1), 15)
    member(volunteer).publish(keys[1], at(2), 15)
    swarm = member(operator)
    found = {keys[0]: {operator.peer_id: at(1)}, keys[1]: {volunteer.peer_id: at(2)}, keys[2]: {}}
    dht.late = {keys[3]}
    assert swarm.read_many(wanted) == found | {keys[3]: None}
    assert dht.searches == 1
    assert swarm.read_many(dict[str, type[PartRecord]]()) == {}
    dht.silent = True
    assert swarm.read_many(wanted) == dict.fromkeys(keys)


def test_record_lives_until_it_expires_even_if_an_answer_misses_it(
    member: Member, dht: FakeDHT, clock: StandingClock, volunteer: Identity, run: str
):
    key, swarm = part_key(run, 0), member(volunteer)
    swarm.publish(key, at(1), 15)
    assert swarm.read(key, PartRecord) == {volunteer.peer_id: at(1)}
    dht.values.clear()
    clock.now += 14.9
    assert swarm.read(key, PartRecord) == {volunteer.peer_id: at(1)}
    clock.now += 0.2
    assert swarm.read(key, PartRecord) == {}


def test_replayed_older_record_does_not_replace_a_newer_one(
    member: Member, dht: FakeDHT, volunteer: Identity, run: str
):
    key, swarm = part_key(run, 0), member(volunteer)
    swarm.publish(key, at(1), 15)
    older = dict(dht.values[key])
    swarm.publish(key, at(2), 15)
    assert swarm.read(key, PartRecord) == {volunteer.peer_id: at(2)}
    dht.values[key] = older
    assert swarm.read(key, PartRecord) == {volunteer.peer_id: at(2)}
    assert swarm.refused["older"] == 1


def test_restarted_owner_is_newer_than_before(
    member: Member, clock: StandingClock, volunteer: Identity, run: str
):
    key, reader = part_key(run, 0), member(volunteer)
    writer = member(volunteer)
    for position in range(5):
        writer.publish(key, at(position), 15)
    reader.read(key, PartRecord)
    clock.now += 1.0
    member(volunteer).publish(key, at(100), 15)
    assert reader.read(key, PartRecord) == {volunteer.peer_id: at(100)}


def test_later_record_with_a_shorter_life_still_replaces(
    member: Member, dht: FakeDHT, volunteer: Identity, run: str
):
    swarm = member(volunteer)
    swarm.publish(part_key(run, 0), at(1), 60)
    swarm.publish(part_key(run, 0), at(2), 1)
    swarm.publish(part_key(run, 1), at(3), 1)
    assert dht.expiries[0] < dht.expiries[1] < 1061
    assert dht.expiries[2] == 1001


def test_garbage_is_skipped_and_counted_by_reason(
    member: Member,
    dht: FakeDHT,
    operator: Identity,
    volunteer: Identity,
    stranger: Identity,
    run: str,
):
    key, swarm = part_key(run, 0), member(volunteer)
    swarm.publish(key, at(1), 15)

    def sealed(signer: Identity, payload: bytes = at(9).encode(), under: str = key) -> bytes:
        return seal(signer, key=under, sequence=1, expires_at=1015.0, payload=payload)

    mine = peer_id_bytes_of(operator.public_key)
    good = sealed(operator)
    entries = [
        (b"somebody", pack(good), 1015.0),
        (mine, pack(sealed(stranger)), 1015.0),
        (mine, pack(good), 1016.0),
        (b"1", b"junk", 1015.0),
        (b"2", pack([17]), 1015.0),
        (b"4", pack(bytes(40_000)), 1015.0),
        (b"5", pack(bytes(32_760)), 1015.0),
        (mine, pack(good[:-1] + bytes([good[-1] ^ 1])), 1015.0),
        (mine, pack(sealed(operator, under=part_key(run, 1))), 1015.0),
        (peer_id_bytes_of(stranger.public_key), pack(sealed(stranger, b"\x80")), 1015.0),
    ]
    dht.values[key] |= {number: Entry(*each) for number, each in enumerate(entries)}
    assert swarm.read(key, PartRecord) == {volunteer.peer_id: at(1)}
    assert swarm.refused == {
        "owner": 2,
        "expiry": 1,
        "malformed": 4,
        "signature": 1,
        "key": 1,
        "type": 1,
    }


def test_of_a_crowd_under_one_key_those_are_kept_that_came_first(
    dht: FakeDHT, clock: StandingClock, volunteer: Identity, run: str, tmp_path: Path
):
    """A keeper that lies tells of owners without end, each with a good signature."""
    key = part_key(run, 0)
    swarm = Swarm(cast(RunDHT, dht), run, volunteer, clock, most_owners=3)
    owners = [Identity.load_or_create(tmp_path / f"{number}.key") for number in range(5)]

    def tell(number: int, sequence: int, expires_at: float = 1015.0) -> None:
        owner = owners[number]
        mine = peer_id_bytes_of(owner.public_key)
        value = seal(
            owner, key=key, sequence=sequence, expires_at=expires_at, payload=at(number).encode()
        )
        dht.values.setdefault(key, {})[sequence] = Entry(mine, pack(value), expires_at)

    for number in range(5):
        tell(number, number)
    first = {owners[number].peer_id for number in range(3)}
    assert set(swarm.read(key, PartRecord) or ()) == first
    assert swarm.refused == {"full": 2}
    tell(0, 9)  # who is known is heard
    assert set(swarm.read(key, PartRecord) or ()) == first
    tell(4, 10, expires_at=1030.0)
    clock.now = 1016.0  # and makes room when its record is no more
    assert set(swarm.read(key, PartRecord) or ()) == {owners[4].peer_id}


def test_record_under_a_key_of_another_kind_is_a_programming_error(
    member: Member, volunteer: Identity, run: str
):
    swarm = member(volunteer)
    with pytest.raises(ValueError, match="part record does not belong"):
        swarm.publish(stage_key(run, 0), at(1), 15)
    with pytest.raises(ValueError, match="no stage records"):
        swarm.read(part_key(run, 0), StageRecord)
    with pytest.raises(ValueError, match="no stage records"):
        swarm.read_many({stage_key(run, 0): StageRecord, part_key(run, 0): StageRecord})
    with pytest.raises(ValueError, match="may live up to"):
        swarm.publish(part_key(run, 0), at(1), 1e6)


def test_memory_of_past_rounds_is_given_up(
    member: Member, dht: FakeDHT, clock: StandingClock, volunteer: Identity, run: str
):
    swarm = member(volunteer)
    bell = BellRecord(round=0, finished_at=0, round_s=1, send_after=None, scheduled_at=None)
    used: list[int] = []
    tracemalloc.start()
    try:
        for number in range(900):
            clock.now += 20.0
            swarm.publish(bell_key(run, number), bell, 15)
            swarm.read(bell_key(run, number), BellRecord)
            dht.values.clear()
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # it grows by 600 bytes a round until 256 keys are there
    assert used[-1] - used[400] < 100_000 < used[250] - used[0]


def test_manifest_is_fetched_and_proven(
    member: Member, operator: Identity, volunteer: Identity, manifest: Manifest, run: str
):
    assert member(operator).publish_manifest(SignedManifest.sign(operator, manifest))
    assert member(volunteer).fetch_manifest(1.0).verify(run) == manifest


def test_forged_manifest_is_refused(
    member: Member,
    dht: FakeDHT,
    volunteer: Identity,
    stranger: Identity,
    manifest: Manifest,
    run: str,
):
    key = manifest_key(run)
    forged = SignedManifest.sign(stranger, manifest).to_bytes()
    for value in (
        seal(stranger, key=key, sequence=1, expires_at=2000.0, payload=forged),
        seal(stranger, key=key, sequence=1, expires_at=2000.0, payload=b"junk"),
        b"junk",
        17,
    ):
        dht.values[key] = {None: Entry(None, pack(value), 2000.0)}
        with pytest.raises(InvalidInput, match="manifest") as refused:
            member(volunteer).fetch_manifest(1.0)
        assert not isinstance(refused.value, UnknownRun)


def test_missing_manifest_is_the_invites_fault_only_if_a_bootstrap_answers(
    member: Member, dht: FakeDHT, volunteer: Identity
):
    with pytest.raises(UnknownRun, match="know no run"):
        member(volunteer).fetch_manifest(0.01)
    dht.reachable = False
    with pytest.raises(EnvironmentFault, match="no manifest of run"):
        member(volunteer).fetch_manifest(0.01)
    dht.silent = True
    with pytest.raises(EnvironmentFault, match="no manifest of run"):
        member(volunteer).fetch_manifest(0.01)
