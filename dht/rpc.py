"""How peers of a stage call each other: frames, and the client that sends them.

All calls are hivemind P2P calls in the averager's namespace. A frame's metadata is msgpack, its
bulk comes in chunks. Whatever goes wrong on the way becomes a ConnectionError: p2pd, hivemind and
asyncio have a dozen names for a peer that is gone, and none of them is a fault of ours.

`Counts` are moved by one process and read by the trainer's: bytes, refusals. `RequestLimit` is how
often one peer may ask. `LoopThread` is for a process that does other work than calling peers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Generator,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from hivemind.p2p import P2P, P2PDaemonError, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dilocox.dht.errors import DilocoxError, EnvironmentFault, in_one_line, reason_of
from dilocox.dht.node_process import shared_zeros
from dilocox.dht.upload_limit import CHUNK_BYTES, UploadLimit
from dilocox.dht.wire import Malformed, pack, unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")

BYTE_KINDS = ("averaging", "record", "state")
"""What payload bytes are for: exchanges, or records and states for peers that were not in them."""
REFUSALS = (
    "frame",
    "group",
    "share",
    "payload",
    "late",
    "vote",
    "question",
    "record",
    "admission",
    "ticket",
    "often",
)
"""Why the averaging process refuses what another peer sent."""
NODE_REFUSALS = (
    "size",
    "malformed",
    "signature",
    "expiry",
    "key",
    "run",
    "owner",
    "type",
    "manifest",
    "crowded",
    "full",
    "question",
    "often",
)
"""Why the DHT node refuses, or keeps no longer, what another peer wants stored, its question, or
its answer ("size")."""

_KINDS = {
    "record": "record",
    "certificate": "record",
    "history": "record",
    "tokenizer": "record",
    "state": "state",
}


class Counts:
    """Integers by name. Only one process may add."""

    def __init__(self, names: Sequence[str], *, shared: bool = False):
        """shared: with the processes that are forked after this."""
        self._places = {name: place for place, name in enumerate(names)}
        zeros = shared_zeros if shared else torch.zeros
        self._counts = zeros(len(names), dtype=torch.int64)

    def add(self, name: str, count: int = 1) -> None:
        """Count so many more; KeyError for a name that was not given at the start."""
        self._counts[self._places[name]] += count

    def read(self) -> dict[str, int]:
        return {name: int(self._counts[place]) for name, place in self._places.items()}

    @property
    def total(self) -> int:
        return int(self._counts.sum())


# By benchmarks/dht_traffic.py a peer asks one node at most 8 times in 10 s in swarms of 8 to 200,
# and 589 times where the heartbeat is the shortest that a manifest may have, 0.1 s. Not in it are
# matchmaking's searches, a few a second for some seconds, looks for a record that is missing before
# a group, one a second at most, and those of a start. Of the calls of an exchange one member gets a
# few tens at most from each of the others.
ASKED_BY_ONE, ASKED_WITHIN_S = 1000, 10.0
MAX_ASKERS = 4096  # that are told apart


class RequestLimit:
    """So many requests of one asker in a while, counted anew from while to while.

    Keys cost nothing: this bounds what one peer can take, not what a crowd of keys can. Nor can
    that fill memory: where too many ask in one while, it ends early.
    """

    def __init__(self, most: int = ASKED_BY_ONE, within_s: float = ASKED_WITHIN_S):
        self._most = most
        self._within_s = within_s
        self._since = 0.0
        self._asked: Counter[str] = Counter()

    def check(self, asker: str, count: int = 1) -> None:
        """Count a request of this peer id, one that is as much work as `count` others; raises
        CallRefused (often) for one too many.
        """
        now = time.monotonic()
        crowd = len(self._asked) >= MAX_ASKERS and asker not in self._asked
        if crowd or now - self._since > self._within_s:
            self._asked.clear()
            self._since = now
        self._asked[asker] += count
        if self._asked[asker] > self._most:
            raise CallRefused(
                f"asked too often: {self._most} times in {self._within_s:g} s are answered", "often"
            )


SILENCE_S = 40.0  # what was asked stood 27 s behind an upload of 40 kB/s


class Silence:
    """Since when peers have not answered, each over a connection that may hang for long after what
    cut it is over. Given up too soon it takes along all that is under way on a slow one.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether anybody is silent."""
        return bool(self._since)

    def asked(self, peer: str) -> None:
        """It was asked something; the first time since it answered counts."""
        self._since.setdefault(peer, time.monotonic())

    def ended(self, peer: str) -> None:
        """It has answered."""
        self._since.pop(peer, None)

    def only(self, peers: Container[str]) -> None:
        """The others are not asked any more."""
        self._since = {peer: since for peer, since in self._since.items() if peer in peers}

    def too_long(self, peer: str) -> bool:
        """Whether the connection is to be given up; if so it is counted anew."""
        now = time.monotonic()
        long = now - self._since.get(peer, math.inf) >= SILENCE_S
        if long:
            self._since[peer] = now
        return long


def byte_kind(what: object) -> str:
    return _KINDS.get(str(what), "averaging")


STALL_S = 30.0  # a download in which nothing comes for so long has failed
PACE_OVER_S = 60.0
MAX_METADATA_BYTES = 64 * 1024
START_LIMIT_S, CLOSE_LIMIT_S = 10.0, 3.0  # of a thread
MARGIN_S = 1.0  # for a thread that is busy


_NOT_SERVED = re.compile(r"protocols? not supported")


def handler_name(namespace: str, method: str) -> str:
    """What p2pd knows a handler by, of whichever class it is."""
    return f"{namespace}::stage.{method}"


class CallRefused(ValueError):
    """What a peer sent in a call, its request or its answer, is not as it must be; `kind` is one
    word for the metric."""

    def __init__(self, reason: str, kind: str = "question"):
        super().__init__(reason)
        self.kind = kind


class TooSlow(ConnectionError):
    """The peer gives what was asked for, but another one may give it much sooner."""


class PeerBusy(ConnectionError):
    """The peer serves others, as many as it can at once: another may have time."""


def refusal_kind(error: Exception) -> str:
    """What a question that is not answered is counted as."""
    return error.kind if isinstance(error, CallRefused) else "question"


REFUSED = (ConnectionError, ValueError, asyncio.TimeoutError)
"""What is wrong with a peer that was asked, or with the way to it."""


@dataclass(frozen=True)
class Blob:
    """Something fetched from a peer, with what it said about it."""

    facts: dict[str, Any]
    data: bytes


def request_of(facts: dict[str, Any], chunk: bytes = b"") -> runtime_pb2.ExpertRequest:
    return runtime_pb2.ExpertRequest(metadata=pack(facts), tensors=_tensors(chunk))


def answer_of(facts: dict[str, Any], chunk: bytes = b"") -> runtime_pb2.ExpertResponse:
    return runtime_pb2.ExpertResponse(metadata=pack(facts), tensors=_tensors(chunk))


def facts_of(frame: Any) -> dict[str, Any]:
    """The metadata of a frame; CallRefused if it is no map or too large."""
    try:
        facts = unpack(frame.metadata, MAX_METADATA_BYTES, max_items=MAX_METADATA_BYTES)
    except Malformed as error:
        raise CallRefused(f"metadata: {error}") from error
    if not isinstance(facts, dict):
        raise CallRefused("metadata is not a map")
    return cast("dict[str, Any]", facts)


def chunk_of(frame: Any) -> bytes:
    return b"".join(tensor.buffer for tensor in frame.tensors)


def _tensors(chunk: bytes) -> list[runtime_pb2.Tensor]:
    return [runtime_pb2.Tensor(buffer=chunk)] if chunk else []


class StageServicer(ServicerBase):
    """Calls that are answered to the peers of a stage, under the names that `Client` calls."""

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return handler_name(namespace or "", method_name)


class Client:
    """Calls to the peers of a stage, whose handlers have the namespace of run and stage."""

    def __init__(
        self,
        *,
        p2p: P2P,
        namespace: str,
        record_bytes: int,
        limit: UploadLimit | None = None,
        sent: Counts | None = None,
        received: Counts | None = None,
    ):
        """record_bytes: the most that a record of this stage, or a mean in it, may have. limit: of
        what is pushed; a client that only asks has none.
        `sent`, `received`: where payload bytes are counted, by kind.
        """
        self._p2p = p2p
        self._namespace = namespace
        self._limit = limit or UploadLimit(None)
        self.record_bytes = record_bytes
        self._sent = sent or Counts(BYTE_KINDS)
        self._received = received or Counts(BYTE_KINDS)

    async def call(self, peer: str, method: str, request: Any) -> Any:
        """A handler's answer, a frame; `request` is a frame or yields them."""
        with _reached(peer):
            name = handler_name(self._namespace, method)
            return await self._p2p.call_protobuf_handler(
                PeerID.from_base58(peer), name, request, runtime_pb2.ExpertResponse
            )

    async def stream(self, peer: str, method: str, request: Any) -> AsyncIterator[Any]:
        """The frames of a handler that answers with several."""
        with _reached(peer):
            name = handler_name(self._namespace, method)
            frames = await self._p2p.iterate_protobuf_handler(
                PeerID.from_base58(peer), name, request, runtime_pb2.ExpertResponse
            )
        while True:
            with _reached(peer):
                frame = await anext(frames)
            yield frame

    async def push(self, peer: str, facts: dict[str, Any], payload: bytes) -> None:
        """Send something of an exchange; ConnectionError if the peer refuses it."""

        async def frames() -> AsyncIterator[runtime_pb2.ExpertRequest]:
            yield request_of(facts | {"bytes": len(payload)})
            for start in range(0, len(payload), CHUNK_BYTES):
                chunk = payload[start : start + CHUNK_BYTES]
                await self._limit.spend(len(chunk), first=True)
                self._sent.add("averaging", len(chunk))
                yield request_of({}, chunk)

        # also when the round is decided already: a slow member still needs what it lacks
        with self._limit.pushing(len(payload)):
            answer = facts_of(await self.call(peer, "rpc_put", frames()))
        if refused := answer.get("refused"):
            raise ConnectionError(f"{peer} refused a {facts['kind']}: {refused}")

    async def fetch(
        self,
        peer: str,
        want: dict[str, Any],
        *,
        limit_bytes: int,
        sink: Callable[[bytes], None] | None = None,
        least_bytes_per_s: float = 0.0,
        stall_s: float = STALL_S,
    ) -> Blob | None:
        """Download something; None if the peer does not have it. PeerBusy: it cannot serve it now.
        TooSlow: it gave less than `least_bytes_per_s` for a minute. A peer that gives nothing for
        `stall_s` has failed (TimeoutError).

        `sink` gets the chunks as they come (then `data` is empty); the size that the peer states is
        checked against `limit_bytes` before the first chunk is taken.
        """
        with _reached(peer):
            stream = self.stream(peer, "rpc_get", request_of(want))
            facts = facts_of(await asyncio.wait_for(anext(stream), stall_s))
            if busy := facts.get("busy"):
                raise PeerBusy(f"{peer} is busy: {str(busy)[:200]}")
            size = facts.get("bytes")
            if size is None:
                return None
            if not isinstance(size, int) or not 0 <= size <= limit_bytes:
                raise CallRefused(
                    f"{peer} wants to send {size} bytes, at most {limit_bytes} are due"
                )
            chunks: list[bytes] = []
            taken, kind = 0, byte_kind(want.get("what"))
            since, before = time.monotonic(), 0
            while taken < size:
                chunk = chunk_of(await asyncio.wait_for(anext(stream), stall_s))
                taken += len(chunk)
                self._received.add(kind, len(chunk))
                if not chunk or taken > size:
                    raise CallRefused(f"{peer} sent {taken} bytes of {size}")
                (sink or chunks.append)(chunk)
                if (waited_s := time.monotonic() - since) >= PACE_OVER_S:
                    if taken - before < least_bytes_per_s * waited_s:
                        raise TooSlow(f"{peer} gave {(taken - before) / waited_s:.0f} bytes/s")
                    since, before = time.monotonic(), taken
            return Blob(facts=facts, data=b"".join(chunks))


