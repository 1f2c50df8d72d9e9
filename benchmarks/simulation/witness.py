"""The archive of the operator's bootstrap, as far as peers believe it: what it claims of each
stage's chain, by the product's rules of whom to believe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.simulation.averaging import RECORD_BYTES, SimulatedLog
from benchmarks.simulation.clock import Timeline
from benchmarks.simulation.dht import STORE_TRIPS, SimulatedDHT
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.chain.archive import TRIED_AT_ONCE
from dilocox.peer.chain.archive_keeper import LOOK_S
from dilocox.peer.chain.chain_client import Reached
from dilocox.peer.chain.fork_choice import ClaimBook, Trust, holders

BOOTSTRAP = "bootstrap"


@dataclass
class Keeping:
    """What is kept of one stage; it answers as a peer's averaging process does."""

    log: SimulatedLog
    trust: Trust
    book: ClaimBook
    answers: bool = True


class SimulatedWitness:
    """The bootstrap's archive of all stages; it is on side 0 of every partition."""

    def __init__(
        self,
        timeline: Timeline,
        dht: SimulatedDHT,
        manifest: Manifest,
        run: str,
        log_of: Callable[[str], SimulatedLog | None],
        revision: Callable[[], int],
    ):
        """log_of: what a peer gives that can be reached. revision: of the manifest, by now."""
        self._timeline = timeline
        self._dht = dht
        self._run = run
        self._log_of = log_of
        self._revision = revision
        self._lifetime_s = manifest.deadlines.record_lifetime_s
        self.stages = [self._keeping(manifest.root) for _ in range(manifest.stages)]
        timeline.after(LOOK_S, self._tick)

    def _keeping(self, root: str) -> Keeping:
        lifetime_s, now = self._lifetime_s, lambda: self._timeline.now
        trust = Trust(me=BOOTSTRAP, witness=BOOTSTRAP, record_lifetime_s=lifetime_s, now=now)
        book = ClaimBook(record_lifetime_s=lifetime_s, now=now)
        return Keeping(SimulatedLog(root), trust, book)

    def _tick(self) -> None:
        self._timeline.after(LOOK_S, self._tick)
        now, takes = self._timeline.now, self._dht.network.takes(STORE_TRIPS)
        for stage, kept in enumerate(self.stages):
            key = claim_key(self._run, stage)
            self._follow(kept, SwarmView(me=BOOTSTRAP, claims=self._dht.found(key, now, 0)))
            head = kept.log.head()
            last = kept.log.header(head.round)
            if last is not None:
                claim = ClaimRecord(
                    round=head.round,
                    digest=head.digest,
                    tokens=last.tokens,
                    chain_tokens=head.chain_tokens,
                    record_bytes=RECORD_BYTES,
                    revision=self._revision(),
                )
                lives_until = now + takes + self._lifetime_s
                self._dht.store(BOOTSTRAP, key, claim, now + takes, lives_until, 0)

    def _follow(self, kept: Keeping, view: SwarmView) -> None:
        log, head = cast(Any, kept.log), kept.log.head()
        view = kept.trust.counting(view, log, head)
        for claim in kept.book.ahead(view, head)[:TRIED_AT_ONCE]:
            found = (self._log_of(peer) for peer in holders(view, claim.digest))
            having = (each for each in found if each and each.find(claim.digest) is not None)
            theirs = next(having, None)
            if theirs is None:
                kept.book.failed(claim.digest)
                continue
            kept.book.came(claim.digest)
            shared = kept.log.after_common(theirs)
            if shared < len(kept.log.chain) and not self._leaves(kept, claim, theirs, shared):
                kept.book.ignore(claim.digest)
                continue
            end = [digest for digest, _ in theirs.chain].index(claim.digest)
            kept.log.chain = theirs.chain[: end + 1]
            return

    def _leaves(self, kept: Keeping, claim: ClaimRecord, theirs: SimulatedLog, shared: int) -> bool:
        reach = Reached(
            appended=(),
            fork_round=kept.log.chain[shared - 1][1].round if shared else -1,
            fork_digest=theirs.chain[shared][0],
            chain_tokens=claim.chain_tokens,
            too_far=False,
        )
        return kept.trust.wins(claim.digest, reach, cast(Any, kept.log), kept.log.head())
