"""How much memory a peer needs and takes, so that a volunteer can bound it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dilocox.dht.errors import EnvironmentFault, InvalidInput

PROCESSES_BYTES = 800_000_000  # the five processes before the first vector, measured
# Vectors of the stage's size, 4 bytes a value: six shared ones (averager.StageBuffers), weights,
# gradients, two moments, start, residual, and delta and message of a send in flight.
VECTORS = 14
ACTIVATION_SHARE = 1.25  # of the above, for activations and temporaries
MAX_WINDOW = 1024  # microbatches in flight


def planned_bytes(numel: int) -> int:
    """A rough plan of what a peer of a stage with so many values will take."""
    return PROCESSES_BYTES + round(ACTIVATION_SHARE * VECTORS * 4 * numel)


def check_plan(numel: int, limit_bytes: float | None) -> None:
    """Refuse (InvalidInput) to start a peer that cannot stay within the limit."""
    planned = planned_bytes(numel)
    if limit_bytes is not None and planned > limit_bytes:
        raise InvalidInput(
            f"--memory-limit {limit_bytes / 1e9:.1f}: this stage needs about "
            f"{planned / 1e9:.1f} GB; raise the limit or host a smaller stage"
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
    if stored_bytes <= 0:
        return MAX_WINDOW
    on_cpu = device.type == "cpu"
    room = (available_bytes() if on_cpu else torch.cuda.mem_get_info(device)[0]) / 2
    if limit_bytes is not None and on_cpu:
        room = min(room, (limit_bytes - PROCESSES_BYTES) * (1 - 1 / ACTIVATION_SHARE))
    return max(1, min(MAX_WINDOW, int(room / stored_bytes)))


def available_bytes() -> int:
    """Memory that this machine could still give to processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
