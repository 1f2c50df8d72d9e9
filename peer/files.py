"""Writing files so that a crash or a full disk never leaves half of one behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault


def write_atomically(path: Path, data: bytes) -> None:
    """Write, flush to the disk, then rename into place.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_fault(path, error) from error


def disk_fault(path: Path, error: OSError) -> EnvironmentFault:
    """The error that tells a person what to do when a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(
            f"{path}: no space left on the disk; free some, or choose another folder with --state"
        )
    return EnvironmentFault(f"{path}: cannot be written: {error.strerror or error}")
