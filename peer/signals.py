"""SIGINT and SIGTERM mean: leave. The first one asks, the second one ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class StopSignal:
    """A context in which the two signals set `event`; what was before is put back at its end."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.event = threading.Event()
        self._before = {number: signal.getsignal(number) for number in self.SIGNALS}

    def install(self) -> None:
        """Install the handlers (again: hivemind's averager sets SIGINT to be ignored)."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)

    def __enter__(self) -> StopSignal:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            os._exit(128 + number)  # the children watch this process and end with it
        self.event.set()
