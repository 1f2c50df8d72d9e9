"""A peer's whole state on disk, so that a killed peer goes on where it was.

A snapshot is a folder, complete once it has its final name:
    anchor.safetensors  anchor and outer momentum, equal on all peers; what joiners download
    anchor.json         its size, sha256 and the record it stands on
    anchor.chunks       the sha256 of each of its chunks, 32 bytes each; the file's own is theirs
    local.safetensors   this peer's own: live weights, unsent and undecided progress, residual,
                        inner optimizer; what is no tensor (data position, ...) in its header
    digests.json        the sha256 of the chunks' digests of each of the others
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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, known_files, sync
from dilocox.dht.rpc import CallRefused

logger = logging.getLogger(__name__)

STATE_FILE = "anchor.safetensors"
STATE_FACTS_FILE = "anchor.json"
CHUNKS_FILE = "anchor.chunks"
LOCAL_FILE = "local.safetensors"
DIGESTS_FILE = "digests.json"
STATE_CHUNK_BYTES = 1 << 20
SYNC_BYTES = 1 << 28
PIECE_VALUES = 1 << 20  # of a vector, that are in memory at once
DAMAGED = ".damaged"  # how the name of a folder ends that was set aside
_KINDS: Final = {  # of tensors, as safetensors calls them
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
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


Pieces = Callable[[Tensor], Iterable[Tensor]]  # the values of a tensor, flat, in order, on the CPU


def write_snapshot(
    folder: Path, snapshot: Snapshot, *, number: int | None = None, pieces: Pieces | None = None
) -> Path:
    """Write the next snapshot, under this number or the next one, and remove those before it.

    pieces: where the values come from; the tensors themselves say nothing but shapes then. They are
    asked for in the order of `tensors_of`.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written; the old ones stay.
    """
    earlier = _complete(folder)
    final = folder / f"{newest_number(folder) + 1 if number is None else number:08d}"
    facts = {"layout": snapshot.layout, "facts": snapshot.facts}
    with made_whole(final) as partial:
        vectors = snapshot.anchor, snapshot.momentum
        write_state(partial, snapshot.round, snapshot.digest, *vectors, pieces=pieces)
        local = save_tensors(
            partial / LOCAL_FILE, snapshot.tensors, {"local": json.dumps(facts)}, pieces=pieces
        )
        _write_digests(partial, local)
    for old in earlier:
        shutil.rmtree(old, ignore_errors=True)
    return final


def tensors_of(snapshot: Snapshot) -> list[Tensor]:
    """All tensors of a snapshot, in the order in which they are written."""
    return [snapshot.anchor, snapshot.momentum, *snapshot.tensors.values()]


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


@contextmanager
def on_disk(path: Path) -> Generator[None]:
    """Whatever the disk refuses in here is an EnvironmentFault about this path."""
    try:
        yield
    except OSError as error:
        raise disk_fault(path, error) from error


def oldest_number(folder: Path) -> int:
    """The number of the oldest complete snapshot, -1 where there is none."""
    return min((int(path.name) for path in _complete(folder)), default=-1)


def newest_number(folder: Path) -> int:
    """The number of the newest complete snapshot, -1 where there is none."""
    return max((int(path.name) for path in _complete(folder)), default=-1)


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


def data_position(folders: Sequence[Path]) -> dict[str, Any]:
    """The data position of the newest snapshot in the last of these folders that has one: of that
    alone, nothing else is read. Empty where there is none.
    """
    for folder in reversed(folders):
        for found in reversed(_complete(folder)):
            try:
                with safe_open(found / LOCAL_FILE, framework="pt") as file:
                    return json.loads(file.metadata()["local"])["facts"]["data"]
            except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
                logger.info("%s: no data position: %s", found, error)
    return {}


def keep_position_alone(folder: Path) -> None:
    """Of a folder of snapshots that nobody goes on from keep what `data_position` reads: their
    tensors are as large as those of the next ones. EnvironmentFault if the disk does not let it.
    """
    position = data_position([folder])
    with on_disk(folder):
        for found in (*folder.glob("*.partial"), *folder.glob(f"*{DAMAGED}")):
            shutil.rmtree(found)
        left = _complete(folder)
        for found in left:  # first, so that a full disk has the room for what is written
            (found / STATE_FILE).unlink(missing_ok=True)
        if position:
            facts = {"local": json.dumps({"facts": {"data": position}})}
            with made_whole(folder / f"{newest_number(folder) + 1:08d}") as partial:
                save_tensors(partial / LOCAL_FILE, {}, facts)
        for found in left:
            shutil.rmtree(found)


def _write_digests(folder: Path, local: bytes) -> None:
    """local: the digests of the chunks of the local file; the state's are in its own."""
    facts = json.loads((folder / STATE_FACTS_FILE).read_text())
    digests = {STATE_FILE: facts["sha256"], LOCAL_FILE: hashlib.sha256(local).hexdigest()}
    digests |= {name: state_sha256(folder / name) for name in (STATE_FACTS_FILE, CHUNKS_FILE)}
    (folder / DIGESTS_FILE).write_text(json.dumps(digests))
    sync(folder / DIGESTS_FILE)


