"""Whether other programs use this machine, for a peer that takes part only while none does
(`--idle-only`). Apart from resting.py, which pauses for it: this looks, and decides nothing else.

`Machine` reads what processes other than peers take of the processor (/proc) and of the GPU
(nvidia-smi, if there), and whether the machine is on battery (/sys). `IdleWatch` decides: a peer
that comes and goes costs its replica a heal, so it rests after a minute whose mean is above the
share, and goes on after one below half of it; on battery it rests at once. A peer that rests is a
new process, which knows nothing of before: it begins by waiting for its quiet minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from dilocox.peer.hours import Rest

WINDOW_S = 60.0  # that the means are of
LOOK_S = 5.0  # between two looks
GO_ON_SHARE = 0.5  # of the share above which a peer rests
WATCHING = Rest(
    reason="busy", words="watching for a minute whether other programs are at work", until=None
)
ON_BATTERY = Rest(reason="battery", words="this machine runs on its battery", until=None)


def nvidia_use() -> Mapping[tuple[str, int], float]:
    """By GPU and process, the share of the GPU's time as nvidia-smi tells it; empty without it."""
    found: dict[tuple[str, int], float] = {}
    if shutil.which("nvidia-smi") is None:
        return found
    command = ["nvidia-smi", "pmon", "-c", "1", "-s", "u"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, timeout=5.0, check=False)
        text = told.stdout.decode(errors="replace")  # names of programs may be cut within a letter
        for line in text.splitlines():  # gpu, pid, type, sm %, ...; a dash for unknown
            words = line.split()
            if len(words) > 3 and words[1].isdecimal() and words[3].isdecimal():
                found[words[0], int(words[1])] = int(words[3]) / 100
    return found


class Machine:
    """What this machine does; `root` has its proc and sys. me: a peer's first process."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        me: int | None = None,
        gpu: Callable[[], Mapping[tuple[str, int], float]] = nvidia_use,
    ):
        self._proc = root / "proc"
        self._supplies = root / "sys/class/power_supply"
        self._me = os.getpid() if me is None else me
        self._gpu = gpu
        self._before = 0, 0, dict[int, int]()  # all ticks, busy ones, those of each process

    def use(self) -> tuple[float, float, float] | None:
        """Since the last look: ticks of all cores, those of them that programs took which are no
        peers, and the share of a GPU that such programs take. None where the system does not tell.
        """
        try:
            words = (self._proc / "stat").read_text().partition("\n")[0].split()
            ticks = [int(word) for word in words[1:9]]  # what follows is in these, too
        except (OSError, ValueError):
            return None
        total, busy = sum(ticks), sum(ticks[:3]) + sum(ticks[5:7])  # no idling, no other machines
        processes = dict(self._processes())
        peers = self._peers({pid: parent for pid, (parent, _) in processes.items()})
        total_before, busy_before, taken_before = self._before
        taken = {pid: count for pid, (_, count) in processes.items()}
        self._before = total, busy, taken
        own = sum(max(0, taken[pid] - taken_before.get(pid, 0)) for pid in peers)
        by_gpu: dict[str, float] = {}
        for (gpu, pid), share in self._gpu().items():
            if pid in processes and pid not in peers:  # a container does not see all of them
                by_gpu[gpu] = by_gpu.get(gpu, 0.0) + share
        others = max(0, busy - busy_before - own)
        return total - total_before, others, max(by_gpu.values(), default=0.0)

    @property
    def on_battery(self) -> bool:
        """Whether a battery of the machine, not of its mouse, gives and no plug does."""

        def told(supply: Path, name: str) -> str:
            with suppress(OSError):
                return (supply / name).read_text(errors="replace").strip()
            return ""

        supplies = list(self._supplies.glob("*"))
        return not any(told(each, "online") == "1" for each in supplies) and any(
            told(each, "type") in ("Battery", "UPS")
            and told(each, "status") == "Discharging"
            and told(each, "scope") != "Device"
            for each in supplies
        )

    def _processes(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """By process: its parent, and the ticks that it took."""
        for path in self._proc.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                # the name stands in parentheses and may hold anything
                words = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(path.name), (int(words[1]), int(words[11]) + int(words[12]))

    def _peers(self, parents: Mapping[int, int]) -> set[int]:
        """All processes of this peer, and of others here: two of them must not keep each other from
        work."""
        own = {pid for pid in parents if pid == self._me or self._is_peer(pid)}
        before = 0
        while len(own) > before:
            before = len(own)
            own |= {pid for pid, parent in parents.items() if parent in own}
        return own

    def _is_peer(self, pid: int) -> bool:
        """Whether it was started as `dilocox peer` or `python -m dilocox peer`."""
        with suppress(OSError):
            words = (self._proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            return (b"dilocox", b"peer") in pairwise(word.rpartition(b"/")[2] for word in words)
        return False


class IdleWatch:
    """Says why this machine is not idle, None while it is (`rest`).

    share: of the time of all cores, or of a GPU, from 0 to 1, that others may take. working:
    whether the peer trains, and does not rest, at the begin. clock: seconds that only grow.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        share: float,
        working: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._machine = machine
        self._share = share
        self._clock = clock
        self._uses: deque[tuple[float, float, float]] = deque(maxlen=1 + round(WINDOW_S / LOOK_S))
        self._looked_at = float("-inf")
        machine.use()  # the first look is to tell what was used since
        self.rest: Rest | None = None if working else WATCHING

    def look(self) -> None:
        """Look, if it is time again."""
        now = self._clock()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        if (use := self._machine.use()) is not None:
            self._uses.append(use)
        if self._machine.on_battery:
            self.rest = ON_BATTERY
            return
        if self.rest is ON_BATTERY:
            self.rest = WATCHING
        if use is None or len(self._uses) == self._uses.maxlen:
            self._judge()

    def _judge(self) -> None:
        """By the looks of the last minute."""
        ticks, others, gpu = (sum(each) for each in zip((1, 0, 0), *self._uses, strict=True))
        of_gpu = gpu / max(1, len(self._uses))
        share, what = max((others / ticks, "the processor"), (of_gpu, "the GPU"))
        if share < GO_ON_SHARE * self._share or (self.rest is None and share <= self._share):
            self.rest = None
        elif self.rest is None or self.rest is WATCHING:
            words = f"other programs use {share:.0%} of {what}"
            self.rest = Rest(reason="busy", words=words, until=None)
