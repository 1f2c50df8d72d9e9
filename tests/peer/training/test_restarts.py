"""A peer that is killed at any moment of a send goes on from its disk, and sends nothing twice."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import bytes_below
from dilocox.peer.chain.snapshot_files import LOCAL_FILE
from dilocox.peer.process.prepare import local_model
from dilocox.peer.training import snapshot_taking
from dilocox.peer.training.snapshot_taking import BYTES_PER_S, Snapshots
from tests.dht.processes import wait_until
from tests.peer.loops import STEP_TOKENS, Loop, fill_disk
from tests.peer.training.merging import unsent


class Killed(BaseException):
    """The process ends here."""


def killed(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return begun(tmp_path)


SLOW = 1.0  # bytes a second: of a snapshot one piece is read, and the rest never


def begun(folder: Path, *, bytes_per_s: float = BYTES_PER_S) -> Loop:
    """A peer whose first send is in a record, and that trained on since."""
    loop = Loop(folder, bytes_per_s=bytes_per_s)
    loop.train(2)
    loop.send(0)
    commit(loop, 0)
    loop.learner.data_state = lambda: {"part": 7}
    loop.train(3)
    return loop


def commit(loop: Loop, number: int, *, mine: bool = True) -> None:
    loop.fake.events.put(loop.committed(number, 0.1, mine=mine))
    loop.learner.take_events()


def advance(loop: Loop) -> bool:
    """Whether a snapshot became complete; one that is due is begun."""
    model, data = loop.model, loop.learner.data_state
    return loop.snapshots.advance(model.merge, model.optimizer, data)


def halves(loop: Loop) -> list[Path]:
    return list((loop.folder / "snapshots").glob("*.partial"))


def test_of_all_that_a_restart_needs_only_a_line_is_written_before_a_send(loop: Loop) -> None:
    journal, found = loop.folder / "snapshots" / "journal", list[str]()
    loop.fake.on_submit = lambda: found.append(journal.read_text())
    loop.send(1)
    (text,) = found
    *_, line, _checksum = text.splitlines()
    assert json.loads(line)["round"] == 1 and journal.read_text() == text
    assert [path.name for path in journal.parent.iterdir()] == ["journal"]


@pytest.mark.parametrize("before", ["no snapshot", "half of one", "complete"])
def test_what_may_have_been_sent_is_not_sent_again(
    tmp_path: Path, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in a send, wherever the snapshot was that was begun before it."""
    loop = begun(tmp_path, bytes_per_s=SLOW) if before == "half of one" else begun(tmp_path)
    if before != "no snapshot":
        loop.snapshots.soon()
        wait_until(lambda: advance(loop) or (before == "half of one" and bool(halves(loop))), 20.0)
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        loop.send(1)
    # what the record of round 0 changed is not in the state on the disk: it is applied again
    again = loop.again()
    merge = again.model.merge
    assert "goes on from the anchor" in caplog.text
    assert torch.equal(again.live, merge.anchor) and not again.learner.unsent
    assert not merge.can_send and not merge.residual.values.any()
    assert merge.round == (0 if before == "complete" else -1), "of the snapshot"
    if merge.round < 0:
        commit(again, 0)
    commit(again, 1)
    # both sends are in records, as those say, and all tokens are in the books
    assert (merge.counted_tokens, merge.lost_tokens) == (5 * STEP_TOKENS, 0)
    assert [line["outcome"] for line in again.events("round")][-1:] == ["counted"]
    assert torch.equal(again.live, merge.anchor)


def test_training_and_validation_go_on_while_a_snapshot_is_read_and_it_is_one_of_its_beginning(
    tmp_path: Path,
) -> None:
    loop = begun(tmp_path, bytes_per_s=2e6)  # a third of a second
    loop.snapshots.soon()
    steps = 0
    while not advance(loop):
        loop.live.sub_(0.001)  # of values that were read, and of others
        loop.learner.data_state = lambda: {"part": 8}
        with loop.learner.in_place():  # weights and anchor have changed places
            time.sleep(0.002)
        steps += 1
    assert steps > 10
    again = loop.again()
    merge, now = again.model.merge, loop.model.merge
    assert (merge.tokens, again.learner.data_state()) == (3 * STEP_TOKENS, {"part": 7})
    learnt, all_learnt = unsent(merge), unsent(now)
    assert bool((learnt >= 0.003 - 1e-6).all() and (learnt <= all_learnt + 1e-6).all())
    assert torch.equal(merge.progress.start, now.progress.start)
    assert torch.equal(merge.anchor, now.anchor)


def test_no_snapshot_begins_while_a_send_is_in_flight(loop: Loop) -> None:
    loop.send(1)
    loop.snapshots.soon()
    assert not any(advance(loop) for _ in range(3)) and not halves(loop)
    commit(loop, 1)
    wait_until(lambda: advance(loop), 20.0)
    assert loop.again().model.merge.round == 1


