"""How a peer that missed rounds, or that is new, gets what the others have, and how it is served.

Records: walk back by their headers from the digest that a peer claims until a record of our own
chain, then append forward, each with its certificate. State: anchor and outer momentum as of that
peer's last snapshot, downloaded to disk (resumable), checked by size and sha256 before a byte of it
is loaded, with the record it stands on.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.peer.files import disk_fault
from dilocox.peer.headers import fetch_header
from dilocox.peer.outer import anchor_sha256
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of
from dilocox.peer.record_check import RecordCheck
from dilocox.peer.record_folder import RecordFolder
from dilocox.peer.roundlog import RoundLog
from dilocox.peer.snapshot import STATE_FACTS_FILE, STATE_FILE, newest, sha256_of_file
from dilocox.peer.transport import STALL_S, Blob, FrameRefused, PeerTransport

Compute = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread, so that the event loop goes on."""

MAX_CERTIFICATE_BYTES = 1 << 20
HEADERS_LIMIT_S = 60.0  # of a walk along a chain, before the first record
RECORDS_LIMIT_S = 600.0  # of all that is taken at once


class NoState(ConnectionError):
    """The peer has no state that would help: none yet, or one that is not newer than ours."""


class AnchorDiffers(RuntimeError):
    """This anchor is not the one that a certified record applies to: a state must be taken."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a walk along another peer's chain found."""

    appended: tuple[int, ...]  # rounds now in our log, in order
    fork_round: int | None  # our newest round on their chain, if that is not our head
    fork_digest: str = ""  # of their first record after it
    chain_tokens: int = 0  # of their chain, as its newest record says
    too_far: bool  # their log does not reach back to ours: a state is needed
    costly: bool = False  # it may, but the records are more bytes than they may be


@dataclass(frozen=True, kw_only=True)
class State:
    """A downloaded anchor and momentum, ready in the buffers that are not current."""

    round: int
    digest: str
    anchor_sha256: str
    chain_tokens: int
    record: bytes
    certificate: bytes


@dataclass(frozen=True)
class Source:
    """Something to serve: what is said about it, and its bytes."""

    facts: dict[str, Any]
    file: BinaryIO

    @classmethod
    def of(cls, data: bytes, **facts: Any) -> Source:
        """Serve bytes that are in memory."""
        return cls({"bytes": len(data)} | facts, io.BytesIO(data))

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


# ---- records -------------------------------------------------------------------------------------
async def catch_up(
    transport: PeerTransport,
    log: RoundLog,
    peer: str,
    digest: str,
    *,
    check: RecordCheck,
    compute: Compute,
    limit_bytes: int | None = None,
) -> Reach:
    """Fetch the records from our chain up to `digest`, check them, and append them to the log.

    Their headers come first, the newest first: until they meet our chain, no record is worth its
    bytes. Then come the records, the oldest first, each appended before the next one is asked for:
    what is cut off goes on later where it was. limit_bytes: of all of them, if they are to cost no
    more than something else would; then a bootstrap's older ones, besides its newest, are worth it.

    Raises:
        ConnectionError: the peer cannot be reached. PeerBusy: it cannot serve now.
        TimeoutError: the headers, a record, or all of them took too long.
        FrameRefused, RecordRefused: a header, record or certificate of it is not sound.
    """
    walk = _missing(transport, log, peer, digest, check, limit_bytes)
    missing, known = await asyncio.wait_for(walk, HEADERS_LIMIT_S)
    if known is None:
        return Reach(appended=(), fork_round=None, too_far=True)
    if missing and limit_bytes is not None and sum(missing.values()) > limit_bytes:
        return Reach(appended=(), fork_round=None, too_far=False, costly=True)
    end = time.monotonic() + RECORDS_LIMIT_S
    if known != log.head().round:
        tokens = 0
        if missing:  # what the newest header says of the chain's tokens is to be proved
            tokens = (await _checked(transport, peer, digest, check, compute))[0].chain_tokens
        return Reach(
            appended=(),
            fork_round=known,
            fork_digest=next(reversed(missing), digest),
            chain_tokens=tokens,
            too_far=False,
        )
    appended: list[int] = []
    for wanted in reversed(missing):
        if time.monotonic() > end:
            raise asyncio.TimeoutError(f"{peer} gave {len(appended)} records in the time for all")
        older = limit_bytes is not None
        _, data, certificate = await _checked(transport, peer, wanted, check, compute, older=older)
        appended.append((await compute(log.append, data, certificate)).round)
    return Reach(appended=tuple(appended), fork_round=None, too_far=False)