def _check_digests(folder: Path) -> None:
    """Raise ValueError that names a file of which a byte is another one than was written."""
    digests = json.loads((folder / DIGESTS_FILE).read_text())
    for name in (STATE_FACTS_FILE, CHUNKS_FILE, STATE_FILE, LOCAL_FILE):
        if state_sha256(folder / name) != digests[name]:
            raise ValueError(f"{name} is not what was written")


def _read(found: Path) -> Snapshot:
    _check_digests(found)
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


def earlier_than_newest(folder: Path) -> list[Path]:
    """The complete snapshots that a newer one was to replace: a crash came in between."""
    return _complete(folder)[:-1]


def write_state(
    folder: Path,
    round_number: int,
    digest: str,
    anchor: Tensor,
    momentum: Tensor,
    *,
    pieces: Pieces | None = None,
) -> None:
    """The part of a snapshot that joiners download, into a folder that is there."""
    vectors = {"anchor": anchor, "momentum": momentum}
    chunks = save_tensors(folder / STATE_FILE, vectors, {}, pieces=pieces)
    write_facts(folder, round_number, digest, chunks)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    pieces: Pieces | None = None,
) -> bytes:
    """Write a safetensors file of these tensors, the same bytes for the same values; the digests of
    its chunks, as `chunk_digests` would read them.

    All goes out piece by piece: safetensors' own writer takes a copy of each tensor in memory.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.numel() * values.element_size()
        shape, kind = list(values.shape), _KINDS[values.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        hashed = _Hashed(file)
        hashed.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            for piece in (pieces or pieces_of)(values):
                hashed.write(bytes_of(piece))
    sync(path)
    return hashed.digests


def pieces_of(values: Tensor) -> Iterable[Tensor]:
    """The values of a tensor in pieces, each brought to the CPU as it is asked for."""
    return (piece.cpu() for piece in split(values))


def split(values: Tensor) -> tuple[Tensor, ...]:
    """The pieces where they are."""
    return values.detach().reshape(-1).split(PIECE_VALUES)


class _Hashed:
    """A file that is written front to back, and its chunks hashed meanwhile. What was written goes
    to the disk now and then: all of it at the end would take minutes, and nobody can end that.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._unsynced = 0
        self._whole = bytearray()
        self._chunk, self._room = hashlib.sha256(), STATE_CHUNK_BYTES

    def write(self, data: Any) -> None:
        self._unsynced += self._file.write(data)
        if self._unsynced >= SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced = 0
        left = memoryview(data).cast("B")
        while left:
            part, left = left[: self._room], left[self._room :]
            self._chunk.update(part)
            self._room -= len(part)
            if not self._room:
                self._whole += self._chunk.digest()
                self._chunk, self._room = hashlib.sha256(), STATE_CHUNK_BYTES

    @property
    def digests(self) -> bytes:
        """The sha256 of each chunk so far, the last of which may be shorter."""
        begun = self._room < STATE_CHUNK_BYTES
        return bytes(self._whole) + (self._chunk.digest() if begun else b"")


def bytes_of(values: Tensor) -> Any:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return values.detach().contiguous().view(torch.uint8).numpy().data


