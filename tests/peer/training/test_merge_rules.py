"""The merge beyond single trajectories: order, doubles, bounds, another chain's state.

One weight from 100, a gradient of 1, an outer step of learning rate 1/2 and momentum 1/2, w = 3/4,
as in test_merge.py: a first record with an average of 4 takes the anchor to 97, a second to 93.5.
"""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.peer.training.merge import (
    MergeConfig,
    Outcome,
    OutOfOrder,
    RecordFacts,
)
from tests.peer.training.merging import Peer, one


@pytest.fixture
def sent() -> Peer:
    """A peer whose four inner steps are in flight: its weight is 96."""
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    return peer


# ---- order, doubles, gaps ------------------------------------------------------------------------
def test_doubled_record_changes_nothing(sent: Peer) -> None:
    sent.steps(1)
    sent.record(0, 4, mine=4)
    before = sent.at, sent.merge.tokens, sent.merge.age
    assert sent.record(0, 4, mine=4) is Outcome.REPEATED
    assert (sent.at, sent.merge.tokens, sent.merge.age) == before


def test_record_that_skips_one_of_the_chain_is_refused_and_changes_nothing(sent: Peer) -> None:
    facts = RecordFacts(round=1, digest="d1", previous="d0", contributor=False)
    with pytest.raises(OutOfOrder, match="follows d0"):
        sent.merge.commit(facts, one(0), one(0))
    assert sent.at == (100, 96, 96)
    assert list(sent.merge.in_flight) == [0]


def test_later_record_of_the_chain_closes_an_open_send_as_void(sent: Peer) -> None:
    sent.record(1, 4)  # no record 0 in this chain;  u = 4;  p = 97 - 3
    assert sent.at == (97, 94, 98)
    assert not sent.merge.in_flight
    assert sent.merge.can_send


def test_earlier_record_leaves_a_send_in_flight_and_keeps_it_in_the_live_weight() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(1)
    peer.steps(1)
    peer.record(0, 4)  # u = 1, in flight 4;  p = 97 - 0.75 * 5 = 93.25;  start = 94.25
    assert peer.at == (97, 93.25, 94.25)
    assert list(peer.merge.in_flight) == [1]


def test_record_that_names_an_unknown_send_resets_to_the_anchor() -> None:
    peer = Peer()
    peer.steps(3)
    peer.merge.residual.values = one(1.0)
    assert peer.record(0, 4, mine=4) is Outcome.RESET
    assert peer.at == (97, 97, 97)
    assert peer.merge.residual.values.item() == 0
    assert (peer.merge.tokens, peer.merge.lost_tokens) == (0, 3)


def test_naming_a_known_send_without_its_contribution_is_refused_before_anything_changes(
    sent: Peer,
) -> None:
    facts = RecordFacts(round=0, digest="d0", previous="m", contributor=True)
    with pytest.raises(ValueError, match="left unsent"):
        sent.merge.commit(facts, one(0), one(0))
    assert sent.at == (100, 96, 96)
    assert sent.merge.round == -1


def test_only_one_send_is_in_flight_and_none_goes_without_tokens_or_behind_the_chain() -> None:
    peer = Peer()
    assert not peer.merge.can_send
    peer.record(5, 4)
    peer.steps(1)
    with pytest.raises(ValueError, match="last record 5"):
        peer.send(5)
    peer.send(6)
    peer.steps(1)
    with pytest.raises(ValueError, match=r"in flight \[6\]"):
        peer.send(7)


def test_send_that_no_record_can_name_is_not_remembered() -> None:
    peer = Peer()
    for number in range(2):
        peer.steps(1)
        peer.send(number)
        peer.merge.void(number, certain=number == 1)
    assert (peer.merge.tokens_of(0), peer.merge.tokens_of(1)) == (1, None)


def test_progress_of_an_undone_send_ages_from_its_void() -> None:
    peer = Peer(MergeConfig(weight=0.75, decay=1.0, max_age=2))
    peer.steps(4)
    peer.send(0)
    peer.merge.void(0, certain=True)
    peer.record(1, 4)
    assert (peer.merge.age, peer.merge.lost_tokens) == (1, 0)
    peer.record(2, 4)
    assert (peer.merge.age, peer.merge.lost_tokens) == (0, 4)


def test_reset_peer_follows_the_chain_as_a_new_one_does(sent: Peer) -> None:
    sent.merge.void(0)
    sent.merge.reset_to_anchor()
    for number in range(1, 12):
        assert sent.record(number, 4) is Outcome.FOLLOWED
    assert sent.at[0] == sent.at[1] == sent.at[2]


