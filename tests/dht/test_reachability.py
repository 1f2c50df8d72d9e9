"""Peers that ask each other about the network between them, over real p2pd on loopback."""

# pyright: reportArgumentType=false
# hivemind says of a started P2P that its peer id may be None.

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from dilocox.dht import reachability
from dilocox.dht.addresses import Reachability, ReachKind
from dilocox.dht.identity import Identity, peer_id_of
from dilocox.dht.reachability import (
    BANDWIDTH_LIMIT_BYTES,
    CALLS_IN_A_WHILE,
    CHECK_AGAIN_S,
    CHECK_S,
    CHUNK,
    Probe,
    ReachWatch,
    answered,
    ask_time,
    asked_to_dial,
    described,
    find_reach,
    measure_bandwidth,
    reached_at,
)
from dilocox.dht.rpc import answer_of, request_of
from tests.dht.processes import handles
from tests.ports import free_port

LIMIT_S = 5.0
SEEN = frozenset({"198.51.100.7"})


Run = Callable[..., Any]


@pytest.fixture
def run(daemons: list[P2P]) -> Run:
    """Plays a scene with so many p2pd."""

    async def play(scene: Callable[[list[P2P]], Awaitable[Any]], count: int) -> Any:
        async with handles(daemons[:count]) as peers:
            try:
                return await asyncio.wait_for(scene(peers), 60)
            finally:
                while SERVING:
                    probe, p2p = SERVING.pop()
                    await probe.remove_p2p_handlers(p2p)

    return lambda scene, count=2: asyncio.run(play(scene, count))


SERVING: list[tuple[Probe, P2P]] = []  # in the scene that is played


async def serve(p2p: P2P, dial_back: Callable[..., Any] | None = None, **options: Any) -> None:
    given = {"now": time.time, "refuse": lambda _: None, "bootstraps": None, **options}
    probe = Probe(p2p, **given)
    if dial_back is not None:
        probe.rpc_dial_back = dial_back  # type: ignore[method-assign]
    await probe.add_p2p_handlers(p2p)
    SERVING.append((probe, p2p))


async def own_addresses(p2p: P2P) -> list[str]:
    return [str(address).partition("/p2p/")[0] for address in await p2p.get_visible_maddrs()]


