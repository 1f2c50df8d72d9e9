"""Streams of strangers, over real p2pd on loopback: what they send without end is not held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows this one only

import pytest
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dilocox.dht import streams
from dilocox.dht.rpc import pack, reply, unpack
from dilocox.dht.streams import FIRST_MESSAGE_S, MESSAGE_BYTES, OpenStreams

LIMIT_S = 20.0
MESSAGE, END = b"\x00", b"\x01"  # hivemind's markers


class Echo(ServicerBase):
    """A call of each kind of stream."""

    async def rpc_count(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """How many messages came."""
        return reply({"came": len([each async for each in request])})

    async def rpc_tell(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """So many answers as are asked for; without end for -1."""
        left = unpack(request)["answers"]
        while left:
            left -= 1
            yield reply({})
            await asyncio.sleep(0.01)


async def _asked(scene: Callable[[Any, P2P, P2P], Awaitable[None]]) -> None:
    server = await P2P.create(nat_port_map=False, startup_timeout=60)
    caller = await P2P.create(
        initial_peers=await server.get_visible_maddrs(),
        nat_port_map=False,
        startup_timeout=60,
        dht_mode="client",
    )
    try:
        await Echo().add_p2p_handlers(server)
        await asyncio.wait_for(scene(Echo.get_stub(caller, server.peer_id), server, caller), 60.0)
    finally:
        await caller.shutdown()
        await server.shutdown()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the streams of this process refuse; two of one caller are answered at once, and their
    first message is waited for half a second.
    """
    streams.install()
    counted = Counter[str]()
    opened = OpenStreams(of_one=2, first_message_s=0.5)
    opened.refuse = lambda reason: counted.update([reason])
    monkeypatch.setattr(streams, "streams", opened)
    return counted


async def _open(caller: P2P, server: PeerID, call: str) -> tuple[Any, Any]:
    _, reader, writer = await caller.call_binary_stream_handler(server, f"Echo.{call}")
    return reader, writer


async def _ended(reader: Any) -> bool:
    """Whether the other side closes the stream, without a word."""
    return await asyncio.wait_for(reader.read(), LIMIT_S) == b""


def test_honest_calls_are_answered(refused: Counter[str]) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        async def frames() -> AsyncIterator[runtime_pb2.ExpertRequest]:
            for _ in range(20):
                yield pack({}, bytes(64 << 10))

        assert unpack(await stub.rpc_count(frames()))["came"] == 20
        answers = await stub.rpc_tell(pack({"answers": 30}))
        assert len([each async for each in answers]) == 30

    asyncio.run(_asked(scene))
    assert not refused


@pytest.mark.parametrize("call", ["rpc_count", "rpc_tell"])
def test_a_message_that_says_it_has_a_terabyte_is_not_waited_for(
    refused: Counter[str], call: str
) -> None:
    """hivemind would read on as long as bytes come, and hold them."""

    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        for length in (1 << 40, MESSAGE_BYTES + 1):
            reader, writer = await _open(caller, server.peer_id, call)
            writer.write(MESSAGE + length.to_bytes(8, "big") + bytes(1000))
            assert await _ended(reader)

    asyncio.run(_asked(scene))
    assert refused == {"frame": 2}


@pytest.mark.parametrize("call", ["rpc_count", "rpc_tell"])
def test_a_stream_that_asks_for_nothing_ends(refused: Counter[str], call: str) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        reader, writer = await _open(caller, server.peer_id, call)
        writer.write(MESSAGE + (100).to_bytes(8, "big"))
        assert await _ended(reader)

    asyncio.run(_asked(scene))
    assert refused == {"late": 1}
    assert FIRST_MESSAGE_S <= 60.0


def test_one_request_is_followed_by_nothing_long(refused: Counter[str]) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        reader, writer = await _open(caller, server.peer_id, "rpc_tell")
        asked = pack({"answers": -1}).SerializeToString()
        for marker, message in ((MESSAGE, asked), (END, b""), (MESSAGE, bytes(2000))):
            writer.write(marker + len(message).to_bytes(8, "big") + message)
        await asyncio.wait_for(reader.read(), LIMIT_S)  # answers, until the long one came

    asyncio.run(_asked(scene))
    assert refused == {"frame": 1}


def test_one_caller_has_so_many_streams_at_once_and_gets_its_places_back(
    refused: Counter[str],
) -> None:
    async def scene(stub: Any, server: P2P, caller: P2P) -> None:
        held = [await _open(caller, server.peer_id, "rpc_count") for _ in range(2)]
        question = pack({"answers": 1}).SerializeToString()
        for _, writer in held:  # they have asked, and do not end
            writer.write(MESSAGE + len(question).to_bytes(8, "big") + question)
        await asyncio.sleep(0.2)
        third, _ = await _open(caller, server.peer_id, "rpc_count")
        assert await _ended(third)
        assert refused == {"often": 1}
        for _, writer in held:
            writer.close()
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while asyncio.get_running_loop().time() < deadline:  # the server hears of it in its time
            answers = [each async for each in await stub.rpc_tell(pack({"answers": 1}))]
            if answers:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the places of closed streams are not free again")

    asyncio.run(_asked(scene))
