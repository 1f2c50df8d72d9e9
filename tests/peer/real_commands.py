"""Real `dilocox` commands, and all that is left of them: processes, sockets, shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from dilocox.peer import cli
from tests.dht.processes import wait_until
from tests.swarm.processes import TAG, Family

START_LIMIT_S = 90.0
LEAVE_LIMIT_S = 15.0
AFTER_KILL_S = 5.0


class Command:
    """A running `dilocox` command, in a session and with a folder for temporary files of its own.

    It is given no terminal. `folder` is where it is started and where its output goes. family: the
    command and what came of it.
    """

    def __init__(self, *arguments: str, folder: Path, env: dict[str, str] | None = None):
        self.family = Family()
        # sockets must have short paths, and pytest's are long
        self.temporary = Path(tempfile.mkdtemp(prefix="cmd-", dir="/tmp"))
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("DILOCOX_")}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{arguments[0]}-{self.family.tag[:6]}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dilocox", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **inherited,
                    "TMPDIR": str(self.temporary),
                    TAG: self.family.tag,
                    **(env or {}),
                },
            )
        self.family.seen.add(self.process.pid)

    def left(self) -> list[str]:
        """What should not be there after the command's end."""
        # torch puts a cache folder there, which it keeps
        folders = [path for path in self.temporary.iterdir() if "torchinductor" not in path.name]
        return self.family.left() + [str(path) for path in folders]

    def output(self) -> str:
        """What a person would have seen."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, limit_s: float = START_LIMIT_S) -> None:
        """Wait for something in the output; fails if the command ends before."""

        def said() -> bool:
            ended = self.process.poll() is not None
            if text in self.output():
                return True
            assert not ended, f"ended with {self.process.returncode}:\n{self.output()}"
            return False

        wait_until(said, limit_s)
        self.family.alive()

    def exit_code(self, limit_s: float) -> int:
        """Wait for the end of the command; its exit code, with all processes noted on the way."""

        def ended() -> bool:
            self.family.alive()
            return self.process.poll() is not None

        wait_until(ended, limit_s)
        return self.process.wait(1.0)

    def clean_within(self, limit_s: float) -> float:
        """Wait until nothing is left of it; how long that took."""
        return wait_until(lambda: not self.left() or None, limit_s)

    def interrupt(self) -> None:
        """Ctrl-C: to the whole foreground group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        """For the end of a test, however it went."""
        self.family.alive()
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(AssertionError):  # the test has said so, if it matters
            self.clean_within(AFTER_KILL_S)
        self.family.remove()
        shutil.rmtree(self.temporary, ignore_errors=True)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process, which has imported all of it; the exit code."""
    monkeypatch.setattr(cli, "leave_at_once", lambda: None)
    monkeypatch.setattr(sys, "argv", ["dilocox", *arguments])
    return cli.run()


def error_line(output: str) -> str:
    """The one line of the error, after which nothing stands, and no traceback before it."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:], output
    assert "Traceback" not in output
    return errors[0]


def write_manifest(path: Path, **changes: Any) -> Path:
    """A run.yaml with the tiny model and rounds of a few seconds."""
    facts: dict[str, Any] = {
        "name": "test",
        "model": "tiny",
        "end_tokens": 10_000_000,
        "data": {"source": "stdlib", "parts": 8, "held_out_windows": 4},
        "batch": {"sequence_length": 64, "microbatch_size": 2, "microbatches": 1},
        "rounds": {"inner_steps": 8},
        "deadlines": {
            "heartbeat_s": 1.0,
            "matchmaking_s": 1.0,
            "exchange_s": 5.0,
            "vote_s": 3.0,
        },
    }
    path.write_text(yaml.safe_dump(facts | changes))
    return path