def only_this_is_connected(
    monkeypatch: pytest.MonkeyPatch, one: P2P, where: dict[str, frozenset[str]]
) -> None:
    """where: the addresses from which each peer is connected to it."""

    async def connections(p2p: P2P) -> dict[str, frozenset[str]]:
        return where if p2p is one else {}

    monkeypatch.setattr(reachability, "connections", connections)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where somebody was looked for; everywhere is one of libp2p."""
    ips: list[str] = []

    async def greeting(ip: str, port: int) -> bytes:
        ips.append(ip)
        return reachability.GREETING

    monkeypatch.setattr(reachability, "greeting_of", greeting)
    return ips


def test_a_peer_that_others_reach_is_public_at_that_address(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])
        own = await own_addresses(peers[1])
        started = time.monotonic()
        reach = await find_reach(peers[1], [peers[0].peer_id], own, limit_s=LIMIT_S)
        assert (reach.kind, reach.asked, reach.seen) == ("public", 1, ("127.0.0.1",))
        assert set(reach.addresses) <= set(own) and reach.addresses
        assert time.monotonic() - started < 1.0  # a start is not held up

    run(scene)


def test_a_peer_at_whose_addresses_nobody_answers_only_dials_out(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])
        wrong = [f"/ip4/127.0.0.1/tcp/{free_port()}"]
        # the connection that it has opened itself does not count
        reach = await find_reach(peers[1], [peers[0].peer_id], wrong, limit_s=LIMIT_S)
        assert (reach.kind, reach.addresses, reach.asked) == ("dial_out", (), 2)  # it tried twice

    run(scene)


def test_a_listener_that_is_not_of_libp2p_is_no_evidence(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])

        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(web, "127.0.0.1", 0)
        address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
        reach = await find_reach(peers[1], [peers[0].peer_id], [address], limit_s=LIMIT_S)
        assert reach.kind == "dial_out"
        server.close()

    run(scene)


def test_where_nobody_can_be_asked_nothing_is_claimed(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:  # an older bootstrap does not answer this
        own = await own_addresses(peers[1])
        reach = await find_reach(peers[1], [peers[0].peer_id], own, patience_s=0.5)
        assert (reach.kind, reach.asked) == ("unknown", 0)

    run(scene)


def test_a_bootstrap_that_starts_at_the_same_moment_is_asked_again(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        own = await own_addresses(peers[1])
        asking = asyncio.ensure_future(
            find_reach(peers[1], [peers[0].peer_id], own, limit_s=LIMIT_S)
        )
        await asyncio.sleep(0.5)
        await serve(peers[0])
        assert (await asking).kind == "public"

    run(scene)


def test_a_bootstrap_believes_no_strangers_where_one_is_connected_that_it_knows(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    member = Identity.load_or_create(tmp_path / "member.key").peer_id
    asked: list[frozenset[str]] = []

    async def working(named: Sequence[str], seen: frozenset[str]) -> tuple[str, ...]:
        asked.append(seen)
        return tuple(named) if len(asked) == 1 else ()

    async def scene(peers: list[P2P]) -> None:
        bootstrap, stranger, peer = peers
        where = dict.fromkeys((str(stranger.peer_id), member), frozenset({"192.0.2.7"}))
        where[str(peer.peer_id)] = SEEN

        only_this_is_connected(monkeypatch, bootstrap, where)
        monkeypatch.setattr("dilocox.dht.reachability.working", working)
        await serve(bootstrap, knows=lambda each: each == member)
        await serve(stranger, bootstraps={str(bootstrap.peer_id)}, local_network=True)
        own = await own_addresses(peer)
        reach = await find_reach(peer, [bootstrap.peer_id], own, limit_s=LIMIT_S)
        assert (reach.kind, asked) == ("public", [SEEN]), "the member gives no answer"

    run(scene, 3)


def test_a_bootstrap_believes_others_more_than_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router may let in the bootstrap, which the peer has dialled, and nobody else."""
    asked: list[frozenset[str]] = []
    let_in = {"others": True}

    async def working(named: Sequence[str], seen: frozenset[str]) -> tuple[str, ...]:
        asked.append(seen)
        return tuple(named) if len(asked) % 2 or let_in["others"] else ()

    async def scene(peers: list[P2P]) -> None:
        bootstrap, other, peer = peers
        where = {str(other.peer_id): frozenset({"192.0.2.7"}), str(peer.peer_id): SEEN}

        only_this_is_connected(monkeypatch, bootstrap, where)
        monkeypatch.setattr("dilocox.dht.reachability.working", working)
        await serve(bootstrap)
        await serve(other, bootstraps={str(bootstrap.peer_id)}, local_network=True)
        own = await own_addresses(peer)
        for let_in["others"], kind in ((True, "public"), (False, "dial_out")):
            asked.clear()
            reach = await find_reach(peer, [bootstrap.peer_id], own, limit_s=LIMIT_S)
            assert (reach.kind, asked[:2]) == (kind, [SEEN, SEEN])
        # but who was reached before is not declared unreachable on the word of strangers
        asked.clear()
        reach = await find_reach(peer, [bootstrap.peer_id], own, limit_s=LIMIT_S, again=True)
        assert (reach.kind, asked) == ("public", [SEEN])
        # one on the bootstrap's own machine is for the bootstrap to dial
        where[str(peer.peer_id)] = frozenset({"127.0.0.1"})
        asked.clear()
        assert (await find_reach(peer, [bootstrap.peer_id], own, limit_s=LIMIT_S)).kind == "public"
        assert asked == [frozenset({"127.0.0.1"})]

    run(scene, 3)


