"""Programs that do not outlive their parent, however that ended: p2pd, and commands of ours.

Apart from node_process.py, which needs hivemind: a parent of commands may have no use for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)  # looked up before a fork: a child of a process with threads may not


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when the thread of its parent that started it is
    gone, and end at once if that is so: for a pool's `initializer`, with the parent's process id.
    """
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it was too late to be told
        os._exit(1)


def dying_with_parent(number: signal.Signals) -> Callable[[], None]:
    """`die_with` for `preexec_fn` of a program that this process starts."""
    return partial(die_with, os.getpid(), number)