class LoopThread:
    """A thread with an event loop, and perhaps a handle of its own to this node's p2pd.

    name: what it is called in errors. p2p: makes the handle, which is `p2p` until the thread ends.
    begin: runs once the handle is there; `start` waits for it. end: runs before the handle goes,
    also where `begin` failed.
    """

    def __init__(
        self,
        name: str,
        *,
        p2p: Callable[[], Awaitable[Any]] | None = None,
        begin: Callable[[], Awaitable[object]] | None = None,
        end: Callable[[], Awaitable[object]] | None = None,
    ):
        self.loop = asyncio.new_event_loop()
        self.p2p: Any = None
        self._name = name
        self._replicate = p2p
        self._begin = begin
        self._end = end
        self._start_limit_s = 0.0
        self._stop = asyncio.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self, limit_s: float = START_LIMIT_S) -> None:
        """Begin. Raises the DilocoxError that `begin` raises; EnvironmentFault for another failure,
        or where it takes longer.
        """
        try:
            if self._thread.ident is not None or self.loop.is_closed():
                raise ConnectionError("it has ended before")
            self._start_limit_s = limit_s
            self._thread.start()
            self._started.result(limit_s + MARGIN_S)
        except Exception as error:
            self.close()
            if isinstance(error, DilocoxError):  # it names its own remedy
                raise
            reason = reason_of(error)
            raise EnvironmentFault(
                f"the {self._name} thread did not start within {limit_s:.0f} s ({reason}): is this "
                "machine overloaded?"
            ) from error

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """End the thread; twice, or before its start, does no harm."""
        if self._thread.ident is None:
            self.loop.close()
            return
        self.post(self._stop.set)
        self._thread.join(limit_s)
        if self.running:
            logger.warning("the %s thread did not end within %.0f s", self._name, limit_s)

    def post(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread; nothing happens once that has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(act, *arguments)

    def ask(self, question: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine in the thread and wait for its result.

        Raises ConnectionError if it takes longer or the thread ends, and what the coroutine raises.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(question, self.loop)
        except RuntimeError as error:
            question.close()
            raise ConnectionError(f"the {self._name} thread has ended") from error
        try:
            return future.result(limit_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise ConnectionError(f"the {self._name} thread is busy or has ended") from error

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._live())
        except Exception:
            logger.exception("the %s thread failed", self._name)
        finally:
            self.loop.close()

    async def _live(self) -> None:
        try:
            await asyncio.wait_for(self._open(), self._start_limit_s)
            self._started.set_result(None)
            await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self._started.set_exception(error)
        finally:
            try:
                if self._end is not None:
                    await self._end()
            except Exception:  # the handle and the tasks must go all the same
                logger.exception("the end of the %s thread failed", self._name)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=CLOSE_LIMIT_S)
            if self.p2p is not None:
                with suppress(Exception):  # p2pd may be gone
                    await asyncio.wait_for(self.p2p.shutdown(), CLOSE_LIMIT_S)

    async def _open(self) -> None:
        if self._replicate is not None:
            self.p2p = await self._replicate()
        if self._begin is not None:
            await self._begin()


@contextmanager
def _reached(peer: str) -> Generator[None]:
    try:
        yield
    except (asyncio.TimeoutError, ConnectionError, DilocoxError):
        raise
    except Exception as error:
        logger.debug("%s: %r", peer, error)
        raise ConnectionError(f"{peer} {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    reason = in_one_line(error)
    if isinstance(error, P2PDaemonError) and _NOT_SERVED.search(reason):
        return "does not answer for this stage"
    if isinstance(error, P2PDaemonError):  # with a long list of addresses
        return "cannot be reached"
    if isinstance(error, (EOFError, StopAsyncIteration)):
        return "broke off"
    return f"failed: {type(error).__name__}: {reason}"
