"""Streams of strangers, over real p2pd on loopback: what they send without end is not held."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows this one only

import pytest
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2

from dilocox.dht import streams
from dilocox.dht.rpc import answer_of, facts_of, request_of
from dilocox.dht.streams import LEADER_BYTES, MESSAGE_BYTES, OpenStreams, accept
from tests.dht.processes import handles

LIMIT_S = 20.0
MESSAGE, END = b"\x00", b"\x01"  # hivemind's markers


class Echo(ServicerBase):
    """A call of each kind of stream."""

    held: weakref.ref[Much]

    async def rpc_count(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """How many messages came."""
        came = 0
        async for _ in request:
            came += 1
            accept()
        return answer_of({"came": came})

    async def rpc_leave(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Ends though more comes."""
        await anext(aiter(request))
        accept()
        await asyncio.sleep(0.2)
        return answer_of({})

    async def rpc_shout(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """More than an answer may have."""
        yield answer_of({}, bytes(MESSAGE_BYTES))

    async def rpc_tell(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """So many answers as are asked for; without end for -1."""
        left = facts_of(request)["answers"]
        while left:
            left -= 1
            yield answer_of({})
            await asyncio.sleep(0.01)

    async def rpc_pour(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """More than all between the two take that nobody reads."""
        for _ in range(1000):
            yield answer_of({}, bytes(64 << 10))

    async def rpc_hold(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Holds much while it is listened to."""
        much = Much()
        Echo.held = weakref.ref(much)
        yield answer_of({})
        await asyncio.sleep(LIMIT_S)


class Much:
    """What a handler holds, of a record's size perhaps."""


Ask = Callable[[Callable[[Any, P2P, P2P], Awaitable[None]]], None]


@pytest.fixture
def ask(daemons: list[P2P]) -> Ask:
    """Plays a scene between one that answers and one that asks."""

    async def play(scene: Callable[[Any, P2P, P2P], Awaitable[None]]) -> None:
        async with handles(daemons[:2]) as (server, caller):
            echo = Echo()
            await echo.add_p2p_handlers(server)
            try:
                stub = Echo.get_stub(caller, server.peer_id)
                await asyncio.wait_for(scene(stub, server, caller), 60.0)
            finally:
                await echo.remove_p2p_handlers(server)

    return lambda scene: asyncio.run(play(scene))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the streams of this process refuse; two of one caller are answered at once."""
    return _counted(monkeypatch, LIMIT_S)


@pytest.fixture
def refused_soon(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Likewise, and messages are waited for half a second."""
    return _counted(monkeypatch, 0.5)


def _counted(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> Counter[str]:
    streams.install()
    counted = Counter[str]()
    opened = OpenStreams(of_stranger=2, limit_s=limit_s)
    opened.refuse = lambda reason: counted.update([reason])
    monkeypatch.setattr(streams, "open_streams", opened)
    return counted


async def _open(caller: P2P, server: PeerID, call: str) -> tuple[Any, Any]:
    _, reader, writer = await caller.call_binary_stream_handler(server, f"Echo.{call}")
    return reader, writer


def _framed(marker: bytes, message: bytes) -> bytes:
    return marker + len(message).to_bytes(8, "big") + message


async def _answers_again(stub: Any) -> bool:
    """Whether a caller that had all its places gets one within the limit."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while asyncio.get_running_loop().time() < deadline:  # the server hears of an end in its time
        if [each async for each in await stub.rpc_tell(request_of({"answers": 1}))]:
            return True
        await asyncio.sleep(0.05)
    return False


def _sockets() -> int:
    """That this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            found += str(each.readlink()).startswith("socket:")
    return found


async def _until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def _ended(reader: Any) -> bool:
    """Whether the other side closes the stream, without a word."""
    return await asyncio.wait_for(reader.read(), LIMIT_S) == b""


def test_honest_calls_are_answered(ask: Ask, refused: Counter[str]) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        async def frames() -> AsyncIterator[runtime_pb2.ExpertRequest]:
            for _ in range(20):
                yield request_of({}, bytes(64 << 10))

        assert facts_of(await stub.rpc_count(frames()))["came"] == 20
        answers = await stub.rpc_tell(request_of({"answers": 30}))
        assert len([each async for each in answers]) == 30

    ask(scene)
    assert not refused


@pytest.mark.parametrize("call", ["rpc_count", "rpc_tell"])
def test_a_message_that_says_it_has_a_terabyte_is_not_waited_for(
    ask: Ask, refused: Counter[str], call: str
) -> None:
    """hivemind would read on as long as bytes come, and hold them."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        for length in (1 << 40, MESSAGE_BYTES + 1):
            reader, writer = await _open(caller, server.peer_id, call)
            writer.write(MESSAGE + length.to_bytes(8, "big") + bytes(1000))
            assert await _ended(reader)

    ask(scene)
    assert refused == {"frame": 2}


@pytest.mark.parametrize("call", ["rpc_count", "rpc_tell"])
def test_a_stream_that_asks_for_nothing_ends(
    ask: Ask, refused_soon: Counter[str], call: str
) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        reader, writer = await _open(caller, server.peer_id, call)
        writer.write(MESSAGE + (100).to_bytes(8, "big"))
        assert await _ended(reader)

    ask(scene)
    assert refused_soon == {"late": 1}


def test_a_request_whose_end_is_cut_off_ends(ask: Ask, refused_soon: Counter[str]) -> None:
    """hivemind calls the handler once the whole end is there."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        reader, writer = await _open(caller, server.peer_id, "rpc_tell")
        writer.write(_framed(MESSAGE, request_of({"answers": 1}).SerializeToString()) + END)
        assert await _ended(reader)

    ask(scene)
    assert refused_soon == {"late": 1}


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_is_followed_by_its_end_and_nothing_else(
    ask: Ask, refused: Counter[str], ends: bool
) -> None:
    """hivemind puts what follows where nobody takes it, and is not done when the handler is."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        for _ in range(2):  # its places
            reader, writer = await _open(caller, server.peer_id, "rpc_tell")
            writer.write(_framed(MESSAGE, request_of({"answers": -1}).SerializeToString()))
            writer.write(_framed(END, b"") if ends else b"")
            writer.write(7 * _framed(MESSAGE, b""))
            await asyncio.wait_for(reader.read(), LIMIT_S)  # answers, until more came
        assert await _answers_again(stub)

    ask(scene)
    assert refused == {"frame": 2}


def test_messages_that_no_handler_takes_end_the_stream(
    ask: Ask, refused_soon: Counter[str]
) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        held = [await _open(caller, server.peer_id, "rpc_leave") for _ in range(2)]
        for _, writer in held:
            writer.write(20 * _framed(MESSAGE, b""))
        for reader, _ in held:
            await asyncio.wait_for(reader.read(), LIMIT_S)
        assert await _answers_again(stub)

    ask(scene)
    assert refused_soon["late"] >= 2


def test_what_follows_the_first_message_is_read_once_its_handler_wants_it(
    refused: Counter[str],
) -> None:
    """A stranger's payload would be held while its group is looked for."""
    came: list[Any] = []

    async def handler(_stream: Any, reader: Any, _writer: Any) -> None:
        receive = P2P.receive_protobuf
        came.append(await receive(runtime_pb2.ExpertRequest, reader))
        second = asyncio.create_task(receive(runtime_pb2.ExpertRequest, reader))
        assert not (await asyncio.wait([second], timeout=0.1))[0]
        accept()
        came.append(await second)

    async def scene() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(2 * _framed(MESSAGE, request_of({}, b"chunk").SerializeToString()))
        bounded = streams.open_streams.bounded(handler, one_message=False)
        await asyncio.wait_for(bounded(Stream(), reader, None), LIMIT_S)

    asyncio.run(scene())
    assert len(came) == 2
    assert not refused


class Stream:
    """What p2pd says of one."""

    def __init__(self, peer_id: str = "somebody"):
        self.peer_id = peer_id


def test_nobody_takes_the_places_of_those_who_have_to_do_with_the_run_nor_all_of_the_others(
    refused: Counter[str],
) -> None:
    """Keys cost nothing: with some of its own one took all places of whoever answers."""
    opened = OpenStreams(of_stranger=2, of_strangers=3)
    opened.refuse = streams.open_streams.refuse
    opened.knows = lambda peer: peer == "member"
    begun, aborted = list[str](), list[bool]()

    async def handler(stream: Any, _reader: Any, _writer: Any) -> None:
        begun.append(stream.peer_id)
        await asyncio.sleep(LIMIT_S)

    async def scene() -> None:
        answered = opened.bounded(handler, one_message=True)
        writer: Any = SimpleNamespace(close=lambda: None, transport=SimpleNamespace())
        writer.transport.abort = lambda: aborted.append(True)
        streams_of: dict[str, list[asyncio.Task[None]]] = {}

        async def opens(peer: str) -> None:
            task = asyncio.create_task(answered(Stream(peer), asyncio.StreamReader(), writer))
            streams_of.setdefault(peer, []).append(task)
            await asyncio.sleep(0.01)

        for peer in ("a", "a", "a", "b", *["member"] * 4):
            await opens(peer)
        assert begun == ["a", "a", "b", *["member"] * 4] and refused == {"often": 1}
        await opens("c")
        await asyncio.wait_for(streams_of["a"][0], LIMIT_S)  # who has most gives way
        assert begun[-1] == "c" and refused == {"often": 2} and aborted
        await opens("d")
        await opens("b")
        assert begun[-1] == "c" and refused == {"often": 4}, "nobody has more than one"
        assert not any(task.done() for task in streams_of["member"])

    asyncio.run(scene())


def test_a_caller_that_reads_nothing_of_what_it_is_told_holds_no_handler(
    ask: Ask, refused_soon: Counter[str]
) -> None:
    """Nor the stream, and what is in it: that was kept for as long as both sides ran."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        before = _sockets()
        reader, writer = await _open(caller, server.peer_id, "rpc_pour")
        reader._limit = 1  # type: ignore[attr-defined] # the rest stays in the daemons
        writer.write(_framed(MESSAGE, request_of({}).SerializeToString()) + END + bytes(8))
        await _until(lambda: bool(refused_soon))
        await _until(lambda: _sockets() <= before + 1)  # the caller's own
        assert await _answers_again(stub)

    ask(scene)
    assert refused_soon == {"late": 1}


def test_a_call_of_ours_that_is_given_up_leaves_nothing_to_who_reads_nothing(
    ask: Ask, refused_soon: Counter[str]
) -> None:
    async def pour() -> AsyncIterator[Any]:
        while True:
            yield request_of({}, bytes(64 << 10))

    async def ignore(stream: Any, reader: Any, writer: Any) -> None:
        reader._limit = 1
        await asyncio.sleep(2 * LIMIT_S)

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        await server.add_binary_stream_handler("ignore", ignore)
        before = _sockets()
        call = caller.call_protobuf_handler(
            server.peer_id, "ignore", pour(), runtime_pb2.ExpertResponse
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 2.0)
        await _until(lambda: _sockets() <= before + 1)  # the other side's own

    ask(scene)


def test_an_answer_to_a_call_of_ours_has_its_length_too(ask: Ask, refused: Counter[str]) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        assert not [each async for each in await stub.rpc_shout(request_of({}))]

        reader = asyncio.StreamReader(limit=2 * LEADER_BYTES)
        tickets = averaging_pb2.MessageFromLeader(gathered=[bytes(4 << 20)])
        reader.feed_data(_framed(MESSAGE, tickets.SerializeToString()))
        told, _ = await P2P.receive_protobuf(averaging_pb2.MessageFromLeader, reader)
        assert told == tickets
        reader.feed_data(MESSAGE + (LEADER_BYTES + 1).to_bytes(8, "big"))
        with pytest.raises(asyncio.IncompleteReadError):
            await P2P.receive_protobuf(averaging_pb2.MessageFromLeader, reader)

    ask(scene)
    assert refused == {"frame": 2}


def test_one_caller_has_so_many_streams_at_once_and_gets_its_places_back(
    ask: Ask, refused: Counter[str]
) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        held = [await _open(caller, server.peer_id, "rpc_count") for _ in range(2)]
        question = request_of({"answers": 1}).SerializeToString()
        for _, writer in held:  # they have asked, and do not end
            writer.write(MESSAGE + len(question).to_bytes(8, "big") + question)
        await asyncio.sleep(0.2)
        third, _ = await _open(caller, server.peer_id, "rpc_count")
        assert await _ended(third)
        assert refused == {"often": 1}
        for _, writer in held:
            writer.close()
        assert await _answers_again(stub)

    ask(scene)


def test_a_handler_whose_caller_has_gone_holds_nothing(ask: Ask, refused: Counter[str]) -> None:
    """Though hivemind keeps its traceback, in a circle, until the collector of circles comes."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        answers = await stub.rpc_hold(request_of({}))
        await anext(answers)
        held = Echo.held
        assert held() is not None
        await answers.aclose()
        await _until(lambda: held() is None)

    gc.collect()
    gc.disable()
    try:
        ask(scene)
    finally:
        gc.enable()
