"""Signed votes and certificates: what is accepted, and every way to be refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.peer.rounds.vote import (
    Ballot,
    Certificate,
    SignedVote,
    Vote,
    VoteRefused,
    certificate,
    check_certificate,
)

D1, D2 = "1" * 64, "2" * 64
BALLOT = Ballot(
    run="run", stage=1, round=7, attempt=0, group=b"group", members=("a", "b", "c", "d")
)


# keys that are no cryptography: the public key names the peer, a signature is a hash with it
def key_of(peer: str) -> bytes:
    return b"key of " + peer.encode()


def peer_id_of(public_key: bytes) -> str:
    return public_key.removeprefix(b"key of ").decode()


def signature_of(public_key: bytes, data: bytes) -> bytes:
    return hashlib.sha256(public_key + data).digest()


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    return signature == signature_of(public_key, data)


def cast(voter: str, digest: str | None = D1, *missed: str, ballot: Ballot = BALLOT) -> SignedVote:
    vote = Vote(voter=voter, digest=digest, missed=missed)
    return ballot.sign(vote, key_of(voter), lambda data: signature_of(key_of(voter), data))


def forge(vote: Vote, ballot: Ballot = BALLOT) -> SignedVote:
    """A vote signed by its voter without the checks that an honest voter's own code makes."""
    key = key_of(vote.voter)
    signature = signature_of(key, ballot.signed_bytes(vote))
    return SignedVote(vote=vote, public_key=key, signature=signature)


def accept(signed: SignedVote, ballot: Ballot = BALLOT) -> SignedVote:
    return ballot.accept(signed.to_bytes(), verify, peer_id_of)


def refusal(signed: SignedVote, ballot: Ballot = BALLOT) -> str:
    with pytest.raises(VoteRefused) as caught:
        accept(signed, ballot)
    return caught.value.kind


# ---- votes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("signed", [cast("a"), cast("b", None), cast("c", None, "a", "d")])
def test_honest_votes_pass_unchanged(signed: SignedVote) -> None:
    assert accept(signed) == signed


@pytest.mark.parametrize(
    "field, value",
    [
        ("run", "other"),
        ("stage", 0),
        ("round", 8),
        ("attempt", 1),
        ("group", b"other"),
        ("members", ("a", "b", "c")),
    ],
)
def test_vote_counts_for_its_own_attempt_alone(field: str, value: Any) -> None:
    changes: dict[str, Any] = {field: value}
    assert refusal(cast("a"), replace(BALLOT, **changes)) == "signature"


def test_vote_of_a_stranger_or_with_anothers_key_is_refused() -> None:
    assert refusal(forge(Vote(voter="z", digest=D1))) == "member"
    assert refusal(replace(cast("a"), public_key=key_of("b"))) == "owner"


def test_changed_vote_is_refused() -> None:
    signed = cast("a")
    assert refusal(replace(signed, vote=replace(signed.vote, digest=D2))) == "signature"
    assert refusal(replace(signed, vote=replace(signed.vote, digest=None))) == "signature"
    assert refusal(replace(signed, signature=b"")) == "signature"


@pytest.mark.parametrize(
    "vote, kind",
    [
        (Vote(voter="a", digest="1" * 63), "digest"),
        (Vote(voter="a", digest="G" * 64), "digest"),
        (Vote(voter="a", digest=None, missed=("z",)), "missed"),
        (Vote(voter="a", digest=None, missed=("a",)), "missed"),
        (Vote(voter="a", digest=None, missed=("c", "b")), "missed"),
        (Vote(voter="a", digest=None, missed=("b", "b")), "missed"),
        (Vote(voter="a", digest=D1, missed=("b",)), "missed"),
    ],
)
def test_malformed_choice_is_refused_though_well_signed(vote: Vote, kind: str) -> None:
    assert refusal(forge(vote)) == kind
    with pytest.raises(VoteRefused):
        BALLOT.sign(vote, key_of("a"), lambda data: data)


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
    data: Any = msgpack.packb(fields)  # pyright: ignore
    with pytest.raises(VoteRefused) as caught:
        BALLOT.accept(data, verify, peer_id_of)
    assert caught.value.kind == "type"


