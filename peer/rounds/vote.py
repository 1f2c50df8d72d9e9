"""How a group decides its round: who may start, the majority vote, whom a retry leaves out.

Every member casts one signed, final vote per attempt: the digest of the record it made, or ABORT
with the members whose bytes it missed. More than half of the gathered members for one digest commit
the round, half of them aborting make it void, and the dead count among the members: so no two
members can ever decide differently, whichever votes are lost on the way. (An earlier rule, "all
that I see alive agree", committed here and voided there in 268 of 1024 patterns of cut links
between four members.)

Pure rules over facts: nothing here reads a clock, a disk or a socket.

A vote is signed together with everything that identifies its attempt, members included, so it
counts for that group alone. The winning votes are the record's *certificate*: it is kept beside the
record (in no digest, since members may hold different votes of the same majority), and no record is
taken from anyone without one. Whoever casts a vote puts it on disk before it leaves, so that a
restarted peer cannot cast another.

Pure: callers bring `verify` and `peer_id_of`. Everything that arrives is untrusted; what is refused
raises VoteRefused, whose `kind` names the reason for metrics.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import combinations
from typing import Any, cast

from dilocox.dht.wire import Malformed, pack, unpack

MAX_MEMBERS = 256  # of a group
EXCLUSION_WORK = 5000  # sets tried for the smallest exclusion; all sets of 12 peers are fewer


class Verdict(Enum):
    """How an attempt stands as far as one member's votes show."""

    COMMITTED = "committed"
    VOID = "void"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The verdict, and the digest that was committed (None otherwise)."""

    verdict: Verdict
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One member's final choice in one attempt."""

    voter: str
    digest: str | None
    """sha256 of the record, 64 hex characters; None is ABORT."""
    missed: tuple[str, ...] = ()
    """The members whose bytes an aborting voter missed, sorted; empty beside a digest."""


def decide(members: Collection[str], votes: Iterable[Vote]) -> Decision:
    """What these votes decide.

    Further votes change an UNDECIDED only. Votes of strangers do not count, a repeated vote counts
    once, and whoever is seen to vote for two different things counts as dead, so that the order in
    which votes arrive decides nothing.
    """
    chosen = choices(members, votes)
    for digest, count in Counter(chosen.values()).items():
        if digest is not None and 2 * count > len(members):
            return Decision(verdict=Verdict.COMMITTED, digest=digest)
    if 2 * sum(digest is None for digest in chosen.values()) >= len(members):
        return Decision(verdict=Verdict.VOID)
    return Decision(verdict=Verdict.UNDECIDED)


def choices(members: Collection[str], votes: Iterable[Vote]) -> dict[str, str | None]:
    """What each member chose, by voter; without members that chose two different things."""
    seen: dict[str, set[str | None]] = {}
    for vote in votes:
        if vote.voter in members:
            seen.setdefault(vote.voter, set()).add(vote.digest)
    return {voter: next(iter(chosen)) for voter, chosen in seen.items() if len(chosen) == 1}


def exclusion(aborts: Iterable[Vote], silent: Collection[str]) -> tuple[str, ...]:
    """The smallest set of peers that covers every (voter, missed) pair: a retry leaves it out.

    Returned sorted. Where several sets are the smallest, peers are ranked, the silent ones (who
    cast no vote) before the others and the larger id before the smaller, and the set that comes
    first in the dictionary of that alphabet wins.

    Exact where the answer is among the first EXCLUSION_WORK sets, the smaller sets first: always
    with up to 12 peers in the pairs, and with more as long as few are to blame. Beyond that, the
    peer in most of the uncovered pairs is taken (the first in rank where they tie) until all are
    covered; that may not be the smallest set. Work is counted in sets and not in seconds, so all
    members that recompute it from the same aborts end with the same set.
    """
    pairs = {(vote.voter, peer) for vote in aborts if vote.digest is None for peer in vote.missed}
    quiet = set(silent)
    ranked = sorted({peer for pair in pairs for peer in pair}, reverse=True)
    ranked.sort(key=lambda peer: peer not in quiet)
    work = 0
    for size in range(len(ranked) + 1):
        for chosen in combinations(ranked, size):
            if all(voter in chosen or missed in chosen for voter, missed in pairs):
                return tuple(sorted(chosen))
            work += 1
            if work >= EXCLUSION_WORK:
                return tuple(sorted(_greedy_cover(ranked, pairs)))
    return tuple(sorted(ranked))


