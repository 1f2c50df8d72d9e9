"""What a peer reports: each figure is what its name says, in the log and in the files."""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dilocox.peer.averaging.events import Committed
from dilocox.peer.averaging.loop_status import LoopStatus, OwnContribution
from dilocox.peer.commands.demo import WatchedPeer
from dilocox.peer.os_process import Child
from dilocox.peer.rounds.record import Contribution, ReducedShare
from dilocox.peer.training import report as report_module
from dilocox.peer.training.merge import Outcome
from dilocox.peer.training.report import (
    LoopMeter,
    Reporter,
    contribution_sentence,
    event_in_words,
)
from dilocox.pipeline.messages import Stepped
from tests.clocks import TestClock
from tests.peer.members import template
from tests.peer.told_reports import REPORT, STATUS

NUMEL = 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TestClock:
    clock = TestClock()
    monkeypatch.setattr(report_module, "time", clock)
    return clock


@pytest.fixture
def sent_bytes() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def sent_by_kind(total: torch.Tensor) -> dict[str, int]:
    """A fifth of them is for no average."""
    return {"averaging": int(total) * 4 // 5, "record": int(total) // 5}


def meter_of(folder: Path, sent_bytes: torch.Tensor) -> LoopMeter:
    return LoopMeter(reporter=Reporter(folder), sent=lambda: sent_by_kind(sent_bytes), numel=NUMEL)


@pytest.fixture
def joining(clock: TestClock, sent_bytes: torch.Tensor, tmp_path: Path) -> LoopMeter:
    """Of a loop that has not begun to train."""
    return meter_of(tmp_path, sent_bytes)


@pytest.fixture
def meter(joining: LoopMeter) -> LoopMeter:
    joining.start()
    return joining


def step(loss: float, *, skipped: bool = False) -> Stepped:
    return Stepped(step=0, loss=loss, skipped=skipped)


def committed(round_number: int, members: int = 2) -> Committed:
    names = tuple(str(number) for number in range(members))
    record = template(
        round=round_number,
        members=tuple(
            Contribution(peer=name, tokens=100, exchange_s=0.0, step_s=0.0) for name in names
        ),
        parts=(ReducedShare(phase=0, reducer=names[0], start=0, stop=64, contributors=names),),
        chain_tokens=900,
    )
    return Committed(
        record=record, digest="d" * 64, anchor_sha256="a" * 64, remainder=True, exchange_s=0.25
    )


def events(folder: Path, kind: str = "round") -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_round_line_holds_the_steps_loss_and_bytes_of_that_round(
    meter: LoopMeter, clock: TestClock, sent_bytes: torch.Tensor, tmp_path: Path
) -> None:
    for loss in (4.0, 2.0):
        meter.stepped(step(loss), 64, 0.5)
    meter.stepped(step(99.0, skipped=True), 64, 0.5)
    meter.sent(0, 64)
    meter.next_round()
    meter.stepped(step(1.0), 64, 0.5)  # of the next round
    sent_bytes.add_(5000)
    with meter.waiting("send"):
        clock.now += 1
    clock.now += 9
    meter.validated(0, 3.25)
    meter.committed(committed(0, members=4), Outcome.COUNTED, tokens=128)
    (line,) = events(tmp_path)
    assert (line["inner_steps"], line["train_loss"]) == (3, 3.0)
    assert (line["tokens"], line["record_tokens"], line["chain_tokens"]) == (128, 400, 900)
    assert (line["val_loss"], line["val_round"]) == (3.25, 0)
    assert (line["sent_bytes"], line["averaging_bytes"]) == (5000, 4000)
    assert line["fp16_bytes"] == 2 * 2 * NUMEL * 3 / 4  # a ring moves 2 (n - 1) / n of the vector
    assert (line["waiting_share"], line["members"], line["outcome"]) == (0.1, 4, "counted")
    assert line["exchange_s"] == 0.25


def test_bytes_and_waiting_are_counted_once_from_line_to_line(
    meter: LoopMeter, clock: TestClock, sent_bytes: torch.Tensor, tmp_path: Path
) -> None:
    for round_number, (waited, worked, sent) in enumerate([(2, 8, 300), (0, 5, 0), (1, 1, 50)]):
        with meter.waiting("send"):
            clock.now += waited
        clock.now += worked
        sent_bytes.add_(sent)
        meter.committed(committed(round_number), Outcome.COUNTED, tokens=1)
    lines = events(tmp_path)
    assert [line["sent_bytes"] for line in lines] == [300, 0, 50]
    assert [line["waiting_share"] for line in lines] == [0.2, 0.0, 0.5]


def test_waiting_before_training_begins_does_not_count(
    joining: LoopMeter, clock: TestClock, tmp_path: Path
) -> None:
    with joining.waiting("send"):
        clock.now += 60
    joining.start()
    clock.now += 10
    joining.committed(committed(0), Outcome.COUNTED, tokens=1)
    assert events(tmp_path)[0]["waiting_share"] == 0.0


def test_the_newest_compression_error_stays_where_a_record_lacks_this_peers_message(
    meter: LoopMeter,
) -> None:
    assert meter.compression_error is None
    for number, error in enumerate([0.5, 0.75, None, float("nan")]):
        meter.committed(committed(number), Outcome.COUNTED, tokens=1, compression_error=error)
    assert meter.compression_error == 0.75


def test_a_record_without_this_peer_has_none_of_its_tokens(
    meter: LoopMeter, tmp_path: Path
) -> None:
    other = next(outcome for outcome in Outcome if outcome is not Outcome.COUNTED)
    meter.committed(committed(0), other, tokens=128)
    (line,) = events(tmp_path)
    assert (line["tokens"], line["inner_steps"], line["train_loss"]) == (0, 0, None)
    assert line["outcome"] == other.value


def test_the_newest_validation_is_kept_whoever_made_it(meter: LoopMeter) -> None:
    meter.heard(4, 2.5)
    assert (meter.val_loss, meter.val_round) == (2.5, 4)
    meter.heard(3, 9.0)
    assert (meter.val_loss, meter.val_round) == (2.5, 4)
    meter.validated(5, 2.0)
    assert (meter.val_loss, meter.val_round) == (2.0, 5)


def test_speed_and_loss_are_smoothed_and_skipped_steps_left_out(meter: LoopMeter) -> None:
    meter.stepped(step(4.0), 100, 1.0)
    meter.stepped(step(2.0), 200, 1.0)
    meter.stepped(step(0.0, skipped=True), 900, 3.0)
    assert meter.train_loss == pytest.approx(0.8 * 4.0 + 0.2 * 2.0)
    assert meter.tokens_per_s == pytest.approx(0.8 * 100 + 0.2 * 200)
    assert (meter.tokens, meter.inner_step, meter.longest_step_s) == (300, 3, 3.0)


def test_until_a_rounds_first_step_has_ended_the_last_rounds_longest_is_told(
    meter: LoopMeter,
) -> None:
    for seconds in (75.0, 60.0):
        meter.stepped(step(4.0), 100, seconds)
    meter.next_round()
    assert meter.read(LoopStatus()).step_s == 75.0, "nobody would wait for the step under way"
    told = list[float]()
    for seconds in (50.0, 40.0, 55.0):
        meter.stepped(step(4.0), 100, seconds)
        told.append(meter.read(LoopStatus()).step_s)
    assert told == [50.0, 50.0, 55.0]


def test_a_step_whose_loss_is_not_known_here_counts_but_for_the_loss(
    meter: LoopMeter, tmp_path: Path
) -> None:
    meter.stepped(step(4.0), 100, 1.0)
    meter.stepped(step(math.nan), 100, 1.0)  # a member that missed the GO and stepped later
    assert (meter.tokens, meter.inner_step, meter.train_loss) == (200, 2, 4.0)
    meter.sent(0, 64)
    meter.committed(committed(0), Outcome.COUNTED, tokens=200)
    (line,) = events(tmp_path)
    assert (line["inner_steps"], line["train_loss"]) == (2, 4.0)


@pytest.mark.parametrize(
    ("loop", "place", "shown"),
    [
        ("joining", LoopStatus(), "joining"),
        ("training", LoopStatus(blocked="stage 1 has no peer"), "spare"),
        ("training", LoopStatus(head="h"), "training"),
        ("leaving", LoopStatus(), "leaving"),
    ],
)
def test_the_status_says_in_which_replica_a_peer_is_or_that_it_is_spare(
    meter: LoopMeter, tmp_path: Path, loop: str, place: LoopStatus, shown: str
) -> None:
    meter.state = loop
    meter.reporter.status(meter.read(place, round=3), force=True)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["head"], status["blocked"]) == (
        shown,
        place.head,
        place.blocked,
    )
    assert (status["round"], status["applied_round"], status["in_flight"]) == (3, -1, None)


