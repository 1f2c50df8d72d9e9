"""A peer that is killed at any moment of a send goes on from its disk, and sends nothing twice."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.chain import snapshot_files
from dilocox.peer.chain.snapshot_files import LOCAL_FILE
from dilocox.peer.training import snapshots
from tests.peer.loops import Loop

STEP_TOKENS = 16


class Killed(BaseException):
    """The process ends here."""


def killed(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """A peer whose first send is in a record, and that trained on since."""
    loop = Loop(tmp_path)
    loop.train(2)
    send(loop, 0)
    commit(loop, 0)
    loop.learner.data_state = lambda: {"part": 7}
    loop.train(3)
    return loop


def send(loop: Loop, number: int) -> None:
    loop.fake.due = (number, 1.0)
    loop.learner.between_steps()


def commit(loop: Loop, number: int, *, mine: bool = True) -> None:
    loop.fake.events.put(loop.committed(number, 0.1, mine=mine))
    loop.learner.take_events()


def advance(loop: Loop, calls: int = 1) -> bool:
    """Whether a snapshot became complete in so many of its moments, which copy a piece each."""
    model, data = loop.model, loop.learner.data_state
    done = [
        loop.snapshots.advance(model.merge, model.optimizer, data, step_s=0.0) for _ in range(calls)
    ]
    return any(done)


def copied_pieces(loop: Loop) -> int:
    """How many pieces a snapshot of this loop has."""
    tensors, _ = loop.model.merge.state()
    return len(tensors) + len(loop.model.optimizer.state_dict().tensors)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_of_all_that_a_restart_needs_only_a_line_is_written_before_a_send(loop: Loop) -> None:
    journal, found = loop.folder / "snapshots" / "journal", list[str]()
    before = journal.read_text()
    loop.fake.on_submit = lambda: found.append(journal.read_text().removeprefix(before))
    send(loop, 1)
    (line,) = found
    assert json.loads(line)["round"] == 1 and journal.read_text() == before + line
    assert [path.name for path in journal.parent.iterdir()] == ["journal"]


@pytest.mark.parametrize("begun", ["no snapshot", "begun", "half", "complete"])
def test_what_may_have_been_sent_is_not_sent_again(
    loop: Loop, begun: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in a send, wherever the snapshot was that was begun before it."""
    if begun != "no snapshot":
        loop.snapshots.soon()
        advance(loop, 1 if begun == "begun" else copied_pieces(loop) // 2)
    if begun == "complete":
        until(lambda: advance(loop))
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        send(loop, 1)
    # what the record of round 0 changed is not in the state on the disk: it is applied again
    again = loop.again()
    merge = again.model.merge
    assert "goes on from the anchor" in caplog.text
    assert torch.equal(again.live, merge.anchor) and not again.learner.unsent
    assert not merge.can_send and not merge.residual.values.any()
    assert merge.round == (0 if begun == "complete" else -1), "of the snapshot"
    if merge.round < 0:
        commit(again, 0)
    commit(again, 1)
    # both sends are in records, as those say, and all tokens are in the books
    assert (merge.counted_tokens, merge.lost_tokens) == (5 * STEP_TOKENS, 0)
    assert [line["outcome"] for line in again.events("round")][-1:] == ["counted"]
    assert torch.equal(again.live, merge.anchor)


def test_inner_steps_go_on_while_a_snapshot_is_copied_and_it_is_one_of_its_beginning(
    loop: Loop,
) -> None:
    loop.snapshots.soon()
    while not advance(loop):
        loop.live.sub_(0.001)  # of values that were copied, and of others
        loop.learner.data_state = lambda: {"part": 8}
        time.sleep(0.001)
    again = loop.again()
    merge, now = again.model.merge, loop.model.merge
    assert (merge.tokens, again.learner.data_state()) == (3 * STEP_TOKENS, {"part": 7})
    learnt, all_learnt = merge.progress.unsent(), now.progress.unsent()
    assert bool((learnt >= 0.003 - 1e-6).all() and (learnt <= all_learnt + 1e-6).all())
    assert torch.equal(merge.progress.start, now.progress.start)


def test_no_snapshot_begins_while_a_send_is_in_flight(loop: Loop) -> None:
    send(loop, 1)
    loop.snapshots.soon()
    assert not advance(loop, 3)
    commit(loop, 1)
    until(lambda: advance(loop))
    assert loop.again().model.merge.round == 1


def test_a_full_disk_ends_a_peer_that_writes_in_the_background(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot_files, "save_tensors", full)
    loop.snapshots.soon()
    with pytest.raises(EnvironmentFault, match="no space left on the disk"):
        until(lambda: advance(loop))


@pytest.mark.parametrize("change", ["send", "record"])
def test_of_a_snapshot_that_a_change_of_the_state_cuts_off_nothing_stays(
    loop: Loop, change: str
) -> None:
    loop.snapshots.soon()
    advance(loop, 2)
    if change == "send":
        send(loop, 1)
    else:
        commit(loop, 1, mine=False)
    until(lambda: advance(loop) or not list((loop.folder / "snapshots").glob("*.partial")))
    assert not list((loop.folder / "snapshots").glob("0*"))


def test_the_inner_optimizer_and_the_data_position_outlive_a_send_that_the_state_lacks(
    loop: Loop,
) -> None:
    loop.model.optimizer.steps = 41
    loop.learner.leave(ended=False)
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        send(loop, 1)
    again = loop.again()
    assert again.model.optimizer.steps == 41
    assert again.learner.data_state() == {"part": 7}
    assert again.model.merge.tokens == 0


def test_a_send_that_no_record_names_is_lost_with_its_tokens(loop: Loop) -> None:
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        send(loop, 1)
    again = loop.again()
    merge = again.model.merge
    commit(again, 0)
    commit(again, 1, mine=False)
    assert (merge.counted_tokens, merge.lost_tokens) == (2 * STEP_TOKENS, 3 * STEP_TOKENS)


def test_who_is_killed_before_the_line_goes_on_where_its_state_was(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.learner.leave(ended=False)
    monkeypatch.setattr(loop.snapshots, "sending", killed)
    with pytest.raises(Killed):
        send(loop, 1)
    again = loop.again()
    assert not again.snapshots.sent_since
    assert again.model.merge.tokens == 3 * STEP_TOKENS
    send(again, 1)
    assert again.fake.of_kind("submit") == [("submit", 1, 1.0, 3 * STEP_TOKENS, 0)]


def test_a_state_that_knows_of_the_send_makes_its_line_obsolete(loop: Loop) -> None:
    send(loop, 1)
    loop.save()
    again = loop.again()
    assert not again.snapshots.sent_since
    assert list(again.model.merge.fly) == [1]
    assert torch.equal(again.live, loop.live)


def test_a_peer_without_any_state_does_not_send_for_a_round_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(2)
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        send(loop, 4)
    again = loop.again()
    assert again.snapshots.found is None
    assert [each.round for each in again.snapshots.sent_since] == [4]
    assert torch.equal(again.live, again.model.merge.anchor)


def test_a_journal_that_cannot_be_read_counts_as_a_send(loop: Loop) -> None:
    loop.learner.leave(ended=False)
    (loop.folder / "snapshots" / "journal").write_text('{"after": 1, "ro')
    again = loop.again()
    assert torch.equal(again.live, again.model.merge.anchor)
    assert (again.model.merge.tokens, again.model.merge.lost_tokens) == (0, 3 * STEP_TOKENS)
    again.learner.leave(ended=False)  # which repairs it
    assert not again.again().snapshots.sent_since


def test_the_journal_stays_short(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_LINES", 4)
    for number in range(1, 10):
        loop.train()
        send(loop, number)
        commit(loop, number)
    lines = (loop.folder / "snapshots" / "journal").read_text().splitlines()
    assert len(lines) == 4
    assert loop.again().snapshots.sent_since[-1].round == 9


def test_a_damaged_newest_state_does_not_keep_a_peer_from_its_run(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    send(loop, 1)
    loop.save()
    (newest,) = (loop.folder / "snapshots").glob("0*")
    (newest / LOCAL_FILE).write_bytes(b"{}")
    again = loop.again()
    assert str(newest) in caplog.text and "damaged" in caplog.text
    assert again.snapshots.found is None, "it joins anew"
    assert torch.equal(again.live, again.model.merge.anchor) and not again.learner.unsent
    again.train()
    send(again, 2)
    again.save()
    # what it writes now is not taken for older than the sends before
    assert not again.again().snapshots.sent_since
    assert list(again.again().model.merge.fly) == [2]


def test_nothing_of_a_state_stays_mapped_when_it_was_read(loop: Loop) -> None:
    send(loop, 1)
    loop.save()
    again = loop.again()
    again.train()
    send(again, 2)
    again.save()  # the files that it began with are removed
    mapped = Path("/proc/self/maps").read_text()
    assert str(loop.folder) not in mapped
