"""How a peer that missed rounds, or that is new, gets what the others have, and how it is served.

Records: walk back by their headers from the digest that a peer claims until a record of our own
chain, then append forward, each with its certificate. State: anchor and outer momentum as of that
peer's last snapshot, downloaded to disk (resumable), checked by size and sha256 before a byte of it
is loaded, with the record it stands on.

By headers, each with its certificate, a long chain is walked for few bytes (`fetch_header`). Nobody
vouches for a header. What it says of its record counts once the record is here, too, and has the
digest that it was asked for by.

A state is taken as a file, and checked without being loaded whole (`download_state`). A peer loads
it into its buffers afterwards (`fetch_state`); who only keeps it for others has no room for two
vectors of every stage. So each check reads the file a piece at a time. Who keeps a state for others
also has it proved by two records: the first one after it names the sha256 of the anchor before it,
and the outer step of that record must lead to the anchor that the second one names, which it does
from the right momentum only.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, make_folder
from dilocox.dht.rpc import STALL_S, Blob, Client, FrameRefused
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import STATE_FACTS_FILE, STATE_FILE, newest, sha256_of_file
from dilocox.peer.chain.store import HEADER_BYTES, RecordFolder, RoundLog
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from dilocox.peer.rounds.record import RecordRefused, RoundRecord, digest_of, parse_header
from dilocox.peer.rounds.vote import MAX_CERTIFICATE_BYTES


class Fetch(Protocol):
    """A download from one peer; see Client.fetch."""

    def __call__(
        self, want: dict[str, Any], *, limit_bytes: int, sink: Callable[[bytes], None]
    ) -> Awaitable[Blob | None]:
        """What it answers, None if it does not have it."""
        ...


class _Enough(ConnectionError):
    """The header is here: the rest of the record is not needed."""


@dataclass(frozen=True)
class ToldHeader:
    """A header, as somebody sent it. record_bytes: of the whole record, as it says."""

    header: RoundRecord
    record_bytes: int


async def fetch_header(
    fetch: Fetch, digest: str, *, limit_bytes: int, older: bool = False
) -> ToldHeader | None:
    """Ask for the header of a record; None if the peer does not have it.

    limit_bytes: of the whole record, which a peer sends that does not know the word "header".
    older: ask for what a bootstrap's archive keeps besides the newest records.

    Raises:
        ConnectionError: the peer cannot be reached.
        FrameRefused: it sent no header.
    """
    data = bytearray()

    def take(chunk: bytes) -> None:
        data.extend(chunk)
        if len(data) >= 8 and len(data) >= 8 + _length(data):
            raise _Enough
        if len(data) > HEADER_BYTES:
            raise FrameRefused("a record's header is too long")

    want: dict[str, Any] = {"what": "record", "digest": digest, "header": True}
    if older:
        want["older"] = True
    try:
        if await fetch(want, limit_bytes=limit_bytes, sink=take) is None:
            return None
    except _Enough:
        return _told_header(bytes(data))
    raise FrameRefused(f"{len(data)} bytes are no record")


async def fetch_certificate(
    client: Client, peer: str, digest: str, *, older: bool = False
) -> bytes:
    """The votes that committed a record, as this peer has them. TimeoutError: they dripped."""
    want = {"what": "certificate", "digest": digest, "older": older}
    fetching = client.fetch(peer, want, limit_bytes=MAX_CERTIFICATE_BYTES)
    blob = await asyncio.wait_for(fetching, STALL_S)
    if blob is None:
        raise RecordRefused(f"{peer} has no certificate of {digest[:12]}")
    return blob.data


def _length(data: bytes | bytearray) -> int:
    return int.from_bytes(data[:8], "little")


def _told_header(data: bytes) -> ToldHeader:
    try:
        tensors = json.loads(data[8 : 8 + _length(data)])
        ends = [facts["data_offsets"][1] for name, facts in tensors.items() if name[:1] != "_"]
        header = parse_header(data)
        size = 8 + _length(data) + int(max(ends, default=0))
        header.counted("")  # what it says of its parts can be compared
    except (
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise FrameRefused(f"no header of a record: {error!r}") from error
    if type(header.round) is not int or header.round < 0 or type(header.previous) is not str:
        raise FrameRefused("a record's header names no round, or no record before it")
    return ToldHeader(header, max(size, len(data)))


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


HEADERS_LIMIT_S = 60.0  # of a walk along a chain, before the first record
RECORDS_LIMIT_S = 600.0  # of all that is taken at once


class AnchorDiffers(RuntimeError):
    """This anchor is not the one that a certified record applies to: a state must be taken."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the headers of another peer's chain say of this peer.

    after: of all records of later rounds, up to the newest. named: rounds of those that count this
    peer. rounds: of those records, by digest.
    """

    after: int
    named: frozenset[int]
    rounds: Mapping[str, int]

    def up_to(self, digest: str) -> Told | None:
        """Likewise, up to the record of this digest; None where it is another chain's."""
        newest = self.rounds.get(digest)
        if newest is None:
            return None
        return replace(self, named=frozenset(n for n in self.named if n <= newest))


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a walk along another peer's chain found."""

    appended: tuple[int, ...]  # rounds now in our log, in order
    fork_round: int | None  # our newest round on their chain, if that is not our head
    fork_digest: str = ""  # of their first record after it
    chain_tokens: int = 0  # of their chain, as its newest record says
    too_far: bool  # their log does not reach back to ours: a state is needed
    costly: bool = False  # it may, but the records are more bytes than they may be
    told: Told | None = None  # by the headers, where the records were not taken


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
    client: Client,
    log: RoundLog,
    peer: str,
    digest: str,
    *,
    check: RecordCheck,
    compute: Compute,
    limit_bytes: int | None = None,
    me: str = "",
    back_to: int | None = None,
) -> Reach:
    """Fetch the records from our chain up to `digest`, check them, and append them to the log.

    Their headers come first, the newest first: until they meet our chain, no record is worth its
    bytes. Then come the records, the oldest first, each appended before the next one is asked for:
    what is cut off goes on later where it was.

    limit_bytes: of all of them, if they are to cost no more than something else would; then a
    bootstrap's older ones, besides its newest, are worth it. back_to: a round of which `me` wants
    to know whether it is in its record, even where the records cost too much.

    Raises:
        ConnectionError: the peer cannot be reached. PeerBusy: it cannot serve now.
        TimeoutError: the headers, a record, or all of them took too long.
        FrameRefused, RecordRefused: a header, record or certificate of it is not sound.
    """
    walk = _missing(client, log, peer, digest, check, limit_bytes, back_to)
    headers, known = await asyncio.wait_for(walk, HEADERS_LIMIT_S)
    missing = {wanted: told.record_bytes for wanted, told in headers.items()}
    told = _told(headers, known, me)
    if known is None:
        return Reach(appended=(), fork_round=None, too_far=True, told=told)
    if missing and limit_bytes is not None and sum(missing.values()) > limit_bytes:
        return Reach(appended=(), fork_round=None, too_far=False, costly=True, told=told)
    end = time.monotonic() + RECORDS_LIMIT_S
    if known != log.head().round:
        tokens = 0
        if missing:  # what the newest header says of the chain's tokens is to be proved
            tokens = (await _checked(client, peer, digest, check, compute))[0].chain_tokens
        return Reach(
            appended=(),
            fork_round=known,
            fork_digest=next(reversed(missing), digest),
            chain_tokens=tokens,
            too_far=False,
            told=told,
        )
    appended: list[int] = []
    for wanted in reversed(missing):
        if time.monotonic() > end:
            raise asyncio.TimeoutError(f"{peer} gave {len(appended)} records in the time for all")
        older = limit_bytes is not None
        _, data, certificate = await _checked(client, peer, wanted, check, compute, older=older)
        appended.append((await compute(log.append, data, certificate)).round)
    return Reach(appended=tuple(appended), fork_round=None, too_far=False)


