"""The command `dilocox monitor`: watches a whole run from outside, for Prometheus and for people.

It joins the DHT as a client, looks every few seconds at the signed records, follows the chains of
round records, and serves metrics and a status page. It takes no part in the run. Bootstraps and
peers may come and go; when its own node dies it starts again, and what it learnt is on disk.

`MonitorPages` answers over HTTP: the status page, its figures, a card of each peer, metrics,
health. The monitor's thread makes them after each look and leaves them there, all but the cards as
bytes; a caller gets the newest, however busy that thread is.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.join import Joined, join_run
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import ManifestWatch
from dilocox.dht.swarm_view import believed_first
from dilocox.peer.chain.round_history import FIRST, HistoryRow
from dilocox.peer.http_pages import (
    Page,
    Pages,
    PageServer,
    check_port,
    health_page,
    metrics_page,
    readiness_page,
)
from dilocox.peer.monitor.card import card_svg
from dilocox.peer.monitor.chains import ChainReader, Order, in_order_of_asking
from dilocox.peer.monitor.health import health_of
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.look import Looker, SwarmLook
from dilocox.peer.monitor.status import Seen, metrics_of, status_of
from dilocox.peer.monitor.tracking import TensorBoard, Tracker, Wandb
from dilocox.peer.options import MonitorOptions
from dilocox.peer.os_process import RESTART_AFTER_S, StopSignal, counted, start_again
from dilocox.peer.state_folder import StateFolder

logger = logging.getLogger(__name__)

ANSWER_LIMIT_S = 15.0  # the figures of a large run are tens of kB, and some lines thin
LOOKS_LATE_S = 60.0  # without a look for so long, it hangs
# What it does less often than it looks:
SAVE_S = 60.0  # write what it learnt
MANIFEST_S = 5.0  # ask for the manifest
GAP_S = 60.0  # ask again for a record that nobody gave
HISTORY_S = 15.0  # ask bootstraps for what they keep of the newest rounds
LONGEST_LOOK_PERIOD_S = 5.0
SHORTEST_LOOK_PERIOD_S = 1.0
JOIN_PAUSE_S = 10.0
MAX_GAP_TRIES = 6
TITLE = b"<title>dilocox</title>"  # of the page before the first look
POLICY = {  # nothing is loaded, run or asked but from this server
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
STILL_OPEN = 10  # rounds of which a bootstrap may come to know more
Rows = Sequence[Mapping[str, Any]]
_OF_PEERS = re.compile(r"/card/(?P<card>\w+)\.svg|/peer/(?P<ending>\w{4,})\.json")
MONITOR_RUNS = "another monitor uses this folder; stop it, or give this one another with --state"


class MonitorPages:
    """The newest figures, and the pages that show them; alive: whether the monitor's parts live."""

    def __init__(self, alive: Callable[[], bool], late_s: float = LOOKS_LATE_S):
        self._alive, self._late_s = alive, late_s
        self._status = Page(body=b"{}")
        self._metrics = Page(body=b"")
        self._name, self._rows = "", dict[str, Mapping[str, Any]]()
        self._looked_at: float | None = None
        self._plain = replace(_asset("html", "html"), headers=POLICY)
        self._style, self._script = _asset("css", "css"), _asset("js", "javascript")
        self._page = self._plain

    def show(self, status: dict[str, Any], metrics: Page, rows: Rows = ()) -> None:
        """The figures after a look. rows: of all contributors, for their cards and for callers."""
        self._status = Page.json(status).kept()
        self._metrics = metrics
        head, plain = head_of(status).encode(), self._plain
        self._page = replace(plain, body=plain.body.replace(TITLE, head, 1))
        self._name, self._rows = status["name"], {row["id"]: row for row in rows}
        self._looked_at = time.monotonic()

    def pages(self) -> Pages:
        """What is served, by path."""
        return {
            "/": lambda: self._page,
            "/status.css": lambda: self._style,
            "/status.js": lambda: self._script,
            "/status.json": lambda: self._status,
            "/metrics": lambda: self._metrics,
            "/healthz": lambda: health_page({"monitor": self._alive, "looks": self._looks}),
            "/readyz": lambda: readiness_page("" if self._looked_at else "it has not looked yet"),
        }

    def answer(self, method: str, path: str, _headers: Mapping[str, str]) -> Page | None:
        """`/card/PEER_ID.svg`, None of a peer that is in no record; and `/peer/ENDING.json`: the
        rows of those whose id ends so, two of them at most.
        """
        found = _OF_PEERS.fullmatch(path) if method in ("GET", "HEAD") else None
        if found is None:
            return None
        peer, rows = found["card"], self._rows
        if peer is None:
            told = islice((row for each, row in rows.items() if each.endswith(found["ending"])), 2)
            return Page.json([*told])
        if peer not in rows:
            return None
        policy = {"Content-Security-Policy": "default-src 'none'"}
        card = card_svg(self._name, rows[peer], len(rows))
        return Page(body=card, content_type="image/svg+xml", headers=policy)

    def _looks(self) -> bool:
        return self._looked_at is None or time.monotonic() - self._looked_at < self._late_s


