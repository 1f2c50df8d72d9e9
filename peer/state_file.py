"""The state of a stage as a file: taken from a peer, checked and kept without being loaded whole.

A peer loads it into its buffers afterwards (catchup.fetch_state); who only keeps it for others has
no room for two vectors of every stage. Each check here reads the file a piece at a time. Who keeps
a state for others also has it proved by two records: the first one after it names the sha256 of the
anchor before it, and the outer step of that record must lead to the anchor that the second one
names, which it does from the right momentum only.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.files import disk_fault, make_folder
from dilocox.peer.headers import fetch_certificate
from dilocox.peer.outer import OuterStep
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of
from dilocox.peer.record_check import RecordCheck
from dilocox.peer.snapshot import sha256_of_file
from dilocox.peer.transport import Client, FrameRefused

PIECE_VALUES = 1 << 20
HURRY_S = 3600.0  # a state that would take longer is looked for elsewhere

Compute = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread, so that the event loop goes on."""


class NoState(ConnectionError):
    """The peer has no state that would help: none yet, or one that is not newer than ours."""


@dataclass(frozen=True, kw_only=True)
class StateOffer:
    """A state that a peer has: its file, and the record (checked, without means) it stands on."""

    peer: str
    sha256: str
    size: int  # bytes
    digest: str
    record: RoundRecord
    record_bytes: bytes
    certificate: bytes


async def ask_for_state(
    client: Client,
    peer: str,
    *,
    check: RecordCheck,
    compute: Compute,
    helps: Callable[[str], bool] = lambda digest: True,
) -> StateOffer:
    """What state a peer has. `helps`: whether one that stands on this record is wanted at all.

    Raises:
        NoState: it has none, or one that does not help.
        ConnectionError: the peer cannot be reached. TimeoutError: it gives its record by drops.
        RecordRefused, FrameRefused: what it says is not sound.
    """
    limit = check.state_bytes
    blob = await client.fetch(peer, {"what": "state", "offset": limit}, limit_bytes=limit)
    if blob is None:
        raise NoState(f"{peer} has no state")
    digest, sha256 = str(blob.facts.get("digest")), str(blob.facts.get("sha256"))
    size = blob.facts.get("size")
    if not isinstance(size, int) or not 0 < size <= limit:
        raise FrameRefused(f"{peer} has a state of {size} bytes, at most {limit} are due")
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise FrameRefused(f"{peer} names its state by what is no sha256")
    if digest == check.root:
        raise NoState(f"{peer} has written no state since the first round")
    if not helps(digest):
        raise NoState(f"the state of {peer} is not newer, or not on this chain")
    data = await asyncio.wait_for(client.fetch_record(peer, digest), check.record_limit_s)
    if data is None or digest_of(data) != digest:
        raise FrameRefused(f"{peer} has no record for its state")
    certificate = await fetch_certificate(client, peer, digest)
    record = await compute(check.record, data, certificate)
    return StateOffer(
        peer=peer,
        sha256=sha256,
        size=size,
        digest=digest,
        record=replace(record, means=()),
        record_bytes=data,
        certificate=certificate,
    )


async def download_state(
    client: Client,
    offer: StateOffer,
    folder: Path,
    *,
    numel: int,
    compute: Compute,
    hurry: bool = False,
) -> Path:
    """Fetch the file into a folder, going on with what an earlier, broken download of it left.

    hurry: give it up where it would take over an hour, as others may be faster.

    Raises:
        TooSlow: in a hurry only.
        ConnectionError: the peer is gone, or has another state by now.
        FrameRefused: the file is not what the offer says, or no state of so many values.
        EnvironmentFault: no space on the disk; then nothing is left of it.
    """
    path = folder / f"{offer.sha256}.state"
    try:
        make_folder(folder)
        with _disk(path):
            for older in set(folder.glob("*.state")) - {path}:
                older.unlink()
        await _fetch_rest(client, offer, path, hurry)
        with _disk(path):
            found = await compute(sha256_of_file, path)
        if found != offer.sha256:
            raise FrameRefused(f"the state of {offer.peer} does not have the sha256 it stated")
        await compute(check_values, path, numel)
    except (FrameRefused, EnvironmentFault):
        path.unlink(missing_ok=True)
        raise
    return path


async def _fetch_rest(client: Client, offer: StateOffer, path: Path, hurry: bool) -> None:
    with _disk(path):
        file = path.open("ab")
    with file:
        offset = file.tell()
        if offset >= offer.size:
            return

        def write(chunk: bytes) -> None:
            with _disk(path):  # else the transport would take it for the network's
                file.write(chunk)

        want = {"what": "state", "offset": offset, "sha256": offer.sha256}
        limit = offer.size - offset
        least = limit / HURRY_S if hurry else 0.0
        fetching = client.fetch(
            offer.peer, want, limit_bytes=limit, sink=write, least_bytes_per_s=least
        )
        if await fetching is None:
            raise ConnectionError(f"{offer.peer} has another state by now")
        with _disk(path):
            file.flush()


def check_values(path: Path, numel: int) -> None:
    """Refuse (FrameRefused) a file that is not an anchor and a momentum of finite fp32 values."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in ("anchor", "momentum")]
            for piece in slices:
                if piece.get_shape() != [numel] or piece.get_dtype() != "F32":
                    raise FrameRefused(f"a state has {piece.get_shape()} values, not [{numel}]")
            for piece in slices:
                for low in range(0, numel, PIECE_VALUES):
                    if not bool(piece[low : low + PIECE_VALUES].isfinite().all()):
                        raise FrameRefused("the state holds values that are not finite")
    except SafetensorError as error:
        raise FrameRefused(f"the state is no safetensors file: {error}") from error


@torch.no_grad()
def anchors_around(path: Path, average: Tensor, outer: OuterStep) -> tuple[str, str]:
    """The sha256 of a state's anchor, and of the anchor after the outer step with this average.

    `average`: flat fp32, of the first record after the state. Raises RecordRefused for a damaged
    file.
    """
    before, after = hashlib.sha256(), hashlib.sha256()
    try:
        with safe_open(path, framework="pt") as file:
            anchors, momenta = file.get_slice("anchor"), file.get_slice("momentum")
            for low in range(0, average.numel(), PIECE_VALUES):
                part = slice(low, low + PIECE_VALUES)
                anchor, momentum = anchors[part], momenta[part]
                before.update(_bytes(anchor))
                outer.apply(anchor, momentum, average[part], anchor, momentum)
                after.update(_bytes(anchor))
    except (SafetensorError, ValueError, OSError) as error:
        raise RecordRefused(f"{path}: damaged ({error})") from error
    return before.hexdigest(), after.hexdigest()


def _bytes(values: Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy().data


@contextmanager
def _disk(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise disk_fault(path, error) from error