# ---- waiting -------------------------------------------------------------------------------------
def publish(meter: LoopMeter, *, head: str = "h") -> None:
    meter.read(LoopStatus(head=head))


def waited(meter: LoopMeter) -> dict[str, float]:
    return {str(reason): spent_s for reason, spent_s in meter.waiting_s.items() if spent_s}


def test_waiting_counts_once_for_the_inner_reason(joining: LoopMeter, clock: TestClock) -> None:
    with joining.waiting("send"):
        clock.now += 2
        with joining.waiting("record"):
            clock.now += 10
            with joining.waiting("merge"):
                clock.now += 1
            clock.now += 5
        clock.now += 3
    clock.now += 100  # of work
    with joining.waiting("merge"):
        clock.now += 1
    assert waited(joining) == {"send": 5, "record": 15, "merge": 2}


def test_the_stall_of_a_round_is_what_its_send_and_its_merges_took(
    joining: LoopMeter, clock: TestClock
) -> None:
    with joining.waiting("join"), joining.waiting("merge"):
        clock.now += 50
    joining.start()
    assert joining.stall_s == 0
    for send_s, merge_s in ((2, 0.5), (4, 0.25)):
        clock.now += 100  # of work
        with joining.waiting("merge"):
            clock.now += merge_s
        with joining.waiting("send"):
            clock.now += send_s
            joining.next_round()
            with joining.waiting("record"):  # the exchange's own time, which H follows as such
                clock.now += 30
        assert joining.stall_s == send_s + merge_s


