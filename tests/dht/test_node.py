"""Real nodes on loopback: what they exchange, what they refuse, and how they end."""

import asyncio
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PDaemonError
from hivemind.utils import timed_storage
from hivemind.utils.multiaddr import Multiaddr

from dilocox.dht import node, p2p_daemon
from dilocox.dht.addresses import FallbackPeers, Reachability, ReachKind
from dilocox.dht.clock import RunClock
from dilocox.dht.errors import BootstrapsSilent, EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.node import NoAnswer, RunDHT, StoredValue
from dilocox.dht.records import PartRecord, StageRecord, part_key, stage_key
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator
from dilocox.dht.wire import seal
from tests.peer.fabricated import peer_id
from tests.pipeline.swarms import stage_record
from tests.ports import free_port

Node = tuple[RunDHT, Swarm, RunClock]
OpenNode = Callable[..., Node]

SKEW_S = 500.0


class SkewedClock(RunClock):
    """That of a machine whose time of day is minutes off."""

    def own_time(self) -> float:
        return super().own_time() + SKEW_S

    def time(self) -> float:
        return super().time() + SKEW_S


class AnythingGoes(RunRecordValidator):
    """The validator of a peer that lies."""

    def validate(self, record: DHTRecord) -> bool:
        return True


@pytest.fixture(scope="module")
def hivemind_time() -> Iterator[None]:
    before = timed_storage.get_dht_time
    yield
    for name in ("utils.timed_storage", "dht.node", "dht.protocol", "dht.routing"):
        module: Any = __import__(f"hivemind.{name}", fromlist=["get_dht_time"])
        module.get_dht_time = before


@pytest.fixture(scope="module")
def first(open_node: OpenNode, operator: Identity, hivemind_time: None) -> Node:
    return open_node(operator)


@pytest.fixture(scope="module")
def second(open_node: OpenNode, volunteer: Identity, first: Node) -> Node:
    addresses = first[0].visible_addresses()
    return open_node(volunteer, bootstraps=addresses, clock=SkewedClock())


@pytest.fixture(scope="module")
def liar(open_node: OpenNode, stranger: Identity, first: Node, second: Node, run: str) -> Node:
    validator = AnythingGoes(run, stranger)
    return open_node(stranger, bootstraps=first[0].visible_addresses(), validator=validator)


def test_clock_minutes_off_is_corrected_before_the_node_joins(first: Node, second: Node):
    assert second[2].offset == pytest.approx(-SKEW_S, abs=0.5)
    assert abs(second[2].time() - first[2].time()) < 0.5


def test_many_keys_are_found_in_one_search_across_nodes(
    first: Node, second: Node, operator: Identity, volunteer: Identity, run: str
):
    keys = [stage_key(run, stage) for stage in range(20, 30)]
    for number, key in enumerate(keys[:-1]):
        node = (first, second)[number % 2]
        assert node[1].publish(key, stage_record(round=number), 60)
    owners = (operator.peer_id, volunteer.peer_id)
    expected = {
        key: {owners[number % 2]: stage_record(round=number)}
        for number, key in enumerate(keys[:-1])
    }
    for node in (first, second):
        found = node[1].read_many(dict.fromkeys(keys, StageRecord))
        assert found == expected | {keys[-1]: {}}


def test_one_thread_may_publish_while_another_reads(
    first: Node, second: Node, volunteer: Identity, run: str
):
    """The pipe to the node takes one message at a time; two at once would be torn."""
    keys = [stage_key(run, stage) for stage in range(50, 54)]
    wrong: list[object] = []

    def read() -> None:
        for _ in range(30):
            found = second[1].read_many(dict.fromkeys(keys, StageRecord))
            wrong.extend(each for each in found.values() if each is None)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        assert second[1].publish_many(dict.fromkeys(keys, stage_record(round=number)), 60)
    reader.join(60.0)
    assert not wrong
    mine = {volunteer.peer_id: stage_record(round=29)}
    assert first[1].read_many(dict.fromkeys(keys, StageRecord)) == dict.fromkeys(keys, mine)


