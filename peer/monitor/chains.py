"""Follows every stage's chain for the monitor, in a thread of its own: headers of round records;
`StageRounds` is what is kept of them.

A walk goes back from the record that is claimed until it meets one that is known, or the manifest.
Bootstraps are asked first: their archive keeps more of the chain than peers do, and has checked
what it keeps, so the header of its record will do. From others, which may be anybody, a record of
moderate size is fetched whole, since only its digest proves what it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT
from dilocox.dht.records import ClaimRecord, averaging_prefix
from dilocox.dht.rpc import REFUSED, Client, LoopThread
from dilocox.peer.chain.header_client import HeaderClient
from dilocox.peer.chain.round_history import ToldHistory, ask_history
from dilocox.peer.chain.stated_facts import came_now
from dilocox.peer.chain.summary import ChainRound, token_seconds_by_peer, tokens_by_peer

logger = logging.getLogger(__name__)

FETCH_LIMIT_S = 20.0
HOLDERS_ASKED = 6  # for one record
# What a run's records may have follows from its model, whose code takes 100 MB; HeaderClient bounds
# what is taken of each.
MOST_BYTES = 1 << 31

STAGES_AT_ONCE = 4
DETAILED = 64  # rounds of a walk that keep their members one by one
MAX_KNOWN = 20_000
MAX_GAPS = 8
RATE_WINDOW_S = 3600.0
MAX_TIMES = 64
USUAL_TIMES = 9  # of the newest rounds, for how long one usually takes


@dataclass(frozen=True)
class Order:
    """A walk of a stage's chain back from a record: `stop` are the digests that end it, `holders`
    the peers to ask, the best first.
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


