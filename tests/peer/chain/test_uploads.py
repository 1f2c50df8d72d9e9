"""How many are served at once, and for how long one that takes nothing is waited for."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.rpc import (
    BYTE_KINDS,
    CHUNK_BYTES,
    REFUSALS,
    STALL_S,
    CallRefused,
    Client,
    Counts,
    PeerBusy,
    chunk_of,
    facts_of,
    request_of,
)
from dilocox.dht.upload_limit import UploadLimit
from dilocox.peer.averaging.service import PeerService
from dilocox.peer.chain import uploads
from dilocox.peer.chain.store import Store
from dilocox.peer.chain.uploads import (
    AT_ONCE,
    OF_ONE_PEER,
    TURN_S,
    Source,
    UploadRefused,
    Uploads,
    is_urgent,
)
from dilocox.peer.rounds.group import Mean
from dilocox.peer.rounds.record import digest_of
from tests.peer.fabricated import PEER
from tests.peer.kept_chains import ChainMaker
from tests.peer.local_peers import local_peer

RECORD = b"r" * (3 * CHUNK_BYTES + 7)
WANT = {"what": "record", "digest": digest_of(RECORD)}


@pytest.fixture
def service(tmp_path: Path) -> PeerService:
    """One without a pool of its own: what is served must not need it."""
    (tmp_path / "log").mkdir()
    service = PeerService()
    service.local = local_peer()
    service.attempts = {}
    service.log = cast("Any", log := Store(tmp_path / "log"))
    log.write(0, RECORD, b"votes")
    service.sent, service.received = Counts(BYTE_KINDS), Counts(BYTE_KINDS)
    service.refused = Counts(REFUSALS)
    service.limit = UploadLimit(None)
    return service


def answers(service: PeerService, peer: str, want: dict[str, Any]) -> Any:
    return service.rpc_get(request_of(want), cast("Any", SimpleNamespace(remote_id=peer)))


def test_who_is_not_admitted_gets_what_is_short(service: PeerService) -> None:
    admits: Any = SimpleNamespace(admits=lambda peer: peer != "stranger")
    service.local = local_peer(swarm=admits)
    digest = digest_of(RECORD)

    async def bytes_for(peer: str, **want: Any) -> int | None:
        facts = [
            facts_of(frame) async for frame in answers(service, peer, {"digest": digest} | want)
        ]
        return facts[0].get("bytes")

    async def go() -> None:
        assert await bytes_for("member", what="record") == len(RECORD)
        assert service.refused.total == 0
        for want in ({"what": "record"}, {"what": "state"}, {"what": "mean", "group": b"g"}):
            assert await bytes_for("stranger", **want) is None
        assert service.refused.read()["admission"] == 3
        assert await bytes_for("stranger", what="certificate") == len(b"votes")

    asyncio.run(go())


def test_who_is_not_admitted_is_in_no_exchange(service: PeerService) -> None:
    admits: Any = SimpleNamespace(admits=lambda peer: peer != "stranger")
    service.local = local_peer(swarm=admits)
    question = {"group": b"g", "round": 0, "attempt": 0}

    async def asked(call: str, peer: str) -> object:
        answer = getattr(service, call)(request_of(question), SimpleNamespace(remote_id=peer))
        return await (anext(answer) if call == "rpc_watch" else answer)

    async def go() -> None:
        await asked("rpc_watch", "member")
        for call in ("rpc_vote", "rpc_ask", "rpc_watch"):
            with pytest.raises(CallRefused, match="only peers that are admitted"):
                await asked(call, "stranger")
        assert service.refused.read()["admission"] == 3

    asyncio.run(go())


def test_who_comes_when_all_places_are_taken_is_told_so(service: PeerService) -> None:
    async def go() -> None:
        async with AsyncExitStack() as stack:
            running: list[Any] = []
            for number in range(AT_ONCE):
                stream = await stack.enter_async_context(
                    aclosing(answers(service, f"Qm{number}", WANT))
                )
                assert facts_of(await anext(stream)) == {"bytes": len(RECORD)}
                running.append(stream)
            (refused,) = [facts_of(each) async for each in answers(service, PEER, WANT)]
            assert "busy" in refused and "bytes" not in refused
            # what is few bytes comes all the same
            want = WANT | {"what": "certificate"}
            _, votes = [each async for each in answers(service, PEER, want)]
            assert chunk_of(votes) == b"votes"
            rest = b"".join([chunk_of(each) async for each in running[0]])
            assert rest == RECORD
            got = b"".join([chunk_of(each) async for each in answers(service, PEER, WANT)])
            assert got == RECORD

    asyncio.run(go())


def test_a_record_is_served_when_no_exchange_needs_the_uplink(service: PeerService) -> None:
    async def taken(peer: str, want: dict[str, Any]) -> bytes:
        return b"".join([chunk_of(each) async for each in answers(service, peer, want)])

    async def go() -> None:
        async def checked_mean(part: int) -> Any:
            return Mean(part=part, contributors=("QmMember",), payload=RECORD, signature=b"its")

        attempt: Any = SimpleNamespace(
            checked_mean=checked_mean,
            members=("QmMember",),
            digest=WANT["digest"],
            record=RECORD,
        )
        service.attempts[b"group"] = attempt
        with service.limit.exchange():
            asked = asyncio.create_task(taken("QmBootstrap", WANT))
            want = {"what": "mean", "group": b"group", "part": 0}
            assert await taken("QmMember", want) == RECORD
            # a member that lacks parts of this very round, and what is few bytes
            assert await taken("QmMember", WANT) == RECORD
            assert await taken("QmBootstrap", WANT | {"what": "certificate"}) == b"votes"
            assert not asked.done()
        assert await asyncio.wait_for(asked, 5.0) == RECORD

    asyncio.run(go())


def test_one_peer_cannot_take_all_places() -> None:
    many = Uploads(100)
    with ExitStack() as stack:

        def begin(peer: str) -> None:
            file: Any = SimpleNamespace(close=lambda: None)
            stack.enter_context(many.begin(peer, file, urgent=False))

        for _ in range(OF_ONE_PEER):
            begin("a")
        with pytest.raises(UploadRefused):
            begin("a")
        begin("b")
        for _ in range(200):  # these count for nothing
            stack.enter_context(many.begin("c", cast("Any", io.BytesIO()), urgent=True))
        begin("c")
    with ExitStack() as stack:
        begin("a")


def open_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(each.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def test_an_upload_that_nobody_takes_holds_no_file_and_no_place(
    service: PeerService, tmp_path: Path
) -> None:
    """Whose stream ends (tests/dht/test_streams.py) in the midst of a chunk."""
    service.uploads = Uploads(1)
    taken, written = asyncio.Event(), list[Any]()

    async def write() -> None:  # as hivemind does, into the asker's stream
        async for frame in answers(service, "QmSlow", WANT):
            written.append(frame)
            if len(written) == 2:
                taken.set()
                await asyncio.Event().wait()

    async def go() -> None:
        writing = asyncio.create_task(write())
        await asyncio.wait_for(taken.wait(), 5.0)
        assert open_files(tmp_path)
        writing.cancel()
        await asyncio.wait([writing], timeout=5.0)
        assert not open_files(tmp_path)
        got = b"".join([chunk_of(each) async for each in answers(service, PEER, WANT)])
        assert got == RECORD

    asyncio.run(go())


def test_a_file_that_was_removed_is_served_while_the_disk_has_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots that only their downloads held took room that no plan knows of."""
    path = tmp_path / "anchor.safetensors"
    path.write_bytes(RECORD)
    free = [len(RECORD) - 1]
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1))

    async def go() -> None:
        with path.open("rb") as file, Uploads().begin("a", file, urgent=False) as upload:
            assert len(upload.read(10)) == 10, "a file that is there costs nothing"
            path.unlink()
            free[0] = len(RECORD)
            assert len(upload.read(10)) == 10
            free[0] -= 1
            assert upload.read(10) == b"" and file.closed

    asyncio.run(go())


