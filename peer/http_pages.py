"""A small HTTP server beside everything else: metrics, health and readiness on one port.

What: pages by path, each made when it is asked for; GET and HEAD, one request a connection.
Prometheus's client library writes the text of `/metrics`: a program lists its metrics as a table of
`MetricSpec`, and `MetricTable` reads them when somebody asks.
Why not the standard library's server as it is: it asks the DNS for its own name when it starts, and
takes as many clients as there are, each for as long as it likes. Here a connection has one deadline
from its first byte to its last, and there are only so many at once. A server that answers more than
GET extends `PageRequest` (commands/serve.py); one that answers for more paths than can be listed,
or decides which callers may ask, has a `Fallback` (process/local_page.py).
How: daemon threads, which end with the process. Start it after all forks: a child would keep the
port, and threads do not survive a fork.
"""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import io
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.os_process import strict_json

logger = logging.getLogger(__name__)

DEFAULT_PORTS = range(9400, 9420)  # the first one as in the image
REQUEST_LIMIT_S = 5.0  # from the connection to the end of the answer
GZIP_LEVEL = 6
MAX_REQUESTS = 32  # at once; a browser opens six
MAX_HEADER_BYTES = 16 * 1024
CLOSE_LIMIT_S = 1.0
POLL_S = 0.1
RUN_LABEL = 12  # letters of the run id

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is answered: `headers` beside those that the server sets.

    packed: the body as gzip has it, for who takes that. tag: names what it is, for who has it.
    """

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    packed: bytes = b""
    tag: str = ""

    def kept(self) -> Page:
        """The same, for callers that ask for it again and again: short, and sent to none twice."""
        digest = hashlib.sha256(self.body).hexdigest()[:32]
        return replace(self, packed=gzip.compress(self.body, GZIP_LEVEL, mtime=0), tag=digest)

    @classmethod
    def text(cls, text: str, status: int = HTTPStatus.OK) -> Page:
        return cls(body=f"{text}\n".encode(), status=status)

    @classmethod
    def json(cls, value: Any, status: int = HTTPStatus.OK) -> Page:
        """A number that is not finite, which JSON does not know, is null."""
        body = strict_json(value, separators=(",", ":")).encode()
        return cls(body=body, content_type="application/json", status=status)


def html_page(html: str) -> Page:
    """A page for people that is whole in itself: only its own script and style may run, named by
    their hashes, and nothing is loaded from anywhere but this server.
    """

    def hashes(tag: str) -> str:
        inline = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in inline)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Page(body=html.encode(), content_type="text/html; charset=utf-8", headers=headers)


Pages = Mapping[str, Callable[[], Page]]
"""By path, without query. Called in threads of their own, several at once."""


Fallback = Callable[[str, str, Mapping[str, str]], Page | None]
"""To method, path and headers of a request for no page of `Pages`; None: there is nothing."""


class PageServer(ThreadingHTTPServer):
    """A context in which the pages are served; the port is taken when it is made.

    Attributes:
        port: the one it listens on. url: of this, without a path. answer_limit_s: as given.
    """

    block_on_close = False
    request_queue_size = MAX_REQUESTS

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        *,
        answer: Fallback | None = None,
        option: str = "metrics",
        request_limit_s: float = REQUEST_LIMIT_S,
        answer_limit_s: float = 0.0,
        max_requests: int = MAX_REQUESTS,
        handler: Callable[[Any, Any, Any], BaseHTTPRequestHandler] | None = None,
    ):
        """answer: to requests for no page. option: what the names of the options for host and port
        begin with, for errors. request_limit_s: from a connection to the end of the answer.
        answer_limit_s: for the answer alone, to a request that was read, if that is to be more.
        max_requests: at once. handler: of a connection, `PageRequest` if left out.

        Raises:
            EnvironmentFault: another program listens there, or this user may not open that port.
            InvalidInput: the host is no address of this machine.
        """
        self.pages = pages
        self.answer = answer
        self._request_limit_s = request_limit_s
        self.answer_limit_s = answer_limit_s
        self._slots = threading.BoundedSemaphore(max_requests)
        self._deadlines: dict[object, threading.Timer] = {}
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__(cast("tuple[str, int]", address), handler or PageRequest)
        except OSError as error:
            raise _fault(error, host, port, f"--{option}-" if option else "--") from error
        self.port = int(self.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_S,), name="pages", daemon=True
        )

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the port back, within a second; an answer under way may be cut off."""
        if self._thread.is_alive():
            threading.Thread(target=self.shutdown, daemon=True).start()
            self._thread.join(CLOSE_LIMIT_S)
        self.server_close()

    # ---- what the base class calls ---------------------------------------------------------------
    def server_bind(self) -> None:
        """As the base class, but without a question to the DNS."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if not too many are answered already."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now; the base class ends the connection
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer; at the deadline whatever waits for the client ends."""
        try:
            self.set_deadline(request, self._request_limit_s)
            super().process_request_thread(request, client_address)
        except RuntimeError:  # as above
            self.handle_error(request, client_address)
            self.shutdown_request(request)
        finally:
            if (deadline := self._deadlines.pop(request, None)) is not None:
                deadline.cancel()
            self._slots.release()

    def set_deadline(self, request: Any, limit_s: float) -> None:
        """End this connection so many seconds from now, and not when it was said before."""
        deadline = threading.Timer(limit_s, _cut_off, (request,))
        deadline.daemon = True
        deadline.start()
        if (former := self._deadlines.get(request)) is not None:
            former.cancel()
        self._deadlines[request] = deadline

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, as a rule; it is nothing for a volunteer's terminal."""
        logger.debug("a request was not answered", exc_info=True)


