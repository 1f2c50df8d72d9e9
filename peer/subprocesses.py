"""Starts this program's own commands as child processes that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault

PREFIX = "DILOCOX_"  # of the environment variables that are options
PR_SET_PDEATHSIG = 1


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
    libc, parent = ctypes.CDLL(None), os.getpid()
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was too late to be told
            os._exit(1)

    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - looked up before the fork
            env={**inherited, **(env or {})},
        )
    return Child(process, log)
