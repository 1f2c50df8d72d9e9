"""Where this process's unix sockets lie: one private folder, so that all of them can be removed at
once.

hivemind puts a socket for p2pd and one for every client of it into /tmp under random names,
readable by everybody, and leaves them there when a process is killed. Here its prefix points into a
folder of mode 0700 that the processes of one peer share; whoever of them is left in the end removes
it whole.
"""

import os
import shutil
import tempfile
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch
from hivemind.p2p import P2P  # pyright: ignore[reportMissingTypeStubs]

from dilocox.dht.errors import EnvironmentFault

# Linux takes 107 bytes; p2pclient-<11 characters>.sock must fit behind the folder's name.
MAX_FOLDER_LENGTH = 107 - 27
RETRY_S = 0.1

# hivemind has torch name its shared memory in /dev/shm, where it stays if all that use it are
# killed, and which takes a process more to tidy up. Here processes pass it on as open files.
torch.multiprocessing.set_sharing_strategy("file_descriptor")  # pyright: ignore[reportUnknownMemberType]

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
    """Where multiprocessing has the socket over which processes pass files to each other.

    Asked for before a fork, so that the children know it too: they remove it where the main process
    ends without cleaning up.
    """
    return Path(get_temp_dir())


def _point_hivemind_to(prefix: str) -> None:
    setattr(P2P, "_UNIX_SOCKET_PREFIX", prefix)  # noqa: B010
