"""Signed votes: what is accepted, what they prove, and whom a repeated attempt leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.peer.rounds.ballots import (
    MAX_VOTE_BYTES,
    Ballot,
    Ballots,
    SignedVote,
    VoteRefused,
    certificate,
    check_certificate,
    excluded_by,
    signed_bytes,
)
from dilocox.peer.rounds.record import Contribution, RecordRefused
from dilocox.peer.rounds.standing import Standing
from dilocox.peer.rounds.vote_count import Verdict, Vote
from tests.peer.members import template
from tests.peer.rounds.voters import BALLOT, KEYS, A, B, C, D, Z, ballots_of, cast, log_of

D1, D2 = "1" * 64, "2" * 64
KEY_OF = {identity.peer_id: identity for identity in KEYS}


def voted(voter: str, digest: str | None = D1, *missed: str, ballot: Ballot = BALLOT) -> SignedVote:
    return ballot.sign(Vote(voter=voter, digest=digest, missed=missed), KEY_OF[voter])


def forged(vote: Vote, ballot: Ballot = BALLOT) -> SignedVote:
    """A vote signed by its voter without the checks that an honest voter's own code makes."""
    key = KEY_OF[vote.voter]
    signature = key.sign(signed_bytes(ballot.facts, ballot.members_sha256, vote))
    return SignedVote(vote=vote, public_key=key.public_key, signature=signature)


def packed(fields: object) -> bytes:
    data: Any = msgpack.packb(fields)  # pyright: ignore
    return data


def receive(data: bytes, ballot: Ballot = BALLOT) -> Ballots:
    ballots = Ballots(identity=KEY_OF[Z], ballot=ballot, save_vote=lambda *_: None)
    ballots.receive(data)
    return ballots


# ---- votes ---------------------------------------------------------------------------------------
def check_refused(signed: SignedVote, reason: str, ballot: Ballot = BALLOT) -> None:
    with pytest.raises(VoteRefused, match=reason):
        receive(signed.to_bytes(), ballot)


@pytest.mark.parametrize("signed", [voted(A), voted(B, None), voted(C, None, A, D)])
def test_honest_votes_pass_unchanged(signed: SignedVote) -> None:
    assert receive(signed.to_bytes()).voted() == {signed.vote.voter}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "other"},
        {"stage": 1},
        {"round": 8},
        {"attempt": 1},
        {"group": b"other"},
        {"members": (A, B, C)},
    ],
)
def test_a_vote_counts_for_its_own_attempt_alone(changes: dict[str, Any]) -> None:
    check_refused(voted(A), "did not sign", replace(BALLOT, **changes))


def test_a_vote_of_a_stranger_with_anothers_key_or_changed_is_refused() -> None:
    signed = voted(A)
    check_refused(forged(Vote(voter=Z, digest=D1)), "no member")
    check_refused(replace(signed, public_key=KEY_OF[B].public_key), "another peer's key")
    check_refused(replace(signed, signature=b""), "did not sign")
    for digest in (D2, None):
        changed = replace(signed, vote=replace(signed.vote, digest=digest))
        check_refused(changed, "did not sign")


@pytest.mark.parametrize(
    ("digest", "missed", "reason"),
    [
        ("1" * 63, (), "no sha256"),
        ("G" * 64, (), "no sha256"),
        (None, (Z,), "no other members"),
        (None, (A,), "no other members"),
        (None, (C, B), "not sorted"),
        (None, (B, B), "not sorted"),
        (D1, (B,), "yet missed"),
    ],
)
def test_a_malformed_choice_is_refused_though_well_signed(
    digest: str | None, missed: tuple[str, ...], reason: str
) -> None:
    vote = Vote(voter=A, digest=digest, missed=missed)
    check_refused(forged(vote), reason)
    with pytest.raises(VoteRefused):
        BALLOT.sign(vote, KEY_OF[A])


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        ["a", D1, [], b"key"],
        ["a", D1, [], b"key", b"signature", b"more"],
        ["a", 5, [], b"key", b"signature"],
        ["a", D1, ["b", 5], b"key", b"signature"],
        ["a", D1, {}, b"key", b"signature"],
        [b"a", D1, [], b"key", b"signature"],
        {"voter": "a"},
    ],
)
def test_bytes_that_are_no_vote_are_refused(fields: object) -> None:
    with pytest.raises(VoteRefused, match="not a"):
        receive(packed(fields))


@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    with pytest.raises(VoteRefused):
        receive(data)
    with pytest.raises(RecordRefused):
        check_certificate(template(), D1, data)


def test_an_oversized_vote_is_refused_unread() -> None:
    with pytest.raises(VoteRefused, match="at most"):
        receive(bytes(MAX_VOTE_BYTES + 1))


@pytest.mark.parametrize(
    "members", [(), ("b", "a"), ("a", "a"), tuple(map(str, range(1000, 1300)))]
)
def test_a_ballot_takes_sorted_different_members_up_to_a_bound(members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="members"):
        replace(BALLOT, members=members)


