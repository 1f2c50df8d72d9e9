"""Signed votes: one member's own and those it heard of an attempt, and what they prove to others.

A vote is signed together with everything that identifies its attempt, members included, so it
counts for that group alone. The winning votes are the record's *certificate*: it is kept beside the
record (in no digest, since members may hold different votes of the same majority), and no record is
taken from anyone without one. A member puts its vote on disk before it leaves, so that a restarted
peer cannot cast another.

Everything that arrives is untrusted; what is refused raises VoteRefused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from pydantic import StrictBytes, StrictInt, StrictStr, TypeAdapter

from dilocox.dht.identity import Identity, peer_id_of, verify
from dilocox.dht.wire import Malformed, Many, checked, pack, unpack
from dilocox.peer.rounds.record import SHA256, RecordRefused, RoundRecord
from dilocox.peer.rounds.vote_count import (
    MAX_MEMBERS,
    Decision,
    Verdict,
    Vote,
    choices,
    commits,
    decide,
    exclusion,
)

VOTE_DOMAIN = "dilocox vote 2"  # so that a signature over a vote can be taken for nothing else
MAX_VOTE_BYTES = 1 << 16
MAX_CERTIFICATE_BYTES = 1 << 20

T = TypeVar("T")
_Names = Many[StrictStr]
# voter, digest, missed, public key, signature
_VoteFields = tuple[StrictStr, StrictStr | None, _Names, StrictBytes, StrictBytes]
# run, stage, round, attempt, group, members
_BallotFields = tuple[StrictStr, StrictInt, StrictInt, StrictInt, StrictBytes, _Names]
_VOTE = TypeAdapter(_VoteFields)
# attempt, group, sha256 of the members, the vote
_ABORT = TypeAdapter(tuple[StrictInt, StrictBytes, StrictBytes, _VoteFields])
_CERTIFICATE = TypeAdapter(tuple[_BallotFields, Many[_VoteFields]])


class VoteRefused(ValueError):
    """A vote or a certificate that does not count."""


@dataclass(frozen=True, kw_only=True)
class SignedVote:
    """A vote as it travels: with its voter's public key and signature."""

    vote: Vote
    public_key: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        return pack(self.fields())

    def fields(self) -> list[object]:
        """This vote as plain values, in their order on the wire."""
        vote = self.vote
        return [vote.voter, vote.digest, list(vote.missed), self.public_key, self.signature]

    def check_signature(self, attempt: Sequence[object], members_sha256: bytes) -> None:
        """Raise VoteRefused unless its voter signed it for this attempt."""
        voter = self.vote.voter
        if peer_id_of(self.public_key) != voter:
            raise VoteRefused(f"the vote of {voter} comes with another peer's key")
        data = signed_bytes(attempt, members_sha256, self.vote)
        if not verify(self.public_key, data, self.signature):
            raise VoteRefused(f"{voter} did not sign this vote for this attempt")


def signed_bytes(attempt: Sequence[object], members_sha256: bytes, vote: Vote) -> bytes:
    """The canonical bytes that a voter signs. attempt: run, stage, round, attempt, group."""
    choice = [vote.voter, vote.digest, list(vote.missed)]
    return pack([VOTE_DOMAIN, *attempt, members_sha256, *choice])


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What is voted on: one attempt of one group. All its members build the same one."""

    run: str
    stage: int
    round: int
    attempt: int
    group: bytes
    """The id of the gathered group."""
    members: tuple[str, ...]
    """The gathered members, including those that die later; sorted, each once."""
    voters: frozenset[str]
    """Those of them whose votes count, as the record before says."""

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ValueError("the members of a ballot are a sorted list of different peers")
        if len(self.members) > MAX_MEMBERS:
            raise ValueError(f"{len(self.members)} members; a group has at most {MAX_MEMBERS}")

    @property
    def facts(self) -> list[object]:
        """What identifies the attempt, in its order on the wire; its members follow."""
        return [self.run, self.stage, self.round, self.attempt, self.group]

    @cached_property
    def members_sha256(self) -> bytes:
        return hashlib.sha256(pack(list(self.members))).digest()

    def sign(self, vote: Vote, identity: Identity) -> SignedVote:
        """One's own vote, signed; VoteRefused if no member would accept it."""
        self._check_choice(vote)
        signature = identity.sign(signed_bytes(self.facts, self.members_sha256, vote))
        return SignedVote(vote=vote, public_key=identity.public_key, signature=signature)

    def check(self, signed: SignedVote) -> None:
        """Raise VoteRefused unless this is a well-formed vote of this attempt by its voter."""
        self._check_choice(signed.vote)
        signed.check_signature(self.facts, self.members_sha256)

    def _check_choice(self, vote: Vote) -> None:
        members = set(self.members)
        if vote.voter not in members:
            raise VoteRefused(f"{vote.voter} is no member of this group")
        if vote.digest is not None and not SHA256.fullmatch(vote.digest):
            raise VoteRefused(f"{vote.voter} votes for what is no sha256")
        _check_sorted(vote)
        if not set(vote.missed) <= members - {vote.voter}:
            raise VoteRefused(f"{vote.voter} missed peers that are no other members")
        if vote.digest is not None and vote.missed:
            raise VoteRefused(f"{vote.voter} votes for a digest, yet missed peers")


