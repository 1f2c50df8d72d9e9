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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import safe_open
from torch import Tensor

from dilocox.peer.files import disk_fault
from dilocox.peer.headers import ToldHeader, fetch_certificate, fetch_header
from dilocox.peer.outer import anchor_sha256
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of
from dilocox.peer.record_check import RecordCheck
from dilocox.peer.record_folder import RecordFolder
from dilocox.peer.roundlog import RoundLog
from dilocox.peer.snapshot import STATE_FACTS_FILE, STATE_FILE, newest
from dilocox.peer.state_file import Compute, NoState, ask_for_state, download_state
from dilocox.peer.transport import Client

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
