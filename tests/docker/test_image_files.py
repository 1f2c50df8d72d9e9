"""The two programs in the image beside dilocox: its health check and its entry point."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.ports import free_port

DOCKER = Path(__file__).parents[2] / "docker"


@contextmanager
def server(status: int) -> Generator[int]:
    """A server that answers /healthz with a status; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()
            self.wfile.write(b"the DHT process has ended\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield http.server_port
        finally:
            http.shutdown()
            thread.join()


def health(*arguments: str, **variables: int) -> tuple[int, str]:
    """Run the health check; its exit code and its line."""
    done = subprocess.run(
        [sys.executable, "-I", str(DOCKER / "health.py"), *arguments],
        env={name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout


def test_healthy_is_what_healthz_says() -> None:
    with server(200) as port:
        assert health(DILOCOX_METRICS_PORT=port) == (0, "ok\n")
        assert health(f"http://127.0.0.1:{port}/healthz", DILOCOX_METRICS_PORT=1) == (0, "ok\n")
    with server(503) as port:
        code, line = health(DILOCOX_METRICS_PORT=port)
    assert code == 1
    assert "503" in line
    assert "the DHT process has ended" in line


def test_where_no_metrics_are_served_the_libp2p_port_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert health(DILOCOX_METRICS_PORT=0, DILOCOX_PORT=port) == (0, "ok\n")
        assert health(DILOCOX_METRICS_PORT=free_port(), DILOCOX_PORT=port) == (0, "ok\n")
    for metrics in (0, free_port()):
        assert health(DILOCOX_METRICS_PORT=metrics, DILOCOX_PORT=free_port())[0] == 1


def test_a_command_of_which_no_port_is_known_is_well_while_it_runs() -> None:
    """A monitor, or a peer that waits for a bootstrap: the image alone names the metrics' port."""
    for metrics in (0, free_port()):
        assert health(DILOCOX_METRICS_PORT=metrics) == (0, "ok\n")
        assert health(DILOCOX_METRICS_PORT=metrics, DILOCOX_PORT=0) == (0, "ok\n")
    assert health() == (0, "ok\n")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a `dilocox` that tells its invite and arguments."""
    program = tmp_path / "bin" / "dilocox"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "${DILOCOX_INVITE-none}" "$@"\nexit 7\n')
    program.chmod(0o755)
    return program.parent


def entry(fake: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(DOCKER / "entrypoint.sh"), *arguments],
        env={"PATH": f"{fake}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_entry_point_hands_over_arguments_and_exit_code(fake: Path) -> None:
    done = entry(fake, "peer", "an invite")
    assert (done.returncode, done.stdout) == (7, "none peer an invite\n")


def test_an_invite_in_a_file_is_taken_where_none_is_given(fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "invite"
    file.write_text("dilocox:from-the-file\n")
    done = entry(fake, "peer", INVITE_FILE=str(file), DILOCOX_INVITE="")
    assert done.stdout == "dilocox:from-the-file peer\n"
    done = entry(fake, "peer", INVITE_FILE=str(file), DILOCOX_INVITE="dilocox:given")
    assert done.stdout == "dilocox:given peer\n"


def test_an_invite_that_comes_late_is_waited_for(fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "invite"
    late = threading.Timer(0.3, file.write_text, ["dilocox:late\n"])
    late.start()
    done = entry(fake, "peer", INVITE_FILE=str(file), INVITE_WAIT_S="20")
    late.join()
    assert done.stdout == "dilocox:late peer\n"


def test_an_invite_that_never_comes_is_an_error_that_names_the_file(fake: Path) -> None:
    done = entry(fake, "peer", INVITE_FILE="/nowhere/invite", INVITE_WAIT_S="0")
    assert done.returncode == 1
    assert "/nowhere/invite" in done.stderr
