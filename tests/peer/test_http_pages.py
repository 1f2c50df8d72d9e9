"""The server of figures and health: what it answers, and what it does not let itself be kept by."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer import http_pages
from dilocox.peer.http_pages import (
    Page,
    Pages,
    PageServer,
    PortTaken,
    check_port,
    health_page,
    readiness_page,
)
from dilocox.peer.options import PeerOptions
from dilocox.peer.process import peer as peer_module
from dilocox.peer.process.metrics import Figures
from tests.peer.test_metrics import FACTS, Shown

LOCAL = "127.0.0.1"


@contextmanager
def served(pages: Pages) -> Generator[PageServer]:
    with PageServer(LOCAL, 0, pages) as server:
        yield server


def ask(server: PageServer, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    with closing(HTTPConnection(LOCAL, server.port, timeout=5)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())


@pytest.fixture
def taken_port() -> Generator[int]:
    with socket.create_server((LOCAL, 0)) as other:
        yield other.getsockname()[1]


# ---- answers -------------------------------------------------------------------------------------
def test_a_page_is_made_anew_for_each_request_and_the_query_does_not_matter() -> None:
    calls: list[int] = []

    def page() -> Page:
        calls.append(1)
        return Page(body=f"call {len(calls)}".encode(), content_type="text/x", headers={"X-A": "b"})

    with served({"/page": page}) as server:
        assert ask(server, "/page")[:2] == (200, "call 1")
        status, body, headers = ask(server, "/page?name=x")
    assert (status, body) == (200, "call 2")
    assert (headers["Content-Type"], headers["X-A"]) == ("text/x", "b")
    assert headers["Content-Length"] == str(len(body))


def test_head_has_no_body_and_other_methods_and_paths_are_refused() -> None:
    with served({"/page": lambda: Page.text("here")}) as server:
        assert ask(server, "/page", "HEAD")[:2] == (200, "")
        assert ask(server, "/page", "POST")[0] == 405
        status, body, _ = ask(server, "/elsewhere")
    assert status == 404
    assert "/page" in body


def test_a_page_that_cannot_be_made_is_an_error_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def page() -> Page:
        raise RuntimeError("a secret")

    with served({"/page": page}) as server:
        status, body, _ = ask(server, "/page")
        assert (status, "secret" in body) == (500, False)
        assert ask(server, "/page")[0] == 500  # it goes on
    assert "a secret" in caplog.text


def test_health_names_what_is_dead() -> None:
    lives = {"training": True, "averaging process": True}
    signs: dict[str, Callable[[], bool]] = {name: lambda name=name: lives[name] for name in lives}
    assert health_page(signs) == Page.text("ok")
    lives["averaging process"] = False
    page = health_page(signs)
    assert (page.status, page.body) == (503, b"dead: averaging process\n")


def test_readiness_names_why_not() -> None:
    assert readiness_page("").status == 200
    page = readiness_page("joining")
    assert (page.status, page.body) == (503, b"not ready: joining\n")


# ---- a peer's own pages --------------------------------------------------------------------------
class FakePeer:
    """The parts of a peer whose life is shown."""

    def __init__(self) -> None:
        self.alive = {"coordinator": True, "averager": True, "dht": True, "network": True}
        self.meter = SimpleNamespace(state="joining")
        self.figures: Figures = cast("Figures", Figures.__new__(Figures))
        vars(self.figures).update(
            _coordinator=SimpleNamespace(is_alive=lambda: self.alive["coordinator"]),
            _averager=SimpleNamespace(is_alive=lambda: self.alive["averager"]),
            _joined=SimpleNamespace(dht=self),
            _network=SimpleNamespace(running=True),
            _meter=self.meter,
            metrics=Shown().metrics,
        )

    @property
    def running(self) -> bool:
        return self.alive["dht"]


def test_a_peer_is_ready_between_joining_and_leaving() -> None:
    peer = FakePeer()
    pages = peer.figures.pages()
    statuses: list[int] = []
    for state in ("joining", "training", "leaving"):
        peer.meter.state = state
        statuses.append(pages["/readyz"]().status)
    assert statuses == [503, 200, 503]


@pytest.mark.parametrize("part", ["coordinator", "averager", "dht"])
def test_health_fails_when_a_part_of_the_process_is_gone(part: str) -> None:
    peer = FakePeer()
    with served(peer.figures.pages()) as server:
        assert ask(server, "/healthz")[:2] == (200, "ok\n")
        peer.alive[part] = False
        assert ask(server, "/healthz")[0] == 503


def test_health_fails_when_the_training_thread_has_ended() -> None:
    peer, made = FakePeer(), list[Pages]()
    training = threading.Thread(target=lambda: made.append(peer.figures.pages()))
    training.start()
    training.join()
    page = made[0]["/healthz"]()
    assert (page.status, page.body) == (503, b"dead: training\n")


def test_many_can_look_at_once_while_the_peer_goes_on() -> None:
    shown, statuses = Shown(), list[int]()
    pages: Pages = {"/metrics": shown.metrics.page}
    with served(pages) as server:

        def look() -> None:
            for _ in range(5):
                statuses.append(ask(server, "/metrics")[0])

        lookers = [threading.Thread(target=look) for _ in range(8)]
        for looker in lookers:
            looker.start()
        for _ in range(300):
            shown.everything()
        for looker in lookers:
            looker.join(20)
        assert statuses == [200] * 40
        status, body, headers = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert f'dilocox_tokens_total{{stage="1"}} {float(FACTS.tokens)}' in body
    assert 'dilocox_rounds_total{outcome="counted",stage="1"} 300.0' in body


# ---- clients that do not behave ------------------------------------------------------------------
def test_who_sends_nothing_or_no_http_keeps_nobody_else_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_pages, "REQUEST_LIMIT_S", 0.5)
    with served({"/page": lambda: Page.text("here")}) as server:
        silent = [socket.create_connection((LOCAL, server.port)) for _ in range(8)]
        try:
            assert ask(server, "/page")[0] == 200
            with socket.create_connection((LOCAL, server.port), timeout=5) as odd:
                odd.sendall(b"hello\r\n\r\n")
                assert odd.recv(100).startswith(b"HTTP/1.1 400")
            for each in silent:
                each.settimeout(5)
                assert _ended(each)  # one deadline for all of a request
        finally:
            for each in silent:
                each.close()


def test_a_request_that_is_too_long_is_ended_at_once() -> None:
    with (
        served({}) as server,
        socket.create_connection((LOCAL, server.port), timeout=3) as long,
    ):
        long.sendall(b"x" * 20_000)
        assert _ended(long)


def test_one_byte_now_and_then_does_not_prolong_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "REQUEST_LIMIT_S", 0.5)
    with (
        served({}) as server,
        socket.create_connection((LOCAL, server.port), timeout=5) as slow,
    ):
        began = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):
            while time.monotonic() < began + 5:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < began + 3


def test_more_than_so_many_at_once_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "MAX_REQUESTS", 2)
    with served({"/page": lambda: Page.text("here")}) as server:
        held = [socket.create_connection((LOCAL, server.port)) for _ in range(2)]
        try:
            with socket.create_connection((LOCAL, server.port), timeout=5) as third:
                assert _ended(third)
        finally:
            for each in held:
                each.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # the places come back
            try:
                assert ask(server, "/page")[0] == 200
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail("the server turns everybody away")


def _ended(connection: socket.socket) -> bool:
    """Whether the server ends a connection without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


