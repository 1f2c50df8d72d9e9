"""State folder, files and memory limit: what a peer takes of a volunteer's machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox.dht import files
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import disk_fault, make_folder, write_atomically
from dilocox.peer import memory_and_disk
from dilocox.peer.memory_and_disk import (
    CUDA_BYTES,
    LARGEST_OWN_WINDOW,
    PROCESSES_BYTES,
    WORK_BYTES,
    MemoryNeeds,
    check_memory,
    check_use,
    proportional_bytes,
    size,
    window_limit,
)
from dilocox.peer.state_folder import StateFolder


# ---- the lock ------------------------------------------------------------------------------------
def test_a_state_folder_belongs_to_one_peer_at_a_time(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "deep" / "state")
    with folder.locked():
        with (
            pytest.raises(EnvironmentFault, match=r"state: another peer.*--state"),
            StateFolder(folder.path).locked(),
        ):
            pass
        with pytest.raises(EnvironmentFault) as refused, StateFolder(folder.path).locked("busy"):
            pass
        assert str(refused.value) == f"{folder.path}: busy"
        with StateFolder(tmp_path / "other").locked():
            pass
    with folder.locked():
        pass


def test_the_lock_ends_with_its_process_however_it_ends(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from dilocox.peer.state_folder import StateFolder\n"
        "StateFolder(Path(sys.argv[1])).locked().__enter__(); print('locked', flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("locked\n", -9), done.stderr
    with StateFolder(tmp_path).locked():
        pass


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(
            EnvironmentFault,
            match=r"file/state: cannot be written: .*; choose another folder with --state",
        ),
        StateFolder(tmp_path / "file" / "state").locked(),
    ):
        pass


def test_runs_and_stages_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert len({folder.run(run, stage) for run in ("r", "s") for stage in (0, 1)}) == 4
    assert folder.identity.parent == tmp_path  # the identity is the same in all of them


def test_the_stage_of_a_run_is_noted_for_the_next_start_and_a_damaged_note_is_none(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path)
    assert folder.noted_stage("r") is None
    folder.note_stage("r", 3)
    (note,) = tmp_path.iterdir()
    folder.note_stage("s", 0)
    assert (folder.noted_stage("r"), folder.noted_stage("s")) == (3, 0)
    folder.note_stage("r", 12)
    assert StateFolder(tmp_path).noted_stage("r") == 12
    # what a peer looks for in the folders of a run does not meet the note
    assert not list(tmp_path.glob("*-stage*"))
    for damaged in (b"", b"\xff\xff", b"three", b"3 4"):
        note.write_bytes(damaged)
        assert folder.noted_stage("r") is None


# ---- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, b"old", durable=durable)
    write_atomically(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "vote"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full) if moment == "fsync" else monkeypatch.setattr(
        files.Path, "replace", full
    )
    with pytest.raises(EnvironmentFault, match=r"vote: no space left on the disk; free some"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["vote"]


def test_what_is_on_the_disk_for_good_has_its_name_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote whose name a power cut takes away could be cast once more, otherwise."""
    synced: list[tuple[str, bool]] = []

    def watched(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((str(path), (tmp_path / "vote").exists()))

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(tmp_path / "vote", b"new")
    assert [there for _, there in synced] == [False, True]
    assert synced[-1][0] == str(tmp_path)


def test_a_folder_that_is_none_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="Not a directory"):
        write_atomically(tmp_path / "file" / "vote", b"new")
    with pytest.raises(EnvironmentFault, match="file/folder: cannot be written"):
        make_folder(tmp_path / "file" / "folder")


def test_a_fault_without_the_systems_words_still_says_what_is_known() -> None:
    assert "cannot be written: odd" in str(disk_fault(Path("x"), OSError("odd")))
    assert "no space left" in str(disk_fault(Path("x"), OSError(errno.EDQUOT, "Quota")))


