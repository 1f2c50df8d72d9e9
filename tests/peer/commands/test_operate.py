"""The operator's commands on a state folder, with and without its bootstrap running."""

from __future__ import annotations

import contextlib
import fcntl
import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml

from dilocox.dht import manifest_revisions
from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import write_atomically
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import REVISIONS_OF_A_KEY, SignedManifest
from dilocox.dht.manifest_keeper import OwnManifest
from dilocox.dht.manifest_revisions import RevisionFolder, RunState, in_state
from dilocox.peer.chain.store import Store
from dilocox.peer.commands import operate
from dilocox.peer.commands.operate import checked_manifest
from dilocox.peer.options import (
    AdmitOptions,
    AdmittedOptions,
    EndRunOptions,
    PauseRunOptions,
    ResumeRunOptions,
    ReviseOptions,
    RevokeOptions,
    RollbackOptions,
    RotateOptions,
    StateOptions,
)
from tests.peer.kept_chains import ChainMaker

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
        first = checked_manifest(self.yaml())
        self.revisions.add(SignedManifest.sign(self.key, first))
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


def revised(folder: Folder, **values: object) -> int:
    """The exit code of `dilocox operate revise` with a run.yaml of these values."""
    return operate.revise(ReviseOptions(state=folder.path, manifest=folder.yaml(**values)))


@pytest.fixture
def folder(tmp_path: Path, identities: list[Identity]) -> Folder:
    return Folder(tmp_path / "boot", identities[0])


