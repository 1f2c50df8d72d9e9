"""Writing files so that a crash or a full disk never leaves half of one behind."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write, flush to the disk (if `durable`), then rename into place.

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
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_fault(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it; EnvironmentFault if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_fault(path, error) from error


def disk_fault(path: Path, error: OSError) -> EnvironmentFault:
    """The error that tells a person what to do when a file could not be written."""
    if error.errno in DISK_FULL:
        return EnvironmentFault(
            f"{path}: no space left on the disk; free some, or choose a folder on another disk"
        )
    return EnvironmentFault(f"{path}: cannot be written: {error.strerror or error}")
