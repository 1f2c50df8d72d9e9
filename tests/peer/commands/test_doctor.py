"""`dilocox doctor` without a run: what it gathers, how it looks, what scripts read, exit codes."""

from __future__ import annotations

import io
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dilocox.dht import join
from dilocox.dht.errors import (
    DilocoxError,
    EnvironmentFault,
    UnreadableManifest,
)
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import DataSpec, Manifest
from dilocox.dht.manifest_sections import SourceSpec
from dilocox.peer import memory_and_disk
from dilocox.peer.commands import doctor, doctor_bench
from dilocox.peer.commands.doctor import (
    ContributionEstimate,
    Printout,
    as_json,
    run_doctor,
    verdict,
)
from dilocox.peer.commands.doctor_bench import look_at_device, measure_speed
from dilocox.peer.commands.doctor_checks import DeviceFacts, Library
from dilocox.peer.memory_and_disk import Check, size
from dilocox.peer.options import DoctorOptions, PeerOptions
from dilocox.peer.process import prepare
from dilocox.peer.process.prepare import StageNeeds, check_disk, disk_room, unfit
from dilocox.peer.state_folder import StateFolder
from tests.peer.fabricated import INVITE

PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
GOOD = Check("python", "ok", "3.11.7")
BAD = Check("port", "failed", "port 7 is in use", "choose another one with --port")


# ---- what a stage needs --------------------------------------------------------------------------
def test_a_larger_stage_needs_more_of_everything() -> None:
    small, tiny = (StageNeeds(_manifest(model), 1) for model in ("small", "tiny"))
    assert small.values > 3 * tiny.values
    for name in ("disk_bytes", "record_bytes"):
        assert getattr(small, name) > getattr(tiny, name)
    assert small.exchange_bytes(2) > tiny.exchange_bytes(2) > 0
    assert small.exchange_bytes(8) < 2 * small.exchange_bytes(2)  # it grows towards twice that
    assert small.disk_bytes > 2 * 8 * 4 * small.values  # two snapshots


def test_a_disk_that_becomes_full_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage_needs = StageNeeds(_manifest("tiny"), 1)
    own, free = tmp_path / "run-stage1", [0]
    monkeypatch.setattr(prepare, "disk_free", lambda *_: free[0])
    free[0] = stage_needs.disk_bytes
    check_disk(own, stage_needs)
    assert not caplog.messages
    free[0] -= 1
    check_disk(own, stage_needs)
    (line,) = caplog.messages
    assert f"{size(stage_needs.disk_bytes)} needed" in line and "--state" in line
    (own / "snapshots" / "00000003").mkdir(parents=True)
    (own / "snapshots" / "00000003" / "anchor.safetensors").write_bytes(b"x")
    check_disk(own, stage_needs)  # what is there already needs no room
    assert len(caplog.messages) == 1
    free[0] = stage_needs.snapshot_bytes - 1
    with pytest.raises(
        EnvironmentFault, match=f"takes {size(stage_needs.snapshot_bytes)}.*--state"
    ):
        check_disk(own, stage_needs)
    (own / "snapshots" / "00000004.partial").mkdir()
    (own / "snapshots" / "00000004.partial" / "anchor.safetensors").write_bytes(b"x")
    check_disk(own, stage_needs)  # the next snapshot takes its place
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("aside", ["before-00000001/snapshots", "snapshots/00000001.damaged"])
def test_what_was_put_aside_is_not_taken_for_what_a_stage_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: str
) -> None:
    stage_needs = StageNeeds(_manifest("tiny"), 1)
    monkeypatch.setattr(prepare, "disk_free", lambda *_: stage_needs.disk_bytes - 1)
    (tmp_path / aside).mkdir(parents=True)
    (tmp_path / aside / "anchor.safetensors").write_bytes(b"x" * 1000)
    told = disk_room(tmp_path, stage_needs)
    assert told.status == "warning"
    assert f"{aside.removesuffix('/snapshots')} there may be deleted: 1.0 kB" in told.remedy
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "00000001.record").write_bytes(b"x")
    assert disk_room(tmp_path, stage_needs).status == "ok"


