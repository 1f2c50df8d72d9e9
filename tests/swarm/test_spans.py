"""The small parts that the tests of real rounds stand on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.swarm.altered import slow_down, syncs
from tests.swarm.spans import stepping_share


def test_a_pause_between_inner_steps_is_no_time_in_them() -> None:
    ends = [0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0]  # one gap of 4 s, three more than usual
    assert stepping_share(ends, 0.0, 10.0) == pytest.approx(0.7)
    assert stepping_share(ends, 3.5, 10.0) == 1.0, "what was before the span"


def test_a_step_that_is_a_little_slower_is_no_pause() -> None:
    assert stepping_share([0.0, 1.0, 2.0, 3.9, 4.9], 0.0, 5.0) == 1.0


def test_a_slow_disk_takes_its_time_for_what_is_new_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # the disk here takes time, too
    slept, sleep = list[float](), time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    notes = tmp_path / "notes"
    slow_down(1e6, str(notes))
    (tmp_path / "snapshot").mkdir()
    with (tmp_path / "snapshot" / "weights").open("wb", buffering=0) as file:
        for _ in range(2):
            file.write(bytes(200_000))
            os.fsync(file.fileno())
    with (tmp_path / "line").open("wb", buffering=0) as file:
        file.write(b"a line")
        os.fsync(file.fileno())
    assert slept == pytest.approx([0.2, 0.2, 0.0], abs=0.1)
    (folder,) = syncs(notes)
    assert folder == str(tmp_path / "snapshot") and syncs(notes)[folder] >= 0.4
