"""What the DHT child does as a process: leave the terminal, watch its parent, clean up."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import RLock
from pathlib import Path
from typing import Any

WATCH_PERIOD_S = 0.5
SEND_LIMIT_S = 10.0


def leave_the_terminal() -> None:
    """Ctrl-C and a service manager's SIGTERM are for the main process, which ends us in order.

    A session of its own keeps p2pd, which is started later, from the terminal's signals as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def watch_parent(parent: int, end: Callable[[], None]) -> None:
    """Call `end` as soon as the process that forked us is gone, even by SIGKILL."""
    while os.getppid() == parent:
        time.sleep(WATCH_PERIOD_S)
    end()


def kill_daemon(pid: int) -> None:
    """Kill the p2pd with this process id, if it still is one."""
    with contextlib.suppress(OSError):
        if pid and Path(f"/proc/{pid}/comm").read_text().strip() == "p2pd":
            os.kill(pid, signal.SIGKILL)


class SharedPipe:
    """The end of the request pipe into which several processes of a peer write, one at a time.

    A message over 16 KB goes in pieces, between which another process put its own.
    """

    def __init__(self, pipe: "Connection[Any, Any]", lock: RLock):
        self._pipe, self._lock = pipe, lock
        self.fileno = pipe.fileno
        self.close = pipe.close

    def send(self, message: object) -> None:
        """Send one message whole; raises `OSError` if others hold the pipe for too long."""
        if not self._lock.acquire(timeout=SEND_LIMIT_S):
            raise OSError("the request pipe is held by another process")
        try:
            self._pipe.send(message)
        finally:
            self._lock.release()


class BlockingPipe:
    """The child's end of the request pipe, read to the end of a message.

    uvloop makes the pipe non-blocking when it watches it; a message that does not arrive in one
    piece (over 16 KB they never do) then failed in the middle and took hivemind's node with it.
    """

    def __init__(self, pipe: "Connection[Any, Any]"):
        self._pipe = pipe
        self.fileno = pipe.fileno
        self.poll = pipe.poll

    def recv(self) -> Any:
        """Receive one message, waiting for all of it."""
        os.set_blocking(self._pipe.fileno(), True)
        return self._pipe.recv()
