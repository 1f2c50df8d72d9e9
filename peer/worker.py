"""A thread that does one call after the other, for a control thread that must not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class Pending(Protocol):
    """The answer to a call, once it is there."""

    def done(self) -> bool:
        """Whether it is."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """What the call returned, or raises what it raised."""
        ...


class Worker(Protocol):
    """Who does the calls; a simulation brings its own."""

    def submit(self, call: Callable[[], Any]) -> Pending:
        """Do this after all that was submitted before."""
        ...


class WorkerThread:
    """One daemon thread: a call that hangs does not keep the process from its end."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Do this after all that was submitted before."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - whoever asked gets it
                future.set_exception(error)
