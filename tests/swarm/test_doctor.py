"""`dilocox doctor` against a real bootstrap and a real peer: it must tell the truth about them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.peer.real_commands import Command
from tests.ports import free_port
from tests.swarm.harness import ProcessSwarm
from tests.swarm.monitors import start_bootstrap
from tests.swarm.nat import Homes, available
from tests.swarm.small_run import run_manifest

pytestmark = pytest.mark.swarm

EXAMINED_LIMIT_S = 90.0  # 40 s on a machine that does nothing else
LEAVE_LIMIT_S = 20.0
MAPPED_PORT = 31999


@pytest.mark.timeout(400)
def test_the_doctor_names_the_stage_that_lacks_a_peer_and_what_is_wrong(
    tmp_path: Path, ended: ExitStack
) -> None:
    bootstrap, invite = start_bootstrap(tmp_path, stages=2)
    ended.callback(bootstrap.close)
    port = free_port()
    own = ("--state", "peer", "--port", str(port))
    peer = _command(ended, "peer", invite, tmp_path, "--stage", "0", *own)
    peer.wait_for("stage 0 of 2")

    # a machine that could take part
    new = _command(ended, "doctor", invite, tmp_path, "--state", "new")
    began = time.monotonic()
    assert new.exit_code(EXAMINED_LIMIT_S) == 0, new.output()
    print(f"{time.monotonic() - began:.1f} s\n{new.output()}")
    lines = _lines(new)
    assert "failed" not in {line.split()[0] for line in lines if line[:1].strip()}, new.output()
    assert "it would take stage 1, which has nobody else" in " ".join(new.output().split())
    assert "This machine can take part: stage 1, about " in " ".join(new.output().split())
    assert "others reach this machine at /ip4/127.0.0.1/tcp/" in " ".join(new.output().split())
    assert "\x1b" not in new.output()  # no colours in a file
    assert not (tmp_path / "new").exists()  # it leaves no trace
    new.clean_within(LEAVE_LIMIT_S)

    # beside the peer of the same folder, on its port
    told = _told(ended, invite, tmp_path, *own, "--stage", "1", code=0)
    assert told["folder"]["status"] == "warning" and "its peer runs now" in told["folder"]["text"]
    assert "stage 1, which has nobody else" in told["stage"]["text"]
    assert told["port"]["text"].endswith("is in use, by this folder's peer it seems")
    assert told["reachable"]["text"].endswith(f"at /ip4/127.0.0.1/tcp/{port}")  # of that peer
    assert peer.process.poll() is None

    # a stage that is not there
    told = _told(ended, invite, tmp_path, "--state", "new", "--stage", "2", code=1)
    assert told["stage"]["status"] == "failed" and "0 to 1" in told["stage"]["text"]
    assert told["speed"]["text"] == "not checked"

    # and without the run
    bootstrap.process.kill()
    bootstrap.clean_within(LEAVE_LIMIT_S)
    told = _told(ended, invite, tmp_path, "--state", "new", code=1)
    assert told["bootstrap"]["status"] == "failed"
    assert "ask the operator whether the bootstrap runs" in told["bootstrap"]["remedy"]
    assert told["memory"]["status"] == told["disk"]["status"] == told["python"]["status"] == "ok"
    assert all(told[name]["status"] == "skipped" for name in ("run", "reachable", "speed"))


@pytest.mark.timeout(280)
def test_the_doctor_knows_whether_a_router_lets_others_in(tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(reason)
    with Homes("ph") as net, ProcessSwarm(tmp_path, run_manifest(), links=net) as swarm:
        closed = _at_home(net, swarm, "--port", str(MAPPED_PORT))
        assert closed["reachable"]["status"] == "warning"
        assert "would only dial out" in closed["reachable"]["text"]
        announced = f"--announce /ip4/{net.seen_at(1)}/tcp/{MAPPED_PORT}"
        assert announced in closed["reachable"]["remedy"]
        net.map_port(1, MAPPED_PORT)
        mapped = _at_home(net, swarm, "--port", str(MAPPED_PORT))
        assert mapped["reachable"]["status"] == "ok"
        assert f"/ip4/{net.seen_at(1)}/tcp/{MAPPED_PORT}" in mapped["reachable"]["text"]


def _at_home(net: Homes, swarm: ProcessSwarm, *options: str) -> dict[str, dict[str, Any]]:
    """The checks by name, of a doctor behind the router, which must end well."""
    doctor = [sys.executable, "-m", "dilocox", "doctor", swarm.invite, "--json", "-"]
    place = ["--state", str(swarm.folder / "new"), "--threads", "1", "--device", "cpu"]
    command = net.command(1, [*doctor, *place, *options])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=EXAMINED_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def _command(ended: ExitStack, name: str, invite: str, folder: Path, *options: str) -> Command:
    place = ["--host", "127.0.0.1", "--threads", "1", "--device", "cpu"]
    return ended.enter_context(closing(Command(name, invite, *place, *options, folder=folder)))


def _told(
    ended: ExitStack, invite: str, folder: Path, *options: str, code: int
) -> dict[str, dict[str, Any]]:
    """The checks by name, of a doctor that ends with this code."""
    file = folder / "told.json"
    doctor = _command(ended, "doctor", invite, folder, *options, "--json", str(file))
    assert doctor.exit_code(EXAMINED_LIMIT_S) == code, doctor.output()
    doctor.clean_within(LEAVE_LIMIT_S)
    told = json.loads(file.read_text())
    file.unlink()
    assert told["can_take_part"] is (code == 0)
    return {check["name"]: check for check in told["checks"]}


def _lines(command: Command) -> list[str]:
    return command.output().splitlines()
