"""The status page and its figures: what stands in them, and that a stranger's text stays text."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest

from dilocox.dht.manifest_revisions import in_state
from dilocox.peer.http_pages import Page, PageRequest, PageServer, metrics_page
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.monitor import MonitorPages
from dilocox.peer.monitor.status import MAX_PEERS_SHOWN, metrics_of
from tests.dht.processes import wait_until
from tests.peer.fabricated import (
    INVITE,
    ToldSwarm,
    claim_record,
    digest,
    losses_of,
    peer_id,
    replica_record,
    stage_record,
    trained,
)
from tests.peer.told_pages import DRAWN, PICTURES, STATES, WIDTHS, drawn_from
from tests.swarm.browser import Shown, Window
from tests.sweeps import sweep

HTML, CSS, JS = (
    (files("dilocox.peer.monitor") / "page" / f"status.{ending}").read_text()
    for ending in ("html", "css", "js")
)
EVIL = "<img src=x onerror=\"console.error('gotcha')\">"


def pages_of(swarm: ToldSwarm) -> MonitorPages:
    look = swarm.look()
    pages = MonitorPages(lambda: True)
    metrics = metrics_page(metrics_of(swarm.seen(look)))
    pages.show(swarm.status(look), metrics, swarm.seen(look).contributions)
    return pages


# ---- the figures ---------------------------------------------------------------------------------
def test_the_status_has_stages_replicas_and_totals() -> None:
    swarm = trained(stages=2, replicas=2, spares=1)
    status = swarm.status(swarm.look())
    assert status["health"] == {"state": "training", "sentence": "training", "warns": False}
    assert status["totals"]["peers"] == 6 and status["totals"]["replicas"] == 2
    assert status["totals"]["tokens"] == 8000 and status["invite"] == INVITE
    assert [stage["round"] for stage in status["stages"]] == [3, 3]
    states = [peer["state"] for peer in status["stages"][1]["peers"]]
    assert states == ["training", "training", "spare"]
    for replica in status["replicas"]:
        assert replica["members"][0] == replica["head"] and len(replica["members"]) == 2
    assert losses_of(status) == [[3, None, 2.4], [4, 2.5, None]]
    json.dumps(status, allow_nan=False)


def test_contributions_are_per_peer_and_their_shares_add_up() -> None:
    swarm = trained(stages=2, replicas=2, spares=1)
    gone = swarm.peer(1, 0)
    swarm.stages[1][gone] = replace(swarm.stages[1][gone], name="Ada", team="Foxes")
    swarm.look()
    del swarm.stages[1][gone]
    status = swarm.status(swarm.look())
    lines = status["contributions"]
    # a replica's 4,000 tokens count once: each of its two stages has its half
    assert {line["id"]: line["tokens"] for line in lines} == {
        swarm.peer(stage, replica): 2000 for stage in range(2) for replica in range(2)
    }
    assert sum(line["tokens"] for line in lines) == status["totals"]["tokens"]
    assert sum(line["share"] for line in lines) == pytest.approx(1)
    step = swarm.manifest.batch.tokens_per_step
    assert {line["hours"] for line in lines} == {round(4 * 10_000_000 / step / 3600, 4)}
    (left,) = [line for line in lines if line["id"] == gone]
    assert (left["here"], left["name"], left["team"]) == (False, "Ada", "Foxes")
    (name,), (team,) = status["names"], status["teams"]
    assert (name["name"], name["peers"], team["team"], team["tokens"]) == ("Ada", 1, "Foxes", 2000)


def test_addresses_of_peers_are_in_none_of_the_answers() -> None:
    for path in ("/", "/status.json", "/metrics"):
        assert b"192.0.2" not in pages_of(trained()).pages()[path]().body


def test_texts_of_peers_are_cut() -> None:
    swarm = trained()
    head = next(iter(swarm.replicas))
    swarm.replicas[head] = replace(swarm.replicas[head], codec="c" * 200, last_fault="f" * 200)
    for peer, told in swarm.stages[1].items():
        swarm.stages[1][peer] = replace(told, version="v" * 200, name="n" * 200, blocked="b" * 200)
    text = json.dumps(swarm.status(swarm.look()))
    assert not any(letter * 121 in text for letter in "cfvb")
    assert "v" * 25 not in text and "c" * 25 not in text


def test_of_a_large_stage_some_peers_are_shown_and_the_others_counted() -> None:
    swarm = trained(stages=1, replicas=40, spares=45)
    stage = swarm.status(swarm.look())["stages"][0]
    assert len(stage["peers"]) == MAX_PEERS_SHOWN
    assert stage["more"] == 85 - MAX_PEERS_SHOWN


def test_the_members_of_shown_replicas_are_shown() -> None:
    """Else cells of replicas are empty, and members of others look like spares."""
    swarm = ToldSwarm(stages=2, replicas=0, spares=0)
    for number in range(MAX_PEERS_SHOWN + 10):  # by id members are in another order than heads
        head, member = peer_id(number), peer_id(100 + number)
        swarm.stages[0][head] = stage_record(replica=head)
        swarm.stages[1][member] = stage_record(replica=head)
        swarm.replicas[head] = replica_record(members=(head, member))
    shown = swarm.status(swarm.look())
    assert len(shown["replicas"]) == MAX_PEERS_SHOWN
    for stage in shown["stages"]:
        peers = {peer["id"] for peer in stage["peers"]}
        assert peers == {replica["members"][stage["stage"]] for replica in shown["replicas"]}


def test_a_run_whose_tokens_are_trained_has_ended() -> None:
    swarm = trained(stages=1, replicas=1, spares=0)
    claim = replace(next(iter(swarm.claims[0].values())), chain_tokens=10_000_000)
    swarm.claims[0] = {"boot0": claim}
    swarm.stages[0].clear()
    assert swarm.health(swarm.look()).state == "ended"


def test_the_page_says_that_no_bootstrap_answers_and_is_not_green_then() -> None:
    swarm = trained(stages=1, replicas=1, spares=0)
    swarm.bootstraps = {"boot0": False, "boot1": False}
    health = swarm.status(swarm.look())["health"]
    assert health["sentence"] == "training; no bootstrap answers: nobody can join"
    assert health["state"] == "training" and health["warns"]
    # of two rules for the same dot the later one counts
    assert CSS.index("#health.training::before") < CSS.index("#health.warns::before")


def test_a_run_that_goes_on_after_a_long_pause_is_not_stalled() -> None:
    swarm = trained(stages=1, replicas=1, spares=0)
    running = swarm.manifest
    swarm.manifest = in_state(running, "paused")
    assert swarm.health(swarm.look(after_s=86400.0)).sentence == "paused"
    swarm.manifest = running
    assert swarm.health(swarm.look()).sentence == "training"
    assert swarm.health(swarm.look(after_s=86400.0)).state == "stalled"
    swarm.manifest = in_state(running, "ended")
    assert swarm.health(swarm.look()).sentence == "ended"


def test_a_monitor_that_was_away_for_long_waits_for_rounds_before_it_says_stalled(
    tmp_path: Path,
) -> None:
    swarm = trained(stages=1, replicas=1, spares=0)
    swarm.history.save(tmp_path / "kept.json")
    kept, later = tmp_path / "kept.json", swarm.at + 86400.0
    swarm.history = SwarmHistory.load(kept, 1, swarm.manifest.digest, later)
    assert swarm.health(swarm.look(after_s=86405.0)).sentence == "training"


def test_a_stage_whose_record_is_claimed_but_not_fetched_has_begun() -> None:
    swarm = ToldSwarm(stages=1, replicas=0, spares=0)
    assert swarm.health(swarm.look()).state == "waiting"
    swarm.commit(0)
    swarm.history.stages[0].rounds = 0
    swarm.claims[0] = {"boot0": claim_record(0, digest(0, 0))}
    assert swarm.health(swarm.look()).sentence == "blocked: no stage has a peer"


# ---- the page ------------------------------------------------------------------------------------
class _Assets(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, text in attrs:
            if name in ("src", "href") and not (text or "").startswith("data:"):
                self.loads.append(f"{tag} {text}")
            if name.startswith("on") or name == "style":
                self.handlers.append(f"{tag} {name}")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    parser = _Assets()
    parser.feed(HTML)
    assert parser.loads == ["link status.css", "script status.js", "a status.json"]
    assert parser.handlers == [] and "<style" not in HTML and "url(" not in CSS
    for danger in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert danger not in JS
    assert set(re.findall(r"https?://[^\s'\"%]+", HTML + CSS + JS)) == {
        "http://www.w3.org/2000/svg"
    }


def test_only_what_this_server_gives_may_run() -> None:
    pages = pages_of(trained()).pages()
    policy = pages["/"]().headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert pages["/status.js"]().content_type.startswith("text/javascript")
    assert pages["/status.css"]().content_type.startswith("text/css")


def test_a_link_to_the_page_tells_the_run_without_its_script() -> None:
    swarm = trained(stages=1)
    swarm.manifest = replace(swarm.manifest, about=f'a "quoted"\n{EVIL}')
    html = pages_of(swarm).pages()["/"]().body.decode()
    assert '<meta property="og:title" content="told: training">' in html
    assert "0.1% trained, 3 peers, validation loss 2.4000. a &quot;quoted&quot; &lt;img" in html
    assert "<img" not in html and "<title>told: training</title>" in html


def test_the_pictures_show_the_page_as_it_is() -> None:
    assert drawn_from() == (PICTURES / DRAWN).read_text().strip(), (
        "the page has changed: run docs/pictures.py, and look"
    )
    widths = [f"{width}-{name}.webp" for width in WIDTHS for name in ("light", "dark")]
    names = {f"{state}-{each}" for state in STATES for each in widths}
    assert {file.name for file in PICTURES.iterdir()} == {*names, DRAWN}


# ---- cards ---------------------------------------------------------------------------------------
def test_the_card_of_a_peer_says_what_it_gave() -> None:
    swarm = trained(stages=1, replicas=2, spares=1)
    one = swarm.peer(0, 0)
    swarm.stages[0][one] = replace(swarm.stages[0][one], name="Ada", team="Foxes")
    pages = pages_of(swarm)
    card = pages.answer("GET", f"/card/{one}.svg", {})
    assert card is not None and card.content_type == "image/svg+xml"
    texts = list(ElementTree.fromstring(card.body).itertext())
    for words in ("trains told", "Ada", "team Foxes", "4 k", "50.0%", "of 2", f"peer …{one[-6:]}"):
        assert words in texts
    assert "seen since 20 Nov 2025" in texts
    spare = swarm.peer(0, 50)
    for name in (f"{spare}.svg", one, f"{one}.png", ".svg", ""):
        assert pages.answer("GET", f"/card/{name}", {}) is None


@pytest.mark.parametrize("name", [EVIL, "\x00\x1b]]>", "&amp;", "漢" * 16, "W" * 24, "\ud800"])
def test_no_name_of_a_stranger_breaks_a_card_or_loads_anything(name: str) -> None:
    swarm = trained(stages=1, replicas=1)
    one = swarm.peer(0, 0)
    swarm.stages[0][one] = replace(swarm.stages[0][one], name=name, team=name)
    card = pages_of(swarm).answer("GET", f"/card/{one}.svg", {})
    assert card is not None and card.headers == {"Content-Security-Policy": "default-src 'none'"}
    root = ElementTree.fromstring(card.body)
    assert (root.get("width"), root.get("height")) == ("640", "320")
    kinds = {each.tag.partition("}")[2] for each in root.iter()}
    assert kinds == {"svg", "title", "rect", "path", "text"}
    keys = {key for each in root.iter() for key in each.attrib}
    assert not any("href" in key or key.startswith("on") for key in keys)


@pytest.mark.parametrize("name", ["W" * 24, "漢" * 24, "mixed Letters & 123 (%@)"])
def test_the_longest_names_fit_on_a_card(browser: Window, name: str) -> None:
    swarm = trained(stages=1, replicas=1)
    one = swarm.peer(0, 0)
    swarm.stages[0][one] = replace(swarm.stages[0][one], name=name, team=name)
    drawn(browser, pages_of(swarm), f"card/{one}.svg")
    longest = "Math.max(...[...document.querySelectorAll('svg > svg')].map(each =>"
    longest += " each.firstChild.getComputedTextLength() / each.getAttribute('width')))"
    assert browser.run(longest) <= 1
    assert browser.run("document.documentElement.textContent").count(name) == 3


def test_a_monitor_serves_cards_beside_its_pages() -> None:
    swarm = trained(stages=1, replicas=1)
    pages = pages_of(swarm)
    with PageServer("127.0.0.1", 0, pages.pages(), answer=pages.answer) as server:
        with urlopen(f"http://127.0.0.1:{server.port}/card/{swarm.peer(0, 0)}.svg") as answer:
            assert answer.headers["Content-Type"] == "image/svg+xml"
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{server.port}/card/nobody.svg")


def test_health_and_readiness_follow_the_looks() -> None:
    alive, pages = True, MonitorPages(lambda: alive)

    def statuses() -> tuple[int, int]:
        return pages.pages()["/readyz"]().status, pages.pages()["/healthz"]().status

    assert statuses() == (503, 200)
    swarm = trained(stages=1)
    pages.show(swarm.status(swarm.look()), Page(body=b""))
    assert statuses() == (200, 200)
    alive = False
    assert statuses() == (200, 503)
    pages = MonitorPages(lambda: True, late_s=0.0)
    pages.show(swarm.status(swarm.look()), Page(body=b""))
    assert statuses() == (200, 503)


def test_the_figures_of_a_look_are_sent_short_and_once() -> None:
    swarm = trained(stages=1, replicas=2)
    page = pages_of(swarm).pages()["/status.json"]()
    assert len(page.packed) < len(page.body) / 2
    assert json.loads(gzip.decompress(page.packed)) == json.loads(page.body)
    assert pages_of(trained(stages=1, replicas=2)).pages()["/status.json"]().tag == page.tag
    swarm.commit(4)
    assert pages_of(swarm).pages()["/status.json"]().tag != page.tag


# ---- in a browser --------------------------------------------------------------------------------
def drawn(browser: Window, pages: MonitorPages, query: str = "", **look: Any) -> Shown:
    with PageServer("127.0.0.1", 0, pages.pages(), answer=pages.answer, option="") as server:
        return browser.show(f"http://127.0.0.1:{server.port}/{query}", **look)


@cache
def status_in(state: str) -> dict[str, Any]:
    """What stands in status.json in one of the states, for nobody to change."""
    return STATES[state]()


def drawn_state(browser: Window, state: str, query: str = "", **look: Any) -> Shown:
    pages, status = MonitorPages(lambda: True), status_in(state)
    pages.show(status, Page(body=b""), status["contributions"])
    return drawn(browser, pages, query, **look)


@pytest.mark.parametrize("stages", [1, 3])
def test_the_page_draws_what_it_is_told(browser: Window, stages: int) -> None:
    swarm = trained(stages=stages, replicas=2, spares=1)
    shown = drawn(browser, pages_of(swarm))
    assert shown.console == ()
    assert shown.text("health") == "Training" and shown.text("tile-peers") == str(3 * stages)
    assert shown.text("progress-tokens") == "8 k of 10 M tokens, 0.1 %"
    assert shown.text("tile-validation") == "2.4000"
    assert shown.count('class="replica"') == 2 and shown.count('class="peer ') == 3 * stages
    assert all(f">{peer[-6:]}<" in shown.dom for peer in swarm.stages[stages - 1])
    assert shown.text("join").split() == ["dilocox", "peer", INVITE]


def test_the_page_says_who_sits_out(browser: Window) -> None:
    swarm = trained(stages=1, replicas=2)
    one = next(iter(swarm.stages[0]))
    swarm.commit(4, sits_out=[one])
    assert drawn(browser, pages_of(swarm)).count(">sits out<") == 1


def test_the_range_of_train_losses_is_drawn_where_heads_state_several(browser: Window) -> None:
    swarm = trained(stages=1, replicas=2)
    shown = drawn(browser, pages_of(swarm))
    assert re.search(r'id="loss-range"[^>]* hidden', shown.dom)
    for number in (4, 5):
        for head, loss in zip(list(swarm.replicas), (2.25, 2.5), strict=True):
            swarm.replicas[head] = replace(swarm.replicas[head], round=number, train_loss=loss)
        swarm.commit(number)
        swarm.look()
    shown = drawn(browser, pages_of(swarm))
    assert shown.console == () and shown.count('class="band second"') == 1
    assert not re.search(r'id="loss-range"[^>]* hidden', shown.dom)


def test_markup_from_a_peer_is_shown_as_text(browser: Window) -> None:
    swarm = trained(stages=2)
    for peer, told in swarm.stages[1].items():
        swarm.stages[1][peer] = replace(
            told,
            version=EVIL[:24],
            name=EVIL[:24],
            blocked=EVIL,
            computing_share=1e300,
            state="spare",
        )
    swarm.stages[1][EVIL] = stage_record(state="joining")
    head = next(iter(swarm.replicas))
    swarm.replicas[head] = replace(swarm.replicas[head], last_fault=EVIL, codec=EVIL)
    shown = drawn(browser, pages_of(swarm))
    assert shown.console == () and "<img" not in shown.dom
    assert "<img src=x" in shown.text("events")


def test_a_swarm_without_peers_is_drawn_too(browser: Window) -> None:
    swarm = ToldSwarm(stages=2, replicas=0, spares=0)
    shown = drawn(browser, pages_of(swarm), width=390)
    assert shown.console == () and shown.text("health") == "Waiting for the first peers"
    assert shown.count('class="stage open"') == 2 and shown.count("call-") == 0
    assert re.search(r'id="figures" hidden', shown.dom), "there is nothing to draw yet"


@pytest.mark.parametrize("state", sweep(STATES, 2))
@pytest.mark.parametrize("width", [390, 1280])
def test_no_state_makes_the_console_complain(browser: Window, state: str, width: int) -> None:
    shown = drawn_state(browser, state, dark=True, width=width)
    assert shown.console == ()
    sentence = status_in(state)["health"]["sentence"]
    assert shown.text("health") == sentence[0].upper() + sentence[1:]


def test_a_stage_without_a_peer_is_a_call_with_the_command_that_takes_it(browser: Window) -> None:
    shown = drawn_state(browser, "blocked")
    assert shown.text("call-4").split() == ["dilocox", "peer", INVITE, "--stage", "4"]
    assert shown.count('id="call-') == 1 and "<title>Blocked: stage 4 has no peer" in shown.dom


def test_an_ended_run_offers_its_model_and_nobody_is_asked_to_join(browser: Window) -> None:
    shown = drawn_state(browser, "ended")
    assert shown.text("join-title") == "Take the model home"
    assert shown.text("export").split() == ["dilocox", "export", INVITE, "my-model"]
    assert re.search(r'id="take-part" hidden', shown.dom) and shown.count('id="call-') == 0
    assert shown.count('class="replica"') == 0 and shown.text("progress-left") == ""


def test_lines_end_where_the_operator_went_back(browser: Window) -> None:
    shown = drawn_state(browser, "paused")
    assert shown.count('class="first" points') >= 2 and shown.count("<title>back to round 31<") == 1
    assert not re.search(r'id="loss-back" hidden', shown.dom)


def test_who_asks_for_a_peer_finds_it_marked(browser: Window) -> None:
    row = status_in("training")["contributions"][2]
    shown = drawn_state(browser, "training", f"?peer={row['id']}")
    assert shown.text("you").startswith("You are number 3 of 10: ")
    assert shown.count('<tr class="you">') == 1 and shown.count('class="badge"') == 1
    assert shown.count(f"card/{row['id']}.svg") == 1
    assert len(re.findall(r'class="peer [^"]* you"', shown.dom)) == 1
    assert drawn_state(browser, "training", f"?peer={row['id'][-6:]}").text("you") == shown.text(
        "you"
    )


def test_who_is_not_among_the_first_finds_its_place_too(browser: Window) -> None:
    swarm = trained(stages=1, replicas=70, spares=1)
    last = swarm.seen(swarm.look()).contributions[60]
    shown = drawn(browser, pages_of(swarm), f"?peer={last['id'][-6:]}")
    assert shown.text("you") == "You are number 61 of 70: 4 k tokens, 1.4 % of the run."
    assert shown.count('<tr class="you">') == 1 and shown.console == ()
    spare = swarm.peer(0, 50)
    shown = drawn(browser, pages_of(trained(stages=1, replicas=2, spares=1)), f"?peer={spare[-6:]}")
    assert shown.text("you") == f"Peer {spare[-6:]} (you) is in no record yet."
    shown = drawn(browser, pages_of(swarm), "?peer=nobody")
    assert shown.text("you") == "No peer in view or in a record has an id that ends in nobody."


def test_an_ending_that_two_ids_have_names_neither() -> None:
    pages = MonitorPages(lambda: True)
    rows = [{"id": f"{first}abcdef"} for first in "xyz"]
    pages.show(trained().status(trained().look()), Page(body=b""), rows)

    def told(path: str) -> Any:
        page = pages.answer("GET", path, {})
        return page and json.loads(page.body)

    assert told("/peer/abcdef.json") == rows[:2] and told("/peer/yabcdef.json") == rows[1:2]
    assert told("/peer/nobody.json") == [] and told("/peer/f.json") is None


def test_spares_are_counted_where_not_all_peers_are_listed(browser: Window) -> None:
    swarm = trained(stages=1, replicas=70, spares=3)
    shown = drawn(browser, pages_of(swarm))
    assert shown.text("note-peers") == "peers, 70 replicas, 3 spares" and ">3 spares<" in shown.dom


def test_peers_of_one_name_in_a_stage_are_told_apart(browser: Window) -> None:
    swarm = trained(stages=1, replicas=2, spares=1)
    first, second = swarm.peer(0, 0), swarm.peer(0, 1)
    for peer, record in swarm.stages[0].items():
        swarm.stages[0][peer] = replace(record, name="Ada" if peer in (first, second) else "Ben")
    shown = drawn(browser, pages_of(swarm))
    assert all(f">Ada {peer[-6:]}<" in shown.dom for peer in (first, second))
    assert ">Ben<" in shown.dom


def test_64_replicas_of_8_stages_are_all_there(browser: Window) -> None:
    shown = drawn_state(browser, "large")
    assert shown.count('class="replica"') == 64 and shown.count('class="peer training') == 64 * 8


@pytest.mark.usefixtures("browser")  # is there one?
def test_the_page_asks_again_only_after_the_answer_and_not_while_nobody_sees_it() -> None:
    pages = dict(pages_of(trained()).pages())
    figures, script = pages["/status.json"], pages["/status.js"]()
    quick = script.body.replace(b"PERIOD_MS = 3000", b"PERIOD_MS = 100")
    assert quick != script.body
    asks, at_once, most, statuses = 0, 0, 0, set[int]()

    def slow() -> Page:
        nonlocal asks, at_once, most
        asks, at_once = asks + 1, at_once + 1
        most = max(most, at_once)
        time.sleep(0.3)
        at_once -= 1
        return figures()

    class Watched(PageRequest):
        def send_head(self, page: Page, more: Mapping[str, str]) -> None:
            if self.path == "/status.json":
                statuses.add(page.status)
            super().send_head(page, more)

    def seen(shown: str) -> str:
        told = f"Object.defineProperty(document, 'hidden', {{value: {shown}, configurable: true}});"
        return told + "document.dispatchEvent(new Event('visibilitychange')); 1"

    pages |= {"/status.json": slow, "/status.js": lambda: replace(script, body=quick)}
    with (
        PageServer("127.0.0.1", 0, pages, option="", handler=Watched) as server,
        Window(server.url) as window,
    ):
        wait_until(lambda: asks > 2, 30)
        assert window.run("document.getElementById('health').textContent") == "Training"
        assert most == 1 and statuses == {200, 304}
        window.run(seen("true"))
        wait_until(lambda: not at_once, 10)
        before = asks
        time.sleep(1.0)
        assert asks == before
        window.run(seen("false"))
        wait_until(lambda: asks > before + 1, 10)
        assert window.console == []
