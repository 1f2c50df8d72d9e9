"""Many peers' control code under a simulated clock: what holds, and how many rounds commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.simulation.clock import START, Timeline
from benchmarks.simulation.dht import SimulatedSwarm
from benchmarks.simulation.liars import MEMBER_LIES, Lying, Who
from benchmarks.simulation.peer import SimulatedPeer
from benchmarks.simulation.schedules import restless, schedule
from benchmarks.simulation.world import TOKENS_PER_STEP, Fault, Outcome, Scenario, World
from dilocox.dht.records import ReplicaRecord
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.rounds.round_end import MAX_AHEAD
from tests.sweeps import sweep

APPLIES = ("arrival", "round_end")
APPLY = pytest.mark.parametrize("apply", APPLIES)
SCHEDULES = pytest.mark.parametrize(
    ("seed", "apply"), sweep(product(range(6), APPLIES), {(0, "arrival"), (1, "round_end")})
)


def play(step_s: tuple[float, ...], round_s: float, rounds: int, **facts: Any) -> Outcome:
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
@pytest.mark.parametrize("seed", sweep(range(2)))
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


def test_a_head_whose_one_inner_step_is_longer_than_a_round_is_waited_for() -> None:
    """Where it told of no step while it made one it was in every eighth record. The first is made
    before it has ended one."""
    outcome = play((1.0, 1.1, 75.0), 60.0, 8)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share >= 0.85


def test_calls_to_the_dht_that_take_seconds_keep_no_send_from_its_group() -> None:
    """In series, before each exchange, they lost every round of these."""
    outcome = play((1.0, 1.2, 1.4, 1.6), 60.0, 6, rtt_s=0.8)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


def test_a_machine_that_is_slow_to_look_still_takes_part() -> None:
    outcome = play((1.0, 1.2, 1.4), 60.0, 8, tick_s=1.0)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


@pytest.mark.parametrize("codec_s", sweep([45.0, 20.0]))
def test_a_codec_that_takes_longer_than_the_exchange_may_voids_no_round(codec_s: float) -> None:
    """Bytes move for up to 30 s; what is computed beside that is known before."""
    outcome = play((1.0, 1.1, 1.3), 300.0, 6, codec_s=codec_s)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0
    assert not outcome.voids


# ---- records that wait for the end of a round ----------------------------------------------------
@pytest.mark.parametrize("merge", sweep(["reset", "rebase"]))
def test_a_record_that_waits_for_the_end_of_a_round_holds_none_up(merge: str) -> None:
    """A round that waited until its send was applied, which waited for the round, never ended."""
    outcome = play((1.0, 1.2, 1.5), 60.0, 6, stages=2, merge=merge, apply="round_end")
    assert outcome.rounds == 6
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share == 1.0


def test_a_group_waits_for_records_that_are_applied_before_the_sends() -> None:
    """With times that did not know of it, one of these heads was in a single record. How long it
    takes is known from the second round on."""
    outcome = play((1.0, 1.1, 1.3), 120.0, 8, apply="round_end", outer_step_s=8.0)
    assert outcome.committed_share == 1.0
    assert outcome.every_head_share >= 7 / 8


# ---- strangers -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("strangers", "apply"), sweep(product([1, 12], APPLIES)))
def test_what_strangers_say_costs_no_round_of_a_run_that_stands(strangers: int, apply: Any) -> None:
    """One stranger's bell had all send at once: a head was in two of three records, and 17 times
    a peer came to a group in which nobody was."""
    told = {"strangers": strangers, "apply": apply, "end_tokens": 10**9}
    outcome = play((1.0, 1.2, 1.4), 60.0, 12, stages=2, **told)
    assert outcome.rounds == 12 and outcome.left_s is None
    assert outcome.committed_share >= 11 / 12
    assert outcome.every_head_share >= 10 / 12


# ---- members and bootstraps that lie -------------------------------------------------------------
LIES_AFTER = 6.0


def lied_to(who: Who, how: str, **facts: Any) -> Outcome:
    """Of four heads, to whom a fifth one comes once a bootstrap lies."""
    joins = () if who == "member" else (0.0, 0.0, 0.0, 0.0, 60.0 * (LIES_AFTER + 2))
    step_s = (1.0, 1.1, 1.2, 1.3, 1.4)[: len(joins) or 4]
    lying = Lying(who=who, how=how, after=LIES_AFTER)
    scenario = Scenario(step_s=step_s, round_s=60.0, rounds=12, joins=joins, lying=lying)
    outcome = World(replace(scenario, **facts)).play()
    assert outcome.conserved
    return outcome


def unharmed(outcome: Outcome) -> bool:
    """No fork, no record of the liar's own, no token lost, nobody gone."""
    taken = outcome.forks, outcome.false_records, outcome.lost_share, outcome.left
    return outcome.one_chain and taken == (0, 0, 0.0, 0)