def write_facts(folder: Path, round_number: int, digest: str, chunks: bytes) -> None:
    """Write beside a state's file what is said of it; chunks: their digests."""
    file = folder / STATE_FILE
    facts = {"round": round_number, "digest": digest, "size": file.stat().st_size}
    facts["sha256"] = hashlib.sha256(chunks).hexdigest()
    (folder / STATE_FACTS_FILE).write_text(json.dumps(facts))
    (folder / CHUNKS_FILE).write_bytes(chunks)
    for written in (STATE_FACTS_FILE, CHUNKS_FILE):
        sync(folder / written)


def check_state(folder: Path) -> None:
    """Raise ValueError where a state and what is said of it (a map) do not fit; OSError.

    Reads all of it, but where this process did so and nobody has written it since.
    """
    file, said, chunks = files = state_files(folder)

    def look() -> None:
        facts, digests = json.loads(said.read_text()), chunk_digests(file)
        found = file.stat().st_size, hashlib.sha256(digests).hexdigest(), digests
        if (facts.get("size"), facts.get("sha256"), chunks.read_bytes()) != found:
            raise ValueError(f"{STATE_FILE} is not what {STATE_FACTS_FILE} and {CHUNKS_FILE} say")

    known_files.see(*files, look=look)


def state_files(folder: Path) -> tuple[Path, Path, Path]:
    """A state's file, and the two that say what it is."""
    return folder / STATE_FILE, folder / STATE_FACTS_FILE, folder / CHUNKS_FILE


def state_sha256(path: Path) -> str:
    """What names a state's file: the sha256 of its chunks' digests, in hex."""
    return hashlib.sha256(chunk_digests(path)).hexdigest()


def chunk_digests(path: Path) -> bytes:
    """The sha256 of each MiB of a file, 32 bytes each."""
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(STATE_CHUNK_BYTES), b"")
        return b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)


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


# ---- states of others ----------------------------------------------------------------------------
def check_values(path: Path, numel: int) -> None:
    """Refuse (CallRefused) a file that is not an anchor and a momentum of finite fp32 values."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in ("anchor", "momentum")]
            for piece in slices:
                if piece.get_shape() != [numel] or piece.get_dtype() != "F32":
                    raise CallRefused(f"a state has {piece.get_shape()} values, not [{numel}]")
            for piece in slices:
                for low in range(0, numel, PIECE_VALUES):
                    if not bool(piece[low : low + PIECE_VALUES].isfinite().all()):
                        raise CallRefused("the state holds values that are not finite")
    except SafetensorError as error:
        raise CallRefused(f"the state is no safetensors file: {error}") from error


def is_initial(path: Path, pinned: str) -> bool:
    """Whether a state's anchor has this sha256, and nothing has moved it: its momentum is zero."""
    found, moved = hashlib.sha256(), False
    with cast(Any, safe_open)(path, framework="pt") as file:
        anchors, momenta = file.get_slice("anchor"), file.get_slice("momentum")
        for low in range(0, anchors.get_shape()[0], PIECE_VALUES):
            found.update(bytes_of(anchors[low : low + PIECE_VALUES]))
            moved |= bool(momenta[low : low + PIECE_VALUES].any())
    return found.hexdigest() == pinned and not moved


def keep_right_chunks(path: Path, digests: bytes) -> int:
    """Cut a file, which need not be there, to its first chunks that have these digests; its bytes
    then.
    """
    path.touch()
    found = chunk_digests(path)
    starts = range(0, min(len(found), len(digests)), 32)
    right = next((n for n in starts if found[n : n + 32] != digests[n : n + 32]), len(found))
    size = min(path.stat().st_size, right // 32 * STATE_CHUNK_BYTES)
    os.truncate(path, size)
    return size


def load_state(path: Path, anchor: Tensor, momentum: Tensor) -> None:
    """Copy a state that was checked into these vectors, [numel] fp32 each."""
    with on_disk(path), cast(Any, safe_open)(path, framework="pt") as file:
        for name, target in (("anchor", anchor), ("momentum", momentum)):
            values = file.get_slice(name)
            for low in range(0, target.numel(), PIECE_VALUES):
                target[low : low + PIECE_VALUES] = values[low : low + PIECE_VALUES]
