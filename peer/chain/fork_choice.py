"""Which claims of a chain are believed, whom to ask, who lied, and which of two chains wins.

Anybody may claim anything. What is claimed is asked for, the most tokens first. A claim whose
record nobody gives for a record lifetime is presumed void: its commit may have failed, and that of
a stranger may never have been. A peer that is busy probably has the record, so it is believed for
longer, but not for ever. A peer whose state was wrong is asked again only where nobody else has
one.

One book serves a peer (averaging/follower.py), another one each stage of an archive (archive.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import BUSY_LIFETIMES
from dilocox.dht.swarm_view import SwarmView

if TYPE_CHECKING:
    from dilocox.peer.chain.chain_client import Reached
    from dilocox.peer.chain.store import RoundLog, Tip

MAX_NOTED = 1000  # digests or peers


class ClaimBook:
    """What is known of the claims for one stage's chain, and of those who make them."""

    def __init__(self, *, record_lifetime_s: float, now: Callable[[], float]):
        self._record_lifetime_s = record_lifetime_s
        self._now = now
        # by digest, and whether its holders were only busy: since when it could not be had
        self._failing: dict[tuple[str, bool], float] = {}
        self._ignored: set[str] = set()
        self._liars: set[str] = set()

    # ---- claims ----------------------------------------------------------------------------------
    def ahead(self, view: SwarmView, head: Tip) -> list[ClaimRecord]:
        """What others claim beyond our chain or against it, each digest once, the most tokens
        first.
        """
        found, passed = list[ClaimRecord](), set(self._ignored)
        while best := view.best_claim(head.chain_tokens, head.digest, passed):
            found.append(best[1])
            passed.add(best[1].digest)
        return found

    def best(self, view: SwarmView, head: Tip) -> ClaimRecord | None:
        found = view.best_claim(head.chain_tokens, head.digest, self._ignored)
        return None if found is None else found[1]

    def believed(self, claim: ClaimRecord) -> bool:
        """Whether it is not one of those that nobody could prove."""
        return claim.digest not in self._ignored

    def came(self, digest: str) -> None:
        """Records came from those who claim this: nobody is doubted, even if some are missing."""
        for busy in (False, True):
            self._failing.pop((digest, busy), None)

    def failed(self, digest: str, *, busy: bool = False) -> bool:
        """It could not be had this time; whether it is ignored from now on."""
        since = self._failing.get((digest, busy))
        if since is None:
            if len(self._failing) >= MAX_NOTED:
                self._failing.clear()
            self._failing[digest, busy] = self._now()
            return False
        if self._now() - since <= (BUSY_LIFETIMES if busy else 1) * self._record_lifetime_s:
            return False
        self.ignore(digest)
        return True

    def failing(self, digest: str) -> bool:
        """Whether it could not be had the last time."""
        return any((digest, busy) in self._failing for busy in (False, True))

    def ignore(self, digest: str) -> None:
        """It is void, or its chain lost against ours."""
        _note(self._ignored, digest)
        self.came(digest)

    # ---- those who hold states -------------------------------------------------------------------
    def lied(self, peer: str) -> bool:
        """Its state was wrong; whether that had happened before."""
        before = peer in self._liars
        _note(self._liars, peer)
        return before

    def donors(self, peers: Collection[str]) -> list[str]:
        """Those of them to ask for a state: liars only where there is nobody else."""
        return [peer for peer in peers if peer not in self._liars] or list(peers)


def holders(view: SwarmView, digest: str) -> list[str]:
    """Those who claim this record: one that is out of reach must not hide the others."""
    return [
        peer for peer, claim in view.claims.items() if peer != view.me and claim.digest == digest
    ]


def wins(reach: Reached, log: RoundLog, head: Tip) -> bool:
    """Whether the chain that was walked beats ours since the fork: by more tokens, or as many and
    the smaller digest of its first record.

    reach: of a walk that found a fork. head: of our log.
    """
    assert reach.fork_round is not None
    following = [number for number in log.rounds() if number > reach.fork_round]
    second = log.header(following[1]) if len(following) > 1 else None
    first = head.digest if second is None else second.previous
    return (-reach.chain_tokens, reach.fork_digest) < (-head.chain_tokens, first)


def _note(noted: set[str], name: str) -> None:
    if len(noted) >= MAX_NOTED:
        noted.clear()
    noted.add(name)