@pytest.mark.sweep
def test_members_that_fall_silent_in_turns_stop_the_others_for_two_rounds_at_most() -> None:
    """One in the first attempt of each round, another one in the second: no record said so."""
    lying = Lying(who="member", how="turns", members=2, after=LIES_AFTER)
    steps = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
    outcome = lied_to("member", "turns", step_s=steps, joins=(), rounds=20, lying=lying)
    assert outcome.one_chain and not outcome.false_records and not outcome.left
    assert outcome.committed >= outcome.rounds - 4


@pytest.mark.parametrize("how", sweep(MEMBER_LIES, {"all"}))
def test_a_member_that_lies_is_not_followed_and_stops_no_round(how: str) -> None:
    outcome = lied_to("member", how)
    assert unharmed(outcome)
    assert outcome.every_head_share >= 10 / 12  # a bell with a time that is too early for some
    # which groups bells at random times part is luck: over twelve seeds up to four of twelve rounds
    assert outcome.committed >= outcome.rounds - (4 if how == "times" else 1)
    # whose steps are said to take for ever is waited for as long as a round
    round_s = outcome.seconds / outcome.rounds
    assert round_s < (2.5 if how in ("times", "all") else 1.5) * 60.0


@pytest.mark.sweep
def test_one_of_eight_in_each_of_two_stages_lies_in_every_way() -> None:
    step_s = tuple(1 + 0.05 * number for number in range(8))
    outcome = lied_to("member", "all", step_s=step_s, stages=2)
    assert unharmed(outcome)
    assert outcome.committed >= outcome.rounds - 1


@pytest.mark.parametrize("how", sweep(["fork of 4", "the end"]))
def test_what_a_lying_bootstrap_of_the_operator_cannot_do(how: str) -> None:
    """Claiming too many tokens for a record that all had, it had all wait for a state that nobody
    has, for good."""
    outcome = lied_to("bootstrap", how)
    assert (outcome.forks, outcome.lost_share, outcome.left) == (0, 0.0, 0)
    assert outcome.committed >= outcome.rounds - 1
    assert outcome.false_records == (how == "fork of 4"), "the joiner's"


@pytest.mark.parametrize(
    ("how", "bootstraps"), sweep(product(["fork of 3", "late fork", "own records"], [2, 1]))
)
def test_what_a_lying_bootstrap_of_the_operator_can_do_a_copy_does_not_prevent(
    how: str, bootstraps: int
) -> None:
    """As docs/algorithm.md says: all go over to a chain of its own."""
    outcome = lied_to("bootstrap", how, bootstraps=bootstraps)
    assert outcome.one_chain and outcome.false_records >= 1
    assert how == "own records" or (outcome.forks >= 4 and outcome.lost_share > 0.0)


@pytest.mark.sweep
def test_a_run_that_a_bootstrap_stopped_goes_on_when_it_stops_to_lie() -> None:
    lying = Lying(who="bootstrap", how="far rounds", after=LIES_AFTER)
    stopped = lied_to("bootstrap", "far rounds", lying=lying)
    goes_on = lied_to("bootstrap", "far rounds", lying=replace(lying, lasts=2.0))
    assert stopped.committed <= LIES_AFTER + 1
    assert unharmed(stopped) and unharmed(goes_on)
    assert goes_on.committed >= goes_on.rounds - 3


def test_a_bootstrap_that_leads_a_run_through_far_numbers_stops_no_round() -> None:
    rounds = 12 + 6 * MAX_AHEAD
    outcome = lied_to("bootstrap", "far run", rounds=rounds)
    assert unharmed(outcome)
    assert outcome.committed >= 11
    assert outcome.seconds < 14 * 60.0


@pytest.mark.parametrize(
    "how", sweep(["fork of 3", "own records", "far rounds", "far run", "the end", "time"])
)
def test_a_copy_of_the_bootstrap_leads_nobody_who_has_a_chain(how: str) -> None:
    outcome = lied_to("copy", how, bootstraps=2)
    assert unharmed(outcome)
    assert outcome.committed >= outcome.rounds - 1
    assert outcome.every_head_share == 1.0


# ---- faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sweep(["kill", "freeze"]))
def test_who_is_gone_for_a_while_costs_the_others_at_most_one_round(kind: str) -> None:
    fault = Fault(kind=kind, at_s=700.0, peers=(1,), seconds=90.0)  # pyright: ignore
    scenario = Scenario(step_s=(1.0, 1.1, 1.3), round_s=200.0, rounds=8, faults=(fault,))
    outcome = World(scenario).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.committed >= outcome.rounds - 1


