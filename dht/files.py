"""Writing files so that a crash or a full disk never leaves half of one behind."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_KNOWN = 10_000


class KnownFiles:
    """Files that this process has found to be what they are said to be, as long as nobody writes
    them: to hash all of a large state again takes minutes. Any thread may ask.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int, int, int]] = set()

    def see(self, *paths: Path, look: Callable[[], object] = lambda: None) -> None:
        """Look at all of these, unless they are known as they are now; they are known then.

        look: raises what it likes where one is not what it should be; by default they were just
        written. OSError where one is not there.
        """
        found = [path.stat() for path in paths]
        now = {(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found}
        if now <= self._known:
            return
        look()
        self._known = now if len(self._known) > MOST_KNOWN else self._known | now


known_files = KnownFiles()


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write, flush to the disk (if `durable`, file and name), then rename into place.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_fault(path, error) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (OSError if that fails)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; EnvironmentFault if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_fault(path, error) from error


def bytes_below(folder: Path) -> int:
    """What the files of a folder hold together, each once whatever names it has; those that vanish
    meanwhile do not count.
    """
    found: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):  # which passes over folders that vanish
        for name in names:
            with contextlib.suppress(OSError):
                stat = Path(place, name).stat()
                found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def no_temporary_folder() -> EnvironmentFault | None:
    """The error where nothing can be written to any folder for temporary files; libraries look for
    one when they are imported.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        return EnvironmentFault(
            "no folder for temporary files can be written: free some space or set TMPDIR, in a "
            "container give --tmpfs /tmp"
        )
    return None


def system_fault(error: OSError) -> EnvironmentFault | None:
    """What an error of the system that nobody expected means for a person; None: it is a bug."""
    if error.errno in DISK_FULL:
        return disk_fault(Path(error.filename or "."), error)
    return no_temporary_folder() if isinstance(error, FileNotFoundError) else None


def disk_fault(path: Path, error: OSError, remedy: str = "") -> EnvironmentFault:
    """The error that tells a person what to do when a file could not be written; `remedy`: where it
    is not the disk that is full.
    """
    if error.errno in DISK_FULL:
        return EnvironmentFault(
            f"{path}: no space left on the disk; free some, or choose a folder on another disk"
        )
    more = f"; {remedy}" if remedy else ""
    return EnvironmentFault(f"{path}: cannot be written: {error.strerror or error}{more}")
