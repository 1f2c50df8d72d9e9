"""Processes of a peer share a private folder of sockets and the pipe into the DHT child."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P
from hivemind.utils import MPFuture

from dilocox.dht import node_process
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.node_process import SharedPipe

SENDERS, MESSAGES, BYTES = 2, 200, 40_000  # more than a pipe takes in one piece
LIMIT_S = 30.0


def test_folder_is_shared_private_and_removed_with_its_last_user():
    before = P2P._UNIX_SOCKET_PREFIX
    folder = node_process.acquire()
    assert node_process.acquire() == folder
    assert folder.stat().st_mode & 0o077 == 0
    assert f"/unix{folder}/" == P2P._UNIX_SOCKET_PREFIX
    (folder / "p2pd.sock").touch()
    node_process.release()
    assert folder.exists()
    node_process.release()
    assert not folder.exists()
    assert before == P2P._UNIX_SOCKET_PREFIX


def test_forked_process_has_a_folder_of_its_own():
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    mine = node_process.acquire()

    def child() -> None:
        theirs = node_process.acquire()
        node_process.release()
        answer.put((str(theirs), theirs.exists()))

    process = context.Process(target=child)
    process.start()
    theirs, left = answer.get()
    process.join(10.0)
    assert theirs != str(mine)
    assert not left
    assert mine.exists()
    node_process.release()


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_that_is_used(
    monkeypatch: pytest.MonkeyPatch,
):
    """It was killed before it had a child that would have: chaos found both folders in /tmp."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is too long for sockets
        _kill_one_and_start_again(Path(folder), monkeypatch)


def _kill_one_and_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pymp-of-another-program").mkdir()
    script = (
        "import time; from dilocox.dht import node_process as own; own.acquire();"
        "print('here', flush=True); time.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"here\n"
        theirs = {path for path in tmp_path.iterdir() if list(path.iterdir())}
        assert len(theirs) == 2, "sockets, and the folder of multiprocessing"
        node_process.shared_memory_folder()  # our own, not among theirs
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        node_process.acquire()
        node_process.release()
        assert all(path.exists() for path in theirs)
        killed.kill()
    node_process.acquire()
    node_process.release()
    assert [path.name for path in tmp_path.iterdir()] == ["pymp-of-another-program"]


def test_folder_that_cannot_hold_sockets_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for folder in (str(deep), "/proc/no-such-folder"):
        monkeypatch.setattr("tempfile.tempdir", folder)
        with pytest.raises(EnvironmentFault, match="TMPDIR"):
            node_process.acquire()
    assert list(deep.iterdir()) == []


def test_large_messages_of_two_processes_arrive_whole():
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    shared = SharedPipe(writer, forking.RLock())

    def send(sender: int) -> None:
        for _ in range(MESSAGES):
            shared.send(bytes([sender]) * BYTES)

    senders = [forking.Process(target=send, args=(number,), daemon=True) for number in (1, 2)]
    for process in senders:
        process.start()
    heard: list[bytes] = []
    while len(heard) < SENDERS * MESSAGES:
        assert reader.poll(LIMIT_S)
        heard.append(reader.recv())
    for process in senders:
        process.join(LIMIT_S)
    assert sorted(heard) == [bytes([number]) * BYTES for number in (1, 2) for _ in range(MESSAGES)]


def test_a_node_opens_after_another_one_was_killed_in_the_middle_of_an_answer(
    open_node: Callable[..., Any], volunteer: Identity
):
    killed = open_node(volunteer)[0]
    lock = vars(MPFuture)["_update_lock"]
    assert lock.acquire(timeout=LIMIT_S)  # as the child holds it, which can give it back no more
    try:
        killed.kill()
        killed.join(LIMIT_S)
        killed.close()
        open_node(volunteer, startup_s=LIMIT_S)
    finally:
        lock.release()