def test_a_wait_that_fails_counts_too(joining: LoopMeter, clock: TestClock) -> None:
    with pytest.raises(RuntimeError), joining.waiting("merge"):
        clock.now += 4
        raise RuntimeError
    clock.now += 9
    assert waited(joining) == {"merge": 4}


def test_all_time_is_computing_or_waiting_for_something(
    joining: LoopMeter, clock: TestClock
) -> None:
    computed = 0.0
    joining.computing_s = lambda: computed
    began = clock.now
    with joining.waiting("join"):
        clock.now += 3
        publish(joining, head="")
        clock.now += 1
    joining.start()
    clock.now += 5  # a spare
    publish(joining, head="")
    clock.now += 4
    computed += 3  # of these four
    publish(joining)
    with joining.waiting("merge"):
        clock.now += 2
    computed += 1
    clock.now += 8
    publish(joining)
    assert waited(joining) == {"join": 4, "spare": 5, "neighbours": 1 + 7, "merge": 2}
    assert computed + sum(joining.waiting_s.values()) == clock.now - began
    assert joining.read(LoopStatus(head="h")).spare_share == 5 / (5 + 4 + 2 + 8)


def test_inner_steps_and_those_not_taken_are_counted_over_all_rounds(joining: LoopMeter) -> None:
    for skipped in (False, True, False):
        joining.stepped(Stepped(step=0, loss=1.0, skipped=skipped), 10, 1.0)
        joining.next_round()
    assert (joining.inner_steps, joining.skipped_steps, joining.tokens) == (2, 1, 20)


