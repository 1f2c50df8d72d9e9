"""The command `dilocox serve`: the newest anchors of a run answer on this machine, by OpenAI's API
and on a page.

What: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, whole or as server-sent events,
and a page at `/` that uses them. As rounds come, newer weights are loaded beside those that answer,
and take their place between two texts.
Why one text at a time: a processor writes two no faster. A few requests wait, others are told to
come again.
How: the main thread follows the run, downloads and loads; each request has a thread of its own, in
which the model writes for it. A client that goes away ends its text at the next token.
"""

from __future__ import annotations

import json
import logging
import random
import re
import select
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from dilocox.dht.errors import DilocoxError
from dilocox.dht.join import Joined, check_node, visiting
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.dht.swarm_view import newest_round
from dilocox.peer.chain.rollback import last_rollback
from dilocox.peer.chain.visitor_download import run_claims
from dilocox.peer.commands.export import DEFAULT_TOKENS, TextModel, export_run, shown_rounds
from dilocox.peer.commands.model_memory import MAX_POSITIONS, check_model_memory, writing_bytes
from dilocox.peer.http_pages import (
    Page,
    PageRequest,
    Pages,
    PageServer,
    asks_this_machine,
    check_port,
    html_page,
    is_loopback,
)
from dilocox.peer.memory_and_disk import return_free_memory
from dilocox.peer.options import GB, ServeOptions
from dilocox.peer.os_process import STOPPED, StopSignal

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 18
MAX_WAITING = 4  # requests, beside the one that is answered
WAIT_LIMIT_S = 60.0  # for those before
WRITE_LIMIT_S = 300.0  # of one text
STALL_LIMIT_S = 10.0  # of a client that does not read
LOOK_S = 5.0  # between two looks at the rounds
RETRY_S = 60.0  # after a download that failed
SMALLER = "take --dtype bf16, --refresh-rounds 0, which never holds two models,"
# Fields that change no text; of others only what says "not at all" is passed over.
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


