"""A peer's whole state on disk, so that a killed peer goes on where it was.

A snapshot is a folder, complete once it has its final name:
    anchor.safetensors  anchor and outer momentum, equal on all peers; what joiners download
    anchor.json         its size, sha256 and the record it stands on
    local.safetensors   this peer's own: live weights, unsent and undecided progress, residual,
                        inner optimizer; what is no tensor (data position, ...) in its header
The newest folder that can be read counts; one that cannot is set aside under another name. Nothing
is pickled.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, sync

logger = logging.getLogger(__name__)

STATE_FILE = "anchor.safetensors"
STATE_FACTS_FILE = "anchor.json"
LOCAL_FILE = "local.safetensors"
HASH_CHUNK_BYTES = 1 << 20
DAMAGED = ".damaged"  # how the name of a folder ends that was set aside
REMEDY = "move the state folder away to join anew"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A peer's whole state. The tensors of one that was read lie in its files, which take their
    space on the disk as long as one of the tensors is there.

    number: of the folder that it was read from.
    """

    round: int  # of the last record applied, -1 if none was
    digest: str  # of that record
    layout: str
    anchor: Tensor  # [numel] fp32
    momentum: Tensor  # [numel] fp32
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    number: int = -1


def write_snapshot(folder: Path, snapshot: Snapshot, *, above: int = -1) -> Path:
    """Write the next snapshot, under a number over `above`, and remove those before it.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written; the old ones stay.
    """
    earlier = _complete(folder)
    final = folder / f"{1 + max([above, *(int(path.name) for path in earlier)]):08d}"
    for left in folder.glob("*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    with made_whole(final) as partial:
        write_state(partial, snapshot.round, snapshot.digest, snapshot.anchor, snapshot.momentum)
        facts = {"layout": snapshot.layout, "facts": snapshot.facts}
        _save(partial / LOCAL_FILE, snapshot.tensors, {"local": json.dumps(facts)})
    for old in earlier:
        shutil.rmtree(old, ignore_errors=True)
    return final


@contextmanager
def made_whole(final: Path) -> Generator[Path]:
    """A folder to fill, which gets its name once it is full; another one of that name goes.

    Raises EnvironmentFault if the disk is full or cannot be written. Whatever is raised in between,
    nothing is left of it.
    """
    partial = final.with_name(f"{final.name}.partial")
    try:
        for old in (partial, final):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for folder, _, _ in os.walk(partial, topdown=False):
            sync(Path(folder))
        partial.rename(final)
        sync(final.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise disk_fault(final.parent, _as_os_error(error)) from error
        raise


def oldest_number(folder: Path) -> int:
    """The number of the oldest complete snapshot, -1 where there is none."""
    return min((int(path.name) for path in _complete(folder)), default=-1)


def read_snapshot(folder: Path, *, layout: str) -> Snapshot | None:
    """The newest snapshot that can be read, None if there is none.

    One that is damaged is set aside, with a warning.

    Raises:
        EnvironmentFault: it is of another model, or a damaged one cannot be set aside.
    """
    for found in reversed(_complete(folder)):
        try:
            snapshot = _read(found)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            _set_aside(found, error)
            continue
        if snapshot.layout != layout:
            raise EnvironmentFault(f"{found}: the snapshot is of another model or stage; {REMEDY}")
        return snapshot
    return None


def _read(found: Path) -> Snapshot:
    facts = json.loads((found / STATE_FACTS_FILE).read_text())
    with safe_open(found / STATE_FILE, framework="pt") as file:
        anchor, momentum = file.get_tensor("anchor"), file.get_tensor("momentum")
    with safe_open(found / LOCAL_FILE, framework="pt") as file:
        local = json.loads(file.metadata()["local"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Snapshot(
        round=facts["round"],
        digest=facts["digest"],
        layout=local["layout"],
        anchor=anchor,
        momentum=momentum,
        tensors=tensors,
        facts=local["facts"],
        number=int(found.name),
    )


def _set_aside(found: Path, error: Exception) -> None:
    """Only the newest of them stays: nobody has planned the disk for more."""
    aside = found.with_name(found.name + DAMAGED)
    try:
        for older in found.parent.glob(f"*{DAMAGED}"):
            shutil.rmtree(older)
        found.rename(aside)
        sync(found.parent)
    except OSError as fault:
        raise disk_fault(found, fault, REMEDY) from fault
    logger.warning(
        "the snapshot %s is damaged (%s): it is now %s, which you may delete, and this peer takes "
        "what it can from an older one or from the others",
        found,
        error,
        aside.name,
    )


def newest(folder: Path) -> Path | None:
    complete = _complete(folder)
    return complete[-1] if complete else None


def write_state(
    folder: Path, round_number: int, digest: str, anchor: Tensor, momentum: Tensor
) -> None:
    """The part of a snapshot that joiners download, into a folder that is there."""
    path = folder / STATE_FILE
    _save(path, {"anchor": anchor, "momentum": momentum}, {})
    write_facts(folder, round_number, digest, sha256_of_file(path))


def write_facts(folder: Path, round_number: int, digest: str, sha256: str) -> None:
    """Write beside a state's file what is said of it."""
    size = (folder / STATE_FILE).stat().st_size
    facts = {"round": round_number, "digest": digest, "size": size, "sha256": sha256}
    (folder / STATE_FACTS_FILE).write_text(json.dumps(facts))
    sync(folder / STATE_FACTS_FILE)


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(dict(tensors), path, metadata=metadata)
    sync(path)


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def _as_os_error(error: Exception) -> OSError:
    """safetensors reports a full disk as its own error, with the system's text in it."""
    if isinstance(error, OSError):
        return error
    full = "No space left" in str(error) or "os error 28" in str(error)
    return OSError(errno.ENOSPC if full else errno.EIO, str(error))
