"""The server of figures and health: what it answers, and what it does not let itself be kept by."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer import http_pages
from dilocox.peer.http_pages import (
    MetricSpec,
    MetricTable,
    Page,
    PageRequest,
    Pages,
    PageServer,
    check_port,
    health_page,
    metrics_page,
    readiness_page,
)
from dilocox.peer.options import PeerOptions
from dilocox.peer.process.peer import run_peer
from tests.dht.processes import wait_until

LOCAL = "127.0.0.1"


@contextmanager
def served(pages: Pages, **limits: Any) -> Generator[PageServer]:
    with PageServer(LOCAL, 0, pages, **limits) as server:
        yield server


def ask_raw(server: PageServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    with closing(HTTPConnection(LOCAL, server.port, timeout=5)) as connection:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", path, headers=names)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


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


def test_a_number_that_json_does_not_know_is_null_on_a_page() -> None:
    page = Page.json({"loss": float("nan"), "most": [float("inf"), 0.1]})
    assert page.body == b'{"loss":null,"most":[null,0.1]}'


def test_head_has_no_body_and_other_methods_and_paths_are_refused() -> None:
    with served({"/page": lambda: Page.text("here")}) as server:
        assert ask(server, "/page", "HEAD")[:2] == (200, "")
        status, _, headers = ask(server, "/page", "POST")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
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


def test_health_and_readiness_name_what_is_dead_and_why_not() -> None:
    assert health_page({"training": lambda: True}) == Page.text("ok")
    page = health_page({"training": lambda: True, "averaging process": lambda: False})
    assert (page.status, page.body) == (503, b"dead: averaging process\n")
    assert readiness_page("").status == 200
    page = readiness_page("joining")
    assert (page.status, page.body) == (503, b"not ready: joining\n")


@pytest.mark.parametrize("encodings", ["gzip, deflate, br", "br;q=1.0,GZIP;q=0.5", "gzip"])
def test_a_page_that_is_kept_is_short_for_who_takes_gzip(encodings: str) -> None:
    figures = b'{"round": 1000}' * 1000
    with served({"/page": Page(body=figures).kept}) as server:
        status, body, headers = ask_raw(server, "/page", Accept_Encoding=encodings)
    assert (status, headers["Content-Encoding"], headers["Vary"]) == (
        200,
        "gzip",
        "Accept-Encoding",
    )
    assert gzip.decompress(body) == figures and len(body) < len(figures) / 10
    assert headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("encodings", ["", "identity", "br, gzip;q=0", "gzip; q=0.0, br", "xgzip"])
def test_who_does_not_take_gzip_gets_it_as_it_is(encodings: str) -> None:
    with served({"/page": Page(body=b"figures").kept}) as server:
        status, body, headers = ask_raw(server, "/page", Accept_Encoding=encodings)
    assert (status, body) == (200, b"figures") and "Content-Encoding" not in headers


def test_who_has_the_page_gets_it_again_only_when_it_is_another_one() -> None:
    page = Page(body=b"first").kept()
    with served({"/page": lambda: page, "/other": lambda: Page(body=b"")}) as server:
        tag = ask_raw(server, "/page")[2]["ETag"]
        status, body, headers = ask_raw(server, "/page", If_None_Match=f'"x", {tag}')
        assert (status, body, headers["ETag"]) == (304, b"", tag)
        assert headers["Cache-Control"] == "no-cache", "else a browser does not keep it"
        page = Page(body=b"second").kept()
        assert ask_raw(server, "/page", If_None_Match=tag)[:2] == (200, b"second")
        assert ask_raw(server, "/other")[2]["Cache-Control"] == "no-store"


# ---- metrics -------------------------------------------------------------------------------------
def test_metrics_are_counters_or_gauges_by_their_names_and_unknown_ones_are_left_out() -> None:
    table = MetricTable(
        specs=(
            MetricSpec[int]("seen_total", "Counted.", lambda n: n),
            MetricSpec[int]("up", "Whether it is.", lambda _: True, ()),
            MetricSpec[int]("unknown", "Nobody knows.", lambda _: None),
            MetricSpec[int]("kinds", "By kind.", lambda _: {"a": 1, 'b"\n': None}, ("kind",)),
            MetricSpec[int]("pairs", "By two.", lambda n: {(n, 'x"\n'): 0.5}, ("n", "text")),
        ),
        source=lambda: 7,
        prefix="p_",
        labels={"run": "r"},
    )
    families = text_string_to_metric_families(metrics_page(table).body.decode())
    assert {
        (each.name, each.type, each.documentation, *(str((s[1], s[2])) for s in each.samples))
        for each in families
    } == {
        ("p_seen", "counter", "Counted.", "({'run': 'r'}, 7.0)"),
        ("p_up", "gauge", "Whether it is.", "({'run': 'r'}, 1.0)"),
        ("p_kinds", "gauge", "By kind.", "({'kind': 'a', 'run': 'r'}, 1.0)"),
        ("p_pairs", "gauge", "By two.", str(({"n": "7", "run": "r", "text": 'x"\n'}, 0.5))),
    }


# ---- clients that do not behave ------------------------------------------------------------------
def test_who_sends_nothing_or_no_http_keeps_nobody_else_out() -> None:
    with (
        served({"/page": lambda: Page.text("here")}, request_limit_s=0.5) as server,
        ExitStack() as s,
    ):
        silent = [s.enter_context(connected(server)) for _ in range(8)]
        assert ask(server, "/page")[0] == 200
        odd = s.enter_context(connected(server))
        odd.sendall(b"hello\r\n\r\n")
        assert odd.recv(100).startswith(b"HTTP/1.1 400")
        assert all(_ended(each) for each in silent)  # one deadline for all of a request


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: 1\r\nY: "])
def test_a_request_that_is_too_long_is_refused_at_once(begin: bytes) -> None:
    with served({}, request_limit_s=60.0) as server, connected(server) as long:
        long.sendall(begin + b"x" * 20_000)
        with suppress(ConnectionResetError):  # it does not take all of it
            assert long.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_one_byte_now_and_then_does_not_prolong_a_request() -> None:
    with served({}, request_limit_s=0.5) as server, connected(server) as slow:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):
            while time.monotonic() < began + 5:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < began + 3


def test_a_request_that_was_read_may_get_another_deadline() -> None:
    cut_after: list[float] = []

    class Slow(PageRequest):
        def answer(self, path: str) -> Page | None:
            cast(PageServer, self.server).set_deadline(self.connection, 1.0)
            began = time.monotonic()
            self.connection.recv(1)  # until the server ends the connection
            cut_after.append(time.monotonic() - began)

    with served({}, request_limit_s=0.2, handler=Slow) as server, connected(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: bool(cut_after), 10.0)
    assert 0.9 < cut_after[0] < 5.0


def test_a_thin_line_gets_more_time_for_the_answer_than_for_the_request() -> None:
    large = {"/large": lambda: Page(body=bytes(50_000_000))}
    limits = {"request_limit_s": 0.5, "answer_limit_s": 30.0}
    with served(large, **limits) as server, connected(server) as thin, connected(server) as silent:
        thin.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert _ended(silent)
        time.sleep(0.7)
        came = 0
        while chunk := thin.recv(1 << 20):
            came += len(chunk)
    assert came > 50_000_000


def test_who_does_not_read_holds_its_place_until_the_deadline_and_others_are_turned_away() -> None:
    large = {"/large": lambda: Page(body=bytes(50_000_000)), "/page": lambda: Page.text("here")}
    with served(large, request_limit_s=1.0, max_requests=1) as server, connected(server) as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert deaf.recv(100).startswith(b"HTTP/1.1 200")
        with connected(server) as other:
            assert _ended(other)

        wait_until(lambda: _answers(server), 5.0)


@pytest.mark.parametrize("thread", ["the request's", "its deadline's"])
def test_a_request_for_which_no_thread_can_be_started_takes_no_place_for_ever(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def fail_at(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == (1 if thread == "the request's" else 2):
            raise RuntimeError("can't start new thread")
        start(self)

    with served({"/page": lambda: Page.text("here")}, max_requests=1) as server:
        monkeypatch.setattr(threading.Thread, "start", fail_at)
        with connected(server) as unlucky:
            assert _ended(unlucky)
        wait_until(lambda: _answers(server), 5.0)


def connected(server: PageServer) -> socket.socket:
    return socket.create_connection((LOCAL, server.port), timeout=5)


def _answers(server: PageServer) -> bool:
    with suppress(OSError):
        return ask(server, "/page")[0] == 200
    return False


def _ended(connection: socket.socket) -> bool:
    """Whether the server ends a connection without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


