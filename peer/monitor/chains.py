"""Follows every stage's chain for the monitor, in a thread of its own: headers of round records.

A walk goes back from the record that is claimed until it meets one that is known, or the manifest.
Bootstraps are asked first: their archive keeps more of the chain than peers do, and has checked
what it keeps, so the header of its record will do. From others, whose word is anybody's, a record
of moderate size is fetched whole, since only its digest proves what it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT
from dilocox.dht.records import ClaimRecord, averaging_prefix
from dilocox.dht.rpc import REFUSED, Client, LoopThread
from dilocox.dht.upload_limit import UploadLimit
from dilocox.peer.chain.header_client import HeaderClient
from dilocox.peer.chain.round_history import HistoryRow, ask_history
from dilocox.peer.chain.summary import ChainRound, token_seconds_by_peer, tokens_by_peer

logger = logging.getLogger(__name__)

FETCH_LIMIT_S = 20.0
HOLDERS_ASKED = 6  # for one record
# What a run's records may have follows from its model, whose code takes 100 MB; HeaderClient bounds
# what is taken of each.
MOST_BYTES = 1 << 31

STAGES_AT_ONCE = 4
DETAILED = 64  # rounds of a walk that keep their members one by one


@dataclass(frozen=True)
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
    folded, folded_seconds: tokens and token-seconds by peer of the rounds whose `members` were left
    out for their number.
    """

    stage: int
    start: str
    rounds: tuple[ChainRound, ...]
    end: str
    connected: bool
    folded: Counter[str]
    folded_seconds: Counter[str] = field(default_factory=Counter[str])


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

    def worse(peer: str) -> tuple[bool, bool, bool, int]:
        claim = claims[peer]
        return peer not in bootstraps, peer in dial_out, claim.digest != digest, -claim.round

    return sorted((peer for peer in claims if claims[peer].round >= 0), key=worse)


class ChainReader(LoopThread):
    """The thread; `order` and `take` are for the monitor's own."""

    def __init__(self, dht: RunDHT, run: str, bootstraps: Collection[str]):
        # the one handle that a process gets from its node; nobody else here needs it
        super().__init__("chains", p2p=dht.replicate_p2p)
        self._run_id = run
        self._bootstraps = frozenset(bootstraps)
        self._walks: dict[int, Future[Walk]] = {}  # by stage
        self._asking: Future[list[HistoryRow]] | None = None
        self._silent = set[str]()  # bootstraps that gave no history, of which was said so
        self._slots = asyncio.Semaphore(STAGES_AT_ONCE)

    def order(self, order: Order) -> bool:
        """Begin a walk; False while one of this stage is under way, or the thread has ended."""
        if order.stage in self._walks or not self.running:
            return False
        walked = asyncio.run_coroutine_threadsafe(self._walked(order), self.loop)
        self._walks[order.stage] = walked
        return True

    def take(self) -> list[Walk]:
        """The walks that have ended since the last call."""
        ended = [stage for stage, walked in self._walks.items() if walked.done()]
        return [self._walks.pop(stage).result() for stage in ended]

    async def _walked(self, order: Order) -> Walk:
        async with self._slots:
            return await walk(self._chain, order)

    def ask_history(self, manifest: Manifest, witness: str, after: int) -> None:
        """Ask bootstraps for what they keep of the rounds after this one; nothing while that runs.

        witness: whose word counts first.
        """
        if self._asking is None and self.running:
            peers = sorted(self._bootstraps, key=lambda peer: (peer != witness, peer))
            run, silent = self._run_id, self._silent
            asked = ask_history(self._client(0), peers, run, manifest, after, silent)
            self._asking = asyncio.run_coroutine_threadsafe(asked, self.loop)

    def take_history(self) -> list[HistoryRow] | None:
        """What they said since the last call; None while nothing was asked, or is not answered."""
        if self._asking is None or not self._asking.done():
            return None
        asked, self._asking = self._asking, None
        return asked.result()

    def _client(self, stage: int) -> Client:
        return Client(
            p2p=self.p2p,
            namespace=averaging_prefix(self._run_id, stage),
            limit=UploadLimit(None),
            record_bytes=MOST_BYTES,
        )

    def _chain(self, order: Order) -> HeaderClient:
        return HeaderClient(
            self._client(order.stage),
            self._run_id,
            order.stage,
            order.holders[:HOLDERS_ASKED],
            trusted=self._bootstraps.__contains__,
            older=True,
            header_limit_s=FETCH_LIMIT_S,
        )


async def walk(chain: Callable[[Order], HeaderClient], order: Order) -> Walk:
    """Walk until a known record, or one that nobody gives; whatever fails ends only this walk."""
    rounds: list[ChainRound] = []
    folded, folded_seconds = Counter[str](), Counter[str]()
    end = order.start
    try:
        async for told in chain(order).headers(order.start, order.stop.__contains__):
            rounds.append(told)
            if len(rounds) > DETAILED:
                folded.update(tokens_by_peer([told]))
                folded_seconds.update(token_seconds_by_peer([told]))
                rounds[-1] = replace(told, contributors=())
            end = told.previous
    except REFUSED as error:
        logger.info("stage %d: no record %s: %s", order.stage, end[:12], error)
    except Exception:  # a header can be anything; the other stages are to be followed
        logger.exception("the chain of stage %d cannot be followed", order.stage)
    return Walk(
        stage=order.stage,
        start=order.start,
        rounds=tuple(rounds),
        end=end,
        connected=end in order.stop,
        folded=folded,
        folded_seconds=folded_seconds,
    )