@dataclass(kw_only=True)
class StageRounds:
    """One stage's chain: sums for good, details of the newest rounds. A record counts once, however
    often it is met; when the chain turns out to go on elsewhere, what the abandoned records added
    is taken away again.

    tokens, token_seconds: by peer id. gaps: digests of records that nobody gave, and how often they
    were asked for again. head: the newest round. rounds: of the chain; records_seen: the same for a
    counter, which never falls, not even when the chain goes on elsewhere.
    paced_from: rounds from before it say nothing of the pace, seconds since the epoch.
    walked_at: when a walk from the head brought something last.
    times: when rounds were seen to come, by their number; those that were there before have none.
    known: the round of each record that is counted, by digest. recent: the newest ones by number.
    """

    tokens: Counter[str] = field(default_factory=Counter[str])
    token_seconds: Counter[str] = field(default_factory=Counter[str])
    gaps: dict[str, int] = field(default_factory=dict[str, int])
    head: ChainRound | None = None
    rounds: int = 0
    records_seen: int = 0
    paced_from: float = 0.0
    walked_at: float = 0.0
    times: dict[int, float] = field(default_factory=dict[int, float])
    known: dict[str, int] = field(default_factory=dict[str, int])
    recent: dict[int, ChainRound] = field(default_factory=dict[int, ChainRound])

    @property
    def chain_tokens(self) -> int:
        """Of all rounds up to the newest one."""
        return 0 if self.head is None else self.head.chain_tokens

    @property
    def progress_at(self) -> float | None:
        """When the newest round was seen to come."""
        return self.times[max(self.times)] if self.times else None

    def add(self, walk: Walk, now: float, root: str) -> None:
        """Take in a walk from the head or from a gap; root: what stands before the first record."""
        if not walk.rounds:
            if walk.start in self.gaps:
                self.gaps[walk.start] += 1
            return
        from_head = walk.start not in self.gaps
        follows = from_head and self.records_seen > 0
        live = follows and came_now(len(walk.rounds), now - self.walked_at)
        if walk.connected and from_head:
            if self.rounds and walk.end != root and walk.end not in self.known:
                return  # it began before the operator went back, and ends where nothing counts
            last = -1 if walk.end == root else self.known.get(walk.end, -1)
            self._take_away(last, {each.digest for each in walk.rounds})
        for each in reversed(walk.rounds):
            if each.digest in self.known:
                continue
            self.known[each.digest] = each.round
            self.recent[each.round] = each
            self.rounds += 1
            self.records_seen += 1
            self.tokens.update(tokens_by_peer([each]))
            self.token_seconds.update(token_seconds_by_peer([each]))
            if live:
                self.times[each.round] = now
        self.tokens.update(walk.folded)
        self.token_seconds.update(walk.folded_seconds)
        self.gaps.pop(walk.start, None)
        if not walk.connected and len(self.gaps) < MAX_GAPS:
            self.gaps[walk.end] = 0
        if from_head:
            self.head, self.walked_at = walk.rounds[0], now
        self._thin()

    def go_back(self, last: int, now: float) -> None:
        """Take away the rounds after this one, as the operator did; the pace begins anew."""
        self.paced_from = now
        self._take_away(last)
        older = [digest for digest, number in self.known.items() if number > last]
        for digest in older:  # of these nothing but their number is known
            del self.known[digest]
        self.rounds -= len(older)
        self.times = {number: at for number, at in self.times.items() if number <= last}
        if self.recent or last < 0:
            self.head = self.recent[max(self.recent)] if self.recent else None

    def per_hour(self, now: float) -> float | None:
        """Rounds an hour, from those that were seen to come; None while there are too few."""
        begin = max(now - RATE_WINDOW_S, self.paced_from)
        times = self._times_since(begin)
        if len(times) < 2 or now <= times[0]:  # several may have come at once, just now
            return None
        return (len(times) - 1) / (now - times[0]) * 3600

    @property
    def usual_s(self) -> float:
        """Median time between two of the last rounds that were seen to come, 0 while unknown."""
        times = self._times_since(self.paced_from)[-USUAL_TIMES:]
        steps = [late - early for early, late in pairwise(times)]
        return median(steps) if steps else 0.0

    def _times_since(self, begin: float) -> list[float]:
        return [at for _, at in sorted(self.times.items()) if at >= begin]

    def _take_away(self, last: int, kept: Collection[str] = ()) -> None:
        """Uncount the rounds after this one, but for those with these digests."""
        for number, each in list(self.recent.items()):
            if number <= last or each.digest in kept:
                continue
            del self.recent[number]
            self.known.pop(each.digest, None)
            self.rounds -= 1
            self.tokens.subtract(tokens_by_peer([each]))
            self.token_seconds.subtract(token_seconds_by_peer([each]))
            self.times.pop(number, None)

    def _thin(self) -> None:
        for table, limit in ((self.times, MAX_TIMES), (self.recent, DETAILED)):
            for number in sorted(table)[:-limit]:
                del table[number]
        if len(self.known) > MAX_KNOWN:
            newest = sorted(self.known.items(), key=lambda item: -item[1])[:MAX_KNOWN]
            self.known = dict(newest)
        self.tokens, self.token_seconds = +self.tokens, +self.token_seconds  # none below one


def in_order_of_asking(
    claims: Mapping[str, ClaimRecord],
    digest: str,
    *,
    bootstraps: Collection[str],
    dial_out: Collection[str],
) -> list[str]:
    """The peers to ask for this record and those before it, the best first.

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
        self._asking: Future[ToldHistory] | None = None
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

        witness: its word counts first.
        """
        if self._asking is None and self.running:
            peers, run, silent = sorted(self._bootstraps), self._run_id, self._silent
            asked = ask_history(self._client(0), peers, run, manifest, after, silent, witness)
            self._asking = asyncio.run_coroutine_threadsafe(asked, self.loop)

    def take_history(self) -> ToldHistory | None:
        """What they said since the last call; None while nothing was asked, or is not answered."""
        if self._asking is None or not self._asking.done():
            return None
        asked, self._asking = self._asking, None
        return asked.result()

    def _client(self, stage: int) -> Client:
        return Client(
            p2p=self.p2p,
            namespace=averaging_prefix(self._run_id, stage),
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