def test_who_declares_itself_is_found_by_others_until_it_expires(first: Node, second: Node) -> None:
    dhts, now = (first[0], second[0]), first[2].time()
    names = [dht.peer_id.to_bytes() for dht in dhts]
    for dht, name, lives_s in zip(dhts, names, (3.0, 60.0), strict=True):
        assert dht.declare("a group", name, now + lives_s).result(10.0)
    expiries = dict(zip(names, (now + 3.0, now + 60.0), strict=True))
    assert second[0].declared("a group").result(10.0) == expiries
    assert not first[0].declare("a group", names[1], now + 90.0).result(10.0), "not its own name"
    assert first[0].declared("another group").result(10.0) == {}
    while first[2].time() < now + 3.0:
        time.sleep(0.1)
    assert first[0].declared("a group").result(10.0) == {names[1]: now + 60.0}


def test_record_is_replaced_by_its_owner(first: Node, second: Node, volunteer: Identity, run: str):
    for position in range(3):
        assert second[1].publish(part_key(run, 0), PartRecord(part=0, position=position), 60)
        found = first[1].read(part_key(run, 0), PartRecord)
        assert found == {volunteer.peer_id: PartRecord(part=0, position=position)}


def test_forged_records_are_refused_by_honest_nodes(
    first: Node, liar: Node, operator: Identity, stranger: Identity, run: str
):
    key = part_key(run, 7)
    expires_at = liar[2].time() + 60
    victim = peer_id_bytes_of(operator.public_key)
    payload = PartRecord(part=7, position=666).encode()
    forged = seal(stranger, key=key, sequence=1, expires_at=expires_at, payload=payload)
    before = Counter(first[0].refused.read())
    for value in (forged, forged[:-1] + bytes([forged[-1] ^ 1]), b"junk", bytes(20_000)):
        liar[0].put_many([StoredValue(key, value, expires_at, victim)], timeout_s=10.0)
    assert first[1].read(key, PartRecord) == {}
    assert not first[1].refused
    refused = first[1].all_refused - before
    assert set(refused) >= {"owner", "malformed"}


def test_large_manifest_passes_whole(
    first: Node, second: Node, operator: Identity, manifest: Manifest, run: str
):
    model = manifest.model | {"notes": os.urandom(14_000).hex()}
    large = Manifest.from_dict(manifest.to_dict() | {"model": model})
    signed = SignedManifest.sign(operator, large)
    assert len(signed.to_bytes()) > 16_384  # above this hivemind's node dies
    assert first[1].publish_manifest(signed)
    assert second[1].fetch_manifest(10.0).verify(run) == large


def test_value_over_the_limit_never_leaves(second: Node, run: str):
    with pytest.raises(ValueError, match="the DHT takes 32768"):
        large = StoredValue(part_key(run, 0), bytes(32_769), second[2].time() + 10)
        second[0].put_many([large], timeout_s=5.0)


def test_no_node_passes_on_the_streams_of_strangers(first: Node, second: Node) -> None:
    """By default each would, 4 GiB at a time."""
    for opened in (first, second):
        given = Path(f"/proc/{opened[0].p2pd_pid}/cmdline").read_bytes().split(b"\0")
        assert b"-relay=0" in given


