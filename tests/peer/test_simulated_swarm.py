"""Many peers' control code under a simulated clock: what holds, and how many rounds commit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.clock import START, Timeline
from benchmarks.simulation.peer import SimulatedPeer
from benchmarks.simulation.schedules import schedule
from benchmarks.simulation.world import Fault, Outcome, Scenario, World


def play(step_s: tuple[float, ...], round_s: float, rounds: int, **facts: float) -> Outcome:
    scenario = Scenario(step_s=step_s, round_s=round_s, rounds=rounds)
    outcome = World(replace(scenario, **facts)).play()
    assert outcome.conserved and outcome.one_chain
    return outcome


def test_things_happen_in_the_order_of_their_time() -> None:
    timeline, seen = Timeline(), list[str]()
    timeline.after(2.0, lambda: seen.append("later"))
    timeline.after(1.0, lambda: seen.append("sooner"))
    timeline.after(1.5, lambda: seen.append("never")).cancel()
    timeline.run_until(START + 3.0)
    assert seen == ["sooner", "later"]
    assert timeline.now == START + 3.0


# ---- rounds longer than a record of the DHT lives ------------------------------------------------
@pytest.mark.parametrize("seed", range(2))
def test_rounds_of_ten_minutes_are_committed_over_far_links(seed: int) -> None:
    """With bells that were forgotten when they expired it was every third of them."""
    outcome = play((1.0, 1.17, 1.33, 1.5), 600.0, 6, seed=seed)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


def test_a_head_three_times_slower_is_in_every_round() -> None:
    """It was in every third one."""
    outcome = play((1.0, 1.0, 3.0), 400.0, 6)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


def test_calls_to_the_dht_that_take_seconds_keep_no_send_from_its_group() -> None:
    """In series, before each exchange, they lost every round of these."""
    outcome = play((1.0, 1.2, 1.4, 1.6), 60.0, 6, rtt_s=0.8)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


def test_a_machine_that_is_slow_to_look_still_takes_part() -> None:
    outcome = play((1.0, 1.2, 1.4), 60.0, 8, tick_s=1.0)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


@pytest.mark.parametrize("codec_s", [20.0, 45.0])
def test_a_codec_that_takes_longer_than_the_exchange_may_voids_no_round(codec_s: float) -> None:
    """Bytes move for up to 30 s; what is computed beside that is known before."""
    outcome = play((1.0, 1.1, 1.3), 300.0, 6, codec_s=codec_s)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0
    assert not outcome.voids


# ---- faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_who_is_gone_for_a_while_costs_the_others_at_most_one_round(kind: str) -> None:
    fault = Fault(kind=kind, at_s=700.0, peers=(1,), seconds=90.0)  # pyright: ignore
    scenario = Scenario(step_s=(1.0, 1.1, 1.3), round_s=200.0, rounds=8, faults=(fault,))
    outcome = World(scenario).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.committed >= outcome.rounds - 1


def test_a_fork_of_two_halves_ends_in_one_chain_and_no_token_twice() -> None:
    cut = Fault(kind="partition", at_s=300.0, peers=(0, 1), seconds=200.0)
    outcome = World(
        Scenario(step_s=(1.0, 1.1, 1.2, 1.3), round_s=60.0, rounds=12, faults=(cut,))
    ).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.committed >= 6


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_tokens_are_conserved(seed: int) -> None:
    """Of `make simulate` the first ones."""
    outcome = World(schedule(seed)).play()
    assert outcome.conserved
    assert outcome.one_chain


def test_a_round_waits_for_the_sends_of_members_as_long_as_a_send_can_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = SimulatedPeer._status  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        SimulatedPeer, "_status", lambda peer: replace(status(peer), undecided=True)
    )
    world = World(Scenario(step_s=(1.0, 1.0), round_s=60.0, rounds=30))
    outcome = world.play()
    assert outcome.conserved and outcome.one_chain
    round_s = (world.timeline.now - START) / outcome.rounds
    limit_s = world.peers["head000"].coordinator.outcome_limit_s
    assert 4 * 60.0 < limit_s < round_s < 1.5 * limit_s
    assert outcome.committed_share == 1.0


# ---- what the judge sees -------------------------------------------------------------------------
def test_a_token_in_two_places_is_seen() -> None:
    world = World(Scenario(step_s=(1.0, 1.1), round_s=60.0, rounds=3))
    world.play()
    peer = world.peers["head000"]
    assert peer.books.balanced
    peer.books.unsent += 1
    assert not peer.books.balanced
