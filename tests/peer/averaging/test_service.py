"""What a peer's service answers and refuses, and how it counts that."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.dht.rpc import (
    BYTE_KINDS,
    CHUNK_BYTES,
    REFUSALS,
    CallRefused,
    Client,
    Counts,
    RequestLimit,
    answer_of,
    facts_of,
    request_of,
)
from dilocox.peer.averaging.averager import StageBuffers
from dilocox.peer.averaging.service import ATTEMPTS_KEPT, NoSuchGroup, PeerService, refusal
from dilocox.peer.chain.uploads import Source
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.group import ShareRefused
from dilocox.peer.rounds.record import RecordRefused
from tests.peer.fabricated import PEER
from tests.peer.local_peers import local_peer


# ---- counts and vectors that processes share -----------------------------------------------------
def test_counts_and_vectors_of_a_peer_are_seen_by_both_sides_of_a_fork() -> None:
    """Vectors with names stayed in /dev/shm when all processes of a peer were killed."""
    buffers, alone = StageBuffers.allocate(1000), Counts(BYTE_KINDS)
    buffers.sent.add("state", 12)
    with pytest.raises(KeyError):
        buffers.sent.add("no such kind")

    def child() -> None:
        buffers.anchor.fill_(2.5)
        buffers.sent.add("state", 30)
        alone.add("state", 30)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30.0)
    assert buffers.anchor.tolist() == [2.5] * 1000
    assert buffers.momentum.tolist() == [0.0] * 1000
    assert buffers.sent.read() == {"averaging": 0, "record": 0, "state": 42}
    assert (buffers.sent.total, alone.total) == (42, 0)
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


# ---- calls of others -----------------------------------------------------------------------------
class FakeAttempt:
    """An attempt of two parts of ten bytes."""

    digest: str | None = None
    members = (PEER,)

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.stranger: Exception | None = None
        self.taken: list[tuple[int, bytes]] = []
        self.came: list[tuple[str, int, str, int, int]] = []
        self.forgotten = self.over = False

    def forget(self) -> None:
        self.forgotten = True

    def has_part(self, part: int, kind: str) -> bool:
        return part < 2

    def max_bytes(self, part: int, kind: str) -> int:
        return 3 * CHUNK_BYTES

    def check_sender(self, peer: str, part: int, kind: str) -> None:
        if self.stranger is not None:
            raise self.stranger

    def bytes_came(self, peer: str, part: int, kind: str, count: int, size: int) -> None:
        self.came.append((peer, part, kind, count, size))

    async def on_part(self, peer: str, part: int, payload: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append((part, payload))

    def on_votes(self, votes: Sequence[bytes]) -> None:
        raise ValueError("no vote of this attempt")


class HastyService(PeerService):
    """Waits for a group that is not there no longer than a test can."""

    async def find_attempt(self, group: object, wait_s: float = 0.05) -> Attempt:
        return await super().find_attempt(group, wait_s)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PeerService:
    monkeypatch.setattr("dilocox.peer.averaging.service.LATE_GROUP_S", 0.05)
    service = HastyService()
    service.attempts = {b"g": cast("Attempt", FakeAttempt())}
    service.sent, service.received = Counts(BYTE_KINDS), Counts(BYTE_KINDS)
    service.refused = Counts(REFUSALS)
    service.local = local_peer(folder=tmp_path)
    return service


def push(service: PeerService, payload: bytes, **header: Any) -> None:
    async def frames() -> AsyncIterator[Any]:
        yield request_of({"kind": "part", "part": 0, "group": b"g", "bytes": len(payload)} | header)
        for start in itertools.count(0, CHUNK_BYTES):
            if start >= len(payload):
                return
            yield request_of({}, payload[start : start + CHUNK_BYTES])

    asyncio.run(service.rpc_put(frames(), cast(Any, SimpleNamespace(remote_id=PEER))))


def counted(counts: Counts) -> dict[str, int]:
    return {name: count for name, count in counts.read().items() if count}


def test_attempts_that_are_over_keep_no_means(service: PeerService) -> None:
    """Of a billion parameters each held half a gigabyte or more, for hours."""
    attempts = [FakeAttempt() for _ in range(6)]
    for number, attempt in enumerate(attempts):
        service.begin_attempt(bytes([number]), cast("Attempt", attempt))
    assert len(service.attempts) == ATTEMPTS_KEPT
    assert [each.forgotten for each in attempts] == [True] * 4 + [False] * 2
    attempts[4].over = attempts[5].over = True
    service.begin_attempt(b"next", cast("Attempt", newest := FakeAttempt()))
    assert all(each.forgotten for each in attempts) and not newest.forgotten


def test_parts_that_come_are_counted_as_averaging(service: PeerService) -> None:
    push(service, b"x" * (CHUNK_BYTES + 5))
    assert counted(service.received) == {"averaging": CHUNK_BYTES + 5}
    assert counted(service.refused) == {}
    attempt: Any = service.attempts[b"g"]
    whole = CHUNK_BYTES + 5
    came = [(PEER, 0, "part", count, whole) for count in (0, CHUNK_BYTES, whole)]
    assert attempt.came == came, "of a mean that others hold one must know it"


def test_of_one_part_one_stream_of_its_sender_is_held(service: PeerService) -> None:
    """The newest: the one before may have broken. A hundred at once would be a hundred parts."""
    payload, sender = b"x" * CHUNK_BYTES, cast(Any, SimpleNamespace(remote_id=PEER))

    async def frames(held: asyncio.Event | None) -> AsyncIterator[Any]:
        yield request_of({"kind": "part", "part": 0, "group": b"g", "bytes": len(payload)})
        if held is not None:
            held.set()
            await asyncio.Event().wait()
        yield request_of({}, payload)

    async def go() -> None:
        held = asyncio.Event()
        first = asyncio.create_task(service.rpc_put(frames(held), sender))
        await asyncio.wait_for(held.wait(), 5.0)
        await service.rpc_put(frames(None), sender)
        await asyncio.wait([first], timeout=5.0)
        assert first.cancelled()

    asyncio.run(go())
    attempt: Any = service.attempts[b"g"]
    assert attempt.taken == [(0, payload)]


def test_what_the_service_refuses_is_counted_by_reason(service: PeerService) -> None:
    attempt: Any = service.attempts[b"g"]
    push(service, b"x", part=7)
    push(service, b"x", bytes=-1)
    push(service, b"x", group=b"another")
    attempt.error = PayloadRefused("length", "too short")
    push(service, b"x")
    attempt.error = ShareRefused("it came twice")
    push(service, b"x")

    async def nothing() -> AsyncIterator[Any]:
        for frame in ():
            yield frame

    async def ask() -> None:
        nobody: Any = SimpleNamespace(remote_id=PEER)
        await service.rpc_vote(request_of({"group": b"g"}, b"no vote"), nobody)
        await service.rpc_vote(request_of({"group": b"another"}, b"no vote"), nobody)
        for odd in ({}, {"group": b"g", "round": math.inf, "attempt": 0}):
            await service.rpc_ask(request_of(odd), nobody)
        await service.rpc_put(nothing(), nobody)
        for odd in ({}, {"what": "state", "offset": math.inf}):
            assert [each async for each in service.rpc_get(request_of(odd), nobody)] == [
                answer_of({})
            ]

    asyncio.run(ask())
    assert counted(service.refused) == {
        "frame": 3,
        "group": 2,
        "payload": 1,
        "share": 1,
        "vote": 1,
        "question": 4,
    }


def test_a_heartbeat_is_for_members_of_the_group(
    service: PeerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's would take a place among the streams for minutes. One that comes before its
    group is waited for.
    """
    monkeypatch.setattr("dilocox.peer.averaging.service.HEARTBEAT_S", 0.01)

    async def beats(group: object, peer: str) -> int:
        context: Any = SimpleNamespace(remote_id=peer)
        counted = 0
        async for _ in service.rpc_watch(request_of({"group": group}), context):
            counted += 1
            if counted == 20:
                break
        return counted

    assert asyncio.run(beats(b"g", PEER)) == 20
    for group, peer in ((b"g", "another"), (b"not yet", PEER), (None, PEER)):
        assert 0 < asyncio.run(beats(group, peer)) < 20
    assert counted(service.refused) == {"group": 3}