def test_who_had_nobody_but_the_bootstrap_to_try_it_is_told_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def working(named: Sequence[str], seen: frozenset[str]) -> tuple[str, ...]:
        return tuple(named)

    async def scene(peers: list[P2P]) -> None:
        bootstrap, other, peer = peers
        where = {str(peer.peer_id): SEEN}
        own = await own_addresses(peer)

        async def by_others(again: bool = False) -> bool:
            reach = await find_reach(peer, [bootstrap.peer_id], own, limit_s=LIMIT_S, again=again)
            assert reach.kind == "public"
            return reach.by_others

        only_this_is_connected(monkeypatch, bootstrap, where)
        monkeypatch.setattr("dilocox.dht.reachability.working", working)
        await serve(bootstrap)
        assert not await by_others()  # it is alone
        where[str(other.peer_id)] = frozenset({"192.0.2.7"})
        assert not await by_others()  # the other one gives no answer yet
        await serve(other, bootstraps={str(bootstrap.peer_id)})
        assert await by_others()
        assert not await by_others(again=True)  # for then it asks nobody

    run(scene, 3)


def test_that_nobody_gets_in_while_an_exchange_fills_the_line_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two such answers in a row ended the exchange, and the peer began anew."""
    asked: list[Any] = []
    begins_in_between = False

    async def shut(*question: Any) -> dict[str, Any]:
        asked.append(question)
        return {"worked": [], "seen": [], "asked": 1}

    def busy() -> bool:
        return not begins_in_between or bool(asked)

    def kind(busy: Callable[[], bool]) -> ReachKind:
        own, peer = ["/ip4/8.8.8.8/tcp/1"], PeerID.from_base58(peer_id_of(bytes(32)))
        return asyncio.run(find_reach(cast("P2P", None), [peer], own, busy=busy)).kind

    monkeypatch.setattr(reachability, "asked_to_dial", shut)
    assert kind(busy) == "unknown" and not asked
    begins_in_between = True
    assert kind(busy) == "unknown" and asked
    assert kind(lambda: False) == "dial_out"


def test_only_a_bootstrap_has_others_dialled(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0], bootstraps={"Qm-another"})
        question = {"addresses": await own_addresses(peers[1]), "seen": ["127.0.0.1"]}
        with pytest.raises(ConnectionError, match="only a bootstrap"):
            await asked_to_dial(peers[1], peers[0].peer_id, question, LIMIT_S)

    run(scene)


@pytest.mark.parametrize("local_network", [False, True])
def test_a_bootstrap_has_nobody_look_into_its_own_network(
    run: Run, local_network: bool, dialled: list[str]
) -> None:
    async def scene(peers: list[P2P]) -> None:
        bootstrap = str(peers[1].peer_id)
        await serve(peers[0], bootstraps={bootstrap}, local_network=local_network)
        question = {
            "addresses": ["/ip4/192.168.1.1/tcp/80"],
            "seen": ["192.168.1.1", "8.8.8.8", "not an address"],
        }
        answer = await asked_to_dial(peers[1], peers[0].peer_id, question, LIMIT_S)
        own = {"/ip4/192.168.1.1/tcp/80": "192.168.1.1"} if local_network else {}
        expected = {"/ip4/8.8.8.8/tcp/80": "8.8.8.8"} | own
        assert set(answer["worked"]) == set(expected)
        assert set(dialled) == set(expected.values())

    run(scene)


def test_a_peer_is_not_dialled_back_as_often_as_it_likes(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0], refuse=refused.append)
        question = {"addresses": []}
        for _ in range(CALLS_IN_A_WHILE):
            await asked_to_dial(peers[1], peers[0].peer_id, question, LIMIT_S)
        with pytest.raises(ConnectionError, match="too often"):
            await asked_to_dial(peers[1], peers[0].peer_id, question, LIMIT_S)

    refused: list[str] = []
    run(scene)
    assert refused == ["often"]


def test_what_a_peer_refuses_to_dial_or_to_measure_is_counted_by_reason(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        own: list[bool] = []
        await serve(peers[0], refuse=refused.append, busy=lambda: bool(own))
        stub: Any = Probe.get_stub(peers[1], peers[0].peer_id)

        async def first(frame: Any) -> Any:
            return await anext(await stub.rpc_bandwidth_down(frame))

        nonsense = runtime_pb2.ExpertRequest(metadata=b"\xc1")
        for call, kind in (
            (lambda: stub.rpc_dial_back(nonsense), "question"),
            (lambda: stub.rpc_dial_back(request_of({"seen": ["8.8.8.8"]})), "question"),
            (lambda: first(request_of({"seconds": "?"})), "question"),
        ):
            with pytest.raises(ConnectionError, match="refused: "):
                answered(await call())
            assert refused == [kind]
            refused.clear()
        own.append(True)
        with pytest.raises(ConnectionError, match="ask later"):
            answered(await first(request_of({"seconds": 1})))
        assert refused == ["busy"]

    refused: list[str] = []
    run(scene)


@pytest.mark.parametrize(
    "address",
    ["/ip4/10.1.2.3/tcp/22", "/ip4/127.0.0.1/tcp/22", "/ip6/::1/tcp/22", "/dns4/localhost/tcp/22"],
)
def test_nobody_is_made_to_look_into_its_own_network(address: str, dialled: list[str]) -> None:
    seen = frozenset({"198.51.100.7"})
    assert asyncio.run(reachability.working([address], seen)) == ("/ip4/198.51.100.7/tcp/22",)
    assert dialled == ["198.51.100.7"]  # where it comes from, and nowhere else


def test_a_name_is_dialled_at_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, dialled = list[str](), list[str]()

    def rebinding(host: str, port: int, **kinds: Any) -> list[Any]:
        looked_up.append(host)
        ip = "127.0.0.1" if looked_up.count("rebinds.example") > 1 else "198.51.100.7"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))]

    async def connection(host: str, port: int) -> Any:
        dialled.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(asyncio, "open_connection", connection)
    seen = frozenset({"198.51.100.7"})
    assert asyncio.run(reachability.working(["/dns4/rebinds.example/tcp/22"], seen)) == ()
    assert set(dialled) == seen


def test_names_that_nobody_answers_for_keep_no_other_peer_from_being_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would have it called unreachable, and start again."""
    answers, looked_up = threading.Event(), list[str]()

    def stuck(host: str, port: int, **kinds: Any) -> list[Any]:
        looked_up.append(host)
        answers.wait(LIMIT_S)
        raise OSError

    async def greeting(ip: str, port: int) -> bytes:
        return reachability.GREETING

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    monkeypatch.setattr(reachability, "greeting_of", greeting)
    seen, own = frozenset({"198.51.100.7"}), "/ip4/198.51.100.7/tcp/22"

    async def scene() -> None:
        names = [f"/dns4/{number}.example/tcp/1" for number in range(16)]
        stranger = asyncio.create_task(reachability.working(names, frozenset()))
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while len(looked_up) < 2:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert await reachability.working([own], seen) == (own,)
        assert await reachability.working([*names, own], seen) is None, "nobody is unreachable"
        answers.set()
        assert await stranger == ()
        while await reachability.working([*names, own], seen) is None:
            assert asyncio.get_running_loop().time() < deadline
        assert len(set(looked_up)) == 2

    asyncio.run(scene())


