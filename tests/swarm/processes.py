"""Which processes, shared memory and sockets belong to a peer, however they came about and whoever
their parent is now: every process of it inherits one environment variable."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

TAG = "SWARM_TEST_PEER"
LIMIT_S = 30.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Process:
    """A running process of a tagged family."""

    pid: int
    name: str
    parent: int

    @property
    def written_bytes(self) -> int:
        """What it has written so far, to files, pipes and sockets."""
        try:
            lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        except OSError:
            return 0
        return int(lines[1].removeprefix("wchar:"))

    @property
    def anonymous_mb(self) -> float:
        """The memory that it filled, or inherited and may share; 0 if it is gone.

        What belongs to it alone grows by all that it no longer shares, whoever writes into that.
        """
        folder = Path(f"/proc/{self.pid}")
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            if folder.exists():  # a kernel that does not tell would let every bound hold
                raise
            return 0.0
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def family(tag: str) -> list[Process]:
    """The running processes whose tag is this one, or goes on with a dot; zombies do not count.

    Of twelve peers the tag of the second one is the beginning of two others' tags.
    """
    wanted = f"{TAG}={tag}".encode()
    found: list[Process] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if not any(each == wanted or each.startswith(wanted + b".") for each in variables):
                continue
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state not in "ZX":
                found.append(Process(int(folder.name), name, int(parent)))
    return found


class Family:
    """All processes that have one tag, and what they leave behind.

    seen: their ids, also of those that have ended.
    """

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self.seen: set[int] = set()

    def alive(self) -> list[Process]:
        """Those that run now."""
        alive = family(self.tag)
        self.seen.update(process.pid for process in alive)
        return alive

    def left(self) -> list[str]:
        """What is still there of them."""
        found = [f"{process.name} {process.pid}" for process in self.alive()]
        return found + shared_memory(self.seen)

    def remove(self) -> None:
        """Kill those that still run, and remove the shared memory of all."""
        send_signal(self.alive(), signal.SIGKILL)
        for path in shared_memory(self.seen):
            Path(path).unlink(missing_ok=True)


def send_signal(processes: list[Process], number: signal.Signals) -> None:
    """Send a signal to each of them, by its id."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def shared_memory(pids: set[int], before: set[str] | None = None) -> list[str]:
    """The files in /dev/shm that torch made for one of these processes.

    before: what was there at the start, of processes that had the same ids.
    """
    found: list[str] = []
    for path in Path("/dev/shm").glob("torch_*"):
        maker = path.name.split("_")[1]
        if maker.isdigit() and int(maker) in pids and str(path) not in (before or ()):
            found.append(str(path))
    return found


class Program:
    """A child process whose output is read line by line, with a deadline."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._rest = b""
        self.pid = self._process.pid

    def line(self, limit_s: float = LIMIT_S) -> str:
        """Its next line; empty if it has ended or the limit is over."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._output], [], [], left)
            more = os.read(self._output.fileno(), 1 << 16) if ready else b""
            if not more:
                return ""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def lines(self) -> list[str]:
        """All that it prints until its end."""
        return list(iter(self.line, ""))

    def end(self) -> int:
        """Kill it if it still runs; its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        self._output.close()
        return self._process.wait()

    def ends_within(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True
