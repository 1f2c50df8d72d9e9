"""Hosts on one machine, each a network namespace. Its name tells which process made it, so that no
namespace outlives its maker for long.

A name holds its maker's process id and start time. Whoever makes new ones first removes those of
makers that are gone: nothing has to be written down, and a number that is in use again is no trap.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

GONE_LIMIT_S = 3.0
_COMMAND_LIMIT_S = 20.0
_OURS = re.compile(r"dilocox-(\d+)-(\d+)-\d+-\w+")
_serial = itertools.count()


class Hosts:
    """A context manager: the hosts while it is open, at addresses of which others reach them.

    names: of the namespaces, the hosts' first. missing: says why there can be none, empty if there
    can.
    """

    def __init__(self, names: Sequence[str], missing: Callable[[], str]):
        self._names = names
        self._missing = missing

    def __enter__(self) -> Self:
        if reason := self._missing():
            raise RuntimeError(f"no such hosts here: {reason}")
        try:
            make(self._names)
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; twice does no harm."""
        remove(self._names)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host; its process id is that of `argv` itself."""
        return ["ip", "netns", "exec", self._names[host], *argv]

    def _set_up(self) -> None:
        """Join the new namespaces."""
        raise NotImplementedError


def missing(commands: Mapping[str, str], files: Sequence[str], probe: Callable[[str], None]) -> str:
    """Why there can be no hosts on this machine; empty if there can.

    commands: what is needed, and the packages that have it. probe: does in a new namespace what the
    hosts need: a container's root may lack the right to, or the kernel the tables.
    """
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in commands.items():
        if shutil.which(command) is None:
            return f"the command {command} ({package}) is missing"
    for file in files:
        if not Path(file).exists():
            return f"the device {file} is missing"
    names = new_names(1)
    try:
        make(names)
        probe(names[0])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):
            remove(names)
    return ""


def new_names(count: int) -> list[str]:
    """Names for the namespaces of so many hosts, of this process."""
    pid, serial = os.getpid(), next(_serial)
    return [f"dilocox-{pid}-{_started(pid)}-{serial}-h{index}" for index in range(count)]


def make(names: Sequence[str]) -> None:
    """Make empty namespaces, and remove those that killed processes have left."""
    remove([name for name in existing() if _is_stale(name)])
    for name in names:
        ip("netns", "add", name)


def existing() -> list[str]:
    """Every namespace on this machine that this module named."""
    lines = ip("netns", "list").splitlines()
    return [line.split()[0] for line in lines if _OURS.match(line)]


def remove(names: Sequence[str]) -> None:
    """Kill what still runs inside these namespaces and remove them; those not there are passed."""
    for name in set(names) & set(existing()):
        deadline = time.monotonic() + GONE_LIMIT_S
        # repeated, because a process may start another one meanwhile
        while (inside := processes(name)) and time.monotonic() < deadline:
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(RuntimeError):  # another process was quicker
            ip("netns", "delete", name)


def processes(name: str) -> list[int]:
    """The ids of the processes inside a namespace."""
    try:
        return [int(pid) for pid in ip("netns", "pids", name).split()]
    except RuntimeError:
        return []


def ip(*arguments: str, lines: str | None = None) -> str:
    """Run `ip` and return its output; RuntimeError with what it said if it fails."""
    done = subprocess.run(
        ["ip", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        timeout=_COMMAND_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _is_stale(name: str) -> bool:
    match = _OURS.match(name)
    return match is not None and _started(int(match[1])) != match[2]


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
