"""`dilocox serve`: what it answers by OpenAI's API, what it refuses, and what it does not let hold
it up. The models are tiny, or write what a test says.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.peer.commands import export
from dilocox.peer.commands import serve as serving
from dilocox.peer.commands.export import TextModel, continue_text
from dilocox.peer.commands.serve import ChatService, Loaded, StopText
from dilocox.peer.http_pages import PageServer
from dilocox.peer.os_process import StopRequested
from tests.dht.processes import wait_until
from tests.peer.commands.checkpoints import LLAMA, RUN, write
from tests.peer.corpora import write_tokenizer
from tests.swarm.browser import Window

LOCAL = "127.0.0.1"
POSITIONS = 128
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
HTML = (files("dilocox.peer.commands") / "page" / "chat.html").read_text()
Script = Callable[[list[int]], Iterable[int]]


def ids_of(text: str) -> list[int]:
    """As the byte tokenizer has it."""
    return [byte + 3 for byte in text.encode()]


class Scripted:
    """What transformers' model does where its text is told beforehand: `script` gets the prompt."""

    def __init__(self, script: Script):
        self.script = script
        self.config = type("Config", (), {"max_position_embeddings": POSITIONS})

    def eval(self) -> Scripted:
        return self

    def generate(self, input_ids: Tensor, streamer: Any, max_new_tokens: int, **_: Any) -> None:
        streamer.put(input_ids)
        for made, token in enumerate(self.script(input_ids[0].tolist()), 1):
            streamer.put(torch.tensor([token]))
            if made == max_new_tokens:
                break
        streamer.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "out"
    write(out, {**LLAMA, "max_position_embeddings": POSITIONS})
    return out


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], TextModel]:
    def make(script: Script, tokenizer: Path = folder) -> TextModel:
        monkeypatch.setattr(export, "load_model", lambda _: Scripted(script))
        return TextModel(tokenizer)

    return make


@contextmanager
def served(model: TextModel, **limits: float) -> Generator[tuple[ChatService, PageServer]]:
    service = ChatService(RUN, "tales", Loaded(model=model, round=12, tokens=34567), **limits)
    with serving.serve(service, LOCAL, 0) as server:
        yield service, server


@contextmanager
def asked(
    server: PageServer, path: str, body: Any = None, **headers: str
) -> Generator[HTTPResponse]:
    """An answer as it comes; a body that is no bytes is sent as JSON."""
    with closing(HTTPConnection(LOCAL, server.port, timeout=30)) as connection:
        given = {"Content-Type": "application/json"} if body is not None else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, given)
        yield connection.getresponse()