def test_who_has_to_do_with_the_run_is_known(service: PeerService) -> None:
    service.local = replace(service.local, dht=cast(Any, SimpleNamespace(bootstraps={"boot"})))
    assert service.is_involved(PEER) and not service.credit.knows(PEER), "of no record yet"
    service.credit.records["maker"] += 1
    assert service.credit.knows("maker") and service.credit.knows("boot")
    assert not service.is_involved("another")


def test_who_calls_too_often_is_refused_and_holds_up_nobody_else(service: PeerService) -> None:
    service.requests = RequestLimit(4, 60.0)
    somebody: Any = SimpleNamespace(remote_id=PEER)
    another: Any = SimpleNamespace(remote_id="another")
    question = request_of({"group": b"of before", "round": 3, "attempt": 0})

    async def scene() -> None:
        for _ in range(4):
            await service.rpc_ask(question, somebody)
        for call in (
            service.rpc_ask(question, somebody),
            service.rpc_vote(request_of({"group": b"g"}), somebody),
            anext(service.rpc_watch(request_of({"group": b"g"}), somebody)),
        ):
            with pytest.raises(CallRefused, match="asked too often"):
                await call
        assert "votes" in facts_of(await service.rpc_ask(question, another))

    asyncio.run(scene())
    push(service, b"x")
    assert counted(service.refused) == {"often": 4}
    assert counted(service.received) == {}


