"""A peer that rests: what it shows, when it goes on, and how its volunteer tells it."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.peer.hours import Hours
from dilocox.peer.options import GB, PauseOptions, PeerOptions, ResumeOptions
from dilocox.peer.os_process import StopSignal
from dilocox.peer.process.local_page import TOKEN_HEADER
from dilocox.peer.process.resting import (
    Allowance,
    Resting,
    pause,
    rest_watch,
    resume,
    wait_until_allowed,
)
from dilocox.peer.state_folder import StateFolder
from tests.dht.processes import wait_until
from tests.peer.fabricated import NOBODYS_INVITE, RUN
from tests.peer.real_commands import Command
from tests.peer.shown_metrics import Shown
from tests.ports import free_port


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a peer that was of stage 1."""
    folder = tmp_path / "state"
    (folder / f"{RUN}-stage1").mkdir(parents=True)
    Identity.load_or_create(folder / "identity.key")
    status = {"state": "training", "head": "h", "members": ["h", "m"], "round": 7, "tokens": 64}
    (folder / f"{RUN}-stage1" / "status.json").write_text(json.dumps(status))
    return folder


def options(state: Path, **changes: Any) -> PeerOptions:
    return PeerOptions(invite=Invite.parse(NOBODYS_INVITE), state=state, metrics_port=0, **changes)


def status_of(state: Path) -> dict[str, Any]:
    return json.loads((state / f"{RUN}-stage1" / "status.json").read_text())