def check_port(host: str, port: int, *, option: str = "metrics") -> None:
    """Raise what `PageServer` would, before anything else is started."""
    PageServer(host, port, {}, option=option).server_close()


def served(
    host: str,
    port: int | None,
    pages: Pages,
    *,
    answer: Fallback | None = None,
    query: str = "",
    ports: Sequence[int] = DEFAULT_PORTS,
) -> AbstractContextManager[object]:
    """A server of these pages; none at port 0. Without a port, the first free one of `ports`.

    query: what whoever may use the page of `answer` appends to its address. Raises what
    `PageServer` does where a port was given.
    """
    if port == 0:
        return nullcontext()
    server = None if port is None else PageServer(host, port, pages, answer=answer)
    for free in ports:
        with suppress(EnvironmentFault):  # another peer's, as a rule
            server = server or PageServer(host, free, pages, answer=answer)
    if server is None:
        logger.warning("no metrics: all ports from %d on are taken; see --metrics-port", ports[0])
        return nullcontext()
    if port is None and server.port != ports[0]:
        logger.info("port %d is taken: port %d takes its place", ports[0], server.port)
    if answer is not None:
        logger.info("this peer's own page is %s/%s", server.url, query)
    logger.info("metrics at %s/metrics, health at /healthz", server.url)
    return server


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def asks_this_machine(headers: Mapping[str, str]) -> bool:
    """Whether a request names this machine; else any web page could ask a server on loopback, by a
    name that leads there.
    """
    with suppress(ValueError):
        return is_loopback(urlsplit(f"//{headers.get('Host') or ''}").hostname or "")
    return False


_TAKES_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;(?!\s*q=0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)


def for_caller(page: Page, headers: Mapping[str, str]) -> Page:
    """The page as a caller with these headers takes it, or that it has this one."""
    if not page.tag:
        return page
    tag = f'W/"{page.tag}"'  # weak: of the text, packed or not
    more = {"Cache-Control": "no-cache", "ETag": tag, "Vary": "Accept-Encoding", **page.headers}
    known = headers.get("If-None-Match") or ""
    if tag in [each.strip() for each in known.split(",")]:
        return replace(page, body=b"", status=HTTPStatus.NOT_MODIFIED, headers=more)
    if _TAKES_GZIP.search(headers.get("Accept-Encoding") or ""):
        return replace(page, body=page.packed, headers=more | {"Content-Encoding": "gzip"})
    return replace(page, headers=more)


def not_allowed(methods: str) -> Page:
    status = HTTPStatus.METHOD_NOT_ALLOWED
    return Page(body=f"only {methods}\n".encode(), status=status, headers={"Allow": methods})


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


# ---- metrics -------------------------------------------------------------------------------------
Value = float | None


@dataclass(frozen=True)
class MetricSpec(Generic[S]):
    """One metric: a counter if its name ends in `_total`, else a gauge.

    read: its value, None where it is not known; where it has `labels`, values by their values (a
    tuple of these for more than one label). Called in the thread of the caller.
    """

    name: str
    help: str
    read: Callable[[S], Value | Mapping[Any, Value]]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)  # a registry needs a hash