def test_no_node_closes_the_connections_of_a_large_swarm(first: Node, second: Node) -> None:
    """By default each would from 512 on, half of them. Of a flag that is given twice p2pd takes the
    last one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(2048, files // 2)
    for opened in (first, second):
        given = Path(f"/proc/{opened[0].p2pd_pid}/cmdline").read_text().split("\0")
        limits = [flag for flag in given if flag.startswith(("-connLo=", "-connHi="))]
        assert limits[-2:] == [f"-connLo={most // 2}", f"-connHi={most}"]


def test_what_a_node_sends_and_receives_is_counted(second: Node, run: str):
    before = second[0].carried_bytes()
    for stage in range(30, 40):
        assert second[1].publish(stage_key(run, stage), stage_record(), 60)
    assert second[0].carried_bytes() - before > 10 * 300  # a signed record has some 600 bytes


def test_stopped_node_leaves_its_caller_a_deadline(
    second: Node, run: str, monkeypatch: pytest.MonkeyPatch
):
    dht, swarm, _ = second
    assert dht.pid
    monkeypatch.setattr(node, "QUESTION_LIMIT_S", 0.2)
    os.kill(dht.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert swarm.read(part_key(run, 0), PartRecord, timeout_s=0.2) is None
        for _ in range(100):  # more than the pipe to the node holds
            swarm.publish(part_key(run, 0), PartRecord(part=0, position=0), 60, timeout_s=0.002)
        assert not swarm.bootstrap_answers(0.2)
        with pytest.raises(NoAnswer, match="where p2pd listens"):
            asyncio.run(dht.replicate_p2p())
        assert time.monotonic() - started < 10.0
    finally:
        os.kill(dht.pid, signal.SIGCONT)
    assert swarm.publish(part_key(run, 0), PartRecord(part=0, position=1), 60)
    assert swarm.read(part_key(run, 0), PartRecord) is not None


def test_closed_node_leaves_nothing_and_answers_nobody(
    open_node: OpenNode, first: Node, tmp_path: Path, run: str
):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    dht, swarm, _ = open_node(
        Identity.load_or_create(tmp_path / "short.key"), bootstraps=first[0].visible_addresses()
    )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    child, p2pd = dht.pid, dht.p2pd_pid
    dht.close()
    dht.close()
    assert not dht.running
    for pid in (child, p2pd):
        assert not Path(f"/proc/{pid}").exists()
    assert swarm.read(part_key(run, 0), PartRecord) is None
    assert not swarm.publish(part_key(run, 0), PartRecord(part=0, position=0), 10)
    with pytest.raises(NoAnswer):
        dht.visible_addresses()


async def node_id_of(_dht: object, node: Any) -> int:
    return int(node.node_id)


def test_node_that_comes_back_is_the_same_node(
    open_node: OpenNode, first: Node, tmp_path: Path, run: str
):
    """Else others meet it twice, and its second answer to a store is "I have that already"."""
    identity = Identity.load_or_create(tmp_path / "returning.key")
    node_ids: set[object] = set()
    for position in range(2):
        dht, swarm, _ = open_node(identity, bootstraps=first[0].visible_addresses())
        node_ids.add(dht.run_coroutine(node_id_of, return_future=True).result(10.0))  # pyright: ignore
        assert swarm.publish(part_key(run, 10), PartRecord(part=10, position=position), 60)
        found = first[1].read(part_key(run, 10), PartRecord)
        assert found == {identity.peer_id: PartRecord(part=10, position=position)}
        dht.close()
    assert len(node_ids) == 1


def test_port_in_use_is_named_with_its_option(open_node: OpenNode, operator: Identity):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"port {port} .* in use .*--port"):
            open_node(operator, listen=(f"/ip4/127.0.0.1/tcp/{port}",))


def test_bootstrap_that_refuses_or_is_silent_is_named_within_its_deadline(
    open_node: OpenNode, operator: Identity, volunteer: Identity
):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (1, silent.getsockname()[1]):
            address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{operator.peer_id}"
            started = time.monotonic()
            with pytest.raises(EnvironmentFault, match=address):
                open_node(volunteer, bootstraps=(address,), startup_s=1.5)
            assert time.monotonic() - started < 6.0


def test_bootstrap_of_another_peer_id_is_refused(
    open_node: OpenNode, first: Node, volunteer: Identity, stranger: Identity
):
    address = first[0].visible_addresses()[0].rpartition("/")[0] + f"/{stranger.peer_id}"
    with pytest.raises(BootstrapsSilent, match="do not answer as that peer"):
        open_node(volunteer, bootstraps=(address,))


def test_a_node_joins_by_peers_while_its_bootstrap_is_away(
    open_node: OpenNode, second: Node, volunteer: Identity, run: str, tmp_path: Path
):
    identity = Identity.load_or_create(tmp_path / "identity.key")
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
    with pytest.raises(BootstrapsSilent):
        open_node(identity, bootstraps=[gone], startup_s=0.5)
    fallback = FallbackPeers(addresses=second[0].visible_addresses(), local_network=True)
    dht, swarm, clock = open_node(
        identity, bootstraps=[gone], fallback=fallback, clock=SkewedClock()
    )
    assert abs(clock.time() - second[2].time()) < 0.5
    assert second[1].publish(stage_key(run, 70), stage_record(), 60)
    assert swarm.read(stage_key(run, 70), StageRecord) == {volunteer.peer_id: stage_record()}
    assert not dht.bootstrap_answers(2.0)


def test_first_ping_that_comes_too_late_is_followed_by_another(
    open_node: OpenNode, first: Node, stranger: Identity, monkeypatch: pytest.MonkeyPatch
):
    ping, pings = DHTProtocol.call_ping, list[object]()

    async def slow_at_first(self: Any, peer: Any, **options: Any) -> Any:
        pings.append(peer)
        return None if len(pings) < 3 else await ping(self, peer, **options)

    monkeypatch.setattr(DHTProtocol, "call_ping", slow_at_first)  # for the child that is forked
    dht, _, _ = open_node(stranger, bootstraps=first[0].visible_addresses())
    assert dht.known_nodes() > 0
    dht.close()


def test_bootstrap_that_p2pd_does_not_reach_at_once_is_tried_again(
    open_node: OpenNode, first: Node, stranger: Identity, monkeypatch: pytest.MonkeyPatch
):
    create, tries = P2P.create, list[int]()

    async def busy_at_first(**options: Any) -> P2P:
        tries.append(1)
        if len(tries) == 1:
            raise P2PDaemonError("Daemon failed to start: failed to connect to bootstrap peers")
        return await create(**options)

    monkeypatch.setattr(P2P, "create", busy_at_first)
    dht, _, _ = open_node(stranger, bootstraps=first[0].visible_addresses())
    assert dht.known_nodes() > 0
    dht.close()


def test_node_that_no_bootstrap_ever_lets_in_says_so_at_its_deadline(
    open_node: OpenNode, first: Node, stranger: Identity, monkeypatch: pytest.MonkeyPatch
):
    async def too_slow(self: Any, peer: Any, **options: Any) -> None:
        return None

    monkeypatch.setattr(DHTProtocol, "call_ping", too_slow)
    addresses = first[0].visible_addresses()
    with pytest.raises(EnvironmentFault, match="no answer from /ip4"):
        open_node(stranger, bootstraps=addresses, startup_s=2.0)
    dht, _, _ = open_node(stranger, bootstraps=addresses, startup_s=2.0, alone=True)
    dht.close()


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/udp/0/quic", "127.0.0.1:80", ""])
def test_address_that_is_no_tcp_multiaddr_is_a_users_mistake(
    open_node: OpenNode, operator: Identity, address: str
):
    for option in ("listen", "announce", "bootstraps"):
        with pytest.raises(InvalidInput, match="is not a TCP multiaddr"):
            open_node(operator, **{option: (address,)})


# ---- how others reach it -------------------------------------------------------------------------
def opened(
    open_node: OpenNode, first: Node, key: Path, reach: Reachability, **options: Any
) -> Node:
    async def find_reach(p2p: Any, peers: Sequence[Any], own: Sequence[str]) -> Reachability:
        return replace(reach, seen=(*map(str, peers), *own))

    return open_node(
        Identity.load_or_create(key),
        bootstraps=first[0].visible_addresses(),
        find_reach=find_reach,
        **options,
    )


def test_the_bootstraps_are_asked_about_the_addresses_it_listens_on(
    open_node: OpenNode, first: Node, tmp_path: Path
):
    dht, *_ = opened(open_node, first, tmp_path / "key", Reachability(kind="public"))
    bootstrap = first[0].visible_addresses()[0].rpartition("/")[2]
    (own,) = {address.partition("/p2p/")[0] for address in dht.visible_addresses()}
    assert dht.reach().kind == "public" and dht.reach().seen == (bootstrap, own)
    assert not dht.client_mode


def test_one_that_only_dials_out_is_a_client_and_names_no_address(
    open_node: OpenNode, first: Node, tmp_path: Path, run: str
):
    dht, swarm, _ = opened(open_node, first, tmp_path / "key", Reachability(kind="dial_out"))
    assert dht.reach().kind == "dial_out" and dht.client_mode
    assert dht.visible_addresses() == ()
    assert swarm.publish(part_key(run, 9), PartRecord(part=9, position=1), 60)
    assert first[1].read(part_key(run, 9), PartRecord)
    assert dht.bootstrap_answers(5.0)


def test_one_behind_a_mapped_port_announces_what_others_found(
    open_node: OpenNode, first: Node, tmp_path: Path
):
    found = Reachability(kind="mapped", addresses=("/ip4/198.51.100.7/tcp/31337",))
    dht, *_ = opened(open_node, first, tmp_path / "key", found)
    (address,) = dht.visible_addresses()
    assert address.startswith("/ip4/198.51.100.7/tcp/31337/p2p/")
    assert not dht.client_mode


def test_it_announces_behind_those_also_where_it_is_at_home(
    open_node: OpenNode, first: Node, tmp_path: Path
):
    """Many routers lead nobody who is behind them to what they map from outside."""
    outside, home = "/ip4/198.51.100.7/tcp/31337", f"/ip4/192.168.1.5/tcp/{free_port()}"
    found = Reachability(kind="mapped", addresses=(outside,))
    dht, *_ = opened(open_node, first, tmp_path / "key", found, announce=(home,))
    told = [address.partition("/p2p/")[0] for address in dht.visible_addresses()]
    assert told == [outside, home]


@pytest.mark.parametrize("local_network", [False, True])
def test_it_waits_for_its_router_to_map_a_port_before_it_only_dials_out(
    open_node: OpenNode,
    first: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local_network: bool,
):
    mapped, peer = Multiaddr("/ip4/8.8.8.8/tcp/31337"), Multiaddr(f"/p2p/{peer_id(1)}")
    visible, looks = P2P.get_visible_maddrs, list[float]()

    async def later(self: P2P, *, latest: bool = False) -> list[Multiaddr]:
        looks.append(time.monotonic())
        found = await visible(self, latest=latest)
        return [*found, mapped.encapsulate(peer)] if len(looks) > 3 else found

    async def find_reach(_p2p: Any, _peers: Sequence[Any], own: Sequence[str]) -> Reachability:
        worked = tuple(each for each in own if each == str(mapped))
        return Reachability(kind="mapped" if worked else "dial_out", addresses=worked)

    bootstraps = first[0].visible_addresses()
    monkeypatch.setattr(P2P, "get_visible_maddrs", later)
    monkeypatch.setattr(node, "on_local_network", lambda _: local_network)
    monkeypatch.setattr(p2p_daemon, "LOOK_S", 0.01)
    dht, *_ = open_node(
        Identity.load_or_create(tmp_path / "key"),
        bootstraps=bootstraps,
        listen=("/ip4/0.0.0.0/tcp/0",),
        find_reach=find_reach,
    )
    # on a local network no start is held up
    assert dht.reach().kind == ("dial_out" if local_network else "mapped")
    assert dht.client_mode is local_network
    told = [address.partition("/p2p/")[0] for address in dht.visible_addresses()]
    assert (str(mapped) in told) is not local_network


def test_who_is_seen_from_nowhere_dials_out_though_nobody_could_try_the_mapped_port(
    open_node: OpenNode, first: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kinds: list[ReachKind] = ["dial_out", "unknown"]

    async def find_reach(*_: object) -> Reachability:
        return Reachability(kind=kinds.pop(0))

    async def mapped(*_: object) -> list[str]:
        return ["/ip4/8.8.8.8/tcp/31337"]

    monkeypatch.setattr(p2p_daemon, "mapped_addresses", mapped)
    monkeypatch.setattr(node, "on_local_network", lambda _: False)
    dht, *_ = open_node(
        Identity.load_or_create(tmp_path / "key"),
        bootstraps=first[0].visible_addresses(),
        listen=("/ip4/0.0.0.0/tcp/0",),
        find_reach=find_reach,
    )
    assert dht.reach().kind == "dial_out" and dht.client_mode


def test_a_router_that_maps_nothing_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch):
    async def visible(*, latest: bool) -> list[Multiaddr]:
        del latest
        return [Multiaddr(f"/ip4/{ip}/tcp/1/p2p/{peer_id(1)}") for ip in ("8.8.8.8", "10.0.0.2")]

    monkeypatch.setattr(p2p_daemon, "LOOK_S", 0.01)
    p2p = cast("P2P", SimpleNamespace(get_visible_maddrs=visible))
    began = time.monotonic()
    assert asyncio.run(p2p_daemon.mapped_addresses(p2p, ["/ip4/8.8.8.8/tcp/1"], 0.1)) == []
    assert 0.1 <= time.monotonic() - began < 5.0