@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    with pytest.raises(VoteRefused):
        BALLOT.accept(data, verify, peer_id_of)
    with pytest.raises(VoteRefused):
        Certificate.from_bytes(data)


def test_oversized_vote_is_refused_unread() -> None:
    with pytest.raises(VoteRefused) as caught:
        BALLOT.accept(b"\x00" * 100_000, verify, peer_id_of)
    assert caught.value.kind == "length"


@pytest.mark.parametrize(
    "members", [(), ("b", "a"), ("a", "a"), tuple(map(str, range(1000, 1300)))]
)
def test_ballot_takes_sorted_different_members_up_to_a_bound(members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="members"):
        replace(BALLOT, members=members)


# ---- certificates ------------------------------------------------------------------------------
def check(proof: Certificate, **changes: Any) -> None:
    facts: dict[str, Any] = {
        "run": "run",
        "stage": 1,
        "round_number": 7,
        "digest": D1,
        "contributors": ["a", "c"],
    }
    check_certificate(proof, **(facts | changes), verify=verify, peer_id_of=peer_id_of)


def refused(proof: Certificate, **changes: Any) -> str:
    with pytest.raises(VoteRefused) as caught:
        check(proof, **changes)
    return caught.value.kind


def test_winning_votes_make_a_certificate_that_travels_and_passes() -> None:
    proof = certificate(BALLOT, [cast("d"), cast("a"), cast("b", None), cast("c")], D1)
    assert [signed.vote.voter for signed in proof.votes] == ["a", "c", "d"]
    again = Certificate.from_bytes(proof.to_bytes())
    assert again == proof
    check(again)


def test_no_certificate_without_a_majority() -> None:
    with pytest.raises(ValueError, match="do not commit"):
        certificate(BALLOT, [cast("a"), cast("b")], D1)
    with pytest.raises(ValueError, match="do not commit"):
        certificate(BALLOT, [cast("a"), cast("b"), cast("c")], D2)


def test_member_that_voted_twice_is_in_no_certificate() -> None:
    votes = [cast("a"), cast("b"), cast("c"), cast("d"), cast("d", D2)]
    proof = certificate(BALLOT, votes, D1)
    assert [signed.vote.voter for signed in proof.votes] == ["a", "b", "c"]


def test_certificate_of_another_record_round_stage_or_run_is_refused() -> None:
    proof = certificate(BALLOT, [cast("a"), cast("b"), cast("c")], D1)
    assert refused(proof, digest=D2) == "digest"
    assert refused(proof, round_number=8) == "round"
    assert refused(proof, stage=0) == "round"
    assert refused(proof, run="other") == "round"
    assert refused(proof, contributors=["a", "z"]) == "member"


def test_certificate_with_too_few_doubled_or_forged_votes_is_refused() -> None:
    a, b, c = cast("a"), cast("b"), cast("c")
    assert refused(Certificate(ballot=BALLOT, votes=(a, b))) == "majority"
    assert refused(Certificate(ballot=BALLOT, votes=(a, b, b))) == "voter"
    assert refused(Certificate(ballot=BALLOT, votes=(a, b, cast("c", None)))) == "digest"
    assert (
        refused(Certificate(ballot=BALLOT, votes=(a, b, replace(c, signature=b"")))) == "signature"
    )
    assert refused(Certificate(ballot=BALLOT, votes=(a, b, forge(Vote(voter="z", digest=D1))))) == (
        "member"
    )
    retold = replace(BALLOT, members=("a", "b", "c"))  # fewer members, so that two are enough
    assert refused(Certificate(ballot=retold, votes=(a, b))) == "signature"


@pytest.mark.parametrize(
    "fields",
    [
        [["run", 1, 7, 0, b"g", ["a"]]],
        [["run", 1, 7, 0, b"g", ["b", "a"]], []],
        [["run", 1, 7, 0, b"g", []], []],
        [["run", True, 7, 0, b"g", ["a"]], []],
        [["run", 1, 7, 0, b"g", ["a"]], [["a"]]],
        [["run", 1, 7, 0, "g", ["a"]], []],
    ],
)
def test_bytes_that_are_no_certificate_are_refused(fields: object) -> None:
    data: Any = msgpack.packb(fields)  # pyright: ignore
    with pytest.raises(VoteRefused):
        Certificate.from_bytes(data)
