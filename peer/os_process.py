"""A command as a process: the signals that end it, the commands that it starts, its log.

SIGINT and SIGTERM mean: leave. The first one asks, the second one ends at once. While a command
starts, asking means to raise `StopRequested`: whatever waits for the network is left at once, and
all that is open is closed on the way out. From `defer` on it only sets `event`, for the loop that
has something to finish first.

`start_process` starts children that do not outlive their parent. Log lines are for people: one
format, and hivemind's own chatter kept down. On a terminal a line takes the place of the progress
line (peer/training/report.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import write_atomically
from dilocox.dht.parent_death import dying_with_parent

LEVELS = ("debug", "info", "warning", "error")
MOST_OPEN_FILES = 65536
CLEAR_LINE = "\r\x1b[K"  # what stands in this line of the terminal goes


def set_up_logging(level: str) -> None:
    """Log to standard error; raises InvalidInput for an unknown level.

    Call it before hivemind is imported: it reads its level from the environment.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--log-level {level}: choose one of {', '.join(LEVELS)}")
    logging.addLevelName(logging.WARNING, "WARN")  # as hivemind does where it is imported
    handler = logging.StreamHandler(sys.stderr)
    line = f"{line_start()}%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    root = logging.getLogger("dilocox")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # hivemind prints a traceback for every round that finds no group; what matters we say ourselves
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if level == "debug" else "CRITICAL")


def allow_open_files() -> None:
    """Let this process and its children open as many files as it may, up to MOST_OPEN_FILES: each
    stream of another peer is one, and many systems start with a limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def line_start() -> str:
    """What a line on standard error begins with: whatever thread or process writes it, a peer's
    progress line may stand there.
    """
    return CLEAR_LINE if sys.stderr.isatty() else ""


def counted(number: int, what: str) -> str:
    """A number of things, whose name takes an s where they are not one."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def write_json(file: Path, value: Any) -> None:
    """What `--json` asks for: a file, or `-` for the terminal."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """To a file, or `-` for the terminal."""
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        write_atomically(file, text.encode())


def wide_console(*, highlight: bool = True) -> Console:
    """Standard output for tables, which rich would cut at 80 columns in a file or pipe."""
    return Console(width=None if sys.stdout.isatty() else 250, highlight=highlight)


def strict_json(facts: Any, separators: tuple[str, str] | None = None) -> str:
    """JSON for any reader: a number that is not finite, which JSON does not know, is null."""
    known = json.loads(json.dumps(facts), parse_constant=lambda _: None)
    return json.dumps(known, separators=separators)


RESTART_AFTER_S = 20.0  # a command whose processes die sooner than that does not try again
STOPPED = 130  # exit code of a command that a signal ended before it was done


class StopRequested(BaseException):
    """A signal came while there was nothing to finish."""


class StopSignal:
    """A context in which the two signals ask to leave. It ends quietly by a `StopRequested`, and
    what was to happen on the signals before is put back.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.event = threading.Event()
        self.asked = False  # by a signal
        self._raises = True
        self._patient = False
        self._before = {number: signal.getsignal(number) for number in self.SIGNALS}

    def install(self) -> None:
        """Install the handlers (again: hivemind's averager sets SIGINT to be ignored)."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on a signal only sets `event`."""
        self._raises = False

    def leave(self, *, patient: bool = False) -> None:
        """Set `event` without a signal: a first one may still come, and is no second one. patient:
        nobody waits for it.
        """
        self._patient = patient
        self.event.set()

    @property
    def patient(self) -> bool:
        """Whether what asked to leave can wait."""
        return self._patient and not self.asked

    def resume(self) -> None:
        """From now on a signal raises again, and one that came meanwhile does so now."""
        self._raises = True
        if self.event.is_set():
            raise StopRequested

    def __enter__(self) -> StopSignal:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return kind is StopRequested

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)  # the children watch this process and end with it
        self.asked = True
        self.event.set()
        if self._raises:
            raise StopRequested


def hold_back() -> None:
    """For a process that becomes another one: signals wait for its `leave_at_once`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, StopSignal.SIGNALS)


def leave_at_once() -> None:
    """For the seconds of imports before a command has started anything: just end."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(0)

    for number in StopSignal.SIGNALS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopSignal.SIGNALS)


def start_again() -> NoReturn:
    """Become a new process with the same options: what is forked cannot be exchanged."""
    from dilocox.dht import node_process  # hivemind, which `--help` need not load

    hold_back()
    node_process.remove(node_process.shared_memory_folder())  # no exit, so nobody else would
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(descriptor.name) > 2:  # or the new process holds what the old one shared
                os.set_inheritable(int(descriptor.name), False)
    os.execv(sys.executable, [sys.executable, "-m", "dilocox", *sys.argv[1:]])


def end_process(code: int) -> NoReturn:
    """End this process with what was registered for its end, but without the interpreter's own end.

    There a daemon thread that comes back from torch is unwound through C++ that does not allow it:
    "terminate called without an active exception", and a peer that left in good order has exit code
    -6. hivemind has such threads, and nobody can end them.
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


PREFIX = "DILOCOX_"  # of the environment variables that are options


class Child:
    """A running command, with its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self._process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise EnvironmentFault if it has ended by itself."""
        if self.returncode is not None:
            raise EnvironmentFault(f"{self.log.stem} ended by itself: {self.last_line()}")

    def last_line(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(its log is empty)"

    def terminate(self) -> None:
        """Ask it to leave."""
        if self.returncode is None:
            self._process.terminate()

    def wait(self, limit_s: float) -> None:
        """Wait for its end; kill it when the limit is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
            return
        self._process.kill()
        self._process.wait(limit_s)


def start_command(arguments: list[str], log: Path, *, env: dict[str, str] | None = None) -> Child:
    """Start `dilocox` with these arguments; see `start_process`."""
    return start_process([sys.executable, "-m", "dilocox", *arguments], log, env=env)


def start_process(command: Sequence[str], log: Path, *, env: Mapping[str, str] | None) -> Child:
    """Start a command, its output into the log file.

    It gets a session of its own, so that Ctrl-C reaches it through us, and SIGTERM when we die. The
    environment's options are ours, not its own: its arguments and `env` say all.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}

    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),  # noqa: PLW1509
            # each line is in the log when it is written: the last one says why it ended
            env={**inherited, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
    return Child(process, log)
