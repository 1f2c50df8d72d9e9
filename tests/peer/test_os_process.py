"""Signals: the first one asks, in the way that fits the moment; what was before is put back."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dilocox.peer.os_process import StopRequested, StopSignal, allow_open_files

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.sigpending()  # Python runs its handler on the way back from a call


@pytest.mark.parametrize("number", BOTH)
def test_while_a_command_starts_a_signal_unwinds_it_quietly(number: signal.Signals) -> None:
    closed: list[str] = []
    with StopSignal() as stop:
        try:
            send(number)
            closed.append("went on")
        finally:
            closed.append("closed")
    assert closed == ["closed"]
    assert stop.event.is_set()


def test_leaving_without_a_signal_is_told_apart_and_a_first_signal_is_no_second_one() -> None:
    with StopSignal() as stop:
        stop.defer()
        assert not stop.event.is_set()
        stop.leave(patient=True)
        assert (stop.event.is_set(), stop.asked, stop.patient) == (True, False, True)
        send(signal.SIGTERM)
        assert stop.asked
        assert not stop.patient


def test_what_came_while_it_was_deferred_is_raised_when_it_is_resumed() -> None:
    with StopSignal() as stop:
        stop.defer()
        stop.resume()  # nothing came
        stop.defer()
        send(signal.SIGTERM)
        with pytest.raises(StopRequested):
            stop.resume()


def test_handlers_can_be_installed_again_after_somebody_ignored_the_signal() -> None:
    with StopSignal() as stop:
        stop.defer()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        send(signal.SIGINT)
        assert not stop.event.is_set()
        stop.install()
        send(signal.SIGINT)
        assert stop.event.is_set()


def test_another_error_is_not_swallowed() -> None:
    with pytest.raises(KeyError), StopSignal():
        raise KeyError


DEFERRED = "with StopSignal() as stop:\n    stop.defer(); kill({}); say('on'); kill({})"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (DEFERRED.format("SIGINT", "SIGTERM"), 128 + signal.SIGTERM),
        (DEFERRED.format("SIGTERM", "SIGINT"), 128 + signal.SIGINT),
        ("leave_at_once(); say('on'); kill(SIGTERM)", 0),
        ("hold_back(); kill(SIGTERM); say('on'); leave_at_once()", 0),
    ],
)
def test_the_second_signal_and_one_during_imports_end_the_process_at_once(
    program: str, code: int
) -> None:
    head = (
        "import os, time\nfrom functools import partial\nfrom signal import SIGINT, SIGTERM\n"
        "from dilocox.peer.os_process import StopSignal, hold_back, leave_at_once\n"
        "kill, say = partial(os.kill, os.getpid()), partial(print, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program + "\ntime.sleep(60); say('survived')"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("on\n", code), done.stderr


ENDS_WITH_BUSY_THREADS = """
import atexit, threading, time, torch
from dilocox.peer.os_process import end_process

def compute():
    values = torch.rand(64, 64)
    while True:
        values = (values @ values).clamp(0, 1)

torch.set_num_threads(1)
for _ in range(4):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.2)
atexit.register(print, "tidied")
end_process(3)
"""


def test_a_process_ends_with_its_code_though_threads_of_torch_still_run() -> None:
    """The interpreter's own end aborted it in their midst: exit code -6 after a clean leave."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_BUSY_THREADS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "tidied\n")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((1024, 4096), (4096, 4096)), ((4096, 4096), (4096, 4096)), ((100, 10**6), (65536, 10**6))],
)
def test_a_process_may_open_as_many_files_as_its_user_may(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    held = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: held.append(wanted))
    allow_open_files()
    assert held[-1] == expected
