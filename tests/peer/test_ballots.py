"""Ballots: a member's own vote and those it heard, and whom a repeated attempt leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.ballots import Ballots, check_record_certificate, excluded_by
from dilocox.peer.rounds.record import Contribution, RecordRefused
from dilocox.peer.rounds.vote import Ballot, Verdict, VoteRefused
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, MANIFEST_DIGEST, template

CODEC = codec_of(LAYOUT)

D1, D2 = "1" * 64, "2" * 64


def ballot_of(identities: list[Identity], **changes: object) -> Ballot:
    members = tuple(identity.peer_id for identity in identities)
    ballot = Ballot(run="run", stage=0, round=3, attempt=0, group=b"group", members=members)
    return replace(ballot, **changes)  # type: ignore[arg-type]


def member(peer: str) -> Contribution:
    return Contribution(peer=peer, tokens=1, exchange_s=0.0, step_s=0.0)


def ballots_of(identities: list[Identity], folder: Path, **changes: object) -> list[Ballots]:
    """Each member's own."""
    ballot = ballot_of(identities, **changes)
    return [
        Ballots(
            identity=identity,
            ballot=ballot,
            save_vote=RoundLog(
                folder / identity.peer_id, manifest_digest=MANIFEST_DIGEST, codec=CODEC
            ).save_vote,
        )
        for identity in identities
    ]


def test_a_vote_is_on_disk_before_it_is_given_away(
    identities: list[Identity], tmp_path: Path
) -> None:
    (own, *_) = ballots_of(identities[:3], tmp_path)
    vote = own.cast(D1, ())
    log = RoundLog(tmp_path / identities[0].peer_id, manifest_digest=MANIFEST_DIGEST, codec=CODEC)
    assert log.own_vote(3, 0) == vote
    assert own.voters() == {identities[0].peer_id}


def test_a_majority_commits_and_its_votes_certify_the_record(
    identities: list[Identity], tmp_path: Path
) -> None:
    first, second, third = ballots_of(identities[:3], tmp_path)
    own = first.cast(D1, ())
    assert first.decision.verdict is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="do not commit"):
        first.certificate()
    first.receive(third.cast(None, (identities[1].peer_id,)))
    first.receive(vote := second.cast(D1, ()))
    first.receive(vote)  # twice is once
    assert (first.decision.verdict, first.decision.digest) == (Verdict.COMMITTED, D1)
    assert first.voters_for(D1) == {identities[0].peer_id, identities[1].peer_id}
    assert len(first.all_bytes()) == 3 and own in first.all_bytes()

    record = template(members=(member(identities[0].peer_id),))
    check_record_certificate(record, D1, first.certificate())
    for wrong_record, digest in (
        (record, D2),
        (replace(record, round=4), D1),
        (replace(record, run="other"), D1),
        (
            replace(record, members=(member("zz"),)),
            D1,
        ),
    ):
        with pytest.raises(RecordRefused):
            check_record_certificate(wrong_record, digest, first.certificate())
    with pytest.raises(RecordRefused):
        check_record_certificate(record, D1, b"no votes")
    with pytest.raises(RecordRefused):  # the aborts are votes too, but commit nothing
        check_record_certificate(record, D1, first.abort())


def test_a_vote_of_another_attempt_or_a_stranger_is_refused(
    identities: list[Identity], tmp_path: Path
) -> None:
    (own, *_) = ballots_of(identities[:3], tmp_path)
    (other_attempt, *_) = ballots_of(identities[:3], tmp_path / "other", attempt=1)
    (stranger,) = ballots_of(identities[3:], tmp_path / "stranger")
    for vote in (other_attempt.cast(D1, ()), stranger.cast(D1, ()), b"no vote"):
        with pytest.raises(VoteRefused):
            own.receive(vote)
    assert own.voters() == set()


# ---- exclusion -----------------------------------------------------------------------------------
def excluded(*aborts: bytes, members: tuple[str, ...] = ()) -> list[str]:
    return excluded_by(aborts, members, run="run", stage=0, round_number=3)


def test_who_was_missed_by_the_others_is_left_out_of_the_repeated_attempt(
    identities: list[Identity], tmp_path: Path
) -> None:
    names = [identity.peer_id for identity in identities]
    first, second, third, _ = ballots_of(identities, tmp_path)
    votes = [b.cast(None, (names[3],)) for b in (first, second, third)]
    for ballots in (first, second, third):
        for vote in votes:
            ballots.receive(vote)
    stated = [ballots.abort() for ballots in (third, first, second)]
    assert max(map(len, stated)) < 400, "each of them goes to all"
    # in whatever order, and whoever else is there
    assert excluded(*stated) == excluded(*stated[::-1], members=tuple(names)) == [names[3]]


def test_a_voter_that_commits_is_not_among_the_aborts(
    identities: list[Identity], tmp_path: Path
) -> None:
    first, second, *_ = ballots_of(identities[:2], tmp_path)
    first.receive(second.cast(D1, ()))
    first.cast(None, (identities[1].peer_id,))
    names = tuple(identity.peer_id for identity in identities[:2])
    assert excluded(first.abort(), members=names) == [names[1]], "the silent one goes first"
    assert second.abort() == b""


def test_aborts_that_are_malformed_forged_or_of_another_round_exclude_nobody(
    identities: list[Identity], tmp_path: Path
) -> None:
    (own, *_) = ballots_of(identities[:3], tmp_path)
    own.cast(None, (identities[1].peer_id,))
    sound = own.abort()
    assert excluded(sound)
    forged = bytearray(sound)
    forged[-1] ^= 1  # the last byte of the signature
    for wrong in (b"", b"junk", bytes(forged), sound[:-1]):
        assert excluded(wrong) == []
    for changes in ({"run": "other"}, {"stage": 1}, {"round": 4}):
        (other, *_) = ballots_of(identities[:3], tmp_path / str(changes), **changes)
        other.cast(None, (identities[1].peer_id,))
        assert excluded(other.abort()) == []