# ---- another chain's state -----------------------------------------------------------------------
def resync(peer: Peer, **changes: Any) -> Outcome:
    arguments: dict[str, Any] = {"since": -1, "named": (), "records": 2} | changes
    return peer.merge.resync(3, "w3", one(50), one(7), **arguments)


def test_fork_loser_takes_the_winners_anchor_undoes_its_open_send_and_keeps_its_progress(
    sent: Peer,
) -> None:
    sent.steps(1)
    assert resync(sent) is Outcome.UNDONE  # u = 1 + 4;  p = 50 - 3.75
    assert sent.at == (50, 46.25, 51.25)
    assert (sent.merge.round, sent.merge.digest, sent.merge.momentum.item()) == (3, "w3", 7)
    assert sent.merge.tokens == 5


def test_resync_counts_an_open_send_that_the_other_chain_names(sent: Peer) -> None:
    sent.steps(1)
    assert resync(sent, named={0}) is Outcome.COUNTED
    assert sent.at == (50, 49.25, 50.25)  # u = 1
    assert sent.merge.residual.values.item() == 0


def test_other_chain_that_names_an_undone_send_resets_to_its_anchor(sent: Peer) -> None:
    sent.merge.void(0)
    assert resync(sent, named={0}) is Outcome.RESET
    assert sent.at == (50, 50, 50)
    assert (sent.merge.counted_tokens, sent.merge.lost_tokens) == (4, 0)


def test_send_that_only_the_lost_chain_counted_is_lost_and_said_so(sent: Peer) -> None:
    sent.record(0, 4, mine=4)
    sent.steps(1)
    assert resync(sent) is Outcome.FOLLOWED
    assert (sent.merge.lost_tokens, sent.merge.tokens) == (4, 1)
    assert sent.at == (50, 49.25, 50.25)


def test_send_that_both_chains_counted_is_neither_lost_nor_unknown(sent: Peer) -> None:
    sent.record(0, 4, mine=4)
    sent.steps(1)
    assert resync(sent, named={0}) is Outcome.FOLLOWED
    assert (sent.merge.lost_tokens, sent.merge.tokens) == (0, 1)


def test_send_counted_before_the_fork_is_not_lost_with_it(sent: Peer) -> None:
    sent.record(0, 4, mine=4)
    resync(sent, since=0)
    assert sent.merge.lost_tokens == 0


def test_send_is_counted_once_where_the_state_is_from_before_its_record(sent: Peer) -> None:
    """Who goes back to the beginning takes records again that hold its own sends."""
    sent.record(0, 4, mine=4)
    sent.steps(1)
    sent.merge.resync(-1, "root", one(100), one(0), since=0, named=(), records=1)
    facts = RecordFacts(round=0, digest="w0", previous="root", contributor=True)
    assert sent.merge.commit(facts, one(97), one(4)) is Outcome.FOLLOWED
    assert (sent.merge.counted_tokens, sent.merge.tokens, sent.merge.lost_tokens) == (4, 1, 0)
    assert sent.at == (97, 96.25, 97.25)  # u = 1


def test_newer_send_counts_whose_round_another_chain_had_counted(sent: Peer) -> None:
    """Who was killed as it went back does not know any more since when its chain is lost."""
    sent.record(0, 4, mine=4)
    sent.merge.resync(-1, "root", one(100), one(0), since=0, named=(), records=1)
    sent.steps(1)
    sent.send(0)
    assert sent.record(0, 4, mine=1) is Outcome.COUNTED
    assert not sent.merge.tokens and not sent.merge.in_flight


def test_state_that_is_many_records_ahead_ages_what_is_unsent_by_as_many() -> None:
    peer = Peer()
    peer.steps(1)
    peer.send(0)
    peer.merge.void(0)
    resync(peer, records=8)
    assert (peer.merge.lost_tokens, peer.merge.tokens) == (1, 0)


def test_other_chain_that_names_an_unknown_send_resets_to_its_anchor() -> None:
    peer = Peer()
    peer.steps(4)
    assert resync(peer, named={2}) is Outcome.RESET
    assert peer.at == (50, 50, 50)


def test_chain_goes_on_from_the_state_that_was_taken() -> None:
    peer = Peer()
    resync(peer)
    peer.steps(1)
    peer.send(4)
    assert peer.record(4, 1, mine=1) is Outcome.COUNTED