def _asset(ending: str, kind: str) -> Page:
    body = (files("dilocox.peer.monitor") / "page" / f"status.{ending}").read_bytes()
    return Page(body=body, content_type=f"text/{kind}; charset=utf-8")


def head_of(status: Mapping[str, Any]) -> str:
    """Title and OpenGraph tags, for programs that follow a link without running the script."""
    totals, about = status["totals"], " ".join(status["trained"]["about"].split())
    title = escape(f"{status['name']}: {status['health']['sentence']}")
    share, loss = totals["tokens"] / totals["end_tokens"], totals["validation"]
    told = f"{share:.1%} trained, {counted(totals['peers'], 'peer')}"
    told += "" if loss is None else f", validation loss {loss:.4f}"
    tags = {"type": "website", "site_name": "dilocox", "title": title}
    tags["description"] = escape(f"{told}. {about or 'Volunteers train this language model.'}")
    lines = [f'<meta property="og:{name}" content="{text}">' for name, text in tags.items()]
    return "\n".join([f"<title>{title}</title>", *lines])


# ---- the command --------------------------------------------------------------------------------
class NodeDied(EnvironmentFault):
    """The monitor's own DHT node, or the thread that follows chains, has ended."""


def run_monitor_command(options: MonitorOptions) -> int:
    """Watch until a signal comes; the exit code."""
    folder = StateFolder(options.state)
    with folder.locked(MONITOR_RUNS), StopSignal() as stop:
        check_port(options.host, options.port, option="")
        identity = Identity.load_or_create(folder.identity)
        kept = options.state / f"{options.invite.run_id}-monitor.json"
        trackers = _trackers(options)
        started = time.monotonic()
        while True:
            try:
                with join_run(options.invite, identity, listen=(), client_mode=True) as joined:
                    stop.defer()
                    _serve(Monitor(options, joined, kept, trackers), options, stop)
                break
            except NodeDied:
                if time.monotonic() - started < RESTART_AFTER_S:
                    raise
                logger.warning("this monitor's node has ended: starting again")
                start_again()
            except EnvironmentFault as error:
                # a run that is known may be without bootstraps for a while
                if stop.event.is_set() or not kept.exists():
                    raise
                logger.warning("%s; trying again", error)
                stop.resume()
                stop.event.wait(JOIN_PAUSE_S)
    return 0


def _trackers(options: MonitorOptions) -> list[Tracker]:
    run, found = options.invite.run_id, list[Tracker]()
    if (folder := options.track) is not None:
        found.append(Tracker(folder, run, TensorBoard))
    if (folder := options.track_wandb) is not None:
        found.append(Tracker(folder, run, Wandb))
    return found


def _serve(monitor: Monitor, options: MonitorOptions, stop: StopSignal) -> None:
    try:
        pages, answer = monitor.pages.pages(), monitor.pages.answer
        with PageServer(
            options.host,
            options.port,
            pages,
            answer=answer,
            option="",
            answer_limit_s=ANSWER_LIMIT_S,
        ) as server:
            typer.echo(f"watching run {monitor.joined.run} ({monitor.joined.manifest.name})")
            typer.echo(f"status page {server.url}/ and figures at /metrics")
            while not stop.event.wait(monitor.turn()):
                if not monitor.alive:
                    raise NodeDied("this monitor's own node has ended; start it again")
    finally:
        monitor.close()


