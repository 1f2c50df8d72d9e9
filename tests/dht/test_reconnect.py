"""Whom a peer that only dials out keeps ways open to."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from dilocox.dht import p2p_daemon, reconnect, rpc
from dilocox.dht.addresses import MAX_ENTRIES
from dilocox.dht.clock import OffsetSample, RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.p2p_daemon import DaemonOptions, DaemonOwner
from dilocox.dht.reconnect import Redialler, dial_targets, entries_among, relays_between
from dilocox.dht.records import StageRecord
from dilocox.peer.rounds.live_group import MAX_WATCHED
from tests.peer.fabricated import peer_id, stage_record

ME = peer_id(99)


def host(number: int, **changes: object) -> tuple[str, StageRecord]:
    peer = peer_id(number)
    address = f"/ip4/198.51.100.{number % 256}/tcp/31337/p2p/{peer}"
    return peer, replace(stage_record(), addresses=(address,), **changes)  # type: ignore[arg-type]


def swarm_of(reachable: int, stages: int = 3) -> dict[int, dict[str, StageRecord]]:
    """So many peers a stage that can be reached."""
    return {
        stage: dict(host(1000 * (stage + 1) + number) for number in range(reachable))
        for stage in range(stages)
    }


def test_of_a_small_swarm_everybody_is_dialled() -> None:
    stages = swarm_of(20)
    assert set(dial_targets(stages, ME, 1)) == {peer for here in stages.values() for peer in here}


def test_the_places_are_shared_by_own_stage_heads_and_the_rest() -> None:
    stages = swarm_of(100)
    dialled = list(dial_targets(stages, ME, 2))
    assert len(dialled) == reconnect.MAX_DIALLED
    common, drawn = dialled[: reconnect.COMMON], dialled[reconnect.COMMON :]
    for here in stages.values():
        assert 17 <= len(set(drawn) & set(here)) <= 20
    order = sorted([*stages[2], ME])
    at = order.index(ME)
    watching = {order[at - back] for back in range(1, MAX_WATCHED + 1)}
    assert watching <= set(dialled), "they would count it as dead"
    assert all(set(dial_targets(stages, peer_id(n), n % 3)) >= set(common) for n in range(90, 99))


def test_each_draws_others_and_one_that_comes_changes_little() -> None:
    stages = swarm_of(100)
    mine = dial_targets(stages, ME, 2)
    heads = [set(dial_targets(stages, peer_id(n), 2)) & set(stages[0]) for n in range(500, 540)]
    assert len(set[str]().union(*heads)) > 95, "some heads are dialled by nobody"
    stages[0] |= dict([host(99_000)])
    stages[1] |= dict([host(99_001)])
    assert len(set(dial_targets(stages, ME, 2)) - set(mine)) <= 2


def test_those_who_have_trained_are_the_first_fallback_into_a_run() -> None:
    # among more keys than a peer dials
    stages = {0: dict(host(number) for number in range(400)), 1: dict([host(498)])}
    proven = peer_id(498), peer_id(7)
    found = entries_among(stages, ME, 0, proven, local_network=True)
    assert {each.rpartition("/")[2] for each in found} == set(proven)
    found = entries_among(stages, ME, 0, (), local_network=True)
    assert len({each.rpartition("/")[2] for each in found} - {ME}) == MAX_ENTRIES
    assert entries_among({0: {ME: stage_record()}}, ME, 0, proven, local_network=True) == ()


def test_no_peer_is_all_the_ways_back_and_no_name_or_home_network_is_one() -> None:
    one, other = peer_id(1), peer_id(2)
    places = [f"/ip4/8.8.8.8/tcp/{port}/p2p/{one}" for port in range(1, 65)]
    named = f"/dns4/name.example/tcp/1/p2p/{other}", f"/dns4/a..b/tcp/1/p2p/{other}"
    home, public = f"/ip4/192.168.1.5/tcp/1/p2p/{other}", f"/ip4/1.1.1.1/tcp/1/p2p/{other}"
    stages = {
        0: {
            one: replace(stage_record(), addresses=tuple(places)),
            other: replace(stage_record(), addresses=(*named, home, public)),
        }
    }
    found = entries_among(stages, ME, 0, (one, other), local_network=False)
    assert sorted(found) == sorted([*places[:2], public])
    found = entries_among(stages, ME, 0, (one, other), local_network=True)
    assert set(found) == {*places[:2], home, public}


def test_nobody_is_dialled_who_cannot_be_or_is_gone_or_names_another() -> None:
    liar, theirs = host(5)
    stages = {
        0: dict(
            [
                host(1, client_mode=True),
                host(2, state="left"),
                (peer_id(3), replace(stage_record(), addresses=())),
                (ME, host(4)[1]),
                (peer_id(6), theirs),
                (peer_id(7), replace(theirs, addresses=("nonsense", f"/ip4/x/udp/1/p2p/{liar}"))),
            ]
        )
    }
    assert dial_targets(stages, ME, 0) == {}


def test_between_two_that_only_dial_out_those_pass_requests_on_whom_both_have_dialled() -> None:
    at_home, far = host(50, client_mode=True), host(51, client_mode=True)
    stages = {
        0: dict([at_home, host(1)]),
        1: dict([host(2)]),
        2: dict([far, host(3, state="left")]),
    }

    def relays(peer: str) -> list[str]:
        return relays_between(stages, at_home[0], 0, peer, client_mode=True)

    orders = [relays(far[0]) for _ in range(50)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted((peer_id(1), peer_id(2))))}
    assert len({tuple(order) for order in orders}) == 2, "the same are asked again and again"
    assert relays(peer_id(2)) == [], "it can be dialled"
    assert relays(peer_id(77)) == []


def test_in_a_large_swarm_any_two_that_only_dial_out_have_dialled_the_same_peers() -> None:
    stages = swarm_of(100)
    at_home, far = host(50, client_mode=True), host(51, client_mode=True)
    stages[0] |= dict([at_home])
    stages[2] |= dict([far])
    both = relays_between(stages, at_home[0], 0, far[0], client_mode=True)
    assert len(both) >= reconnect.COMMON
    assert set(both) <= set(dial_targets(stages, at_home[0], 0))
    assert set(both) <= set(dial_targets(stages, far[0], 2))


def test_a_head_that_can_be_reached_asks_by_relay_whom_it_cannot_call() -> None:
    stages = swarm_of(100)
    far = host(51, client_mode=True)
    stages[2] |= dict([far])
    dialled = dial_targets(stages, far[0], 2)
    for head in stages[0]:
        relays = relays_between(stages, head, 0, far[0], client_mode=False)
        assert set(relays) == (set() if head in dialled else set(dialled))


async def dialled_at(addresses: tuple[str, ...], *, local_network: bool) -> list[str] | None:
    """Where a peer dials another one that says to be at these; None: it does not."""
    places = asyncio.get_running_loop().create_future()

    async def connect(peer: PeerID, addresses: list[Multiaddr]) -> None:
        places.set_result([str(each) for each in addresses])
        raise ConnectionError  # nobody is there

    p2p = SimpleNamespace(_client=SimpleNamespace(connect=connect))
    redialler = Redialler(p2p, local_network=local_network)  # type: ignore[arg-type]
    redialler.aim({peer_id(1): tuple(f"{each}/p2p/{peer_id(1)}" for each in addresses)})
    try:
        return await asyncio.wait_for(places, 3.0 if local_network else 1.0)
    except asyncio.TimeoutError:
        return None


@pytest.mark.parametrize(
    "address",
    ["/ip4/192.168.1.1/tcp/80", "/ip4/127.0.0.1/tcp/22", "/ip6/fd00::1/tcp/80"],
)
def test_in_a_run_on_the_internet_no_record_leads_into_the_home_network(address: str) -> None:
    assert asyncio.run(dialled_at((address,), local_network=False)) is None
    assert asyncio.run(dialled_at((address,), local_network=True)) == [address]
    public = "/ip4/8.8.8.8/tcp/31337"
    assert asyncio.run(dialled_at((address, public), local_network=False)) == [public]


def test_a_name_of_the_home_network_leads_there_as_little() -> None:
    name = ("/dns4/localhost/tcp/80",)
    assert asyncio.run(dialled_at(name, local_network=False)) is None
    assert asyncio.run(dialled_at(name, local_network=True)) == ["/ip4/127.0.0.1/tcp/80"]


# ---- a connection that hangs, and one that is only slow ------------------------------------------
SILENCE_S = 0.4
Answer = Callable[[float], Awaitable[None]]  # to a question, of which it says the limit


async def late(limit_s: float) -> None:
    await asyncio.wait_for(asyncio.sleep(0.75 * SILENCE_S), limit_s)


async def never(limit_s: float) -> None:
    await asyncio.wait_for(asyncio.Event().wait(), limit_s)


async def refused(limit_s: float) -> None:
    raise ConnectionError("it has just started")


def p2p_of(hung_up: list[PeerID], answer: Answer) -> Any:
    """A p2pd whose connections stand; what is asked over them is answered so."""

    async def connect(_peer: PeerID, _addresses: list[Multiaddr]) -> None:
        pass

    async def disconnect(peer: PeerID) -> None:
        hung_up.append(peer)

    async def call(*_: Any) -> Any:
        await answer(math.inf)
        return SimpleNamespace(dht_time=math.nan)  # it came too late to tell the time

    client = SimpleNamespace(connect=connect, disconnect=disconnect)
    return SimpleNamespace(_client=client, call_protobuf_handler=call)


async def hang_ups(answers: list[Answer], for_s: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a connection is given up: each question is answered so, all later as the last."""

    async def ask_time(*_: object, limit_s: float) -> float:
        await (answers.pop(0) if len(answers) > 1 else answers[0])(limit_s)
        return 0.0

    hung_up = list[PeerID]()
    monkeypatch.setattr(reconnect, "ask_time", ask_time)
    redialler = Redialler(p2p_of(hung_up, never), local_network=True)
    redialler.aim({peer_id(1): (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(1)}",)})
    await asyncio.sleep(for_s)
    return len(hung_up)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rpc, reconnect, p2p_daemon):
        monkeypatch.setattr(module, "SILENCE_S", SILENCE_S)
    for name in ("BEAT_S", "SOON_S", "LOOK_S"):
        monkeypatch.setattr(reconnect, name, 0.02)
    monkeypatch.setattr(p2p_daemon, "PING_TIMEOUT_S", 0.1)


@pytest.mark.usefixtures("hurried")
def test_a_connection_is_given_up_where_nothing_comes_for_long_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three late answers cut uploads of half a minute, each time that they began anew."""

    def given_up(*answers: Answer, for_s: float) -> int:
        return asyncio.run(hang_ups(list(answers), for_s, monkeypatch))

    assert given_up(late, for_s=4 * SILENCE_S) == 0
    assert given_up(refused, refused, refused, late, for_s=4 * SILENCE_S) == 0
    assert given_up(never, for_s=1.5 * SILENCE_S) == 1
    assert given_up(refused, for_s=1.5 * SILENCE_S) == 1


def test_an_answer_may_stand_as_long_behind_an_upload_as_was_measured() -> None:
    """At 40 kB/s; and after a cut the way is there again within about a minute."""
    assert 30.0 <= rpc.SILENCE_S <= 60.0 - reconnect.BEAT_S


def options_of(bootstraps: tuple[str, ...], folder: Path) -> DaemonOptions:
    return DaemonOptions(
        identity=Identity.load_or_create(folder / "key"),
        bootstraps=bootstraps,
        reachable=bootstraps,
        listen=(),
        announce=(),
        client_mode=True,
        startup_s=1.0,
    )


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("answer", [late, never])
def test_a_bootstrap_is_hung_up_on_as_late(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hung_up = list[PeerID]()
    monkeypatch.setattr(DaemonOwner, "p2p", p2p_of(hung_up, answer))
    bootstrap = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(1)}"
    owner = DaemonOwner(options_of((bootstrap,), tmp_path), RunClock(), on_death=lambda: None)
    assert asyncio.run(owner.measure((bootstrap,), again=True)) is (answer is late)
    assert len(hung_up) == (answer is never)
    assert not asyncio.run(owner.measure((bootstrap,))), "a clock was set by an answer that is late"


@pytest.mark.usefixtures("hurried")
def test_a_bootstrap_that_hangs_does_not_keep_the_others_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Routers forget a connection over which nothing goes for half a minute."""
    bootstraps = tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(number)}" for number in (1, 2))
    asked = Counter[str]()

    async def samples_of(_: DaemonOwner, peer: PeerID, *__: object) -> list[OffsetSample]:
        asked[str(peer)] += 1
        if str(peer) == peer_id(2):
            await never(math.inf)
        return [OffsetSample(offset_s=0.0, round_trip_s=0.01)]

    async def measured(owner: DaemonOwner) -> list[bool]:
        return [await owner.measure(bootstraps, again=True) for _ in range(5)]

    monkeypatch.setattr(DaemonOwner, "samples_of", samples_of)
    monkeypatch.setattr(p2p_daemon, "CLOCK_PERIOD_S", 0.02)
    owner = DaemonOwner(options_of(bootstraps, tmp_path), RunClock(), on_death=lambda: None)
    assert asyncio.run(asyncio.wait_for(measured(owner), 20.0)) == [True] * 5
    assert asked == {peer_id(1): 5, peer_id(2): 1}