# ---- certificates --------------------------------------------------------------------------------
RECORD = template(members=tuple(Contribution(peer=peer, tokens=1) for peer in (A, B, C, D)))
MAJORITY = [voted(A), voted(B), voted(C)]


def told(votes: Iterable[SignedVote], ballot: Ballot = BALLOT) -> bytes:
    """A certificate of whatever votes."""
    outer = [[*ballot.facts, list(ballot.members)], [signed.fields() for signed in votes]]
    return packed(outer)


def test_the_winning_votes_of_whoever_voted_once_make_the_certificate() -> None:
    votes = [voted(D), voted(A), voted(B, None), voted(C)]
    proof = certificate(BALLOT, votes, D1)
    assert proof == told([voted(A), voted(C), voted(D)])
    check_certificate(RECORD, D1, proof)
    twice = [*MAJORITY, voted(D), voted(D, D2)]
    assert certificate(BALLOT, twice, D1) == told(MAJORITY)
    for too_few, digest in ((votes[:2], D1), (MAJORITY, D2)):
        with pytest.raises(ValueError, match="do not commit"):
            certificate(BALLOT, too_few, digest)


@pytest.mark.parametrize(
    ("changes", "digest", "reason"),
    [
        ({}, D2, "another record"),
        ({"round": 8}, D1, "round 3"),
        ({"stage": 1}, D1, "stage 0"),
        ({"run": "other"}, D1, "votes on"),
        ({"members": (replace(RECORD.members[0], peer=Z),)}, D1, "not the group that voted"),
        ({"members": RECORD.members[:2]}, D1, "not the group that voted"),
    ],
)
def test_a_certificate_of_another_record_is_refused(
    changes: dict[str, Any], digest: str, reason: str
) -> None:
    with pytest.raises(RecordRefused, match=reason):
        check_certificate(replace(RECORD, **changes), digest, told(MAJORITY))


# fewer members, so that two are enough
SMALLER = replace(BALLOT, members=(A, B, C), voters=frozenset({A, B, C}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (told(MAJORITY[:2]), "2 votes of 4"),
        (told([*MAJORITY, MAJORITY[2]]), "twice"),
        (told([*MAJORITY[:2], voted(C, None)]), "another record"),
        (told([*MAJORITY[:2], replace(MAJORITY[2], signature=b"")]), "did not sign"),
        (told([*MAJORITY[:2], forged(Vote(voter=Z, digest=D1))]), "does not count"),
        (told(MAJORITY[:2], SMALLER), "not the group that voted"),
        (packed([["run", 0, 3, 0, b"g", [A]]]), "not a certificate"),
        (packed([["run", 0, 3, 0, b"g", [B, A]], []]), "sorted"),
        (packed([["run", 0, 3, 0, b"g", []], []]), "sorted"),
        (packed([["run", True, 3, 0, b"g", [A]], []]), "not a certificate: 0"),
        (packed([["run", 0, 3, 0, b"g", [A]], [["a"]]]), "not a certificate: 1.0"),
        (packed([["run", 0, 3, 0, "g", [A]], []]), "not a certificate: 0"),
        (b"no votes", "round 3"),
    ],
)
def test_a_certificate_that_proves_nothing_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RecordRefused, match=reason):
        check_certificate(RECORD, D1, data)


# ---- the votes at hand ---------------------------------------------------------------------------
def test_a_vote_is_on_disk_before_it_is_given_away(tmp_path: Path) -> None:
    own, *_ = ballots_of(KEYS[:3], tmp_path)
    vote = cast(own, D1, ())
    assert log_of(tmp_path, KEYS[0]).own_vote(3, 0) == vote
    assert own.voted() == {A}


def test_a_majority_commits_and_its_votes_certify_the_record(tmp_path: Path) -> None:
    first, second, third = ballots_of(KEYS[:3], tmp_path)
    own = cast(first, D1, ())
    assert first.decision.verdict is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="do not commit"):
        first.certificate()
    first.receive(cast(third, None, (B,)))
    first.receive(vote := cast(second, D1, ()))
    first.receive(vote)  # twice is once
    assert (first.decision.verdict, first.decision.digest) == (Verdict.COMMITTED, D1)
    assert first.voters_for(D1) == {A, B}
    assert len(first.all_bytes()) == 3 and own in first.all_bytes()
    record = replace(RECORD, members=RECORD.members[:3])
    check_certificate(record, D1, first.certificate())
    with pytest.raises(RecordRefused):  # the aborts are votes too, but commit nothing
        check_certificate(record, D1, third.abort())


