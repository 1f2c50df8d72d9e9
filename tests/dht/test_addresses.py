"""What can be known about addresses before anything is started."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.addresses import (
    NO_FALLBACK,
    FallbackPeers,
    dial_fault,
    kept_fallback,
    on_local_network,
    wait_for_entry,
)
from dilocox.dht.invite import listen_address
from dilocox.dht.reachability import allowed_ips
from tests.peer.fabricated import peer_id

PUBLIC, HOME = "/ip4/8.8.8.8/tcp/31337", "/ip4/192.168.1.5/tcp/31337"


@pytest.mark.parametrize(
    ("addresses", "local"),
    [
        ((PUBLIC,), False),
        ((HOME,), True),
        (("/ip4/127.0.0.1/tcp/31337",), True),
        (("/ip6/2001:4860:4860::8888/tcp/31337",), False),
        (("/ip6/fd00::1/tcp/31337",), True),
        (("/dns4/localhost/tcp/31337",), True),
        ((HOME, "/ip4/127.0.0.1/tcp/31337"), True),
        ((PUBLIC, HOME), False),  # as a host in the internet that has a network of its own says
        ((), False),
    ],
)
def test_the_invite_tells_whether_the_run_is_one_of_a_local_network(
    addresses: tuple[str, ...], local: bool
) -> None:
    assert on_local_network([f"{each}/p2p/{peer_id(0)}" for each in addresses]) is local


def test_a_name_that_nobody_knows_now_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **kinds: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert not on_local_network([f"/dns4/nowhere.example/tcp/31337/p2p/{peer_id(0)}"])


# ---- who was there before ------------------------------------------------------------------------
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(server: socket.socket, number: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{peer_id(number)}"


def test_what_was_kept_is_read_again_and_nonsense_is_not(tmp_path: Path) -> None:
    file = tmp_path / "run.peers"
    assert not kept_fallback(file)
    named = tuple(f"/ip4/8.8.8.8/tcp/{port}/p2p/{peer_id(1)}" for port in range(1, 9))
    fallback = FallbackPeers(addresses=named, client_mode=True, local_network=True)
    fallback.keep(file)
    assert kept_fallback(file) == fallback
    for nonsense in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"addresses": 1}',
        b'{"addresses": ["nonsense"]}',
    ):
        file.write_bytes(nonsense)
        assert kept_fallback(file) == NO_FALLBACK
    fallback.keep(tmp_path / "no folder" / "file")  # ends nothing


def test_peers_are_the_way_in_only_where_no_bootstrap_accepts_a_connection() -> None:
    with closing(listener()) as bootstrap, closing(listener()) as peer, closing(listener()) as shut:
        up, there, gone = (address_of(each, n) for n, each in enumerate((bootstrap, peer, shut)))
        shut.close()
        impossible = f"/dns4/a..b/tcp/1/p2p/{peer_id(3)}"  # a name that no resolver takes
        fallback = FallbackPeers(addresses=(gone, impossible, there), client_mode=True)
        assert wait_for_entry([up], fallback) == NO_FALLBACK
        assert wait_for_entry([gone], fallback, patience_s=0.0) == replace(
            fallback, addresses=(there,)
        )


# ---- a name of two families ----------------------------------------------------------------------
@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> dict[socket.AddressFamily, str]:
    """What any name stands for now, the first one first."""
    ips = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}

    def look_up(_: str, port: int, family: int = 0, *__: object, **___: object) -> list[Any]:
        return [
            (each, socket.SOCK_STREAM, 6, "", (ip, port))
            for each, ip in ips.items()
            if family in (0, each)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return ips


@pytest.mark.parametrize(("kind", "listens"), [("dns4", True), ("dns", True), ("dns6", False)])
@pytest.mark.usefixtures("both")
def test_a_bootstrap_listens_where_any_address_of_its_name_does(kind: str, listens: bool) -> None:
    """One that listens on IPv4 was out of reach for all whose machines have IPv6, too."""
    with closing(listener()) as bootstrap:
        port = bootstrap.getsockname()[1]
        fault = dial_fault(f"/{kind}/both.example/tcp/{port}/p2p/{peer_id(0)}")
    assert (fault is None) is listens, fault


def test_what_a_name_is_in_the_other_family_says_nothing_of_the_run(
    both: dict[socket.AddressFamily, str],
) -> None:
    both |= {socket.AF_INET6: "2001:4860:4860::8888", socket.AF_INET: "192.168.1.5"}
    named = f"both.example/tcp/31337/p2p/{peer_id(0)}"
    assert on_local_network([f"/dns4/{named}"])
    assert not on_local_network([f"/dns/{named}"])
    assert not on_local_network([f"/dns6/{named}"])


def test_a_peer_is_dialled_back_at_addresses_of_the_family_that_it_names(
    both: dict[socket.AddressFamily, str],
) -> None:
    """A firewall that drops the other family takes all the time that there is."""
    both |= {socket.AF_INET6: "2001:4860:4860::8888", socket.AF_INET: "8.8.8.8"}
    for kind, family in (("dns4", socket.AF_INET), ("dns6", socket.AF_INET6)):
        place = listen_address(f"/{kind}/both.example/tcp/1")
        assert asyncio.run(allowed_ips(place)) == [both[family]]
