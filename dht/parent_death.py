"""Programs that do not outlive their parent, however that ended: p2pd, and commands of ours.

Apart from node_process.py, which needs hivemind: a parent of commands may have no use for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)  # looked up before a fork: a child of a process with threads may not


def dying_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For `preexec_fn` of a program that this process starts: the kernel sends it `number` when the
    thread that starts it is gone. A program whose parent is gone by then ends at once.
    """
    parent = os.getpid()

    def be_told() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it was too late to be told
            os._exit(1)

    return be_told
