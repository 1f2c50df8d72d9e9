"""Simulated time: one queue of events for the whole swarm, and each thread's clock on it.

Nothing waits. A call that would block a thread of the product adds what it takes to that thread's
clock; whoever runs the thread lets it go on only after that time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

START = 1_700_000_000.0  # run time is seconds since the epoch


class Scheduled:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], None]):
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Timeline:
    """What happens, in the order of its time; `now` is run time in seconds."""

    def __init__(self) -> None:
        self.now = START
        self.happened = 0
        self._queue: list[tuple[float, int, Scheduled]] = []
        self._number = 0

    def at(self, when: float, action: Callable[[], None]) -> Scheduled:
        """Let something happen at a time, or now if that is past."""
        event = Scheduled(max(when, self.now), action)
        self._number += 1
        heapq.heappush(self._queue, (event.at, self._number, event))
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Scheduled:
        """Let something happen in so many seconds."""
        return self.at(self.now + seconds, action)

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by then."""
        queue = self._queue
        while queue and queue[0][0] <= end:
            when, _, event = heapq.heappop(queue)
            action = event.action
            if action is not None:
                self.now = when
                event.action = None
                self.happened += 1
                action()
        self.now = max(self.now, end)


class ThreadClock:
    """The clock that one peer's threads see; blocking calls of the one that runs move it ahead."""

    def __init__(self, timeline: Timeline, error_s: Callable[[], float]):
        """error_s: how far the peer's run time is ahead, by now."""
        self._timeline = timeline
        self._error_s = error_s
        self.spent = 0.0

    def time(self) -> float:
        """Run time, as this peer has it."""
        return self.monotonic() + self._error_s()

    def monotonic(self) -> float:
        """Where the timeline is for the thread."""
        return self._timeline.now + self.spent

    def spend(self, seconds: float) -> None:
        """The thread that runs now blocks for so long."""
        self.spent += seconds


class SimulatedFuture:
    """A result that is there at its time; `watch` is called then."""

    def __init__(self) -> None:
        self._done = False
        self._result: Any = None
        self._error: Exception | None = None
        self._watch: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether the result is there."""
        return self._done

    def set(self, result: Any = None, error: Exception | None = None) -> None:
        """The result, or what went wrong; only the first one counts."""
        if self._done:
            return
        self._done, self._result, self._error = True, result, error
        for watch in self._watch:
            watch()

    def result(self, timeout: float | None = None) -> Any:
        """The result, as concurrent.futures has it."""
        if not self._done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What went wrong, None if nothing."""
        return self._error

    def watch(self, action: Callable[[], None]) -> None:
        """Call this when it is done."""
        if self._done:
            action()
        else:
            self._watch.append(action)


class Threads:
    """A peer's threads: the one that runs now, and its workers for calls that block.

    A worker's call is made when it is submitted, on the worker's own clock, and its result is there
    when that clock says: what it read is as old as the call is long.
    """

    def __init__(self, timeline: Timeline, error_s: Callable[[], float]):
        self._timeline = timeline
        self.error_s = error_s
        self.control = ThreadClock(timeline, error_s)
        self.running = self.control

    def time(self) -> float:
        """Run time, as the thread that runs sees it."""
        return self.running.time()

    def monotonic(self) -> float:
        """Likewise, on the timeline."""
        return self.running.monotonic()

    def worker(self, done: Callable[[], None]) -> SimulatedWorker:
        """A thread for calls. done: to be told of every result."""
        return SimulatedWorker(self, self._timeline, done)


class SimulatedWorker:
    """One thread that makes one call after the other."""

    def __init__(self, threads: Threads, timeline: Timeline, done: Callable[[], None]):
        self._threads = threads
        self._timeline = timeline
        self._done = done
        self._free_at = 0.0

    def submit(self, call: Callable[[], Any]) -> SimulatedFuture:
        """Do this after all that was submitted before."""
        threads, timeline = self._threads, self._timeline
        before, own = threads.running, ThreadClock(timeline, threads.error_s)
        own.spent = max(before.monotonic(), self._free_at) - timeline.now
        threads.running = own
        future = SimulatedFuture()
        future.watch(self._done)
        result: Any = None
        failed: Exception | None = None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - whoever asked gets it
            failed = error
        finally:
            threads.running = before
        self._free_at = own.monotonic()
        timeline.at(self._free_at, lambda: future.set(result, failed))
        return future