class Ballots:
    """Collects votes on one ballot; the decision follows from `decide` (vote_count.py) alone."""

    def __init__(
        self, *, identity: Identity, ballot: Ballot, save_vote: Callable[[int, int, bytes], None]
    ):
        """save_vote: puts a vote of a round and attempt on disk, before anybody hears of it."""
        self.ballot = ballot
        self.decision = Decision(verdict=Verdict.UNDECIDED)  # by the votes at hand
        self.identity = identity
        self._save_vote = save_vote
        self._held: dict[bytes, SignedVote] = {}

    def sign(self, digest: str | None, missed: tuple[str, ...]) -> bytes:
        """Sign the one final vote, put it on disk, which may take seconds, and return its bytes. It
        counts once it is received.
        """
        vote = Vote(voter=self.identity.peer_id, digest=digest, missed=missed)
        data = self.ballot.sign(vote, self.identity).to_bytes()
        self._save_vote(self.ballot.round, self.ballot.attempt, data)
        return data

    def receive(self, data: bytes) -> None:
        """Take a vote that arrived; VoteRefused if it does not count.

        Of one voter no more are held than show that it voted for two things: a member can sign any
        number of aborts, each with others that it missed.
        """
        if data in self._held:
            return
        signed = _read_vote(data)
        voter, digest = signed.vote.voter, signed.vote.digest
        before = [each.vote.digest for each in self._held.values() if each.vote.voter == voter]
        if digest in before or len(before) == 2:
            return  # looking at the signature of each would take all the time
        self.ballot.check(signed)
        self._held[data] = signed
        self.decision = decide(self.ballot.voters, (held.vote for held in self._held.values()))

    def voted(self) -> set[str]:
        return {signed.vote.voter for signed in self._held.values()}

    def voters_for(self, digest: str) -> set[str]:
        return {s.vote.voter for s in self._held.values() if s.vote.digest == digest}

    def all_bytes(self) -> list[bytes]:
        return list(self._held)

    def bytes_of(self, voters: Collection[str]) -> list[bytes]:
        return [data for data, signed in self._held.items() if signed.vote.voter in voters]

    def missed_by_several(self) -> set[str]:
        """The members that at least two others missed, as votes that count say."""
        votes = {(vote.voter, peer) for vote in self._counting() for peer in vote.missed}
        return {peer for peer, count in Counter(peer for _, peer in votes).items() if count > 1}

    def blamed(self) -> tuple[str, ...]:
        """Members that a repeated attempt would leave out, by the votes at hand; never this one."""
        votes = self._counting()
        silent = set(self.ballot.members) - {vote.voter for vote in votes}
        found = exclusion(votes, silent, self.ballot.voters)
        return tuple(peer for peer in found if peer != self.identity.peer_id)

    def _counting(self) -> list[Vote]:
        votes = (signed.vote for signed in self._held.values())
        return [vote for vote in votes if vote.voter in self.ballot.voters]

    def certificate(self) -> bytes:
        """The winning votes; ValueError where nothing is committed."""
        return certificate(self.ballot, self._held.values(), self.decision.digest or "")

    def missed(self) -> tuple[str, ...]:
        """The members that this one missed, as its own abort says."""
        own = (each.vote for each in self._held.values())
        aborts = (vote for vote in own if vote.voter == self.identity.peer_id and not vote.digest)
        return next((vote.missed for vote in aborts), ())

    def abort(self) -> bytes:
        """This member's own signed abort, for the members of a repeated attempt; empty if none.

        Those need not know the members of the first one to see that this member signed it.
        """
        ballot = self.ballot
        for signed in self._held.values():
            if signed.vote.voter == self.identity.peer_id and signed.vote.digest is None:
                facts = [ballot.attempt, ballot.group, ballot.members_sha256, signed.fields()]
                return pack(facts)
        return b""


