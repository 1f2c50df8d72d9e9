"""The monitor's loop: what it has walked, what it shows and keeps, what does not end it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht import addresses
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite, run_id
from dilocox.dht.join import Joined
from dilocox.dht.manifest import SignedManifest
from dilocox.peer.chain.round_history import HistoryRow, ToldHistory
from dilocox.peer.monitor import monitor
from dilocox.peer.monitor.chains import Order, Walk
from dilocox.peer.monitor.monitor import Monitor, run_monitor_command
from dilocox.peer.options import MonitorOptions
from tests.dht.revisions import FIRST, unreadable
from tests.peer.fabricated import (
    INVITE,
    NOBODYS_INVITE,
    NOW,
    RUN,
    ToldSwarm,
    chain_round,
    claim_record,
    digest,
    losses_of,
    stage_record,
    walk_of,
)

TAKING = {"peer": 10}


class Chains:
    """A chain reader without a network: it keeps what is ordered, and gives what a test puts in."""

    def __init__(self) -> None:
        self.ordered: list[Order] = []
        self.walks: list[Walk] = []
        self.asked: list[int] = []  # after which round
        self.history: ToldHistory | None = None
        self.running = False

    def start(self) -> None:
        self.running = True

    def order(self, order: Order) -> bool:
        self.ordered.append(order)
        return True

    def take(self) -> list[Walk]:
        taken, self.walks = self.walks, []
        return taken

    def ask_history(self, _manifest: object, _witness: str, after: int) -> None:
        self.asked.append(after)

    def take_history(self) -> ToldHistory | None:
        taken, self.history = self.history, None
        return taken

    def close(self) -> None:
        self.running = False


class Watched:
    """A monitor of a swarm that is only told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stages: int = 1):
        self.swarm = ToldSwarm(stages=stages)
        self.kept = folder / "kept.json"
        self.chains = Chains()
        monkeypatch.setattr(monitor, "ChainReader", lambda *_: self.chains)
        monkeypatch.setattr(monitor, "Looker", lambda *_: self)
        self._set = partial(monkeypatch.setattr, monitor)
        self._options = MonitorOptions(
            invite=Invite.parse(INVITE), state=folder, host="127.0.0.1", port=0
        )
        self._place = SimpleNamespace(
            run=RUN,
            witness="",
            manifest=self.swarm.manifest,
            clock=SimpleNamespace(time=lambda: NOW),
            dht=SimpleNamespace(running=True),
            swarm=SimpleNamespace(newest_manifest=lambda _limit_s: None, admission=None),
        )
        self.monitor = self.start()

    def told(self, signed: SignedManifest, run: str) -> None:
        """From the next start on: of this run, and a DHT that has this manifest."""
        self._place.run = run
        self._place.swarm.newest_manifest = lambda _limit_s: signed

    def start(self, **periods: float) -> Monitor:
        for name, period_s in periods.items():
            self._set(name, period_s)
        return Monitor(self._options, cast("Joined", self._place), self.kept)

    def look(self, _manifest: object) -> Any:
        """What the monitor's looker gives."""
        return self.swarm.look()

    def status(self) -> dict[str, Any]:
        return json.loads(self.monitor.pages.pages()["/status.json"]().body)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def claimed(watched: Watched, number: int, **dial_out: bool) -> None:
    """The stage's peers claim this round; `dial_out`: one that only dials out does, too."""
    claim = claim_record(number, digest(0, number))
    watched.swarm.claims[0] = {"open": claim, **dict.fromkeys(dial_out, claim)}
    for peer in dial_out:
        watched.swarm.stages[0][peer] = stage_record(client_mode=True)


def test_what_is_claimed_and_unknown_is_walked(watched: Watched) -> None:
    watched.monitor.look()
    assert watched.chains.ordered == []  # nobody claims a record
    claimed(watched, 3, hidden=True)
    watched.monitor.look()
    (order,) = watched.chains.ordered
    assert order.start == digest(0, 3) and order.holders == ["open", "hidden"]
    assert order.stop == {watched.swarm.manifest.digest}


def test_what_a_walk_found_is_shown_and_not_asked_for_again(watched: Watched) -> None:
    claimed(watched, 0)
    found = chain_round(0, 0, TAKING, root=watched.swarm.manifest.digest, chain_tokens=10)
    watched.chains.walks.append(walk_of([found]))
    watched.monitor.look()
    assert watched.chains.ordered == []
    assert watched.status()["contributions"][0]["tokens"] == 10
    claimed(watched, 1)
    watched.monitor.look()
    assert watched.chains.ordered[0].stop == {watched.swarm.manifest.digest, digest(0, 0)}


def test_a_gap_is_tried_again_now_and_then_and_not_for_ever(watched: Watched) -> None:
    claimed(watched, 5)
    newest = chain_round(0, 5, TAKING)
    watched.chains.walks.append(walk_of([newest], connected=False))
    watched.monitor.look()
    watched.monitor.look()
    assert [order.start for order in watched.chains.ordered] == [digest(0, 4)]
    assert watched.monitor.alive
    watched.monitor.close()
    assert not watched.monitor.alive  # its thread has ended
    watched.monitor = watched.start(GAP_S=0.0)
    nothing = Walk(
        stage=0, start=digest(0, 4), rounds=(), end="", connected=False, folded=Counter()
    )
    for _ in range(20):
        watched.chains.walks.append(nothing)
        watched.monitor.look()
    assert len(watched.chains.ordered) == 1 + monitor.MAX_GAP_TRIES - 1