@pytest.mark.parametrize("seed", sweep(range(4)))
def test_who_comes_back_is_counted_also_where_rounds_are_shorter_than_a_heartbeat(
    seed: int,
) -> None:
    """Each of three is gone for 12 s again and again. Who came back looked for the groups of plans
    that were over, or heard of records with the next heartbeat: one of three was in hardly any."""
    faults = [
        Fault(kind="kill", at_s=60.0 + 70.0 * k, peers=(k % 3,), seconds=12.0) for k in range(8)
    ]
    scenario = Scenario(step_s=(0.25,) * 3, round_s=32.0, rounds=80, seed=seed, rtt_s=0.01)
    outcome = World(replace(scenario, faults=tuple(faults))).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.committed_share > 0.95
    assert outcome.every_head_share > 0.75


def test_a_fork_of_two_halves_ends_in_one_chain_and_no_token_twice() -> None:
    cut = Fault(kind="partition", at_s=300.0, peers=(0, 1), seconds=200.0)
    outcome = World(
        Scenario(step_s=(1.0, 1.1, 1.2, 1.3), round_s=60.0, rounds=12, faults=(cut,))
    ).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.committed >= 6


@pytest.mark.sweep
def test_a_stage_that_a_cut_kept_rounds_ahead_has_the_others_come_to_it() -> None:
    """Two fast heads of five, with four of the five peers of stage 1, lose what they averaged of
    stage 0; of stage 1 theirs is the only chain. It stood still for 15 rounds of the others."""
    cut = Fault(kind="partition", at_s=300.0, peers=(0, 1, 5, 6, 7, 8), seconds=400.0)
    steps = (0.3, 0.3, 1.1, 1.2, 1.2)
    world = World(Scenario(step_s=steps, round_s=60.0, rounds=45, stages=2, faults=(cut,)))
    heads: list[set[int]] = []  # the rounds of stage 0's records, and of stage 1's
    world.timeline.at(
        START + 720.0,
        lambda: heads.extend(
            {peer.log.head().round for peer in world.peers.values() if peer.stage == stage}
            for stage in (0, 1)
        ),
    )
    outcome = world.play()
    assert outcome.conserved and outcome.one_chain
    assert min(heads[0]) + 10 < max(heads[1])
    assert outcome.last_rounds[0] == outcome.last_rounds[1]
    assert outcome.committed >= outcome.rounds - max(heads[1]) + min(heads[0]) - 4
    assert outcome.lost_share < 0.2


@pytest.mark.parametrize(("seed", "fetch_s"), sweep(((66, 0), (221, 0), (28, 0), (50, 0), (66, 6))))
def test_a_small_stage_that_is_hurt_again_and_again_goes_on_in_one_chain(
    seed: int, fetch_s: float
) -> None:
    """Who made most of the last records was away while others went on, and neither followed."""
    outcome = World(restless(seed, fetch_s=fetch_s)).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.archived >= outcome.last_rounds[0] - 1
    assert outcome.committed >= outcome.rounds - 12
    assert outcome.lost_share < 0.06


@SCHEDULES
def test_whatever_happens_tokens_are_conserved(seed: int, apply: Any) -> None:
    """Of `make simulate` the first ones."""
    outcome = World(replace(schedule(seed), apply=apply)).play()
    assert outcome.conserved
    assert outcome.one_chain


def test_a_round_waits_for_the_sends_of_members_as_long_as_a_send_can_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = SimulatedPeer.loop_status
    monkeypatch.setattr(
        SimulatedPeer, "loop_status", lambda peer: replace(status(peer), undecided=True)
    )
    world = World(Scenario(step_s=(1.0, 1.0), round_s=60.0, rounds=30))
    outcome = world.play()
    assert outcome.conserved and outcome.one_chain
    round_s = (world.timeline.now - START) / outcome.rounds
    limit_s = world.peers["head000"].coordinator.outcome_limit_s
    assert 4 * 60.0 < limit_s < round_s < 1.5 * limit_s
    assert outcome.committed_share == 1.0


# ---- the end -------------------------------------------------------------------------------------
END_S = 60.0  # of rounds of a minute, heartbeats of ten seconds; one in forty waits for a lifetime


def end(*step_s: float, stages: int = 1, limit_s: float = END_S, **facts: Any) -> Outcome:
    """All leave, with every token in a record, and all stages end with the same round."""
    scenario = Scenario(step_s=step_s, round_s=60.0, rounds=30, stages=stages, **facts)
    outcome = World(scenario).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.uncounted == 0
    assert len(set(outcome.last_rounds)) == 1, outcome.last_rounds
    assert outcome.left_s is not None and outcome.left_s < limit_s
    return outcome


