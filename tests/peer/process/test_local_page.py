"""A peer's own page: what it tells, who may pause, and that it stays within its own server."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from http.client import HTTPConnection
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.loop_status import OwnContribution
from dilocox.peer.chain.store import keep_manifest
from dilocox.peer.hours import Hours, Rest
from dilocox.peer.http_pages import PageServer
from dilocox.peer.options import PeerOptions
from dilocox.peer.process.local_page import TOKEN_HEADER, LocalPage
from dilocox.peer.process.resting import Allowance
from dilocox.peer.state_folder import StateFolder
from tests.peer.fabricated import INVITE, RUN
from tests.peer.told_reports import STATUS
from tests.swarm.browser import Window
from tests.swarm.small_run import run_manifest

HTML = (files("dilocox.peer.process") / "page" / "peer.html").read_text()


def options(state: Path, **changes: Any) -> PeerOptions:
    given: dict[str, Any] = {"invite": Invite.parse(INVITE), "state": state, "name": "Ada's laptop"}
    return PeerOptions(**given | changes)


def a_peer(
    state: Path, *, status: Mapping[str, Any] | None = None, stage: int = 1, tokens: int = 30_000
) -> None:
    """The folder of a peer of a stage that has given tokens in one round."""
    folder = state / f"{RUN}-stage{stage}"
    folder.mkdir(parents=True, exist_ok=True)
    gave = OwnContribution(rounds=1, tokens=tokens, of_tokens=10 * tokens)
    told = status or asdict(replace(STATUS, train_loss=2.5, gave=gave))
    (folder / "status.json").write_text(json.dumps(told))


class Answer:
    def __init__(self, status: int, body: str, headers: Mapping[str, str]):
        self.status, self.body, self.headers = status, body, headers


class Served:
    """A page on a server, and how a client asks for it."""

    def __init__(self, page: LocalPage, port: int):
        self.port = port
        self.token = page.query.removeprefix("?token=")

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read().decode(), dict(answer.getheaders()))

    def press(self, path: str, token: str) -> int:
        return self.ask(path, "POST", **{TOKEN_HEADER: token}).status

    def told(self, token: str = "") -> dict[str, Any]:
        return json.loads(self.ask("/peer.json", **{TOKEN_HEADER: token}).body)


@contextmanager
def served(of: PeerOptions, allowance: Any = None) -> Generator[Served]:
    allowance = allowance or Allowance(of)
    page = LocalPage(of, allowance.rest, lambda: allowance.used_bytes)
    with PageServer("127.0.0.1", 0, {}, answer=page.answer) as server:
        yield Served(page, server.port)


def resting(rest: Rest) -> Any:
    return SimpleNamespace(rest=lambda: rest, used_bytes=1_500_000_000)


# ---- who may ---------------------------------------------------------------------------------
def test_only_who_has_the_token_may_pause_and_only_by_post(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    with served(options(tmp_path)) as here:
        assert len(here.token) >= 20
        for token in ("", "x", here.token[:-1], "é"):
            assert here.press("/pause", token.encode().decode("latin-1")) == 403
        for method in ("GET", "HEAD", "PUT"):
            answer = here.ask(f"/pause?token={here.token}", method, **{TOKEN_HEADER: here.token})
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert here.ask(f"/pause?token={here.token}", "POST").status == 403  # not by a plain form
        assert not folder.paused
        assert here.press("/pause", here.token) == 200 and folder.paused
        assert here.press("/resume", "") == 403 and folder.paused
        assert here.press("/resume", here.token) == 200 and not folder.paused
        assert here.ask("/peer.json", "POST").status == 405


def test_the_token_outlives_a_restart_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    def query() -> str:
        return Allowance(options(tmp_path)).page().query

    queries = {query() for _ in range(2)}
    assert len(queries) == 1
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() in queries.pop()
    file.write_text("")  # of a start that was cut off
    assert len(query()) > len("?token=")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200),
        ("localhost:9400", 200),
        ("[::1]:9400", 200),
        ("rebound.example:9400", 421),
        ("127.0.0.1.example", 421),
        ("192.0.2.7", 421),
        ("", 421),
    ],
)
def test_a_name_that_somebody_points_here_is_refused(
    host: str, status: int, tmp_path: Path
) -> None:
    with served(options(tmp_path)) as here:
        token = {TOKEN_HEADER: here.token}
        for path, method in (("/", "GET"), ("/peer.json", "GET"), ("/pause", "POST")):
            assert here.ask(path, method, Host=host, **token).status == status
    assert StateFolder(tmp_path).paused == (status == 200)


def test_beyond_this_machine_there_are_no_buttons(tmp_path: Path) -> None:
    given = options(tmp_path, metrics_host="0.0.0.0")
    page = Allowance(given).page()
    with PageServer("127.0.0.1", 0, {}, answer=page.answer) as server:
        here = Served(page, server.port)
        assert page.query == "" and here.ask("/", Host="peer:9400").status == 200
        assert here.told()["buttons"] is False
        assert here.press("/pause", "") == 403
    assert list(tmp_path.iterdir()) == []


# ---- what it tells ---------------------------------------------------------------------------
def test_it_tells_what_the_peer_does_gave_and_may(tmp_path: Path) -> None:
    given = options(tmp_path, hours=Hours.parse(["22-6"]), monthly_traffic_gb=200, threads=2)
    a_peer(tmp_path)
    with served(given) as here:
        told = here.told(here.token)
        assert told["buttons"] and not here.told()["buttons"]
        assert (told["name"], told["stages"], told["given"]) == (None, None, [30_000, 1, 0.1])
    assert (told["peer"], told["stage"]) == ("Ada's laptop", "1")
    assert (told["status"]["state"], told["status"]["round"]) == ("training", 2)
    assert told["traffic"] == [0, 200e9]
    assert told["hours"] == "22-6" and told["limits"]["threads"] == 2

    keep_manifest(tmp_path / f"{RUN}-stage1", Manifest.from_dict(run_manifest(stages=2)))
    with served(given) as here:
        told = here.told()
        a_peer(tmp_path, stage=0, tokens=10_000)
        later = here.told()
    assert (told["name"], told["stages"], told["given"]) == ("swarm-test", 2, [30_000, 1, 0.1])
    assert (later["stage"], later["given"]) == ("0", [40_000, 2, 0.1])


# ---- in a browser ----------------------------------------------------------------------------
def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert set(re.findall(r"https?://[^\s'\"%<]+", HTML)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|document\.write|eval\(", HTML)


def test_the_page_shows_the_peer_and_its_button_to_whom_it_belongs(
    tmp_path: Path, browser: Window
) -> None:
    a_peer(tmp_path)
    with served(options(tmp_path, monthly_traffic_gb=200)) as here:
        shown = browser.show(
            f"http://127.0.0.1:{here.port}/?token={here.token}", dark=True, width=390
        )
        plain = browser.show(f"http://127.0.0.1:{here.port}/")
    assert shown.console == () and plain.console == ()
    assert shown.text("state") == "Training" and shown.text("name") == "Ada's laptop"
    assert " ".join(shown.text("given").split()) == (
        "30.0 k tokens in 1 committed round, 10.0 % of what its stage learnt from since it joined."
    )
    assert " ".join(shown.text("traffic").split()) == "0 kB of 200 GB sent and received."
    assert "Pause" in shown.text("button") and 'id="button">' in shown.dom
    assert 'id="button" hidden' in plain.dom and 'id="hint">' in plain.dom


def test_the_page_says_why_and_until_when_a_peer_rests_and_texts_stay_texts(
    tmp_path: Path, browser: Window
) -> None:
    evil = "<img src=x onerror=\"console.error('gotcha')\">"
    a_peer(tmp_path, status={"state": "resting", "round": 7})
    rest = Rest(reason="hours", words=evil, until=1_763_640_000.0)
    with served(options(tmp_path), resting(rest)) as here:
        shown = browser.show(f"http://127.0.0.1:{here.port}/?token={here.token}")
    assert shown.console == () and "<img" not in shown.dom
    assert shown.text("state") == "Resting"
    assert re.fullmatch(r"<img .*>, until .+\.", shown.text("detail"))


def test_a_damaged_status_is_passed_over(tmp_path: Path) -> None:
    a_peer(tmp_path)
    (tmp_path / f"{RUN}-stage0").mkdir()
    (tmp_path / f"{RUN}-stage0" / "status.json").write_text('{"state": "trai')
    with served(options(tmp_path)) as here:
        told = here.told()
    assert (told["stage"], told["given"]) == ("1", [30_000, 1, 0.1])


def test_a_token_that_others_could_read_is_hidden_again(tmp_path: Path) -> None:
    (tmp_path / "page.token").write_text("secret-of-before\n")
    (tmp_path / "page.token").chmod(0o644)
    page = LocalPage(
        PeerOptions(invite=Invite.parse(INVITE), state=tmp_path), lambda: None, lambda: 0
    )
    assert page.query == "?token=secret-of-before"
    assert (tmp_path / "page.token").stat().st_mode & 0o777 == 0o600
