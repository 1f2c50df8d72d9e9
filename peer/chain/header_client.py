"""`HeaderClient`: walks a stage's chain back by the headers of its records, each a few kB.

Nobody vouches for a header: what it says of its record counts once the record is here, too, and has
the digest that it was asked for by. Only an archive of a bootstrap has checked what it keeps. This
is a file of its own since the monitor imports it: nothing here needs the code of models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dilocox.dht.errors import EnvironmentFault, reason_of
from dilocox.dht.invite import MAX_PEER_ID
from dilocox.dht.names import shown_peer
from dilocox.dht.rpc import REFUSED, CallRefused, Client
from dilocox.dht.wire import MAX_INTEGER
from dilocox.peer.chain.store import HEADER_BYTES
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.rounds.record import RecordRefused, digest_of, parse_header

logger = logging.getLogger(__name__)

WHOLE_BYTES = 4 << 20  # records up to this size are fetched whole from peers that are not trusted
NONSENSE = (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What parsing bytes may raise that anybody sent."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CountedRounds:
    """What the headers of another peer's chain say of this peer.

    after: of all records of later rounds, up to the newest. named: rounds of those that count this
    peer. rounds: of those records, by digest.
    """

    after: int
    named: frozenset[int]
    rounds: Mapping[str, int]

    @classmethod
    def told(
        cls, headers: Sequence[ChainRound], known: int | None, me: str
    ) -> CountedRounds | None:
        """By these headers, the newest first; `known`: the round that they follow."""
        if not headers:
            return None
        oldest = headers[-1].round
        return cls(
            after=known if known is not None and known < oldest else oldest - 1,
            named=frozenset(told.round for told in headers if me in dict(told.contributors)),
            rounds={told.digest: told.round for told in headers},
        )

    def up_to(self, digest: str) -> CountedRounds | None:
        """Likewise, up to the record of this digest; None where it is another chain's."""
        newest = self.rounds.get(digest)
        if newest is None:
            return None
        return replace(self, named=frozenset(n for n in self.named if n <= newest))


class OtherRecord(RecordRefused):
    """A holder sent another record than it was asked for, or no certificate: its fault, and none of
    the record's.
    """


class _Enough(ConnectionError):
    """The header is here: the rest of the record is not needed."""


class HeaderClient:
    """The headers of one stage's chain, from its holders. It needs no code of models.

    A holder that gave something is asked first from then on: it has the rest of the chain, too, as
    far as it can.
    """

    def __init__(
        self,
        client: Client,
        run: str,
        stage: int,
        holders: Sequence[str],
        *,
        trusted: Callable[[str], bool] = lambda peer: True,
        older: bool = False,
        header_limit_s: float = math.inf,
        deadline: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ):
        """holders: peers to ask, the best first. trusted: whether a peer's header will do; from
        others a record of moderate size is fetched whole, as only its digest proves what it told.
        older: ask for what an archive keeps besides the newest records. header_limit_s: of one
        header. deadline: of all waits, by `now`; a command that sets it offers the user --timeout.
        """
        self.holders = list(holders)
        self._client = client
        self._run = run
        self._stage = stage
        self._trusted = trusted
        self._older = older
        self._header_limit_s = header_limit_s
        self._deadline = deadline
        self._now = now

    async def header(self, digest: str) -> ChainRound | None:
        """The header of a record from the first holder that has it, None if nobody does.

        Raises:
            ConnectionError, CallRefused, TimeoutError: what the last holder that failed did.
            EnvironmentFault: the deadline is over.
        """
        return await self._first(
            lambda peer: self._within(self._header(peer, digest), self._header_limit_s)
        )

    def headers(self, start: str, ends: Callable[[str], bool]) -> AsyncGenerator[ChainRound, None]:
        """Headers from this record back, the newest first, until `ends` says so of a digest, or
        nobody has the next one.

        Raises what `header` does, and RecordRefused for rounds that do not fall.
        """
        return self._back(start, ends, self.header, lambda told: (told.round, told.previous))

    async def _back(
        self,
        start: str,
        ends: Callable[[str], bool],
        take: Callable[[str], Coroutine[Any, Any, T | None]],
        link: Callable[[T], tuple[int, str]],
    ) -> AsyncGenerator[T, None]:
        """link: the round of what was taken, and the digest of the record before it."""
        wanted, above = start, math.inf
        while not ends(wanted):
            found = await take(wanted)
            if found is None:
                return
            number, before = link(found)
            if number >= above:  # a lie: it would never end
                raise RecordRefused(f"round {number} comes before round {above}")
            yield found
            wanted, above = before, number

    async def _first(self, ask: Callable[[str], Coroutine[Any, Any, T | None]]) -> T | None:
        """What the first holder gives; if none does, what the last one failed by is raised, an
        unsound record before all else.
        """
        failure: Exception | None = None
        for peer in list(self.holders):
            try:
                found = await ask(peer)
            except REFUSED as error:
                if len(self.holders) > 1:
                    logger.info("%s: %s", shown_peer(peer), reason_of(error))
                if type(failure) is not RecordRefused:
                    failure = error
                continue
            if found is not None:
                self.holders.sort(key=lambda holder: holder != peer)
                return found
        if failure is not None:
            raise failure
        return None

    async def _header(self, peer: str, digest: str) -> ChainRound | None:
        data = bytearray()
        trusted = self._trusted(peer)
        size: int | None = None

        def take(chunk: bytes) -> None:
            nonlocal size
            data.extend(chunk)
            if size is None:
                size = _stated_bytes(data)
                if size is not None and (trusted or size > WHOLE_BYTES):
                    raise _Enough
            if size is not None and len(data) > size:
                raise CallRefused("more than its header says")

        want = {"what": "record", "digest": digest, "older": self._older, "header": trusted}
        limit = self._client.record_bytes  # a peer that does not know "header" sends all
        try:
            if await self._client.fetch(peer, want, limit_bytes=limit, sink=take) is None:
                return None
        except _Enough:
            return read_header(bytes(data), digest, self._run, self._stage)
        if size is None or digest_of(bytes(data)) != digest:
            raise CallRefused(f"{len(data)} bytes are not the record {digest[:12]}")
        return read_header(bytes(data), digest, self._run, self._stage)

    async def _within(self, asking: Coroutine[Any, Any, T], limit_s: float = math.inf) -> T:
        left_s = self._deadline - self._now()
        if left_s <= 0:
            asking.close()
            raise EnvironmentFault("time ran out; allow more with --timeout")
        return await asyncio.wait_for(asking, min(left_s, limit_s))


def read_header(data: bytes, digest: str, run: str, stage: int) -> ChainRound:
    """Read the first bytes of a record; CallRefused (ValueError) if they make no sense."""
    size = _stated_bytes(data)
    if size is None:
        raise CallRefused("half a header")
    try:
        header = parse_header(data)
        told = ChainRound.of(header, digest, max(size, len(data)))
    except NONSENSE as error:
        raise CallRefused(f"no header of a record: {error!r}") from error
    if (header.run, header.stage) != (run, stage):
        raise CallRefused(f"it is of run {header.run[:32]}, stage {header.stage}")
    numbers = [told.round, size, told.chain_tokens, told.next_inner_steps, told.tokens]
    numbers += [told.token_seconds, *dict(told.contributors).values()]
    if not all(0 <= n <= MAX_INTEGER for n in numbers):
        raise CallRefused("a record's numbers make no sense")
    # a name goes into status.json and onto a page
    names = [each.peer for each in header.members]
    if any(len(name) > MAX_PEER_ID or not name.isprintable() for name in names):
        raise CallRefused("a member's peer id is not valid")
    return told


def _stated_bytes(data: bytes | bytearray) -> int | None:
    """How large a record is, as its header says; None while the header is not complete."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or len(data) < 8 + length:
        if len(data) > HEADER_BYTES:
            raise CallRefused("a record's header is too long")
        return None
    try:
        tensors = json.loads(data[8 : 8 + length])
        ends = [int(facts["data_offsets"][1]) for name, facts in tensors.items() if name[:1] != "_"]
    except NONSENSE as error:
        raise CallRefused(f"no header of a record: {error!r}") from error
    return 8 + length + max(ends, default=0)
