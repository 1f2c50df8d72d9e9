"""What can be known about addresses before anything is started."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht.addresses import (
    NO_FALLBACK,
    FallbackPeers,
    kept_fallback,
    on_local_network,
    wait_for_entry,
)
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
