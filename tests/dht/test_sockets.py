"""One private folder holds a process's sockets; the last user takes it away."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from dilocox.dht import sockets
from dilocox.dht.errors import EnvironmentFault


def test_folder_is_shared_private_and_removed_with_its_last_user():
    before = P2P._UNIX_SOCKET_PREFIX
    folder = sockets.acquire()
    assert sockets.acquire() == folder
    assert folder.stat().st_mode & 0o077 == 0
    assert f"/unix{folder}/" == P2P._UNIX_SOCKET_PREFIX
    (folder / "p2pd.sock").touch()
    sockets.release()
    assert folder.exists()
    sockets.release()
    assert not folder.exists()
    assert before == P2P._UNIX_SOCKET_PREFIX


def test_forked_process_has_a_folder_of_its_own():
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    mine = sockets.acquire()

    def child() -> None:
        theirs = sockets.acquire()
        sockets.release()
        answer.put((str(theirs), theirs.exists()))

    process = context.Process(target=child)
    process.start()
    theirs, left = answer.get()
    process.join(10.0)
    assert theirs != str(mine)
    assert not left
    assert mine.exists()
    sockets.release()


def test_folder_with_a_path_too_long_for_a_socket_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        sockets.acquire()
    assert list(deep.iterdir()) == []


def test_unwritable_temporary_folder_names_tmpdir(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-folder")
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        sockets.acquire()


def test_only_the_tensors_of_the_processes_that_end_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "SHARED_MEMORY", tmp_path)
    for name in ("torch_12_99_0", "torch_12_7_1", "torch_123_99_0", "torch_13_1_0", "sem.12"):
        (tmp_path / name).touch()
    sockets.remove_tensors(12, 13, 14)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sem.12", "torch_123_99_0"]


SHARES = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: None)
import torch
from dilocox.dht import sockets
print("begins", flush=True)
sockets.acquire()
torch.zeros(1).share_memory_()
print("shared", flush=True)
sys.stdin.read()
sockets.release()
"""


def test_memory_can_be_shared_though_a_ctrl_c_hits_the_whole_process_group_meanwhile():
    process = subprocess.Popen(
        [sys.executable, "-c", SHARES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shared = threading.Event()

    def storm() -> None:
        while not shared.wait(0.001) and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)

    limit = threading.Timer(30.0, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        threading.Thread(target=storm).start()
        assert process.stdout.readline() == "shared\n", "it waits for torch's manager for ever"
        shared.set()
        process.communicate(timeout=30.0)
        assert process.returncode == 0
    finally:
        limit.cancel()
        process.kill()
        process.wait()