async def _missing(
    transport: PeerTransport,
    log: RoundLog,
    peer: str,
    digest: str,
    check: RecordCheck,
    limit_bytes: int | None,
) -> tuple[dict[str, int], int | None]:
    """What leads from our chain to `digest`, the newest first, with their bytes; and the round of
    ours that they follow, None if the peer does not have all of them.

    It ends early where they are more than `limit_bytes`.
    """
    missing: dict[str, int] = {}
    wanted, above, total = digest, 0, 0
    while (known := log.find(wanted)) is None:
        told = await fetch_header(
            partial(transport.fetch, peer),
            wanted,
            limit_bytes=check.record_bytes,
            older=limit_bytes is not None,
        )
        if told is None and not missing:
            raise ConnectionError(f"{peer} does not have the record {wanted[:12]} that it claims")
        if told is None:
            return missing, None
        if missing and told.header.round >= above:  # a lie: it would never end
            raise RecordRefused(f"{peer}: round {told.header.round} comes before round {above}")
        above, total = told.header.round, total + told.record_bytes
        missing[wanted] = told.record_bytes
        if limit_bytes is not None and total > limit_bytes:
            return missing, above
        wanted = told.header.previous
    return missing, known


async def _checked(
    transport: PeerTransport,
    peer: str,
    digest: str,
    check: RecordCheck,
    compute: Compute,
    *,
    older: bool = False,
) -> tuple[RoundRecord, bytes, bytes]:
    """A record, its bytes and its certificate."""
    # the members of an exchange move as many bytes in its time
    limit_s = min(max(STALL_S, check.manifest.deadlines.exchange_s), RECORDS_LIMIT_S)
    data = await asyncio.wait_for(transport.fetch_record(peer, digest, older=older), limit_s)
    if data is None:
        raise ConnectionError(f"{peer} does not have the record {digest[:12]} any more")
    if digest_of(data) != digest:
        raise RecordRefused(f"{peer} sent another record than {digest[:12]}")
    certificate = await fetch_certificate(transport, peer, digest, older=older)
    return await compute(check.record, data, certificate), data, certificate


async def fetch_certificate(
    transport: PeerTransport, peer: str, digest: str, *, older: bool = False
) -> bytes:
    """The votes that committed a record, as this peer has them."""
    want = {"what": "certificate", "digest": digest, "older": older}
    blob = await transport.fetch(peer, want, limit_bytes=MAX_CERTIFICATE_BYTES)
    if blob is None:
        raise RecordRefused(f"{peer} has no certificate of {digest[:12]}")
    return blob.data


def find_in_log(
    log: RecordFolder, what: str, digest: str, *, header: bool = False
) -> Source | None:
    """A logged record or certificate, to serve; of a record perhaps only the header.

    A record is served as it lies on the disk: who asks knows its digest.
    """
    round_number = log.find(digest)
    if round_number is None or round_number < 0:
        return None
    if what != "record":
        data = log.certificate(round_number)
        return None if data is None else Source.of(data)
    if header:
        data = log.header_bytes(round_number)
        return None if data is None else Source.of(data)
    file = log.open(round_number)
    return None if file is None else Source({"bytes": os.fstat(file.fileno()).st_size}, file)


# ---- states --------------------------------------------------------------------------------------
def open_state(folder: Path, offset: int, sha256: str | None) -> Source | None:
    """The anchor and momentum of the newest snapshot, from a byte on, to serve.

    `sha256`: the state that is wanted, if not just any: None is served where the newest snapshot
    is another one by now. Once it is open, it is served to its end, whatever snapshots come.
    """
    snapshot = newest(folder)
    if snapshot is None:
        return None
    facts = json.loads((snapshot / STATE_FACTS_FILE).read_text())
    if sha256 is not None and facts["sha256"] != sha256:
        return None
    file = (snapshot / STATE_FILE).open("rb")
    offset = min(max(offset, 0), facts["size"])
    file.seek(offset)
    return Source(facts | {"bytes": facts["size"] - offset}, file)


