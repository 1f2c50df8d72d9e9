"""What a record may say of tokens and rounds, whoever voted for it: a peer that was not there takes
no other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.chain.record_check import MOST_VOID, RecordCheck
from dilocox.peer.rounds.ballots import Ballot, certificate
from dilocox.peer.rounds.group import tokens_cap
from dilocox.peer.rounds.record import Contribution, RecordRefused, RoundRecord, digest_of
from dilocox.peer.rounds.standing import MOST_TOKENS
from dilocox.peer.rounds.vote_count import Vote
from tests.peer.kept_chains import RUN, ChainMaker, manifest_of
from tests.peer.told_records import remembering

CAP = tokens_cap(manifest_of())


@pytest.fixture
def maker(maker: ChainMaker) -> ChainMaker:
    """Of one round."""
    maker.train(0)
    return maker


def take(maker: ChainMaker, group: list[Identity], tokens: list[int], *, more: int = 0) -> None:
    """Take a record after the maker's, in all else sound, that this group made and voted for: its
    members state so many tokens, the chain counts `more`.
    """
    names = tuple(each.peer_id for each in group)
    members = tuple(Contribution(peer=n, tokens=t) for n, t in zip(names, tokens, strict=True))

    def by_all(record: RoundRecord) -> RoundRecord:
        parts = tuple(replace(p, reducer=names[0], contributors=names) for p in record.parts)
        counted = record.chain_tokens - record.tokens + sum(tokens) + more
        record = replace(record, members=members, parts=parts, chain_tokens=counted)
        return remembering(record, maker.last)

    maker.train(1, change=by_all)
    data = maker.log.read_bytes(1)
    assert data is not None
    maker.log.drop_from(1)
    digest = digest_of(data)
    ballot = Ballot(
        run=RUN,
        stage=0,
        round=1,
        attempt=0,
        group=b"g",
        members=names,
        voters=frozenset(names),
    )
    votes = [ballot.sign(Vote(voter=each.peer_id, digest=digest), each) for each in group]
    proof = certificate(ballot, votes, digest)
    RecordCheck(RUN, 0, maker.manifest, maker.layout).record(data, proof)
    maker.log.append(data, proof)


@pytest.mark.parametrize(
    "tokens",
    [
        [10, 10, 10],
        [10, 10, MOST_TOKENS * 10],
        [1, CAP],  # of two nobody can say who lies
        [CAP, CAP, CAP],
    ],
)
def test_what_members_can_have_learnt_from_is_taken(
    maker: ChainMaker, identities: list[Identity], tokens: list[int]
) -> None:
    group = sorted(identities, key=lambda each: each.peer_id)[: len(tokens)]
    take(maker, group, tokens)
    assert maker.log.head().chain_tokens == 10 + sum(tokens)


@pytest.mark.parametrize(
    ("tokens", "more", "why"),
    [
        # than the others learnt in its time
        ([10, 10, MOST_TOKENS * 10 + 1], 0, "81 tokens, more than 80"),
        ([CAP + 1], 0, f"{CAP + 1} tokens, more than {CAP}"),  # than can be unsent
        ([CAP, CAP, CAP + 1], 0, f"{CAP + 1} tokens, more than {CAP}"),
        ([10, 10, 10], 1, "tokens of the chain, they are"),
        ([10, 10, 10], 10**6, "tokens of the chain, they are"),
    ],
)
def test_more_than_members_can_have_learnt_from_is_refused(
    maker: ChainMaker, identities: list[Identity], tokens: list[int], more: int, why: str
) -> None:
    group = sorted(identities, key=lambda each: each.peer_id)[: len(tokens)]
    with pytest.raises(RecordRefused, match=why):
        take(maker, group, tokens, more=more)
    assert maker.log.head().round == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_record_leads_no_further_on_than_rounds_can_have_come_to_nothing(
    maker: ChainMaker, before: bool
) -> None:
    """A stage that follows one of the last round that a key can name has come to its end."""
    if not before:
        maker.log.drop_from(0)
        maker.last, maker.digests[1:], maker.anchors[1:] = None, [], []
    head = maker.log.head()

    def append(number: int) -> None:
        last, digests, anchors = maker.last, len(maker.digests), len(maker.anchors)
        maker.train(number)
        data, proof = maker.log.read_bytes(number), maker.log.certificate(number)
        assert data is not None and proof is not None
        maker.log.drop_from(number)
        maker.last, maker.digests[digests:], maker.anchors[anchors:] = last, [], []
        maker.log.append(data, proof)

    with pytest.raises(RecordRefused, match=f"more than {MOST_VOID} rounds after"):
        append(head.round + MOST_VOID + 1)
    assert maker.log.head() == head
    append(head.round + MOST_VOID)
    assert maker.log.head().round == head.round + MOST_VOID