async def _missing(
    client: Client,
    log: RoundLog,
    peer: str,
    digest: str,
    check: RecordCheck,
    limit_bytes: int | None,
    back_to: int | None,
) -> tuple[dict[str, ToldHeader], int | None]:
    """The headers of what leads from our chain to `digest`, the newest first, and the round of ours
    that they follow, None if the peer does not have all of them.

    It ends early where the records are more than `limit_bytes`, and the headers reach `back_to` or
    take long.
    """
    missing: dict[str, ToldHeader] = {}
    wanted, above, total = digest, 0, 0
    enough_at = time.monotonic() + HEADERS_LIMIT_S / 2
    while (known := log.find(wanted)) is None:
        told = await fetch_header(
            partial(client.fetch, peer),
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
        missing[wanted] = told
        far_enough = back_to is None or above <= back_to or time.monotonic() > enough_at
        if limit_bytes is not None and total > limit_bytes and far_enough:
            return missing, above
        wanted = told.header.previous
    return missing, known


def _told(headers: Mapping[str, ToldHeader], known: int | None, me: str) -> Told | None:
    """What headers, the newest first, say of this peer; `known`: the round that they follow."""
    if not headers:
        return None
    rounds = {digest: told.header.round for digest, told in headers.items()}
    oldest = min(rounds.values())
    return Told(
        after=known if known is not None and known < oldest else oldest - 1,
        named=frozenset(told.header.round for told in headers.values() if told.header.counted(me)),
        rounds=rounds,
    )


async def _checked(
    client: Client,
    peer: str,
    digest: str,
    check: RecordCheck,
    compute: Compute,
    *,
    older: bool = False,
) -> tuple[RoundRecord, bytes, bytes]:
    """A record, its bytes and its certificate."""
    limit_s = min(check.record_limit_s, RECORDS_LIMIT_S)
    data = await asyncio.wait_for(client.fetch_record(peer, digest, older=older), limit_s)
    if data is None:
        raise ConnectionError(f"{peer} does not have the record {digest[:12]} any more")
    if digest_of(data) != digest:
        raise RecordRefused(f"{peer} sent another record than {digest[:12]}")
    certificate = await fetch_certificate(client, peer, digest, older=older)
    return await compute(check.record, data, certificate), data, certificate


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
    client: Client,
    peer: str,
    *,
    check: RecordCheck,
    compute: Compute,
    after_round: int,
    folder: Path,
    anchor: Tensor,
    momentum: Tensor,
    hurry: bool = False,
) -> State:
    """Download a peer's state, newer than `after_round`, into the given vectors; `hurry` as for
    `download_state`.

    Raises:
        NoState: it has none, or an older one.
        TooSlow: in a hurry only.
        ConnectionError: the peer cannot be reached.
        FrameRefused, RecordRefused: what it sent is not sound; nothing was loaded.
        EnvironmentFault: no space on the disk.
    """
    offer = await ask_for_state(client, peer, check=check, compute=compute)
    if offer.record.round <= after_round:
        raise NoState(f"{peer} has a state of round {offer.record.round}, not after {after_round}")
    numel = check.layout.numel
    path = await download_state(client, offer, folder, numel=numel, compute=compute, hurry=hurry)
    await compute(_load, path, anchor, momentum)
    path.unlink()
    return State(
        round=offer.record.round,
        digest=offer.digest,
        anchor_sha256=await compute(anchor_sha256, anchor),
        chain_tokens=offer.record.chain_tokens,
        record=offer.record_bytes,
        certificate=offer.certificate,
    )


def _load(path: Path, anchor: Tensor, momentum: Tensor) -> None:
    """Read what was checked before."""
    try:
        with cast(Any, safe_open)(path, framework="pt") as file:
            for name, target in (("anchor", anchor), ("momentum", momentum)):
                target.copy_(file.get_tensor(name))
    except OSError as error:
        raise disk_fault(path, error) from error
