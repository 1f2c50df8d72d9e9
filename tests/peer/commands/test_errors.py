"""What a person sees when something is wrong: one line that names the remedy; nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.dht.processes import wait_until
from tests.peer.real_commands import (
    AFTER_KILL_S,
    LEAVE_LIMIT_S,
    START_LIMIT_S,
    Command,
    error_line,
    run_here,
    write_manifest,
)
from tests.swarm import disks

NOBODY = (
    "dilocox:0123456789abcdef0123456789abcdef@/ip4/127.0.0.1/tcp/1/p2p/"
    "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
)
LOCAL = ("--host", "127.0.0.1")

Run = Callable[..., Command]
Assertion = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a command in the test's folder; it is ended with the test."""
    commands: list[Command] = []

    def start(*arguments: str, **options: dict[str, str]) -> Command:
        commands.append(Command(*arguments, folder=tmp_path, **options))  # type: ignore[arg-type]
        return commands[-1]

    yield start
    for command in reversed(commands):
        command.close()


@pytest.fixture(scope="module")
def invite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a bootstrap that lives as long as the module."""
    folder = tmp_path_factory.mktemp("bootstrap")
    manifest = write_manifest(folder / "run.yaml")
    arguments = ["bootstrap", str(manifest), *LOCAL, "--port", "0", "--state", str(folder / "b")]
    command = Command(*arguments, folder=folder)
    try:
        command.wait_for("dilocox peer dilocox:")
        yield (folder / "b" / "invite").read_text().strip()
        command.process.terminate()
        assert command.exit_code(LEAVE_LIMIT_S) == 0
        command.clean_within(AFTER_KILL_S)
    finally:
        command.close()


def fails(command: Command, code: int, *words: str) -> None:
    """It ends with this code, one line that holds these words, and leaves nothing."""
    assert command.exit_code(START_LIMIT_S) == code, command.output()
    line = error_line(command.output())
    for word in words:
        assert word in line
    command.clean_within(AFTER_KILL_S)


@pytest.fixture
def refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., None]:
    """As `run` and `fails`, in this process: what is refused before anything is started."""
    for name in [name for name in os.environ if name.startswith("DILOCOX_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run_and_fail(arguments: Sequence[str], code: int, *words: str) -> None:
        ended = run_here(monkeypatch, *arguments)
        printed = capfd.readouterr()
        line = error_line(printed.out + printed.err)
        assert ended == code, line
        for word in words:
            assert word in line
        assert not multiprocessing.active_children()

    return run_and_fail


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hello", ["'hello'", "does not start with 'dilocox:'", "looks like"]),
        ("dilocox:abc@/ip4/1.2.3.4/tcp/1", ["'abc'", "32 hex digits", "copy the whole invite"]),
        (NOBODY.replace("/tcp/1/", "/udp/1/"), ["/udp/1/", "is not a TCP multiaddr like"]),
    ],
)
@pytest.mark.parametrize("command", ["peer", "export"])
def test_wrong_invite_is_named_with_what_it_should_look_like(
    run: Run, command: str, given: str, words: list[str]
) -> None:
    fails(run(command, given, *(["out"] if command == "export" else [])), 2, *words)


def test_manifest_with_a_wrong_field_is_named_with_the_field_and_the_remedy(
    refused: Assertion, tmp_path: Path
) -> None:
    manifest = write_manifest(tmp_path / "run.yaml", rounds={"inner_stepz": 8})
    line = "rounds.inner_stepz is not a field of the manifest; did you mean inner_steps?"
    refused(["bootstrap", str(manifest), *LOCAL, "--port", "0"], 2, str(manifest), line)


def test_key_that_others_can_read_is_refused_with_the_command_that_fixes_it(
    refused: Assertion, tmp_path: Path
) -> None:
    key = tmp_path / "state" / "identity.key"
    key.parent.mkdir()
    key.write_bytes(b"")
    key.chmod(0o644)
    peer = ["peer", NOBODY, *LOCAL, "--state", str(key.parent)]
    refused(peer, 2, str(key), "0644", f"chmod 600 {key}")


def test_port_in_use_is_named_with_the_option_that_fixes_it(refused: Assertion) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refused(["peer", NOBODY, *LOCAL, "--port", port], 1, f"port {port}", "in use", "--port")


def test_a_bootstrap_that_cannot_start_leaves_no_key_that_would_alarm_the_next_start(
    refused: Assertion, tmp_path: Path
) -> None:
    manifest = tmp_path / "run.yaml"
    manifest.write_text("name: test\nmodel: tiny\nend_tokens: 1000\n")
    state = tmp_path / "fresh"
    boot = ("bootstrap", str(manifest), *LOCAL, "--state", str(state), "--metrics-port", "0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refused([*boot, "--port", port], 1, f"port {port}", "in use", "--port")
    placeholder = ("--announce", "/ip4/ADDRESS/tcp/31337")
    refused([*boot, *placeholder], 2, "--announce", "'ADDRESS' is no IPv4 address")
    assert not (state / "identity.key").exists()


@pytest.mark.swarm
def test_unreachable_bootstrap_is_named(run: Run) -> None:
    fails(run("peer", NOBODY, *LOCAL), 1, "/tcp/1/", "Connection refused", "invite is current")


@pytest.mark.swarm
def test_invite_of_a_run_that_the_bootstrap_does_not_know_is_an_invite_mistake(
    run: Run, invite: str
) -> None:
    stranger = invite.replace(invite[8:40], "0" * 32)
    fails(run("peer", stranger, *LOCAL), 2, "know no run", "check the invite")


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stage", "3"], ["--stage 3", "stage 0 only"]),
        (["--memory-limit", "0.1"], ["--memory-limit 0.1", "this stage needs about", "raise"]),
        (["--data", "/nowhere/x.txt"], ["'/nowhere/x.txt'", "no text file", "give a file"]),
        (["--data", "/nowhere/x.jsonl"], ["'/nowhere/x.jsonl'", "no json file", "give a file"]),
        (["--device", "abacus"], ["--device abacus", "choose cpu or auto"]),
        pytest.param(
            ["--device", "cuda"],
            ["--device cuda", "choose cpu or auto"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_option_that_does_not_fit_run_or_machine_is_named(
    run: Run, invite: str, options: list[str], words: list[str]
) -> None:
    fails(run("peer", invite, *LOCAL, *options), 2, *words)


@pytest.mark.swarm
def test_state_folder_of_a_running_peer_is_refused_and_the_peer_runs_on(
    run: Run, invite: str
) -> None:
    first = run("peer", invite, *LOCAL, "--state", "state")
    first.wait_for("reached at")
    fails(run("peer", invite, *LOCAL, "--state", "state"), 1, "another peer uses", "--state")
    first.wait_for("committed")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 2 MB."""
    if reason := disks.available():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="disk-", dir="/tmp") as folder,
        disks.small_disk(Path(folder, "disk"), 2 << 20) as disk,
    ):
        yield disk


