"""Buffers of tokens that a thread of its own makes ahead of need; apart from data.py, which says
what is in them."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_EXIT_LIMIT_S = 5.0  # a buffer takes about one
_BUFFERS_AHEAD = 2  # a slow disk or hub is made up for by so much


@dataclass(frozen=True)
class TokenBuffer:
    """Windows of a part, and the place in it that they are of."""

    windows: npt.NDArray[np.int32]  # [n, sequence_length + 1], shuffled
    epoch: int
    start: dict[str, Any]  # where in the files it began


class ReadAhead:
    """Computes the items of an iterator in a thread of its own, a few before they are asked for.

    What the iterator raises is raised by `next` in its place, after the items before it.
    """

    def __init__(self, items: Iterator[TokenBuffer | None]):
        """items: None now and then where one takes long, to be asked whether to end."""
        self._queue: queue.Queue[TokenBuffer | BaseException] = queue.Queue(_BUFFERS_AHEAD)
        self._stopped = threading.Event()
        # a daemon: a peer that leaves must not wait for long for a hub that gives no answer
        self._thread = threading.Thread(
            target=self._read, args=(items,), name="read-ahead", daemon=True
        )
        self._thread.start()
        atexit.register(self._end)

    @property
    def ready(self) -> bool:
        """Whether `next` returns at once."""
        return not self._queue.empty()

    def has(self, windows: int) -> bool:
        """Whether so many are here, or as many as are read ahead, or nothing else will come."""
        with self._queue.mutex:
            items = list(self._queue.queue)
        counts = [len(item.windows) for item in items if isinstance(item, TokenBuffer)]
        return len(items) == _BUFFERS_AHEAD or len(counts) < len(items) or sum(counts) >= windows

    def next(self) -> TokenBuffer:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # nothing else will come
            raise item
        return item

    def stop(self) -> None:
        """Let the thread end after the item that it is at."""
        self._stopped.set()
        self._drop()

    def _drop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _end(self) -> None:
        """At the program's end: an interpreter that goes away under a thread in a library's C++
        ends with an abort, and what was printed is lost."""
        self.stop()
        self._thread.join(_EXIT_LIMIT_S)

    def _read(self, items: Iterator[TokenBuffer | None]) -> None:
        try:
            for item in items:
                if self._stopped.is_set():
                    break
                if item is not None:
                    self._queue.put(item)
        except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer, too: for the caller
            self._queue.put(error)
        if self._stopped.is_set():
            self._drop()  # the item that it waited with: a corpus knows all of these until it ends
        atexit.unregister(self._end)