def test_of_two_snapshots_of_before_a_power_cut_the_older_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_needs = StageNeeds(_manifest("tiny"), 1)
    monkeypatch.setattr(prepare, "disk_free", lambda *_: 1000)
    for name in ("00000003", "00000004"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
        with (tmp_path / "snapshots" / name / "local.safetensors").open("wb") as file:
            file.truncate(stage_needs.snapshot_bytes)
    assert disk_room(tmp_path, stage_needs).status != "failed"


def test_the_doctor_says_of_a_disk_what_a_start_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_needs = StageNeeds(_manifest("tiny"), 1)
    options, free = replace(_options(), state=tmp_path), [stage_needs.snapshot_bytes]
    monkeypatch.setattr(prepare, "disk_free", lambda *_: free[0])
    own = StateFolder(tmp_path).run(options.invite.run_id, 1)

    def told() -> Check:
        room = doctor.Examination(options, lambda _: None).room(stage_needs, None)
        (check,) = (check for check in room if check.name == "disk")
        return check

    assert told() == disk_room(own, stage_needs)
    assert told().status == "warning"
    (own / "log").mkdir(parents=True)
    with (own / "log" / "00000001.record").open("wb") as file:
        file.truncate(stage_needs.disk_bytes - free[0])
    assert told().status == "ok"  # a peer that has it all needs no more
    free[0] -= 1
    assert told().status == "failed"


def test_only_neighbours_cost_bandwidth_for_each_token() -> None:
    alone = StageNeeds(_manifest("tiny", stages=1), 0)
    first, middle, last = (StageNeeds(_manifest("tiny", stages=3), stage) for stage in range(3))
    assert alone.link_bytes_per_token() == 0
    assert first.link_bytes_per_token() == last.link_bytes_per_token() > 0
    assert middle.link_bytes_per_token() == 2 * first.link_bytes_per_token()


def _manifest(model: str, stages: int = 2) -> Manifest:
    batch = {"sequence_length": 32, "microbatch_size": 2}
    facts = {"name": "x", "model": model, "end_tokens": 1000, "stages": stages, "batch": batch}
    return Manifest.from_dict(facts)


# ---- the speed of this machine -------------------------------------------------------------------
def test_a_stage_is_measured_on_the_device_that_is_named() -> None:
    threads = torch.get_num_threads()
    assert look_at_device("cpu", threads).threads == threads
    speed = measure_speed("cpu", StageNeeds(_manifest("tiny"), 1), limit_s=60.0)
    assert speed.measured and not speed.fault and 10 < speed.tokens_per_s < 10_000_000


def test_a_stage_that_takes_too_long_is_given_up_in_time() -> None:
    began = time.monotonic()
    assert measure_speed("cpu", StageNeeds(_manifest("tiny"), 0), limit_s=0.05).fault
    assert time.monotonic() - began < 2.0
    # a doctor ends without waiting for it; an interpreter that goes away under it aborts
    [measuring] = [each for each in threading.enumerate() if each.name == "doctor-bench"]
    measuring.join(60.0)


def test_a_device_that_is_not_here_is_a_fault_in_one_line() -> None:
    fault = look_at_device("cuda:99", 1).fault
    assert fault and "\n" not in fault


# ---- the text ------------------------------------------------------------------------------------
def test_every_source_of_the_text_is_looked_for(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.txt")
    more = (SourceSpec(source=missing, format="text"),)
    assert doctor.data_check(DataSpec(), "").status == "ok"
    found = doctor.data_check(DataSpec(more=more), "")
    assert found.status == "failed" and missing in found.text
    (tmp_path / "own.txt").write_text("text")
    assert doctor.data_check(DataSpec(), str(tmp_path / "own.txt")).status == "ok"
    assert doctor.data_check(DataSpec(), missing).status == "failed"
    # its heads read the run's for the validation
    assert doctor.data_check(DataSpec(more=more), str(tmp_path / "own.txt")).status == "failed"


def test_what_does_not_fit_a_machine_is_known_before_it_moves_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moved, ended with an error that nothing restarts, and came back to the same stage."""
    manifest, invite = _manifest("tiny"), Invite.parse(INVITE)
    cpu = torch.device("cpu")

    def why(run: Manifest = manifest, **given: Any) -> str:
        given_options = PeerOptions(invite=invite, state=tmp_path, **given)
        return unfit(given_options, run, tmp_path / "stage", 0, cpu)

    assert why() == ""
    assert why(memory_limit_gb=0.1).startswith("--memory-limit 0.1: this stage needs about")
    with monkeypatch.context() as small:  # the peer would not start there
        small.setattr(memory_and_disk, "total_bytes", lambda: 500_000_000)
        assert "larger machine" in why()
        small.setattr(memory_and_disk, "total_bytes", lambda: 10**12)
        small.setattr(memory_and_disk, "available_bytes", lambda: 0)
        assert why() == ""  # its own stage is still there
    missing = replace(manifest.data, source=str(tmp_path / "none"), format="text")
    assert "none" in why(replace(manifest, data=missing))
    monkeypatch.setattr(prepare, "disk_free", lambda _: 1000)
    assert "snapshot" in why()
    # one snapshot fits: beside it there would be no room for the next one, at its next start
    needs = StageNeeds(manifest, 0)
    monkeypatch.setattr(prepare, "disk_free", lambda _: needs.snapshot_bytes)
    assert "the disk will be full" in why()


# ---- how it looks --------------------------------------------------------------------------------
@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


def test_every_line_keeps_to_the_width_and_its_column(file: io.StringIO) -> None:
    long = Check("reachable", "warning", "others cannot dial this machine " * 4, "forward it " * 9)
    Printout(Console(file=file, width=60)).show([GOOD, long])
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert lines[0] == "ok       python     3.11.7"
    assert lines[1].startswith("warning  reachable  others")
    assert all(line.startswith(" " * 20) for line in lines[2:])
    assert sum("-> forward" in line for line in lines) == 1
    assert "\x1b" not in file.getvalue()


def test_a_remedy_that_fits_stands_in_the_same_line(file: io.StringIO) -> None:
    Printout(Console(file=file, width=80)).show([BAD])
    assert file.getvalue() == (
        "failed   port       port 7 is in use -> choose another one with --port\n"
    )


def test_what_a_stranger_wrote_does_not_steer_the_terminal(file: io.StringIO) -> None:
    Printout(Console(file=file, width=80)).show([Check("version", "ok", "1 of \x1b[2J\r\x07evil")])
    assert "\x1b" not in file.getvalue() and "1 of  [2J  evil" in file.getvalue()


def test_the_verdict_names_causes_and_not_what_follows_from_them() -> None:
    behind = Check("speed", "skipped", "not checked", "fix port first")
    assert verdict([GOOD, BAD, behind], None) == "This machine cannot take part yet: fix port."
    contribution = ContributionEstimate(stage=1, tokens_per_s=3_210.0, exchange_s=2.0)
    assert (
        verdict([GOOD], contribution)
        == "This machine can take part: stage 1, about 3,200 tokens/s."
    )
    warning = Check("clock", "warning", "late", "set it")
    assert verdict([GOOD, warning], contribution).endswith("tokens/s; see the warnings: clock.")


def test_scripts_read_the_lines_and_the_contribution() -> None:
    contribution = ContributionEstimate(stage=1, tokens_per_s=3_210.0, exchange_s=None)
    told = json.loads(json.dumps(as_json([GOOD, BAD], contribution, _options().invite)))
    assert told["can_take_part"] is False
    assert told["contribution"] == {"stage": 1, "tokens_per_s": 3210.0, "exchange_s": None}
    assert told["checks"][1] == {
        "name": "port",
        "status": "failed",
        "text": "port 7 is in use",
        "remedy": "choose another one with --port",
    }


# ---- an examination without a run ----------------------------------------------------------------
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        yield other.getsockname()[1]


def test_without_a_bootstrap_the_rest_is_checked_all_the_same(here: Path, taken: int) -> None:
    file = here / "told.json"
    options = replace(_options(port=taken, json_file=file), metrics_port=taken)
    assert run_doctor(options) == 1
    told = json.loads(file.read_text())
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["python"]["status"] == checks["disk"]["status"] == "ok"
    for name, flag in {"port": "--port", "metrics": "--metrics-port"}.items():
        assert checks[name]["status"] == "failed" and flag in checks[name]["remedy"]
    assert checks["bootstrap"]["status"] == "failed" and checks["bootstrap"]["remedy"]
    for name in ("run", "version", "clock", "stage", "reachable", "bandwidth", "speed"):
        assert checks[name] == {
            "name": name,
            "status": "skipped",
            "text": "not checked",
            "remedy": "fix bootstrap first",
        }
    assert told["contribution"] is None
    assert told["verdict"] == "This machine cannot take part yet: fix port, metrics, bootstrap."
    assert not (here / "peer").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (EnvironmentFault("no manifest of run 0: check that the bootstrap runs"), "run"),
        (UnreadableManifest("it is of another protocol: install version 9"), "version"),
    ],
)
def test_a_run_that_cannot_be_joined_says_why_and_the_rest_waits_for_it(
    here: Path, taken: int, monkeypatch: pytest.MonkeyPatch, error: DilocoxError, line: str
) -> None:
    happened: list[str] = []

    def refuse(*_: Any, **__: Any) -> Any:
        happened.append("the DHT's process is forked")
        raise error

    def look(_: str, threads: int) -> DeviceFacts:
        happened.append("CUDA is loaded")
        return DeviceFacts(threads=threads)

    monkeypatch.setattr(join, "join_run", refuse)
    monkeypatch.setattr(doctor_bench, "look_at_device", look)
    options = replace(_options(json_file=here / "told.json"), invite=_invite(taken))
    assert run_doctor(options) == 1
    told = json.loads((here / "told.json").read_text())
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["bootstrap"]["status"] == checks["memory"]["status"] == "ok"
    assert str(error) == f"{checks[line]['text']}: {checks[line]['remedy']}"
    assert checks["speed"]["remedy"] == f"fix {line} first"
    # a child that is forked where CUDA is loaded cannot use it, and may hang
    assert happened == ["the DHT's process is forked", "CUDA is loaded"]
    assert told["verdict"] == f"This machine cannot take part yet: fix {line}."


def test_without_the_libraries_it_says_so_and_loads_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Library(name="torch", version="", needed=">=2.6")
    monkeypatch.setattr(doctor, "libraries", lambda: [gone])
    bench = "dilocox.peer.commands.doctor_bench"
    monkeypatch.setitem(sys.modules, bench, None)  # importing it fails
    assert run_doctor(_options()) == 1
    printed = capsys.readouterr().out
    assert "missing: torch -> python -m pip install 'torch>=2.6'" in printed
    assert "fix libraries." in printed


def test_without_a_folder_for_temporary_files_nothing_is_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", _nowhere)
    monkeypatch.setitem(sys.modules, "dilocox.peer.commands.doctor_bench", None)
    assert run_doctor(_options()) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed tmp no folder for temporary files can be written" in printed
    assert "--tmpfs /tmp" in printed and "fix tmp." in printed


def _invite(port: int) -> Invite:
    return Invite("0" * 32, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}",))


def _nowhere() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


def _options(*, port: int = 0, json_file: Path | None = None) -> DoctorOptions:
    with socket.socket() as nobody:  # a port at which nobody listens
        nobody.bind(("127.0.0.1", 0))
        closed = nobody.getsockname()[1]
    return DoctorOptions(
        invite=_invite(closed),
        state=Path("peer"),
        host="127.0.0.1",
        port=port,
        device="cpu",
        threads=1,
        json_file=json_file,
    )


# ---- memory of a container -----------------------------------------------------------------------
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_it_is_allowed_and_not_what_the_machine_has(
    version: int, tmp_path: Path
) -> None:
    names: Any = {
        1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        2: ("memory.max", "memory.current", "memory.stat"),
    }
    told = ("50000000\n", "30000000\n", "cache 1\ninactive_file 10000000\nactive_file 7\n")
    for name, text in zip(names[version], told, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_and_disk.available_bytes(tmp_path) == 30_000_000  # what can be dropped is free
    assert memory_and_disk.total_bytes(tmp_path) == 50_000_000
    (tmp_path / names[version][0]).write_text("max\n")
    assert memory_and_disk.total_bytes(tmp_path) > 50_000_000
    assert memory_and_disk.available_bytes(tmp_path) > 50_000_000
