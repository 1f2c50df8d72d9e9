"""How much memory and disk a peer needs and takes, so that a volunteer can bound it.

A `Check` is a line of `dilocox doctor` about it; a peer that starts looks at its disk likewise.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dilocox.dht.errors import EnvironmentFault, InvalidInput

if TYPE_CHECKING:  # the doctor looks here where torch cannot be loaded
    import torch

logger = logging.getLogger(__name__)

PROCESSES_BYTES = 800_000_000  # the four processes before the first vector, measured
WORK_BYTES = 80_000_000  # what kernels and the allocator take when a CPU begins to train, measured
HEAP_SHARE = 1.15  # of activations on a CPU: the heap's gaps, measured
CUDA_BYTES = 600_000_000  # what CUDA takes of a GPU for each process, more or less
SPARE_SHARE = 0.85  # of all that a peer may take: a plan above it leaves little to spare
LARGEST_OWN_WINDOW = 1024  # microbatches in flight

# Of a container, by version of Linux's control groups: the limit, what is used, and details.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
GROUPS_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What a peer of a stage takes at the peak, in bytes, with one microbatch in flight.

    values: of the stage's flat vector. activations: of the microbatch, with temporaries, in fp32;
    gpu_activations: in the precision of a GPU; kept, gpu_kept: of these what one more in flight
    takes. encoded: what an exchange holds beside the vectors:
    own parts, those of others, means, the record.
    offload: whether weights and moments stay beside a GPU (training/offload.py).
    """

    values: int
    activations: int = 0
    gpu_activations: int = 0
    encoded: int = 0
    kept: int = 0
    gpu_kept: int = 0
    offload: bool = False

    @property
    def on_cpu(self) -> int:
        """Of the machine's memory, where the CPU trains."""
        activations = round(HEAP_SHARE * self.activations)
        return self._always + self._trained + WORK_BYTES + activations

    @property
    def beside_gpu(self) -> int:
        """Of the machine's memory, where a GPU trains."""
        return self._always + (self._trained + WORK_BYTES if self.offload else 0)

    @property
    def on_gpu(self) -> int:
        """Of the GPU's, where the averaging process tries its products, too; with `offload` narrow
        weights, and the largest gradients that pass.
        """
        trained = 4 * self.values if self.offload else self._trained
        return 2 * CUDA_BYTES + trained + self.gpu_activations

    def of_machine(self, device: torch.device) -> int:
        """Of the machine's, for a stage that computes on this device."""
        return self.on_cpu if device.type == "cpu" else self.beside_gpu

    @property
    def _always(self) -> int:
        """Three shared vectors (averager.StageBuffers), start, and the delta of a send."""
        return PROCESSES_BYTES + 5 * 4 * self.values + self.encoded

    @property
    def _trained(self) -> int:
        """Weights, gradients, and AdamW's two moments."""
        return 4 * 4 * self.values


def memory_status(needed: float, most: float, free: float = math.inf) -> Status:
    """Whether so many bytes suit a machine or GPU: "failed" above the most that a peer may take,
    "warning" above SPARE_SHARE of it, or what is free now: other programs may end, and not all of
    it is taken at once.
    """
    if needed > most:
        return "failed"
    return "warning" if needed > min(SPARE_SHARE * most, free) else "ok"


def memory_remedy(needed: float, most: float, free: float, *, limited: bool, gpu: bool) -> str:
    """What a volunteer may do about a stage whose `memory_status` is not "ok". limited: the most is
    that of --memory-limit.
    """
    remedy = "raise --memory-limit" if limited else "use a larger machine"
    if needed <= most and not (limited and needed <= free):
        remedy = "close other programs"
    return f"--recompute, --offload or --device cpu takes less, or {remedy}" if gpu else remedy


def check_memory(needs: MemoryNeeds, limit_bytes: float | None, device: torch.device) -> list[str]:
    """Refuse (InvalidInput) a stage that takes more than --memory-limit, or all that machine or GPU
    have; else, in words, what it needs more of than is free now.
    """
    planned, total = needs.of_machine(device), total_bytes()
    if limit_bytes is not None and planned > limit_bytes:
        raise InvalidInput(
            f"--memory-limit {limit_bytes / 1e9:.1f}: this stage needs about {size(planned)}; "
            "raise the limit or host a smaller stage"
        )
    kinds = [("memory", planned, total, available_bytes())]
    if device.type != "cpu":
        kinds.append(("GPU memory", needs.on_gpu, gpu_total_bytes(device), gpu_free_bytes(device)))
    short: list[str] = []
    for kind, needed, most, free in kinds:
        gpu = kind == "GPU memory"
        remedy = memory_remedy(needed, most, free, limited=False, gpu=gpu)
        if memory_status(needed, most) == "failed":
            raise InvalidInput(
                f"this stage needs about {size(needed)} of {kind}, {size(most)} is all there is: "
                f"{remedy} or host a smaller stage"
            )
        if needed > free:
            short.append(
                f"this stage needs about {size(needed)} of {kind}, {size(free)} are free: {remedy} "
                "or host a smaller stage, or this peer may be ended"
            )
    return short