# ---- what it gave --------------------------------------------------------------------------------
def test_what_a_peer_gave_is_counted_from_when_it_joined_and_goes_on_after_a_restart(
    clock: TestClock, sent_bytes: torch.Tensor, tmp_path: Path
) -> None:
    first = meter_of(tmp_path, sent_bytes)
    first.committed(committed(0), Outcome.FOLLOWED, tokens=0)  # before it joined
    clock.now = 86_400.0 * 365
    first.start()
    first.heard(0, 4.5)
    first.committed(committed(1), Outcome.COUNTED, tokens=100)
    first.reporter.status(first.read(LoopStatus()), force=True)
    again = meter_of(tmp_path, sent_bytes)
    again.start()
    again.committed(committed(2), Outcome.FOLLOWED, tokens=0)  # while it was away
    again.committed(committed(2), Outcome.REPEATED, tokens=0)
    again.committed(committed(3), Outcome.UNDONE, tokens=50)
    again.validated(3, 2.25)
    assert again.gave == OwnContribution(
        since=86_400.0 * 365, rounds=1, tokens=100, of_tokens=600, val_loss=4.5
    )
    assert contribution_sentence(again.gave, again.val_loss, "") == (
        "since 1971-01-01 this peer has trained on 100 tokens in 1 committed round, 16.7% of what "
        "its stage learnt from in that time; the validation loss fell from 4.5000 to 2.2500"
    )


def test_the_sentence_says_what_the_model_writes_and_of_a_loss_only_what_is_known() -> None:
    gave = OwnContribution(since=1.0, rounds=100, tokens=51_200, of_tokens=51_200)
    words = contribution_sentence(gave, 2.5, '"def " with "main():"')
    assert "51,200 tokens in 100 committed rounds, 100.0% of" in words
    assert words.endswith('in that time; the model now continues "def " with "main():"')
    assert "went from 2.0000 to 2.5000" in contribution_sentence(
        replace(gave, val_loss=2.0), 2.5, ""
    )
    assert "validation" not in contribution_sentence(replace(gave, val_loss=2.5), 2.5, "")