def test_an_answer_with_many_votes_is_one_that_the_asker_takes(service: PeerService) -> None:
    """Aborts of a large group that name whom they missed were more than an answer may have, and
    nobody heard a decision.
    """
    short, long = [bytes([n]) * 225 for n in range(100)], [bytes([n]) * 3000 for n in range(100)]
    ballots = SimpleNamespace(all_bytes=lambda: [*long, *short])
    service.attempts[b"g"] = cast("Any", SimpleNamespace(ballots=ballots))
    question = request_of({"group": b"g", "round": 3, "attempt": 0})
    answer = asyncio.run(service.rpc_ask(question, cast("Any", SimpleNamespace(remote_id=PEER))))
    told = facts_of(answer)["votes"]
    assert set(short) < set(told) < {*short, *long}


def test_a_stranger_is_refused_before_a_byte_of_its_part_is_taken(service: PeerService) -> None:
    attempt: Any = service.attempts[b"g"]
    attempt.stranger = ShareRefused("not from you")
    push(service, b"x" * (2 * CHUNK_BYTES))
    assert counted(service.received) == {}
    assert counted(service.refused) == {"share": 1}
    assert attempt.taken == []


def test_every_error_is_refused_under_one_of_the_known_names() -> None:
    errors = (
        CallRefused(""),
        CallRefused("", "often"),
        NoSuchGroup(""),
        ShareRefused(""),
        PayloadRefused("length", ""),
        RecordRefused(""),
        ConnectionError(),
        asyncio.TimeoutError(),
        KeyError(),
    )
    assert {refusal(error) for error in errors} == set(REFUSALS) - {
        "vote",
        "question",
        "admission",
        "ticket",
    }


def test_a_download_that_is_refused_is_counted_and_still_raised(service: PeerService) -> None:
    with pytest.raises(RecordRefused), service.counting_refusals():
        raise RecordRefused("not sound")
    with pytest.raises(ConnectionError), service.counting_refusals():
        raise ConnectionError  # nobody's fault
    assert counted(service.refused) == {"record": 1}


@pytest.mark.parametrize(
    ("what", "kind"), [("state", "state"), ("record", "record"), ("mean", "averaging")]
)
def test_downloads_are_counted_by_kind_on_both_sides(
    service: PeerService, monkeypatch: pytest.MonkeyPatch, what: str, kind: str
) -> None:
    async def find(_: dict[str, Any]) -> Source:
        return Source.of(b"x" * (2 * CHUNK_BYTES + 9))

    monkeypatch.setattr(service, "find", find)

    class Daemon:
        async def iterate_protobuf_handler(
            self, _peer: Any, _name: str, request: Any, _answer: Any
        ) -> AsyncIterator[Any]:
            return service.rpc_get(request, cast(Any, SimpleNamespace(remote_id=PEER)))

    received = Counts(BYTE_KINDS)
    transport = Client(
        p2p=cast(Any, Daemon()),
        namespace="",
        record_bytes=1 << 20,
        received=received,
    )
    blob = asyncio.run(transport.fetch(PEER, {"what": what}, limit_bytes=1 << 20))
    assert blob is not None
    assert len(blob.data) == 2 * CHUNK_BYTES + 9
    assert counted(received) == counted(service.sent) == {kind: 2 * CHUNK_BYTES + 9}
