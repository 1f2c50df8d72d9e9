"""benchmarks/run_all.py says how each script ended, and leaves nothing of it running."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run_all
from benchmarks.run_all import BENCHES, Bench, run
from tests.dht.processes import is_alive, wait_until

FAILS = "print('before'); raise SystemExit(3)"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
PRINTS = "import sys; print(sys.argv[1:])"


def bench(folder: Path, text: str, *, limit_s: float = 60.0) -> Bench:
    script = folder / "script.py"
    script.write_text(text)
    return Bench(name="one", script=str(script), arguments=("--whole",), limit_s=limit_s)


def test_a_script_gets_its_arguments_and_a_folder_and_its_words_are_kept(tmp_path: Path) -> None:
    for quick, argument in ((False, "--whole"), (True, "--quick")):
        ended = run(bench(tmp_path, PRINTS), tmp_path, quick=quick, running=[])
        assert (ended.outcome, ended.last) == ("ok", "")
        out = str(tmp_path / "one")
        assert (tmp_path / "one" / "log.txt").read_text() == f"{[argument, '--out', out]}\n"


def test_of_one_that_failed_the_last_lines_are_told(tmp_path: Path) -> None:
    ended = run(bench(tmp_path, FAILS), tmp_path, quick=False, running=[])
    assert (ended.outcome, ended.last) == ("FAILED with 3", "before")


def test_at_its_deadline_a_script_ends_with_all_that_it_started(tmp_path: Path) -> None:
    ended = run(bench(tmp_path, HANGS, limit_s=2.0), tmp_path, quick=False, running=[])
    assert "not done within 2 s" in ended.outcome
    child = int((tmp_path / "one" / "log.txt").read_text().split()[0])
    wait_until(lambda: not is_alive(child), 30.0)  # killed, but the kernel may take its time


def test_one_failure_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "BENCHES", (bench(tmp_path, FAILS),))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--quick", "--out", str(tmp_path)])
    assert run_all.main() == 1
    shown = capsys.readouterr().out
    assert "FAILED with 3" in shown
    assert "before" in shown
    assert "one," in (tmp_path / "bench.csv").read_text()


def test_what_cannot_run_here_is_said_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(bench(tmp_path, FAILS), needs=lambda: "no such thing here")
    monkeypatch.setattr(run_all, "BENCHES", (absent,))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path)])
    assert run_all.main() == 0
    assert "left out: no such thing here" in capsys.readouterr().out


def test_every_benchmark_has_a_name_of_its_own_and_a_script() -> None:
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)
    for each in BENCHES:
        assert (run_all.FOLDER / each.script).exists(), each.script