def excluded_by(
    aborts: Iterable[bytes],
    members: Collection[str],
    voters: Collection[str],
    known: Collection[str] = (),
    *,
    run: str,
    stage: int,
    round_number: int,
) -> list[str]:
    """The members that a repeated attempt leaves out, by the signed aborts its members state.

    Aborts that are malformed, unsigned, of another round or of members without a vote do not
    count; all members state theirs to all, so all reach the same set. Votes of those that are not
    there do not matter: they are in no pair of members. `members`: of the repeated attempt; those
    without an abort that counts were silent. `voters`: of these. known: others that the last
    record remembers. Nothing of anybody else counts, or two could name what is no peer.
    """
    known = {*members, *known}
    votes: dict[tuple[str, tuple[str, ...]], Vote] = {}
    for data in aborts:
        try:
            vote = _read_abort(data, [run, stage, round_number])
        except VoteRefused:
            continue
        if vote.voter in voters:
            missed = tuple(peer for peer in vote.missed if peer in known)
            votes[vote.voter, missed] = replace(vote, missed=missed)
    silent = set(members) - {voter for voter, _ in votes}
    return list(exclusion(votes.values(), silent, voters))


def _read_abort(data: bytes, of_round: list[object]) -> Vote:
    attempt, group, members_sha256, voted = _read(data, MAX_VOTE_BYTES, _ABORT, "an abort")
    signed = _signed_vote(voted)
    vote = signed.vote
    if vote.digest is not None or vote.voter in vote.missed:
        raise VoteRefused(f"{vote.voter} states what is no abort")
    _check_sorted(vote)
    signed.check_signature([*of_round, attempt, group], members_sha256)
    return vote


def certificate(ballot: Ballot, votes: Iterable[SignedVote], digest: str) -> bytes:
    """The proof that a digest was committed; ValueError where these votes do not commit it.

    The votes are those that `Ballots.receive` took, and one's own.
    """
    held = list(votes)
    plain = [signed.vote for signed in held]
    if decide(ballot.voters, plain).digest != digest:
        raise ValueError(f"the votes at hand do not commit {digest[:12]}")
    chosen = choices(ballot.voters, plain)
    winning = {s.vote.voter: s for s in held if chosen.get(s.vote.voter) == digest}
    proof = [winning[voter].fields() for voter in sorted(winning)]
    return pack([[*ballot.facts, list(ballot.members)], proof])


def check_certificate(record: RoundRecord, digest: str, data: bytes) -> None:
    """Refuse (RecordRefused) a record that no majority of the group that made it committed."""
    try:
        _check_certificate(record, digest, data)
    except VoteRefused as error:
        raise RecordRefused(f"round {record.round}: {error}") from error


def _check_certificate(record: RoundRecord, digest: str, data: bytes) -> None:
    told, proof = _read(data, MAX_CERTIFICATE_BYTES, _CERTIFICATE, "a certificate")
    run, stage, number, attempt, group, members = told
    votes = [_signed_vote(fields) for fields in proof]
    try:
        ballot = Ballot(
            run=run,
            stage=stage,
            round=number,
            attempt=attempt,
            group=group,
            members=members,
            voters=record.voters,
        )
    except ValueError as error:
        raise VoteRefused(str(error)) from error
    if (run, stage, number) != (record.run, record.stage, record.round):
        raise VoteRefused(f"votes on stage {stage}, round {number}")
    if {member.peer for member in record.members} != set(members):
        raise VoteRefused("the record's members are not the group that voted")
    voters = [signed.vote.voter for signed in votes]
    if len(set(voters)) != len(voters):
        raise VoteRefused("a member votes twice in a certificate")
    if any(signed.vote.digest != digest for signed in votes):
        raise VoteRefused("a certificate holds a vote for another record")
    if not set(voters) <= ballot.voters:
        raise VoteRefused("a certificate holds a vote that does not count")
    if not commits(len(voters), ballot.voters):
        raise VoteRefused(f"{len(voters)} votes of {len(ballot.voters)} that count")
    for signed in votes:
        ballot.check(signed)


def _check_sorted(vote: Vote) -> None:
    if list(vote.missed) != sorted(set(vote.missed)):
        raise VoteRefused(f"the peers that {vote.voter} missed are not sorted")


def _read_vote(data: bytes) -> SignedVote:
    return _signed_vote(_read(data, MAX_VOTE_BYTES, _VOTE, "a vote"))


def _signed_vote(fields: _VoteFields) -> SignedVote:
    voter, digest, missed, public_key, signature = fields
    vote = Vote(voter=voter, digest=digest, missed=missed)
    return SignedVote(vote=vote, public_key=public_key, signature=signature)


def _read(data: bytes, max_bytes: int, kind: TypeAdapter[T], what: str) -> T:
    try:
        return checked(unpack(data, max_bytes), kind)
    except Malformed as error:
        raise VoteRefused(f"not {what}: {error}") from error
