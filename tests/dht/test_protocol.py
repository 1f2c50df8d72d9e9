"""What a stranger may ask a node for, and what it costs the node; real nodes on loopback."""

# pyright: reportAttributeAccessIssue=false

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2, p2pd_pb2

from dilocox.dht import streams
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.node import RunDHT
from dilocox.dht.protocol import MAX_ANSWER_BYTES, MAX_KEYS, MAX_VALUES, RunProtocol
from dilocox.dht.records import PartRecord, key_id, part_key
from dilocox.dht.rpc import ASKED_BY_ONE, NODE_REFUSALS, CallRefused, Counts
from dilocox.dht.swarm import Swarm
from dilocox.dht.wire import pack

Node = tuple[RunDHT, Swarm, RunClock]
OpenNode = Callable[..., Node]

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def asked(open_node: OpenNode, operator: Identity) -> Node:
    return open_node(operator)


@pytest.fixture(scope="module")
def stranger_node(open_node: OpenNode, stranger: Identity, asked: Node) -> Node:
    return open_node(stranger, bootstraps=asked[0].visible_addresses())


async def find(_dht: object, node: Any, peer: str, keys: list[bytes], call: str) -> Any:
    """Ask as a program of somebody else would; the answers, or what went wrong."""
    request = dht_pb2.FindRequest(keys=keys)
    name = f"{RunProtocol.__name__}.{call}"
    answer = await node.p2p.call_protobuf_handler(
        PeerID.from_base58(peer), name, request, dht_pb2.FindResponse
    )
    return [result.type for result in answer.results]


async def calls_kept(_dht: object, node: Any) -> int:
    return len(node.p2p._client.control._handler_tasks)


async def serve(_dht: object, node: Any, answer_bytes: int) -> None:
    async def answer(_request: dht_pb2.FindRequest, _context: object) -> dht_pb2.FindResponse:
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(answer_bytes))])

    await node.p2p.add_protobuf_handler("large", answer, dht_pb2.FindRequest)


async def ask_for_large(_dht: object, node: Any, peer: str) -> None:
    await node.p2p.call_protobuf_handler(
        PeerID.from_base58(peer), "large", dht_pb2.FindRequest(), dht_pb2.FindResponse
    )


async def fill(_dht: object, node: Any, keys: list[bytes]) -> None:
    for key in keys:
        node.protocol.storage.store(DHTID.from_bytes(key), bytes(30_000), 2e9)


def run_in(node: Node, coroutine: Any, **arguments: Any) -> Any:
    dht: Any = node[0]
    return dht.run_coroutine(partial(coroutine, **arguments), return_future=True).result(LIMIT_S)


async def nearest_as_told(_dht: object, node: Any, answers: list[tuple[bytes, bytes]]) -> Any:
    """What this node makes of the nodes that another one tells it."""
    ids, peers = [each[0] for each in answers], [each[1] for each in answers]
    result = dht_pb2.FindResult(nearest_node_ids=ids, nearest_peer_ids=peers)

    class Told:
        async def rpc_nearest(self, _request: object, timeout: float) -> dht_pb2.FindResponse:
            return dht_pb2.FindResponse(results=[result])

    node.protocol.get_stub = lambda _peer: Told()
    try:
        found = await node.protocol.call_nearest(PeerID(peers[0]), [DHTID(7)])
    finally:
        del node.protocol.get_stub
    return [peer.to_bytes() for peer in found[DHTID(7)].values()]


def test_bytes_that_are_too_long_are_no_peer_id() -> None:
    """hivemind makes one of what it is told, in searches and of the members of a group."""
    streams.install()
    with pytest.raises(ValueError, match="no peer id"):
        PeerID(bytes(1 << 20))


def test_a_node_may_not_choose_the_id_that_it_is_found_by(asked: Node):
    """It would choose five next to a key; and one of 21 bytes once failed every search."""
    peer = b"\x12\x20" + bytes(32)
    own = DHTID.generate(source=peer).to_bytes()
    told = [(b"\xff" * 21, peer), (DHTID(6).to_bytes(), peer), (own, peer)]
    long = bytes(1 << 20)  # base58 takes time with the square of that: an hour
    told.append((DHTID.generate(source=long).to_bytes(), long))
    assert run_in(asked, nearest_as_told, answers=told) == [peer]