def _greedy_cover(ranked: list[str], pairs: set[tuple[str, str]]) -> list[str]:
    cover: list[str] = []
    while pairs:
        blame = Counter(peer for pair in pairs for peer in pair)
        worst = max(ranked, key=lambda peer: blame[peer])  # max keeps the first where they tie
        cover.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return cover


def may_start(
    members: Collection[str],
    view_of: Mapping[str, Collection[str]],
    last_contributors: Collection[str],
) -> bool:
    """Whether a gathered group may begin its exchange; if not, all leave before a byte is sent.

    `view_of[m]` are the peers that member m counts: those whose stage record says that they train
    or hold unsent tokens, itself included. In each member's view the group must hold more than half
    of the last record's contributors that are counted there; where none of them is, or the chain is
    empty (`last_contributors` is), more than half of all counted. A member without a view, or with
    an empty one, stops the group.
    """
    group = set(members)
    for member in group:
        counted = set(view_of.get(member, ()))
        needed = (counted & set(last_contributors)) or counted
        if 2 * len(needed & group) <= len(needed):
            return False
    return bool(group)


class AloneWatch:
    """Whether a peer may commit alone: nobody else counted was in view for a record lifetime.

    Feed it one observation per heartbeat. The wait starts anew where another peer is in view, where
    no bootstrap answers (then it may be this peer that is cut off), and after a gap of two
    heartbeats (the machine froze, and what it saw before is stale).

    `now_s` comes from any clock that never steps back; one that also counts the time a machine
    sleeps (CLOCK_BOOTTIME) sees that as a freeze, CLOCK_MONOTONIC does not.
    """

    def __init__(self, *, record_lifetime_s: float, heartbeat_s: float):
        self._record_lifetime_s = record_lifetime_s
        self._gap_s = 2 * heartbeat_s
        self._alone_since: float | None = None
        self._observed = float("-inf")

    def observe(self, now_s: float, *, others_in_view: int, bootstrap_answered: bool) -> None:
        """Note one look at the DHT: how many other counted peers of the stage it showed."""
        if others_in_view or not bootstrap_answered:
            self._alone_since = None
        elif self._alone_since is None or self._frozen(now_s):
            self._alone_since = now_s
        self._observed = now_s

    def may_commit(self, now_s: float) -> bool:
        """Whether the observations allow a commit alone now."""
        if self._alone_since is None or self._frozen(now_s):
            return False
        return self._observed - self._alone_since >= self._record_lifetime_s

    def _frozen(self, now_s: float) -> bool:
        return now_s - self._observed >= self._gap_s


VOTE_DOMAIN = "dilocox vote 2"  # so that a signature over a vote can be taken for nothing else
MAX_VOTE_BYTES = 1 << 16
MAX_CERTIFICATE_BYTES = 1 << 20

Verify = Callable[[bytes, bytes, bytes], bool]
"""(public_key, data, signature) -> whether the signature is that key's."""
PeerIdOf = Callable[[bytes], str]
"""The peer id that belongs to a public key."""


