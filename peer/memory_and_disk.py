"""How much memory and disk a peer needs and takes, so that a volunteer can bound it.

A `Check` is a line of `dilocox doctor` about it; a peer that starts looks at its disk likewise.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dilocox.dht.errors import EnvironmentFault, InvalidInput

if TYPE_CHECKING:  # the doctor looks here where torch cannot be loaded
    import torch

logger = logging.getLogger(__name__)

PROCESSES_BYTES = 800_000_000  # the four processes before the first vector, measured
# Vectors of the stage's size, 4 bytes a value: three shared ones (averager.StageBuffers), weights,
# gradients, two moments, start, and the delta of a send in flight.
VECTORS = 9
DEVICE_VECTORS = 4  # weights, gradients, two moments: on the GPU, where there is one
ACTIVATION_SHARE = 1.25  # of the above, for activations and temporaries
MAX_WINDOW = 1024  # microbatches in flight

# Of a container, by version of Linux's control groups: the limit, what is used, and details.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_GROUPS_FOLDER = Path("/sys/fs/cgroup")


def planned_bytes(numel: int) -> int:
    """A rough plan of what a peer of a stage with so many values will take."""
    return PROCESSES_BYTES + round(ACTIVATION_SHARE * VECTORS * 4 * numel)


def planned_beside_gpu_bytes(numel: int) -> tuple[int, int]:
    """The same with a GPU: what it takes of the machine's memory, and of the GPU's."""
    on_gpu = round(ACTIVATION_SHARE * DEVICE_VECTORS * 4 * numel)
    return planned_bytes(numel) - on_gpu, on_gpu


def check_plan(numel: int, limit_bytes: float | None) -> None:
    """Refuse (InvalidInput) to start a peer that cannot stay within the limit; where the machine
    has less than planned, warn: the plan is rough.
    """
    planned = planned_bytes(numel)
    if limit_bytes is not None and planned > limit_bytes:
        raise InvalidInput(
            f"--memory-limit {limit_bytes / 1e9:.1f}: this stage needs about "
            f"{planned / 1e9:.1f} GB; raise the limit or host a smaller stage"
        )
    free = available_bytes()
    if planned > free:
        logger.warning(
            "this stage needs about %.1f GB of memory, %.1f GB are free: close other programs or "
            "host a smaller stage, or the system may end this peer",
            planned / 1e9,
            free / 1e9,
        )


def check_use(pids: list[int], limit_bytes: float | None) -> None:
    """Raise EnvironmentFault if these processes together take more than the limit."""
    if limit_bytes is None:
        return
    taken = sum(proportional_bytes(pid) for pid in pids)
    if taken > limit_bytes:
        raise EnvironmentFault(
            f"this peer takes {taken / 1e9:.1f} GB, more than --memory-limit "
            f"{limit_bytes / 1e9:.1f}; raise the limit, lower the microbatch size in the "
            "manifest, or host a smaller stage"
        )


def window_limit(stored_bytes: int, limit_bytes: float | None, device: torch.device) -> int:
    """Microbatches in flight that a peer has room for, each storing so many bytes.

    Half of what is free on the device; on the CPU no more than the share of the limit that the plan
    has for activations. 0 bytes are not known yet.
    """
    import torch

    if stored_bytes <= 0:
        return MAX_WINDOW
    on_cpu = device.type == "cpu"
    room = (available_bytes() if on_cpu else torch.cuda.mem_get_info(device)[0]) / 2
    if limit_bytes is not None and on_cpu:
        room = min(room, (limit_bytes - PROCESSES_BYTES) * (1 - 1 / ACTIVATION_SHARE))
    return max(1, min(MAX_WINDOW, int(room / stored_bytes)))


@contextmanager
def gpu_memory(*, recomputes: bool) -> Generator[None]:
    """Where a GPU's memory is used up inside, raise EnvironmentFault, which names the remedy.

    The peer ends as if it had been killed: nothing of the inner step in progress is written.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        option = "" if recomputes else "start with --recompute, which takes less, "
        raise EnvironmentFault(
            f"the GPU has no memory left for an inner step, which is dropped: {option}close other "
            "programs that use it, host a smaller stage, or ask the operator for a smaller "
            "batch.microbatch_size"
        ) from error


def available_bytes() -> int:
    """Memory that processes here could still have: the machine's, or the container's if less."""
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    return int(min(machine, *(_left_in_group(*files) for files in _GROUPS)))


def _left_in_group(limit: str, used: str, details: str) -> float:
    """What a container's control group leaves; infinite where there is no limit, or no group.

    Files that were read and can be dropped count as used there, but are given back when needed.
    """
    try:
        allowed = int((_GROUPS_FOLDER / limit).read_text())
        taken = int((_GROUPS_FOLDER / used).read_text())
        lines = (_GROUPS_FOLDER / details).read_text().splitlines()
    except (OSError, ValueError):  # a limit of "max" is none
        return math.inf
    facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    droppable = facts.get("total_inactive_file", facts.get("inactive_file", "0"))
    return max(0, allowed - taken + int(droppable))


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


Status = Literal["ok", "warning", "failed", "skipped"]
SPARE_SHARE = 0.85  # of what is free: a plan above it leaves little for other programs


@dataclass(frozen=True)
class Check:
    """One line: `text` says what was found, `remedy` what a person can do about it."""

    name: str
    status: Status
    text: str
    remedy: str = ""


# ---- room ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DiskNeeds:
    """What a stage is still to take of a disk: more of it in all, and for its next snapshot."""

    more_bytes: int
    snapshot_bytes: int


def disk_check(path: str, free_bytes: int, needs: DiskNeeds | None) -> Check:
    """Whether snapshots and log of the stage fit; None where nothing is known of it, or nothing is
    to come.

    With room for one snapshot a peer trains until the disk is full, and its person may free some.
    """
    text = f"{size(free_bytes)} free for {path}"
    if needs is None:
        return Check("disk", "ok", text)
    remedy = "free some, or choose a folder on another disk with --state"
    if free_bytes < needs.snapshot_bytes:
        text += f", a snapshot takes {size(needs.snapshot_bytes)}, all that is to come "
        text += size(needs.more_bytes)
        return Check("disk", "failed", f"no snapshot fits on the disk: {text}", remedy)
    text += f", {size(needs.more_bytes)} needed"
    if free_bytes < needs.more_bytes:
        return Check("disk", "warning", f"the disk will be full: {text}", remedy)
    return Check("disk", "ok", text)


# ---- words ---------------------------------------------------------------------------------------
def size(count: float) -> str:
    """Bytes as people read them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            value = count / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} bytes"


def nearest(path: Path) -> Path:
    """The path itself, or the folder nearest to it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk_free(path: Path) -> int:
    """Bytes that a state folder may still take."""
    return shutil.disk_usage(nearest(path)).free