@pytest.mark.swarm
def test_disk_without_room_for_a_snapshot_ends_the_peer_with_the_folder_named(
    run: Run, invite: str, small_disk: Path
) -> None:
    peer = run("peer", invite, *LOCAL, "--state", str(small_disk / "state"))
    fails(peer, 1, str(small_disk), "no snapshot fits on the disk", "free some")
    assert not list(small_disk.glob("**/*.partial"))


# ---- signals -------------------------------------------------------------------------------------
def leaves(command: Command, code: int = 0) -> None:
    """It ends with this code, without a complaint, and leaves nothing."""
    assert command.exit_code(LEAVE_LIMIT_S) == code, command.output()
    assert "Traceback" not in command.output()
    assert "error" not in command.output()
    command.clean_within(AFTER_KILL_S)


def by_terminal(command: Command) -> None:
    command.interrupt()


def by_service_manager(command: Command) -> None:
    command.process.terminate()


@pytest.mark.swarm
@pytest.mark.parametrize("ask", [by_terminal, by_service_manager])
@pytest.mark.parametrize("moment", ["imports", "p2pd runs", "model is built"])
def test_a_peer_asked_to_leave_while_it_starts_leaves_at_once(
    run: Run, invite: str, ask: Callable[[Command], None], moment: str
) -> None:
    peer = run("peer", invite, *LOCAL)
    reached: dict[str, Callable[[], bool]] = {
        # the program answers signals before it imports anything large
        "imports": lambda: "torch" in _loaded(peer.process.pid),
        "p2pd runs": lambda: any(process.name == "p2pd" for process in peer.family.alive()),
        "model is built": lambda: "reached at" in peer.output(),
    }
    wait_until(reached[moment], START_LIMIT_S)
    ask(peer)
    leaves(peer)


