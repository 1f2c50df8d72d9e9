"""People who follow a guide: each has a machine of their own, which is a network namespace, and
types the guide's blocks into its terminals.

All that they and their terminals did goes into one transcript, in the order of time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.dht.processes import wait_until
from tests.guide_blocks import Block, unseen
from tests.swarm.links import Links
from tests.swarm.processes import TAG, Family, send_signal

LEAVE_LIMIT_S = 60.0  # twice what the guides promise
GONE_LIMIT_S = 10.0
ASK_LIMIT_S = 20.0
MAX_SHOWN_LINES = 30  # of what a terminal printed
_ASK = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1]).read())"


class Transcript:
    """Who typed what and what came of it."""

    def __init__(self, path: Path):
        self.path = path
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, who: str, lines: str) -> None:
        """Append lines, each after the time in seconds and a name."""
        with self._lock, self.path.open("a") as file:
            for line in lines.rstrip("\n").split("\n"):
                file.write(f"{time.monotonic() - self._began:6.1f} {who:12} {line}\n")


class Terminal:
    """One block, typed; its command's output and its end."""

    def __init__(self, person: Person, block: Block, values: Mapping[str, str]):
        self._person = person
        address = person.links.address(person.host)
        self.block = block = block.filled({"ADDRESS": address, **values})
        self._log = person.folder / f"terminal-{len(person.terminals)}.log"
        person.transcript.add(f"{person.name}$", block.text)
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                person.links.command(person.host, ["bash", "-euc", block.text]),
                cwd=person.checkout,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=person.environment,
            )

    @property
    def output(self) -> str:
        """What the person sees in it."""
        return self._log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        """Whether its command has not ended yet."""
        return self._process.poll() is None

    def wait(self, limit_s: float) -> None:
        """Wait for what the guide says: the end, or of a command that stays what it prints."""

        def there() -> bool:
            ended = not self.runs
            if self.block.stays:
                assert not ended, f"{self.block.place} ended: {self._process.returncode}"
                return not unseen(self.block.expected, self.output)
            return ended

        try:
            wait_until(there, limit_s)
            if not self.block.stays:
                assert self._process.returncode == 0, f"exit code {self._process.returncode}"
            missing = unseen(self.block.expected, self.output)
            assert not missing, f"not printed: {missing}"
        except AssertionError as error:
            raise AssertionError(f"{self.block.place}: {error}\n{self.output[-3000:]}") from error
        finally:
            self._person.transcript.add(self._person.name, _some(self.output))

    def wait_for(self, text: str, limit_s: float) -> None:
        """Wait for something in the output of a command that stays or has just ended."""
        self._wait(lambda: text in self.output, limit_s, f"no {text!r}")

    @property
    def rounds(self) -> int:
        """How many rounds a peer has named: committed with it, or taken."""
        taken = sum(
            int(last or first) - int(first) + 1
            for first, last in re.findall(r" took rounds? (\d+)(?: to (\d+))?: ", self.output)
        )
        return self.output.count(" committed: ") + taken

    def wait_for_rounds(self, count: int, limit_s: float) -> None:
        """Wait until a peer has said so of this many rounds."""
        self._wait(lambda: self.rounds >= count, limit_s, f"not {count} rounds")

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        try:
            wait_until(condition, limit_s)
        except AssertionError as error:
            said = f"{self.block.place}: {what}\n{self.output[-3000:]}"
            raise AssertionError(said) from error

    def interrupt(self) -> None:
        """Ctrl-C: to the whole foreground group, as a terminal sends it."""
        self._person.transcript.add(self._person.name, f"^C ({self.block.text.split()[1]})")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def ended(self, limit_s: float = LEAVE_LIMIT_S) -> int:
        """Wait for its end; the exit code."""
        try:
            wait_until(lambda: not self.runs, limit_s)
        finally:
            self._person.transcript.add(self._person.name, "\n".join(self.output.splitlines()[-3:]))
        return self._process.returncode


class Person:
    """Somebody with a machine of their own, a home folder and a copy of this repository.

    The one of host 0 has the operator's `guide`, others the volunteer's. `checkout` has what the
    repository has of the files that the guides name. `dilocox` is on their path, as after the
    guides' installation.
    """

    def __init__(self, host: int, links: Links, folder: Path, transcript: Transcript):
        self.host, self.links, self.transcript = host, links, transcript
        self.guide = "volunteer" if host else "operator"
        self.name = f"volunteer-{host}" if host else "operator"
        self.folder = folder / self.name
        self.checkout = self.folder / "dilocox"
        home = self.folder / "home"
        for each in (self.checkout, home):
            each.mkdir(parents=True)
        root = Path(__file__).resolve().parents[2]
        for part in ("docs", "docker"):
            shutil.copytree(root / part, self.checkout / part)
        self.terminals: list[Terminal] = []
        self._family = Family()
        # sockets must have short paths, and pytest's are long
        self._temporary = Path(tempfile.mkdtemp(prefix="you-", dir="/tmp"))
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("DILOCOX_")}
        self.environment = inherited | {
            "HOME": str(home),
            "TMPDIR": str(self._temporary),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",  # the cores are few, and the machines share them
            TAG: self._family.tag,
        }

    def type(self, block: Block, values: Mapping[str, str], limit_s: float) -> Terminal:
        """Type a block into a new terminal and wait for what the guide says comes of it."""
        terminal = Terminal(self, block, values)
        self.terminals.append(terminal)
        terminal.wait(limit_s)
        self._family.alive()
        return terminal

    def ask(self, url: str) -> bytes:
        """What a server answers to this machine, as its browser would get it."""
        command = [sys.executable, "-SEc", _ASK, url]
        done = subprocess.run(
            self.links.command(self.host, command),
            capture_output=True,
            timeout=ASK_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{url}: {done.stderr.decode(errors='replace').splitlines()[-1:]}")
        return done.stdout

    def left(self) -> list[str]:
        """What is still there of everything that this person has started."""
        return self._family.left()

    def close(self) -> None:
        """For the end of a test, however it went."""
        send_signal(self._family.alive(), signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._family.alive(), GONE_LIMIT_S)
        self._family.remove()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _some(output: str) -> str:
    lines = output.splitlines()
    left_out = len(lines) - MAX_SHOWN_LINES
    if left_out <= 0:
        return output
    return "\n".join([*lines[:MAX_SHOWN_LINES], f"({left_out} more lines)"])
