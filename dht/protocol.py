"""What DHT nodes of a run ask each other: hivemind's calls, bounded, and two cheaper ones.

hivemind's search asks up to twenty nodes near a key, and each answers with all values under it,
also where the search is only for the nodes that a new value goes to. With a record of every peer
under one key that is traffic with the square of the swarm. Here `rpc_nearest` answers with nodes
alone, and `rpc_news` with those values that the asker does not know yet: as many as an answer may
have, first those of owners that have been here for longest, so that a crowd of new keys is heard
after everybody else.

hivemind answers any number of keys in one call. A key repeated 1,504 times made an answer that its
client of p2pd refuses to send, in a way that keeps it in memory for good; so answers are bounded
here, and `free_failed_answers` repairs the client for all calls, as `pass_over_late_answers` does
for calls that are given up. So is how often one peer is answered.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from hivemind.dht import node as hivemind_node
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import dht_pb2, p2pd_pb2

from dilocox.dht.rpc import NODE_REFUSALS, Counts, RequestLimit, refusal_kind
from dilocox.dht.storage import BoundedStorage
from dilocox.dht.streams import MAX_PEER_ID_BYTES
from dilocox.dht.wire import MAX_ITEMS, Malformed, pack, unpack

logger = logging.getLogger(__name__)

MAX_KEYS = 64  # distinct ones in one question
MAX_VALUES = 256  # to be stored with one call
VALUES_OF_REQUEST = 8  # that count as one more call of `RequestLimit`
# What does not fit is asked for again. A swarm of a thousand has less news between two looks than a
# quarter of a MiB, and a crowd that writes without end costs no more than that.
MAX_ANSWER_BYTES = 256 << 10
LEAST_SHARE_BYTES = 8 << 10  # of an answer, for one key: more than the longest record has
MAX_NEWS = MAX_ITEMS // 2  # values under one key in one answer
NEAREST = 5  # nodes told for a key: so many keep its values
MARK_BYTES = 4  # by which an asker says that it knows a value
KEY_BYTES = DHTID.HASH_NBYTES
ENTRY_BYTES = 64  # of a value's subkey and expiry in an answer


@dataclass(frozen=True)
class Entry:
    """A value under a key, as it is stored: subkey (None for a plain value), bytes and expiry in
    run time."""

    subkey: bytes | None
    value: bytes
    expires_at: float

    @property
    def mark(self) -> bytes:
        """What stands for it in a question: its owner writes a new one with a later expiry, always.

        Two values have the same mark once in four billion pairs; then one is heard when it is
        written the next time.
        """
        named = pack([self.subkey, self.expires_at])
        return hashlib.sha1(named, usedforsecurity=False).digest()[:MARK_BYTES]


def entries_of(stored: Any) -> list[Entry]:
    """What hivemind's storage has under a key."""
    if stored is None:
        return []
    if not isinstance(stored.value, DictionaryDHTValue):
        return [Entry(None, stored.value, stored.expiration_time)]
    return [
        Entry(subkey, each.value, each.expiration_time) for subkey, each in stored.value.items()
    ]


