"""What can be known about addresses before anything is started."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from dilocox.dht.addresses import (
    MAX_ENTRIES,
    keep_entries,
    kept_entries,
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


# ---- who was there before ------------------------------------------------------------------------
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(server: socket.socket, number: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{peer_id(number)}"


def test_what_was_kept_is_read_again_and_nonsense_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.entries"
    assert kept_entries(file) == ()
    named = [f"/ip4/8.8.8.8/tcp/{port}/p2p/{peer_id(1)}" for port in range(1, 2 * MAX_ENTRIES)]
    keep_entries(file, named)
    assert kept_entries(file) == tuple(named[:MAX_ENTRIES])
    file.write_bytes(f"nonsense\n/ip4/8.8.8.8/tcp/1\n{named[0]}\n".encode())
    assert kept_entries(file) == (named[0],)
    file.write_bytes(b"\xff\xfe")
    assert kept_entries(file) == ()
    keep_entries(tmp_path / "no folder" / "file", named)  # ends nothing


def test_peers_are_the_way_in_only_where_no_bootstrap_accepts_a_connection() -> None:
    with closing(listener()) as bootstrap, closing(listener()) as peer, closing(listener()) as shut:
        up, there, gone = (address_of(each, n) for n, each in enumerate((bootstrap, peer, shut)))
        shut.close()
        assert wait_for_entry([up], [there]) == ()
        assert wait_for_entry([gone], [gone, there], patience_s=0.0) == (there,)


def test_a_run_on_the_internet_leads_nobody_into_the_home_network_by_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Waits(BaseException):
        """It goes on asking."""

    def wait(_: float) -> None:
        raise Waits

    with closing(listener()) as peer:
        monkeypatch.setattr("dilocox.dht.addresses.time.sleep", wait)
        public = f"/ip4/192.0.2.1/tcp/1/p2p/{peer_id(0)}"
        monkeypatch.setattr("dilocox.dht.addresses.on_local_network", lambda at: public not in at)
        with pytest.raises(Waits):
            wait_for_entry([public], [address_of(peer, 1)], patience_s=0.0)
