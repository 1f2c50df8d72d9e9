"""Walks along chains whose holders say what they like, and the headers that come of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.node import RunDHT
from dilocox.dht.rpc import CHUNK_BYTES
from dilocox.peer.chain.header_client import WHOLE_BYTES, HeaderClient, read_header
from dilocox.peer.chain.uploads import Source
from dilocox.peer.monitor.chains import (
    DETAILED,
    ChainReader,
    Order,
    Walk,
    in_order_of_asking,
    walk,
)
from dilocox.peer.rounds.standing import Standing
from tests.dht.processes import wait_until
from tests.peer.fabricated import RUN, claim_record
from tests.peer.memory_swarm import Find, MemorySwarm
from tests.peer.told_records import ToldRecord, told_chain

ROOT = "f" * 64
BOOT, PEER = "QmBoot", "QmPeer"


def gives(records: Sequence[ToldRecord]) -> Find:
    """Whole records, to whoever asks for a header, too."""
    found = {each.digest: each.data for each in records}

    def find(want: dict[str, Any]) -> Source | None:
        data = found.get(want["digest"]) if want["older"] else None
        return None if data is None else Source.of(data)

    return find


def walked(swarm: MemorySwarm, start: str, *holders: str, stop: Sequence[str] = (ROOT,)) -> Walk:
    """A walk of the monitor, which trusts the bootstrap's headers."""

    def chain(order: Order) -> HeaderClient:
        trusted = {BOOT}.__contains__
        return HeaderClient(swarm.client(), RUN, 0, order.holders, trusted=trusted, older=True)

    return asyncio.run(walk(chain, Order(0, start, stop, holders)))


def chain(count: int, **options: Any) -> list[ToldRecord]:
    members = [{"anna": 100 + number, "bob": 50} for number in range(count)]
    return told_chain(RUN, 0, ROOT, members, **options)


def test_a_walk_goes_back_to_the_manifest_or_to_what_is_known() -> None:
    made = chain(4)
    found = walked(MemorySwarm(QmBoot=gives(made)), made[-1].digest, BOOT)
    assert found.connected and found.end == ROOT
    assert [each.round for each in found.rounds] == [3, 2, 1, 0]
    newest = found.rounds[0]
    assert dict(newest.contributors) == {"anna": 103, "bob": 50}
    assert newest.chain_tokens == 4 * 150 + 6 and newest.ranks == (4, 4, 16)
    assert newest.record_bytes == len(made[-1].data)
    found = walked(MemorySwarm(QmBoot=gives(made)), made[-1].digest, BOOT, stop=[made[1].digest])
    assert found.connected and [each.round for each in found.rounds] == [3, 2]


def test_a_walk_ends_unconnected_where_nobody_has_the_record() -> None:
    made = chain(5)
    found = walked(MemorySwarm(QmBoot=gives(made[3:])), made[-1].digest, "QmGone", BOOT)
    assert not found.connected and found.end == made[2].digest and len(found.rounds) == 2


def test_others_are_asked_for_what_the_first_lacks_and_then_preferred() -> None:
    made = chain(6)
    swarm = MemorySwarm(QmBoot=gives(made[5:]), QmPeer=gives(made[:5]))
    assert walked(swarm, made[-1].digest, BOOT, PEER).connected
    assert [peer for peer, _ in swarm.asked] == [BOOT, BOOT, *[PEER] * 5]


def test_members_of_older_rounds_are_summed() -> None:
    made = chain(DETAILED + 10)
    found = walked(MemorySwarm(QmBoot=gives(made)), made[-1].digest, BOOT)
    assert sum(bool(each.contributors) for each in found.rounds) == DETAILED
    assert found.folded == {"anna": sum(100 + number for number in range(10)), "bob": 500}
    assert found.folded_seconds.keys() == found.folded.keys()


@pytest.mark.parametrize(
    ("holder", "mean_bytes", "whole"),
    [(BOOT, 5 * CHUNK_BYTES, False), (PEER, 5 * CHUNK_BYTES, True), (PEER, WHOLE_BYTES + 1, False)],
)
def test_a_record_of_moderate_size_is_taken_whole_of_others_than_bootstraps(
    holder: str, mean_bytes: int, whole: bool
) -> None:
    (record,) = made = chain(1, mean_bytes=mean_bytes)
    swarm = MemorySwarm(QmBoot=gives(made), QmPeer=gives(made))
    assert len(walked(swarm, record.digest, holder).rounds) == 1
    assert swarm.sent[holder]["record"] == (len(record.data) if whole else CHUNK_BYTES)


def test_a_record_under_another_name_is_refused() -> None:
    first, second = chain(2)
    swarm = MemorySwarm(QmPeer=gives([replace(second, data=first.data)]))
    assert walked(swarm, second.digest, PEER).rounds == ()