@APPLY
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("ends_at_s", sweep([150.0, 180.0, 207.0, 216.0, 228.0]))
def test_whenever_the_operator_ends_a_run_all_stages_end_together(
    stages: int, ends_at_s: float, apply: str
) -> None:
    """In the middle of a round, just after a bell, in an exchange: with heads that trained on after
    their last send 10,000 tokens of each replica were lost, and stages stopped a round apart; with
    heads that rang before all had heard, one that had not came 30 s later, alone."""
    end(1.0, 1.2, stages=stages, ends_at_s=ends_at_s, apply=apply)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_run_ends_with_its_tokens_and_those_trained_meanwhile(stages: int) -> None:
    outcome = end(1.0, 1.2, stages=stages, end_tokens=3 * 2 * 60 * TOKENS_PER_STEP)
    assert outcome.committed >= 3


def test_the_last_loss_of_a_run_is_told_by_its_head_as_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is known only when the replica is gone, of which nothing was told any more."""
    told: list[ReplicaRecord] = []
    status, publish = SimulatedPeer.loop_status, SimulatedSwarm.publish_many

    def with_loss(peer: SimulatedPeer) -> LoopStatus:
        return replace(status(peer), val_loss=2.0 if peer.leaving else 3.0, val_round=0)

    def heard(swarm: SimulatedSwarm, records: Mapping[str, Any], *given: Any) -> bool:
        told.extend(each for each in records.values() if isinstance(each, ReplicaRecord))
        return publish(swarm, records, *given)

    monkeypatch.setattr(SimulatedPeer, "loop_status", with_loss)
    monkeypatch.setattr(SimulatedSwarm, "publish_many", heard)
    end(1.0, stages=2, ends_at_s=150.0)
    assert [each.val_loss for each in told[-2:]] == [3.0, 2.0]
    assert told[-1].members == told[-2].members


@pytest.mark.parametrize("seed", range(4))
def test_of_rounds_of_two_seconds_too_all_stages_end_with_the_same(seed: int) -> None:
    """A member hears of a bell a second after its head; the head had its record before the member
    had sent, took the next step for the last one, and the member's send of before held it: stage 0
    ended with a round of its own."""
    scenario = Scenario(
        step_s=(0.1,),
        round_s=20.0,  # inner steps
        rounds=60,
        stages=2,
        rtt_s=0.05,
        ends_at_s=40.0 + 1.7 * seed,
        seed=seed,
    )
    world = World(scenario)
    outcome = world.play()
    assert outcome.conserved and outcome.one_chain
    assert len(set(outcome.last_rounds)) == 1, outcome.last_rounds
    assert outcome.left_s is not None and outcome.left_s < 30.0
    assert not any(peer.books.unsent or peer.books.fly for peer in world.left)


@pytest.mark.parametrize("stages", [1, 2])
def test_slow_replicas_and_spares_end_with_the_others(stages: int) -> None:
    end(1.0, 1.1, 1.3, 3.0, stages=stages, spares=1, ends_at_s=170.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_paused_run_ends_with_what_it_had_learnt(stages: int) -> None:
    # who has sent all that it had may leave a single one behind, which is alone then
    end(1.0, 1.2, stages=stages, pauses_at_s=150.0, ends_at_s=300.0, limit_s=70.0)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("deaf", [((1, 40.0),), ((2, 40.0),), ((0, 15.0),)])
def test_who_hears_late_of_the_end_loses_nothing(
    stages: int, deaf: tuple[tuple[int, float], ...]
) -> None:
    """Alone in its stage it commits after a record lifetime."""
    end(1.0, 1.2, stages=stages, ends_at_s=170.0, deaf=deaf, limit_s=120.0)


@pytest.mark.parametrize("seed", sweep(range(3)))
def test_with_lost_messages_and_votes_all_leave_and_lose_nothing(seed: int) -> None:
    scenario = Scenario(
        step_s=(1.0, 1.1, 1.3),
        round_s=60.0,
        rounds=30,
        stages=2,
        loss=0.1,
        late=0.2,
        vote_loss=0.2,
        ends_at_s=170.0,
        seed=seed,
    )
    outcome = World(scenario).play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.uncounted == 0
    assert outcome.left_s is not None and outcome.left_s < 200.0


@SCHEDULES
def test_whatever_happens_all_leave_a_run_that_is_ended_and_have_nothing_left(
    seed: int, apply: Any
) -> None:
    scenario = replace(schedule(seed), apply=apply)
    scenario = replace(scenario, rounds=scenario.rounds + 10, ends_at_s=3.3 * scenario.round_s)
    world = World(scenario)
    outcome = world.play()
    assert outcome.conserved and outcome.one_chain
    assert outcome.left_s is not None
    assert not any(peer.books.unsent or peer.books.fly for peer in world.left)


# ---- what the judge sees -------------------------------------------------------------------------
def test_a_token_in_two_places_is_seen() -> None:
    world = World(Scenario(step_s=(1.0, 1.1), round_s=60.0, rounds=3))
    world.play()
    peer = world.peers["head000"]
    assert peer.books.balanced
    peer.books.unsent += 1
    assert not peer.books.balanced