# ---- its life ------------------------------------------------------------------------------------
def test_it_gives_the_port_back_at_once_though_a_client_hangs_on() -> None:
    with PageServer(LOCAL, 0, {}) as server, socket.create_connection((LOCAL, server.port)):
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 2
        check_port(LOCAL, server.port)


def test_its_threads_end_with_the_process() -> None:
    with PageServer(LOCAL, 0, {}):
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "pages")
        assert any(thread.name == "pages" for thread in threading.enumerate())


def test_a_taken_port_is_named_with_its_mend(taken_port: int) -> None:
    for opens in (check_port, lambda host, port: PageServer(host, port, {})):
        with pytest.raises(PortTaken, match=rf"port {taken_port} .*--metrics-port"):
            opens(LOCAL, taken_port)
    with pytest.raises(PortTaken, match=" --port"):
        check_port(LOCAL, taken_port, option="")


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", ""])
def test_a_host_that_is_none_is_named_with_its_mend(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"--metrics-host .*127\.0\.0\.1"):
        check_port(host, 0)


# ---- a peer's port -------------------------------------------------------------------------------
def options(port: int | None, state: Path = Path()) -> PeerOptions:
    given: dict[str, Any] = dict.fromkeys(PeerOptions.__dataclass_fields__, "")
    given |= {"state": state, "metrics_host": LOCAL, "metrics_port": port}
    return PeerOptions(**given)


def test_a_second_peer_goes_on_without_the_default_port_and_says_so_once(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_pages, "DEFAULT_PORT", taken_port)
    with http_pages.served(LOCAL, None, {}) as server:
        assert server is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"port {taken_port} is taken" in line
    assert "--metrics-port" in line


def test_a_port_that_was_asked_for_must_be_had(taken_port: int, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="--metrics-port"):
        peer_module.run_peer(options(taken_port, tmp_path / "state"))
    assert not (tmp_path / "state").exists()  # it was said before anything was made or joined
    with pytest.raises(EnvironmentFault, match="--metrics-port"):
        http_pages.served(LOCAL, taken_port, {})  # taken since


def test_zero_is_no_server_and_a_free_port_is_served() -> None:
    with http_pages.served(LOCAL, 0, {}) as server:
        assert server is None
    with socket.create_server((LOCAL, 0)) as other:
        free = other.getsockname()[1]
    with http_pages.served(LOCAL, free, {"/page": lambda: Page.text("here")}) as server:
        assert isinstance(server, PageServer)
        assert ask(server, "/page")[0] == 200