def test_each_command_adds_a_revision_and_removes_none(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operate.set_state(PauseRunOptions(state=folder.path)) == 0
    assert revised(folder, outer={"learning_rate": 0.5}) == 0
    assert operate.set_state(ResumeRunOptions(state=folder.path)) == 0
    assert folder.revisions.numbers == [0, 1, 2, 3]
    assert folder.state == (3, "running")
    said = capsys.readouterr().out
    assert "revision 1 is signed; no bootstrap runs now. Once one does:" in said
    assert "revision 2: outer.learning_rate: 0.7 -> 0.5" in said


def test_an_end_that_the_run_has_passed_is_refused_and_another_value_is_not(
    folder: Folder, tmp_path: Path
) -> None:
    newest = folder.revisions.newest()
    assert newest is not None
    manifest = newest.verify(folder.run)
    maker = ChainMaker(folder.key, tmp_path / "peer", manifest, run=folder.run)
    maker.train(0, 1)
    archive = folder.path / f"{folder.run}-archive-{manifest.root[:16]}"
    Store(archive / "stage0" / "00000000" / "log").share(maker.log, [0, 1])
    assert maker.last is not None
    trained = maker.last.chain_tokens
    for end in (5, trained):
        said = rf"end_tokens is {end:,}, but the run has trained {trained:,} tokens.*operate end"
        with pytest.raises(InvalidInput, match=said):
            revised(folder, end_tokens=end)
    assert folder.revisions.numbers == [0]
    assert revised(folder, end_tokens=trained + 1) == 0


def test_an_exchange_that_no_link_could_move_in_time_is_refused_with_the_time_that_it_needs(
    folder: Folder,
) -> None:
    raw = {"bits": 32}
    with pytest.raises(InvalidInput, match=r"exchange_s is 0.1; .* set it to \d+") as caught:
        checked_manifest(folder.yaml(codec=raw, deadlines={"exchange_s": 0.1}))
    said = re.search(r"set it to (\d+)", str(caught.value))
    assert said is not None
    assert checked_manifest(folder.yaml(codec=raw, deadlines={"exchange_s": int(said[1])}))


def test_of_two_commands_at_once_one_is_told_to_try_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def written(path: Path, data: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # time for the other one to come as far as this
        write_atomically(path, data)

    monkeypatch.setattr(manifest_revisions, "write_atomically", written)
    newest = folder.revisions.newest()
    assert newest is not None
    signed = [
        SignedManifest.sign(folder.key, in_state(newest.verify(folder.run), state))
        for state in ("paused", "ended")
    ]
    with ThreadPoolExecutor(2) as pool:
        adding = [pool.submit(RevisionFolder(folder.path, folder.run).add, each) for each in signed]
        faults = [each.exception(10) for each in adding]
    (lost,) = (number for number, fault in enumerate(faults) if fault is not None)
    assert "another command made this revision meanwhile; try again" in str(faults[lost])
    assert folder.state == (1, ("ended", "paused")[lost])


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
        assert operate.set_state(EndRunOptions(state=folder.path, yes=True)) == 0
        assert folder.revisions.published == 1
        thread.join(5.0)
    assert "does not run" not in capsys.readouterr().out


ASKED = {
    "ends run demo for good": lambda path, yes: operate.set_state(
        EndRunOptions(state=path, yes=yes)
    ),
    "goes back to round 3: all that it has trained since counts no more": (
        lambda path, yes: operate.roll_back(RollbackOptions(state=path, round_number=3, yes=yes))
    ),
}


class Terminal(io.StringIO):
    """A person who types this."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("what", ASKED)
def test_what_cannot_be_taken_back_is_not_done_where_nobody_can_be_asked(
    folder: Folder, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(InvalidInput, match=f"{what}.*if you mean it, add --yes"):
        ASKED[what](folder.path, False)
    assert folder.state == (0, "running")


@pytest.mark.parametrize("what", ASKED)
def test_what_cannot_be_taken_back_is_not_done_when_a_person_says_no(
    folder: Folder,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(typer.Abort):
        ASKED[what](folder.path, False)
    assert what in capsys.readouterr().out
    assert folder.state == (0, "running")


def test_a_run_ends_when_a_person_says_yes_and_a_script_says_it_with_an_option(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert operate.set_state(EndRunOptions(state=folder.path)) == 0
    assert folder.state == (1, "ended")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(InvalidInput, match="no bootstrap has run here"):
        operate.set_state(EndRunOptions(state=folder.path / "nowhere", yes=True))


@pytest.mark.parametrize(
    ("options", "state"),
    [(PauseRunOptions, "paused"), (ResumeRunOptions, "running"), (EndRunOptions, "ended")],
)
def test_a_state_that_the_run_is_in_changes_nothing_and_is_said(
    folder: Folder,
    options: type[StateOptions],
    state: RunState,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = folder.revisions.newest()
    assert newest is not None
    if state != "running":
        following = in_state(newest.verify(folder.run), state)
        folder.revisions.add(SignedManifest.sign(folder.key, following))
    numbers = folder.revisions.numbers
    assert operate.set_state(options(state=folder.path)) == 0
    assert f"run demo is {state} already (revision {numbers[-1]})" in capsys.readouterr().out
    assert folder.revisions.numbers == numbers


def test_a_folder_without_the_operators_key_is_refused_by_name(
    folder: Folder, identities: list[Identity], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="no bootstrap has run here; name the --state folder"):
        operate.set_state(PauseRunOptions(state=tmp_path / "nowhere"))
    (folder.path / "identity.key").write_bytes(identities[1].path.read_bytes())
    with pytest.raises(InvalidInput, match="not the key that signed the newest revision"):
        operate.set_state(PauseRunOptions(state=folder.path))
    (folder.path / "identity.key").unlink()
    with pytest.raises(InvalidInput, match="name the operator's key with --key"):
        operate.set_state(PauseRunOptions(state=folder.path))
    assert not (folder.path / "identity.key").exists(), "and none was made"


def test_who_is_admitted_stands_in_the_list_until_a_day_or_until_revoked(
    folder: Folder, identities: list[Identity], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (each.peer_id for each in identities[1:3])

    def until(days: int) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(time.time() + (days + 1) * 86400))

    both = AdmitOptions(state=folder.path, peers=(one, other), days=2)
    day = until(2)
    assert operate.admit(both) == 0
    said = capsys.readouterr().out
    assert f"revision 1: {one} is admitted until {day}" in said
    assert "the run is open: whoever has the invite takes part" in said
    assert revised(folder, admission="listed") == 0
    assert operate.rotate(RotateOptions(state=folder.path)) == 0
    assert operate.admit(AdmitOptions(state=folder.path, peers=(one,), days=30)) == 0
    assert "the run is open" not in capsys.readouterr().out.partition("operator's key is")[2]

    assert operate.revoke(RevokeOptions(state=folder.path, peers=(other,))) == 0
    assert f"{other} is not admitted any more" in capsys.readouterr().out
    assert operate.show_admitted(AdmittedOptions(state=folder.path)) == 0
    assert capsys.readouterr().out.splitlines() == [f"{one} until {until(30)}", "admission: listed"]
    with pytest.raises(InvalidInput, match=other):
        operate.revoke(RevokeOptions(state=folder.path, peers=(other,)))


def test_a_new_key_signs_what_follows_and_the_former_one_nothing(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operate.set_state(PauseRunOptions(state=folder.path)) == 0
    assert operate.rotate(RotateOptions(state=folder.path)) == 0
    assert f"the operator's key is {folder.path / 'operator.key'}" in capsys.readouterr().out
    assert folder.state == (REVISIONS_OF_A_KEY, "paused")
    assert operate.set_state(ResumeRunOptions(state=folder.path)) == 0
    assert folder.state == (REVISIONS_OF_A_KEY + 1, "running")
    kept = OwnManifest(folder.key, checked_manifest(folder.yaml()), folder.revisions)
    assert kept.run == folder.run, "the bootstrap and its invite stay"
    assert kept.signed.run_key == folder.key.public_key != kept.signed.public_key

    elsewhere = tmp_path / "stick" / "key"
    elsewhere.parent.mkdir()
    moved = RotateOptions(state=folder.path, new_key=elsewhere)
    assert operate.rotate(moved) == 0
    with pytest.raises(InvalidInput, match="name the operator's key with --key"):
        operate.set_state(PauseRunOptions(state=folder.path))
    assert operate.set_state(PauseRunOptions(state=folder.path, key=elsewhere)) == 0
    assert folder.state == (2 * REVISIONS_OF_A_KEY + 1, "paused")


def test_a_bootstrap_starts_with_the_first_run_yaml_or_the_newest_and_no_other(
    folder: Folder,
) -> None:
    first = checked_manifest(folder.yaml())
    revised(folder, outer={"learning_rate": 0.5})
    second = checked_manifest(folder.yaml(outer={"learning_rate": 0.5}))
    for manifest in (first, second):
        begun = OwnManifest(folder.key, manifest, folder.revisions)
        assert (begun.known, begun.signed.revision_of(folder.run)) == (True, 1)
    other = checked_manifest(folder.yaml(outer={"learning_rate": 0.5}, seed=3))
    with pytest.raises(InvalidInput, match=r"for seed, run .* use `dilocox operate revise`"):
        OwnManifest(folder.key, other, folder.revisions)
    data = replace(second.data, tokenizer_digest="7" * 64)
    with pytest.raises(InvalidInput, match=r"tokenizer .* is not what it was .*: put that back"):
        OwnManifest(folder.key, replace(second, data=data), folder.revisions)