class VoteRefused(ValueError):
    """A vote or a certificate that does not count."""

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)  # both, or it could not be pickled
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class SignedVote:
    """A vote as it travels: with its voter's public key and signature (`Ballot.signed_bytes`)."""

    vote: Vote
    public_key: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """This vote as it travels."""
        return pack(self.fields())

    def fields(self) -> list[object]:
        """This vote as plain values, in their order on the wire."""
        vote = self.vote
        return [vote.voter, vote.digest, list(vote.missed), self.public_key, self.signature]


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
    """The gathered members, those who die later included; sorted, each once."""

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ValueError("the members of a ballot are a sorted list of different peers")
        if len(self.members) > MAX_MEMBERS:
            raise ValueError(f"{len(self.members)} members; a group has at most {MAX_MEMBERS}")

    def fields(self) -> list[object]:
        """What identifies the attempt, in its order on the wire."""
        return [self.run, self.stage, self.round, self.attempt, self.group, list(self.members)]

    def signed_bytes(self, vote: Vote) -> bytes:
        """The canonical bytes that the voter signs."""
        attempt = [self.run, self.stage, self.round, self.attempt, self.group]
        return _signed_bytes(attempt, self.members_sha256, vote)

    @cached_property
    def members_sha256(self) -> bytes:
        """Stands for the members in what is signed."""
        return hashlib.sha256(pack(list(self.members))).digest()

    def sign(self, vote: Vote, public_key: bytes, sign: Callable[[bytes], bytes]) -> SignedVote:
        """One's own vote, signed; VoteRefused if no member would accept it."""
        self._check_choice(vote)
        signature = sign(self.signed_bytes(vote))
        return SignedVote(vote=vote, public_key=public_key, signature=signature)

    def accept(self, data: bytes, verify: Verify, peer_id_of: PeerIdOf) -> SignedVote:
        """Read a vote that arrived.

        Raises:
            VoteRefused: malformed, no member's, of another attempt, or not signed by its voter.
        """
        signed = _signed_vote(_unpack(data, MAX_VOTE_BYTES))
        self.check(signed, verify, peer_id_of)
        return signed

    def check(self, signed: SignedVote, verify: Verify, peer_id_of: PeerIdOf) -> None:
        """Raise VoteRefused unless this is a well-formed vote of this attempt by its voter."""
        voter = signed.vote.voter
        self._check_choice(signed.vote)
        if peer_id_of(signed.public_key) != voter:
            raise VoteRefused("owner", f"the vote of {voter} comes with another peer's key")
        if not verify(signed.public_key, self.signed_bytes(signed.vote), signed.signature):
            raise VoteRefused("signature", f"{voter} did not sign this vote for this attempt")

    def _check_choice(self, vote: Vote) -> None:
        members = set(self.members)
        if vote.voter not in members:
            raise VoteRefused("member", f"{vote.voter} is no member of this group")
        if vote.digest is not None and not _is_sha256(vote.digest):
            raise VoteRefused("digest", f"{vote.voter} votes for what is no sha256")
        if list(vote.missed) != sorted(set(vote.missed)):
            raise VoteRefused("missed", f"the peers that {vote.voter} missed are not sorted")
        if not set(vote.missed) <= members - {vote.voter}:
            raise VoteRefused("missed", f"{vote.voter} missed peers that are no other members")
        if vote.digest is not None and vote.missed:
            raise VoteRefused("missed", f"{vote.voter} votes for a digest, yet missed peers")


