"""Records are small and typed; keys say which kind of record they are for."""

import dataclasses
import hashlib
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.dht import records
from dilocox.dht.manifest import Manifest
from dilocox.dht.reconnect import dial_targets
from dilocox.dht.records import (
    MAX_RECORD_BYTES,
    RECORD_TYPES,
    BellRecord,
    ClaimRecord,
    PartRecord,
    Record,
    StageRecord,
)
from dilocox.dht.swarm_view import SwarmView
from dilocox.dht.wire import Malformed, pack, unpack
from tests.pipeline.swarms import replica_record, stage_record

RUN = "0123456789abcdef" * 2
STAGE = stage_record(state="training", addresses=("/ip4/127.0.0.1/tcp/1",))
REPLICA = replica_record(members=("QmA", "QmB"))
BELL = BellRecord(round=7, finished_at=1e9, round_s=60.0, send_after=None, scheduled_at=1e9)
CLAIM = ClaimRecord(round=-1, digest="ab" * 32, chain_tokens=0, record_bytes=10)
ALL = [STAGE, REPLICA, BELL, CLAIM, PartRecord(part=3, position=0)]


@pytest.mark.parametrize("record", ALL, ids=lambda record: record.kind)
def test_record_reads_back_equal(record: Record):
    data = record.encode()
    assert len(data) <= MAX_RECORD_BYTES
    assert type(record).decode(data) == record
    assert RECORD_TYPES[record.kind] is type(record)


ODD: list[Any] = [0, -1, 2**31, 2**53, 2**63, 1.5, float("inf"), float("nan"), "", "x" * 65536]
ODD += [None, True, b"", [], [[]], ["x"] * 65, {}, {"a": 1}]


@pytest.mark.parametrize("record", ALL, ids=lambda record: record.kind)
def test_an_odd_value_in_any_field_is_refused_or_fits_in_every_reader(
    record: Record, manifest: Manifest
):
    for name in (field.name for field in dataclasses.fields(record)):
        for odd in ODD:
            try:
                read = type(record).decode(pack(dataclasses.asdict(record) | {name: odd}))
            except Malformed:
                continue
            view = view_of(read)
            assert view.counted()
            view.says_ended(manifest, "")
            assert view.run_tokens("") < 2**60
            assert view.held_by(["b"], 1) in (True, False)
            view.best_claim(0, "")
            assert dial_targets(view.stages, "a", 0) in ({}, {"b": STAGE.addresses})


def view_of(record: Record) -> SwarmView:
    """What a peer sees where another one has written just this."""
    told: dict[str, Any] = {"b": record}
    match record:
        case StageRecord():
            return SwarmView(me="a", stage=told, stages={0: told})
        case ClaimRecord():
            return SwarmView(me="a", claims=told, run_claims=told)
        case BellRecord():
            return SwarmView(me="a", bells={record.round: told})
        case _:
            return SwarmView(me="a", replicas=told)


def test_field_of_a_newer_version_is_ignored():
    fields = dataclasses.asdict(STAGE) | {"temperature": 41.5}
    assert StageRecord.decode(pack(fields)) == STAGE


FIELDS = {field.name: field.default for field in dataclasses.fields(StageRecord)}


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_lacks_only_what_an_older_version_does_not_send(field: str):
    fields = dataclasses.asdict(STAGE)
    del fields[field]
    if FIELDS[field] is dataclasses.MISSING:
        with pytest.raises(Malformed, match=f"record: {field}: Field required"):
            StageRecord.decode(pack(fields))
    else:
        assert getattr(StageRecord.decode(pack(fields)), field) == FIELDS[field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "sleeping"),
        ("state", 1),
        ("round", 1.5),
        ("round", True),
        ("round", -2),
        ("round", 2**60),
        ("version", b"ab"),
        ("version", "x" * 300),
        ("replica", None),
        ("tokens_per_s", float("nan")),
        ("tokens_per_s", float("inf")),
        ("tokens_per_s", "fast"),
        ("client_mode", 1),
        ("addresses", "one"),
        ("addresses", [1]),
        ("addresses", [["nested"]]),
        ("addresses", ["a"] * 65),
        ("blocked", None),
        ("blocked", "x" * 257),
    ],
)
def test_value_of_a_wrong_type_is_refused_both_ways(field: str, value: Any):
    with pytest.raises(Malformed):
        StageRecord.decode(pack(dataclasses.asdict(STAGE) | {field: value}))
    with pytest.raises(Malformed):
        dataclasses.replace(STAGE, **{field: value}).encode()


def test_record_over_one_kilobyte_is_refused_both_ways():
    long = dataclasses.replace(STAGE, addresses=("x" * 250,) * 5)
    with pytest.raises(Malformed, match="1024"):
        long.encode()
    with pytest.raises(Malformed, match="1024"):
        StageRecord.decode(pack(dataclasses.asdict(long)))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_malformed(data: bytes):
    for kind in RECORD_TYPES.values():
        with pytest.raises(Malformed):
            kind.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xc7\x01\x50a",
        b"\x81\x01\x02",
        b"\x81\x90\x02",
        b"\x01\x01",
        b"\xa2\xff\xfe",
    ],
)
def test_hostile_msgpack_is_refused_without_its_memory(data: bytes):
    with pytest.raises(Malformed):
        unpack(data, 10_000)


KEYS = {
    records.manifest_key(RUN): ("manifest", 0),
    records.replica_key(RUN): ("replica", 0),
    records.stage_key(RUN, 0): ("stage", 0),
    records.stage_key(RUN, 12): ("stage", 12),
    records.bell_key(RUN, 345): ("bell", 345),
    records.part_key(RUN, 6): ("part", 6),
    records.claim_key(RUN, 1): ("round", 1),
}


@pytest.mark.parametrize("key", KEYS)
def test_key_tells_run_kind_and_index(key: str):
    parsed = records.parse_key(key)
    assert (parsed.run, (parsed.kind, parsed.index)) == (RUN, KEYS[key])


@pytest.mark.parametrize(
    "key", ["", RUN, f"{RUN}.stage", f"{RUN}.stage.01", f"{RUN}.stage.-1", f"{RUN}.x.1"]
)
def test_other_keys_are_none_of_ours(key: str):
    with pytest.raises(ValueError, match="is not a key of dilocox"):
        records.parse_key(key)


def test_key_id_equals_the_hash_that_hivemind_stores():
    key = records.stage_key(RUN, 0)
    assert records.key_id(key) == DHTID.generate(source=key).to_bytes()
    assert len(records.key_id(key)) == hashlib.sha1(b"").digest_size


def test_averaging_prefix_has_no_dot():
    assert "." not in records.averaging_prefix(RUN, 3)