async def tell(_dht: object, node: Any, peer: str, kind: str, request: bytes) -> None:
    """Call as a program of somebody else would; kind: of the request, as `Ping`."""
    message = getattr(dht_pb2, f"{kind}Request").FromString(request)
    answer, name = getattr(dht_pb2, f"{kind}Response"), f"{RunProtocol.__name__}.rpc_{kind.lower()}"
    await node.p2p.call_protobuf_handler(PeerID.from_base58(peer), name, message, answer)


async def met(_dht: object, node: Any) -> dict[DHTID, bytes]:
    table = node.protocol.routing_table
    return {node_id: peer.to_bytes() for node_id, peer in table.uid_to_peer_id.items()}


@pytest.mark.parametrize("node_id", [b"\xff" * 21, b"\x01" * 4000, DHTID(7).to_bytes()])
def test_who_states_an_id_of_its_choice_is_answered_and_met_by_nobody(
    asked: Node, stranger_node: Node, operator: Identity, node_id: bytes
):
    """Each of another length wrote 10 kB of a traceback into the log of every node."""
    before = run_in(asked, met)
    me = dht_pb2.NodeInfo(node_id=node_id)
    requests: dict[str, Any] = {
        "Ping": dht_pb2.PingRequest(peer=me),
        "Store": dht_pb2.StoreRequest(peer=me),
    }
    for kind, request in requests.items():
        told = request.SerializeToString()
        run_in(stranger_node, tell, peer=operator.peer_id, kind=kind, request=told)
    assert run_in(asked, met) == before
    assert all(DHTID.generate(source=peer) == stated for stated, peer in before.items())


def test_nothing_is_cached_for_anybody(asked: Node, stranger_node: Node, operator: Identity):
    """hivemind's cache has room for ten thousand values, whosever they are."""
    request = dht_pb2.StoreRequest(
        keys=[bytes(20)], subkeys=[b""], values=[b"x"], expiration_time=[2e9], in_cache=[True]
    )
    with pytest.raises(P2PHandlerError, match="nothing is cached"):
        told = request.SerializeToString()
        run_in(stranger_node, tell, peer=operator.peer_id, kind="Store", request=told)


def test_what_is_under_one_key_is_not_stored_as_one_value(
    asked: Node, stranger_node: Node, operator: Identity
):
    """One of 4 MB had twenty thousand values, each with a signature to check, for one request."""
    tag = RunProtocol.IS_DICTIONARY
    request = dht_pb2.StoreRequest(
        keys=[bytes(20)], subkeys=[tag], values=[b"x"], expiration_time=[2e9], in_cache=[False]
    )
    with pytest.raises(P2PHandlerError, match="value by value"):
        told = request.SerializeToString()
        run_in(stranger_node, tell, peer=operator.peer_id, kind="Store", request=told)


def test_a_node_hands_over_what_it_has_in_calls_that_others_take(
    monkeypatch: pytest.MonkeyPatch,
):
    """hivemind hands over all in one call, and what is under one key as one value."""
    calls: list[tuple[Any, ...]] = []

    async def stored(_: object, peer: object, keys: Any, *columns: Any, in_cache: bool) -> Any:
        calls.append((keys, *columns))
        return [True] * len(keys)

    monkeypatch.setattr(DHTProtocol, "call_store", stored)
    many = DictionaryDHTValue()
    for number in range(300):
        many.store(number, b"value of %d" % number, 2e9)
    protocol: Any = object.__new__(RunProtocol)
    keys, values, expiries = (DHTID(1), DHTID(2)), (many, b"plain"), (2e9, 3e9)
    handed = protocol.call_store(PeerID(b"peer"), keys, values, expiries, in_cache=False)
    assert asyncio.run(handed) == [True] * 301
    assert [len(call[0]) for call in calls] == [MAX_VALUES, 301 - MAX_VALUES]
    rows = [row for call in calls for row in zip(*call, strict=True)]
    assert rows[7] == (DHTID(1), b"value of 7", 2e9, 7)
    assert rows[-1] == (DHTID(2), b"plain", 3e9, None)


