"""The archives of bootstraps, as far as peers believe them: what they claim of each stage's chain,
by the product's rules of whom to believe. The operator's is the witness, the other one its copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.simulation.chain import RECORD_BYTES, SimulatedLog
from benchmarks.simulation.clock import Timeline
from benchmarks.simulation.dht import STORE_TRIPS, SimulatedDHT
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.chain.archive import RECORDS_AFTER_STATE, TRIED_AT_ONCE
from dilocox.peer.chain.archive_keeper import LOOK_S
from dilocox.peer.chain.chain_client import Reached
from dilocox.peer.chain.fork_choice import ClaimBook, Trust, holders
from dilocox.peer.chain.store import Tip

BOOTSTRAP, COPY = "bootstrap", "copy"


@dataclass
class Keeping:
    """What is kept of one stage; it answers as a peer's averaging process does."""

    stage: int
    log: SimulatedLog
    trust: Trust
    book: ClaimBook
    answers: bool = True
    behind: bool = False
    fetching: bool = False

    @property
    def has_state(self) -> bool:
        """It makes the first one when there are more records than this."""
        return len(self.log.chain) > RECORDS_AFTER_STATE[0]


class SimulatedArchive:
    """A bootstrap's archive of all stages; it is on side 0 of every partition."""

    def __init__(
        self,
        me: str,
        timeline: Timeline,
        dht: SimulatedDHT,
        manifest: Manifest,
        run: str,
        log_of: Callable[[str, int], SimulatedLog | None],
        revision: Callable[[], int],
        fetch_s: float,
    ):
        """log_of: what a peer gives that can be reached. revision: of the manifest, by now.
        fetch_s: for a record; until all of a walk are here, it claims what it had.
        """
        self.me = me
        self._timeline = timeline
        self._dht = dht
        self._run = run
        self._log_of = log_of
        self._revision = revision
        self._fetch_s = fetch_s
        self._lifetime_s = manifest.deadlines.record_lifetime_s
        self.stages = [self._keeping(n, manifest.root) for n in range(manifest.stages)]
        timeline.after(LOOK_S, self._tick)

    def _keeping(self, stage: int, root: str) -> Keeping:
        lifetime_s, now = self._lifetime_s, lambda: self._timeline.now
        trust = Trust(me=self.me, witness=BOOTSTRAP, record_lifetime_s=lifetime_s, now=now)
        return Keeping(stage, SimulatedLog(root), trust, ClaimBook(trust))

    def _tick(self) -> None:
        self._timeline.after(LOOK_S, self._tick)
        now, takes = self._timeline.now, self._dht.network.takes(STORE_TRIPS)
        for stage, kept in enumerate(self.stages):
            key = claim_key(self._run, stage)
            self._follow(kept, SwarmView(me=self.me, claims=self._dht.found(key, now, 0)))
            claim = self._claim(kept)
            if claim is not None:
                lives_until = now + takes + self._lifetime_s
                self._dht.store(self.me, key, claim, now + takes, lives_until, 0)

    def _claim(self, kept: Keeping) -> ClaimRecord | None:
        """What it says of a stage; a liar says something else (liars.py)."""
        head = kept.log.head()
        last = kept.log.header(head.round)
        if last is None or kept.behind:
            return None
        return ClaimRecord(
            round=head.round,
            digest=head.digest,
            chain_tokens=head.chain_tokens,
            record_bytes=RECORD_BYTES,
            revision=self._revision(),
            run_round=max(each.log.head().round for each in self.stages),
        )

    def _follow(self, kept: Keeping, view: SwarmView) -> None:
        if kept.fetching:
            return
        log, head = cast(Any, kept.log), kept.log.head()
        view = kept.trust.counting(view, log, head)
        self._take(kept, view, head)
        # who is not the witness says nothing of a chain that is behind
        behind = kept.book.best(view, kept.log.head()) is not None
        kept.behind = behind and not kept.trust.is_witness

    def _take(self, kept: Keeping, view: SwarmView, head: Tip) -> None:
        for claim in kept.book.ahead(view, head)[:TRIED_AT_ONCE]:
            found = (self._log_of(peer, kept.stage) for peer in holders(view, claim.digest))
            having = (each for each in found if each and each.find(claim.digest) is not None)
            theirs = next((log.up_to(claim.digest) for log in having), None)
            shared = 0 if theirs is None else kept.log.after_common(theirs)
            if theirs is None or not all(record.sound for _, record in theirs.chain[shared:]):
                kept.book.failed(claim.digest, ConnectionError("nobody gives it"))
                continue
            kept.book.came(claim.digest)
            if shared < len(kept.log.chain) and not self._leaves(kept, claim, theirs, shared):
                kept.book.ignore(claim.digest)
                continue
            self._fetch(kept, theirs, len(theirs.chain) - shared)
            return

    def _fetch(self, kept: Keeping, theirs: SimulatedLog, records: int) -> None:
        if not self._fetch_s:
            kept.log.chain = theirs.chain
            return

        def fetched() -> None:
            kept.log.chain, kept.fetching = theirs.chain, False

        kept.fetching = True
        self._timeline.after(records * self._fetch_s, fetched)

    def _leaves(self, kept: Keeping, claim: ClaimRecord, theirs: SimulatedLog, shared: int) -> bool:
        reach = Reached(
            fork_round=kept.log.chain[shared - 1][1].round if shared else -1,
            fork_digest=theirs.first_after(shared) or claim.digest,
            chain_tokens=theirs.head().chain_tokens,
            too_far=False,
        )
        return kept.trust.wins(claim.digest, reach, cast(Any, kept.log), kept.log.head())