def test_it_looks_as_often_as_peers_tell_and_goes_on_when_a_look_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert 4.0 < watched.monitor.turn() <= monitor.LONGEST_LOOK_PERIOD_S
    again = watched.start()
    monkeypatch.setattr(watched, "look", lambda _: 1 / 0)
    assert again.turn() > 4.0
    assert "a look at the swarm failed" in caplog.text
    assert again.pages.pages()["/readyz"]().status == 503


def test_a_counter_is_on_disk_before_it_is_shown(watched: Watched) -> None:
    watched.monitor.look()
    assert watched.kept.exists()  # peers came into view
    watched.kept.unlink()
    watched.monitor.look()
    assert not watched.kept.exists()
    watched.swarm.stages[0].popitem()
    watched.monitor.look()
    kept = json.loads(watched.kept.read_bytes())
    assert (kept["joined_total"], kept["left_total"]) == (3, 1)
    often = watched.start(SAVE_S=0.0)
    watched.kept.unlink()
    often.look()
    assert watched.kept.exists()


def test_a_newer_manifest_that_it_cannot_read_is_said_on_the_page_with_the_fix(
    watched: Watched, identities: list[Identity]
) -> None:
    watched.monitor.look()
    before = watched.status()["health"]
    watched.told(
        unreadable(identities[0], protocol=99), run_id(identities[0].public_key, FIRST.name)
    )
    watched.monitor = watched.start(MANIFEST_S=0.0)
    watched.monitor.look()
    health = watched.status()["health"]
    assert health["state"] == before["state"] and health["warns"]
    first, _, fix = health["sentence"].partition("; ")
    assert first == before["sentence"]
    assert "cannot read revision 1" in fix and "protocol is 99" in fix
    assert fix.endswith("install the version that the operator runs")


def test_a_full_disk_does_not_end_the_watch(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.kept.mkdir()  # it cannot be written
    watched.monitor.look()
    assert str(watched.kept) in caplog.text and watched.status()["run"] == RUN


def test_a_members_name_that_is_no_text_does_not_end_the_watch(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.chains.walks.append(walk_of([chain_round(0, 0, {"\ud800": 10}, root="r" * 64)]))
    watched.monitor.look()
    watched.monitor.close()
    assert "is not saved" in caplog.text and watched.status()["totals"]["contributors"] == 1


def test_absurd_figures_of_peers_end_nothing(watched: Watched) -> None:
    swarm = watched.swarm
    for head in swarm.replicas:
        swarm.replicas[head] = replace(
            swarm.replicas[head],
            tokens_per_s=1e308,
            step_s=1e308,
            train_loss=-1e308,
            val_loss=1e308,
            inner_step=2**53,
            waiting_share=1e308,
        )
    for peer in swarm.stages[0]:
        swarm.stages[0][peer] = stage_record(round=2**53, voids=2**53, tokens_per_s=1e308)
    for _ in range(4):
        watched.monitor.look()
    assert losses_of(watched.status()) == [] and watched.status()["totals"]["waiting"] == 1


# ---- the command ---------------------------------------------------------------------------------
def test_a_monitor_of_an_unknown_run_says_that_no_bootstrap_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "BOOTSTRAP_PATIENCE_S", 0.1)
    options = MonitorOptions(
        invite=Invite.parse(NOBODYS_INVITE), state=tmp_path, host="127.0.0.1", port=0
    )
    with pytest.raises(EnvironmentFault, match="no bootstrap can be reached"):
        run_monitor_command(options)


# ---- the history that bootstraps keep ------------------------------------------------------------
def told_rows(*numbers: int) -> ToldHistory:
    rows = [
        HistoryRow(
            n, 0, digest(0, n)[:16], NOW - 1000 + n, 100 * (n + 1), 3.0, 2.0 + n / 100, 50.0, 4
        )
        for n in numbers
    ]
    return ToldHistory(rows, {})


def test_a_monitor_that_starts_late_draws_all_that_a_bootstrap_tells(watched: Watched) -> None:
    watched.monitor.look()
    assert watched.chains.asked == [-2]
    watched.chains.history = told_rows(*range(300))
    watched.monitor.look()
    curve = watched.status()["curve"]
    assert [row[0] for row in curve if row[1] is not None] == list(range(300))
    assert curve[7] == [7, 800, NOW - 993, 3.0, 2.07, 2.07, 2.07, 50.0, 4, None, None]
    assert losses_of(watched.status())[7] == [7, 3.0, 2.07]
    watched.monitor.close()
    again = watched.start(HISTORY_S=0.0)
    again.look()
    watched.chains.history = told_rows(*range(300))
    again.look()
    again.look()
    # all, for names that it has not heard; then the newest, which may be known better by now
    assert watched.chains.asked[1:] == [-2, 289, 289]


def test_without_a_bootstrap_that_tells_the_curve_is_what_the_monitor_sees(
    watched: Watched,
) -> None:
    watched.chains.history = ToldHistory([], {})  # of an older version
    watched.monitor.look()
    for number in range(3):
        root = watched.swarm.manifest.root
        found = chain_round(0, number, TAKING, root=root, chain_tokens=100 * (number + 1))
        watched.chains.walks.append(walk_of([found]))
        watched.monitor.look()
    rows = {row[0]: row for row in watched.status()["curve"]}
    assert [rows[number][1] for number in range(3)] == [100, 200, 300]
    assert rows[2][2] == watched.swarm.at and rows[2][7:] == [None, 3, None, None]
