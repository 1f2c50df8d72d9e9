"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TestClock:
    """Run time and monotonic time are the same number, which only the test moves."""

    __test__ = False
    now: float = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now
