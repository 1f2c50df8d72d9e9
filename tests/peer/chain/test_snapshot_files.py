"""Snapshots: the newest complete one counts, whatever happens while the next one is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import bytes_below
from dilocox.peer.chain import snapshot_files
from dilocox.peer.chain.snapshot_files import (
    LOCAL_FILE,
    STATE_FACTS_FILE,
    STATE_FILE,
    Snapshot,
    data_position,
    keep_position_alone,
    made_whole,
    newest,
    read_snapshot,
    state_sha256,
    write_snapshot,
)
from tests.peer.kept_chains import names_in

LAYOUT = "l" * 64


def made(round_number: int = 3, **changes: Any) -> Snapshot:
    facts: dict[str, Any] = {
        "round": round_number,
        "digest": "d" * 64,
        "layout": LAYOUT,
        "anchor": torch.arange(6.0) + round_number,
        "momentum": torch.ones(6),
        "tensors": {"merge.start": torch.arange(3.0), "inner.step": torch.tensor(7)},
        "facts": {"data": {"part": 2, "used": 9}, "merge": {"tokens": 11}},
    }
    return Snapshot(**(facts | changes))


def test_a_snapshot_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path / "none", layout=LAYOUT) is None
    write_snapshot(tmp_path, made())
    found = read_snapshot(tmp_path, layout=LAYOUT)
    assert found is not None
    assert (found.round, found.digest, found.facts) == (3, "d" * 64, made().facts)
    assert torch.equal(found.anchor, made().anchor)
    assert torch.equal(found.momentum, made().momentum)
    assert set(found.tensors) == set(made().tensors)
    for name, value in made().tensors.items():
        assert torch.equal(found.tensors[name], value)
        assert found.tensors[name].dtype == value.dtype


def test_the_data_position_alone_is_that_of_the_newest_in_the_last_folder(tmp_path: Path) -> None:
    for name, part in (("a", 1), ("b", 2), ("c", 3)):
        write_snapshot(tmp_path / name, made(facts={"data": {"part": part}}))
    folders = [tmp_path / name for name in "abc"]
    assert data_position(folders) == {"part": 3}
    next((tmp_path / "c").rglob(LOCAL_FILE)).write_bytes(b"damaged")
    assert data_position(folders) == {"part": 2}
    assert data_position([tmp_path / "none"]) == {}


def test_a_large_one_reaches_the_disk_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of it at the end, a peer that was to leave waited until it was taken for stuck."""
    synced = list[int]()
    monkeypatch.setattr(snapshot_files, "SYNC_BYTES", 100)
    monkeypatch.setattr(snapshot_files.os, "fdatasync", synced.append)
    write_snapshot(tmp_path, made(anchor=torch.zeros(100), momentum=torch.zeros(100)))
    assert len(synced) >= 2


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    written = [write_snapshot(tmp_path, made(round_number)) for round_number in range(3)]
    assert names_in(tmp_path) == ["00000002"]
    assert newest(tmp_path) == written[-1]
    found = read_snapshot(tmp_path, layout=LAYOUT)
    assert found is not None and found.round == 2


def test_what_joiners_download_has_its_size_and_sha256_beside_it(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path, made())
    facts = json.loads((folder / STATE_FACTS_FILE).read_text())
    assert facts == {
        "round": 3,
        "digest": "d" * 64,
        "size": (folder / STATE_FILE).stat().st_size,
        "sha256": state_sha256(folder / STATE_FILE),
    }


@pytest.mark.parametrize("moment", ["write_state", "save_tensors", "sync"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "no space left"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_a_disk_that_gives_up_at_any_moment_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: Exception, words: str
) -> None:
    write_snapshot(tmp_path, made(3))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(snapshot_files, moment, fail)
    with pytest.raises(EnvironmentFault, match=words) as caught:
        write_snapshot(tmp_path, made(4))
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["00000000"]
    found = read_snapshot(tmp_path, layout=LAYOUT)
    assert found is not None and found.round == 3


def test_a_snapshot_that_was_cut_off_by_a_crash_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(tmp_path, made(3))

    class Killed(BaseException):
        pass

    def killed(self: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        write_snapshot(tmp_path, made(4))
    monkeypatch.undo()
    assert names_in(tmp_path) == ["00000000", "00000001.partial"]
    found = read_snapshot(tmp_path, layout=LAYOUT)
    assert found is not None and found.round == 3
    write_snapshot(tmp_path, made(5))
    assert names_in(tmp_path) == ["00000001"]


@pytest.mark.parametrize("name", [STATE_FILE, STATE_FACTS_FILE, LOCAL_FILE])
@pytest.mark.parametrize("damage", ["cut", "missing", "empty object"])
def test_a_damaged_snapshot_is_set_aside_and_an_older_one_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    older = tmp_path / "older"
    write_snapshot(tmp_path, made(3)).rename(older)
    path = write_snapshot(tmp_path, made(4), number=1)
    older.rename(tmp_path / "00000000")
    harm(path / name, damage)
    found = read_snapshot(tmp_path, layout=LAYOUT)
    assert found is not None and (found.round, found.number) == (3, 0)
    assert names_in(tmp_path) == ["00000000", "00000001.damaged"]
    assert "00000001" in caplog.text and "damaged" in caplog.text
    harm(tmp_path / "00000000" / name, damage)
    assert read_snapshot(tmp_path, layout=LAYOUT) is None
    # of those that cannot be read one stays: the disk is not planned for more
    assert names_in(tmp_path) == ["00000000.damaged"]


def harm(path: Path, damage: str) -> None:
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "missing":
            path.unlink()
        case _:
            path.write_bytes(b"{}")


def test_of_snapshots_that_nobody_goes_on_from_the_place_in_the_data_stays(tmp_path: Path) -> None:
    for number in (3, 4):
        vectors = {"anchor": torch.ones(1 << 18), "momentum": torch.ones(1 << 18)}
        snapshot = made(number, **vectors, facts={"data": {"part": number}})
        write_snapshot(tmp_path / f"{number}", snapshot, number=number)
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / f"{number}" / f"{number:08d}").rename(tmp_path / "all" / f"{number:08d}")
    for left in ("00000005.partial", "00000001.damaged"):
        shutil.copytree(tmp_path / "all" / "00000003", tmp_path / "all" / left)
    for _ in range(2):  # a peer that was killed in it does it again
        keep_position_alone(tmp_path / "all")
        assert data_position([tmp_path / "all"]) == {"part": 4}
        assert bytes_below(tmp_path / "all") < 1000
    keep_position_alone(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path, made())
    with pytest.raises(EnvironmentFault, match=r"another model or stage.*move the state folder"):
        read_snapshot(tmp_path, layout="x" * 64)


@pytest.mark.parametrize("fault", [EnvironmentFault("no space left"), ValueError("not sound")])
def test_a_folder_that_is_not_filled_leaves_nothing_whatever_the_fault(
    tmp_path: Path, fault: Exception
) -> None:
    with pytest.raises(type(fault), match=str(fault)), made_whole(tmp_path / "00000001") as partial:
        (partial / "state").write_bytes(b"8 bytes a parameter")
        raise fault
    assert names_in(tmp_path) == []
