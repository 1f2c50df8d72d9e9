"""What the DHT child does as a process: it leaves the terminal, watches its parent, cleans up.

Its unix sockets lie in one private folder, so that all of them can be removed at once. hivemind
puts a socket for p2pd and one for every client of it into /tmp under random names, readable by
everybody, and leaves them there when a process is killed. Here its prefix points into a folder of
mode 0700 that the processes of one peer share; the last of them to end removes it whole. Where none
was left to do so, the next start of a peer or bootstrap on this machine does: each holds a lock on
its folders that ends with the last of its processes. Memory that they share has no name at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import RLock
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import P2P

from dilocox.dht.errors import EnvironmentFault

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


def freeze_for_fork() -> None:
    """Have the garbage collector never look again at what there is, before a process is forked.

    A look at all writes into every object: after one the two share no memory any more, 120 MB of a
    bootstrap's. And there is one only once there is a quarter more of them than at the last one.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # by which it knows how little is left


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

    def __init__(self, pipe: Connection[Any, Any], lock: RLock):
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

    def __init__(self, pipe: Connection[Any, Any]):
        self._pipe = pipe
        self.fileno = pipe.fileno
        self.poll = pipe.poll

    def recv(self) -> Any:
        os.set_blocking(self._pipe.fileno(), True)
        return self._pipe.recv()


# Linux takes 107 bytes; p2pclient-<11 characters>.sock must fit behind the folder's name.
MAX_FOLDER_LENGTH = 107 - 27
RETRY_S = 0.1

# hivemind has torch name its shared memory in /dev/shm, where it stays if all that use it are
# killed, and which takes a process more to tidy up. Here processes pass it on as open files.
torch.multiprocessing.set_sharing_strategy("file_descriptor")  # pyright: ignore[reportUnknownMemberType]

_HIVEMINDS_PREFIX = P2P._UNIX_SOCKET_PREFIX  # pyright: ignore[reportPrivateUsage]

LOCK = "dilocox.lock"  # in a folder, held by the processes that use it

_folder: Path | None = None
_users = 0
_owner_pid = 0
_locks: dict[Path, int] = {}  # descriptors, which forked processes share


def acquire() -> Path:
    """The folder, made for the first user; P2P handles made later have their sockets there."""
    global _folder, _users, _owner_pid
    if _owner_pid != os.getpid():  # forked from a process that has a node of its own
        _folder, _users, _owner_pid = None, 0, os.getpid()
    if _folder is None:
        _remove_what_nobody_uses()
        try:
            _folder = Path(tempfile.mkdtemp(prefix="dilocox-"))
            _lock(_folder)
            _lock(shared_memory_folder())
        except OSError as error:
            raise EnvironmentFault(
                f"no folder for sockets can be made ({error.strerror}): set TMPDIR to a folder "
                "that this user can write to, in a container give --tmpfs /tmp"
            ) from error
        if len(str(_folder)) > MAX_FOLDER_LENGTH:
            long, _folder = _folder, None
            _give_up(long)
            raise EnvironmentFault(
                f"the path {long} is too long for sockets: set TMPDIR to a shorter path"
            )
        _point_hivemind_to(f"/unix{_folder}/")
    _users += 1
    return _folder


def release() -> None:
    """Give the folder up; the last user removes it."""
    global _folder, _users
    _users -= 1
    if _users == 0 and _folder is not None:
        _give_up(_folder)
        _folder = None
        _point_hivemind_to(_HIVEMINDS_PREFIX)


def _lock(folder: Path) -> None:
    """Hold the folder for this process and those that it forks; once is enough."""
    if folder not in _locks:
        new = folder / f"{LOCK}.new"
        _locks[folder] = descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(folder / LOCK)  # seen by others only once it is held


def _give_up(folder: Path) -> None:
    remove(folder)
    os.close(_locks.pop(folder))


def _remove_what_nobody_uses() -> None:
    """Folders of processes that were killed before they had forked one that tidies up."""
    for pattern in ("dilocox-*", "pymp-*"):
        for lock in Path(tempfile.gettempdir()).glob(f"{pattern}/{LOCK}"):
            with contextlib.suppress(OSError):  # held, another user's, or just gone
                descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(lock.parent)
                finally:
                    os.close(descriptor)


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
    """Where multiprocessing has the socket over which processes pass files to each other.

    Asked for before a fork, so that the children know it too: they remove it where the main process
    ends without cleaning up.
    """
    return Path(get_temp_dir())


def _point_hivemind_to(prefix: str) -> None:
    setattr(P2P, "_UNIX_SOCKET_PREFIX", prefix)  # noqa: B010


def shared_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector of zeros that processes forked after this share.

    In anonymous memory, which is gone with the last of them however they end, and which the size of
    /dev/shm does not limit: torch's own has a name there, that stays after a SIGKILL of all.
    """
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)
