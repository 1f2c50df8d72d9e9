"""Between two inner steps: records come in, sends go out, and nothing learnt is lost."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.peer.averaging.events import Failed, Resynced, Voided
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.chain.chain_client import TakenState
from dilocox.peer.chain.header_client import CountedRounds
from dilocox.peer.training.snapshot_taking import Snapshots
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.stage_worker import StageWorker
from tests.peer.loops import STEP_TOKENS, Loop, fill_disk, manifest


def snapshots(loop: Loop) -> Snapshots:
    return Snapshots(loop.folder / "snapshots", layout=loop.layout.digest, period_s=1500.0)


def loop_with(folder: Path, **outer: Any) -> Loop:
    return Loop(folder, manifest(outer=outer))


# ---- joining -------------------------------------------------------------------------------------
def test_a_joiner_merges_what_the_others_have_before_it_trains(loop: Loop) -> None:
    seen: list[tuple[str, int]] = []

    def record(number: int) -> Callable[[], None]:
        def comes() -> None:
            seen.append((loop.meter.state, loop.learner.round))
            loop.fake.events.put(loop.committed(number, 0.1))

        return comes

    loop.fake.events.to_come.extend([record(0), record(1), loop.fake.joined.set])
    loop.learner.join()
    assert seen == [("joining", -1), ("joining", 0)]
    assert (loop.learner.round, loop.meter.state) == (1, "training")
    assert len(loop.events("training")) == 1
    assert torch.equal(loop.live, loop.model.merge.anchor)


def test_what_a_joiner_has_downloaded_is_on_the_disk_before_it_has_caught_up(loop: Loop) -> None:
    loop.snapshots.soon()
    end = time.monotonic() + 20

    def poll() -> None:
        if loop.snapshots.round < 0 and time.monotonic() < end:
            loop.fake.events.to_come.append(poll)
        else:
            loop.fake.joined.set()

    loop.fake.events.put(loop.committed(0, 0.1))
    loop.fake.events.to_come.append(poll)
    loop.learner.join()
    assert loop.snapshots.round == 0


def test_a_joiner_that_is_told_to_stop_waits_no_longer(loop: Loop) -> None:
    loop.fake.events.to_come.append(loop.stop.set)
    loop.learner.join()
    assert not loop.fake.joined.is_set()


# ---- records -------------------------------------------------------------------------------------
def test_a_record_is_merged_between_two_inner_steps(loop: Loop) -> None:
    loop.train(2)
    before = loop.live.clone()
    event = loop.committed(0, 0.1)
    loop.fake.events.put(event)
    assert torch.equal(loop.live, before)
    loop.learner.between_steps()
    merge = loop.model.merge
    assert event.taken.is_set()
    assert loop.learner.round == merge.round == 0
    assert loop.learner.newest is event.record
    assert not torch.equal(loop.live, before)
    # what is unsent goes on top of the new anchor, with its weight
    unsent = 2 * 0.001 * loop.manifest.outer.rebase_weight
    torch.testing.assert_close(loop.live, merge.anchor - unsent, rtol=0, atol=1e-6)
    assert merge.tokens == 2 * STEP_TOKENS
    (line,) = loop.events("round")
    assert (line["round"], line["outcome"]) == (0, "followed")


def test_an_offloaded_stage_computes_with_what_a_merge_and_a_restart_leave(tmp_path: Path) -> None:
    loop, windows = Loop(tmp_path, offload=True), torch.arange(18).view(2, 9)

    def computes_with_live() -> None:
        worker = StageWorker(loop.model.stage, loop.model.optimizer, microbatches=1)
        worker.feed(0, None, windows)
        masters = loop.layout.view(loop.live)
        for name, copy in loop.model.stage.named_parameters():
            assert torch.equal(copy, masters[name].to(copy.dtype)), name
        worker.run_one()
        before = loop.live.clone()
        assert worker.go(1.0, 1e-2)
        assert not torch.equal(before, loop.live)  # the step was that of the masters
        loop.learner.stepped(Stepped(step=0, loss=worker.loss, skipped=False), 0.5)

    computes_with_live()
    loop.fake.events.put(loop.committed(0, 0.5))
    loop.learner.between_steps()
    assert loop.model.merge.round == 0
    computes_with_live()
    loop.save()
    steps, live = loop.model.optimizer.steps, loop.live.clone()
    loop = Loop(tmp_path, offload=True)
    assert (loop.model.optimizer.steps, loop.model.merge.round) == (steps, 0)
    assert torch.equal(loop.live, live)
    computes_with_live()


def test_records_in_a_row_are_merged_one_after_the_other(loop: Loop) -> None:
    loop.fake.events.put(loop.committed(0, 0.1))
    loop.learner.take_events()
    first = loop.model.merge.anchor.clone()
    loop.fake.events.put(loop.committed(1, 0.1))
    loop.learner.take_events()
    assert loop.learner.round == 1
    assert not torch.equal(loop.model.merge.anchor, first)
    assert [line["round"] for line in loop.events("round")] == [0, 1]


# ---- the buffers, while the averaging process has them -------------------------------------------
def lend(loop: Loop) -> None:
    loop.learner.between_steps()  # now an inner step may be computed
    assert loop.fake.events.lease.take()


def test_while_a_record_moves_the_anchor_nothing_stands_on_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.snapshots.soon()
    loop.train()  # a snapshot begins
    lend(loop)
    assert not loop.learner.hold()
    record = loop.committed(0, 0.1)
    loop.snapshots.soon()
    loop.train(50)
    assert not list((tmp_path / "snapshots").glob("*[0-9]")), "of an anchor that was moving"
    loop.fake.events.put(record)
    loop.learner.between_steps()
    assert loop.learner.hold() and loop.learner.round == 0
    unsent = 51 * 0.001 * loop.manifest.outer.rebase_weight
    torch.testing.assert_close(loop.live, loop.model.merge.anchor - unsent, rtol=0, atol=1e-5)


def test_under_round_end_the_anchor_is_lent_at_the_end_and_not_for_the_whole_round(
    tmp_path: Path,
) -> None:
    loop = loop_with(tmp_path, apply="round_end")
    loop.train()
    loop.learner.between_steps()
    assert not loop.fake.events.lease.take()
    taken = list[bool]()

    def apply() -> None:
        taken.append(loop.fake.events.lease.take())
        loop.fake.events.put(loop.committed(0, 0.1))
        loop.fake.applying = False

    loop.fake.applying = True
    loop.fake.events.to_come.append(apply)
    loop.end_round(1, number=1)
    assert taken == [True] and loop.learner.round == 0
    assert loop.fake.of_kind("submit")[-1][1] == 1


def test_a_leaver_waits_for_the_anchor_that_it_is_to_keep(loop: Loop) -> None:
    loop.train()
    lend(loop)
    loop.fake.events.to_come.append(lambda: loop.fake.events.put(loop.committed(0, 0.1)))
    loop.learner.leave(ended=False)
    again = Loop(loop.folder)
    assert again.learner.round == 0
    assert torch.equal(again.model.merge.anchor, loop.model.merge.anchor)


def test_weights_that_are_not_finite_wait_for_the_anchor_too(loop: Loop) -> None:
    loop.train()
    lend(loop)
    loop.live.fill_(math.nan)
    loop.fake.events.to_come.append(lambda: loop.fake.events.put(loop.committed(0, 0.1)))
    loop.train(skipped=True)
    assert loop.learner.hold() and torch.equal(loop.live, loop.model.merge.anchor)


def test_the_anchor_is_not_lent_while_the_loop_uses_it(loop: Loop) -> None:
    lease, taken = loop.fake.events.lease, list[bool]()
    assert not lease.take(), "before the first step"
    loop.train()
    loop.fake.on_submit = lambda: taken.append(lease.take())
    loop.end_round(1)  # a send
    assert loop.learner.hold()
    for _ in range(2):  # batches of a validation, on one anchor
        with loop.learner.in_place():
            taken.append(lease.take())
        taken.append(lease.take())
    assert not any(taken) and len(taken) == 5
    loop.learner.between_steps()
    assert lease.take()
    with pytest.raises(RuntimeError, match="hold it first"), loop.learner.in_place():
        pass


def test_who_leaves_while_the_anchor_does_not_come_back_leaves_without_a_snapshot(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.train()
    lend(loop)
    loop.fake.alive = False
    loop.learner.leave(ended=False)
    assert "since the last snapshot is lost" in caplog.text
    assert not loop.again().snapshots.found


@pytest.mark.parametrize(
    ("limits", "payload_bytes"),
    # of four records at least, whatever the manifest says
    [({"records_kept": 4}, 0), ({"records_kept": 1}, 0), ({"log_bytes": 4000}, 1000)],
    ids=["many records", "few records", "large records"],
)
def test_who_only_follows_has_a_snapshot_that_its_pruned_log_reaches_back_to(
    tmp_path: Path, limits: dict[str, int], payload_bytes: int
) -> None:
    loop = Loop(tmp_path, manifest(rounds=limits))

    def follow(number: int) -> None:
        event = loop.committed(number, 0.1)
        loop.fake.events.put(replace(event, payload_bytes=payload_bytes or event.payload_bytes))
        loop.learner.between_steps()

    follow(0)
    loop.learner.snapshot_if_due()
    assert not list((loop.folder / "snapshots").glob("0*"))
    follow(1)  # half of what the log keeps: in the background
    end = time.monotonic() + 20
    while loop.snapshots.round < 1 and time.monotonic() < end:
        loop.learner.snapshot_if_due()
    assert loop.snapshots.round == 1
    for number in (2, 3, 4):
        follow(number)  # and three quarters of it: at once
    assert snapshots(loop).round == 4


def test_who_catches_up_writes_one_snapshot_after_the_last_record(tmp_path: Path) -> None:
    """It stood still for all of one after every third record."""
    loop = Loop(tmp_path, manifest(rounds={"records_kept": 4}))
    loop.fake.newest_round = 8
    for number in range(9):
        loop.fake.events.put(loop.committed(number, 0.1))
        loop.learner.between_steps()
        assert bool(list(tmp_path.glob("snapshots/0*"))) is (number == 8)
    assert snapshots(loop).round == 8


def test_a_log_that_drops_records_while_the_disk_is_full_ends_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, manifest(rounds={"records_kept": 4}))
    with monkeypatch.context() as patch:
        tries = fill_disk(patch)
        for number in range(9):
            loop.fake.events.put(loop.committed(number, 0.1))
            loop.learner.between_steps()
            loop.learner.snapshot_if_due()
    assert caplog.text.count("no space left on the disk") == 1
    assert 1 <= len(tries) <= 2, "each fills the disk for a moment, on which others write, too"
    loop.snapshots.soon()
    end = time.monotonic() + 20
    while loop.snapshots.refused and time.monotonic() < end:
        loop.learner.snapshot_if_due()
    assert snapshots(loop).round == 8


def test_under_round_end_a_record_waits_for_the_send(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, apply="round_end")
    loop.train()
    event = loop.committed(0, 0.1)
    loop.fake.events.put(event)
    loop.learner.between_steps()
    assert not event.taken.is_set()
    loop.fake.due = (1, 50.0)
    loop.learner.between_steps()
    assert event.taken.is_set()
    assert loop.fake.of_kind("submit") == [("submit", 1, 50.0, STEP_TOKENS, 0)]
    loop.fake.events.put(resynced(loop, -1, fork_round=-1))  # hours, if each waited for a round
    loop.learner.take_events()
    loop.fake.events.put(event := loop.committed(0, 0.1))
    loop.learner.between_steps()
    assert event.taken.is_set() and loop.learner.round == 0


def test_under_round_end_the_send_waits_for_records_that_are_being_applied(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, apply="round_end")
    loop.train()
    loop.fake.applying, loop.fake.due = True, (1, 50.0)

    def applied() -> None:
        assert not loop.fake.told
        loop.fake.events.put(loop.committed(0, 0.1))
        loop.fake.applying = False

    loop.fake.events.to_come.append(applied)
    loop.learner.between_steps()
    assert loop.learner.round == 0
    assert loop.fake.of_kind("submit")


def test_a_rounds_end_that_waits_for_records_says_how_long_they_take(tmp_path: Path) -> None:
    """So the group of a round meets when the sends are there, which wait for them."""
    loop = loop_with(tmp_path, apply="round_end")

    def applied() -> None:
        time.sleep(0.1)
        loop.fake.events.put(loop.committed(0, 0.1))
        loop.fake.applying = False

    loop.fake.applying = True
    loop.fake.events.to_come.append(applied)
    loop.end_round(1, number=1)
    took_s = loop.learner.status.caught_up_s
    assert took_s >= 0.1
    loop.end_round(1, number=2)  # without one: a later round may have one again
    assert loop.learner.status.caught_up_s == pytest.approx(0.8 * took_s)


def test_a_failure_is_heard_under_round_end_too(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, apply="round_end")
    loop.fake.events.put(Failed(error=RuntimeError("it died")))
    loop.learner.between_steps()  # alive: its next round end takes what it says
    loop.fake.alive = False
    with pytest.raises(RuntimeError, match="it died"):
        loop.learner.between_steps()


# ---- sends ---------------------------------------------------------------------------------------
def test_at_the_rounds_end_all_that_was_learnt_is_sent(loop: Loop) -> None:
    loop.train(3)
    loop.train(skipped=True)
    loop.learner.data_state = lambda: {"part": 7}
    loop.fake.due = (0, 123.0)
    loop.learner.between_steps()
    assert loop.fake.told == [("submit", 0, 123.0, 3 * STEP_TOKENS, 0)]
    (send,) = loop.model.merge.in_flight.values()
    assert torch.equal(loop.buffers.message, send.message)
    torch.testing.assert_close(
        send.message, torch.full_like(send.message, 0.003), rtol=0, atol=1e-6
    )
    loop.save()
    saved = snapshots(loop)
    tensors, facts = saved.merge_state()
    assert torch.equal(tensors["fly.0.message"], send.message)
    assert facts["fly"] == [[0, 3 * STEP_TOKENS, False]]
    assert saved.found and saved.data == {"part": 7}
    assert loop.meter.inner_step == 0
    loop.learner.between_steps()
    assert len(loop.fake.told) == 1


def test_after_a_rollback_the_data_are_read_on_where_they_were(loop: Loop) -> None:
    loop.learner.data_state = lambda: {"part": 7}
    loop.save()
    folder = loop.folder
    (folder / "before-00000001").mkdir()
    (folder / "snapshots").rename(folder / "before-00000001" / "snapshots")
    again = Loop(folder)
    assert not again.snapshots.found
    assert again.learner.data_state() == {"part": 7}


def test_without_anything_to_send_the_round_is_skipped(loop: Loop) -> None:
    loop.train(skipped=True)
    loop.send(0)
    loop.end_round(1, number=1)
    loop.train()
    loop.fake.due = (2, 3.0)  # the last send is still in flight
    loop.learner.between_steps()
    assert [each[:2] for each in loop.fake.told] == [("skip", 0), ("submit", 1), ("skip", 2)]
    assert loop.model.merge.tokens == STEP_TOKENS


def test_nothing_is_sent_for_a_round_that_the_chain_has_passed(loop: Loop) -> None:
    for number in range(3):
        loop.fake.events.put(loop.committed(number, 0.0))
        loop.learner.take_events()
    loop.end_round(1, number=2)
    assert loop.fake.told == [("skip", 2)]


def test_a_record_with_this_peer_in_it_counts_what_it_sent(loop: Loop) -> None:
    loop.end_round(2)
    loop.train()
    loop.own_record()
    loop.learner.between_steps()
    merge = loop.model.merge
    assert (merge.in_flight, merge.tokens) == ({}, STEP_TOKENS)
    (line,) = loop.events("round")
    assert (line["outcome"], line["tokens"], line["inner_steps"]) == (
        "counted",
        2 * STEP_TOKENS,
        2,
    )
    # raw fp32 values lose nothing: the residual is empty
    assert not merge.residual.values.any()


def test_a_void_send_is_unsent_again_and_goes_with_the_next(loop: Loop) -> None:
    loop.end_round(2)
    assert loop.learner.unsent
    loop.fake.events.put(Voided(round=0, reason="nobody came", certain=True))
    loop.fake.events.put(Voided(round=9, reason="unknown", certain=True))
    loop.train()
    loop.learner.between_steps()
    assert [event["round"] for event in loop.events("void")] == [0]
    assert loop.model.merge.in_flight == {}
    loop.fake.due = (1, 2.0)
    loop.learner.between_steps()
    assert loop.fake.told[-1] == ("submit", 1, 2.0, 3 * STEP_TOKENS, 0)


def test_under_merge_none_the_loop_waits_for_its_own_record(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, merge="none")
    loop.train(2)
    loop.fake.due = (0, 1.0)

    loop.fake.events.to_come.extend([lambda: None, loop.own_record])
    loop.learner.between_steps()
    assert (loop.learner.round, loop.model.merge.in_flight) == (0, {})
    assert torch.equal(loop.live, loop.model.merge.anchor)
    assert loop.fake.events.waits == 2


def test_under_merge_none_a_stop_ends_the_wait(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, merge="none")
    loop.train()
    loop.fake.due = (0, 1.0)
    loop.fake.events.to_come.append(loop.stop.set)
    loop.learner.between_steps()
    assert list(loop.model.merge.in_flight) == [0]


# ---- another state -------------------------------------------------------------------------------
def resynced(
    loop: Loop, number: int, fork_round: int | None, told: CountedRounds | None = None
) -> Resynced:
    loop.committed(number, 0.25)  # writes the state into the buffers that are not current
    state = TakenState(
        round=number,
        digest="5" * 64,
        anchor_sha256="a" * 64,
        chain_tokens=5_000,
    )
    return Resynced(state=state, fork_round=fork_round, told=told)


def test_a_state_of_others_is_taken_with_ones_own_progress_on_top(loop: Loop) -> None:
    loop.train(2)
    loop.fake.events.put(resynced(loop, 4, None))
    loop.learner.between_steps()
    merge = loop.model.merge
    assert (loop.learner.round, merge.digest) == (4, "5" * 64)
    assert merge.tokens == 2 * STEP_TOKENS
    assert loop.learner.tokens_of_run == 5_000 + 2 * STEP_TOKENS
    assert [event["round"] for event in loop.events("resynced")] == [4]
    # on disk at once: the log begins at this state now
    assert snapshots(loop).found
    loop.send(5)
    # the send says that a state was taken before it
    assert loop.fake.told == [("submit", 5, 1.0, 2 * STEP_TOKENS, 1)]


def test_unsent_progress_ages_by_records_and_not_by_rounds_without_one(loop: Loop) -> None:
    """Of rounds that were void, or that a rollback took back, there is none."""
    loop.train(2)
    told = CountedRounds(after=-1, named=frozenset(), rounds={"5" * 64: 205, "4" * 64: 3})
    loop.fake.events.put(resynced(loop, 205, None, told))
    loop.learner.between_steps()
    assert loop.model.merge.tokens == 2 * STEP_TOKENS
    told = CountedRounds(after=300, named=frozenset(), rounds={"5" * 64: 401})
    loop.fake.events.put(resynced(loop, 401, None, told))
    loop.learner.between_steps()
    assert loop.model.merge.lost_tokens == 2 * STEP_TOKENS, "nobody told of those before"


def test_a_send_that_the_new_state_may_hold_is_not_sent_again(loop: Loop) -> None:
    loop.end_round(2)
    loop.fake.events.put(resynced(loop, 5, None))
    loop.learner.between_steps()
    merge = loop.model.merge
    assert (merge.in_flight, merge.tokens) == ({}, 0)
    assert merge.lost_tokens == 2 * STEP_TOKENS, "as far as is known"


@pytest.mark.parametrize("void", [False, True], ids=["in flight", "presumed void"])
@pytest.mark.parametrize(
    ("after", "named", "fate"),
    [(-1, {0}, "counted"), (-1, set[int](), "unsent"), (2, set[int](), "lost")],
)
def test_what_became_of_a_send_is_taken_from_the_headers_of_the_new_states_chain(
    tmp_path: Path, after: int, named: set[int], fate: str, void: bool
) -> None:
    loop = Loop(tmp_path)
    merge = loop.model.merge
    loop.end_round(2)
    if void:
        loop.fake.events.put(Voided(round=0, reason="nobody knows", certain=False))
        loop.learner.between_steps()
    told = CountedRounds(after=after, named=frozenset(named), rounds={"5" * 64: 5})
    loop.fake.events.put(resynced(loop, 5, None, told))
    loop.learner.between_steps()
    tokens = {
        "counted": merge.counted_tokens,
        "unsent": merge.tokens,
        "lost": merge.lost_tokens,
    }
    assert tokens.pop(fate) == 2 * STEP_TOKENS and set(tokens.values()) == {0}
    assert not merge.in_flight
    expected = merge.anchor - (fate == "unsent") * merge.config.weight * 0.002
    torch.testing.assert_close(loop.live, expected, rtol=0, atol=1e-6)


def test_a_state_that_holds_a_send_which_is_not_known_here_resets_to_its_anchor(
    loop: Loop,
) -> None:
    loop.train(2)
    told = CountedRounds(after=-1, named=frozenset({3}), rounds={"5" * 64: 5})
    loop.fake.events.put(resynced(loop, 5, None, told))
    loop.learner.between_steps()
    assert torch.equal(loop.live, loop.model.merge.anchor)
    assert loop.model.merge.lost_tokens == 2 * STEP_TOKENS


def test_a_send_from_after_the_new_state_is_undone(loop: Loop) -> None:
    loop.end_round(2, number=7)
    loop.fake.events.put(resynced(loop, 5, None))
    loop.learner.between_steps()
    assert loop.model.merge.in_flight == {}
    assert loop.model.merge.tokens == 2 * STEP_TOKENS


# ---- what is known of the run --------------------------------------------------------------------
def test_the_runs_tokens_are_the_chains_and_own_ones_wherever_they_are(loop: Loop) -> None:
    loop.train(2)
    assert loop.learner.tokens_of_run == 2 * STEP_TOKENS
    loop.send(0)
    loop.train()
    assert loop.learner.tokens_of_run == 3 * STEP_TOKENS
    loop.own_record()
    loop.learner.between_steps()
    assert loop.learner.tokens_of_run == 200 + STEP_TOKENS  # 200: what the record says


def test_the_anchor_takes_the_place_of_the_weights_for_an_evaluation(loop: Loop) -> None:
    loop.train(3)
    before, anchor = loop.live.clone(), loop.model.merge.anchor.clone()
    with loop.learner.in_place():
        assert torch.equal(loop.live, anchor)
        assert not torch.equal(loop.live, before)
    assert torch.equal(loop.live, before)


# ---- telling -------------------------------------------------------------------------------------
def test_progress_says_what_was_done_and_not_yet_sent(loop: Loop) -> None:
    loop.fake.heard_val_loss = (3, 2.5)
    loop.learner.status = LoopStatus(head="h", codec="int8")
    loop.train(2)
    progress = loop.fake.status
    assert (progress.inner_step, progress.unsent_tokens) == (2, 2 * STEP_TOKENS)
    assert (progress.head, progress.codec) == ("h", "int8")
    assert (progress.train_loss, progress.step_s) == (3.0, 0.5)
    assert (progress.val_loss, progress.val_round) == (2.5, 3)


def test_a_loss_that_is_not_finite_is_shown_as_it_is_and_null_in_the_files(loop: Loop) -> None:
    loop.meter.validated(4, math.nan)
    loop.learner.publish(force=True)
    shown = loop.fake.status
    assert shown.val_loss is not None and math.isnan(shown.val_loss), "the alert is on NaN"
    assert shown.val_round == 4

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    status = json.loads((loop.folder / "status.json").read_text(), parse_constant=refused)
    assert (status["val_loss"], status["val_round"]) == (None, 4)
    (line,) = (loop.folder / "events.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refused)["loss"] is None


def test_a_change_of_the_replica_is_announced_at_once_and_only_that(loop: Loop) -> None:
    loop.learner.publish()
    loop.train(3)
    assert not loop.fake.told
    loop.learner.status = LoopStatus(head="h", members=("h", "a"))
    loop.learner.publish()
    loop.learner.publish()
    assert loop.fake.told == [("announce",)]
    loop.learner.status = replace(loop.learner.status, members=("h", "b"), epoch=2)
    loop.learner.publish()
    loop.learner.status = replace(loop.learner.status, data_position=5)
    loop.learner.publish()
    assert len(loop.fake.told) == 2


def test_a_counted_record_says_what_the_codec_left_of_the_message(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(2)
    loop.send(0)
    (send,) = loop.model.merge.in_flight.values()
    length = float(send.message.norm())
    left = 0.25 * send.message
    event = loop.committed(0, send.message.clone(), mine=True)
    loop.buffers.message.copy_(left)
    loop.fake.events.put(replace(event, matchmaking_s=3.5, payload_bytes=77))
    loop.learner.between_steps()
    loop.fake.events.put(loop.committed(1, 0.0))
    loop.learner.between_steps()
    counted, followed = loop.events("round")
    assert (counted["outcome"], followed["outcome"]) == ("counted", "followed")
    assert counted["compression_error"] == pytest.approx(0.25, rel=1e-4)
    assert counted["residual_norm"] == pytest.approx(0.95 * 0.25 * length, rel=1e-4)
    assert (counted["matchmaking_s"], counted["payload_bytes"]) == (3.5, 77)
    assert followed["compression_error"] is None
    loop.learner.publish()
    assert loop.fake.status.compression_error == counted["compression_error"]
    assert followed["residual_norm"] == counted["residual_norm"]