def test_a_crowd_of_new_members_commits_nothing_voids_nothing_and_blames_nobody(
    tmp_path: Path,
) -> None:
    """Their votes are signed and of this attempt, and there are more of them."""
    voters = frozenset({A, B})
    own, second, *_ = held = ballots_of(KEYS, tmp_path, voters=voters)
    for other in held[2:]:
        own.receive(cast(other, D2, ()))
    assert own.decision.verdict is Verdict.UNDECIDED
    second.receive(cast(own, D1, ()))
    own.receive(cast(second, D1, ()))
    assert own.decision.digest == D1, "both that count"
    proof = own.certificate()
    members = tuple(Contribution(peer=key.peer_id, tokens=1) for key in KEYS)
    everybody = replace(RECORD, members=tuple(sorted(members, key=lambda each: each.peer)))
    known = tuple(Standing(peer=peer, round=RECORD.round, credited=9) for peer in sorted(voters))
    check_certificate(replace(everybody, standings=known), D1, proof)
    with pytest.raises(RecordRefused, match="2 votes of"):  # where all are new, all count
        check_certificate(everybody, D1, proof)

    other = ballots_of(KEYS, tmp_path / "aborts", voters=voters, attempt=1)
    aborts = [cast(each, None, tuple(sorted(voters))) for each in other[2:]]
    for abort in aborts:
        other[0].receive(abort)
    assert other[0].decision.verdict is Verdict.UNDECIDED
    assert other[0].blamed() == () and other[0].missed_by_several() == set()
    stated = [each.abort() for each in other[2:]]
    names = [key.peer_id for key in KEYS]
    assert excluded(*stated, members=names) != []
    assert excluded_by(stated, names, voters, run="run", stage=0, round_number=RECORD.round) == []


# ---- exclusion -----------------------------------------------------------------------------------
def excluded(*aborts: bytes, members: Collection[str] = ()) -> list[str]:
    """Where everybody's vote counts."""
    voters = [key.peer_id for key in KEYS]
    return excluded_by(aborts, members, voters, voters, run="run", stage=0, round_number=3)


def test_of_whom_nobody_knows_that_it_was_there_no_abort_counts() -> None:
    """Two could have a repeated attempt leave out, and its record name, whom they like."""
    missed, names = ("x" * 70, "y"), [key.peer_id for key in KEYS]
    made_up = replace(BALLOT, members=tuple(sorted({*BALLOT.members, *missed})))
    group = [made_up.attempt, made_up.group, made_up.members_sha256]
    aborts = [voted(liar, None, *missed, ballot=made_up).fields() for liar in (A, B)]
    stated = [packed([*group, abort]) for abort in aborts]
    told = partial(excluded_by, stated, names, names, run="run", stage=0, round_number=3)
    assert told() == []
    assert told(known=["y", *names]) == ["y"]


def test_a_member_that_signs_one_abort_after_the_other_fills_nobodys_memory(tmp_path: Path) -> None:
    held = ballots_of(KEYS[:4], tmp_path)[0]
    missed = [(), (A,), (B,), (C,), (A, B), (A, C), (B, C), (A, B, C)]
    aborts = [voted(D, None, *peers).to_bytes() for peers in missed]
    for abort in aborts:
        held.receive(abort)
    assert held.all_bytes() == aborts[:1]
    for vote in (voted(D, D1), voted(D, D2), voted(D)):
        held.receive(vote.to_bytes())
    assert len(held.all_bytes()) == 2, "that it voted for two things is seen all the same"
    for name in (B, C):
        held.receive(voted(name).to_bytes())
    assert held.decision.verdict is Verdict.UNDECIDED, "and so it counts as dead"


def test_who_was_missed_by_the_others_is_left_out_of_the_repeated_attempt(tmp_path: Path) -> None:
    first, second, third, fourth = ballots_of(KEYS[:4], tmp_path)
    votes = [cast(ballots, None, (D,)) for ballots in (first, second, third)]
    for ballots in (first, second, third, fourth):
        for vote in votes:
            ballots.receive(vote)
    assert [each.blamed() for each in (first, second, third, fourth)] == [(D,), (D,), (D,), ()]
    stated = [ballots.abort() for ballots in (third, first, second)]
    assert max(map(len, stated)) < 400, "each of them goes to all"
    # in whatever order, and whoever else is there
    assert excluded(*stated) == excluded(*stated[::-1], members=(A, B, C, D)) == [D]


def test_a_voter_that_commits_is_not_among_the_aborts(tmp_path: Path) -> None:
    first, second = ballots_of(KEYS[:2], tmp_path)
    first.receive(cast(second, D1, ()))
    cast(first, None, (B,))
    assert excluded(first.abort(), members=(A, B)) == [B], "the silent one goes first"
    assert second.abort() == b""


def test_aborts_that_are_malformed_forged_or_of_another_round_exclude_nobody(
    tmp_path: Path,
) -> None:
    own, *_ = ballots_of(KEYS[:3], tmp_path)
    cast(own, None, (B,))
    sound = own.abort()
    assert excluded(sound)
    forgery = bytearray(sound)
    forgery[-1] ^= 1  # the last byte of the signature
    for wrong in (b"", b"junk", bytes(forgery), sound[:-1]):
        assert excluded(wrong) == []
    for changes in ({"run": "other"}, {"stage": 1}, {"round": 4}):
        other, *_ = ballots_of(KEYS[:3], tmp_path / str(changes), **changes)
        cast(other, None, (B,))
        assert excluded(other.abort()) == []
