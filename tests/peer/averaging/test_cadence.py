"""However large a swarm grows, what a peer tells and hears stays within its budget."""

from __future__ import annotations

import pytest

from dilocox.dht.records import MAX_LIFETIME_S
from dilocox.peer.averaging.announcer import LONGEST_S, Cadence, Heard

HEARTBEAT_S = 10.0
RECORD = 1300  # bytes of a peer's records, about
TOLD_PER_S = 1300.0  # bytes, as docs/algorithm.md says; 2 more for each peer above 200


def heard(peers: int, stages: int = 4) -> Heard:
    own = peers // stages
    return Heard(peers=peers, own_bytes=own * RECORD, other_bytes=(peers - own) * RECORD)


def cadence(peers: int, stages: int = 4, heartbeat_s: float = HEARTBEAT_S) -> Cadence:
    made = Cadence(heartbeat_s=heartbeat_s, now_s=0.0)
    made.hear(heard(peers, stages))
    return made


def test_a_small_swarm_keeps_the_heartbeat_of_the_manifest() -> None:
    for peers in (0, 1, 4, 6):
        small = cadence(peers, stages=1)
        assert small.announce_s == small.look_s == small.look_at_others_s == HEARTBEAT_S
        assert small.lifetime_s == 3 * HEARTBEAT_S


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("peers", [8, 50, 200, 1000, 3000])
def test_what_all_announce_is_heard_within_the_budget(peers: int, stages: int) -> None:
    seen, made = heard(peers, stages), cadence(peers, stages)
    own_per_s = seen.own_bytes / made.announce_s
    # a look at other stages hears the newest of each owner once
    others_per_s = seen.other_bytes / max(made.announce_s, made.look_at_others_s)
    if made.announce_s < LONGEST_S:
        assert own_per_s + others_per_s <= TOLD_PER_S + 2 * max(0, peers - 200)
    assert made.look_s <= made.announce_s
    assert made.lifetime_s <= MAX_LIFETIME_S["stage"]


@pytest.mark.parametrize("peers", [1, 50, 1000, 100_000])
def test_nobody_vanishes_between_two_announcements(peers: int) -> None:
    made = cadence(peers)
    # two may be lost, and a look comes late by its own interval
    assert made.lifetime_s >= 2 * made.announce_s + made.look_s


def test_an_operator_who_sets_a_short_heartbeat_gets_it() -> None:
    made = cadence(6, stages=1, heartbeat_s=1.0)
    assert made.announce_s == 1.0
    assert made.lifetime_s == 3.0


def test_haste_is_paid_from_what_was_saved_and_comes_back() -> None:
    made = cadence(200)
    while made.may_hurry(0.0):
        made.hurried(0.0)
    now, hurried = 0.0, 0
    while now < 3600.0:
        now += 1.0
        if made.may_hurry(now):
            made.hurried(now)
            hurried += 1
    seen = heard(200)
    paid_per_s = hurried * (seen.own_bytes + seen.other_bytes / 4) / now
    assert hurried > 5
    assert paid_per_s <= TOLD_PER_S / 3


@pytest.mark.parametrize("now", [0.0, 1e6])
def test_what_is_saved_is_only_so_much(now: float) -> None:
    made = cadence(200)
    hurried = 0
    while made.may_hurry(now):
        made.hurried(now)
        hurried += 1
    assert hurried == 4


def test_a_bell_costs_its_share_and_is_never_refused() -> None:
    made = cadence(200)
    for _ in range(50):
        made.hurried(0.0, share=0.2)
    assert not made.may_hurry(100.0)  # it is paid back first
    assert made.may_hurry(1e5)


def test_what_was_announced_is_renewed_before_it_ends_though_the_interval_grew() -> None:
    made = cadence(3, stages=1)
    lives_s = made.lifetime_s
    assert not made.due(made.announce_s - 1.0, lives_s) and made.due(made.announce_s, lives_s)
    made.hear(heard(400, 1))
    assert made.announce_s > lives_s
    assert not made.due(0.5 * lives_s, lives_s) and made.due(0.8 * lives_s, lives_s)
    assert not made.due(0.8 * lives_s, made.lifetime_s)


def test_what_is_told_beside_leaves_enough_for_what_cannot_wait() -> None:
    """Or the claims of records would use up what a head needs to say that its replica is gone."""
    made = Cadence(heartbeat_s=10.0, now_s=0.0)
    while made.may_hurry(0.0, 0.3):
        made.hurried(0.0, 0.3)
    assert made.may_hurry(0.0)
