"""How much memory a peer needs and takes, so that a volunteer can bound it."""

from __future__ import annotations

from pathlib import Path

from dilocox.dht.errors import EnvironmentFault, InvalidInput

PROCESSES_BYTES = 800_000_000  # the five processes before the first vector, measured
# Vectors of the stage's size, 4 bytes a value: six shared ones (averager.StageBuffers), weights,
# gradients, two moments, start, residual, and delta and message of a send in flight.
VECTORS = 14
ACTIVATION_SHARE = 1.25  # of the above, for activations and temporaries


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


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
