"""How a swarm is, in one sentence: each state, and which one goes before which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import pytest

from dilocox.dht.manifest_revisions import in_state
from dilocox.peer.monitor import health
from dilocox.peer.monitor.chains import StageRounds
from dilocox.peer.monitor.health import STATES, Health, health_of
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.look import SwarmLook
from tests.peer.fabricated import claim_record, manifest_of, replica_record, stage_record

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.utc).timestamp()
FULL, JOINING, EMPTY = ("training", "spare"), ("joining",), ()
# three rounds of 30 s, and 20 s of patience: with a group, and two of the longest exchanges
MANIFEST = manifest_of(
    deadlines={"matchmaking_s": 1.5, "exchange_s": 0.75, "vote_s": 2.0}, rounds={"inner_steps": 30}
)


def told(
    *stages: Sequence[Any],
    after_s: float = 10.0,
    step_s: float = 1.0,
    state: Any = "running",
    replicas: int = 2,
    bootstraps: bool = True,
    begun: bool = True,
    chain_tokens: Mapping[str, int] | None = None,
    progress_at: Sequence[float | None] | None = None,
    **history: float,
) -> Health:
    """stages: the states of their peers. chain_tokens: as peers claim them. progress_at: of the
    stages, else noon; the look is some seconds later. history: times that it has.
    """
    look = SwarmLook(
        at=NOON + after_s,
        manifest=MANIFEST if state == "running" else in_state(MANIFEST, state),
        bootstraps={"boot": bootstraps},
        answered=True,
        stages={
            number: {f"{number}.{n}": stage_record(state=each) for n, each in enumerate(states)}
            for number, states in enumerate(stages)
        },
        claims={0: {peer: claim_record(5, "d", n) for peer, n in (chain_tokens or {}).items()}},
        witness="archive",
        replicas={
            str(number): replica_record(members=(), step_s=step_s) for number in range(replicas)
        },
    )
    made = SwarmHistory.begun(len(stages), "root", history.pop("watched_since", NOON - 3600))
    made.held_at, made.seen_at = history.get("held_at"), history.get("seen_at")
    made.stages = [
        StageRounds(rounds=5 * begun, times={} if at is None else {5: at})
        for at in progress_at or [NOON] * len(stages)
    ]
    return health_of(look, made)


def sentence(*stages: Sequence[str], **changes: Any) -> str:
    return told(*stages, **changes).sentence


def test_a_state_is_told_in_one_sentence_and_an_operators_word_goes_first() -> None:
    assert told(FULL, FULL) == Health("training", "training")
    assert sentence(FULL, FULL, replicas=0) == "training: replicas form"
    assert told(EMPTY, EMPTY, state="ended") == Health("ended", "ended")
    whole = MANIFEST.end_tokens
    assert told(FULL, chain_tokens={"0.0": whole}) == Health("ended", "ended")
    # peer ids that cost nothing do not end it: what the operator's archive holds counts first
    strangers = {f"0.{number}": whole for number in range(2)}
    assert sentence(FULL, chain_tokens={**strangers, "archive": whole - 1}) == "training"
    paused = told(FULL, FULL, after_s=10_000, state="paused")
    assert paused == Health("paused", "paused") and paused.good
    blocked = told(FULL, FULL, EMPTY)
    assert blocked == Health("blocked", "blocked: stage 2 has no peer", (2,)) and not blocked.good


@pytest.mark.parametrize(
    ("empty", "named"),
    [
        ((1, 2), "stages 1 and 2"),
        ((1, 2, 3), "stages 1, 2 and 3"),
        ((1, 2, 3, 4), "stages 1, 2, 3 and 4"),
        ((1, 2, 3, 4, 5, 6), "stages 1, 2, 3, 4 and 2 more"),
    ],
)
def test_several_empty_stages_are_named_up_to_four(empty: tuple[int, ...], named: str) -> None:
    found = told(*(EMPTY if number in empty else FULL for number in range(8)))
    assert found.sentence == f"blocked: {named} have no peer"
    assert found.blocked == empty


def test_empty_stages_are_waited_for_while_their_peers_join_or_nobody_has_begun() -> None:
    assert sentence(EMPTY, EMPTY, begun=False) == "waiting for the first peers"
    assert sentence(FULL, EMPTY, begun=False) == "blocked: stage 1 has no peer"
    assert sentence(EMPTY, EMPTY) == "blocked: no stage has a peer"
    assert sentence(JOINING, EMPTY) == "blocked: stage 1 has no peer"
    waiting = "waiting: the peers of stage 1 are joining"
    assert told(FULL, JOINING) == Health("waiting", waiting, (1,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # after three usual rounds and an exchange's patience
        ({"after_s": 109}, "training"),
        ({"after_s": 111}, "stalled since 12:00 UTC"),
        # one stage is enough
        ({"progress_at": [NOON, NOON - 600]}, "stalled since 11:50 UTC"),
        # short rounds are given a minute
        ({"step_s": 0.01, "after_s": 59}, "training"),
        ({"step_s": 0.01, "after_s": 61}, "stalled since 12:00 UTC"),
        # without a round in view the watch itself is the measure
        ({"progress_at": [None, None], "watched_since": NOON}, "training"),
        ({"progress_at": [None, None]}, "stalled since 11:00 UTC"),
        # a round from before the watch is none
        ({"progress_at": [NOON - 7200] * 2, "watched_since": NOON}, "training"),
        (
            {"progress_at": [NOON - 7200] * 2, "watched_since": NOON, "after_s": 111},
            "stalled since 12:00 UTC",
        ),
        # after a time without rounds they are waited for anew
        ({"progress_at": [NOON - 1800] * 2, "held_at": NOON}, "training"),
        (
            {"progress_at": [NOON - 1800] * 2, "held_at": NOON, "after_s": 111},
            "stalled since 12:00 UTC",
        ),
        ({"progress_at": [NOON + 5] * 2, "held_at": NOON, "after_s": 114}, "training"),
    ],
)
def test_a_run_stalls_when_no_round_comes_for_three_usual_ones(
    changes: dict[str, Any], expected: str
) -> None:
    assert sentence(FULL, FULL, **changes) == expected


def test_a_swarm_out_of_sight_is_unreachable_since_it_was_seen_last() -> None:
    found = told(EMPTY, bootstraps=False, seen_at=NOON - 60)
    assert found == Health("unreachable", "unreachable: nobody answers since 11:59 UTC")
    assert sentence(EMPTY, bootstraps=False).endswith("since 11:00 UTC")


def test_without_a_bootstrap_every_sentence_of_a_run_that_goes_on_says_so() -> None:
    tail = "; no bootstrap answers: nobody can join"
    found = told(FULL, FULL, bootstraps=False)
    # the monitor's figure of health stays: for this there is an alert of its own
    assert found == Health("training", "training" + tail, warns=True) and found.good
    assert sentence(FULL, EMPTY, bootstraps=False) == "blocked: stage 1 has no peer" + tail
    assert sentence(FULL, bootstraps=False, state="paused") == "paused" + tail
    assert sentence(FULL, bootstraps=False, state="ended") == "ended"


def test_the_states_are_those_of_the_modules_text() -> None:
    told = [line.split()[0] for line in str(health.__doc__).split("\n\n")[1].splitlines()]
    assert tuple(told) == STATES