class RunProtocol(DHTProtocol):
    """hivemind's protocol with bounds, `rpc_nearest` and `rpc_news`."""

    _rpc_handlers = None  # hivemind collects the calls of a class once, and would take its own
    refused: ClassVar[Counts] = Counts(NODE_REFUSALS)  # in a node's process that node's

    @classmethod
    async def create(cls, *arguments: Any, **named: Any) -> "RunProtocol":
        protocol: Any = await super().create(*arguments, **named)
        protocol.storage = BoundedStorage(cls.refused)
        return protocol

    async def add_p2p_handlers(self, p2p: Any, wrapper: Any = None, **named: Any) -> None:
        """As hivemind's, for so many calls of one peer, and counting those that are refused.

        Around what others call, and not in it: hivemind's store and find ping for themselves.
        """
        self._collect_rpc_handlers()
        handlers: Any = self._rpc_handlers
        calls, limit = self if wrapper is None else wrapper, RequestLimit()
        bounded = {
            handler.method_name: self.bounded(getattr(calls, handler.method_name), limit)
            for handler in handlers
        }
        hiveminds: Any = super()
        await hiveminds.add_p2p_handlers(p2p, SimpleNamespace(**bounded), **named)

    def bounded(
        self, call: Callable[[Any, P2PContext], Awaitable[Any]], limit: RequestLimit
    ) -> Callable[[Any, P2PContext], Awaitable[Any]]:
        """A call of others that is answered within their limit; refusals are counted, and told."""

        async def answer(request: Any, context: P2PContext) -> Any:
            try:
                values = len(request.keys) if isinstance(request, dht_pb2.StoreRequest) else 0
                limit.check(str(context.remote_id), 1 + values // VALUES_OF_REQUEST)
                return await call(request, context)
            except Exception as error:  # the asker is told
                self.refused.add(refusal_kind(error))
                raise

        return answer

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        """As hivemind's, which also its other calls go through; a caller that states a node id that
        is not its own is answered, but not put into the routing table.
        """
        stated = request.peer.node_id
        if stated and _node_id(stated, context.remote_id.to_bytes()) is None:
            request = dht_pb2.PingRequest()
        return await super().rpc_ping(request, context)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        """As hivemind's, for so many values, each of which has a signature to check; without its
        cache, which no node of a run uses and nothing bounds.
        """
        if any(request.in_cache):
            raise ValueError("nothing is cached here")
        if len(request.keys) > MAX_VALUES:
            raise ValueError(f"{len(request.keys)} values, at most {MAX_VALUES} are taken at once")
        if self.IS_DICTIONARY in request.subkeys:
            raise ValueError("what is under one key is stored value by value")
        return await super().rpc_store(request, context)

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """As hivemind's, with the node ids that follow from peer ids alone."""
        if node_id is None or node_id == node_id_of(peer_id.to_bytes()):
            await super().update_routing_table(node_id, peer_id, responded)

    async def call_store(
        self,
        peer: PeerID,
        keys: Sequence[DHTID],
        values: Sequence[Any],
        expiration_time: Sequence[float],
        subkeys: Sequence[Any] | None = None,
        in_cache: Any = None,
    ) -> list[bool] | None:
        """As hivemind's, so many values at a time as others take, each by itself: hivemind hands
        over all that it has to a new node that is nearer to it, and all under one key as one value.
        """
        rows = list[tuple[DHTID, bytes, float, Any]]()
        given = zip(keys, values, expiration_time, subkeys or [None] * len(keys), strict=True)
        for key, value, expires_at, subkey in given:
            if isinstance(value, DictionaryDHTValue):
                rows += [(key, v.value, v.expiration_time, name) for name, v in value.items()]
            else:
                rows.append((key, value, expires_at, subkey))
        hiveminds: Any = super()
        stored: list[bool] = []
        for start in range(0, len(rows), MAX_VALUES):
            columns = zip(*rows[start : start + MAX_VALUES], strict=True)
            answer = await hiveminds.call_store(peer, *columns, in_cache=in_cache)
            if answer is None:
                return None
            stored += answer
        return stored

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """As hivemind's, for so many keys and bytes as an answer may have."""
        _check_keys(request.keys)
        response = await super().rpc_find(request, context)
        left = MAX_ANSWER_BYTES
        for result in response.results:
            if result.ByteSize() > left:
                result.Clear()
                result.type = dht_pb2.NOT_FOUND
            left -= result.ByteSize()
        return response

    async def rpc_nearest(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """The nodes nearest to these keys that this one knows, without values."""
        _check_keys(request.keys)
        self._met(request, context)
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        asking = DHTID.from_bytes(request.peer.node_id) if request.peer.node_id else None
        for key in map(DHTID.from_bytes, request.keys):
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            nearest = self.routing_table.get_nearest_neighbors(key, NEAREST, exclude=asking)
            for node_id, peer_id in nearest:
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(peer_id.to_bytes())
            response.results.append(result)
        return response

    async def rpc_news(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """The values under these keys that the asker does not know.

        A question is the 20 bytes of a key and the marks of what is known under it.
        """
        _check_keys([question[:KEY_BYTES] for question in request.keys])
        self._met(request, context)
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        told, left = dict[bytes, bytes](), MAX_ANSWER_BYTES
        # in another order each time: no key takes the room of all others, again and again
        for number, question in enumerate(random.sample(request.keys, len(request.keys))):
            share = min(left, max(left // (len(request.keys) - number), LEAST_SHARE_BYTES))
            news, used = self._news(question, share)
            told[question] = pack(news) if news else b""
            left -= used
        for question in request.keys:
            result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=told[question])
            response.results.append(result)
        return response

    def _news(self, question: bytes, most_bytes: int) -> tuple[list[list[object]], int]:
        """What is told of one key, and its bytes."""
        key, known = DHTID.from_bytes(question[:KEY_BYTES]), _marks(question[KEY_BYTES:])
        news, used = list[list[object]](), 0
        entries = entries_of(self.storage.get(key))
        for entry in sorted(entries, key=lambda entry: self.storage.came(entry.subkey)):
            size = len(entry.value) + ENTRY_BYTES
            if entry.mark not in known and used + size <= most_bytes and len(news) < MAX_NEWS:
                news.append([entry.subkey, entry.value, entry.expires_at])
                used += size
        return news, used

    async def call_nearest(
        self, peer: PeerID, keys: Collection[DHTID]
    ) -> dict[DHTID, dict[DHTID, PeerID]] | None:
        """Ask a node for the nodes nearest to these keys; None without an answer."""
        response = await self._ask(peer, "rpc_nearest", [key.to_bytes() for key in keys])
        if response is None:
            return None
        return {
            key: {
                node_id: PeerID(at)
                for stated, at in zip(
                    result.nearest_node_ids[:NEAREST],
                    result.nearest_peer_ids[:NEAREST],
                    strict=False,
                )
                if (node_id := _node_id(stated, at)) is not None
            }
            for key, result in zip(keys, response.results, strict=True)
        }

    async def call_news(
        self, peer: PeerID, known: Mapping[DHTID, Collection[bytes]]
    ) -> dict[DHTID, list[Entry]] | None:
        """Ask a node for values that are not among the `known` marks.

        Those that this node's validator accepts; None without an answer, or with one that is longer
        than any of `rpc_news`: each value costs a check.
        """
        questions = [key.to_bytes() + b"".join(marks) for key, marks in known.items()]
        response = await self._ask(peer, "rpc_news", questions)
        if response is None:
            return None
        most = MAX_ANSWER_BYTES + ENTRY_BYTES * len(questions)
        if sum(len(result.value) for result in response.results) > most:
            self.refused.add("size")
            return None
        return {
            key: self._checked(key, result.value)
            for key, result in zip(known, response.results, strict=True)
        }

    def accepts(self, key: DHTID, entry: Entry) -> bool:
        """Whether this node's validator lets a value under a key pass."""
        subkey = self.serializer.dumps(entry.subkey)
        return self._validate_record(key.to_bytes(), subkey, entry.value, entry.expires_at)

    def _checked(self, key: DHTID, packed: bytes) -> list[Entry]:
        try:
            told: object = unpack(packed, MAX_ANSWER_BYTES) if packed else []
        except Malformed:
            return []
        found: list[Entry] = []
        for each in cast("list[object]", told) if isinstance(told, list) else []:
            match each:
                case [bytes() | None as subkey, bytes(value), float(expires_at)]:
                    entry = Entry(subkey, value, expires_at)
                    if self.accepts(key, entry):
                        found.append(entry)
                case _:
                    continue
        return found

    async def _ask(self, peer: PeerID, call: str, keys: list[bytes]) -> Any:
        """Make one of our calls; None where the answer is none, late or of another length."""
        request = dht_pb2.FindRequest(keys=keys, peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                stub = self.get_stub(peer)
                response = await getattr(stub, call)(request, timeout=self.wait_timeout)
            if len(response.results) != len(keys):
                raise ValueError(f"{len(response.results)} answers to {len(keys)} questions")
        except Exception as error:  # noqa: BLE001 - an unreachable peer fails in many ways
            logger.debug("%s of %s failed: %r", call, peer, error)
            known: Any = self.routing_table.get(peer_id=peer)
            asyncio.create_task(self.update_routing_table(known, peer, responded=False))  # noqa: RUF006
            return None
        if (node_id := _node_id(response.peer.node_id, peer.to_bytes())) is not None:
            asyncio.create_task(self.update_routing_table(node_id, peer, responded=True))  # noqa: RUF006
        return response

    def _met(self, request: dht_pb2.FindRequest, context: P2PContext) -> None:
        """Put the caller into the routing table, if it is a node that answers others."""
        at = context.remote_id
        if (node_id := _node_id(request.peer.node_id, at.to_bytes())) is not None:
            asyncio.create_task(self.update_routing_table(node_id, at))  # noqa: RUF006


def _node_id(stated: bytes, peer: bytes) -> DHTID | None:
    """The node id that a peer states, None if it is not the one that follows from its peer id.

    A peer that could choose it would choose five ids next to a key, and keep all that is under it.
    And a stated peer id may be long: hivemind turns it into text in time quadratic in its length.
    """
    if len(peer) > MAX_PEER_ID_BYTES:
        return None
    node_id = node_id_of(peer)
    return node_id if node_id.to_bytes() == stated else None


def node_id_of(peer: bytes) -> DHTID:
    """The node id of a peer, by its peer id in bytes."""
    return DHTID.generate(source=peer)


def install() -> None:
    """Let nodes that are made in this process, and those forked from it, speak `RunProtocol`."""
    hivemind_node.DHTProtocol = RunProtocol  # pyright: ignore[reportPrivateImportUsage]
    free_failed_answers()
    pass_over_late_answers()


def free_failed_answers() -> None:
    """Let p2pd's client forget every call that it has dealt with; twice does no harm.

    hivemind 1.1.12 sets a field that does not exist when an answer is too large, keeps the task of
    that call and with it the answer, and does the same where a call was cancelled.
    """
    original = ControlClient._handle_persistent_request
    if getattr(original, "forgets", False):
        return

    async def handle(self: ControlClient, call_id: Any, request: Any) -> None:
        try:
            await original(self, call_id, request)
        except ValueError:  # that field: say what was meant
            answer = p2pd_pb2.CallUnaryResponse(error=b"response size exceeds message size limit")
            await self._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=answer)
            )
        except KeyError:
            pass  # it was forgotten before
        finally:
            self._handler_tasks.pop(call_id, None)

    handle.forgets = True  # pyright: ignore[reportFunctionMemberAccess]
    ControlClient._handle_persistent_request = handle


class _OpenCalls(dict[Any, Any]):
    """The calls of p2pd's client that still wait for their answer, by id."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


def pass_over_late_answers() -> None:
    """Let p2pd's client live on when an answer comes as its call is cancelled; twice does no harm.

    hivemind 1.1.12 gives the answer to the cancelled call, fails by that, and reads nothing from
    p2pd any more: the process neither hears another answer nor is asked anything.
    """
    original = ControlClient.__init__
    if getattr(original, "passes_over", False):
        return

    def begin(self: ControlClient, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self._pending_calls = _OpenCalls()

    begin.passes_over = True  # pyright: ignore[reportFunctionMemberAccess]
    ControlClient.__init__ = begin


def _check_keys(keys: Collection[bytes]) -> None:
    """Raise ValueError for a question that nobody honest asks; the asker is told so."""
    if len(keys) > MAX_KEYS or len(set(keys)) != len(keys):
        raise ValueError(f"{len(keys)} keys, at most {MAX_KEYS} different ones are answered")


def _marks(joined: bytes) -> set[bytes]:
    starts = range(0, len(joined), MARK_BYTES)
    return {joined[start : start + MARK_BYTES] for start in starts}
