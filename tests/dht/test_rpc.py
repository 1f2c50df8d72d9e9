"""The upload limit: how fast bytes may leave, and which go first. What a failed call says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p import P2P, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from benchmarks.dht_traffic import Sizes, SwarmTraffic
from dilocox.dht import rpc, upload_limit
from dilocox.dht.identity import peer_id_of
from dilocox.dht.rpc import (
    ASKED_BY_ONE,
    MAX_ASKERS,
    CallRefused,
    Client,
    RequestLimit,
    TooSlow,
    answer_of,
)
from dilocox.dht.upload_limit import UploadLimit
from tests.clocks import TestClock

CHUNK, RATE = 1000, 50_000.0  # a chunk takes 20 ms


def test_the_rate_is_kept_over_all_streams() -> None:
    async def go() -> float:
        limit = UploadLimit(RATE)
        began = time.monotonic()
        await asyncio.gather(*(send(limit, 5, first=first) for first in (True, False, True)))
        return time.monotonic() - began

    assert asyncio.run(go()) >= 14 * CHUNK / RATE  # the last of 15 chunks may start then


def test_an_exchange_goes_before_downloads_that_began_earlier() -> None:
    async def go() -> list[str]:
        limit, ended = UploadLimit(RATE), list[str]()

        async def stream(name: str, chunks: int, *, first: bool) -> None:
            await send(limit, chunks, first=first)
            ended.append(name)

        downloads = [asyncio.create_task(stream("download", 8, first=False)) for _ in range(3)]
        await asyncio.sleep(2 * CHUNK / RATE)
        await stream("exchange", 10, first=True)
        await asyncio.gather(*downloads)
        return ended

    assert asyncio.run(go())[0] == "exchange"


def test_without_a_limit_nothing_waits() -> None:
    asyncio.run(asyncio.wait_for(send(UploadLimit(None), 10_000, first=False), 5.0))


def test_while_an_exchange_is_under_way_others_wait_for_its_end() -> None:
    async def go() -> None:
        limit = UploadLimit(None)
        with limit.exchange():
            with limit.exchange():  # a push of it that outlives the attempt, or another one
                await limit.spend(CHUNK, first=True)
                download = asyncio.create_task(limit.spend(CHUNK, first=False))
            await asyncio.sleep(0.05)
            assert not download.done()
        await asyncio.wait_for(download, 1.0)
        await asyncio.wait_for(limit.spend(CHUNK, first=False), 1.0)

    asyncio.run(go())


def test_what_waits_for_an_exchange_is_heard_of_before_its_asker_gives_up() -> None:
    assert upload_limit.HELD_BACK_S + 5.0 < rpc.STALL_S

    async def go() -> float:
        limit, began = UploadLimit(None, held_back_s=0.05), time.monotonic()
        with limit.exchange():
            await send(limit, 3, first=False)
        return time.monotonic() - began

    assert 0.15 <= asyncio.run(go()) < 2.0


def test_on_a_thin_link_others_take_half_of_what_left_it_at_once() -> None:
    """However long the exchange took: that is the thinnest line's of all its members."""

    async def go(seconds: float) -> tuple[float, float]:
        limit = UploadLimit(None)

        async def push() -> None:
            with limit.pushing(5 * CHUNK):
                await asyncio.sleep(1.0)

        await asyncio.gather(push(), push())  # ten chunks a second
        limit.measured(seconds, limit_s=400.0)
        took = list[float]()
        for first in (True, False):
            began = time.monotonic()
            await send(limit, 4, first=first)
            took.append(time.monotonic() - began)
        return took[0], took[1]

    exchange_s, others_s = asyncio.run(go(200.0))
    assert exchange_s < 0.3
    assert 0.6 <= others_s < 2.0  # four chunks, the first at once, at five a second
    assert asyncio.run(go(50.0))[1] < 0.3  # an exchange so short says nothing of the link


