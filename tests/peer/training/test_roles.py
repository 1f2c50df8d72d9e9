"""A head's role: it forms its replica, feeds it, and evaluates each anchor once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from dilocox.dht.manifest import Manifest
from dilocox.peer.training import roles
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.member import STALL_LIMIT_S
from dilocox.pipeline.messages import Stepped
from tests.clocks import TestClock
from tests.peer.leading import FakeCorpus, Leader, leader
from tests.peer.loops import ME, STEP_TOKENS, Loop, manifest
from tests.sweeps import sweep

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def led(tmp_path: Path) -> Leader:
    """A head in training: the anchor of the manifest was evaluated."""
    made = leader(Loop(tmp_path, manifest(stages=2)))
    made.role.turn()
    assert made.head.evaluated == [4]
    made.head.evaluated.clear()
    made.head.fed.clear()
    return made


def merged(led: Leader, number: int, *, mine: bool) -> None:
    """The chain's next record comes and is merged; this peer's turn to evaluate if it is `mine`.

    Of two members ("me", "other") the first evaluates the anchors of even rounds.
    """
    led.loop.fake.events.put(led.loop.committed(number, 0.0, mine=mine))
    led.loop.learner.take_events()
    assert led.loop.learner.round == number


def losses(led: Leader) -> list[tuple[int, float]]:
    return [(event["round"], event["loss"]) for event in led.loop.events("validated")]


# ---- text that is late ---------------------------------------------------------------------------
class StallingCorpus(FakeCorpus):
    """One that has so many microbatches, and may not be asked for more."""

    stock = 0

    @property
    def ready(self) -> bool:
        return self.stock > 0

    @ready.setter
    def ready(self, _: bool) -> None: ...

    def __next__(self) -> Tensor:
        assert self.stock, "this would wait for the hub, deaf to signals and sends"
        self.stock -= 1
        return super().__next__()


def test_a_source_that_stalls_within_a_batch_keeps_its_head_from_nothing(led: Leader) -> None:
    led.corpus.__class__ = StallingCorpus
    corpus = cast("StallingCorpus", led.corpus)
    corpus.stock = 1  # of two
    led.role.turn()
    assert led.head.fed == [] and corpus.stock == 0
    record = led.loop.committed(0, 0.1)
    led.loop.fake.events.put(record)
    led.loop.fake.data_part = 1, 0  # which waits until what was read is trained on
    led.loop.learner.between_steps()
    led.role.turn()
    assert led.loop.learner.round == 0 and led.head.fed == []
    corpus.stock = 3
    led.role.turn()
    ([batch, _],) = led.head.fed
    assert batch == [2, 3], "the first two went with the first step"


def test_a_run_that_ends_does_not_count_on_a_step_whose_text_is_not_here(led: Leader) -> None:
    led.corpus.__class__ = StallingCorpus
    corpus = cast("StallingCorpus", led.corpus)
    asked = list[bool]()

    def stops(*, stages: int, has_text: bool) -> bool:
        asked.append(has_text)
        return False

    led.loop.fake.stops = stops  # type: ignore[method-assign]
    corpus.stock = 1  # of two
    led.role.turn()
    corpus.stock = 1
    led.role.turn()
    assert asked == [False, True] and len(led.head.fed) == 1


# ---- the replica ---------------------------------------------------------------------------------
@pytest.mark.usefixtures("no_chance")
def test_a_head_without_replica_tries_now_and_then_and_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: TestClock
) -> None:
    led = leader(Loop(tmp_path, manifest(stages=2)))
    led.head.members = ()
    led.head.forms.extend(["stage 1 has no peer", "stage 1 has no peer", ""])
    led.role.turn()
    assert led.loop.fake.status.blocked == "stage 1 has no peer"
    assert (led.loop.fake.status.head, led.loop.fake.status.members) == ("", ())
    for _ in range(5):
        led.role.turn()
    assert (led.head.formed, led.head.fed) == (1, [])
    clock.now += roles.FORM_PAUSE_S
    led.role.turn()
    assert led.head.formed == 2
    assert caplog.text.count("stage 1 has no peer") == 1  # told once, not at every try
    clock.now += roles.FORM_PAUSE_S
    led.role.turn()
    assert len(led.head.fed) == 1
    progress = led.loop.fake.status
    assert (progress.blocked, progress.head, progress.members) == ("", ME, (ME, "a"))
    assert caplog.text.count("waiting for a complete replica") == 1


@pytest.fixture
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.random, "random", lambda: 0.0)


def test_while_it_waits_for_peers_a_head_merges_records(tmp_path: Path) -> None:
    led = leader(Loop(tmp_path, manifest(stages=2)))
    led.head.members = ()
    led.head.forms.append("stage 1 has no peer")
    record = led.loop.committed(0, 0.1)
    led.loop.fake.events.to_come.append(lambda: led.loop.fake.events.put(record))
    led.role.turn()
    assert led.loop.learner.round == 0


def leads(led: Leader) -> object:
    """What a member hears that asks its head."""
    return led.reservation.answer("a", Frame(kind="ping", replica=ME)).facts.get("members")


def test_members_that_ask_hear_whom_the_head_leads_now(led: Leader) -> None:
    assert leads(led) == [ME, "a"]

    def dissolves(batch: Sequence[Tensor], learning_rate: float) -> None:
        led.head.members = ()

    led.head.step = dissolves  # type: ignore[method-assign]
    led.role.turn()
    assert leads(led) == []
    assert led.loop.fake.status.members == ()


def test_the_replica_is_shown_with_epoch_codec_and_last_fault(led: Leader) -> None:
    led.head.epoch, led.head.codec, led.head.last_fault = 5, "int4,int8", "stage 1 silent"
    led.corpus.position = 77
    led.role.turn()
    shown = led.loop.fake.status
    assert (shown.epoch, shown.codec, shown.last_fault) == (5, "int4,int8", "stage 1 silent")
    assert shown.data_position == 77


def test_an_undecided_send_of_a_member_is_shown_as_long_as_there_is_a_replica(led: Leader) -> None:
    led.head.undecided = True
    led.role.turn()
    assert led.loop.fake.status.undecided
    led.head.members = ()
    led.head.forms.append("stage 1: no free peer")
    led.role.turn()
    assert not led.loop.fake.status.undecided


# ---- inner steps ---------------------------------------------------------------------------------
def test_an_inner_step_that_was_not_taken_is_taken_later_on_the_same_data(led: Leader) -> None:
    led.head.steps.extend([None, None])
    led.loop.fake.data_part = (3, 0)  # meanwhile the part changes hands
    for _ in range(4):
        led.role.turn()
    batches = [batch for batch, _ in led.head.fed]
    assert batches[0] == batches[1] == batches[2]
    assert batches[3] == [batches[0][-1] + 1, batches[0][-1] + 2]
    assert led.loop.model.merge.tokens == (1 + 2) * STEP_TOKENS  # one by the fixture


def test_the_part_of_the_data_changes_only_between_taken_steps(led: Leader) -> None:
    assert led.corpus.opened == [(0, 0)]
    led.head.steps.extend([None])
    led.role.turn()
    led.loop.fake.data_part = (3, 500)
    led.role.turn()
    assert led.corpus.opened == [(0, 0)]
    led.role.turn()
    assert led.corpus.opened == [(0, 0), (3, 500)]


def test_skipped_steps_use_data_but_count_no_tokens(led: Leader) -> None:
    led.head.steps.append(Stepped(step=1, loss=float("nan"), skipped=True))
    led.role.turn()
    led.role.turn()
    assert led.head.fed[0][0] != led.head.fed[1][0]
    assert led.loop.model.merge.tokens == 2 * STEP_TOKENS


def test_the_learning_rate_follows_the_runs_tokens(tmp_path: Path) -> None:
    inner = {"learning_rate": 0.01, "warmup_tokens": 100 * STEP_TOKENS}
    led = leader(Loop(tmp_path, manifest(stages=2, inner=inner)))
    led.loop.fake.others_pace = 1.0
    for _ in range(3):
        led.role.turn()
    rates = [rate for _, rate in led.head.fed]
    assert rates == pytest.approx([0.0001, 0.0003, 0.0005]), "the other replica trains, too"
    merged(led, 0, mine=False)  # 200 tokens of others, and this peer is a round behind
    led.role.turn()
    assert led.head.fed[-1][1] == pytest.approx(0.01 * (200 + 4 * STEP_TOKENS) / 1600)
    led.role.turn()
    assert led.head.fed[-1][1] == pytest.approx(0.01 * (200 + 6 * STEP_TOKENS) / 1600)


def test_the_learning_rate_does_not_jump_when_a_record_comes(tmp_path: Path) -> None:
    """Of two replicas, as fast as each other, one round after the other; the others' steps were
    seen only when a record came, so that a run's warmup was over after the first one.
    """
    inner = {"learning_rate": 0.01, "warmup_tokens": 1600}
    led = leader(Loop(tmp_path, manifest(stages=2, inner=inner)))
    loop = led.loop
    loop.fake.others_pace = 1.0
    steps, expected = 0, list[float]()

    def turns(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            expected.append(0.01 * (2 * steps * STEP_TOKENS + STEP_TOKENS) / 1600)
            led.role.turn()
            steps += 1

    for number in range(4):
        turns(6 if number == 0 else 4)
        loop.send(number)
        turns(2)  # while the exchange runs
        event = loop.committed(number, 0.0, mine=True)
        chain_tokens = 2 * (steps - 2) * STEP_TOKENS
        loop.fake.events.put(
            replace(event, record=replace(event.record, chain_tokens=chain_tokens))
        )
        loop.learner.take_events()
    assert [rate for _, rate in led.head.fed] == pytest.approx(expected)


# ---- validation ----------------------------------------------------------------------------------
def test_the_weights_that_the_run_begins_with_are_evaluated_first(tmp_path: Path) -> None:
    led = leader(Loop(tmp_path, manifest(stages=2)))
    led.role.turn()
    led.role.turn()
    assert led.head.evaluated == [4]
    assert losses(led) == [(-1, 64.0 / (4 * 8))]  # nats a token
    assert led.loop.fake.status.val_round == -1


def test_an_anchor_is_evaluated_once_when_all_stages_have_it(led: Leader) -> None:
    led.head.anchors = -1
    merged(led, 0, mine=True)
    led.role.turn()
    led.role.turn()
    assert led.head.evaluated == []  # a stage below still has the one before
    led.head.anchors = 0
    for _ in range(3):
        led.role.turn()
    assert led.head.evaluated == [4]
    assert losses(led)[1:] == [(0, 2.0)]
    assert len(led.head.fed) == 5  # and training went on


def test_replicas_take_turns(led: Leader) -> None:
    for number in range(4):
        merged(led, number, mine=True)
        led.role.turn()
    merged(led, 4, mine=False)
    led.role.turn()
    assert [number for number, _ in losses(led)[1:]] == [0, 2]


def test_an_anchor_that_others_have_followed_is_not_evaluated(led: Leader) -> None:
    led.head.anchors = -1
    merged(led, 0, mine=True)
    led.role.turn()
    merged(led, 1, mine=True)  # the other one's turn
    led.head.anchors = None
    led.role.turn()
    led.role.turn()
    assert led.head.evaluated == []


def test_an_evaluation_that_came_to_nothing_is_tried_again(led: Leader) -> None:
    merged(led, 0, mine=True)
    led.head.losses.extend([None, 32.0])
    for _ in range(3):
        led.role.turn()
    assert losses(led)[1:] == [(0, 1.0)]


def timed(loop: Loop, clock: TestClock, *, evaluation_s: float, step_s: float) -> Leader:
    """A head whose evaluations and inner steps take so long."""
    led = leader(loop)
    step, evaluate = led.head.step, led.head.evaluate

    def slow_step(batch: Sequence[Tensor], learning_rate: float) -> Stepped | None:
        clock.now += step_s
        return step(batch, learning_rate)

    def slow_evaluate(batches: Sequence[Tensor]) -> float | None:
        clock.now += evaluation_s
        return evaluate(batches)

    led.head.step, led.head.evaluate = slow_step, slow_evaluate  # type: ignore[method-assign]
    return led


@pytest.mark.parametrize("round_steps", sweep([20, 400]))
def test_validation_takes_half_a_percent_of_the_time_however_short_the_rounds(
    tmp_path: Path, clock: TestClock, round_steps: int
) -> None:
    evaluation_s, step_s, rounds = 0.8, 0.5, 8000 // round_steps
    led = timed(Loop(tmp_path, manifest(stages=2)), clock, evaluation_s=evaluation_s, step_s=step_s)
    began = clock.now
    for number in range(rounds):
        for _ in range(round_steps):
            led.role.turn()
        merged(led, number, mine=True)
    spent_s = evaluation_s * (len(led.head.evaluated) - 1)  # the first one is free
    assert spent_s <= 0.005 * (clock.now - began)
    # and the loss is known all along, as often as is affordable or as it is this head's turn
    evaluated = [number for number, _ in losses(led)]
    per_loss = max(2, 2 * evaluation_s / 0.005 / (round_steps * step_s))
    assert max(b - a for a, b in pairwise(evaluated)) <= per_loss + 2


def test_a_first_run_of_short_rounds_has_a_loss_every_half_a_minute(
    tmp_path: Path, clock: TestClock
) -> None:
    """As seen of `tiny`: rounds of two seconds, half a second an evaluation, and the other stage
    merges each record some steps later. At 0.005 the first loss came with round 74."""
    tiny = Manifest.from_dict({"name": "first", "model": "tiny", "end_tokens": 1})
    share = {"held_out_windows": 4, "validation_share": tiny.data.validation_share}
    loop = Loop(tmp_path, manifest(stages=2, data=share))
    led = timed(loop, clock, evaluation_s=0.6, step_s=0.1)
    told_at: list[float] = []
    for number in range(100):
        for step in range(tiny.rounds.inner_steps):
            led.head.anchors = number - 1 if step > 5 else number - 2
            led.role.turn()
            told_at += [clock.now] * (len(losses(led)) - len(told_at))
        merged(led, number, mine=True)
    assert max(b - a for a, b in pairwise([*told_at, clock.now])) < 30


def test_nothing_is_evaluated_before_the_first_inner_step(tmp_path: Path, clock: TestClock) -> None:
    led = timed(Loop(tmp_path, manifest(stages=2)), clock, evaluation_s=0.8, step_s=0.5)
    led.head.steps.append(None)  # a member was lost in it
    led.role.turn()
    assert (len(led.head.fed), led.head.evaluated) == (1, [])
    led.role.turn()
    assert (len(led.head.fed), led.head.evaluated) == (2, [4])


def test_an_anchor_that_cannot_be_evaluated_yet_is_as_soon_as_there_is_time(
    tmp_path: Path, clock: TestClock
) -> None:
    led = timed(Loop(tmp_path, manifest(stages=2)), clock, evaluation_s=0.8, step_s=10.0)
    led.role.turn()
    merged(led, 0, mine=True)
    for _ in range(17):
        led.role.turn()
    assert losses(led) == [(-1, 2.0), (0, 2.0)]
    assert clock.now - 1000.0 == pytest.approx(18 * 10 + 2 * 0.8)


def test_the_runs_last_loss_is_evaluated_whether_there_is_time_or_not(
    tmp_path: Path, clock: TestClock
) -> None:
    led = timed(Loop(tmp_path, manifest(stages=2)), clock, evaluation_s=0.8, step_s=0.5)
    led.role.turn()
    merged(led, 0, mine=True)
    led.role.turn()
    assert len(losses(led)) == 1
    led.role.release(ended=True)
    assert losses(led)[1:] == [(0, 2.0)]


# ---- the end -------------------------------------------------------------------------------------
def test_at_the_runs_end_the_last_anchor_is_evaluated_and_the_replica_let_go(led: Leader) -> None:
    led.head.anchors = 1  # what the last inner step said of the stages below is out of date
    merged(led, 0, mine=True)
    led.head.losses.extend([None, None, 32.0])  # their last record is on its way
    led.role.release(ended=True)
    assert losses(led)[1:] == [(0, 1.0)]
    assert led.head.dissolved == 1
    assert led.loop.fake.status.members == ()
    assert leads(led) == []


@pytest.mark.parametrize("why", ["another replica's turn", "no replica", "evaluated"])
def test_at_the_end_nobody_waits_for_a_loss_that_will_not_come(led: Leader, why: str) -> None:
    merged(led, 0, mine=why != "another replica's turn")
    if why == "no replica":
        led.head.members = ()
    if why == "evaluated":
        led.role.turn()
    before, began = len(led.head.evaluated), time.monotonic()
    led.role.release(ended=True)
    assert time.monotonic() - began < 1
    assert len(led.head.evaluated) == before
    assert led.head.dissolved == 1


def test_other_stages_may_have_their_last_records_as_late_as_a_send_takes(
    led: Leader, clock: TestClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "LAST_LOSS_PAUSE_S", 0.0)
    merged(led, 0, mine=True)
    led.head.late = 45

    def asked() -> None:
        clock.now += 1.0

    led.head.asked = asked
    assert led.loop.fake.outcome_limit_s > 45
    led.role.release(ended=True)
    assert len(losses(led)) == 2
    assert led.head.evaluated == [4]  # not a large frame before


@pytest.mark.parametrize(("outcome_limit_s", "longest_s"), [(60.0, 60.0), (7200.0, 240.0)])
def test_the_wait_for_the_last_loss_has_an_end(
    led: Leader,
    clock: TestClock,
    monkeypatch: pytest.MonkeyPatch,
    outcome_limit_s: float,
    longest_s: float,
) -> None:
    """Before members without work give their head up, however long an exchange may take."""
    assert longest_s < STALL_LIMIT_S
    led.loop.fake.outcome_limit_s, began = outcome_limit_s, clock.now
    monkeypatch.setattr(roles, "LAST_LOSS_PAUSE_S", 0.0)
    merged(led, 0, mine=True)

    def none_for_ever(batches: Sequence[Tensor]) -> float | None:
        clock.now += 1.0
        return None

    led.head.evaluate = none_for_ever  # type: ignore[method-assign]
    led.role.release(ended=True)
    assert clock.now - began == pytest.approx(longest_s, abs=1.0)
    assert led.head.dissolved == 1
    assert len(losses(led)) == 1


def test_a_head_that_is_told_to_leave_lets_its_replica_go_at_once(led: Leader) -> None:
    merged(led, 0, mine=True)
    led.role.release(ended=False)
    assert (led.head.evaluated, led.head.dissolved) == ([], 1)


def test_who_is_to_leave_begins_no_validation_after_its_inner_step(led: Leader) -> None:
    merged(led, 0, mine=True)
    step = led.head.step

    def last_step(batch: Sequence[Tensor], learning_rate: float) -> Stepped | None:
        led.loop.stop.set()
        return step(batch, learning_rate)

    led.head.step = last_step  # type: ignore[method-assign]
    led.role.turn()
    assert (len(led.head.fed), led.head.evaluated) == (1, [])


# ---- data ----------------------------------------------------------------------------------------
def test_the_end_of_a_part_is_told_once_and_the_next_part_opened_where_it_was_left(
    led: Leader,
) -> None:
    led.role.turn()
    assert not led.loop.fake.of_kind("finish_part")
    led.corpus.epoch = 1
    led.role.turn()
    led.role.turn()
    assert len(led.loop.fake.of_kind("finish_part")) == 1
    led.loop.fake.data_part = (5, 123)
    led.role.turn()
    assert led.corpus.opened[-1] == (5, 123)
    led.role.turn()
    assert len(led.loop.fake.of_kind("finish_part")) == 1


def test_the_part_before_is_read_until_the_first_text_of_the_next_one_is_here(led: Leader) -> None:
    """To pass over what others have read of it takes minutes, in which the replica stood still."""
    led.corpus.late = True
    led.loop.fake.data_part = (3, 500)
    fed = len(led.head.fed)
    for _ in range(3):
        led.role.turn()
    assert led.corpus.opened == [(0, 0), (3, 500)]
    assert len(led.head.fed) == fed + 3
    assert led.loop.fake.status.data_part == 0
    led.corpus.late = False
    led.role.turn()
    assert led.loop.fake.status.data_part == 3


def test_without_any_text_no_replica_is_formed_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "NO_TEXT_S", 0.0)
    late = leader(Loop(tmp_path, manifest(stages=2)))
    late.corpus.late, late.corpus.ready = True, False
    for _ in range(2):
        late.role.turn()
    assert not late.head.fed
    assert "not here yet" in late.loop.fake.status.blocked
    late.corpus.late, late.corpus.ready = False, True
    late.role.turn()
    assert late.head.fed
    assert not late.loop.fake.status.blocked


def test_a_snapshot_in_the_middle_of_a_step_has_the_position_before_it(led: Leader) -> None:
    led.head.steps.append(None)
    led.corpus.part = 0
    led.role.turn()
    led.corpus.part = 9  # all that is read later
    assert led.loop.learner.data_state()["part"] == 0


def restarted(folder: Path, part: int, *, fits: bool = True) -> FakeCorpus:
    """A head that comes back to a snapshot which was made in data part 0."""
    first = leader(Loop(folder, manifest(stages=2)))
    first.role.turn()
    first.loop.learner.leave(ended=False)
    back = leader(Loop(folder, manifest(stages=2)))
    back.corpus.fits = fits
    # what was saved is kept as long as nothing was read
    assert back.loop.learner.data_state() == {"part": 0, "reads": True}
    back.loop.fake.data_part = (part, 40)
    back.role.turn()
    return back.corpus


def test_after_a_restart_the_part_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    corpus = restarted(tmp_path, 0)
    assert (corpus.loaded, corpus.opened) == ([{"part": 0, "reads": True}], [])


def test_after_a_restart_with_another_part_that_one_is_read(tmp_path: Path) -> None:
    corpus = restarted(tmp_path, 2)
    assert (corpus.loaded, corpus.opened) == ([], [(2, 40)])


def test_a_saved_position_that_fits_no_more_is_not_used(tmp_path: Path) -> None:
    corpus = restarted(tmp_path, 0, fits=False)
    assert (len(corpus.loaded), corpus.opened) == (1, [(0, 40)])