def ask(server: PageServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with asked(server, path, body, **headers) as answer:
        return answer.status, json.loads(answer.read())


def events(server: PageServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end as one."""
    with asked(server, path, body | {"stream": True}) as answer:
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream")
        *told, done, rest = answer.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(each.removeprefix("data: ")) for each in told]


def fault(server: PageServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    status, answer = ask(server, path, body, **headers)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


# ---- answers -------------------------------------------------------------------------------------
def test_a_text_is_that_of_generate_whole_or_streamed_and_its_tokens_are_counted(
    folder: Path,
) -> None:
    expected = continue_text(folder, "def ", 40, 7, temperature=1.5)
    asks = {"prompt": "def ", "max_tokens": 40, "seed": 7, "temperature": 1.5, "model": "tales"}
    with served(TextModel(folder)) as (_, server):
        status, answer = ask(server, TEXT, asks)
        told = events(server, TEXT, asks | {"stream_options": {"include_usage": True}})
    assert status == 200 and answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] == expected and choice["finish_reason"] == "length"
    usage = {"prompt_tokens": 4, "completion_tokens": 40, "total_tokens": 44}
    assert answer["usage"] == told[-1]["usage"] == usage and told[-1]["choices"] == []
    choices = [event["choices"][0] for event in told[:-1]]
    assert "".join(each["text"] for each in choices) == expected
    assert [each["finish_reason"] for each in choices[-2:]] == [None, "length"]
    assert all(event["system_fingerprint"] == f"{RUN[:8]}-round-12" for event in told)


def test_at_temperature_zero_the_seed_does_not_matter_and_top_p_narrows(folder: Path) -> None:
    with served(TextModel(folder)) as (_, server):

        def text(**more: Any) -> str:
            status, answer = ask(server, TEXT, {"prompt": "ab", "max_tokens": 20, **more})
            assert status == 200, answer
            return answer["choices"][0]["text"]

        likeliest = text(temperature=0, seed=1)
        assert likeliest == text(temperature=0, seed=2, top_p=0.5)
        assert likeliest == text(temperature=2, seed=-3, top_p=1e-9)
        assert text(temperature=2, seed=1) != text(temperature=2, seed=2)


def test_a_chat_without_a_template_is_plain_lines_and_ends_before_the_users(
    scripted: Callable[..., TextModel],
) -> None:
    seen: list[str] = []

    def script(prompt: list[int]) -> list[int]:
        seen.append(bytes(i - 3 for i in prompt).decode())
        return ids_of(" Hello\nuse it\nuser: and then?")

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "yes?"},
        *HELLO,
    ]
    with served(scripted(script)) as (_, server):
        _, answer = ask(server, CHAT, {"messages": messages})
        told = events(server, CHAT, {"messages": messages, "stop": ["e i"]})
    assert set(seen) == {"Be brief.\nuser: hi\nassistant: yes?\nuser: hi\nassistant:"}
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " Hello\nuse it"}
    assert (choice["finish_reason"], answer["object"]) == ("stop", "chat.completion")
    assert answer["usage"]["completion_tokens"] == len(" Hello\nuse it\nuser:")
    deltas = [event["choices"][0]["delta"] for event in told]
    assert deltas[0] == {"content": " ", "role": "assistant"}
    assert "".join(delta["content"] for delta in deltas) == " Hello\nus"
    assert {event["object"] for event in told} == {"chat.completion.chunk"}


def test_a_tokenizers_chat_template_is_used_and_says_what_it_does_not_take(
    scripted: Callable[..., TextModel], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
    )
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    prompts: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        prompts.append(prompt)
        return model.encode("né\nuser: 漢")[0].tolist()

    model = scripted(script, tmp_path)
    with served(model) as (_, server):
        _, answer = ask(server, CHAT, {"messages": HELLO})
        status, error = fault(server, CHAT, {"messages": [{"role": "system", "content": "x"}]})
    assert model.tokenizer.decode(prompts[0]) == "<user>hi</s><assistant>"
    assert prompts[0].count(model.tokenizer.eos_token_id) == 1
    assert answer["choices"][0]["message"]["content"] == "né\nuser: 漢"
    assert (status, error["param"]) == (400, "messages") and "no system" in error["message"]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_no_event_has_a_part_of_a_character(
    scripted: Callable[..., TextModel], tmp_path: Path, folder: Path, kind: str
) -> None:
    text = "né 漢字🦙, é"
    write_tokenizer(tmp_path)
    place = folder if kind == "bytes" else tmp_path
    model = scripted(lambda _: model.encode(text)[0].tolist(), place)
    with served(model) as (_, server):
        told = events(server, TEXT, {"prompt": "x"})
    pieces = [event["choices"][0]["text"] for event in told]
    assert "".join(pieces) == text
    assert "漢" in pieces and "🦙" in pieces
    # what never becomes one is shown at the end, or dropped
    model = scripted(lambda _: model.encode("a🦙")[0].tolist()[:3], place)
    with served(model) as (_, server):
        last = "".join(e["choices"][0]["text"] for e in events(server, TEXT, {"prompt": "x"}))
    assert last.rstrip("\ufffd") == "a"


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ([], ["a", "b"], "ab"),
        (["bc"], ["a", "b", "c", "d"], "a"),
        (["bcd"], ["ab", "cb", "cd"], "abc"),
        (["xyz", "cb"], ["abx", "yc", "b"], "abxy"),
        (["long"], ["lon", "e"], "lone"),
        (["long"], ["lon"], "lon"),
    ],
)
def test_a_text_ends_before_a_stop_and_nothing_of_one_is_shown_too_early(
    stops: list[str], pieces: list[str], shown: str
) -> None:
    stop, told = StopText(stops), ""
    for piece in pieces:
        told += stop.take(piece)
        assert shown.startswith(told)
        if stop.met:
            break
    assert told + stop.held == shown


def test_newer_weights_answer_from_the_next_text_on_and_say_so(
    scripted: Callable[..., TextModel],
) -> None:
    with served(scripted(lambda _: ids_of("old"))) as (service, server):
        (before,) = ask(server, "/v1/models")[1]["data"]
        service.take(Loaded(model=scripted(lambda _: ids_of("new")), round=13, tokens=40000))
        (after,) = ask(server, "/v1/models")[1]["data"]
        answer = ask(server, TEXT, {"prompt": "x"})[1]
        assert ask(server, "/v1/models/tales")[1]["id"] == "tales"
    assert (before["id"], before["object"], before["context_length"]) == ("tales", "model", 128)
    assert [before["round"], after["round"], after["tokens"]] == [12, 13, 40000]
    assert answer["choices"][0]["text"] == "new"
    assert answer["system_fingerprint"].endswith("-round-13")


@pytest.mark.parametrize(
    ("rounds", "tokens", "rollbacks", "worth"),
    [
        ([[15], [15]], 800, 0, True),
        ([[15, -1, -1], [15]], 800, 0, True),  # who only joins says nothing of it
        ([[14], [15]], 800, 0, False),
        ([[15], [14]], 800, 0, False),  # not every stage has it
        ([[14], [14]], 1000, 0, True),
        ([[12], [12]], 1000, 0, False),
        ([[9], [9]], 800, 0, False),  # peers that are behind
        ([[9], [9]], 800, 1, True),
        ([[], []], 800, 0, False),
        ([[12, 13, 900], [15]], 800, 0, False),  # a stranger's word moves nobody
    ],
)
def test_weights_are_loaded_once_after_so_many_rounds_or_where_the_run_has_ended(
    rounds: list[list[int]],
    tokens: int,
    rollbacks: int,
    worth: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rounds: what the peers of each stage claim, while the weights of round 12 answer."""

    def claim(number: int) -> ClaimRecord:
        digest = f"{number:064x}"
        return ClaimRecord(round=number, digest=digest, chain_tokens=tokens, record_bytes=1)

    told = {
        claim_key(RUN, stage): {f"peer {number}": claim(number) for number in numbers}
        for stage, numbers in enumerate(rounds)
    }
    about = {"name": "a", "model": "tiny", "stages": 2, "end_tokens": 1000}
    joined = Joined(
        identity=cast("Any", None),
        run=RUN,
        manifest=Manifest.from_dict(about),
        clock=cast("Any", None),
        dht=cast("Any", SimpleNamespace(running=True)),
        swarm=cast("Any", SimpleNamespace(read_many=lambda keys: {key: told[key] for key in keys})),
    )
    loads, waits = list[object](), iter(range(4))

    def wait(_: float) -> None:
        if next(waits) == 3:
            raise StopRequested

    service = SimpleNamespace(loaded=SimpleNamespace(round=12), take=loads.append)
    options = cast("Any", SimpleNamespace(refresh_rounds=3, refresh_minutes=0))
    stop = cast("Any", SimpleNamespace(event=SimpleNamespace(wait=wait)))
    monkeypatch.setattr(serving, "load", lambda *_: object())
    newest = iter([0])  # under the manifest that it begins with
    monkeypatch.setattr(serving, "last_rollback", lambda _: next(newest, rollbacks))
    with pytest.raises(StopRequested):
        serving.follow(options, joined, cast("Any", service), Path(), stop)
    assert len(loads) == worth


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (TEXT, {"prompt": ["x", "y"]}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": "9"}, "max_tokens"),
        (TEXT, {"temperature": 2.1}, "temperature"),
        (TEXT, {"temperature": float("nan")}, "temperature"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"seed": 1 << 64}, "seed"),
        (TEXT, {"stop": [""]}, "stop"),
        (TEXT, {"stop": list("abcde")}, "stop"),
        (TEXT, {"stream": "yes"}, "stream"),
        (TEXT, {"n": 2}, "n"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"logprobs": 1}, "logprobs"),
        (TEXT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (TEXT, {"model": "gpt-4"}, "model"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(
    refusing: PageServer, path: str, more: dict[str, Any], field: str
) -> None:
    whole: dict[str, Any] = {"prompt": "x"} if path == TEXT else {"messages": HELLO}
    status, error = fault(refusing, path, whole | more)
    assert (status, error["param"]) == (404 if field == "model" else 400, field)
    assert error["type"] == "invalid_request_error" and field in error["message"]


@pytest.fixture(scope="module")
def refusing(folder: Path) -> Generator[PageServer]:
    """A server of which no text must be got."""

    def script(_: list[int]) -> Iterable[int]:
        raise AssertionError("a text was written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "load_model", lambda _: Scripted(script))
        model = TextModel(folder)
    with served(model) as (_, server):
        yield server


@pytest.mark.parametrize("body", [b"{", b"[]", b'"\\ud800"', b"[" * 9000, b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_request_is_refused(refusing: PageServer, body: bytes) -> None:
    assert fault(refusing, TEXT, body)[0] == 400


def test_requests_of_other_kinds_and_sizes_are_refused(refusing: PageServer) -> None:
    plain = fault(refusing, TEXT, b'{"prompt": "x"}', Content_Type="text/plain")
    assert plain[0] == 415  # a form of another site would be sent as that
    assert fault(refusing, TEXT, b"", Content_Length="99999999")[0] == 413
    assert fault(refusing, TEXT, b"", Content_Length="many")[0] == 411
    assert fault(refusing, TEXT, None)[0] == 405
    assert fault(refusing, "/v1/embeddings", {"input": "x"})[0] == 404


def test_a_prompt_that_leaves_no_room_is_refused_and_a_text_ends_where_the_room_does(
    scripted: Callable[..., TextModel],
) -> None:
    with served(scripted(lambda _: ids_of("y" * 500))) as (_, server):
        status, error = fault(server, TEXT, {"prompt": "x" * POSITIONS})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "128 tokens" in error["message"]
        answer = ask(server, TEXT, {"prompt": "x" * 120, "max_tokens": 500})[1]
    assert answer["choices"][0]["text"] == "y" * 8
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("host", ["example.org", "localhost.example.org:9480", "[::2]:9480", ""])
@pytest.mark.parametrize("path", ["/", "/v1/models", TEXT])
def test_on_loopback_only_its_own_names_are_answered(
    refusing: PageServer, path: str, host: str
) -> None:
    body = {"prompt": "x"} if path == TEXT else None
    assert fault(refusing, path, body, Host=host)[0] == 403
    for own in (f"localhost:{refusing.port}", "127.0.0.1", "[::1]:9480"):
        with asked(refusing, "/", Host=own) as answer:
            assert answer.status == 200
            assert answer.getheader("Access-Control-Allow-Origin") is None


# ---- what does not hold it up --------------------------------------------------------------------
class Endless:
    """A script that writes until it is ended, and tells."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, prompt: list[int]) -> Generator[int]:
        if bytes(i - 3 for i in prompt) != b"endless":
            yield from ids_of("short")
            return
        try:
            self.begun.set()
            while self.go_on.wait(20):
                yield from ids_of("x")
        finally:
            self.ended.set()


def test_who_asks_while_too_many_wait_is_told_to_come_again(
    scripted: Callable[..., TextModel],
) -> None:
    endless, answers = Endless(), list[int]()
    with served(scripted(endless)) as (_, server):
        first = threading.Thread(target=ask, args=(server, TEXT, {"prompt": "endless"}))
        first.start()
        assert endless.begun.wait(20)

        def second() -> None:
            answers.append(ask(server, TEXT, {"prompt": "x"})[0])

        waiting = [threading.Thread(target=second) for _ in range(1 + serving.MAX_WAITING)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: answers == [429], 20)
        with asked(server, TEXT, {"prompt": "x"}) as answer:
            assert (answer.status, answer.getheader("Retry-After")) == (429, "10")
            assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
        endless.go_on.set()
        for thread in (first, *waiting):
            thread.join(20)
    assert sorted(answers) == [200] * serving.MAX_WAITING + [429]


def test_nobody_waits_longer_than_a_while(scripted: Callable[..., TextModel]) -> None:
    endless = Endless()
    with served(scripted(endless), wait_s=0.1) as (_, server):
        first = threading.Thread(target=ask, args=(server, TEXT, {"prompt": "endless"}))
        first.start()
        assert endless.begun.wait(20)
        assert fault(server, TEXT, {"prompt": "x"})[0] == 429
        endless.go_on.set()
        first.join(20)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_text(
    scripted: Callable[..., TextModel], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(serving, "MAX_POSITIONS", 1 << 40)
    endless = Endless()
    model = scripted(endless)
    model.positions = None
    with served(model) as (_, server):
        request = {"prompt": "endless", "max_tokens": 1 << 39, "stream": stream}
        body = json.dumps(request).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((LOCAL, server.port), timeout=20) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert endless.begun.wait(20)
        endless.go_on.set()
        assert endless.ended.wait(20)
        assert ask(server, TEXT, {"prompt": "x"})[1]["choices"][0]["text"] == "short"


def test_a_text_that_takes_too_long_is_cut(scripted: Callable[..., TextModel]) -> None:
    endless = Endless()
    endless.go_on.set()
    with served(scripted(endless), write_s=0.0) as (_, server):
        choice = ask(server, TEXT, {"prompt": "endless"})[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x", "length")


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_in_the_model_is_told_without_its_text(
    scripted: Callable[..., TextModel], caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def script(_: list[int]) -> Generator[int]:
        yield from ids_of("ab")
        raise RuntimeError("a secret")

    with (
        served(scripted(script)) as (_, server),
        asked(server, TEXT, {"prompt": "x", "stream": stream}) as answer,
    ):
        assert answer.status == (200 if stream else 500)
        last = answer.read().decode().strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "secret" not in last and "a secret" in caplog.text


# ---- the page ------------------------------------------------------------------------------------
def test_the_page_loads_nothing_and_writes_text_only_as_text() -> None:
    code = HTML.partition("<script>")[2]
    assert "innerHTML" not in code and "document.write" not in code and "eval(" not in code
    assert " style=" not in HTML and " on" + "click" not in HTML
    assert HTML.count("http") == 1 and "http://www.w3.org/2000/svg" in HTML


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_says_which_round_answers(
    refusing: PageServer, browser: Window, width: int
) -> None:
    shown = browser.show(f"http://localhost:{refusing.port}/", width=width)
    assert shown.console == () and shown.text("name") == "tales"
    assert shown.text("round").startswith("round 12 of its training, after 34,567 tokens")
    assert "babbles" in shown.text("hint")


@pytest.mark.usefixtures("browser")  # is there one?
def test_a_conversation_on_the_page_is_streamed_as_text_and_shortened_to_fit(
    scripted: Callable[..., TextModel],
) -> None:
    evil = "<img src=x onerror=\"console.error('gotcha')\">"
    model = scripted(lambda _: ids_of(f" {evil} é"))
    with served(model) as (_, server), Window(f"http://localhost:{server.port}/") as window:
        window.wait_for("document.getElementById('name').textContent === 'tales'")
        for number in range(1, 4):  # the third one has no room beside the first
            window.run(
                "document.getElementById('input').value = 'say it again, please';"
                "document.getElementById('send').click()"
            )
            window.wait_for(
                f"document.querySelectorAll('.model').length === {number} && "
                "document.querySelector('.writing') === null"
            )
        said = window.run("[...document.querySelectorAll('.model')].map((e) => e.innerText)")
        assert window.run("document.querySelectorAll('img').length") == 0
        assert window.console == []
    assert all(text.startswith(evil) and "é" in text and "round 12" in text for text in said)
