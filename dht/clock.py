"""Run time: one clock that all peers of a run share within milliseconds, whatever their machines
say.

It starts from the machine's time of day, runs on the monotonic clock and is shifted by an offset
that is measured against the bootstraps. The offset lies in shared memory, so that the forked
children of a peer see it. hivemind refuses peers whose clock is three seconds off and lets records
expire by `time.time`; `install` gives it this clock instead.
"""

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

MAX_ROUND_TRIP_S = 2.0
MOST_SLEW = 1 / 60  # seconds a second
MOST_APART_S = 1.0  # of two bootstraps: a copy follows the operator's


@dataclass(frozen=True)
class OffsetSample:
    """One question for the time: how far the other clock is ahead, and how long the answer took."""

    offset_s: float
    round_trip_s: float

    @classmethod
    def from_ping(cls, asked_at: float, their_time: float, answered_at: float) -> "OffsetSample":
        """Their clock was read half a round trip after the question (Cristian's algorithm)."""
        round_trip_s = answered_at - asked_at
        return cls(their_time - (asked_at + round_trip_s / 2), round_trip_s)


def median_offset(samples: Iterable[OffsetSample]) -> float | None:
    """The median of the offsets, without those whose round trip was too long to tell."""
    offsets = [
        sample.offset_s
        for sample in samples
        if 0 <= sample.round_trip_s <= MAX_ROUND_TRIP_S and math.isfinite(sample.offset_s)
    ]
    return statistics.median(offsets) if offsets else None


def agreed_offset(told: Iterable[Iterable[OffsetSample]], before: float) -> float | None:
    """The median of what others say of the time, each in some samples; None where none tells.

    Of two that are too far apart one is wrong: then the nearer to the offset before counts, which
    is what the run has gone by, or, of one that joins, what this machine has.
    """
    found = [each for samples in told if (each := median_offset(samples)) is not None]
    if len(found) == 2 and abs(found[0] - found[1]) > MOST_APART_S:
        return min(found, key=lambda each: abs(each - before))
    return statistics.median(found) if found else None


class Clock(Protocol):
    """What all that controls a peer's rounds takes its time from; a simulation brings its own."""

    def time(self) -> float:
        """Run time: seconds since the epoch, alike on all peers."""
        ...

    def monotonic(self) -> float:
        """Seconds that never step back, for deadlines inside one process."""
        ...


class RunClock:
    """Run time in seconds since the epoch. Make it before any process is forked."""

    def __init__(self) -> None:
        self._start = time.time() - ticks()
        # Without a lock: a process that is killed while it holds one would stop all clocks.
        self._offset = multiprocessing.get_context("fork").RawValue("d", 0.0)
        self._measured_at = ticks()

    def time(self) -> float:
        """Run time now."""
        return self._start + ticks() + self._offset.value

    def monotonic(self) -> float:
        """Seconds that never step back and go on while the machine sleeps, as the swarm does."""
        return ticks()

    @property
    def offset(self) -> float:
        return self._offset.value

    def measured(self, offset: float) -> None:
        """Set the offset, as `agreed_offset` gave it for samples taken with `own_time`."""
        self._offset.value = offset
        self._measured_at = ticks()

    def measured_again(self, offset: float) -> None:
        """Move towards an offset, by a second a minute at most since it was measured last.

        No clock runs so wrong that more were due; a bootstrap that lies about the time would have
        peers miss each other's groups.
        """
        most = MOST_SLEW * (ticks() - self._measured_at)
        change = offset - self._offset.value
        self.measured(self._offset.value + max(-most, min(most, change)))

    def own_time(self) -> float:
        """This machine's clock without the offset: what offsets are measured from."""
        return self._start + ticks()

    def install(self) -> None:
        """Make hivemind use this clock, in this process and in those forked from it later."""
        import hivemind  # noqa: F401  # pyright: ignore

        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "hivemind" and hasattr(module, "get_dht_time"):
                setattr(module, "get_dht_time", self.time)  # noqa: B010


def _monotonic() -> Callable[[], float]:
    # A laptop that slept must not come back with a clock that stood still meanwhile.
    if hasattr(time, "CLOCK_BOOTTIME"):
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic


ticks = _monotonic()