def test_addresses_that_are_none_are_passed_over(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])
        for addresses in (None, 7, [1, "x", "/ip4/1.2.3.4/udp/1", "a" * 9000]):
            question = {"addresses": addresses}
            answer = await asked_to_dial(peers[1], peers[0].peer_id, question, limit_s=LIMIT_S)
            assert answer["worked"] == [], addresses

    run(scene)


def test_what_a_bootstrap_says_has_worked_is_an_address_or_does_not_count(run: Run) -> None:
    """One that was none ended the peer's start with an error about an address that it never had."""

    async def lie(_request: Any, _context: Any) -> Any:
        return answer_of({"worked": worked, "seen": ["?"], "asked": -1})

    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0], dial_back=lie)
        own = await own_addresses(peers[1])
        for told, kind in ((["nonsense", 7, "/ip4/x/tcp/1"], "dial_out"), (["no", *own], "public")):
            worked[:] = told
            reach = await find_reach(peers[1], [peers[0].peer_id], own, limit_s=LIMIT_S)
            assert (reach.kind, set(reach.addresses) <= set(own)) == (kind, True)

    worked: list[object] = []
    run(scene)


def test_bandwidth_is_measured_both_ways_in_its_time(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])
        started = time.monotonic()
        found = await measure_bandwidth(peers[1], peers[0].peer_id, limit_s=6.0)
        assert time.monotonic() - started < 12.0  # the bytes are limited, too: mostly under one
        assert found.down_bytes_per_s > 1e6 and found.up_bytes_per_s > 1e6

    run(scene)


