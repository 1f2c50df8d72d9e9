"""One private folder holds a process's sockets; the last user takes it away."""

import multiprocessing
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from dilocox.dht import node_process
from dilocox.dht.errors import EnvironmentFault


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


def test_folder_with_a_path_too_long_for_a_socket_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        node_process.acquire()
    assert list(deep.iterdir()) == []


def test_unwritable_temporary_folder_names_tmpdir(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-folder")
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        node_process.acquire()
