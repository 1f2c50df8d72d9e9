"""Gathers what `dilocox doctor` must know of this machine, without a network.

Nothing is written: a doctor leaves no trace in a state folder.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import os
import re
import shutil
from pathlib import Path

from dilocox.dht.errors import DilocoxError
from dilocox.dht.identity import Identity
from dilocox.peer.doctor_checks import FolderFacts, Library
from dilocox.peer.state_folder import StateFolder

# Those whose version matters or whose import can fail on a machine; the others come with them.
LIBRARIES = ("torch", "hivemind", "transformers", "datasets", "safetensors")

PAUSED = "paused"  # what `dilocox pause` leaves there

_REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)((?:[<>=!~]=?.*)?)")


def libraries() -> list[Library]:
    """The versions that are here, those that are needed, and whether they can be loaded."""
    needed = _needed()
    return [_library(name, needed.get(name, "")) for name in LIBRARIES]


def _needed() -> dict[str, str]:
    """What this program's own package asks for; nothing where it was not installed as one."""
    try:
        lines = importlib.metadata.requires("dilocox") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.fullmatch(line) for line in lines if ";" not in line)
    return {match[1]: match[2].replace(" ", "") for match in found if match is not None}


def _library(name: str, needed: str) -> Library:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Library(name=name, version="", needed=needed)
    why = ""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken library raises what it likes
        why = (str(error) or type(error).__name__).splitlines()[0]
    return Library(name=name, version=version, needed=needed, fault=why)


def folder_facts(path: Path) -> FolderFacts:
    """A state folder as a peer would find it."""
    folder = StateFolder(path)
    peer_id, key_fault = "", None
    if folder.identity.exists():
        try:
            peer_id = Identity.load_or_create(folder.identity).peer_id
        except DilocoxError as error:
            key_fault = error
    return FolderFacts(
        path=str(path),
        writable=os.access(nearest(path), os.W_OK | os.X_OK),
        in_use=_locked(path / "lock"),
        paused=(path / PAUSED).exists(),
        peer_id=peer_id,
        key_fault=key_fault,
    )


def _locked(file: Path) -> bool:
    """Whether a running peer holds this lock."""
    try:
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def nearest(path: Path) -> Path:
    """The path itself, or the folder nearest to it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk_free(path: Path) -> int:
    """Bytes that a state folder may still take."""
    return shutil.disk_usage(nearest(path)).free