def test_a_chain_that_goes_in_a_circle_ends() -> None:
    made = chain(3)
    made[0] = replace(made[0], data=made[2].data)  # a bootstrap's header is believed
    found = walked(MemorySwarm(QmBoot=gives(made)), made[2].digest, BOOT)
    assert [each.round for each in found.rounds] == [2, 1] and not found.connected


def test_who_sends_more_than_its_header_says_is_left_at_once() -> None:
    (record,) = made = chain(1)
    endless = replace(record, data=record.data + bytes(20 * CHUNK_BYTES))
    swarm = MemorySwarm(QmBad=gives([endless]), QmPeer=gives(made))
    assert walked(swarm, record.digest, "QmBad", PEER).connected
    assert swarm.sent["QmBad"]["record"] == CHUNK_BYTES


def damaged(change: Callable[[dict[str, Any]], object], end: object = 64) -> bytes:
    """A record's first bytes with another header; end: of its mean."""
    data = chain(1)[0].data
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    header = json.loads(outer["__metadata__"]["record"])
    change(header)
    outer["__metadata__"]["record"] = json.dumps(header)
    outer["mean.00000"]["data_offsets"][1] = end
    text = json.dumps(outer).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_sound_header_is_read() -> None:
    found = read_header(damaged(lambda _: None), "a" * 64, RUN, 0)
    assert found.tokens == 150 and found.digest == "a" * 64
    assert "anna" in dict(found.contributors)


def test_a_header_says_who_sits_out_of_the_next_round() -> None:
    def change(header: dict[str, Any]) -> None:
        left_out = Standing(peer="anna", round=header["round"], times=2, left_out=header["round"])
        gone = replace(left_out, peer="aaa", times=1)
        header["standings"] = [list(astuple(gone)), list(astuple(left_out))]

    assert read_header(damaged(change), "a" * 64, RUN, 0).sits_out == ("anna",)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(run="0" * 32),
        lambda header: header.update(stage=1),
        lambda header: header.update(round=-1),
        lambda header: header.update(round="x"),
        lambda header: header.update(round=2**60),
        lambda header: header.update(previous="../../x"),
        lambda header: header.update(previous="\x1b[2J"),
        lambda header: header.update(ranks=["x"]),
        lambda header: header.update(next_inner_steps=float("inf")),
        lambda header: header.pop("members"),
        lambda header: header.update(members=[{"peer": "a"}]),
        lambda header: header["members"][0].update(tokens=-5),
        lambda header: header["members"][0].update(tokens=float("inf")),
        lambda header: header["members"][0].update(tokens=None),
        lambda header: header["members"][0].update(peer="x" * 65),
        lambda header: header.update(chain_tokens=[]),
        lambda header: header.update(members=header["members"] * 3000),
        lambda header: header.update(parts=[[0, 0, "a", 1, "01"]]),
        lambda header: header.update(parts=[[0, 0, None, 1, "01"]]),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(
    change: Callable[[dict[str, Any]], object],
) -> None:
    with pytest.raises(ValueError):
        read_header(damaged(change), "a" * 64, RUN, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\2\0\0\0\0\0\0\0[]",
        b"\1\0\0\0\0\0\0\0x",
        damaged(lambda _: None, float("inf")),
        damaged(lambda _: None, None),
    ],
)
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_header(data, "a" * 64, RUN, 0)


def test_a_walk_that_cannot_begin_frees_its_stage() -> None:
    made = chain(3)
    swarm = MemorySwarm(QmBoot=gives(made))

    async def replicate_p2p() -> MemorySwarm:
        return swarm

    dht = cast("RunDHT", SimpleNamespace(replicate_p2p=replicate_p2p))
    reader = ChainReader(dht, RUN, [BOOT])
    reader.start(10.0)
    try:
        walks: list[Walk] = []
        for holders in (cast("list[str]", None), [BOOT]):
            assert reader.order(Order(0, made[-1].digest, [ROOT], holders))
            ended = 1 + len(walks)
            wait_until(
                lambda ended=ended: walks.extend(reader.take()) or len(walks) == ended,
                timeout_s=10.0,
            )
        assert [len(each.rounds) for each in walks] == [0, 3]
    finally:
        reader.close()


def test_bootstraps_are_asked_first_then_those_that_can_be_dialled() -> None:
    claims = {
        "hidden": claim_record(4, "four"),
        "behind": claim_record(3, "three"),
        "peer": claim_record(4, "four"),
        "boot": claim_record(2, "two"),
        "new": claim_record(-1, "root"),
    }
    holders = in_order_of_asking(claims, "four", bootstraps={"boot"}, dial_out={"hidden"})
    assert holders == ["boot", "peer", "behind", "hidden"]


def test_a_monitor_takes_no_model_into_its_memory() -> None:
    """The code of models takes 100 MB, in each of its two processes."""
    code = "import sys, dilocox.peer.monitor.monitor; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "False\n"
