"""How a member reaches others: what is waited for, and what ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.rpc import Blob, CallRefused
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.live_group import LiveGroup
from tests.peer.members import Group, everything


class Beating:
    """A transport of which only the heartbeats are used; they come when the test says."""

    def __init__(self) -> None:
        self.beat = asyncio.Event()
        self.beats = 0

    async def heartbeats(self, peer: str) -> AsyncIterator[None]:
        while True:
            await self.beat.wait()
            self.beat.clear()
            self.beats += 1
            yield


def live_group(
    identities: list[Identity], folder: Path, transport: object, silence_s: float | None = None
) -> LiveGroup:
    made = Group(identities[:2], folder, passes=everything, silence_s=silence_s)
    setup = made.setups[made.peers[0]]
    return LiveGroup(setup, cast("Any", transport), ThreadPoolExecutor(1))


@pytest.mark.parametrize("steps", range(6))
def test_a_watch_ends_with_the_attempt_also_where_a_heartbeat_comes_in_the_same_moment(
    identities: list[Identity], tmp_path: Path, steps: int
) -> None:
    async def go() -> None:
        transport = Beating()
        group = live_group(identities, tmp_path, transport)
        group.watch_neighbours()
        for _ in range(5):
            await asyncio.sleep(0)
        transport.beat.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        group.cancel()
        await asyncio.sleep(0.01)
        seen = transport.beats
        transport.beat.set()
        await asyncio.sleep(0.01)
        assert transport.beats == seen
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())


def test_who_is_silent_is_dead_but_not_for_a_time_in_which_this_process_stood_still(
    identities: list[Identity], tmp_path: Path
) -> None:
    async def go() -> None:
        transport = Beating()
        group = live_group(identities, tmp_path, transport, silence_s=0.4)
        group.watch_neighbours()
        transport.beat.set()
        while not transport.beats:
            await asyncio.sleep(0.01)
        time.sleep(0.6)  # this process stands still
        await asyncio.sleep(0.02)
        assert not group.dead
        transport.beat.set()
        while transport.beats < 2:
            await asyncio.sleep(0.01)
        assert await group.until(lambda: bool(group.dead), time.monotonic() + 10)
        group.cancel()

    asyncio.run(go())


def test_who_sends_other_bytes_lives_though_its_heartbeats_wait_behind_them(
    identities: list[Identity], tmp_path: Path
) -> None:
    """On one connection all waits in one line: by silence alone a thin line looked dead."""

    async def go() -> None:
        group = live_group(identities, tmp_path, Beating(), silence_s=0.4)
        (peer,) = group.others
        group.watch_neighbours()
        ends_at = time.monotonic() + 1.2
        while time.monotonic() < ends_at:
            group.heard(peer)
            await asyncio.sleep(0.05)
            assert not group.dead
        for _ in range(2):  # it is silent, and again after it was heard once more
            assert await group.until(lambda: group.dead == {peer}, time.monotonic() + 10)
            assert not group.left
            group.heard(peer)
            assert await group.until(lambda: not group.dead, time.monotonic() + 10)
        group.cancel()

    asyncio.run(go())


def test_who_ends_its_heartbeats_has_left(identities: list[Identity], tmp_path: Path) -> None:
    class Leaving(Beating):
        async def heartbeats(self, peer: str) -> AsyncIterator[None]:
            yield

    async def go() -> None:
        group = live_group(identities, tmp_path, Leaving())
        group.watch_neighbours()
        assert await group.until(lambda: group.left == set(group.others), time.monotonic() + 10)
        assert group.dead == group.left
        group.cancel()

    asyncio.run(go())


def test_an_answer_is_waited_for_while_anything_comes_from_the_one_that_was_asked(
    identities: list[Identity], tmp_path: Path
) -> None:
    """It waits in line behind what that sends already; of one that sends nothing it never comes."""

    async def answer(peer: str, after_s: float) -> str:
        await asyncio.sleep(after_s)
        return peer

    async def go() -> None:
        group = live_group(identities, tmp_path, Beating(), silence_s=0.4)
        (peer,) = group.others
        began = time.monotonic()
        assert await group.call_while_heard(20.0, answer, peer, 10.0) is None
        assert 0.4 <= time.monotonic() - began < 5.0
        asking = asyncio.ensure_future(group.call_while_heard(20.0, answer, peer, 1.2))
        while not asking.done():
            group.heard(peer)
            await asyncio.sleep(0.05)
        assert await asking == peer
        assert await group.call_while_heard(0.1, answer, peer, 10.0) is None

    asyncio.run(go())


def test_of_a_mean_that_is_fetched_every_chunk_is_told() -> None:
    came: list[str] = []

    async def fetch(peer: str, want: object, *, sink: Callable[[bytes], None], **_: object) -> Blob:
        for chunk in (b"ab", b"cd"):
            sink(chunk)
        return Blob(facts={"contributors": b"\x01", "signature": b"signed"}, data=b"")

    client = SimpleNamespace(record_bytes=100, fetch=fetch)
    calls = GroupCalls(cast("Any", client), b"g", ("a", "b"))
    mean = asyncio.run(calls.fetch_mean("b", 3, lambda: came.append("chunk")))
    assert mean is not None and (mean.part, mean.payload) == (3, b"abcd")
    assert came == ["chunk", "chunk"]


def test_a_call_that_fails_makes_no_sense_or_takes_too_long_only_means_that_nobody_was_reached(
    identities: list[Identity], tmp_path: Path
) -> None:
    async def answer(peer: str, what: str) -> str:
        if what == "broken":
            raise ConnectionError(peer)
        if what == "nonsense":
            raise CallRefused("metadata is not a map")
        if what == "slow":
            await asyncio.sleep(10)
        return what

    async def go() -> None:
        group = live_group(identities, tmp_path, Beating())
        asked = ("broken", "nonsense", "slow", "well")
        answers = [await group.call(0.05, answer, "peer", what) for what in asked]
        assert answers == [None, None, None, "well"]
        began = time.monotonic()
        assert not await group.until(lambda: False, began + 0.05)
        assert 0.05 <= time.monotonic() - began < 1.0

    asyncio.run(go())


def test_a_call_that_fails_as_it_is_cancelled_is_no_fault_of_ours(
    identities: list[Identity], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(peer: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError(peer) from None

    async def go() -> None:
        group = live_group(identities, tmp_path, Beating())
        call = asyncio.create_task(group.call(60.0, breaks, identities[1].peer_id))
        await asyncio.sleep(0)  # the call begins,
        await asyncio.sleep(0)  # and what it calls
        call.cancel()
        await asyncio.wait([call])
        del call
        gc.collect()  # asyncio tells of an exception that nobody took once its task is gone

    asyncio.run(go())
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_fault_in_what_nobody_waits_for_is_logged(
    identities: list[Identity], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault() -> None:
        raise RuntimeError("ours")

    async def go() -> None:
        group = live_group(identities, tmp_path, Beating())
        await asyncio.wait([group.spawn(fault())])
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, logger="dilocox.peer.rounds.exchange"):
        asyncio.run(go())
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["ours"]


def test_who_waits_hears_of_a_change_though_another_begins_to_wait_at_once(
    identities: list[Identity], tmp_path: Path
) -> None:
    async def go() -> None:
        group, due = live_group(identities, tmp_path, Beating()), False
        began = time.monotonic()
        waiting = asyncio.ensure_future(group.until(lambda: due, began + 5.0))
        await asyncio.sleep(0)
        due = True
        group.notify()
        assert not await group.until(lambda: False, began + 0.05)
        assert await waiting
        assert time.monotonic() - began < 2.5

    asyncio.run(go())
