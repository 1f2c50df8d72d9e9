"""Bounds of hivemind's streams: how long a message may be, by when it has to be there and taken,
and how many streams are open at once. Apart from protocol.py, whose calls are no streams.

hivemind 1.1.12 reads the length of a message and then as many bytes, however many: a stranger could
fill the memory of the peer that answers it, before anything checks its identity. hivemind waits for
ever for a request, for a handler that has ended to take what came after it, and for a caller that
reads nothing of what it is told. A stream that is out of bounds ends, as if the other side had
closed it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2

MESSAGE_BYTES = 192 << 10  # a chunk of 64 KiB, and as much as may be said of it
LEADER_BYTES = 8 << 20  # of the message that has the tickets of a whole group
MESSAGE_LIMIT_S = 30.0  # until the first one is there, until a handler takes one, or a caller
OF_STRANGER, OF_STRANGERS = 32, 256  # streams of one, and of all
OF_KNOWN, OF_ALL_KNOWN = 160, 768  # with rows of two, a reducer of 256 members sends one 128 means
MAX_PEER_ID_BYTES = 64  # libp2p's have 34 to 42
KIND, LENGTH, READS = 0, 1, 3  # of a message: its kind, its length, itself

BinaryHandler = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]


class _Reader:
    """A stream of which nobody reads more at once than a message may have."""

    def __init__(self, reader: Any, most: int, refuse: Callable[[str], object]):
        self._reader = reader
        self._most = most
        self._refuse = refuse

    async def readexactly(self, count: int) -> bytes:
        if count > self._most:
            raise self._out_of_bounds("frame", count)
        return await self._reader.readexactly(count)

    def _out_of_bounds(self, reason: str, count: int) -> Exception:
        """What hivemind takes for the end of the stream."""
        self._refuse(reason)
        return asyncio.IncompleteReadError(b"", count)


class _Request(_Reader):
    """What somebody sends with a call that this process answers, in the task that was made for it.

    one_message: whether that, and nothing but the end after it. Else what follows the first one is
    read once its handler has said `accept`. refuse: counts what is out of bounds.
    """

    def __init__(
        self, reader: Any, *, one_message: bool, limit_s: float, refuse: Callable[[str], object]
    ):
        super().__init__(reader, MESSAGE_BYTES, refuse)
        self.accepted = asyncio.Event()
        self.over = False
        self.ended = False  # by this process, before its handler was done
        self._one_message = one_message
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._task = asyncio.current_task()
        self._untaken: asyncio.TimerHandle | None = None
        self._messages, self._at = 0, KIND
        self._whole = False  # its end has come

    async def readexactly(self, count: int) -> bytes:
        """Of hivemind, which reads on when a handler has room for a message."""
        self.taken()
        if self._at == LENGTH and self._messages and not self._whole:
            await self.accepted.wait()
        nothing_due = not self._one_message or (self._whole and self._at == KIND)
        if self._messages and nothing_due:
            found = await super().readexactly(count)
        else:
            left_s = max(0.0, self._until - time.monotonic())
            try:
                found = await asyncio.wait_for(super().readexactly(count), left_s)
            except asyncio.TimeoutError:
                raise self._out_of_bounds("late", count) from None
        if self._at == KIND:
            is_end = found == P2P.ERROR_MARKER
            if self._whole or (self._messages and self._one_message and not is_end):
                raise self._out_of_bounds("frame", count)
            self._whole = is_end
        self._at = (self._at + 1) % READS
        if self._at == KIND:
            self._messages += 1
            if not self.over:
                loop = asyncio.get_running_loop()
                self._untaken = loop.call_later(self._limit_s, self.end, "late")
        return found

    def taken(self) -> None:
        """What was read is with its handler."""
        if self._untaken is not None:
            self._untaken.cancel()

    @contextmanager
    def being_answered(self) -> Generator[None]:
        """While its caller takes one of several answers, which it may never do."""
        timer = asyncio.get_running_loop().call_later(self._limit_s, self.end, "late")
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Its handler is done; hivemind may still wait for a message until the stream closes."""
        self.over = True
        self.taken()
        self.accepted.set()

    def end(self, reason: str) -> None:
        self.ended = True
        self._refuse(reason)
        if self._task is not None:
            self._task.cancel()


_answered: ContextVar[_Request] = ContextVar("answered")


def accept() -> None:
    """For a handler, of the call that it answers: what follows the first message may come."""
    if request := _answered.get(None):
        request.accepted.set()


class _Writer:
    """What a call of ours writes into; once it is closed what the other side does not read is
    dropped after a while, or it would be kept, with the stream, for as long as both run.
    """

    def __init__(self, writer: Any, limit_s: float):
        self._writer = writer
        self._limit_s = limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def close(self) -> None:
        self._writer.close()
        transport = self._writer.transport
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(self._limit_s, transport.abort)


class _Places:
    """For streams that are answered, at most so many of one peer and of all."""

    def __init__(self, of_one: int, of_all: int):
        self._of_one = of_one
        self._of_all = of_all
        self._held: dict[str, list[_Request]] = {}

    def take(self, peer: str, request: _Request) -> bool:
        """Whether there is a place. Where all are taken, the oldest stream of the peer that has
        most ends for one that has fewer.
        """
        mine = self._held.get(peer, [])
        if len(mine) >= self._of_one:
            return False
        if sum(map(len, self._held.values())) >= self._of_all:
            most = max(self._held, key=lambda name: len(self._held[name]))
            if len(self._held[most]) <= len(mine) + 1:
                return False
            longest = self._held[most][0]
            longest.end("often")
            self.leave(most, longest)
        self._held.setdefault(peer, []).append(request)
        return True

    def leave(self, peer: str, request: _Request) -> None:
        """Twice does no harm."""
        left = [each for each in self._held.get(peer, []) if each is not request]
        if left:
            self._held[peer] = left
        else:
            self._held.pop(peer, None)


