"""The header of a record that another peer has, and its certificate: a long chain can be walked for
few bytes.

Nobody vouches for a header. What it says of its record counts once the record is here, too, and
has the digest that it was asked for by.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dilocox.peer.certificate import MAX_CERTIFICATE_BYTES
from dilocox.peer.record import RecordRefused, RoundRecord, parse_header
from dilocox.peer.record_folder import HEADER_BYTES
from dilocox.peer.transport import STALL_S, Blob, Client, FrameRefused


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