def test_a_full_disk_costs_a_snapshot_in_the_background_and_no_peer(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # beyond the full disk, too: the last try may still be under way when that ends
    monkeypatch.setattr(snapshot_taking, "RETRY_S", 0.01)
    loop.snapshots.soon()
    with monkeypatch.context() as patch:
        tries = fill_disk(patch)
        wait_until(lambda: advance(loop) or len(tries) > 2, 20.0)
    assert caplog.text.count("no space left on the disk") == 1, "told once"
    wait_until(lambda: advance(loop), 20.0)
    assert loop.again().model.merge.tokens == 3 * STEP_TOKENS


def test_a_full_disk_ends_a_peer_before_a_send_that_it_could_not_write_down(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise EnvironmentFault(f"{path}: no space left on the disk")

    monkeypatch.setattr(snapshot_taking, "write_atomically", full)
    with pytest.raises(EnvironmentFault, match="journal: no space left"):
        loop.send(1)
    assert not loop.fake.of_kind("submit")[1:]


def test_what_a_start_has_downloaded_is_on_the_disk_soon(loop: Loop, tmp_path: Path) -> None:
    """A kill in the first half hour cost the download again."""
    fresh = Snapshots(tmp_path / "new" / "snapshots", layout=loop.layout.digest, period_s=1500.0)
    cpu, start = torch.device("cpu"), (4, "d" * 64)
    model = local_model(
        loop.manifest, 0, loop.layout, loop.buffers, fresh, cpu, start=lambda *_: start
    )
    wait_until(lambda: fresh.advance(model.merge, model.optimizer, lambda: {"part": 0}), 20.0)
    assert fresh.round == 4


def test_a_snapshot_that_a_newer_one_was_to_replace_goes_at_the_start(loop: Loop) -> None:
    loop.save()
    (older,) = (loop.folder / "snapshots").glob("0*")
    for name in ("00000009", "00000010.partial"):
        shutil.copytree(older, loop.folder / "snapshots" / name)
    again = loop.again()
    assert again.snapshots.found and not older.exists() and not halves(again)


def test_a_snapshot_for_which_there_is_no_room_is_not_begun(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It took the last byte from the journal and the records, which the peer cannot do without."""
    loop.save()
    (taken,) = map(bytes_below, (loop.folder / "snapshots").glob("0*"))
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_taking, "disk_free", lambda _: taken // 2)
        loop.snapshots.soon()
        assert not advance(loop) and not halves(loop)
    assert "no space left on the disk" in caplog.text and loop.snapshots.refused
    loop.snapshots.soon()
    wait_until(lambda: advance(loop), 20.0)


@pytest.mark.parametrize("change", ["send", "record"])
def test_of_a_snapshot_that_a_change_of_the_state_cuts_off_nothing_stays(
    tmp_path: Path, change: str
) -> None:
    loop = begun(tmp_path, bytes_per_s=SLOW)
    loop.snapshots.soon()
    wait_until(lambda: advance(loop) or bool(halves(loop)), 20.0)
    if change == "send":
        loop.send(1)
    else:
        commit(loop, 1, mine=False)
    wait_until(lambda: not halves(loop), 20.0)
    assert not list((loop.folder / "snapshots").glob("0*"))


def test_the_inner_optimizer_and_the_data_position_outlive_a_send_that_the_state_lacks(
    loop: Loop,
) -> None:
    loop.model.optimizer.steps = 41
    loop.learner.leave(ended=False)
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        loop.send(1)
    again = loop.again()
    assert again.model.optimizer.steps == 41
    assert again.learner.data_state() == {"part": 7}
    assert again.model.merge.tokens == 0


def test_a_send_that_no_record_names_is_lost_with_its_tokens(loop: Loop) -> None:
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        loop.send(1)
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
        loop.send(1)
    again = loop.again()
    assert not again.snapshots.sent_since
    assert again.model.merge.tokens == 3 * STEP_TOKENS
    again.send(1)
    assert again.fake.of_kind("submit") == [("submit", 1, 1.0, 3 * STEP_TOKENS, 0)]


def test_a_state_that_knows_of_the_send_makes_its_line_obsolete(loop: Loop) -> None:
    loop.send(1)
    loop.save()
    again = loop.again()
    assert not again.snapshots.sent_since
    assert list(again.model.merge.in_flight) == [1]
    assert torch.equal(again.live, loop.live)


def test_a_peer_without_any_state_does_not_send_for_a_round_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(2)
    loop.fake.on_submit = killed
    with pytest.raises(Killed):
        loop.send(4)
    again = loop.again()
    assert not again.snapshots.found
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
    monkeypatch.setattr(snapshot_taking, "MAX_LINES", 4)
    for number in range(1, 10):
        loop.train()
        loop.send(number)
        commit(loop, number)
    lines = (loop.folder / "snapshots" / "journal").read_text().splitlines()
    assert len(lines) == 4 + 1  # and what they are checked by
    assert loop.again().snapshots.sent_since[-1].round == 9


def test_a_damaged_newest_state_does_not_keep_a_peer_from_its_run(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.send(1)
    loop.save()
    (newest,) = (loop.folder / "snapshots").glob("0*")
    (newest / LOCAL_FILE).write_bytes(b"{}")
    again = loop.again()
    assert str(newest) in caplog.text and "damaged" in caplog.text
    assert not again.snapshots.found, "it joins anew"
    assert torch.equal(again.live, again.model.merge.anchor) and not again.learner.unsent
    again.train()
    again.send(2)
    again.save()
    # what it writes now is not taken for older than the sends before
    assert not again.again().snapshots.sent_since
    assert list(again.again().model.merge.in_flight) == [2]


def test_nothing_of_a_state_stays_mapped_when_it_was_read(loop: Loop) -> None:
    loop.send(1)
    loop.save()
    again = loop.again()
    again.train()
    again.send(2)
    again.save()  # the files that it began with are removed
    mapped = Path("/proc/self/maps").read_text()
    assert str(loop.folder) not in mapped