@pytest.mark.parametrize("text", ["", "[]", '{"gave": 7}', '{"gave": {"tokens": "many"}}', "\xff"])
def test_a_damaged_status_file_costs_only_what_was_counted(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert Reporter(tmp_path).contribution_before() == OwnContribution()


def test_the_log_names_a_peer_as_its_owner_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter, peer = Reporter(tmp_path), 46 * "x" + "abcdef"
    reporter.shown = lambda peer: f"Ada ({peer[-6:]})"
    with caplog.at_level(logging.INFO, logger="dilocox.peer.training.report"):
        reporter.tell("healed", stage=1, epoch=2, members=[peer, peer], splice_s=0.5, seconds=1.0)
    (line,) = caplog.messages
    assert line == "healed: Ada (abcdef) and Ada (abcdef) go on, 1.0 s after the fault"
    assert events(tmp_path, "healed")[0]["members"] == [peer, peer]  # scripts read ids


# ---- the files and the log -----------------------------------------------------------------------
def test_a_watched_peer_sees_what_was_written_and_half_a_line_only_when_it_is_whole(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state" / "run-stage0"
    folder.mkdir(parents=True)
    watched = WatchedPeer(name="p", state=tmp_path / "state", child=cast("Child", None))
    watched.look()
    assert (watched.status, watched.rounds, watched.waiting_share) == ({}, [], 0.0)
    reporter = Reporter(folder)
    reporter.event("training")
    reporter.committed(REPORT)
    reporter.event("validated", round=1, loss=2.25)
    reporter.void(2, "nobody came")
    reporter.status(STATUS, force=True)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "void", ')
        file.flush()
        watched.look()
        watched.look()
        assert watched.voids == 1
        file.write('"time": 1.0}\n')
    watched.look()
    assert watched.voids == 2
    assert [line["round"] for line in watched.rounds] == [1]
    assert watched.losses == {1: 2.25}
    assert watched.status["state"] == "training"
    assert watched.waiting_share == 0.01


def test_an_event_of_a_replica_reads_as_a_sentence() -> None:
    one, two = "Qm" + 38 * "x" + "abcdef", "Qm" + 38 * "y" + "uvwxyz"
    fault = {"stage": 1, "peer": one, "reason": "silent", "after_s": 2.0}
    lost = {"stage": 0, "reason": "closed", "after_s": 2.0}
    healed = {"stage": 1, "epoch": 2, "members": [one, two], "splice_s": 0.5, "seconds": 2.54}
    said = {
        ("dissolved", "its head dissolved it"): {"reason": "its head dissolved it"},
        ("fault", "the peer of stage 1 is gone (silent), abcdef; looking for another one"): fault,
        ("fault", "the peer of stage 1 has left, abcdef; looking for another one"): fault
        | {"reason": "left"},
        (
            "lost",
            "the peer of stage 0 is gone (closed); the head of the replica looks for another one",
        ): lost,
        ("healed", "abcdef and uvwxyz go on, 2.5 s after the fault"): healed,
        ("replica", "abcdef and uvwxyz train together, a stage each"): {"members": [one, two]},
        ("replica", "this peer trains, and needs no other for that"): {"members": [one]},
    }
    for (kind, words), facts in said.items():
        assert event_in_words(kind, facts) == words


def test_the_status_is_written_about_once_a_second(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)
    reporter.status(STATUS)
    reporter.status(replace(STATUS, round=3))
    assert json.loads((tmp_path / "status.json").read_text())["round"] == 2
    reporter.status(replace(STATUS, round=4), force=True)
    assert json.loads((tmp_path / "status.json").read_text())["round"] == 4


def test_the_log_line_of_a_round_names_its_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dilocox.peer.training.report"):
        Reporter(tmp_path).committed(replace(REPORT, outcome="undone"))
        Reporter(tmp_path).void(2, "nobody came")
        Reporter(tmp_path).committed(replace(REPORT, members=1, val_loss=5.96664))
    round_line, void_line, alone = (record.getMessage() for record in caplog.records)
    assert round_line == (
        "round 1 committed: 512 tokens of 1,024, train loss 3.0000, validation -, 100 tokens/s, "
        "waiting 2.5%, sent 1.5 kB, averaged by 2 peers (without yours, which go with a later one)"
    )
    assert (
        void_line == "round 2 void: nobody came; nothing is lost: its tokens go with the next round"
    )
    assert alone.endswith(", waiting 2.5%, alone, no average")
    assert ", validation 5.9666 (start), " in alone


def test_a_round_that_a_peer_only_takes_is_no_work_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = replace(REPORT, inner_steps=0, tokens=0, val_loss=2.5, val_round=3)
    with caplog.at_level(logging.INFO, logger="dilocox.peer.training.report"):
        Reporter(tmp_path).committed(replace(report, outcome="followed"))
        Reporter(tmp_path).committed(replace(report, outcome="reset"))
    followed, reset = (record.getMessage() for record in caplog.records)
    assert followed == "took round 1: 1,024 tokens of others, validation 2.5000 (round 3)"
    assert reset == "took round 1: 1,024 tokens, validation 2.5000 (round 3)"


def test_catching_up_is_one_line_and_digests_are_for_those_who_look_for_faults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(tmp_path)
    taken = replace(REPORT, outcome="followed", tokens=0)

    def lines(level: int) -> list[str]:
        caplog.clear()
        with caplog.at_level(level, logger="dilocox.peer.training.report"):
            for number in range(3, 6):
                reporter.committed(replace(taken, round=number), more=number < 5)
            reporter.committed(replace(taken, round=6), more=True)
            reporter.committed(replace(REPORT, round=7))
        return [record.getMessage() for record in caplog.records]

    first, second, own = lines(logging.INFO)
    assert first == "took rounds 3 to 5: 3,072 tokens of others, validation -"
    assert second == "took round 6: 1,024 tokens of others, validation -"
    assert own.startswith("round 7 committed: ")
    for_faults = "round 5: 8 inner steps, digest dddddddddddd, anchor aaaaaaaaaaaa"
    assert for_faults in lines(logging.DEBUG)
    assert len(events(tmp_path)) == 10  # scripts hear of each


def test_who_only_follows_says_so_at_once_and_then_every_hundred_rounds_or_ten_minutes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: TestClock
) -> None:
    reporter, taken = Reporter(tmp_path), replace(REPORT, outcome="followed", tokens=0)
    with caplog.at_level(logging.INFO, logger="dilocox.peer.training.report"):
        for number in range(250):  # of 2 seconds each, then of a minute
            clock.now += 2 if number < 130 else 60
            reporter.committed(replace(taken, round=number))
        reporter.committed(replace(REPORT, round=250))
        reporter.committed(replace(taken, round=251))
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said[:4] == [
        "took round 0",
        "took rounds 1 to 100",
        "took rounds 101 to 139",
        "took rounds 140 to 149",
    ]
    assert said[-2:] == ["round 250 committed", "took round 251"]
    assert len(said) == 16


def test_a_line_that_a_full_disk_cut_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)
    reporter.event("training")
    for number in range(3, 3000):  # of a long run only the end is read
        if number % 500 == 0:
            with (tmp_path / "events.jsonl").open("a") as file:
                file.write('{"event": "sent", "ro')
            reporter = Reporter(tmp_path)
        reporter.void(number, "nobody came")
    assert [each["round"] for each in events(tmp_path, "void")] == list(range(3, 3000))