async def fetch_state(
    transport: PeerTransport,
    peer: str,
    *,
    check: RecordCheck,
    compute: Compute,
    after_round: int,
    folder: Path,
    anchor: Tensor,
    momentum: Tensor,
) -> State:
    """Download a peer's state, newer than `after_round`, into the given vectors.

    Raises:
        NoState: it has none, or an older one.
        ConnectionError: the peer cannot be reached, or has none.
        FrameRefused, RecordRefused: what it sent is not sound; nothing was loaded.
        EnvironmentFault: no space on the disk.
    """
    limit = check.state_bytes
    facts = (await _fetch(transport, peer, {"what": "state", "offset": limit}, limit)).facts
    digest, sha256, size = (str(facts.get("digest")), str(facts.get("sha256")), facts.get("size"))
    if not isinstance(size, int) or not 0 < size <= limit:
        raise FrameRefused(f"{peer} has a state of {size} bytes, at most {limit} are due")
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise FrameRefused(f"{peer} names its state by what is no sha256")
    if digest == check.root:
        raise NoState(f"{peer} has written no state since the first round")
    record = await transport.fetch_record(peer, digest)
    if record is None or digest_of(record) != digest:
        raise FrameRefused(f"{peer} has no record for its state")
    certificate = await fetch_certificate(transport, peer, digest)
    checked = await compute(check.record, record, certificate)
    if checked.round <= after_round:
        raise NoState(f"{peer} has a state of round {checked.round}, not after {after_round}")
    path = folder / f"{sha256}.state"
    for older in set(folder.glob("*.state")) - {path}:
        older.unlink()
    try:
        await _download(transport, peer, path, sha256, size)
        if await compute(sha256_of_file, path) != sha256:
            path.unlink()
            raise FrameRefused(f"the state of {peer} does not have the sha256 that it stated")
        await compute(_load, path, anchor, momentum, check.layout.numel)
    except OSError as error:
        if isinstance(error, (ConnectionError, asyncio.TimeoutError)):  # both are, too
            raise
        raise disk_fault(path, error) from error
    path.unlink()
    return State(
        round=checked.round,
        digest=digest,
        anchor_sha256=await compute(anchor_sha256, anchor),
        chain_tokens=checked.chain_tokens,
        record=record,
        certificate=certificate,
    )


async def _download(
    transport: PeerTransport, peer: str, path: Path, sha256: str, size: int
) -> None:
    """Append to what an earlier, broken download of the same bytes left."""
    with path.open("ab") as file:
        offset = file.tell()
        if offset < size:
            want = {"what": "state", "offset": offset, "sha256": sha256}

            def write(chunk: bytes) -> None:
                try:
                    file.write(chunk)
                except OSError as error:  # the transport would take it for the network's
                    raise disk_fault(path, error) from error

            if await transport.fetch(peer, want, limit_bytes=size - offset, sink=write) is None:
                raise ConnectionError(f"{peer} has another state by now")


async def _fetch(
    transport: PeerTransport, peer: str, want: dict[str, Any], limit_bytes: int
) -> Blob:
    blob = await transport.fetch(peer, want, limit_bytes=limit_bytes)
    if blob is None:
        raise ConnectionError(f"{peer} has no {want['what']}")
    return blob


def _load(path: Path, anchor: Tensor, momentum: Tensor, numel: int) -> None:
    try:
        with cast(Any, safe_open)(path, framework="pt") as file:
            for name in ("anchor", "momentum"):
                piece = file.get_slice(name)
                if piece.get_shape() != [numel] or piece.get_dtype() != "F32":
                    raise FrameRefused(f"{name} has shape {piece.get_shape()}, not [{numel}]")
            for name, target in (("anchor", anchor), ("momentum", momentum)):
                target.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise FrameRefused(f"the state is no safetensors file: {error}") from error
    if not (anchor.isfinite().all() and momentum.isfinite().all()):
        raise FrameRefused("the state holds values that are not finite")
