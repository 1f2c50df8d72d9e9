"""The keeper of a head's round: when it rings."""

from __future__ import annotations

from dilocox.dht.records import ReplicaRecord
from dilocox.peer.round_keeper import RoundKeeper
from dilocox.peer.view import SwarmView

VIEW = SwarmView(me="me")


def replica(inner_step: int) -> ReplicaRecord:
    return ReplicaRecord(
        members=("me",),
        epoch=0,
        round=0,
        inner_step=inner_step,
        step_s=0.1,
        tokens_per_s=1.0,
        train_loss=None,
        val_loss=None,
        val_round=-1,
        codec="",
        last_fault="",
    )


def follow(keeper: RoundKeeper, inner_step: int, *, undecided: bool) -> bool:
    """Whether the head has rung after another look."""
    keeper.follow(VIEW, replica(inner_step), 100.0, inner_steps=10, tokens=1, undecided=undecided)
    return keeper.bell is not None


def test_a_head_rings_after_its_inner_steps() -> None:
    keeper = RoundKeeper("me")
    assert not follow(keeper, 9, undecided=False)
    assert follow(keeper, 10, undecided=False)


def test_a_head_does_not_ring_while_its_last_send_is_undecided() -> None:
    keeper = RoundKeeper("me")
    assert not follow(keeper, 25, undecided=True)
    assert follow(keeper, 26, undecided=False)


def test_a_send_that_becomes_undecided_does_not_take_a_bell_back() -> None:
    keeper = RoundKeeper("me")
    assert follow(keeper, 10, undecided=False)
    assert follow(keeper, 11, undecided=True)
