"""Who gave what: tokens count once over all stages, hours are those of rounds, names add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.peer.chain.summary import (
    ChainRound,
    contributions,
    grouped,
    token_seconds_by_peer,
    tokens_by_peer,
)

SHA = "ab" * 32
STEP = 500  # tokens of an inner step


def header(**members: tuple[int, float]) -> Any:
    """Of a record to which peers gave so many tokens at so many seconds an inner step."""
    given = [
        SimpleNamespace(peer=peer, tokens=tokens, step_s=step_s)
        for peer, (tokens, step_s) in members.items()
    ]
    return SimpleNamespace(
        round=0,
        ranks=(),
        tokens=sum(each.tokens for each in given),
        members=given,
        contributions=given,
        next_inner_steps=10,
        previous=SHA,
        chain_tokens=0,
        standings=(),
        rules=0,
    )


def rounds(*members: dict[str, tuple[int, float]]) -> list[ChainRound]:
    return [ChainRound.of(header(**each), SHA, 100) for each in members]


def rows_of(*stages: list[ChainRound], **names: tuple[str, str, float | None]) -> dict[str, Any]:
    sums = {n: (tokens_by_peer(each), token_seconds_by_peer(each)) for n, each in enumerate(stages)}
    return {row["id"]: row for row in contributions(sums, STEP, names)}


def test_a_replicas_tokens_count_once_and_each_of_its_stages_has_its_part() -> None:
    replica = [{"head": (4000, 1.0)}, {"head": (2000, 1.0)}]
    rows = rows_of(rounds(*replica), rounds({"tail": (4000, 1.0)}, {"moved": (2000, 1.0)}))
    assert {peer: row["tokens"] for peer, row in rows.items()} == {
        "head": 3000,
        "tail": 2000,
        "moved": 1000,
    }
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert [row["rank"] for row in rows.values()] == [1, 2, 3]


def test_a_peer_that_moved_has_its_tokens_and_hours_of_both_stages() -> None:
    first, second = rounds({"a": (5000, 3.0), "b": (5000, 3.0)}), rounds({"a": (1000, 3.0)})
    row = rows_of(first, second)["a"]
    assert (row["stages"], row["tokens"]) == ([0, 1], 3000)
    assert row["hours"] == pytest.approx(12 * 3 / 3600, abs=1e-4)


def test_hours_are_those_of_the_rounds_and_no_single_peer_makes_them_longer() -> None:
    """A slow machine has fewer tokens and longer steps; a liar names a step of a day."""
    members = {"fast": (60_000, 30.0), "slow": (20_000, 90.0), "liar": (60_000, 86_400.0)}
    rows = rows_of(rounds(members, members))
    assert {row["hours"] for row in rows.values()} == {2.0}


@pytest.mark.parametrize("step_s", [float("nan"), float("inf"), "long", None])
def test_a_header_whose_times_are_none_is_refused(step_s: Any) -> None:
    with pytest.raises(ValueError):
        rounds({"a": (100, step_s)})


def test_peers_of_one_name_or_team_add_up_and_who_states_none_is_in_none() -> None:
    names = {"a": ("Ada", "Foxes", 1.0), "b": ("Ada", "Foxes", 2.0), "c": ("", "Owls", None)}
    members = {"a": (100, 36.0), "b": (300, 36.0), "c": (500, 36.0), "d": (100, 36.0)}
    rows = list(rows_of(rounds(members), **names).values())
    assert [(row["id"], row["name"], row["since"]) for row in rows] == [
        ("c", "", None),
        ("b", "Ada", 2.0),
        ("a", "Ada", 1.0),
        ("d", "", None),
    ]
    (ada,) = grouped(rows, "name")
    assert (ada["name"], ada["peers"], ada["tokens"]) == ("Ada", 2, 400)
    assert ada["share"] == pytest.approx(0.4) and ada["hours"] == rows[1]["hours"] * 2
    assert [group["team"] for group in grouped(rows, "team")] == ["Owls", "Foxes"]


def test_a_run_without_a_round_has_no_rows() -> None:
    assert contributions({0: ({}, {}), 1: ({}, {})}, STEP, {}) == [] == grouped([], "team")
