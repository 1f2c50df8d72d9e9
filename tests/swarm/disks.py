"""Disks of a chosen size, in memory, that can be filled to the last byte. They need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_LIMIT_S = 20.0
_PIECES = (1 << 20, 4096)


@cache
def available() -> str:
    """Why there can be no small disk on this machine; empty if there can."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "a small disk needs root and mount"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder, "disk"), 1 << 20):
                return ""
        except subprocess.CalledProcessError as error:
            return f"no small disk can be mounted: {error.stderr.strip()}"


@contextmanager
def small_disk(folder: Path, size: int) -> Generator[Path]:
    """A disk of so many bytes at a folder that it makes; whoever uses x."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def fill(disk: Path) -> Path:
    """Leave no byte of it free; the file that took them."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in _PIECES:
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass
    return filler


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