class Daemon:
    """A p2pd whose calls end with this error."""

    def __init__(self, error: Exception):
        self._error = error

    async def iterate_protobuf_handler(self, *_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ControlFailure("Connect failed. msg=failed to dial: [/ip4/x]"), "cannot be reached"),
        (ControlFailure("Connect failed. msg=protocols not supported: [x]"), "does not answer for"),
        (asyncio.IncompleteReadError(b"", 1), "broke off"),
        (StopAsyncIteration(), "broke off"),
        (P2PHandlerError("Failed to\ncall"), "failed: P2PHandlerError: Failed to call"),
    ],
)
def test_what_p2pd_says_of_a_peer_is_said_in_words(error: Exception, words: str) -> None:
    transport = Client(
        p2p=cast("P2P", Daemon(error)),
        namespace="",
        record_bytes=1,
    )
    peer = peer_id_of(bytes(32))
    with pytest.raises(ConnectionError, match=f"^{peer} {words}") as caught:
        asyncio.run(transport.fetch(peer, {"what": "state"}, limit_bytes=1))
    assert "Connect failed" not in str(caught.value)


def test_a_download_that_comes_too_slowly_is_given_up_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = TestClock(0.0)
    monkeypatch.setattr(rpc, "time", clock)
    chunks = 300

    async def answer() -> AsyncIterator[Any]:
        yield answer_of({"bytes": chunks * CHUNK})
        for number in range(chunks):
            clock.now += 1.0 if number < 90 else 10.0  # then it becomes slow
            yield answer_of({}, bytes(CHUNK))

    async def opened(*_: Any) -> AsyncIterator[Any]:
        return answer()

    transport = Client(
        p2p=cast("P2P", SimpleNamespace(iterate_protobuf_handler=opened)),
        namespace="",
        record_bytes=1,
    )

    def fetch(least_bytes_per_s: float) -> int:
        taken: list[bytes] = []
        want, peer = {"what": "state"}, peer_id_of(bytes(32))
        fetching = transport.fetch(
            peer,
            want,
            limit_bytes=chunks * CHUNK,
            sink=taken.append,
            least_bytes_per_s=least_bytes_per_s,
        )
        try:
            asyncio.run(cast("Coroutine[Any, Any, Any]", fetching))
        except TooSlow:
            assert clock.now > 0
        return len(taken)

    assert fetch(0.0) == fetch(0.9 * CHUNK / 10) == chunks
    assert 90 < fetch(0.5 * CHUNK) < 110
    assert fetch(2.0 * CHUNK) == 60


async def send(limit: UploadLimit, chunks: int, *, first: bool) -> None:
    for _ in range(chunks):
        await limit.spend(CHUNK, first=first)


# ---- how often one peer may ask ------------------------------------------------------------------
@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TestClock:
    clock = TestClock()
    monkeypatch.setattr(rpc, "time", clock)
    return clock


def is_refused(limit: RequestLimit, asker: str) -> bool:
    try:
        limit.check(asker)
    except CallRefused as refused:
        assert refused.kind == "often"
        return True
    return False


def test_one_asker_has_so_many_requests_in_a_while_and_others_have_theirs(clock: TestClock) -> None:
    limit = RequestLimit(3, 10.0)
    assert [is_refused(limit, "greedy") for _ in range(5)] == [False] * 3 + [True] * 2
    assert not is_refused(limit, "honest")
    clock.now += 9.0
    assert is_refused(limit, "greedy")
    clock.now += 1.1
    assert [is_refused(limit, "greedy") for _ in range(4)] == [False] * 3 + [True]


def test_a_crowd_of_askers_takes_no_memory_and_holds_up_nobody(clock: TestClock) -> None:
    limit = RequestLimit(3, 10.0)
    for _ in range(3):
        assert not is_refused(limit, "greedy")
        assert not any(is_refused(limit, f"key {number}") for number in range(MAX_ASKERS - 1))
    assert is_refused(limit, "greedy"), "all so far have their place"
    assert not any(is_refused(limit, f"another {number}") for number in range(MAX_ASKERS))
    assert not is_refused(limit, "greedy"), "so many more are kept in place of those before"
    assert not is_refused(limit, "honest")


@pytest.mark.parametrize(
    ("peers", "heartbeat_s", "seconds"), [(200, 10.0, 120.0), (3, 0.1, 20.0), (8, 0.1, 20.0)]
)
def test_nobody_honest_asks_two_thirds_as_often(
    peers: int, heartbeat_s: float, seconds: float, tmp_path: Path
) -> None:
    """0.1 s is the shortest heartbeat that a manifest may have."""
    swarm = SwarmTraffic(
        peers=peers,
        stages=4 if peers > 3 else 1,
        round_s=60.0,
        sizes=Sizes.real(tmp_path, 4),
        heartbeat_s=heartbeat_s,
    )
    swarm.run(seconds)
    assert 0 < swarm.most_asked < ASKED_BY_ONE * 2 / 3
