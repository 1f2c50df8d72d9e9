"""What can be known about addresses before anything is started."""

from __future__ import annotations

import socket

import pytest

from dilocox.dht.addresses import on_local_network
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
        ((PUBLIC, HOME), True),  # the operator's own line names both
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
