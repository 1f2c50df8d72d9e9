"""`dilocox monitor --track`: each round once in TensorBoard's files, or wandb's."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.chain.round_history import HistoryRow
from dilocox.peer.monitor import tracking
from dilocox.peer.monitor.history import Point, SwarmHistory
from dilocox.peer.monitor.tracking import SETTLED, TensorBoard, Tracker, Wandb
from tests.peer.fabricated import RUN
from tests.peer.monitor.tracked import scalars, wandb_history


def row(number: int) -> HistoryRow:
    return HistoryRow(number, 0, "", 10.0 * number, 100 * (number + 1), 3.0, 2.0, 10.0, 4)


def begun() -> SwarmHistory:
    return SwarmHistory.begun(1, "root", 0.0)


def board(folder: Path) -> Tracker:
    return Tracker(folder, RUN, TensorBoard)


def written(folder: Path, tag: str = "loss/validation") -> Counter[int]:
    """How often each round is in the event files."""
    return Counter(number for number, _ in scalars(folder, tag))


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "missing" not in request.node.name and "wandb" not in request.node.name:
        pytest.importorskip("tensorboard")


def test_each_round_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    history, tracker = begun(), board(tmp_path)
    history.curve.see(Point(6, 700, validation=2.0))
    tracker.take(history, None)
    assert not (tmp_path / "tracked.json").exists()  # bootstraps are asked for those before
    rows = [row(number) for number in range(7)]
    history.curve.take(rows)
    tracker.take(history, rows)
    tracker.take(history, [])
    tracker.close()
    assert written(tmp_path) == Counter(range(7 - SETTLED))

    again = board(tmp_path)
    rows = [row(number) for number in range(10)]
    history.curve.take(rows)
    again.take(history, rows)
    again.take(history, rows, ended=True)
    again.close()
    assert written(tmp_path) == Counter(range(10)) == written(tmp_path, "tokens/total")


def test_rounds_that_were_set_aside_are_purged(tmp_path: Path) -> None:
    history, tracker = begun(), board(tmp_path)
    history.curve.take(row(number) for number in range(10))
    tracker.take(history, [])
    history.curve.go_back(3)
    history.curve.take([row(10), row(11), row(12), row(13)])
    history.set_aside = (4, 10)
    tracker.take(history, [])
    tracker.close()
    assert written(tmp_path) == Counter([0, 1, 2, 3, 10])


def test_a_folder_of_another_run_and_a_damaged_note_are_refused(tmp_path: Path) -> None:
    note = tmp_path / "tracked.json"
    for text, said in (
        (json.dumps({"run": "f" * 32, "round": 1, "purged": 0}), "it has rounds of run fff"),
        ("{", "is damaged; remove it"),
    ):
        note.write_text(text)
        with pytest.raises(InvalidInput, match=said):
            board(tmp_path)


@pytest.mark.parametrize("kind", [TensorBoard, Wandb])
def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, kind: type[TensorBoard | Wandb]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="file"):
        Tracker(tmp_path / "file" / "board", RUN, kind)


def test_a_missing_tensorboard_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(InvalidInput, match=r"pip install 'dilocox\[tracking\]'"):
        board(tmp_path)


def test_a_missing_wandb_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'dilocox\[tracking\]'"):
        Tracker(tmp_path, RUN, Wandb)


def test_wandbs_offline_files_have_each_round_once_also_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    history = begun()
    for count in (7, 10):
        tracker = Tracker(tmp_path, RUN, Wandb)
        rows = [row(number) for number in range(count)]
        history.curve.take(rows)
        tracker.take(history, rows)
        tracker.close()
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN}/run-{RUN}.wandb"))
    told = [each for file in files for each in wandb_history(file)]
    assert len(files) == 2 and [each["round"] for each in told] == list(range(10 - SETTLED))
    told[3].pop("_runtime")
    assert told[3] == {
        "round": 3,
        "loss/train": 3.0,
        "loss/validation": 2.0,
        "tokens/total": 400,
        "tokens/per_second": 10.0,
        "swarm/peers": 4,
        "_step": 4,
        "_timestamp": 30.0,
    }
