"""Whom a head asks, in which order, and what it says where it can ask nobody."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.pipeline.candidates import (
    Vacancies,
    best_chain,
    candidates,
    cannot_be_reached,
    missing,
)
from tests.pipeline.swarms import in_replica, stage_record

TWO = Vacancies(me="head", num_stages=2, members={0: False})
THREE = Vacancies(me="head", num_stages=3, members={0: False})


def test_spares_come_first_then_the_nearest_and_unknown_ones_last() -> None:
    vacancies = Vacancies(
        me="head",
        num_stages=2,
        members={0: False},
        round_trips={"near": 0.01, "far": 0.2, "loose near": 0.001},
    )
    here = {name: stage_record() for name in ("unknown", "far", "near")}
    here |= {"loose near": stage_record(state="training"), "loose": stage_record(state="training")}
    found = candidates({1: here}, vacancies)
    assert found == {1: ("near", "far", "unknown", "loose near", "loose")}


@pytest.mark.parametrize(
    "record",
    [stage_record(state="left"), stage_record(state="joining"), in_replica("other")],
    ids=lambda record: f"{record.state} {record.replica}",
)
def test_peers_that_cannot_come_are_not_asked(record: object) -> None:
    assert candidates({1: {"peer": record}}, TWO) == {1: ()}  # type: ignore[dict-item]
    own = in_replica("head")  # an old record, of a replica of this head
    assert candidates({1: {"peer": own}}, TWO) == {1: ("peer",)}


def test_heads_that_know_no_round_trips_ask_in_different_orders() -> None:
    records = {1: {f"peer{index}": stage_record() for index in range(20)}}
    orders = set[tuple[str, ...]]()
    for head in ("a", "b", "c"):
        vacancies = Vacancies(me=head, num_stages=2, members={0: False})
        found = candidates(records, vacancies)[1]
        assert found == candidates(records, vacancies)[1]
        assert sorted(found) == sorted(records[1])
        orders.add(found)
    assert len(orders) == 3


def test_a_splice_looks_only_at_the_empty_stage_and_at_its_neighbours_reach() -> None:
    records = {1: {"client": stage_record(client_mode=True), "other": stage_record()}}
    for members, expected in (
        ({0: False, 2: False}, {"client", "other"}),
        ({0: True, 2: False}, {"other"}),
        ({0: False, 2: True}, {"other"}),
    ):
        vacancies = Vacancies(me="head", num_stages=3, members=members)
        assert set(candidates(records, vacancies)[1]) == expected
        assert set(candidates(records, vacancies)) == {1}


def test_a_head_that_has_the_choice_leaves_the_reachable_to_heads_that_have_not() -> None:
    stage = {"open": stage_record(), "client": stage_record(client_mode=True)}
    near = {"open": 0.01, "client": 0.1}
    alone = {0: {"head": stage_record()}, 1: stage}
    beside = {0: {"head": stage_record(), "shut": stage_record(client_mode=True)}, 1: stage}
    for members, records, expected in (
        ({0: False}, alone, ("open", "client")),
        ({0: False}, beside, ("client", "open")),
        ({0: True}, beside, ("open",)),
    ):
        vacancies = Vacancies(me="head", num_stages=2, members=members, round_trips=near)
        assert candidates(records, vacancies)[1] == expected


def test_who_has_helped_comes_first_and_who_said_no_after_the_others_by_turns() -> None:
    near = {f"near {number}": 0.01 for number in range(40)}
    records = {1: dict.fromkeys((*near, "helped", "new"), stage_record())}
    vacancies = Vacancies(
        me="head", num_stages=2, members={0: False}, round_trips=near, helped={"helped"}
    )
    found = candidates(records, vacancies)[1]
    assert (found[0], found[-1]) == ("helped", "new")
    said_no = dict[str, float]()
    for at in range(60):
        said_no[candidates(records, replace(vacancies, helped=(), said_no=said_no))[1][0]] = at
    assert {"helped", "new"} <= said_no.keys(), "however near the others say that they are"


def test_a_stage_cannot_be_reached_if_all_its_peers_only_dial_out() -> None:
    client, joiner = stage_record(client_mode=True), stage_record(state="joining")
    assert cannot_be_reached({"a": client, "b": client, "c": joiner})
    assert not cannot_be_reached({"a": client, "b": stage_record()})
    assert not cannot_be_reached({"c": joiner})


def test_a_stage_without_anybody_is_named() -> None:
    records = {1: {"a": stage_record()}, 2: {"gone": stage_record(state="left")}}
    assert missing(records, THREE) == ("stage 2 has no peer",)
    assert missing({}, THREE) == ("stage 1 has no peer", "stage 2 has no peer")
    assert missing({1: records[1]}, TWO) == ()


def test_what_keeps_the_peers_of_a_stage_is_counted() -> None:
    busy = {f"busy{index}": in_replica("other") for index in range(3)}
    assert missing({1: busy}, TWO) == ("stage 1 has no free peer (3 train in other replicas)",)
    head = Vacancies(me="head", num_stages=2, members={0: True}, avoid={"dead"})
    mixed = {
        "a": in_replica("other"),
        "b": stage_record(state="joining"),
        "dead": stage_record(),
        "d": stage_record(client_mode=True),
        "left": stage_record(state="left"),
    }
    assert missing({1: mixed}, head) == (
        "stage 1 has no free peer (1 trains in another replica, 1 is still joining, "
        "1 failed lately, 1 can only dial out, like its neighbour)",
    )


def test_stages_full_of_peers_that_only_dial_out_are_named_together() -> None:
    records = {stage: {f"c{stage}": stage_record(client_mode=True)} for stage in (1, 2)}
    (line,) = missing(records, THREE)
    assert line.startswith("stages 1, 2: ")
    records[2]["open"] = stage_record()
    assert missing(records, THREE) == ()


def test_the_chain_takes_the_first_that_can_be_neighbours() -> None:
    willing = {1: ("client", "slow"), 2: ("client too", "slower")}
    clients = {"client", "client too"}
    assert best_chain(willing, set(), THREE) == {1: "client", 2: "client too"}
    chain = best_chain(willing, clients, THREE)
    assert chain in ({1: "client", 2: "slower"}, {1: "slow", 2: "client too"})
    only_dials = Vacancies(me="head", num_stages=3, members={0: True})
    assert best_chain(willing, clients, only_dials) == {1: "slow", 2: "client too"}
    assert best_chain({1: ("client",), 2: ("slower",)}, clients, only_dials) is None
    assert best_chain({1: ("slow",)}, clients, THREE) is None
    assert best_chain({}, clients, Vacancies(me="head", num_stages=1, members={0: True})) == {}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=4), st.booleans())
def test_the_chain_is_the_best_of_all(stages: list[list[bool]], head_dials: bool) -> None:
    """Against trying every combination; a peer's name says whether it can only dial out."""
    willing = {
        stage: tuple(f"{stage}.{position}.{client}" for position, client in enumerate(clients))
        for stage, clients in enumerate(stages, start=1)
    }
    vacancies = Vacancies(me="head", num_stages=len(stages) + 1, members={0: head_dials})
    clients = {peer for peers in willing.values() for peer in peers if peer.endswith("True")}

    def cost(peers: tuple[str, ...]) -> int | None:
        dials = [head_dials, *(peer in clients for peer in peers)]
        if any(a and b for a, b in itertools.pairwise(dials)):
            return None
        return sum(int(peer.split(".")[1]) for peer in peers)

    costs = [cost(peers) for peers in itertools.product(*willing.values())]
    possible = [each for each in costs if each is not None]
    chain = best_chain(willing, clients, vacancies)
    if chain is None:
        assert not possible
    else:
        assert cost(tuple(chain[stage] for stage in willing)) == min(possible)
