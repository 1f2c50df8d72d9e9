"""The units for systemd: their commands are ones that dilocox knows, and systemd reads them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dilocox.dht.errors import InvalidInput
from dilocox.peer import cli
from dilocox.peer.commands import bootstrap
from tests.peer.fabricated import INVITE

GUIDE = Path(__file__).parents[2] / "docs" / "operator.md"
UNIT = Path(__file__).parents[2] / "docker" / "dilocox-bootstrap.service"
PROGRAM = "/opt/dilocox/.venv/bin/dilocox"
PEER_UNIT = UNIT.with_name("dilocox-peer.service")
PEER_PROGRAM = "%h/dilocox/.venv/bin/dilocox"


def settings(unit: Path = UNIT) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def test_its_command_is_one_that_dilocox_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def run(options: Any) -> int:
        given.append(options)
        return 0

    monkeypatch.setattr(bootstrap, "run_bootstrap_command", run)
    program, *arguments = shlex.split(settings()["ExecStart"].replace("ADDRESS", "203.0.113.7"))
    assert program == PROGRAM
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    (options,) = given
    assert options.state == Path("/var/lib") / settings()["StateDirectory"]
    assert (options.port, options.announce) == (31337, ("/ip4/203.0.113.7/tcp/31337",))
    assert settings()["RestartPreventExitStatus"] == str(InvalidInput.exit_code)
    assert settings()["OOMPolicy"] == "continue", "a killed child must not end the bootstrap"


def test_a_peers_command_needs_nothing_but_the_variables_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def run(options: Any) -> int:
        given.append(options)
        return 0

    monkeypatch.setattr(cli, "run_peer_when_allowed", run)
    found = settings(PEER_UNIT)
    program, *arguments = shlex.split(found["ExecStart"])
    assert program == PEER_PROGRAM
    name, _, state = found["Environment"].partition("=")
    variables = {name: state, "DILOCOX_INVITE": INVITE, "DILOCOX_HOURS": "22-6"}
    result = CliRunner(env=variables).invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    (options,) = given
    assert options.state == Path("%S") / found["StateDirectory"]
    assert found["RestartPreventExitStatus"] == str(InvalidInput.exit_code)
    guide = GUIDE.with_name("volunteer.md").read_text()
    assert found["EnvironmentFile"].replace("%h", "~") in guide


@pytest.mark.parametrize("unit", [UNIT, PEER_UNIT], ids=["bootstrap", "peer"])
def test_it_may_open_as_many_files_as_a_container(unit: Path) -> None:
    compose = yaml.safe_load((UNIT.parent / "compose.yaml").read_text())
    limit = compose["services"]["bootstrap"]["ulimits"]["nofile"]
    assert settings(unit)["LimitNOFILE"] == str(limit)


def test_the_guide_operates_it_as_the_user_whose_folder_it_is() -> None:
    user, folder = settings()["User"], f"/var/lib/{settings()['StateDirectory']}"
    assert "DynamicUser" not in settings()  # only root gets into the folder of such a one
    part = GUIDE.read_text().partition("\n## As a service\n")[2].partition("\n## ")[0]
    assert re.search(rf"^sudo useradd --system .*\b{user}$", part, re.MULTILINE)
    found = re.findall(rf"^(.*){PROGRAM} operate (\w+)(.*)$", part, re.MULTILINE)
    assert {action for _, action, _ in found} == {"pause", "resume", "revise", "rollback", "end"}
    for before, _, after in found:
        assert before == f"sudo -u {user} " and after.endswith(f" --state {folder}")


@pytest.mark.parametrize(
    ("unit", "named", "mode"),
    [(UNIT, PROGRAM, "--system"), (PEER_UNIT, PEER_PROGRAM, "--user")],
    ids=["bootstrap", "peer"],
)
def test_systemd_finds_nothing_wrong_with_it(
    tmp_path: Path, unit: Path, named: str, mode: str
) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    program = shutil.which("true")  # what is to run must be there
    assert program is not None
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(named, program))
    done = subprocess.run(
        [analyze, mode, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr
