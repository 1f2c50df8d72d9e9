"""Walks along chains whose holders say what they like, and the headers that come of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from dilocox.dht.rpc import Blob, Client, FrameRefused
from dilocox.peer.monitor.chains import (
    DETAILED,
    WHOLE_BYTES,
    HeaderFetcher,
    Order,
    Walk,
    Walker,
    followed,
    header_of,
    holders_of,
)
from tests.peer.fabricated import RUN, claim_record
from tests.peer.told_records import ToldRecord, told_chain

ROOT = "f" * 64
CHUNK_BYTES = 512


class Holders:
    """Peers without a network. asked: how often each was. sent: bytes that each gave away."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, bytes]] = {}
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def give(self, peer: str, records: Sequence[ToldRecord]) -> None:
        self.records.setdefault(peer, {}).update({each.digest: each.data for each in records})

    async def fetch(
        self,
        peer: str,
        want: dict[str, Any],
        *,
        limit_bytes: int,
        sink: Callable[[bytes], None],
    ) -> Blob | None:
        assert want["older"] is True
        self.asked[peer] += 1
        if peer not in self.records:
            raise ConnectionError("it is gone")
        data = self.records[peer].get(want["digest"])
        if data is None:
            return None
        for start in range(0, len(data), CHUNK_BYTES):
            self.sent[peer] += len(data[start : start + CHUNK_BYTES])
            sink(data[start : start + CHUNK_BYTES])
        return Blob(facts={}, data=b"")

    def walk(self, start: str, holders: Sequence[str], *, stop: Sequence[str] = (ROOT,)) -> Walk:
        client = cast("Client", self)
        walker = Walker(Order(stage=0, start=start, stop=stop, holders=holders))
        asyncio.run(walker.go(HeaderFetcher(client, RUN, {"boot"})))
        return walker.result()


def chain(count: int, **options: Any) -> list[ToldRecord]:
    members = [{"alice": 100 + number, "bob": 50} for number in range(count)]
    return told_chain(RUN, 0, ROOT, members, **options)


def test_a_walk_goes_back_to_the_manifest() -> None:
    holders, made = Holders(), chain(4)
    holders.give("boot", made)
    walk = holders.walk(made[-1].digest, ["boot"])
    assert walk.connected and walk.end == ROOT
    assert [each.listed.round for each in walk.rounds] == [3, 2, 1, 0]
    newest = walk.rounds[0]
    assert dict(newest.members) == {"alice": 103, "bob": 50}
    assert newest.chain_tokens == 4 * 150 + 6 and newest.listed.ranks == (4, 4, 16)
    assert newest.listed.record_bytes == len(made[-1].data)


def test_a_walk_stops_at_what_is_known() -> None:
    holders, made = Holders(), chain(4)
    holders.give("boot", made)
    walk = holders.walk(made[-1].digest, ["boot"], stop=[ROOT, made[1].digest])
    assert walk.connected and [each.listed.round for each in walk.rounds] == [3, 2]


def test_a_walk_ends_unconnected_where_nobody_has_the_record() -> None:
    holders, made = Holders(), chain(5)
    holders.give("boot", made[3:])
    walk = holders.walk(made[-1].digest, ["gone", "boot"])
    assert not walk.connected and walk.end == made[2].digest and len(walk.rounds) == 2


def test_others_are_asked_for_what_the_first_lacks_and_then_preferred() -> None:
    holders, made = Holders(), chain(6)
    holders.give("boot", made[5:])
    holders.give("peer", made[:5])
    assert holders.walk(made[-1].digest, ["boot", "peer"]).connected
    assert holders.asked == {"boot": 2, "peer": 5}


def test_members_of_older_rounds_are_summed() -> None:
    holders, made = Holders(), chain(DETAILED + 10)
    holders.give("boot", made)
    walk = holders.walk(made[-1].digest, ["boot"])
    assert sum(bool(each.members) for each in walk.rounds) == DETAILED
    assert walk.folded == {"alice": sum(100 + number for number in range(10)), "bob": 500}


def test_only_the_header_is_taken_of_a_bootstrap_and_all_of_others() -> None:
    holders, made = Holders(), chain(1, mean_bytes=100_000)
    for peer in ("boot", "peer"):
        holders.give(peer, made)
        assert len(holders.walk(made[0].digest, [peer]).rounds) == 1
    assert holders.sent["boot"] < 5000 < 100_000 < holders.sent["peer"]


def test_of_a_large_record_only_the_header_is_taken() -> None:
    holders, made = Holders(), chain(1, mean_bytes=WHOLE_BYTES + 1)
    holders.give("peer", made)
    assert len(holders.walk(made[0].digest, ["peer"]).rounds) == 1
    assert holders.sent["peer"] < 5000


def test_a_record_under_another_name_is_refused() -> None:
    holders, made = Holders(), chain(2)
    holders.records["peer"] = {made[1].digest: made[0].data}
    assert holders.walk(made[1].digest, ["peer"]).rounds == ()


def test_a_chain_that_goes_in_a_circle_ends() -> None:
    holders, made = Holders(), chain(3)
    holders.give("boot", made)
    holders.records["boot"][made[0].digest] = made[2].data  # a bootstrap's header is believed
    walk = holders.walk(made[2].digest, ["boot"])
    assert [each.listed.round for each in walk.rounds] == [2, 1] and not walk.connected


def damaged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A record's first bytes with another header."""
    data = chain(1)[0].data
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    header = json.loads(outer["__metadata__"]["record"])
    change(header)
    outer["__metadata__"]["record"] = json.dumps(header)
    text = json.dumps(outer).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_sound_header_is_read() -> None:
    found = header_of(damaged(lambda _: None), "a" * 64, RUN, 0)
    assert found.listed.tokens == 150 and found.listed.digest == "a" * 64


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(run="0" * 32),
        lambda header: header.update(stage=1),
        lambda header: header.update(round=-1),
        lambda header: header.update(round="x"),
        lambda header: header.update(round=2**60),
        lambda header: header.update(previous="../../x"),
        lambda header: header.pop("members"),
        lambda header: header.update(members=[{"peer": "a"}]),
        lambda header: header["members"][0].update(tokens=-5),
        lambda header: header["members"][0].update(tokens=float("inf")),
        lambda header: header["members"][0].update(tokens=None),
        lambda header: header["members"][0].update(peer="x" * 65),
        lambda header: header.update(chain_tokens=[]),
        lambda header: header.update(members=header["members"] * 3000),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(
    change: Callable[[dict[str, Any]], object],
) -> None:
    with pytest.raises(ValueError):
        header_of(damaged(change), "a" * 64, RUN, 0)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b"\1\0\0\0\0\0\0\0x"])
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(FrameRefused if data in (b"",) else ValueError):
        header_of(data, "a" * 64, RUN, 0)


def test_the_record_that_most_peers_claim_is_followed() -> None:
    claims = {"a": claim_record(4, "four", 40), "b": claim_record(4, "four", 40)}
    claims["liar"] = claim_record(900, "nine", 9_000_000)
    assert followed(claims) == "four"
    assert followed({}) is None and followed({"new": claim_record(-1, "root")}) is None


def test_right_after_a_commit_the_newer_record_is_followed() -> None:
    claims = {"a": claim_record(4, "four", 40), "b": claim_record(5, "five", 50)}
    assert followed(claims) == "five"


def test_bootstraps_are_asked_first_then_those_that_can_be_dialled() -> None:
    claims = {
        "hidden": claim_record(4, "four"),
        "behind": claim_record(3, "three"),
        "peer": claim_record(4, "four"),
        "boot": claim_record(2, "two"),
        "new": claim_record(-1, "root"),
    }
    holders = holders_of(claims, "four", bootstraps={"boot"}, dial_out={"hidden"})
    assert holders == ["boot", "peer", "behind", "hidden"]


def test_told_records_are_sound() -> None:
    made = chain(2)
    assert made[1].record.previous == made[0].digest
    assert replace(made[0].record, round=1).to_bytes() != made[0].data


def test_who_sends_more_than_its_header_says_is_left_at_once() -> None:
    holders, (record,) = Holders(), chain(1)
    endless = replace(record, data=record.data + bytes(1 << 20))
    holders.give("liar", [endless])
    holders.give("alice", [record])
    assert holders.walk(record.digest, ["liar", "alice"]).connected
    assert holders.sent["liar"] <= len(record.data) + CHUNK_BYTES


def test_a_monitor_takes_no_model_into_its_memory() -> None:
    """The code of models takes 100 MB, in each of its two processes."""
    code = "import sys, dilocox.peer.monitor; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "False\n"
