"""SIGINT and SIGTERM mean: leave. The first one asks, the second one ends at once.

While a command starts, asking means to raise `StopRequested`: whatever waits for the network is
left at once, and all that is open is closed on the way out. From `defer` on it only sets `event`,
for the loop that has something to finish first.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class StopRequested(BaseException):
    """A signal came while there was nothing to finish."""


class StopSignal:
    """A context in which the two signals ask to leave. It ends quietly by a `StopRequested`, and
    what was to happen on the signals before is put back.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.event = threading.Event()
        self.asked = False  # by a signal
        self._raises = True
        self._before = {number: signal.getsignal(number) for number in self.SIGNALS}

    def install(self) -> None:
        """Install the handlers (again: hivemind's averager sets SIGINT to be ignored)."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on a signal only sets `event`."""
        self._raises = False

    def leave(self) -> None:
        """Set `event` without a signal: a first one may still come, and is no second one."""
        self.event.set()

    def resume(self) -> None:
        """From now on a signal raises again, and one that came meanwhile does so now."""
        self._raises = True
        if self.event.is_set():
            raise StopRequested

    def __enter__(self) -> StopSignal:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return kind is StopRequested

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)  # the children watch this process and end with it
        self.asked = True
        self.event.set()
        if self._raises:
            raise StopRequested


def hold_back() -> None:
    """For a process that becomes another one: signals wait for its `leave_at_once`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, StopSignal.SIGNALS)


def leave_at_once() -> None:
    """For the seconds of imports before a command has started anything: just end."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(0)

    for number in StopSignal.SIGNALS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopSignal.SIGNALS)
