"""Where this process's unix sockets lie: one private folder, so that all of them can be removed at
once.

hivemind puts a socket for p2pd and one for every client of it into /tmp under random names,
readable by everybody, and leaves them there when a process is killed. Here its prefix points into a
folder of mode 0700 that the processes of one peer share; whoever of them is left in the end removes
it whole.
"""

import os
import shutil
import signal
import tempfile
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch
from hivemind.p2p import P2P  # pyright: ignore[reportMissingTypeStubs]

from dilocox.dht.errors import EnvironmentFault

# Linux takes 107 bytes; p2pclient-<11 characters>.sock must fit behind the folder's name.
MAX_FOLDER_LENGTH = 107 - 27
SHARED_MEMORY = Path("/dev/shm")
RETRY_S = 0.1

_HIVEMINDS_PREFIX = P2P._UNIX_SOCKET_PREFIX  # pyright: ignore[reportPrivateUsage]

_folder: Path | None = None
_users = 0
_owner_pid = 0


def acquire() -> Path:
    """The folder, made for the first user; P2P handles made later have their sockets there."""
    global _folder, _users, _owner_pid
    if _owner_pid != os.getpid():  # forked from a process that has a node of its own
        _folder, _users, _owner_pid = None, 0, os.getpid()
    if _folder is None:
        try:
            _folder = Path(tempfile.mkdtemp(prefix="dilocox-"))
        except OSError as error:
            raise EnvironmentFault(
                f"no folder for sockets can be made ({error.strerror}): set TMPDIR to a folder "
                "that this user can write to, in a container give --tmpfs /tmp"
            ) from error
        if len(str(_folder)) > MAX_FOLDER_LENGTH:
            long, _folder = _folder, None
            remove(long)
            raise EnvironmentFault(
                f"the path {long} is too long for sockets: set TMPDIR to a shorter path"
            )
        _point_hivemind_to(f"/unix{_folder}/")
        shared_memory_folder()
        start_shared_memory()
    _users += 1
    return _folder


def release() -> None:
    """Give the folder up; the last user removes it."""
    global _folder, _users
    _users -= 1
    if _users == 0 and _folder is not None:
        remove(_folder)
        _folder = None
        _point_hivemind_to(_HIVEMINDS_PREFIX)


def remove(folder: Path, patience_s: float = 0.0) -> None:
    """Remove the folder with what is in it; twice does no harm.

    Other children of a peer that was killed may still put a socket there while it is removed: then
    try again until `patience_s` is over.
    """
    deadline = time.monotonic() + patience_s
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() >= deadline:
            return
        time.sleep(RETRY_S)


def shared_memory_folder() -> Path:
    """Where multiprocessing has the socket over which torch passes shared memory.

    Asked for before a fork, so that the children know it too: they remove it where the main process
    ends without cleaning up.
    """
    return Path(get_temp_dir())


def start_shared_memory() -> None:
    """Start torch's manager of shared memory where no Ctrl-C can hit it.

    A Ctrl-C is for the whole process group. If it ended the manager while that starts, this process
    would wait for it for ever, within torch, where no signal is heard.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        torch.zeros(1).share_memory_()  # what is blocked here stays so in the manager
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_tensors(*pids: int) -> None:
    """Remove the shared memory that torch made for processes that have ended, or end now.

    torch's manager does so for what it heard of: who is killed between making a tensor and telling
    the manager leaves a file for ever.
    """
    for pid in pids:
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _point_hivemind_to(prefix: str) -> None:
    setattr(P2P, "_UNIX_SOCKET_PREFIX", prefix)  # noqa: B010
