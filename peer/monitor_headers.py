"""Headers of round records from whoever holds them, for a monitor: anybody's word, so checked.

A bootstrap's archive has checked what it keeps, so the header of its record will do. From others a
record of moderate size is fetched whole, since only its digest proves what it says.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Sequence

from dilocox.peer.chain_list import ChainRound
from dilocox.peer.record import digest_of, parse_header
from dilocox.peer.record_folder import HEADER_BYTES
from dilocox.peer.transport import Client, FrameRefused

logger = logging.getLogger(__name__)

FETCH_LIMIT_S = 20.0
HOLDERS_ASKED = 6  # for one record
# What a run's records may have follows from its model, whose code takes 100 MB; `take` bounds more.
MOST_BYTES = 1 << 31
WHOLE_BYTES = 4 << 20  # records up to this size are fetched whole from those who are no bootstrap
MAX_MEMBERS = 4096
MAX_NAME = 64
MAX_TOKENS = 2**53

# what is wrong with a holder, or with the way to it
REFUSED = (ConnectionError, ValueError, asyncio.TimeoutError)


class _Enough(ConnectionError):
    """The header is here: the rest of the record is not needed."""


class HeaderFetcher:
    """Asks holders for the header of a record."""

    def __init__(self, client: Client, run: str, bootstraps: Collection[str]):
        self._client = client
        self._run = run
        self._bootstraps = bootstraps

    async def fetch(
        self, stage: int, digest: str, holders: Sequence[str]
    ) -> tuple[ChainRound | None, str]:
        """From the first holder that has it, and who that was."""
        for peer in list(holders)[:HOLDERS_ASKED]:
            try:
                asked = self._ask(peer, stage, digest)
                found = await asyncio.wait_for(asked, FETCH_LIMIT_S)
            except REFUSED as error:
                logger.info("stage %d: no record %s of %s: %s", stage, digest[:12], peer, error)
                continue
            if found is not None:
                return found, peer
        return None, ""

    async def _ask(self, peer: str, stage: int, digest: str) -> ChainRound | None:
        data = bytearray()
        whole_bytes = 0 if peer in self._bootstraps else WHOLE_BYTES
        size: int | None = None

        def take(chunk: bytes) -> None:
            nonlocal size
            data.extend(chunk)
            if size is None and (size := _stated_bytes(data)) is not None and size > whole_bytes:
                raise _Enough
            if size is not None and len(data) > size:
                raise FrameRefused("more than its header says")

        header = whole_bytes == 0  # who knows the word sends no more then
        want = {"what": "record", "digest": digest, "older": True, "header": header}
        try:
            blob = await self._client.fetch(peer, want, limit_bytes=MOST_BYTES, sink=take)
        except _Enough:
            return header_of(bytes(data), digest, self._run, stage)
        if blob is None:
            return None
        if digest_of(bytes(data)) != digest:
            raise FrameRefused("it is another record")
        return header_of(bytes(data), digest, self._run, stage)


def _stated_bytes(data: bytearray) -> int | None:
    """How large a record is, as its header says; None while the header is not complete."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or len(data) < 8 + length:
        if len(data) > HEADER_BYTES:
            raise FrameRefused("a record's header is too long")
        return None
    try:
        tensors = json.loads(data[8 : 8 + length])
        ends = [int(facts["data_offsets"][1]) for name, facts in tensors.items() if name[:1] != "_"]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FrameRefused(f"no header of a record: {error!r}") from error
    return 8 + length + max(ends, default=0)


def header_of(data: bytes, digest: str, run: str, stage: int) -> ChainRound:
    """Read a header that may be anybody's; ValueError if it makes no sense."""
    size = _stated_bytes(bytearray(data))
    if size is None:
        raise FrameRefused("half a header")
    try:
        header = parse_header(data)
        found = ChainRound.of(header, digest, size)
        where, names = (header.run, header.stage), [str(each.peer) for each in header.members]
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FrameRefused(f"no header of a record: {error!r}") from error
    listed = found.listed
    numbers = (listed.round, size, found.chain_tokens, listed.next_inner_steps, listed.tokens)
    numbers += tuple(tokens for _, tokens in found.members)
    if where != (run, stage) or len(names) > MAX_MEMBERS:
        raise FrameRefused("a record of another run or stage, or of too many members")
    if not all(0 <= number <= MAX_TOKENS for number in numbers):
        raise FrameRefused("a record's numbers make no sense")
    if any(len(name) > MAX_NAME for name in names):
        raise FrameRefused("a member's name is none")
    return found