def test_more_values_than_anybody_has_are_not_looked_at(
    asked: Node, stranger_node: Node, operator: Identity
):
    """Each has a signature to check, and ten thousand fit into one call."""
    many = MAX_VALUES + 1
    request = dht_pb2.StoreRequest(
        keys=[bytes(20)] * many,
        subkeys=[b"x"] * many,
        values=[b"x"] * many,
        expiration_time=[2e9] * many,
        in_cache=[False] * many,
    )
    with pytest.raises(P2PHandlerError, match="257 values, at most 256"):
        told = request.SerializeToString()
        run_in(stranger_node, tell, peer=operator.peer_id, kind="Store", request=told)


def test_of_an_answer_longer_than_any_no_value_is_checked(monkeypatch: pytest.MonkeyPatch):
    """Each of the thousands that fit into what p2pd takes would cost a check."""
    monkeypatch.setattr(RunProtocol, "refused", Counts(NODE_REFUSALS))
    value = pack([[b"owner", bytes(MAX_ANSWER_BYTES // 2), 2e9]])
    checked: list[DHTID] = []

    async def answered(asked: dht_pb2.FindRequest, timeout: float) -> dht_pb2.FindResponse:
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=value) for _ in asked.keys])

    def accepts(_: object, key: DHTID, entry: object) -> bool:
        checked.append(key)
        return True

    monkeypatch.setattr(RunProtocol, "get_stub", lambda *_: SimpleNamespace(rpc_news=answered))
    monkeypatch.setattr(RunProtocol, "accepts", accepts)
    protocol: Any = object.__new__(RunProtocol)
    protocol.rpc_semaphore, protocol.wait_timeout = asyncio.Semaphore(1), 1.0
    protocol.node_info = dht_pb2.NodeInfo()
    ask = partial(protocol.call_news, PeerID(b"peer"))
    told = asyncio.run(ask({DHTID(n): () for n in range(2)}))
    assert [len(each) for each in told.values()] == [1, 1] and len(checked) == 2
    assert asyncio.run(ask({DHTID(n): () for n in range(3)})) is None
    assert len(checked) == 2 and RunProtocol.refused.read()["size"] == 1


@pytest.mark.parametrize("call", ["rpc_find", "rpc_nearest", "rpc_news"])
def test_a_key_asked_for_a_thousand_times_is_refused_and_nothing_is_kept(
    asked: Node, stranger_node: Node, operator: Identity, run_of_keys: list[bytes], call: str
):
    """33 kB of such a question kept 15 MB in each node that it was put to, for good."""
    for keys in ([run_of_keys[0]] * 1504, run_of_keys[: MAX_KEYS + 1], [run_of_keys[0]] * 2):
        with pytest.raises(P2PHandlerError, match="keys, at most 64"):
            run_in(stranger_node, find, peer=operator.peer_id, keys=keys, call=call)
    answered = run_in(
        stranger_node, find, peer=operator.peer_id, keys=run_of_keys[:MAX_KEYS], call=call
    )
    assert len(answered) == MAX_KEYS
    assert run_in(asked, calls_kept) == 0


@pytest.fixture(scope="module")
def run_of_keys(asked: Node, run: str) -> list[bytes]:
    keys = [part_key(run, part) for part in range(MAX_KEYS + 1)]
    assert asked[1].publish(keys[0], PartRecord(part=0, position=1), 60)
    return [key_id(key) for key in keys]


def test_questions_that_are_refused_are_counted_where_metrics_read_it(
    asked: Node, stranger_node: Node, operator: Identity
):
    before = asked[1].all_refused
    for call in ("rpc_find", "rpc_nearest", "rpc_news"):
        with pytest.raises(P2PHandlerError, match="keys, at most 64"):
            run_in(stranger_node, find, peer=operator.peer_id, keys=[bytes(20)] * 2, call=call)
    misaligned = dht_pb2.StoreRequest(keys=[bytes(20)]).SerializeToString()
    with pytest.raises(P2PHandlerError):
        run_in(stranger_node, tell, peer=operator.peer_id, kind="Store", request=misaligned)
    assert asked[1].all_refused - before == {"question": 4}


class Handlers:
    """In the place of p2pd: what a node answers, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[..., Any]] = {}

    async def add_protobuf_handler(self, name: str, call: Any, *_: object, **__: object) -> None:
        self.calls[name.removeprefix(f"{RunProtocol.__name__}.")] = call


def test_a_peer_that_asks_too_often_is_told_so_and_the_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
):
    """All calls count together; hivemind's pings within a store and a find do not."""
    monkeypatch.setattr(RunProtocol, "refused", Counts(NODE_REFUSALS))
    monkeypatch.setattr(RunProtocol, "update_routing_table", nothing)
    peer, other = (SimpleNamespace(remote_id=PeerID(b"\x12\x20" + bytes([n]) * 32)) for n in (1, 2))
    me = dht_pb2.NodeInfo(node_id=DHTID.generate(source=peer.remote_id.to_bytes()).to_bytes())
    requests: dict[str, Any] = {
        "rpc_ping": dht_pb2.PingRequest(peer=me),
        "rpc_store": dht_pb2.StoreRequest(peer=me),
        "rpc_find": dht_pb2.FindRequest(peer=me),
        "rpc_nearest": dht_pb2.FindRequest(peer=me),
        "rpc_news": dht_pb2.FindRequest(peer=me),
    }

    async def scene() -> None:
        p2p = Handlers()
        await RunProtocol.create(p2p, DHTID(1), 20, 5, 5, 1.0, record_validator=None)
        assert p2p.calls.keys() == requests.keys()
        for number in range(ASKED_BY_ONE):
            call = list(requests)[number % len(requests)]
            await p2p.calls[call](requests[call], peer)
        for call, request in requests.items():
            with pytest.raises(CallRefused, match="asked too often: 1000 times in 10 s"):
                await p2p.calls[call](request, peer)
            await p2p.calls[call](request, other)

    asyncio.run(scene())
    refused = {kind: count for kind, count in RunProtocol.refused.read().items() if count}
    assert refused == {"often": len(requests)}


async def nothing(*_: object, **__: object) -> None:
    pass


def test_an_answer_stays_within_its_bound(asked: Node, stranger_node: Node, operator: Identity):
    keys = [bytes([number]) * 20 for number in range(50)]
    assert len(keys) * 30_000 > MAX_ANSWER_BYTES
    run_in(asked, fill, keys=keys)
    found = run_in(stranger_node, find, peer=operator.peer_id, keys=keys, call="rpc_find")
    assert 0 < sum(kind == dht_pb2.FOUND_REGULAR for kind in found) <= MAX_ANSWER_BYTES // 30_000


def test_a_call_whose_answer_is_too_large_is_told_so_and_forgotten(
    asked: Node, stranger_node: Node, operator: Identity
):
    run_in(asked, serve, answer_bytes=5 << 20)
    with pytest.raises(P2PHandlerError, match="exceeds message size limit"):
        run_in(stranger_node, ask_for_large, peer=operator.peer_id)
    assert run_in(asked, calls_kept) == 0


async def cancel_as_answered(_dht: object, node: Any) -> list[str]:
    """What two calls come to, the first of which is cancelled in the moment of its answer."""
    client = node.p2p._client.control
    bytes_in, answered = asyncio.StreamReader(), dict[UUID, asyncio.Future[bytes]]()
    first = uuid4()
    for call_id in (first, uuid4()):
        answered[call_id] = client._pending_calls[call_id] = asyncio.Future()
        answer = p2pd_pb2.CallUnaryResponse(response=b"yes")
        message = p2pd_pb2.PersistentConnectionResponse(
            callId=call_id.bytes, callUnaryResponse=answer
        ).SerializeToString()
        bytes_in.feed_data(bytes([len(message)]) + message)
    answered[first].cancel()
    bytes_in.feed_eof()
    await client._read_from_persistent_conn(bytes_in)
    for call_id in answered:
        client._pending_calls.pop(call_id)
    return ["cancelled" if each.cancelled() else repr(each.result()) for each in answered.values()]


def test_an_answer_to_a_call_that_is_given_up_keeps_no_other_from_its_answer(asked: Node):
    """The process read nothing from p2pd any more, and waited for every answer in vain."""
    assert run_in(asked, cancel_as_answered) == ["cancelled", "b'yes'"]
