"""The merge: golden trajectories by hand.

One weight that starts at 100, a fixed gradient of 1 and an inner learning rate
of 1, so that every inner step takes 1 off; H = 4; an outer step of learning rate 1/2 and momentum
1/2; w = 3/4. Where all peers do the same, every average is 4:

    record 0: buf = 4;          d = 4 + 2   = 6;    A = 100  - 3    = 97
    record 1: buf = 2 + 4 = 6;  d = 4 + 3   = 7;    A = 97   - 3.5  = 93.5
    record 2: buf = 3 + 4 = 7;  d = 4 + 3.5 = 7.5;  A = 93.5 - 3.75 = 89.75
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from dilocox.dht.manifest import CodecSpec, OuterSpec, RoundSpec
from dilocox.peer.training.merge import Merge, MergeConfig, Outcome, RecordFacts, Remainder
from tests.peer.training.merging import Peer, one, unsent

H = 4


# ---- golden trajectories -------------------------------------------------------------------------
def diloco_by_hand(rounds: int) -> list[float]:
    """`none` as a plain loop: H inner steps, one outer step, start again from the anchor."""
    anchor = weight = 100.0
    buffer, weights = 0.0, list[float]()
    for _ in range(rounds):
        for _ in range(H):
            weight -= 1.0
        average = anchor - weight
        buffer = 0.5 * buffer + average
        anchor -= 0.5 * (average + 0.5 * buffer)
        weight = anchor
        weights.append(weight)
    return weights


def rule(merge: Literal["rebase", "reset", "none"]) -> MergeConfig:
    return MergeConfig.of(OuterSpec(merge=merge), CodecSpec(residual_decay=1.0), RoundSpec())


@pytest.mark.parametrize("merge", ["rebase", "reset", "none"])
def test_arrival_after_0_inner_steps_equals_none_exactly(
    merge: Literal["rebase", "reset", "none"],
) -> None:
    peer = Peer(rule(merge))
    weights = list[float]()
    for number in range(3):
        peer.steps(H)
        assert peer.send(number) == H
        assert peer.record(number, 4, mine=4) is Outcome.COUNTED
        weights.append(peer.live.item())
        assert peer.at[1] == peer.at[2]  # nothing is unsent
    assert weights == diloco_by_hand(3) == [97, 93.5, 89.75]


def test_arrival_after_1_inner_step() -> None:
    peer = Peer()
    peer.steps(4)  # p = 96
    peer.send(0)  # start = 96
    peer.steps(1)  # p = 95
    peer.record(0, 4, mine=4)  # u = 1;  p = 97 - 0.75 = 96.25;  start = 96.25 + 1
    assert peer.at == (97, 96.25, 97.25)
    peer.steps(3)  # p = 93.25
    assert peer.send(1) == 4  # start = 93.25
    peer.steps(1)  # p = 92.25
    peer.record(1, 4, mine=4)  # u = 1;  p = 93.5 - 0.75 = 92.75
    assert peer.at == (93.5, 92.75, 93.75)


def test_arrival_after_a_whole_round_of_inner_steps() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.steps(4)  # p = 92, and the record comes just before the next send
    peer.record(0, 4, mine=4)  # u = 4;  p = 97 - 3 = 94;  start = 98
    assert peer.at == (97, 94, 98)
    assert peer.send(1) == 4
    peer.steps(4)  # p = 90
    peer.record(1, 4, mine=4)  # u = 4;  p = 93.5 - 3 = 90.5
    assert peer.at == (93.5, 90.5, 94.5)


def test_late_by_one_round_skips_one_send_and_loses_nothing() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.steps(4)  # the end of round 1: record 0 is still open
    assert not peer.merge.can_send
    peer.steps(2)  # p = 90
    peer.record(0, 4, mine=4)  # u = 6;  p = 97 - 4.5 = 92.5;  start = 98.5
    assert peer.at == (97, 92.5, 98.5)
    peer.steps(2)  # p = 90.5
    assert peer.send(2) == 8
    assert peer.merge.in_flight[2].tokens == 8
    peer.record(2, 8, mine=8)  # buf = 2 + 8 = 10;  d = 8 + 5 = 13;  A = 97 - 6.5 = 90.5
    assert peer.at == (90.5, 90.5, 90.5)


def test_late_by_two_rounds() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.steps(4 + 4 + 1)  # rounds 1 and 2 whole, one step of round 3: p = 87
    peer.record(0, 4, mine=4)  # u = 9;  p = 97 - 6.75 = 90.25;  start = 99.25
    assert peer.at == (97, 90.25, 99.25)
    peer.steps(3)  # p = 87.25
    assert peer.send(3) == 12


def test_void_round_leaves_anchor_and_live_weight_and_the_next_send_has_both_rounds() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.steps(2)  # p = 94
    peer.merge.void(0)  # start = 96 + 4
    assert peer.at == (100, 94, 100)
    assert peer.merge.tokens == 6
    peer.steps(2)  # p = 92
    assert peer.send(1) == 8
    peer.record(1, 8, mine=8)  # buf = 8;  d = 8 + 4 = 12;  A = 100 - 6 = 94
    assert peer.at == (94, 94, 94)


def test_peer_that_missed_the_group_keeps_its_send_on_top_of_the_others_record() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.steps(1)  # p = 95
    assert peer.record(0, 4) is Outcome.UNDONE  # u = 1 + 4;  p = 97 - 3.75 = 93.25
    assert peer.at == (97, 93.25, 98.25)
    assert peer.merge.tokens == 5
    peer.steps(3)  # p = 90.25
    assert peer.send(1) == 8


def test_peer_without_a_send_follows_the_record() -> None:
    peer = Peer()
    peer.steps(2)  # p = 98
    assert peer.record(0, 4) is Outcome.FOLLOWED  # u = 2;  p = 97 - 1.5
    assert peer.at == (97, 95.5, 97.5)


def test_undone_send_that_is_named_after_all_costs_what_was_learnt_since() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.merge.void(0)  # presumed:  start = 100
    peer.steps(4)  # p = 92
    assert peer.send(1) == 8  # rounds 0 and 1
    assert peer.record(0, 4, mine=4) is Outcome.RESET
    assert peer.at == (97, 97, 97)
    peer.steps(4)
    assert not peer.merge.can_send, "the group of round 1 still reads what was sent for it"
    peer.merge.void(1)
    assert (peer.merge.lost_tokens, peer.merge.counted_tokens) == (4, 4)
    assert peer.send(2) == 4


def test_what_was_dropped_in_flight_is_counted_where_its_record_comes() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.merge.void(0)
    peer.send(1)
    peer.record(0, 4, mine=4)  # now the chain has these steps, and may have them once more
    assert peer.record(1, 4, mine=3) is Outcome.COUNTED
    assert peer.at == (93.5, 93.5, 93.5)
    assert peer.merge.residual.values.item() == 0
    assert (peer.merge.trained_tokens, peer.merge.counted_tokens) == (4, 8)


def test_an_undone_send_whose_successor_was_counted_is_not_unsent_any_more() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(1)
    peer.merge.void(1)
    peer.steps(1)
    peer.send(2)
    peer.record(2, 5, mine=5)
    peer.steps(1)
    assert (
        peer.merge.resync(
            3, "w", peer.merge.anchor, peer.merge.momentum, since=-1, named={1, 2}, records=1
        )
        is not Outcome.RESET
    )
    assert peer.merge.tokens == 1


def test_an_undone_send_whose_progress_was_dropped_is_not_unsent_any_more() -> None:
    peer = Peer()
    peer.steps(4)
    peer.send(0)
    peer.merge.void(0)
    peer.merge.drop()
    peer.steps(1)
    assert peer.record(0, 4, mine=4) is Outcome.COUNTED
    assert peer.merge.tokens == 1


def test_unsent_progress_is_dropped_after_max_age_records() -> None:
    peer = Peer(MergeConfig(weight=0.75, decay=1.0, max_age=2))
    peer.steps(3)  # p = 97
    peer.record(0, 4)  # u = 3;  p = 97 - 2.25 = 94.75;  start = 97.75
    assert peer.at == (97, 94.75, 97.75)
    peer.record(1, 4)  # the second record: dropped;  p = A
    assert peer.at == (93.5, 93.5, 93.5)
    assert (peer.merge.lost_tokens, peer.merge.tokens) == (3, 0)


def test_age_counts_from_the_moment_when_nothing_was_unsent() -> None:
    peer = Peer(MergeConfig(weight=0.75, decay=1.0, max_age=2))
    for number in range(3):
        peer.record(number, 4)  # an idle peer does not age
    peer.steps(1)
    peer.record(3, 4)
    assert peer.merge.lost_tokens == 0
    peer.send(4)  # sent: young again
    peer.steps(1)
    peer.record(4, 4, mine=1)
    assert (peer.merge.lost_tokens, peer.merge.tokens) == (0, 1)


def test_reset_at_the_round_end_starts_the_next_round_from_the_anchor() -> None:
    peer = Peer(rule("reset"))
    peer.steps(4)
    peer.send(0)
    peer.steps(4)
    with pytest.raises(ValueError, match="can_send"):
        peer.send(1)
    peer.record(0, 4, mine=4)  # u = 4 stays unsent, yet w = 0:  p = 97;  start = 101
    assert peer.at == (97, 97, 101)
    assert peer.send(1) == 4


def test_error_of_the_codec_goes_with_the_next_message() -> None:
    peer = Peer(MergeConfig(weight=0.75, decay=0.5, max_age=8))
    peer.steps(4)
    peer.send(0)
    peer.record(0, 4, mine=3)  # E = 0.5 * (4 - 3)
    peer.steps(4)
    assert peer.send(1) == 4.5
    peer.merge.void(1)  # E is 0.5 again, and start - p is 4
    assert peer.merge.residual.values.item() == 0.5
    assert unsent(peer.merge).item() == 4


def test_the_error_of_the_codec_does_not_grow_older_than_progress_may() -> None:
    """Who was away for hundreds of records would send an error of weights that are long gone."""
    peer = Peer(MergeConfig(weight=0.75, decay=0.5, max_age=2))
    peer.steps(4)
    peer.send(0)
    peer.record(0, 4, mine=3)  # E = 0.5
    peer.record(1, 4)
    peer.steps(4)
    assert peer.send(2) == 4.5, "one record later it is sent"
    assert peer.record(2, 4) is Outcome.UNDONE
    assert peer.merge.residual.norm == 0, "the second record without it"
    peer.steps(4)
    assert peer.send(3) == 8
    peer.record(3, 4, mine=7)
    assert peer.merge.residual.norm == 0.5


def test_the_error_of_the_codec_ages_through_a_restart_and_with_a_state_of_others() -> None:
    config = MergeConfig(weight=0.75, decay=0.5, max_age=3)
    for records in (1, 2):
        peer = Peer(config)
        peer.steps(4)
        peer.send(0)
        peer.record(0, 4, mine=3)
        peer.record(1, 4)
        again = Merge.from_state(config, one(0), *peer.merge.state())
        again.resync(9, "other", one(1), one(0), since=1, named=(), records=records)
        assert (again.residual.norm == 0) == (records == 2)


def test_left_out_parts_stay_whole_and_undecayed_in_the_residual() -> None:
    live = torch.zeros(4, dtype=torch.float64)
    config = MergeConfig(weight=0.75, decay=0.5)
    zeros = torch.zeros_like(live)
    merge = Merge(config, live, zeros.clone(), zeros.clone(), round_number=-1, digest="m")
    live -= torch.tensor([4.0, 4, 4, 4])
    merge.trained(1)
    send = merge.send(0)
    facts = RecordFacts(round=0, digest="d0", previous="m", contributor=True)
    send.message.sub_(torch.tensor([3.0, 1, 0, 3]))
    own = Remainder(send.message, left_out=[slice(1, 3)])
    merge.commit(facts, zeros.clone(), zeros.clone(), own)
    assert merge.residual.values.tolist() == [0.5, 3, 4, 0.5]