def test_a_full_disk_costs_lines_and_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(tmp_path)
    reporter.event("training")
    caplog.set_level(logging.INFO)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(*_: Any, **__: Any) -> Any:
        with open(tmp_path / "events.jsonl", "ab") as file:  # noqa: PTH123 - it is not replaced
            file.write(b'{"event": "vo')
        full()

    (tmp_path / "status.json").mkdir()  # which no file can replace
    for number in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", half if number == 0 else full)
            reporter.void(number, "nobody came")
        reporter.status(STATUS, force=True)
    assert caplog.text.count("events.jsonl: no space left on the disk") == 1
    assert caplog.text.count("status.json: cannot be written") == 1
    (tmp_path / "status.json").rmdir()
    reporter.void(3, "nobody came")
    reporter.status(STATUS, force=True)
    assert [each["round"] for each in events(tmp_path, "void")] == [3]
    assert (tmp_path / "status.json").is_file()
    assert caplog.text.count("is written again") == 2


def test_listeners_hear_every_event_and_every_status(tmp_path: Path) -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    statuses: list[LoopStatus] = []
    reporter = Reporter(tmp_path)
    reporter.on_event = lambda kind, facts: events.append((kind, facts))
    reporter.on_status = statuses.append
    reporter.event("training")
    reporter.tell("healed", epoch=2, members=["h", "m"], seconds=0.5)
    reporter.committed(REPORT)
    reporter.void(2, "nobody came")
    kinds = [kind for kind, _ in events]
    assert kinds == ["training", "healed", "round", "void"]
    assert events[1][1] == {"epoch": 2, "members": ["h", "m"], "seconds": 0.5}
    assert events[2][1]["outcome"] == "counted"
    for number in range(3):  # the file is written less often
        reporter.status(replace(STATUS, round=number))
    assert [status.round for status in statuses] == [0, 1, 2]