# ---- pausing -------------------------------------------------------------------------------------
def test_pausing_lasts_until_it_is_resumed_and_twice_does_no_harm(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(command: Callable[[Any], int], kind: type[PauseOptions]) -> str:
        assert command(kind(state=state)) == 0
        return capsys.readouterr().out

    allowance = Allowance(options(state))
    assert allowance.rest() is None
    assert f"`dilocox resume --state {state}`" in said(pause, PauseOptions)
    assert "already" in said(pause, PauseOptions)
    rest = Allowance(options(state)).rest()
    assert rest is not None and (rest.reason, rest.until) == ("paused", None)
    assert "goes on" in said(resume, ResumeOptions)
    assert said(resume, ResumeOptions) == "it is not paused\n"
    assert allowance.rest() is None


@pytest.mark.parametrize("command", [pause, resume])
def test_a_folder_that_is_no_peers_is_named(command: Any, state: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--state .*nowhere: no peer was started"):
        command(ResumeOptions(state=tmp_path / "nowhere"))
    (state / "invite").write_text("dilocox:...")
    with pytest.raises(InvalidInput, match=r"this is a bootstrap's folder"):
        command(ResumeOptions(state=state))
    assert not (state / "paused").exists()


# ---- while it trains -----------------------------------------------------------------------------
def test_over_the_limit_a_training_peer_is_asked_to_leave_and_its_traffic_is_kept(
    state: Path,
) -> None:
    total = [0]
    given = options(state, monthly_traffic_gb=3.0)
    with StopSignal() as stop:
        stop.defer()
        with rest_watch(Allowance(given), lambda: total[0], stop, look_s=0.01):
            total[0] = int(2.9 * GB)
            assert not stop.event.wait(0.2)
            total[0] = int(3.1 * GB)
            assert stop.event.wait(5.0)
            total[0] = int(3.3 * GB)  # until it has left
        assert not stop.asked
        assert stop.patient  # nobody waits for what it uses
    after = Allowance(given)
    assert after.used_bytes == pytest.approx(3.3 * GB)
    rest = after.rest()
    assert rest is not None and rest.reason == "traffic"
    assert rest.words == "3.3 GB of this month's 3 GB are used"
    assert Allowance(options(state, monthly_traffic_gb=4.0)).rest() is None


def test_a_look_that_fails_does_not_end_the_limits(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traffic = iter([ZeroDivisionError()])

    def count() -> int:
        for error in traffic:
            raise error
        return int(3.1 * GB)

    given = options(state, monthly_traffic_gb=3.0)
    with StopSignal() as stop:
        stop.defer()
        with rest_watch(Allowance(given), count, stop, look_s=0.01):
            assert stop.event.wait(5.0)
    assert "looking again" in caplog.text


def test_who_is_paused_wants_its_machine(state: Path) -> None:
    StateFolder(state).pause(True)
    with StopSignal() as stop:
        stop.defer()
        with rest_watch(Allowance(options(state)), lambda: 0, stop, look_s=0.01):
            assert stop.event.wait(5.0)
        assert not stop.patient


def test_who_leaves_patiently_hears_that_it_is_paused(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its volunteer wants the machine now, and not at the end of an inner step."""
    now = 1_763_640_000.0
    hour = time.localtime(now).tm_hour
    given = options(state, hours=Hours.parse([f"{(hour + 2) % 24}-{(hour + 3) % 24}"]))
    caplog.set_level("INFO", "dilocox.peer.process.resting")
    with StopSignal() as stop:
        stop.defer()
        with rest_watch(Allowance(given, lambda: now), lambda: 0, stop, look_s=0.01):
            assert stop.event.wait(5.0) and stop.patient
            StateFolder(state).pause(True)
            wait_until(lambda: not stop.patient, 5.0)
            StateFolder(state).pause(False)
            time.sleep(0.2)  # some looks
            assert not stop.patient
    told = [message.partition(" hours")[0] for message in caplog.messages]
    assert told == [
        "leaving to rest: outside the",
        "leaving to rest: paused, until `dilocox resume`",
    ]


# ---- while it rests ------------------------------------------------------------------------------
def test_who_may_take_part_does_not_wait_and_makes_nothing(tmp_path: Path) -> None:
    hours = Hours.parse(["0-24"])
    given = options(tmp_path / "new", hours=hours, monthly_traffic_gb=1.0)
    assert wait_until_allowed(given)
    assert not (tmp_path / "new").exists()


def test_it_says_why_it_rests_and_goes_on_when_it_is_resumed(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StateFolder(state).pause(True)
    seen: list[dict[str, Any]] = []

    def volunteer() -> None:
        wait_until(lambda: status_of(state)["state"] == "resting", 5.0)
        seen.append(status_of(state))
        StateFolder(state).pause(False)

    thread = threading.Thread(target=volunteer)
    thread.start()
    with caplog.at_level("INFO", logger="dilocox.peer.process.resting"):
        assert wait_until_allowed(options(state), look_s=0.01)
    thread.join()
    assert seen[0]["resting"] == "paused, until `dilocox resume`"
    assert (seen[0]["resumes_at"], seen[0]["head"], seen[0]["round"]) == (None, "", 7)
    after = status_of(state)
    assert (after["state"], "resting" in after) == ("joining", False)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # once, not every second
    assert told[0] == f"resting: paused; `dilocox resume --state {state}` ends it"


def test_the_figures_have_the_names_and_labels_of_a_peer_that_trains(state: Path) -> None:
    now = 1_763_640_000.0
    hour = time.localtime(now).tm_hour
    hours = Hours.parse([f"{(hour + 2) % 24}-{(hour + 3) % 24}"])
    given = options(state, hours=hours, monthly_traffic_gb=5.0)
    (state / f"{RUN}-stage1.old").mkdir()  # no stage of this peer
    shown = Resting(given, Allowance(given, clock=lambda: now))
    assert shown.look()
    pages = shown.pages()
    assert pages["/healthz"]().status == 200
    assert b"resting: outside the hours" in pages["/readyz"]().body
    found = {
        family.name: {
            tuple(sorted(sample.labels.items())): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(pages["/metrics"]().body.decode())
    }
    assert found["dilocox_ready"] == {(("stage", "1"),): 0.0}
    assert found["dilocox_peer_state"][(("stage", "1"), ("state", "resting"))] == 1.0
    assert sum(found["dilocox_peer_state"].values()) == 1.0
    assert found["dilocox_resting"][(("reason", "hours"), ("stage", "1"))] == 1.0
    (until,) = found["dilocox_resting_until_timestamp_seconds"].values()
    assert 3600 < until - now <= 7200 and status_of(state)["resumes_at"] == until
    assert list(found["dilocox_month_traffic_limit_bytes"].values()) == [5e9]
    training = list(Shown().samples())
    for name in ("ready", "peer_state", "build_info", "month_traffic_bytes"):
        labels = {tuple(sorted(given)) for other, given, _ in training if other == name}
        here = {tuple(key for key, _ in series) for series in found[f"dilocox_{name}"]}
        assert here == labels, name


# ---- the command itself --------------------------------------------------------------------------
def test_a_paused_peer_starts_nothing_goes_on_from_its_page_and_leaves_on_a_signal(
    state: Path,
) -> None:
    port = free_port()
    StateFolder(state).pause(True)
    arguments = ("peer", NOBODYS_INVITE, "--state", str(state), "--metrics-port", str(port))
    command = Command(*arguments, folder=state)
    again = None
    try:
        command.wait_for("resting: paused")
        assert len(command.family.alive()) == 1
        memory = Path(f"/proc/{command.process.pid}/statm").read_text().split()[1]
        assert int(memory) * 4096 < 150e6  # without torch and hivemind
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            assert answer.status == 200
        began = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(10.0) == 0
        assert time.monotonic() - began < 2.0
        again = Command(*arguments, folder=state)
        again.wait_for("resting: paused")
        token = (state / "page.token").read_text()
        again.wait_for(f"this peer's own page is http://127.0.0.1:{port}/?token={token}")
        resumes = urllib.request.Request(
            f"http://127.0.0.1:{port}/resume", method="POST", headers={TOKEN_HEADER: token}
        )
        with urllib.request.urlopen(resumes, timeout=5) as answer:
            assert answer.status == 200
        again.wait_for("going on")
        again.wait_for("trying again until one answers")  # nobody is at the invite's address
        again.process.send_signal(signal.SIGTERM)
        assert again.exit_code(20.0) == 0
    finally:
        command.close()
        if again is not None:
            again.close()
