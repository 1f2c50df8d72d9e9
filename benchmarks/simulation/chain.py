"""A stage's records without numbers, and the log that one peer or archive keeps of them: chained by
real digests, with real members, tokens and voters, but no means.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dilocox.peer.chain.store import Tip
from dilocox.peer.rounds.record import Contribution, RoundFacts
from dilocox.peer.rounds.standing import Standing, most_tokens, voters_before
from dilocox.peer.rounds.vote_count import Verdict, Vote, decide

RECORD_BYTES = 1_000_000
NO_CAP = 1 << 62  # tokens: a peer of the simulation states no more than it learnt


@dataclass(frozen=True, kw_only=True)
class SimulatedRecord:
    """What control code reads of a RoundRecord. members: those whose values are in the means.
    certificate: who voted for it, which is no part of what it says.
    """

    stage: int
    round: int
    previous: str
    members: tuple[Contribution, ...]
    chain_tokens: int
    standings: tuple[Standing, ...]
    window: tuple[RoundFacts, ...]
    next_inner_steps: int
    rules: int = 0
    next_ranks: tuple[int, ...] = ()
    certificate: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def tokens(self) -> int:
        """The tokens behind this record."""
        return sum(member.tokens for member in self.members)

    @property
    def digest(self) -> str:
        """The sha256 of what it says."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        return self.members

    @property
    def voters(self) -> frozenset[str]:
        return voters_before(self.standings, {each.peer: 1.0 for each in self.members})

    def member(self, peer: str) -> Contribution | None:
        return next((member for member in self.members if member.peer == peer), None)

    @property
    def sound(self) -> bool:
        """What RecordCheck asks of one from outside: its voters made it, and nobody's tokens are
        more than they can be."""
        votes = [Vote(voter=peer, digest=self.digest) for peer in self.certificate]
        tokens = {each.peer: each.tokens for each in self.members}
        most = most_tokens(tokens, self.voters, cap=NO_CAP)
        certified = decide(self.voters, votes).verdict is Verdict.COMMITTED
        return certified and all(tokens[peer] <= most[peer] for peer in tokens)


class SimulatedLog:
    """The chain of one peer's stage, in memory: as RoundLog."""

    def __init__(self, root: str):
        self._root = Tip(round=-1, digest=root, chain_tokens=0, record_bytes=0)
        self.chain: list[tuple[str, SimulatedRecord]] = []

    def head(self) -> Tip:
        if not self.chain:
            return self._root
        digest, record = self.chain[-1]
        return Tip(
            round=record.round,
            digest=digest,
            chain_tokens=record.chain_tokens,
            record_bytes=RECORD_BYTES,
        )

    @property
    def digests(self) -> list[str]:
        """Of all records."""
        return [digest for digest, _ in self.chain]

    def rounds(self) -> list[int]:
        """The rounds of all records."""
        return [record.round for _, record in self.chain]

    def header(self, number: int) -> SimulatedRecord | None:
        """The record of a round."""
        return next((each for _, each in reversed(self.chain) if each.round == number), None)

    read = header

    def find(self, digest: str) -> int | None:
        """The round of a record, None if it is not here."""
        if digest == self._root.digest:
            return -1
        return next((each.round for found, each in reversed(self.chain) if found == digest), None)

    def append(self, record: SimulatedRecord) -> bool:
        """Add the next record; whether it was the next one."""
        head = self.head()
        if record.previous != head.digest or record.round <= head.round:
            return False
        self.chain.append((record.digest, record))
        return True

    def up_to(self, digest: str) -> SimulatedLog | None:
        """This chain as far as a record of it; None if it is not here."""
        number = self.find(digest)
        if number is None:
            return None
        found = SimulatedLog(self._root.digest)
        found.chain = [each for each in self.chain if each[1].round <= number]
        return found

    def first_after(self, records: int) -> str:
        """The digest of the first record after so many, empty if there is none."""
        return self.chain[records][0] if records < len(self.chain) else ""

    def after_common(self, other: SimulatedLog) -> int:
        """How many records from the first on two chains have in common."""
        shared = 0
        for (mine, _), (theirs, _) in zip(self.chain, other.chain, strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared
