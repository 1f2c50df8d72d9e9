"""`dilocox monitor --track`: each round is in TensorBoard's files once, whatever happens."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.errors import InvalidInput
from dilocox.peer.chain.round_history import HistoryRow
from dilocox.peer.monitor.curve import Curve
from dilocox.peer.monitor.tracking import SETTLED, Tracker
from tests.peer.fabricated import RUN


def row(number: int) -> HistoryRow:
    return HistoryRow(number, 0, "", 10.0 * number, 100 * (number + 1), 3.0, 2.0, 10.0, 4)


def written(folder: Path, tag: str = "loss/validation") -> Counter[int]:
    """How often each round is in the event files."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: Any = loader.EventAccumulator(str(folder))
    found.Reload()
    return Counter(event.step for event in found.Scalars(tag))


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "missing" not in request.node.name:
        pytest.importorskip("tensorboard")


def test_each_round_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    curve, tracker = Curve(), Tracker(tmp_path, RUN)
    curve.see(6, tokens=700, validation=2.0)
    tracker.take(curve, None)
    assert not (tmp_path / "tracked.json").exists()  # bootstraps are asked for those before
    rows = [row(number) for number in range(7)]
    curve.take(rows)
    tracker.take(curve, rows)
    tracker.take(curve, [])
    tracker.close()
    assert written(tmp_path) == Counter(range(7 - SETTLED))

    again = Tracker(tmp_path, RUN)
    rows = [row(number) for number in range(10)]
    curve.take(rows)
    again.take(curve, rows)
    again.take(curve, rows, ended=True)
    again.close()
    assert written(tmp_path) == Counter(range(10)) == written(tmp_path, "tokens/total")


def test_rounds_that_were_set_aside_are_purged(tmp_path: Path) -> None:
    curve, tracker = Curve(), Tracker(tmp_path, RUN)
    curve.take(row(number) for number in range(10))
    tracker.take(curve, [])
    curve.go_back(3)
    curve.take([row(10), row(11), row(12), row(13)])
    tracker.take(curve, [], set_aside=(4, 10))
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
            Tracker(tmp_path, RUN)


def test_a_missing_tensorboard_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(InvalidInput, match=r"pip install 'dilocox\[tracking\]'"):
        Tracker(tmp_path, RUN)