class Monitor:
    """Looks, follows chains, remembers, and shows. All calls in one thread."""

    def __init__(
        self, options: MonitorOptions, joined: Joined, kept: Path, trackers: Sequence[Tracker] = ()
    ):
        """kept: the history's file. trackers: what else rounds are written to. Raises
        EnvironmentFault.
        """
        manifest, now = joined.manifest, joined.clock.time()
        self.joined = joined
        self._invite = str(options.invite)
        self._kept = kept
        self._trackers = trackers
        self._bootstraps = options.invite.peer_ids
        self._looker = Looker(joined, self._bootstraps)
        self._watch = ManifestWatch(joined.swarm, joined.run, manifest)
        self._asked_at = self._saved_at = time.monotonic()
        self._history = SwarmHistory.load(kept, manifest.stages, manifest.root, now)
        self._saved = self._history.counters
        self._gap_at = self._history_at = float("-inf")
        heartbeat_s = manifest.deadlines.heartbeat_s
        self._period_s = min(max(heartbeat_s, SHORTEST_LOOK_PERIOD_S), LONGEST_LOOK_PERIOD_S)
        self._chains = ChainReader(joined.dht, joined.run, self._bootstraps)
        self._chains.start()
        self.pages = MonitorPages(lambda: self.alive)

    @property
    def alive(self) -> bool:
        """Whether its node and its thread live."""
        return self.joined.dht.running and self._chains.running

    def turn(self) -> float:
        """One look at the swarm, whatever comes of it; the seconds until the next one."""
        began = time.monotonic()
        try:
            self.look()
        except Exception:  # /healthz says so if it goes on
            logger.exception("a look at the swarm failed")
        return max(0.1, began + self._period_s - time.monotonic())

    def look(self) -> None:
        """Read, remember, show."""
        if time.monotonic() >= self._asked_at + MANIFEST_S:
            self._asked_at = time.monotonic()
            self._watch.look()
        look = self._looker.look(self._watch.manifest)
        for walk in self._chains.take():
            self._history.walked(walk, look.at)
        self._history.look(look)
        told = self._hear_history(look.manifest)
        self._follow(look)
        health = health_of(look, self._history)
        for tracker in self._trackers:
            try:
                tracker.take(self._history, told, ended=health.state == "ended")
            except (EnvironmentFault, OSError) as error:  # the page goes on without it
                logger.warning("%s: rounds are not written now: %s", tracker.option, error)
        if (unreadable := self._watch.unreadable) is not None:  # it judges by older rules
            health = health.warned(str(unreadable))
        late = time.monotonic() >= self._saved_at + SAVE_S
        if late or self._history.counters != self._saved:
            self._save()  # before they are shown: a counter must not fall when this one is killed
        seen = Seen(self.joined.run, self._invite, look, self._history, health)
        self.pages.show(status_of(seen), metrics_page(metrics_of(seen)), seen.contributions)

    def close(self) -> None:
        """End the thread and write what was learnt; twice does no harm."""
        self._chains.close()
        self._save()
        for tracker in self._trackers:
            tracker.close()

    def _save(self) -> None:
        self._saved_at, self._saved = time.monotonic(), self._history.counters
        try:
            self._history.save(self._kept)
        # neither a full disk nor a name of a stranger that is no text must end the watch
        except (EnvironmentFault, ValueError) as error:
            logger.warning("what the monitor learnt is not saved: %s", error)

    def _hear_history(self, manifest: Manifest) -> list[HistoryRow] | None:
        """Take in what bootstraps told of the rounds, and ask again where that is due."""
        told, curve = self._chains.take_history(), self._history.curve
        if told is not None:
            self._history.told(told, manifest)
        if time.monotonic() >= self._history_at + HISTORY_S:
            self._history_at = time.monotonic()
            # no bootstrap is believed to know rounds that the chain does not have
            head = self._history.stages[0].head
            newest = curve.told if head is None else min(curve.told, head.round)
            after = max(FIRST, newest - STILL_OPEN)
            self._chains.ask_history(manifest, self.joined.witness, after)
        return told and told.rows

    # ---- chains ----------------------------------------------------------------------------------
    def _follow(self, look: SwarmLook) -> None:
        """Have walked what is claimed and not known yet; else what could not be had before."""
        retry = time.monotonic() >= self._gap_at + GAP_S
        for stage, chain in enumerate(self._history.stages):
            claims = look.claims.get(stage, {})
            believed = believed_first(claims, look.witness).values()
            start = next((claim.digest for claim in believed if claim.round >= 0), None)
            if start is None:
                continue
            if start in chain.known:
                gaps = [gap for gap, tries in chain.gaps.items() if tries < MAX_GAP_TRIES]
                if not gaps or not retry:
                    continue
                start = gaps[0]
                self._gap_at = time.monotonic()
            hosts = look.stages.get(stage, {})
            dial_out = {peer for peer, record in hosts.items() if record.client_mode}
            holders = in_order_of_asking(
                claims, start, bootstraps=self._bootstraps, dial_out=dial_out
            )
            self._chains.order(Order(stage, start, {*chain.known, self._history.root}, holders))