def gpu_free_bytes(device: torch.device) -> int:
    """Memory of a GPU that programs here could still have."""
    import torch

    return torch.cuda.mem_get_info(device)[0]


def gpu_total_bytes(device: torch.device) -> int:
    """All memory of a GPU."""
    import torch

    return torch.cuda.mem_get_info(device)[1]


def gpu_cached_bytes(device: torch.device) -> int:
    """Memory of a GPU that torch holds for this process and nothing is in."""
    import torch

    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def return_free_memory() -> None:
    """Give back what the C library keeps of freed memory, where it can: after an exchange that is
    a third of what that process had, until the next one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def check_use(pids: list[int], limit_bytes: float | None) -> None:
    """Raise EnvironmentFault if these processes together take more than the limit."""
    if limit_bytes is None:
        return
    taken = sum(proportional_bytes(pid) for pid in pids)
    if taken > limit_bytes:
        raise EnvironmentFault(
            f"this peer takes {size(taken)}, more than --memory-limit "
            f"{limit_bytes / 1e9:.1f}; raise the limit, start with --recompute, or host a "
            "smaller stage"
        )


def window_limit(
    stored_bytes: int,
    needs: MemoryNeeds,
    limit_bytes: float | None,
    device: torch.device,
    *,
    computes_on: torch.device | None = None,
    untaken_bytes: int = 0,
) -> int:
    """Microbatches in flight that a peer has room for, each storing so many bytes on a device; 0
    bytes are not known yet: as many as planned.

    Half of what is free on the device and stays so; on the CPU no more than what the limit leaves
    beside the plan, which has one of them where the stage computes there.

    computes_on: the stage's device, where it is another one. untaken_bytes: what the inner step is
    still to take on the device for gradients and moments.
    """
    on_cpu = device.type == "cpu"
    stored_bytes = max(1, stored_bytes or (needs.kept if on_cpu else needs.gpu_kept))
    free = available_bytes() if on_cpu else gpu_free_bytes(device) + gpu_cached_bytes(device)
    room = (free - untaken_bytes) / 2
    if limit_bytes is not None and on_cpu:
        planned = stored_bytes if (computes_on or device).type == "cpu" else 0
        room = min(room, limit_bytes - needs.of_machine(computes_on or device) + planned)
    return max(1, min(LARGEST_OWN_WINDOW, int(room / stored_bytes)))


def available_bytes(groups: Path = GROUPS_FOLDER) -> int:
    """Memory that processes here could still have: the machine's, or the container's if less."""
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    return int(min(machine, *(_left_in_group(*map(groups.joinpath, files)) for files in _GROUPS)))


def total_bytes(groups: Path = GROUPS_FOLDER) -> int:
    """All memory of the machine, or what the container may take if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(machine, *(_allowed(groups / limit) for limit, _, _ in _GROUPS)))


def _allowed(limit: Path) -> float:
    try:
        return int(limit.read_text())
    except (OSError, ValueError):  # a limit of "max" is none
        return math.inf


def _left_in_group(limit: Path, used: Path, details: Path) -> float:
    """What a container's control group leaves; infinite where there is no limit, or no group.

    Files that were read and can be dropped count as used there, but are given back when needed.
    """
    try:
        taken = int(used.read_text())
        lines = details.read_text().splitlines()
    except (OSError, ValueError):
        return math.inf
    facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    droppable = facts.get("total_inactive_file", facts.get("inactive_file", "0"))
    return max(0, _allowed(limit) - taken + int(droppable))


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size; 0 if it is gone. Pages of files, such as a state that is
    mapped from the disk, are the system's to drop, and count only on Linux before 5.4.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    counted = ("Pss_Anon", "Pss_Shmem") if "Pss_Anon" in facts else ("Pss",)
    return sum(1024 * int(facts.get(name, "0").split()[0]) for name in counted)


Status = Literal["ok", "warning", "failed", "skipped"]


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
