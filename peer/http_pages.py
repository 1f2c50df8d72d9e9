"""A small HTTP server beside everything else: figures, health and readiness on one port.

What: pages by path, each made when it is asked for. GET and HEAD, one request a connection.
Why not http.server: it asks the DNS for its own name when it starts, takes as long as a client
likes to send a request, and as many clients as there are. Here a connection has one deadline from
its first byte to its last, and there are only so many at once.
How: daemon threads, which end with the process. Start it after all forks: a child would keep the
port, and threads do not survive a fork.

`Family` is a metric in Prometheus's text format, as the monitor and the bootstrap write it.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, cast

from dilocox.dht.errors import EnvironmentFault, InvalidInput

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9400  # as in the image
REQUEST_LIMIT_S = 5.0  # from the connection to the end of the answer
MAX_REQUESTS = 32  # at once; a browser opens six
MAX_HEADER_BYTES = 16 * 1024
CLOSE_LIMIT_S = 1.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is answered: `headers` beside those that the server sets."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def text(cls, text: str, status: int = HTTPStatus.OK) -> Page:
        """Plain text of one line."""
        return cls(body=f"{text}\n".encode(), status=status)


Pages = Mapping[str, Callable[[], Page]]
"""By path, without query. Called in threads of their own, several at once."""


class PortTaken(EnvironmentFault):
    """Another program listens there."""


class PageServer:
    """A context in which the pages are served; the port is taken when it is made.

    Attributes:
        port: the one it listens on.
    """

    def __init__(self, host: str, port: int, pages: Pages, *, option: str = "metrics"):
        """option: what the names of the options for host and port begin with, for errors.

        Raises:
            PortTaken: another program listens there.
            EnvironmentFault: this user may not open that port.
            InvalidInput: the host is no address of this machine.
        """
        self._server = _opened(host, port, pages, option)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="pages", daemon=True
        )

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back, within a second; an answer under way may be cut off."""
        if self._thread.is_alive():
            threading.Thread(target=self._server.shutdown, daemon=True).start()
            self._thread.join(CLOSE_LIMIT_S)
        self._server.server_close()


def check_port(host: str, port: int, *, option: str = "metrics") -> None:
    """Raise what `PageServer` would, before anything else is started."""
    _opened(host, port, {}, option).server_close()


def served(host: str, port: int | None, pages: Pages) -> AbstractContextManager[object]:
    """A server of these pages; none at port 0. Without a port, DEFAULT_PORT if that is free.

    Raises what `PageServer` does where a port was given.
    """
    if port == 0:
        return nullcontext()
    try:
        server = PageServer(host, DEFAULT_PORT if port is None else port, pages)
    except EnvironmentFault:
        if port is not None:
            raise
        logger.warning(
            "no metrics: port %d is taken, by another peer perhaps; --metrics-port takes another "
            "one, or 0 for none",
            DEFAULT_PORT,
        )
        return nullcontext()
    logger.info("metrics at http://%s:%d/metrics, health at /healthz", host, server.port)
    return server


def health_page(signs: Mapping[str, Callable[[], bool]]) -> Page:
    """Whether all these parts of the process live."""
    dead = [name for name, lives in signs.items() if not lives()]
    if dead:
        return Page.text(f"dead: {', '.join(dead)}", HTTPStatus.SERVICE_UNAVAILABLE)
    return Page.text("ok")


def readiness_page(reason: str) -> Page:
    """Whether the process does its work, or why not yet or no more."""
    if reason:
        return Page.text(f"not ready: {reason}", HTTPStatus.SERVICE_UNAVAILABLE)
    return Page.text("ready")


# ---- the server ----------------------------------------------------------------------------------
class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # connections of a former start may linger
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_REQUESTS

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily, pages: Pages):
        self.address_family = family
        self.pages = pages
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, as a rule; it is nothing for a volunteer's terminal."""
        logger.debug("a request was not answered", exc_info=True)


class _Request(socketserver.BaseRequestHandler):
    """One connection."""

    def handle(self) -> None:
        self._deadline = time.monotonic() + REQUEST_LIMIT_S
        head = self._head()
        if head is None:
            return
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            page, method = Page.text("no HTTP request", HTTPStatus.BAD_REQUEST), "GET"
        else:
            method = words[0]
            page = self._page(method, words[1].partition("?")[0])
        self._answer(page, with_body=method != "HEAD")

    def _head(self) -> bytes | None:
        """The request up to its empty line; None if it does not come, or is too long."""
        taken = b""
        while b"\r\n\r\n" not in taken:
            self._patience()
            piece = self.request.recv(4096)
            taken += piece
            if not piece or len(taken) > MAX_HEADER_BYTES:
                return None
        return taken

    def _page(self, method: str, path: str) -> Page:
        if method not in ("GET", "HEAD"):
            return Page.text("only GET and HEAD", HTTPStatus.METHOD_NOT_ALLOWED)
        pages = cast("_Server", self.server).pages
        make = pages.get(path)
        if make is None:
            known = " ".join(sorted(pages))
            return Page.text(f"nothing here; there is {known}", HTTPStatus.NOT_FOUND)
        try:
            return make()
        except Exception:  # the edge of this thread
            logger.exception("%s could not be made", path)
            return Page.text("an error, see the log", HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer(self, page: Page, *, with_body: bool) -> None:
        headers = {
            "Content-Type": page.content_type,
            "Content-Length": str(len(page.body)),
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **page.headers,
        }
        lines = [f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._patience()
        self.request.sendall(head + page.body if with_body else head)

    def _patience(self) -> None:
        """What comes next may take until the deadline."""
        self.request.settimeout(max(0.001, self._deadline - time.monotonic()))


def _opened(host: str, port: int, pages: Pages, option: str) -> _Server:
    flag = f"--{option}-" if option else "--"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return _Server(address, family, pages)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is in use by another program: stop it, or choose another "
                f"one with {flag}port"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise EnvironmentFault(
                f"this user may not open port {port}: choose one from 1024 up with {flag}port"
            ) from error
        raise InvalidInput(
            f"{flag}host {host!r} is no address of this machine ({error.strerror}): give "
            "127.0.0.1 for this machine only, or 0.0.0.0 for all networks"
        ) from error


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dilocox_swarm_"
RUN_LABEL = 12  # letters of the run id


@dataclass
class Family:
    """A metric: labels and value of each of its series."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    series: list[tuple[Mapping[str, object], float]] = field(
        default_factory=list[tuple[Mapping[str, object], float]]
    )

    def add(self, value: float | None, **labels: object) -> None:
        """One more series; nothing where the value is not known."""
        if value is not None and not math.isnan(value):
            self.series.append((labels, value))

    def lines(self, run: str, prefix: str = PREFIX) -> Iterable[str]:
        """In Prometheus's text format."""
        name = prefix + self.name
        yield f"# HELP {name} {self.help}"
        yield f"# TYPE {name} {self.kind}"
        for labels, value in self.series:
            told = ",".join(f'{key}="{text}"' for key, text in [("run", run), *labels.items()])
            yield f"{name}{{{told}}} {value!r}"
