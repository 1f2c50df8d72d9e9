"""Bounds of hivemind's streams: how long a message may be, by when the first one has to be there,
and how many are open at once. Apart from protocol.py, whose calls are no streams.

hivemind 1.1.12 reads the length of a message and then as many bytes, however many: a stranger could
fill the memory of whoever answers it, before anything asks who it is. And it waits for a request
for ever. A stream that is out of bounds ends, as if the other side had closed it. What comes in it
after the first message is the handler's to bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2

MESSAGE_BYTES = 192 << 10  # a chunk of 64 KiB, and as much as may be said of it
LEADER_BYTES = 8 << 20  # of the message that has the tickets of a whole group
AFTER_BYTES = 1 << 10  # of any after the one request of a call
FIRST_MESSAGE_S = 30.0
STREAMS_OF_ONE = 32  # of one exchange a member has a few: parts, means, a heartbeat
STREAMS_OF_ALL = 1024
READS = 3  # of a message: its kind, its length, itself

BinaryHandler = Callable[[Any, Any, Any], Awaitable[None]]


class _Bounded:
    """A stream in which nobody reads more at once than a message may have.

    due: so many reads have to end within `limit_s`, and what follows them has `after` bytes at
    most, if that is not 0. refuse: counts what is out of bounds.
    """

    def __init__(
        self,
        reader: Any,
        most: int,
        *,
        due: int = 0,
        limit_s: float = FIRST_MESSAGE_S,
        after: int = 0,
        refuse: Callable[[str], object] = lambda reason: None,
    ):
        self._reader = reader
        self._most = most
        self._due = due
        self._until = time.monotonic() + limit_s
        self._after = after
        self._refuse = refuse

    async def readexactly(self, count: int) -> bytes:
        if count > self._most:
            raise self._ended("frame", count)
        if self._due == 0:
            return await self._reader.readexactly(count)
        try:
            left_s = max(0.0, self._until - time.monotonic())
            found: bytes = await asyncio.wait_for(self._reader.readexactly(count), left_s)
        except asyncio.TimeoutError:
            raise self._ended("late", count) from None
        self._due -= 1
        if self._due == 0 and self._after:
            self._most = self._after
        return found

    def _ended(self, reason: str, count: int) -> Exception:
        """What hivemind takes for the end of the stream."""
        self._refuse(reason)
        return asyncio.IncompleteReadError(b"", count)


class OpenStreams:
    """The streams that a process answers, by who opened them.

    refuse: counts what is out of bounds, by one of `REFUSALS` (rpc.py); the process sets it.
    """

    def __init__(
        self,
        of_one: int = STREAMS_OF_ONE,
        of_all: int = STREAMS_OF_ALL,
        first_message_s: float = FIRST_MESSAGE_S,
    ):
        self._of_one = of_one
        self._of_all = of_all
        self._first_message_s = first_message_s
        self._open: Counter[str] = Counter()
        self.refuse: Callable[[str], object] = lambda reason: None

    @contextmanager
    def place(self, peer: str) -> Generator[bool]:
        """A place while it lasts; False where there is none."""
        if self._open[peer] >= self._of_one or self._open.total() >= self._of_all:
            self.refuse("often")
            yield False
            return
        self._open[peer] += 1
        try:
            yield True
        finally:
            self._open[peer] -= 1
            if self._open[peer] == 0:
                del self._open[peer]

    def bounded(self, handler: BinaryHandler, *, one_request: bool) -> BinaryHandler:
        """hivemind's handler of a call's streams.

        one_request: whether the call has one, after which comes its end and nothing else.
        """
        due, after = (2 * READS, AFTER_BYTES) if one_request else (READS, 0)

        async def answer(stream: Any, reader: Any, writer: Any) -> None:
            with self.place(str(stream.peer_id)) as placed:
                if not placed:
                    writer.close()
                    return
                bounded = _Bounded(
                    reader,
                    MESSAGE_BYTES,
                    due=due,
                    limit_s=self._first_message_s,
                    after=after,
                    refuse=self.refuse,
                )
                await handler(stream, bounded, writer)

        return answer


def _looked_at(task: asyncio.Task[Any]) -> None:
    """A fault that nobody looks at would be written to standard error."""
    if not task.cancelled():
        task.exception()


streams = OpenStreams()
"""Of this process. What is forked from it has its own."""


def install() -> None:
    """Bound the streams of this process and of those forked from it; twice does no harm."""
    if getattr(P2P.receive_protobuf, "bounds", False):
        return
    receive = P2P.receive_protobuf
    add_call, add_stream = P2P.add_protobuf_handler, P2P.add_binary_stream_handler
    one_request: dict[str, bool] = {}  # of hivemind's calls whose streams are answered

    async def receive_bounded(kind: Any, reader: Any) -> Any:
        if not isinstance(reader, _Bounded):  # an answer to a call of ours
            is_leader = kind is averaging_pb2.MessageFromLeader
            reader = _Bounded(reader, LEADER_BYTES if is_leader else MESSAGE_BYTES)
        elif (task := asyncio.current_task()) is not None:
            # hivemind gives each message a task, and does not look at that once it has answered
            task.add_done_callback(_looked_at)
        return await receive(kind, reader)  # pyright: ignore[reportArgumentType]

    async def add_call_bounded(self: Any, name: str, *arguments: Any, **named: Any) -> None:
        one_request[name] = not named.get("stream_input", False)
        await add_call(self, name, *arguments, **named)

    async def add_stream_bounded(self: Any, name: str, handler: Any, **named: Any) -> None:
        if name in one_request:  # the pipeline's bounds itself
            handler = streams.bounded(handler, one_request=one_request[name])
        await add_stream(self, name, handler, **named)

    receive_bounded.bounds = True  # pyright: ignore[reportFunctionMemberAccess]
    P2P.receive_protobuf = staticmethod(receive_bounded)
    P2P.add_protobuf_handler = add_call_bounded
    P2P.add_binary_stream_handler = add_stream_bounded