# ---- what is asked -------------------------------------------------------------------------------
class ApiError(Exception):
    """A request that gets an error, in OpenAI's form: a bad one, if no status says otherwise."""

    def __init__(
        self,
        message: str,
        status: int = HTTPStatus.BAD_REQUEST,
        *,
        field: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": field, "code": code}
        again = {"Retry-After": "10"} if status == HTTPStatus.TOO_MANY_REQUESTS else {}
        self.page = replace(Page.json({"error": error}, status), headers=again)


class ClientGone(ConnectionError):
    """Nobody reads the answer any more."""


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Asked(BaseModel):
    """What both kinds of request may say."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name of it
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    n: Literal[1] | None = 1


class AskedText(Asked):
    """A text to continue."""

    prompt: str = Field(min_length=1)


class AskedChat(Asked):
    """A conversation to answer in."""

    messages: list[_Message] = Field(min_length=1)


KINDS: Mapping[str, type[AskedText | AskedChat]] = {
    "/v1/completions": AskedText,
    "/v1/chat/completions": AskedChat,
}


def read_request(kind: type[AskedText | AskedChat], body: bytes) -> AskedText | AskedChat:
    """Raises ApiError, which names the first field that is wrong or not supported."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(word) for word in first["loc"][:1])
        raise ApiError(f"{field or 'the request'}: {first['msg']}", field=field or None) from error
    for field, value in (asked.model_extra or {}).items():
        neutral = not value or (field, value) in (("best_of", 1), ("response_format", _TEXT))
        if not neutral and field not in HARMLESS:
            raise ApiError(f"{field[:60]} is not supported here: leave it out", field=field[:60])
    return asked


_TEXT = {"type": "text"}
_PLAIN_ROLES = {"user": "user: ", "assistant": "assistant: "}


def prompt_of(asked: AskedText | AskedChat, model: TextModel) -> tuple[Tensor, list[str]]:
    """The token ids [1, length] of what is to be continued, and the texts at which it ends.

    A conversation is in the form of the tokenizer's chat template, or else in plain lines. Raises
    ApiError where the template does not take it.
    """
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if isinstance(asked, AskedText):
        return model.encode(asked.prompt), stops
    told: list[dict[str, str]] = []
    for said in asked.messages:
        content = said.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        told.append({"role": said.role, "content": text})
    if not model.tokenizer.chat_template:
        lines = [f"{_PLAIN_ROLES.get(one['role'], '')}{one['content']}\n" for one in told]
        return model.encode("".join(lines) + "assistant:"), [*stops, "\nuser:"]
    form = partial(model.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    try:
        return model.encode(form(told), split=False), stops
    except Exception as error:  # a template says so where roles are not in its order
        message = f"messages: the model's chat template says {error}"
        raise ApiError(message, field="messages") from error


# ---- what answers --------------------------------------------------------------------------------
class StopText:
    """Passes a text on up to the first of some stops.

    Attributes:
        met: whether the text has one. held: the end of it, which may be the beginning of one.
    """

    def __init__(self, stops: list[str]):
        self._stops = stops
        self.held, self.met = "", False

    def take(self, piece: str) -> str:
        """What may be shown of the text after this piece of it."""
        text = self.held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.met = bool(found)
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = min(found) if found else len(text) - max(begun, default=0)
        self.held = "" if found else text[end:]
        return text[:end]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with the round that its weights are of, and the tokens of the run up to there."""

    model: TextModel
    round: int
    tokens: int

    @property
    def positions(self) -> int:
        """Tokens of prompt and text together."""
        return min(self.model.positions or MAX_POSITIONS, MAX_POSITIONS)


class ChatService:
    """The model that answers, one text after the other; all calls from any thread.

    Attributes:
        run: its id. name: of the run, which is that of the model. loaded: what answers now.
    """

    def __init__(
        self,
        run: str,
        name: str,
        loaded: Loaded,
        *,
        wait_s: float = WAIT_LIMIT_S,
        write_s: float = WRITE_LIMIT_S,
    ):
        """wait_s: for the texts before. write_s: of one text, which is cut there."""
        self.run, self.name, self.write_s = run, name, write_s
        self.loaded, self._wait_s = loaded, wait_s
        self._created = int(time.time())
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(1 + MAX_WAITING)
        html = (files("dilocox.peer.commands") / "page" / "chat.html").read_text("utf-8")
        self._page = html_page(html)

    def pages(self) -> Pages:
        """What is served beside `KINDS`, by path."""

        def model() -> dict[str, Any]:
            now, of = self.loaded, {"object": "model", "created": self._created}
            facts = {"run": self.run, "round": now.round, "tokens": now.tokens}
            named = {"id": self.name, "owned_by": "dilocox", "context_length": now.positions}
            return of | named | facts

        return {
            "/": lambda: self._page,
            "/v1/models": lambda: Page.json({"object": "list", "data": [model()]}),
            f"/v1/models/{self.name}": lambda: Page.json(model()),
        }

    @contextmanager
    def turn(self) -> Generator[Loaded]:
        """The model for one text; raises ApiError where too many wait, or for too long."""
        with ExitStack() as held:
            for lock, wait_s in ((self._places, 0.0), (self._turn, self._wait_s)):
                if not lock.acquire(timeout=wait_s):
                    message = "others are answered first: ask again soon"
                    raise ApiError(message, HTTPStatus.TOO_MANY_REQUESTS)
                held.callback(lock.release)
            yield self.loaded

    def take(self, loaded: Loaded) -> None:
        """Let newer weights answer from the next text on; nobody holds the former ones then."""
        with self._turn:
            self.loaded = loaded
        return_free_memory()


class ChatRequest(PageRequest):
    """One connection: a page, or a text that is written while it is sent."""

    timeout = STALL_LIMIT_S

    def __init__(self, service: ChatService, *connection: Any):
        self._service = service
        self._streams = False
        super().__init__(*connection)

    def answer(self, path: str) -> Page | None:
        """As the base class, and the two kinds of text."""
        try:
            body = self._body() if self.command == "POST" else b""
            self._check_host()
            if path in cast(PageServer, self.server).pages:
                return super().answer(path)
            if path not in KINDS:
                there = ", ".join(["/", "/v1/models", *KINDS])
                raise ApiError(f"nothing is there; there is {there}", HTTPStatus.NOT_FOUND)
            if self.command != "POST":
                raise ApiError(f"{path} takes POST", HTTPStatus.METHOD_NOT_ALLOWED)
            # what is no JSON a browser sends for another site without asking first
            if self.headers.get_content_type() != "application/json":
                message = "send JSON, with Content-Type: application/json"
                raise ApiError(message, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            asked = read_request(KINDS[path], body)
            if asked.model not in (None, self._service.name):
                message = f"there is no model {asked.model!r}, there is {self._service.name!r}"
                raise ApiError(message, 404, field="model", code="model_not_found")
            return self._written(asked)
        except ApiError as refused:
            return refused.page
        except OSError:  # the client has gone
            raise
        except Exception:  # the edge of this thread
            logger.exception("a text could not be written")
            page = ApiError("an error, see the log", HTTPStatus.INTERNAL_SERVER_ERROR).page
            if not self._streams:
                return page
            self._send_event(page.body.decode())
            return None

    def _check_host(self) -> None:
        address = str(cast(PageServer, self.server).server_address[0])
        if is_loopback(address) and not asks_this_machine(cast("Mapping[str, str]", self.headers)):
            raise ApiError("ask for localhost or 127.0.0.1, not another name", HTTPStatus.FORBIDDEN)

    def _body(self) -> bytes:
        told = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", told):
            raise ApiError("the Content-Length is missing", HTTPStatus.LENGTH_REQUIRED)
        if (length := int(told)) > MAX_BODY_BYTES:
            message = f"a request has at most {MAX_BODY_BYTES:,} bytes"
            raise ApiError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if len(body := self.rfile.read(length)) < length:
            raise ClientGone
        limit_s = WAIT_LIMIT_S + self._service.write_s + STALL_LIMIT_S
        cast(PageServer, self.server).set_deadline(self.connection, limit_s)
        return body

    def _written(self, asked: AskedText | AskedChat) -> Page | None:
        """A text as a page, or sent event by event."""
        service, chat = self._service, isinstance(asked, AskedChat)
        kind = "chat.completion" if chat else "text_completion"
        about: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and asked.stream else kind,
            "created": int(time.time()),
            "model": service.name,
        }
        pieces: list[str] = []

        def show(piece: str, finish: str | None = None) -> None:
            if not asked.stream:
                pieces.append(piece)
            elif piece or finish:
                choice = _choice(chat, piece, finish, "delta")
                if chat and not self._streams:
                    choice["delta"]["role"] = "assistant"
                self._send_event(json.dumps(about | {"choices": [choice]}))

        with service.turn() as loaded:
            about["system_fingerprint"] = f"{service.run[:8]}-round-{loaded.round}"
            give_up = time.monotonic() + service.write_s
            ids, stops = prompt_of(asked, loaded.model)
            stop, length, most = StopText(stops), ids.shape[1], loaded.positions
            if length >= most:
                field = "messages" if chat else "prompt"
                message = f"{field}: {length} tokens; the model takes {most} with its answer"
                raise ApiError(message, field=field, code="context_length_exceeded")
            wanted = asked.max_completion_tokens or asked.max_tokens or DEFAULT_TOKENS
            wanted = min(most - length, wanted)

            def take(piece: str) -> bool:
                if _gone(self.connection):
                    raise ClientGone
                show(stop.take(piece))
                return stop.met or time.monotonic() > give_up

            seed = random.getrandbits(32) if asked.seed is None else asked.seed
            made = loaded.model.write(
                *(ids, wanted, seed, take), temperature=asked.temperature, top_p=asked.top_p
            )
        ended = stop.met or (made < wanted and time.monotonic() < give_up)
        finish = "stop" if ended else "length"
        show(stop.held, finish)
        usage = {"prompt_tokens": length, "completion_tokens": made, "total_tokens": length + made}
        if not asked.stream:
            choice = _choice(chat, "".join(pieces), finish, "message")
            return Page.json(about | {"choices": [choice], "usage": usage})
        if (asked.stream_options or {}).get("include_usage"):
            self._send_event(json.dumps(about | {"choices": [], "usage": usage}))
        self._send_event("[DONE]")
        return None

    def _send_event(self, data: str) -> None:
        if not self._streams:
            self._streams = True
            self.send_head(Page(body=b"", content_type="text/event-stream"), {})
        self.wfile.write(f"data: {data}\n\n".encode())


def _choice(chat: bool, text: str, finish: str | None, name: str) -> dict[str, Any]:
    """One choice of an answer; name: of what a chat's text is in."""
    said: dict[str, Any] = {"text": text}
    if chat:
        said = {name: {"content": text} | ({"role": "assistant"} if name == "message" else {})}
    return {"index": 0, **said, "finish_reason": finish, "logprobs": None}


def _gone(connection: socket.socket) -> bool:
    """Whether the client has closed its end, or the deadline has."""
    try:
        readable = bool(select.select([connection], [], [], 0)[0])
        return readable and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


# ---- the command ---------------------------------------------------------------------------------
def run_serve_command(options: ServeOptions) -> int:
    """Serve until a signal comes; the exit code."""
    check_port(options.host, options.port, option="")
    code = STOPPED
    with (
        StopSignal() as stop,
        tempfile.TemporaryDirectory() as temporary,
        visiting(options.invite) as joined,
    ):
        refreshes = options.refresh_rounds > 0
        needed = writing_bytes(joined.manifest, options.dtype, refreshes=refreshes)
        check_model_memory("to serve", needed, SMALLER, options.memory_limit_gb * GB or None)
        folder = Path(temporary) / "model"
        loaded = load(options, joined, folder)
        service = ChatService(joined.run, joined.manifest.name, loaded)
        del loaded  # it goes when a newer one comes
        with serve(service, options.host, options.port) as server:
            code = 0
            typer.echo(f"serving {service.name}: about {needed / 1e9:.1f} GB of memory at most")
            typer.echo(f"chat page {server.url}/ and OpenAI's API below it, at /v1")
            follow(options, joined, service, folder, stop)
    return code


def serve(service: ChatService, host: str, port: int) -> PageServer:
    """The server of a service's pages and texts; raises as `PageServer`."""
    handler = partial(ChatRequest, service)
    return PageServer(host, port, service.pages(), option="", handler=handler)


def load(options: ServeOptions, joined: Joined, folder: Path) -> Loaded:
    """Download the newest anchors and load them; raises as `export_run`."""
    places = export_run(joined, folder, options)
    logger.info("loaded %s", shown_rounds([place.round for place in places]))
    newest = min(place.round for place in places)
    return Loaded(model=TextModel(folder), round=newest, tokens=places[0].chain_tokens)


def follow(
    options: ServeOptions, joined: Joined, service: ChatService, folder: Path, stop: StopSignal
) -> None:
    """Load newer weights as rounds come; ends by a `StopRequested`.

    Raises EnvironmentFault: this program's DHT node has ended.
    """
    watch = ManifestWatch(joined.swarm, joined.run, joined.manifest)
    tried, loaded_after = -1, last_rollback(joined.manifest)
    next_at = time.monotonic() + 60 * options.refresh_minutes
    while True:
        stop.event.wait(LOOK_S)
        check_node(joined)
        if not options.refresh_rounds or time.monotonic() < next_at:
            continue
        claims = run_claims(joined)
        told = (claim.revision for claim in claims[0].values())
        heartbeat_s = watch.manifest.deadlines.heartbeat_s
        watch.follow(max(told, default=0), heartbeat_s, time.monotonic())
        joined = replace(joined, manifest=watch.manifest)
        newest, tokens = newest_round(claims, joined.witness)
        # what is claimed and led to nothing newer is not tried again
        if newest in (-1, tried):
            continue
        least = 1 if watch.manifest.ended_at(tokens) else options.refresh_rounds
        back = last_rollback(watch.manifest) != loaded_after  # to an earlier round
        if not back and newest - service.loaded.round < least:
            continue
        pause_s = 60 * options.refresh_minutes
        try:
            service.take(load(options, joined, folder))
            tried, loaded_after = newest, last_rollback(joined.manifest)
        except (DilocoxError, OSError, ValueError) as error:
            logger.warning("no newer weights; the old ones still answer: %s", error)
            pause_s = max(RETRY_S, pause_s)
        next_at = time.monotonic() + pause_s