@pytest.mark.swarm
def test_a_peer_that_waits_for_its_bootstrap_leaves_at_once(run: Run) -> None:
    peer = run("peer", NOBODY, *LOCAL)
    wait_until((peer.log.parent / "dilocox-peer" / "identity.key").exists, START_LIMIT_S)
    peer.process.terminate()
    leaves(peer)


@pytest.mark.swarm
@pytest.mark.parametrize("ask", [by_terminal, by_service_manager])
def test_a_training_peer_asked_to_leave_leaves_in_order(
    run: Run, invite: str, ask: Callable[[Command], None]
) -> None:
    peer = run("peer", invite, *LOCAL)
    peer.wait_for("committed")
    assert len(peer.family.alive()) == 4  # main, DHT, averaging, p2pd
    ask(peer)
    leaves(peer)
    assert peer.output().strip().endswith("left: stopped on request")


@pytest.mark.swarm
def test_a_second_ctrl_c_ends_a_peer_at_once_and_leaves_nothing(run: Run, invite: str) -> None:
    peer = run("peer", invite, *LOCAL)
    peer.wait_for("committed")
    # frozen, it finds both of them waiting when it goes on
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.kill(peer.process.pid, signal.SIGINT)
    os.kill(peer.process.pid, signal.SIGTERM)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert peer.exit_code(2.0) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    peer.clean_within(AFTER_KILL_S)


@pytest.mark.swarm
def test_a_killed_peer_leaves_nothing(run: Run, invite: str) -> None:
    peer = run("peer", invite, *LOCAL)
    peer.wait_for("committed")
    peer.family.alive()
    peer.process.kill()
    peer.clean_within(AFTER_KILL_S)


def _loaded(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


# ---- the demo ------------------------------------------------------------------------------------
DEMO = ("demo", "--replicas", "2", "--rounds", "50")


@pytest.mark.swarm
@pytest.mark.timeout(300)
def test_a_demo_interrupted_after_a_round_exports_and_leaves_nothing(
    run: Run, tmp_path: Path
) -> None:
    demo = run(*DEMO, "--json", "figures.json")
    demo.wait_for("round 0:", 150)
    demo.interrupt()
    assert demo.exit_code(120) == 0, demo.output()
    assert (tmp_path / "demo-run" / "export" / "model.safetensors.index.json").exists()
    assert '"val_loss_export": ' in (tmp_path / "figures.json").read_text()
    demo.clean_within(AFTER_KILL_S)


@pytest.mark.swarm
def test_a_demo_interrupted_before_a_round_says_so_and_leaves_nothing(run: Run) -> None:
    demo = run(*DEMO)
    demo.wait_for("peers are starting")
    demo.interrupt()
    assert demo.exit_code(60) == 1, demo.output()
    assert "nothing to export" in demo.output()
    assert "Traceback" not in demo.output()
    demo.clean_within(AFTER_KILL_S)


@pytest.mark.swarm
@pytest.mark.timeout(300)
def test_the_children_of_a_killed_demo_end_too(run: Run) -> None:
    demo = run(*DEMO)
    demo.wait_for("round 0:", 150)
    assert len(demo.family.alive()) > 10
    demo.process.kill()
    demo.clean_within(LEAVE_LIMIT_S + AFTER_KILL_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--folder", "taken"], ["taken is not an earlier demo", "--folder"]),
        (["--folder", "file"], ["file is not an earlier demo", "--folder"]),
        (["--json", "nowhere/figures.json"], ["--json nowhere/figures.json", "make it first"]),
    ],
)
def test_a_demo_refuses_what_it_would_overwrite_or_could_not_write(
    refused: Assertion, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("something")
    refused(["demo", *options], 2, *words)
    assert (tmp_path / "taken" / "thesis.tex").exists()