# ---- its life ------------------------------------------------------------------------------------
def test_it_gives_the_port_back_at_once_though_a_client_hangs_on() -> None:
    with ExitStack() as client:
        with PageServer(LOCAL, 0, {}) as server:
            client.enter_context(connected(server))
            pages = [thread for thread in threading.enumerate() if thread.name == "pages"]
            assert pages and all(thread.daemon for thread in pages)  # they end with the process
            began = time.monotonic()
        assert time.monotonic() - began < 2
        check_port(LOCAL, server.port)


def test_a_taken_port_is_named_with_the_fix(taken_port: int) -> None:
    for opens in (check_port, lambda host, port: PageServer(host, port, {})):
        with pytest.raises(EnvironmentFault, match=rf"port {taken_port} .*--metrics-port"):
            opens(LOCAL, taken_port)
    with pytest.raises(EnvironmentFault, match=" --port"):
        check_port(LOCAL, taken_port, option="")


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", ""])
def test_a_host_that_is_none_is_named_with_the_fix(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"--metrics-host .*127\.0\.0\.1"):
        check_port(host, 0)


# ---- a peer's port -------------------------------------------------------------------------------
def test_a_second_peer_takes_the_next_free_port_and_says_which(
    taken_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", logger="dilocox.peer.http_pages"),
        http_pages.served(LOCAL, None, {}, ports=range(taken_port, taken_port + 20)) as server,
    ):
        assert isinstance(server, PageServer) and server.port > taken_port
    assert caplog.messages == [
        f"port {taken_port} is taken: port {server.port} takes its place",
        f"metrics at http://{LOCAL}:{server.port}/metrics, health at /healthz",
    ]


def test_without_a_free_port_it_goes_on_and_says_so_once(
    taken_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with http_pages.served(LOCAL, None, {}, ports=(taken_port,)) as server:
        assert server is None
    (line,) = caplog.messages
    assert f"ports from {taken_port} on are taken" in line and "--metrics-port" in line


def test_a_port_that_was_asked_for_must_be_had(taken_port: int, tmp_path: Path) -> None:
    given: dict[str, Any] = dict.fromkeys(PeerOptions.__dataclass_fields__, "")
    given |= {"state": tmp_path / "state", "metrics_host": LOCAL, "metrics_port": taken_port}
    with pytest.raises(EnvironmentFault, match="--metrics-port"):
        run_peer(PeerOptions(**given))
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