class MetricTable(Collector, Generic[S]):
    """All metrics of a program, read from `source` at each look; those without a value are left
    out. Every name begins with `prefix`, every series has `labels`.
    """

    specs: Sequence[MetricSpec[S]]
    source: Callable[[], S]
    prefix: str
    labels: Mapping[str, str]

    def collect(self) -> Iterator[Metric]:
        """What Prometheus's client library asks for."""
        source = self.source()
        for spec in self.specs:
            kind = CounterMetricFamily if spec.name.endswith("_total") else GaugeMetricFamily
            names = (*self.labels, *spec.labels)
            family = kind(self.prefix + spec.name, spec.help, labels=names)
            found = spec.read(source)
            for key, value in (found if isinstance(found, Mapping) else {(): found}).items():
                if value is not None:
                    own = cast("tuple[Any, ...]", key if isinstance(key, tuple) else (key,))
                    family.add_metric((*self.labels.values(), *map(str, own)), float(value))
            if family.samples:
                yield family


def metrics_page(metrics: Collector) -> Page:
    return Page(body=generate_latest(metrics), content_type=CONTENT_TYPE_LATEST)


def usual_pages(
    metrics: Collector, signs: Mapping[str, Callable[[], bool]], not_ready: Callable[[], str]
) -> Pages:
    """Metrics, health by these signs of life, and readiness, or why there is none."""
    return {
        "/metrics": lambda: metrics_page(metrics),
        "/healthz": lambda: health_page(signs),
        "/readyz": lambda: readiness_page(not_ready()),
    }


def by_source(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Counts by reason of several sources, as one table by `source_reason`."""
    return {
        f"{source}_{reason}": count
        for source, reasons in counts.items()
        for reason, count in reasons.items()
    }


def one_of(name: str, names: Sequence[str]) -> dict[str, float]:
    """1 for this one, 0 for the others."""
    return {each: float(each == name) for each in names}


# ---- a request -----------------------------------------------------------------------------------
class _Head(io.BufferedReader):
    """The lines of a request, of MAX_HEADER_BYTES together."""

    left = MAX_HEADER_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        if not self.left:
            raise LineTooLong("the request's header")  # the base class answers 431
        line = super().readline(self.left if size is None or size < 0 else min(size, self.left))
        self.left -= len(line)
        return line


class PageRequest(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of 0.9 an error would have no status
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile.detach())

    def do_GET(self) -> None:
        server = cast("PageServer", self.server)
        if server.answer_limit_s:
            server.set_deadline(self.connection, server.answer_limit_s)
        page = self.answer(self.path.partition("?")[0])
        if page is not None:
            page = for_caller(page, cast("Mapping[str, str]", self.headers))
            without = page.status == HTTPStatus.NOT_MODIFIED  # the length would be of what it has
            self.send_head(page, {} if without else {"Content-Length": str(len(page.body))})
            if self.command != "HEAD":
                self.wfile.write(page.body)

    def send_head(self, page: Page, more: Mapping[str, str]) -> None:
        """Send a page's status and headers, and these."""
        headers = {
            "Content-Type": page.content_type,
            **more,
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **page.headers,
        }
        self.send_response(page.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    # the base class asks for them by these names
    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def answer(self, path: str) -> Page | None:
        """What is answered; None where that was done already."""
        server = cast("PageServer", self.server)
        make, headers = server.pages.get(path), cast("Mapping[str, str]", self.headers)
        try:
            answer = None if make else server.answer
            if answer is not None and (page := answer(self.command, path, headers)) is not None:
                return page
            if self.command not in ("GET", "HEAD"):
                return not_allowed("GET, HEAD")
            if make is not None:
                return make()
        except Exception:  # the edge of this thread
            logger.exception("%s could not be made", path)
            return Page.text("an error, see the log", HTTPStatus.INTERNAL_SERVER_ERROR)
        known = " ".join(sorted(server.pages))
        return Page.text(f"nothing here; there is {known}", HTTPStatus.NOT_FOUND)

    def version_string(self) -> str:
        """Not the versions of Python and its server."""
        return "dilocox"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nothing for a volunteer's terminal."""
        logger.debug(format, *args)


def _cut_off(request: socket.socket) -> None:
    with suppress(OSError):  # it has just ended
        request.shutdown(socket.SHUT_RDWR)


def _fault(error: OSError, host: str, port: int, flag: str) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return EnvironmentFault(
            f"port {port} of {host} is in use by another program: stop it, or choose another one "
            f"with {flag}port"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return EnvironmentFault(
            f"this user may not open port {port}: choose one from 1024 up with {flag}port"
        )
    return InvalidInput(
        f"{flag}host {host!r} is no address of this machine ({error.strerror}): give 127.0.0.1 for "
        "this machine only, or 0.0.0.0 for all networks"
    )
