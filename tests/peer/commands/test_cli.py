"""The command line: flags over environment over defaults, help that tells all, exit codes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dilocox import __version__
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer import cli
from dilocox.peer.commands import bootstrap, demo, export, history
from dilocox.peer.os_process import set_up_logging
from tests.peer.fabricated import INVITE
from tests.peer.real_commands import Command, error_line, run_here

HELP_LIMIT_S = 1.0  # half a second where nothing else runs
COMMANDS = ("demo", "bootstrap", "peer", "doctor", "export", "log", "verify")
COMMANDS += ("pause", "resume", "generate", "serve")


def invoke(*arguments: str, env: dict[str, str | None] | None = None) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env=env)


def plain(text: str) -> str:
    """Without boxes and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of the commands that would have been run."""
    options: list[Any] = []

    def record(given: Any) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(demo, "run_demo", record)
    monkeypatch.setattr(bootstrap, "run_bootstrap_command", record)
    monkeypatch.setattr(export, "run_export_command", record)
    monkeypatch.setattr(history, "run_log_command", record)
    monkeypatch.setattr(history, "run_verify_command", record)
    return options


def params() -> list[tuple[str, Any]]:
    group: Any = typer.main.get_command(cli.app)
    return [(name, param) for name, each in group.commands.items() for param in each.params]


def _children_s() -> float:
    """Processor time of ended children: the machine may do something else, too."""
    times = os.times()
    return times.children_user + times.children_system


# ---- help ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["peer", "--help"]])
def test_help_and_version_come_at_once_without_the_heavy_imports(arguments: list[str]) -> None:
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=HELP_LIMIT_S) >= HELP_LIMIT_S:
        began = _children_s()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "dilocox", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(_children_s() - began)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "dilocox.peer.cli" in imported
        assert not imported & {"torch", "hivemind", "transformers", "datasets"}
    assert min(seconds) < HELP_LIMIT_S, seconds


def test_version_is_printed() -> None:
    assert invoke("--version").output == f"dilocox {__version__}\n"


def test_help_names_every_command() -> None:
    for arguments in (["--help"], ["-h"], []):
        result = invoke(*arguments)
        assert "Error" not in result.output
        assert all(command in result.output for command in COMMANDS)


def test_every_command_has_its_function() -> None:
    source = Path(cli.__file__).read_text()
    named = re.findall(r'^command\(.*"([\w.]+):(\w+)"\)$', source, re.MULTILINE)
    assert len(named) == source.count("\ncommand(") > 10
    for module, function in named:
        assert callable(getattr(importlib.import_module(f"dilocox.peer.{module}"), function))


@cache
def help_of(command: str) -> str:
    return plain(invoke(command, "--help").output)


@pytest.mark.parametrize(
    ("command", "param"), params(), ids=lambda each: getattr(each, "name", each)
)
def test_every_option_has_its_variable_and_a_help_text_with_default(
    command: str, param: Any
) -> None:
    flags = [flag for flag in param.opts if flag.startswith("--")]
    name = flags[0].removeprefix("--") if flags else param.name
    if (command, name) == ("init", "name"):
        name = "run-name"  # DILOCOX_NAME is how a volunteer is called
    assert param.envvar == "DILOCOX_" + name.upper().replace("-", "_")
    assert param.help and param.help.endswith(".")
    if flags:
        text = help_of(command)
        assert flags[0] in text
        default = param.default
        if default not in (None, "", False, []):
            assert f"[default: {default}" in text, text


UNITS = {
    "--max-upload": "MB/s",
    "--memory-limit": "GB",
    "--timeout": "seconds",
    "--monthly-traffic": "GB",
}


@pytest.mark.parametrize(("flag", "unit"), UNITS.items())
def test_help_of_a_quantity_names_its_unit(flag: str, unit: str) -> None:
    texts = [param.help for _, param in params() if flag in param.opts]
    assert texts and all(unit in text for text in texts)


# ---- where a value comes from --------------------------------------------------------------------
def test_flags_win_over_the_environment_and_that_over_the_default(started: list[Any]) -> None:
    env: dict[str, str | None] = {"DILOCOX_REPLICAS": "3", "DILOCOX_FOLDER": "elsewhere"}
    invoke("demo", env={})
    invoke("demo", env=env)
    invoke("demo", "--replicas", "4", env=env)
    assert [options.replicas for options in started] == [2, 3, 4]
    assert [options.folder for options in started] == [
        Path("demo-run"),
        Path("elsewhere"),
        Path("elsewhere"),
    ]


def test_arguments_and_lists_can_come_from_the_environment(started: list[Any]) -> None:
    announce = "/ip4/1.2.3.4/tcp/5 /dns4/a.example/tcp/5"
    env: dict[str, str | None] = {"DILOCOX_INVITE": INVITE, "DILOCOX_ANNOUNCE": announce}
    more: dict[str, str | None] = {"DILOCOX_FOLDER": "out", "DILOCOX_TIMEOUT": "7.5"}
    assert invoke("export", env=env | more).exit_code == 0
    assert invoke("bootstrap", "run.yaml", env=env).exit_code == 0
    assert str(started[0].invite) == INVITE
    assert (started[0].folder, started[0].timeout_s) == (Path("out"), 7.5)
    assert started[1].announce == tuple(announce.split())
    assert started[1].manifest == Path("run.yaml")


def test_a_bootstrap_is_given_a_manifest_or_an_invite_and_the_address_of_its_figures(
    started: list[Any],
) -> None:
    env: dict[str, str | None] = {"DILOCOX_MANIFEST": INVITE, "DILOCOX_METRICS_HOST": "0.0.0.0"}
    assert invoke("bootstrap", "--metrics-port", "9401", env=env).exit_code == 0
    assert str(started[0].manifest) == INVITE
    assert (started[0].metrics_host, started[0].metrics_port) == ("0.0.0.0", 9401)


def test_log_and_verify_take_a_folder_or_an_invite(started: list[Any]) -> None:
    assert invoke("log", "state", "--stage", "1", "--json", "-").exit_code == 0
    assert invoke("verify", env={"DILOCOX_SOURCE": INVITE, "DILOCOX_STAGE": "auto"}).exit_code == 0
    assert (started[0].source, started[0].stage) == (Path("state"), "1")
    assert started[0].json_file == Path("-")
    assert (str(started[1].source), started[1].stage) == (INVITE, "auto")


@pytest.mark.parametrize("command", ["peer", "doctor", "bootstrap"])
def test_a_wrong_address_to_announce_is_refused_before_anything_is_loaded(command: str) -> None:
    result = invoke(command, INVITE, "--announce", "1.2.3.4:5")
    assert isinstance(result.exception, InvalidInput)
    assert str(result.exception).startswith("--announce: address '1.2.3.4:5' is not a TCP multiad")


def test_an_unknown_variable_is_named_in_a_warning_and_a_known_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("DILOCOX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DILOCOX_REPLICA", "3")
    monkeypatch.setenv("DILOCOX_REPLICAS", "3")
    assert run_here(monkeypatch, "--version") == 0
    assert capsys.readouterr().err == (
        "warning: DILOCOX_REPLICA is set, but no option has that name\n"
    )


# ---- exit codes ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--replicas", "0"],
        ["demo", "--replicas", "two"],
        ["demo", "--stages", "17"],
        ["demo", "--rounds", "0"],
        ["demo", "--bogus"],
        ["bootstrap"],
        ["bootstrap", "run.yaml", "--port", "65536"],
        ["peer"],
        ["peer", INVITE, "--threads", "-1"],
        ["peer", INVITE, "--memory-limit", "-1"],
        ["peer", INVITE, "--max-upload", "much"],
        ["peer", INVITE, "--monthly-traffic", "-1"],
        # what a doctor could only pass over
        ["doctor", INVITE, "--monthly-traffic", "9"],
        ["doctor", INVITE, "--hours", "22-6"],
        ["doctor", INVITE, "--name", "Ada"],
        ["doctor", INVITE, "--team", "Foxes"],
        ["generate", INVITE],
        ["generate", INVITE, "x", "--tokens", "0"],
        ["generate", INVITE, "x", "--temperature", "-1"],
        ["serve", INVITE, "--refresh-rounds", "-1"],
        ["serve", INVITE, "--dtype", "int8"],
        ["export", INVITE],
        ["export", INVITE, "out", "--timeout", "0"],
        ["log"],
        ["verify", "state", "--timeout", "0"],
        ["verify", "state", "--json", "out"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_names_what_is_wrong(
    arguments: list[str], started: list[Any]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert not started
    wrong = [word for word in arguments if word.startswith("--")] or arguments[:1]
    named = plain(result.output)
    assert wrong[0] in named or "Missing argument" in named


def test_an_unknown_log_level_names_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match="--log-level loud: choose one of debug, info, warning"):
        set_up_logging("loud")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidInput("x is 3; take 4"), 2, "error: x is 3; take 4\n"),
        (EnvironmentFault("it rains; wait"), 1, "error: it rains; wait\n"),
        (OSError(28, "No space left on device", "/d/f"), 1, "error: /d/f: no space left on the d"),
    ],
)
def test_errors_for_people_are_one_line_and_their_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    line: str,
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    assert run_here(monkeypatch, "demo") == code
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["peer", INVITE, "--hours", "22-6", "--hours", "9"], "--hours 9: give whole hours"),
        (["peer", INVITE, "--name", 25 * "x"], f"--name '{25 * 'x'}': give at most 24"),
        (["peer", INVITE, "--name", "a\x1b[2J"], "--name 'a\\x1b[2J': give at most 24 printable"),
        (["peer", INVITE, "--name", 13 * "🦙"], f"--name '{13 * '🦙'}': give at most 24 printable"),
        (["peer", INVITE, "--team", "a\nb"], "--team 'a\\nb': give at most 24 printable"),
        (["pause", "--state", "nowhere"], "--state nowhere: no peer was started"),
        (["resume", "--state", "nowhere"], "--state nowhere: no peer was started"),
        (["generate", INVITE, ""], "TEXT is empty: give at least one character"),
    ],
)
def test_what_a_volunteer_mistypes_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    assert run_here(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {named}") and printed.count("\n") == 1


def test_a_library_that_finds_no_folder_for_temporary_files_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(demo, "run_demo", fail)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", fail)
    assert run_here(monkeypatch, "demo") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: no folder for temporary files can be written: ")
    assert "TMPDIR" in printed and printed.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(demo, "run_demo", fail)
    with pytest.raises(PermissionError):
        run_here(monkeypatch, "demo")


def test_the_program_itself_ends_with_the_code_of_the_error(tmp_path: Path) -> None:
    command = Command("export", "nonsense", "out", folder=tmp_path)
    try:
        assert command.exit_code(20.0) == 2
        assert "'nonsense' does not start with 'dilocox:'" in error_line(command.output())
    finally:
        command.close()