@dataclass(frozen=True, kw_only=True)
class StatedAbort:
    """A member's abort as it states it to the members of a repeated attempt, which need not know
    who was in the first one to see that it signed it.
    """

    attempt: int
    group: bytes
    members_sha256: bytes
    signed: SignedVote

    @classmethod
    def of(cls, ballot: Ballot, signed: SignedVote) -> StatedAbort:
        """An abort of this ballot."""
        return cls(
            attempt=ballot.attempt,
            group=ballot.group,
            members_sha256=ballot.members_sha256,
            signed=signed,
        )

    def to_bytes(self) -> bytes:
        """This abort as it travels."""
        return pack([self.attempt, self.group, self.members_sha256, self.signed.fields()])

    @classmethod
    def from_bytes(cls, data: bytes) -> StatedAbort:
        """Read an abort without believing it; VoteRefused if it is malformed."""
        attempt, group, members, vote = _typed(
            _unpack(data, MAX_VOTE_BYTES), (int, bytes, bytes, list), "an abort"
        )
        signed = _signed_vote(vote)
        return cls(attempt=attempt, group=group, members_sha256=members, signed=signed)

    def check(
        self, run: str, stage: int, round_number: int, verify: Verify, peer_id_of: PeerIdOf
    ) -> None:
        """Raise VoteRefused unless its voter signed it, as an abort of this round."""
        vote = self.signed.vote
        if vote.digest is not None or vote.voter in vote.missed:
            raise VoteRefused("missed", f"{vote.voter} states what is no abort")
        if list(vote.missed) != sorted(set(vote.missed)):
            raise VoteRefused("missed", f"the peers that {vote.voter} missed are not sorted")
        if peer_id_of(self.signed.public_key) != vote.voter:
            raise VoteRefused("owner", f"the abort of {vote.voter} comes with another peer's key")
        attempt = [run, stage, round_number, self.attempt, self.group]
        data = _signed_bytes(attempt, self.members_sha256, vote)
        if not verify(self.signed.public_key, data, self.signed.signature):
            raise VoteRefused("signature", f"{vote.voter} did not sign this abort of this round")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The votes that committed a record."""

    ballot: Ballot
    votes: tuple[SignedVote, ...]

    def to_bytes(self) -> bytes:
        """This certificate as it is kept and travels."""
        return pack([self.ballot.fields(), [signed.fields() for signed in self.votes]])

    @classmethod
    def from_bytes(cls, data: bytes) -> Certificate:
        """Read a certificate without believing it; VoteRefused if it is malformed."""
        outer = _typed(_unpack(data, MAX_CERTIFICATE_BYTES), (list, list), "a certificate")
        run, stage, number, attempt, group, members = _typed(
            outer[0], (str, int, int, int, bytes, list), "a ballot"
        )
        try:
            ballot = Ballot(
                run=run,
                stage=stage,
                round=number,
                attempt=attempt,
                group=group,
                members=_texts(members),
            )
        except ValueError as error:
            raise VoteRefused("member", str(error)) from error
        return cls(ballot=ballot, votes=tuple(_signed_vote(vote) for vote in outer[1]))


def certificate(ballot: Ballot, votes: Iterable[SignedVote], digest: str) -> Certificate:
    """The proof that a digest was committed; ValueError where these votes do not commit it.

    The votes are those that `Ballot.accept` took, and one's own.
    """
    held = list(votes)
    plain = [signed.vote for signed in held]
    if decide(ballot.members, plain).digest != digest:
        raise ValueError(f"the votes at hand do not commit {digest[:12]}")
    chosen = choices(ballot.members, plain)
    winning = {s.vote.voter: s for s in held if chosen.get(s.vote.voter) == digest}
    return Certificate(ballot=ballot, votes=tuple(winning[voter] for voter in sorted(winning)))


def check_certificate(
    proof: Certificate,
    *,
    run: str,
    stage: int,
    round_number: int,
    digest: str,
    contributors: Collection[str],
    verify: Verify,
    peer_id_of: PeerIdOf,
) -> None:
    """Check that a majority of the group that made this record committed it.

    Raises:
        VoteRefused: votes for something else, of others, too few, or a record that names
            contributors who were not in the group.
    """
    ballot = proof.ballot
    if (ballot.run, ballot.stage, ballot.round) != (run, stage, round_number):
        raise VoteRefused("round", f"votes on stage {ballot.stage}, round {ballot.round}")
    if not set(contributors) <= set(ballot.members):
        raise VoteRefused("member", "the record names contributors who were not in the group")
    voters = [signed.vote.voter for signed in proof.votes]
    if len(set(voters)) != len(voters):
        raise VoteRefused("voter", "a member votes twice in a certificate")
    if any(signed.vote.digest != digest for signed in proof.votes):
        raise VoteRefused("digest", "a certificate holds a vote for another record")
    if 2 * len(voters) <= len(ballot.members):
        raise VoteRefused("majority", f"{len(voters)} votes of {len(ballot.members)} members")
    for signed in proof.votes:
        ballot.check(signed, verify, peer_id_of)


def _signed_bytes(attempt: Sequence[object], members_sha256: bytes, vote: Vote) -> bytes:
    choice = [vote.voter, vote.digest, list(vote.missed)]
    return pack([VOTE_DOMAIN, *attempt, members_sha256, *choice])


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _signed_vote(fields: object) -> SignedVote:
    voter, digest, missed, public_key, signature = _typed(
        fields, (str, (str, type(None)), list, bytes, bytes), "a vote"
    )
    vote = Vote(voter=voter, digest=digest, missed=_texts(missed))
    return SignedVote(vote=vote, public_key=public_key, signature=signature)


def _texts(values: list[Any]) -> tuple[str, ...]:
    return tuple(_typed(values, (str,) * len(values), "a list of peers"))


def _typed(value: object, kinds: tuple[Any, ...], what: str) -> list[Any]:
    """`value` as a list with items of these types; VoteRefused if it is anything else."""
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is None or len(items) != len(kinds):
        raise VoteRefused("type", f"not {what}")
    for item, kind in zip(items, kinds, strict=True):
        if not isinstance(item, kind) or isinstance(item, bool):
            raise VoteRefused("type", f"not {what}: a field of type {type(item).__name__}")
    return items


def _unpack(data: bytes, max_bytes: int) -> object:
    try:
        return unpack(data, max_bytes)
    except Malformed as error:
        raise VoteRefused("length" if len(data) > max_bytes else "type", str(error)) from error