def test_who_takes_by_drops_gives_way_to_one_that_finds_no_place(
    service: PeerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(uploads, "monotonic", lambda: now[0])
    service.uploads = Uploads(2)

    async def go() -> None:
        fast, slow = answers(service, "QmFast", WANT), answers(service, "QmSlow", WANT)
        for stream, waits_s in ((slow, STALL_S - 1), (fast, 0.0)):
            for _ in range(2):  # the facts and a chunk
                await anext(stream)
                now[0] += waits_s
        (refused,) = [facts_of(each) async for each in answers(service, PEER, WANT)]
        assert "busy" in refused  # the slow one may become faster
        now[0] += STALL_S - 1
        got = b"".join([chunk_of(each) async for each in answers(service, PEER, WANT)])
        assert got == RECORD
        assert [each async for each in slow] == []
        rest = b"".join([chunk_of(each) async for each in fast])
        assert rest == RECORD[CHUNK_BYTES:]

    asyncio.run(go())


def test_who_has_most_places_gives_one_to_a_peer_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three strangers just above the least rate must not hold a peer's places for good."""
    now = [0.0]
    monkeypatch.setattr(uploads, "monotonic", lambda: now[0])

    async def go() -> None:
        running = Uploads(6)
        with ExitStack() as stack:

            def begin(peer: str) -> tuple[str, io.BytesIO]:
                file = io.BytesIO(b"x")
                upload = stack.enter_context(running.begin(peer, file, urgent=False))
                with upload.being_taken(CHUNK_BYTES):
                    now[0] += next(waits_s)
                return peer, file

            # of the peer with most places the slowest one goes, though another peer's is slower
            waits_s = iter((1.0, 12.0, 2.0, 15.0, 3.0, 4.0, *[5.0] * 9))
            begun = [begin(peer) for peer in "aaabbc"]

            def closed() -> list[int]:
                return [number for number, (_, file) in enumerate(begun) if file.closed]

            with pytest.raises(UploadRefused, match="6 downloads"):
                begin("b")  # it has some
            begin("d")
            assert closed() == [1]
            begin("e")  # a and b have two each
            assert closed() == [1, 3]
            begin("f")
            assert closed() == [1, 2, 3]
            with pytest.raises(UploadRefused, match="6 downloads"):
                begin("g")  # all have one
            now[0] += TURN_S  # and have had it for long: the slowest gives way
            _, file = begin("g")
            assert not file.closed

    asyncio.run(go())


def test_who_was_fast_before_is_dripping_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(uploads, "monotonic", lambda: now[0])

    async def go() -> None:
        file = cast("Any", io.BytesIO())
        with Uploads().begin("a", file, urgent=False) as upload:

            def take(count: int, each_s: float) -> None:
                for _ in range(count):
                    with upload.being_taken(CHUNK_BYTES):
                        now[0] += each_s

            take(1000, 0.1)
            take(10, CHUNK_BYTES / 15_000)
            assert not upload.drips
            take(6, STALL_S - 1)
            assert upload.drips
            take(300, 0.1)
            assert not upload.drips

    asyncio.run(go())


def test_the_asker_hears_that_it_may_ask_another(service: PeerService) -> None:
    service.uploads = Uploads(0)

    class Daemon:
        async def iterate_protobuf_handler(
            self, _peer: Any, _name: str, request: Any, _answer: Any
        ) -> AsyncIterator[Any]:
            return answers(service, PEER, facts_of(request))

    transport = Client(
        p2p=cast("Any", Daemon()),
        namespace="",
        record_bytes=len(RECORD),
    )
    with pytest.raises(PeerBusy, match="served at once"):
        asyncio.run(transport.fetch(PEER, WANT, limit_bytes=len(RECORD)))


def test_headers_of_a_large_group_wait_for_no_place() -> None:
    header = Source.of(bytes(2 * CHUNK_BYTES))
    assert is_urgent(WANT | {"header": True}, header)
    assert not is_urgent(WANT, header)
    assert not is_urgent(WANT | {"header": True}, Source.of(bytes(5 * CHUNK_BYTES)))


def test_who_made_the_chain_gets_a_place_of_strangers_and_leaves_them_half() -> None:
    """Eight strangers held all places of a peer for ten minutes at a time."""
    running = Uploads(4, knows=lambda peer: peer.startswith("member"))
    with ExitStack() as stack:

        def begin(peer: str) -> io.BytesIO:
            file = io.BytesIO(b"x")
            stack.enter_context(running.begin(peer, file, urgent=False))
            return file

        strangers = [begin(f"x{number}") for number in range(4)]
        with pytest.raises(UploadRefused):
            begin("another")
        members = [begin(f"member {number}") for number in range(2)]
        assert sum(file.closed for file in strangers) == 2
        with pytest.raises(UploadRefused):
            begin("member 3")
        assert not any(file.closed for file in members)


def test_a_peer_knows_those_whose_values_are_in_its_chain(maker: ChainMaker) -> None:
    maker.train(0, 1)
    service = PeerService()
    service.log, service.local = maker.log, local_peer()

    async def looked() -> None:
        looking = asyncio.create_task(service.keep_credit())
        while not service.credit.records:
            await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(asyncio.wait_for(looked(), 10.0))
    with ExitStack() as stack:
        for peer in (*"abcdefgh", maker.peer):
            stack.enter_context(service.uploads.begin(peer, io.BytesIO(b"x"), urgent=False))
        with pytest.raises(UploadRefused):
            stack.enter_context(service.uploads.begin("i", io.BytesIO(b"x"), urgent=False))