# ---- memory --------------------------------------------------------------------------------------
CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEEDS = MemoryNeeds(
    values=10_000_000, activations=100_000_000, gpu_activations=50_000_000, encoded=20_000_000
)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a machine and its GPU have, in all and free."""
    names: list[str] = ["total", "gpu_total", "available", "gpu_free"]
    facts = dict.fromkeys(names, 10**12)
    for name in facts:
        monkeypatch.setattr(memory_and_disk, f"{name}_bytes", lambda *_, name=name: facts[name])
    return facts


def test_a_stage_that_cannot_fit_is_refused_with_what_it_needs(there: dict[str, int]) -> None:
    assert NEEDS.on_cpu == PROCESSES_BYTES + WORK_BYTES + 9 * 40_000_000 + 135_000_000
    for device, needed in (CPU, NEEDS.on_cpu), (GPU, NEEDS.beside_gpu):
        there["total"] = 10**12
        check_memory(NEEDS, None, device)
        check_memory(NEEDS, needed, device)
        refused = rf"--memory-limit 0\.5: this stage needs about {size(needed)}; raise"
        with pytest.raises(InvalidInput, match=refused):
            check_memory(NEEDS, 0.5e9, device)
        there["total"] = needed - 1  # no other program can end for it
        with pytest.raises(InvalidInput, match=rf"{size(needed)} of memory.*larger machine"):
            check_memory(NEEDS, None, device)
    there |= {"total": 10**12, "gpu_total": NEEDS.on_gpu - 1}
    assert check_memory(NEEDS, None, CPU) == []
    with pytest.raises(InvalidInput, match=f"{size(NEEDS.on_gpu)} of GPU memory"):
        check_memory(NEEDS, None, GPU)


def test_offloaded_stage_takes_its_training_from_the_gpu_to_the_machine() -> None:
    offloaded = replace(NEEDS, offload=True)
    assert offloaded.on_gpu == NEEDS.on_gpu - 12 * NEEDS.values
    assert offloaded.beside_gpu == NEEDS.beside_gpu + 16 * NEEDS.values + WORK_BYTES
    assert offloaded.on_cpu == NEEDS.on_cpu


def test_a_peer_that_may_be_short_of_memory_is_warned_and_not_refused(
    there: dict[str, int],
) -> None:
    there |= {"available": NEEDS.on_cpu, "gpu_free": NEEDS.on_gpu}
    assert check_memory(NEEDS, None, CPU) == check_memory(NEEDS, None, GPU) == []
    there["available"] -= 1
    assert check_memory(NEEDS, None, GPU) == []  # the machine holds the less beside one
    (words,) = check_memory(NEEDS, None, CPU)
    assert "needs about 1.4 GB of memory" in words and "1.4 GB are free: close other" in words
    there["gpu_free"] -= 1
    (words,) = check_memory(NEEDS, None, GPU)
    assert f"about {size(2 * CUDA_BYTES + 210_000_000)} of GPU memory" in words
    assert "are free: --recompute, --offload or --device cpu takes less, or close other" in words
    there["available"] = 10**12
    assert check_memory(NEEDS, NEEDS.on_cpu, CPU) == []  # a limit that is just enough is meant so


def test_a_peer_that_takes_more_than_its_limit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        memory_and_disk, "proportional_bytes", {1: 300_000_000, 2: 200_000_001}.__getitem__
    )
    check_use([1, 2], None)
    check_use([1], 300_000_000)
    with pytest.raises(EnvironmentFault, match=r"takes 500 MB, more than --memory-limit 0\.5"):
        check_use([1, 2], 500_000_000)


def test_the_window_is_what_half_the_free_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_and_disk, "available_bytes", lambda: 8_000)
    assert window_limit(100, NEEDS, None, CPU) == 40
    assert window_limit(4_000, NEEDS, None, CPU) == 1
    assert window_limit(9_000, NEEDS, None, CPU) == 1  # none at all would be no stage
    assert window_limit(1, NEEDS, None, CPU) == LARGEST_OWN_WINDOW
    planned = replace(NEEDS, kept=200)
    assert window_limit(0, planned, None, CPU) == 20  # not measured yet
    # moments and gradients that are not there yet are free as well
    assert window_limit(100, NEEDS, None, CPU, untaken_bytes=6_000) == 10
    assert window_limit(100, NEEDS, None, CPU, untaken_bytes=9_000) == 1


def test_the_window_keeps_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_and_disk, "available_bytes", lambda: 10**12)
    monkeypatch.setattr(memory_and_disk, "gpu_free_bytes", lambda _: 2_000_000)
    monkeypatch.setattr(memory_and_disk, "gpu_cached_bytes", lambda _: 10**12)
    assert window_limit(1_000_000, NEEDS, NEEDS.on_cpu, CPU) == 1  # which the plan has
    assert window_limit(1_000_000, NEEDS, NEEDS.on_cpu + 3_000_000, CPU) == 4
    assert window_limit(1_000_000, NEEDS, 0.1e9, CPU) == 1
    assert window_limit(1_000_000, NEEDS, NEEDS.on_cpu, GPU) == LARGEST_OWN_WINDOW  # another memory
    # what a last stage stores lies in the machine's memory, where less is planned beside a GPU
    beside = NEEDS.beside_gpu + 3_000_000
    assert beside < NEEDS.on_cpu
    assert window_limit(1_000_000, NEEDS, beside, CPU, computes_on=GPU) == 3
    assert window_limit(1_000_000, NEEDS, beside, CPU) == 1
    monkeypatch.setattr(memory_and_disk, "available_bytes", lambda: 8_000_000)
    assert window_limit(1_000_000, NEEDS, NEEDS.on_cpu + 3e9, CPU) == 4  # the machine has less


def test_free_memory_is_a_part_of_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 10_000_000 < memory_and_disk.available_bytes() <= total


def test_a_file_that_is_mapped_is_not_memory_of_the_peer(tmp_path: Path) -> None:
    """A state of gigabytes is looked through so, and the peer would end by its memory limit."""
    (tmp_path / "state").write_bytes(b"x" * (64 << 20))
    program = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print(sum(mapped[n] for n in range(0, len(mapped), 4096)), flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "state"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout and reader.stdin
        assert reader.stdout.readline()
        taken = proportional_bytes(reader.pid)
        reader.stdin.close()
    assert 1 << 20 < taken < 32 << 20


def test_memory_that_two_processes_share_is_counted_once() -> None:
    program = (
        "import os, mmap, sys, time\n"
        "shared = mmap.mmap(-1, 64 << 20); shared.write(b'x' * len(shared))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    shared.seek(0); shared.read(); print('ready', flush=True); time.sleep(60)\n"
        "print(child, flush=True); sys.stdin.read(); os.kill(child, 9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as main:
        assert main.stdout and main.stdin
        lines = {main.stdout.readline().strip(), main.stdout.readline().strip()} - {"ready"}
        both = [main.pid, int(lines.pop())]
        each = [proportional_bytes(pid) for pid in both]
        main.stdin.close()
    assert all(32 << 20 <= taken < 60 << 20 for taken in each), each
    assert proportional_bytes(both[1]) == 0  # gone
