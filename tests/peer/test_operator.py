"""The operator's commands on a state folder, with and without its bootstrap running."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest
import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.peer import operator
from dilocox.peer.operate import checked_manifest
from dilocox.peer.revisions import RevisionFolder

RUN_YAML = {"name": "demo", "model": "tiny", "end_tokens": 1_000_000}


class Folder:
    """An operator's state folder, as `dilocox bootstrap` leaves it."""

    def __init__(self, path: Path, key: Identity):
        self.path = path
        path.mkdir()
        (path / "identity.key").write_bytes(key.path.read_bytes())
        (path / "identity.key").chmod(0o600)
        self.key = Identity.load_or_create(path / "identity.key")
        self.run = run_id(key.public_key, "demo")
        self.revisions = RevisionFolder(path, self.run)
        self.revisions.begin(self.key, checked_manifest(self.yaml()))
        address = f"/ip4/127.0.0.1/tcp/31337/p2p/{key.peer_id}"
        (path / "invite").write_text(f"dilocox:{self.run}@{address}\n")

    def yaml(self, **values: object) -> Path:
        """A run.yaml with these values."""
        path = self.path / "run.yaml"
        path.write_text(yaml.safe_dump(RUN_YAML | values))
        return path

    @property
    def state(self) -> tuple[int, str]:
        newest = self.revisions.newest()
        assert newest is not None
        operation = newest.verify(self.run).operation
        return operation.revision, operation.state


@pytest.fixture
def folder(tmp_path: Path, identities: list[Identity]) -> Folder:
    return Folder(tmp_path / "boot", identities[0])


def test_each_command_adds_a_revision_and_removes_none(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operator.set_state(folder.path, "paused") == 0
    assert operator.revise(folder.path, folder.yaml(outer={"learning_rate": 0.5})) == 0
    assert operator.set_state(folder.path, "running") == 0
    assert folder.revisions.numbers == [0, 1, 2, 3]
    assert folder.state == (3, "running")
    said = capsys.readouterr().out
    assert "the bootstrap does not run: it publishes revision 1 later" in said
    assert "revision 2: outer.learning_rate: 0.7 -> 0.5" in said


def test_a_command_waits_until_the_running_bootstrap_has_published_it(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    def bootstrap() -> None:
        while folder.state[0] < 1:
            time.sleep(0.01)
        time.sleep(0.3)
        folder.revisions.note_published(1)

    with (folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=bootstrap)
        thread.start()
        assert operator.set_state(folder.path, "ended") == 0
        assert folder.revisions.published == 1
        thread.join(5.0)
    assert "does not run" not in capsys.readouterr().out


def test_a_folder_without_the_operators_key_is_refused_by_name(
    folder: Folder, identities: list[Identity], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="no bootstrap has run here; name the --state folder"):
        operator.set_state(tmp_path / "nowhere", "paused")
    (folder.path / "identity.key").write_bytes(identities[1].path.read_bytes())
    with pytest.raises(InvalidInput, match="its key is not that of run"):
        operator.set_state(folder.path, "paused")
    (folder.path / "identity.key").unlink()
    with pytest.raises(InvalidInput, match="has not the operator's key of run"):
        operator.set_state(folder.path, "paused")
    assert not (folder.path / "identity.key").exists(), "and none was made"


def test_a_bootstrap_starts_with_the_first_run_yaml_or_the_newest_and_no_other(
    folder: Folder,
) -> None:
    first = checked_manifest(folder.yaml())
    operator.revise(folder.path, folder.yaml(outer={"learning_rate": 0.5}))
    second = checked_manifest(folder.yaml(outer={"learning_rate": 0.5}))
    for manifest in (first, second):
        begun = folder.revisions.begin(folder.key, manifest)
        assert begun.revision_of(folder.run) == 1
    other = checked_manifest(folder.yaml(outer={"learning_rate": 0.5}, seed=3))
    with pytest.raises(InvalidInput, match=r"for seed, run .* use `dilocox operate revise`"):
        folder.revisions.begin(folder.key, other)
