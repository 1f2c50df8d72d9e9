"""The votes of one attempt as a member holds them: its own, signed and on disk, and those it
heard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from dilocox.dht.identity import Identity, peer_id_of, verify
from dilocox.peer.rounds.record import RecordRefused, RoundRecord
from dilocox.peer.rounds.vote import (
    Ballot,
    Certificate,
    Decision,
    SignedVote,
    StatedAbort,
    Verdict,
    Vote,
    VoteRefused,
    certificate,
    check_certificate,
    decide,
    exclusion,
)


class Ballots:
    """Collects votes on one ballot; the decision follows from `vote.decide` alone."""

    def __init__(
        self, *, identity: Identity, ballot: Ballot, save_vote: Callable[[int, int, bytes], None]
    ):
        """save_vote: puts a vote of a round and attempt on disk, before anybody hears of it."""
        self.ballot = ballot
        self._identity = identity
        self._save_vote = save_vote
        self._held: dict[bytes, SignedVote] = {}
        self._decision = Decision(verdict=Verdict.UNDECIDED)

    def cast(self, digest: str | None, missed: tuple[str, ...]) -> bytes:
        """Sign the one final vote, put it on disk, and return its bytes."""
        vote = Vote(voter=self._identity.peer_id, digest=digest, missed=missed)
        signed = self.ballot.sign(vote, self._identity.public_key, self._identity.sign)
        data = signed.to_bytes()
        self._save_vote(self.ballot.round, self.ballot.attempt, data)
        self._hold(data, signed)
        return data

    def receive(self, data: bytes) -> None:
        """Take a vote that arrived; VoteRefused if it does not count."""
        if data not in self._held:
            self._hold(data, self.ballot.accept(data, verify, peer_id_of))

    @property
    def decision(self) -> Decision:
        """What the votes at hand decide."""
        return self._decision

    def voters(self) -> set[str]:
        """The members whose vote is at hand."""
        return {signed.vote.voter for signed in self._held.values()}

    def voters_for(self, digest: str) -> set[str]:
        """The members who voted for this record."""
        return {s.vote.voter for s in self._held.values() if s.vote.digest == digest}

    def all_bytes(self) -> list[bytes]:
        """Every vote at hand, to pass on to a member that asks."""
        return list(self._held)

    def bytes_of(self, voters: Collection[str]) -> list[bytes]:
        """The votes of these members, to pass on."""
        return [data for data, signed in self._held.items() if signed.vote.voter in voters]

    def missed_by_several(self) -> set[str]:
        """The members that at least two others missed, as their votes say."""
        votes = {(s.vote.voter, peer) for s in self._held.values() for peer in s.vote.missed}
        return {peer for peer, count in Counter(peer for _, peer in votes).items() if count > 1}

    def certificate(self) -> bytes:
        """The winning votes; ValueError where nothing is committed."""
        digest = self._decision.digest or ""
        return certificate(self.ballot, self._held.values(), digest).to_bytes()

    def abort(self) -> bytes:
        """This member's own signed abort, for the members of a repeated attempt; empty if none."""
        me = self._identity.peer_id
        for signed in self._held.values():
            if signed.vote.voter == me and signed.vote.digest is None:
                return StatedAbort.of(self.ballot, signed).to_bytes()
        return b""

    def _hold(self, data: bytes, signed: SignedVote) -> None:
        self._held[data] = signed
        votes = [held.vote for held in self._held.values()]
        self._decision = decide(self.ballot.members, votes)


def excluded_by(
    aborts: Iterable[bytes], members: Collection[str], *, run: str, stage: int, round_number: int
) -> list[str]:
    """Whom a repeated attempt leaves out, from the signed abort that each of its members states.

    Aborts that are malformed, unsigned or of another round do not count; all members state theirs
    to all, so all reach the same set. Votes of those that are not there do not matter: they are in
    no pair of members. `members`: of the repeated attempt; those without an abort were silent.
    """
    votes: dict[tuple[str, tuple[str, ...]], Vote] = {}
    for data in aborts:
        try:
            stated = StatedAbort.from_bytes(data)
            stated.check(run, stage, round_number, verify, peer_id_of)
        except VoteRefused:
            continue
        vote = stated.signed.vote
        votes[vote.voter, vote.missed] = vote
    silent = set(members) - {voter for voter, _ in votes}
    return list(exclusion(votes.values(), silent))


def check_record_certificate(record: RoundRecord, digest: str, data: bytes) -> None:
    """Refuse (RecordRefused) a record that no majority of its group committed."""
    try:
        check_certificate(
            Certificate.from_bytes(data),
            run=record.run,
            stage=record.stage,
            round_number=record.round,
            digest=digest,
            contributors=[member.peer for member in record.members],
            verify=verify,
            peer_id_of=peer_id_of,
        )
    except VoteRefused as error:
        raise RecordRefused(f"round {record.round}: {error}") from error
