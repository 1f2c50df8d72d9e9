"""Follows every stage's chain for the monitor, in a thread of its own: headers of round records.

A walk goes back from the record that is claimed until it meets one that is known, or the manifest.
Bootstraps are asked first: their archive keeps more of the chain than peers do, and has checked
what it keeps, so the header of its record will do. From others, whose word is anybody's, a record
of moderate size is fetched whole, since only its digest proves what it says.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.node import RunDHT
from dilocox.dht.records import ClaimRecord, averaging_prefix
from dilocox.dht.rpc import REFUSED, Client, FrameRefused, UploadLimit
from dilocox.peer.chain.store import HEADER_BYTES
from dilocox.peer.chain.summary import ChainRound, LoggedRound, tokens_by_peer
from dilocox.peer.rounds.record import digest_of, parse_header

logger = logging.getLogger(__name__)

FETCH_LIMIT_S = 20.0
HOLDERS_ASKED = 6  # for one record
# What a run's records may have follows from its model, whose code takes 100 MB; `take` bounds more.
MOST_BYTES = 1 << 31
WHOLE_BYTES = 4 << 20  # records up to this size are fetched whole from those who are no bootstrap
MAX_MEMBERS = 4096
MAX_NAME = 64
MAX_TOKENS = 2**53

START_LIMIT_S = 10.0
CLOSE_LIMIT_S = 3.0
STAGES_AT_ONCE = 4
DETAILED = 64  # rounds of a walk that keep their members one by one


@dataclass(frozen=True, kw_only=True)
class Order:
    """A walk of a stage's chain back from a record: `stop` are the digests that end it, `holders`
    who is asked, the best first.
    """

    stage: int
    start: str
    stop: Collection[str] = field(repr=False)
    holders: Sequence[str] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a walk found, the newest round first.

    end: the digest at which it ended: one of the order's `stop`, or one that nobody gave.
    folded: tokens by peer of the rounds whose `members` were left out for their number.
    """

    stage: int
    start: str
    rounds: tuple[ChainRound, ...]
    end: str
    connected: bool
    folded: Counter[str]


def followed(claims: Mapping[str, ClaimRecord]) -> str | None:
    """The record that most peers of a stage claim, None while nobody claims one.

    Among equals the one with more tokens: right after a commit some have it and others not yet.
    """
    held = [claim for claim in claims.values() if claim.round >= 0]
    counts = Counter(claim.digest for claim in held)
    best = max(held, key=lambda claim: (counts[claim.digest], claim.chain_tokens), default=None)
    return None if best is None else best.digest


def holders_of(
    claims: Mapping[str, ClaimRecord],
    digest: str,
    *,
    bootstraps: Collection[str],
    dial_out: Collection[str],
) -> list[str]:
    """Who is asked for this record and those before it, the best first.

    dial_out: peers that only dial out, and so cannot be dialled.
    """
    held = {peer: claim for peer, claim in claims.items() if claim.round >= 0}

    def worse(peer: str) -> tuple[bool, bool, bool, int]:
        claim = held[peer]
        return peer not in bootstraps, peer in dial_out, claim.digest != digest, -claim.round

    return sorted(held, key=worse)


class ChainReader:
    """The thread. `order` and `take` are for the monitor's own."""

    def __init__(self, dht: RunDHT, run: str, bootstraps: Collection[str]):
        self._dht = dht
        self._run = run
        self._bootstraps = frozenset(bootstraps)
        self._walks: deque[Walk] = deque()
        self._busy: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._slots = asyncio.Semaphore(STAGES_AT_ONCE)
        self._jobs: set[asyncio.Task[None]] = set()
        self._p2p: Any = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_loop, name="chains", daemon=True)

    # ---- in the monitor's thread -----------------------------------------------------------------
    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start with the node's p2pd; raises EnvironmentFault."""
        self._thread.start()
        try:
            self._started.result(START_LIMIT_S + 1.0)
        except Exception as error:
            self.close()
            raise EnvironmentFault(f"the chains' thread did not start ({error!r})") from error

    def order(self, order: Order) -> bool:
        """Begin a walk; False while one of this stage is under way."""
        if order.stage in self._busy:
            return False
        self._busy.add(order.stage)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin, order)
        return True

    def take(self) -> list[Walk]:
        """The walks that have ended since the last call."""
        taken: list[Walk] = []
        while self._walks:
            walk = self._walks.popleft()
            self._busy.discard(walk.stage)
            taken.append(walk)
        return taken

    def close(self) -> None:
        """End the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)

    # ---- in the thread ---------------------------------------------------------------------------
    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except Exception:
            logger.exception("the chains' thread failed")
        finally:
            self._loop.close()

    async def _live(self) -> None:
        try:
            # the one handle that a process gets from its node; nobody else here needs it
            self._p2p = await asyncio.wait_for(self._dht.replicate_p2p(), START_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self._started.set_exception(error)
            return
        try:
            self._started.set_result(None)
            await self._stop.wait()
        finally:
            for job in self._jobs:
                job.cancel()
            await asyncio.gather(*self._jobs, return_exceptions=True)
            with contextlib.suppress(Exception):  # p2pd may be gone
                await asyncio.wait_for(self._p2p.shutdown(), CLOSE_LIMIT_S)

    def _begin(self, order: Order) -> None:
        job = self._loop.create_task(self._walked(order))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _walked(self, order: Order) -> None:
        walk = Walker(order)
        try:
            async with self._slots:
                client = self._client(order.stage)
                await walk.go(HeaderFetcher(client, self._run, self._bootstraps))
        except Exception:  # a header can be anything; the other stages are to be followed
            logger.exception("the chain of stage %d cannot be followed", order.stage)
        finally:
            self._walks.append(walk.result())

    def _client(self, stage: int) -> Client:
        return Client(
            p2p=self._p2p,
            namespace=averaging_prefix(self._run, stage),
            limit=UploadLimit(None),
            record_bytes=MOST_BYTES,
        )


class Walker:
    """One walk; `result` is what it has found so far."""

    def __init__(self, order: Order):
        self._order = order
        self._rounds: list[ChainRound] = []
        self._folded: Counter[str] = Counter()
        self._wanted = order.start

    async def go(self, fetcher: HeaderFetcher) -> None:
        """Walk until a known record, or one that nobody gives."""
        order = self._order
        holders = list(order.holders)
        while self._wanted not in order.stop:
            found, by = await fetcher.fetch(order.stage, self._wanted, holders)
            if found is None or (self._rounds and found.listed.round >= self._last.round):
                return  # not to be had, or a lie that would never end
            holders.sort(key=lambda peer: peer != by)  # it has the rest, too, as far as it can
            self._rounds.append(found)
            if len(self._rounds) > DETAILED:
                self._folded += tokens_by_peer([found])
                self._rounds[-1] = replace(found, members=())
            self._wanted = found.listed.previous

    def result(self) -> Walk:
        """What was found."""
        return Walk(
            stage=self._order.stage,
            start=self._order.start,
            rounds=tuple(self._rounds),
            end=self._wanted,
            connected=self._wanted in self._order.stop,
            folded=self._folded,
        )

    @property
    def _last(self) -> LoggedRound:
        return self._rounds[-1].listed


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