class OpenStreams:
    """The streams that a process answers, by the peer that opened them.

    refuse: counts what is out of bounds, by one of `REFUSALS` (rpc.py). knows: whether a peer has
    something to do with the run; the others, whose keys cost nothing, have places of their own. The
    process sets both.
    """

    def __init__(
        self,
        of_stranger: int = OF_STRANGER,
        of_strangers: int = OF_STRANGERS,
        limit_s: float = MESSAGE_LIMIT_S,
    ):
        self._strangers = _Places(of_stranger, of_strangers)
        self._known = _Places(OF_KNOWN, OF_ALL_KNOWN)
        self.limit_s = limit_s
        self.refuse: Callable[[str], object] = lambda reason: None
        self.knows: Callable[[str], bool] = lambda peer: False

    def bounded(self, handler: BinaryHandler, *, one_message: bool) -> BinaryHandler:
        """hivemind's handler of a call's streams; `one_message`: see `_Request`."""

        async def answer(stream: Any, reader: Any, writer: Any) -> None:
            peer = str(stream.peer_id)
            places = self._known if self.knows(peer) else self._strangers
            request = _Request(
                reader, one_message=one_message, limit_s=self.limit_s, refuse=self.refuse
            )
            if not places.take(peer, request):
                self.refuse("often")
                writer.close()
                return
            _answered.set(request)
            try:
                await handler(stream, request, writer)
            except asyncio.CancelledError:
                if not request.ended:
                    raise
                writer.transport.abort()  # or it keeps what the other side does not read
            finally:
                request.close()
                places.leave(peer, request)

        return answer


def _forgetful(handler: Callable[[Any, Any], Any], *, answers: bool) -> Callable[[Any, Any], Any]:
    """A handler that holds nothing once its caller has gone. answers: whether it gives several.

    hivemind cancels it then, in a circle with the traceback of that, and the collector of circles
    comes by the number of objects, not by their size: of a mean or a record there is one a round.
    """

    @contextmanager
    def forgetting() -> Generator[None]:
        try:
            yield
        except asyncio.CancelledError as error:
            traceback.clear_frames(error.__traceback__)
            raise

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        with forgetting():
            async with aclosing(handler(request, context)) as answers:
                async for answer in answers:
                    asked = _answered.get(None)
                    with asked.being_answered() if asked else nullcontext():
                        yield answer

    async def call(request: Any, context: Any) -> Any:
        with forgetting():
            return await handler(request, context)

    return stream if answers else call


def _looked_at(task: asyncio.Task[Any]) -> None:
    """A fault that nobody looks at would be written to standard error."""
    if not task.cancelled():
        task.exception()


open_streams = OpenStreams()
"""Of this process. What is forked from it has its own."""


def install() -> None:
    """Bound the streams of this process and of those forked from it; twice does no harm."""
    if getattr(P2P.receive_protobuf, "bounds", False):
        return
    receive = P2P.receive_protobuf
    add_call, add_stream = P2P.add_protobuf_handler, P2P.add_binary_stream_handler
    open_stream = P2P.call_binary_stream_handler
    one_message: dict[str, bool] = {}  # of hivemind's calls whose streams are answered

    async def receive_bounded(kind: Any, reader: Any) -> Any:
        if not isinstance(reader, _Request):  # an answer to a call of ours
            is_leader = kind is averaging_pb2.MessageFromLeader
            most = LEADER_BYTES if is_leader else MESSAGE_BYTES
            reader = _Reader(reader, most, open_streams.refuse)
        elif (task := asyncio.current_task()) is not None:
            # hivemind gives each message a task, and does not look at that once it has answered
            task.add_done_callback(_looked_at)
        return await receive(kind, reader)  # pyright: ignore[reportArgumentType]

    async def add_call_bounded(
        self: Any, name: str, handler: Any, *arguments: Any, **named: Any
    ) -> None:
        one_message[name] = not named.get("stream_input", False)
        handler = _forgetful(handler, answers=named.get("stream_output", False))
        await add_call(self, name, handler, *arguments, **named)

    async def open_bounded(self: Any, peer_id: PeerID, name: str) -> tuple[Any, Any, Any]:
        at, reader, writer = await open_stream(self, peer_id, name)
        return at, reader, _Writer(writer, open_streams.limit_s)

    async def add_stream_bounded(self: Any, name: str, handler: Any, **named: Any) -> None:
        if name in one_message:  # the pipeline's bounds itself
            handler = open_streams.bounded(handler, one_message=one_message[name])
        await add_stream(self, name, handler, **named)

    peer_id: Any = PeerID
    make_id = peer_id.__init__

    def make_bounded(self: PeerID, peer_id_bytes: bytes) -> None:
        if len(peer_id_bytes) > MAX_PEER_ID_BYTES:  # its text takes time with the square of that
            raise ValueError(f"{len(peer_id_bytes)} bytes are no peer id")
        make_id(self, peer_id_bytes)

    peer_id.__init__ = make_bounded
    receive_bounded.bounds = True  # pyright: ignore[reportFunctionMemberAccess]
    P2P.receive_protobuf = staticmethod(receive_bounded)
    P2P.add_protobuf_handler = add_call_bounded
    P2P.add_binary_stream_handler = add_stream_bounded
    P2P.call_binary_stream_handler = open_bounded