def test_the_answer_arrives_though_the_end_of_what_was_sent_comes_late(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0])

        async def frames() -> AsyncIterator[Any]:
            yield request_of({})
            for _ in range(BANDWIDTH_LIMIT_BYTES // len(CHUNK)):
                yield request_of({}, CHUNK)
            await asyncio.sleep(0.2)

        stub: Any = Probe.get_stub(peers[1], peers[0].peer_id)
        answer = answered(await stub.rpc_bandwidth_up(frames()))
        assert answer["bytes"] == BANDWIDTH_LIMIT_BYTES

    run(scene)


def test_one_measurement_at_a_time_and_none_while_a_peer_needs_its_link(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        busy: list[bool] = []
        await serve(peers[0], busy=lambda: bool(busy))
        twice = [measure_bandwidth(peers[1], peers[0].peer_id, limit_s=1.0) for _ in range(2)]
        results = await asyncio.gather(*twice, return_exceptions=True)
        assert sum(isinstance(result, ConnectionError) for result in results) == 1
        busy.append(True)
        with pytest.raises(ConnectionError, match="ask later"):
            await measure_bandwidth(peers[1], peers[0].peer_id, limit_s=1.0)

    run(scene)


def test_a_link_is_measured_for_nobody_who_is_not_admitted(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        admitted = {str(peers[1].peer_id)}
        await serve(peers[0], admits=lambda peer: peer in admitted)
        await measure_bandwidth(peers[1], peers[0].peer_id, limit_s=6.0)
        admitted.clear()
        with pytest.raises(ConnectionError, match="takes only peers that are admitted"):
            await measure_bandwidth(peers[1], peers[0].peer_id, limit_s=6.0)

    run(scene)


def test_the_time_that_a_peer_tells(run: Run) -> None:
    async def scene(peers: list[P2P]) -> None:
        await serve(peers[0], now=lambda: 1234.5)
        assert await ask_time(peers[1], peers[0].peer_id) == 1234.5
        with pytest.raises(ConnectionError):
            await ask_time(peers[0], peers[1].peer_id, limit_s=1.0)  # serves nothing

    run(scene)


def test_a_peer_that_was_carried_elsewhere_is_lost_after_two_failures_and_no_success_between() -> (
    None
):
    """Whoever could not tell, as during an exchange, has not seen that others get in."""
    answers: list[Future[Reachability]] = []

    def ask(again: bool) -> Future[Reachability]:
        assert again
        answers.append(Future())
        return answers[-1]

    now, lost = time.monotonic(), list[bool]()
    watch = ReachWatch(ask, reached=True, by_others=True, now=now)
    assert not watch.lost(now) and not answers
    kinds: tuple[ReachKind | None, ...] = ("dial_out", "public", None, "unknown", "dial_out")
    for kind in (*kinds, "public", "dial_out", None, "unknown", "dial_out"):
        now += CHECK_S + 1
        assert not watch.lost(now)  # asks
        assert not watch.lost(now)  # waits
        if kind is None:
            answers[-1].set_exception(ConnectionError())
        else:
            answers[-1].set_result(Reachability(kind=kind))
        lost.append(watch.lost(now))
    assert lost == [False] * 9 + [True]


def test_a_line_that_gets_another_address_is_lost_though_others_get_in_there() -> None:
    """Under the old one, which the others know, nobody does."""
    told, other = "/ip4/203.0.113.7/tcp/31338", "/ip4/203.0.113.8/tcp/31338"
    for addresses, expected in (((told, other), False), ((other,), True), ((), False)):
        reach, now = Reachability(kind="public", addresses=addresses), time.monotonic()
        ask = Answering(reach, reach)
        watch = ReachWatch(
            ask,
            reached=True,
            by_others=True,
            now=now,
            told=(f"{told}/p2p/{peer_id_of(bytes(32))}",),
        )
        lost = list[bool]()
        for _ in range(2):
            now += CHECK_S + 1
            lost += [watch.lost(now), watch.lost(now)]
        assert lost == [False, False, False, expected]


class Answering:
    """A swarm that answers at once; `asked`: whether each question was "again"."""

    def __init__(self, *answers: Reachability) -> None:
        self.asked: list[bool] = []
        self._answers = answers

    def __call__(self, again: bool) -> Future[Reachability]:
        answer = Future[Reachability]()
        answer.set_result(self._answers[len(self.asked)])
        self.asked.append(again)
        return answer


def test_one_that_nobody_could_try_is_tried_each_minute_until_somebody_has() -> None:
    unknown, public = Reachability(by_others=True), Reachability(kind="public", by_others=True)
    told, started = Answering(unknown, unknown, public, public), time.monotonic()
    watch = ReachWatch(told, reached=False, by_others=False, now=started)
    for second in range(int(3 * CHECK_AGAIN_S + CHECK_S) + 9):
        assert not watch.lost(started + second)
    assert told.asked == [False, False, False, True]


def test_one_that_only_a_bootstrap_reached_hears_others_until_one_of_them_has() -> None:
    """The first peer of a swarm: its router may let in the bootstrap alone."""

    def watched(*answers: Reachability) -> tuple[list[bool], bool]:
        told, now, lost = Answering(*answers), time.monotonic(), False
        watch = ReachWatch(told, reached=True, by_others=False, now=now)
        for _ in answers:
            now += CHECK_S + 1
            assert not watch.lost(now)  # asks
            lost = watch.lost(now)
        return told.asked, lost

    alone, others = Reachability(kind="public"), Reachability(kind="public", by_others=True)
    shut = Reachability(kind="dial_out", by_others=True)
    assert watched(alone, alone, alone) == ([False] * 3, False)
    assert watched(alone, shut, shut) == ([False] * 3, True)
    assert watched(others, shut, alone, shut) == ([False, True, True, True], False)


def test_a_volunteer_is_told_where_it_is_reached_or_what_to_do() -> None:
    peer, own = peer_id_of(bytes(32)), "/ip4/192.168.1.5/tcp/4001"
    outside, seen = "/ip4/198.51.100.7/tcp/31337", ("198.51.100.7",)
    visible = (f"{own}/p2p/{peer}",)
    mapped = Reachability(kind="mapped", addresses=(outside,), seen=seen)
    at = reached_at(mapped, (), visible, peer)
    assert at == (f"{outside}/p2p/{peer}", *visible)
    level, text = described(mapped, (), at)
    assert level == logging.INFO and f"is reached at {outside}" in text and "router" in text
    shut = Reachability(kind="dial_out", seen=seen)
    assert reached_at(shut, (), visible, peer) == ()
    level, text = described(shut, (), ())
    assert level == logging.WARNING and "only dials out" in text
    assert f"--port 31337 --announce {outside}" in text
    assert "198.51.100.9" in described(shut, ("/ip4/198.51.100.9/tcp/1",), ())[1]
    assert "as far as it knows" in described(Reachability(), (), visible)[1]
