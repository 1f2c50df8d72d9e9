"""`dilocox` whose computing thread shows what it does: forward, backward, or between inner steps.

    python shown.py SECONDS FOLDER peer INVITE ...

A fault is to hit a peer in the middle of a forward, and from outside nobody sees one. So each
forward and each backward lasts SECONDS longer, asleep, and a byte in FOLDER says which it is;
`Shown` reads it, and when inner steps were taken. Nothing of the product knows of it.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("waiting", "forward", "backward", "between")
_TIME = struct.Struct("d")


class Shown:
    """What a peer shows of itself in a folder: by every process it started there, and now.

    Attributes:
        steps: seconds since the epoch, of every inner step since the first start; see `look`.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.steps: list[float] = []
        self._read = 0
        self._log = folder / "steps"
        self._log.touch()
        self._byte = _mapped(folder / "phase")

    @property
    def phase(self) -> str:
        """One of PHASES, right now; "between": from an inner step's end to the next forward."""
        return PHASES[self._byte[0]]

    def look(self) -> None:
        """Read the inner steps taken since the last look."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = len(data) - len(data) % _TIME.size
        self.steps += [time_ for (time_,) in _TIME.iter_unpack(data[:whole])]
        self._read += whole


class _Showing:
    """The other side: wraps what computes."""

    def __init__(self, pace_s: float, folder: Path):
        self._pace_s = pace_s
        self._byte = _mapped(folder / "phase")
        self._byte[0] = 0
        self._steps = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND)

    def piece(self, compute: Callable[..., Any], *phases: str) -> Callable[..., Any]:
        """`compute`, in the first of these phases, and paced once in each."""

        def paced(*arguments: Any, **options: Any) -> Any:
            self._pace(phases[0])
            result = compute(*arguments, **options)
            for phase in phases[1:]:
                self._pace(phase)
            self._byte[0] = PHASES.index("waiting")
            return result

        return paced

    def inner_step(self, go: Callable[..., Any]) -> Callable[..., Any]:
        """`go`, which ends an inner step."""

        def paced(*arguments: Any, **options: Any) -> Any:
            result = go(*arguments, **options)
            os.write(self._steps, _TIME.pack(time.time()))
            self._pace("between")
            return result

        return paced

    def _pace(self, phase: str) -> None:
        self._byte[0] = PHASES.index(phase)
        time.sleep(self._pace_s)


def _mapped(path: Path) -> mmap.mmap:
    """One byte that processes share."""
    if not path.exists():
        path.write_bytes(b"\0")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def main() -> None:
    """Take the first two arguments away, wrap what computes, and go on as `dilocox`."""
    # As peer/os_process.py does, but before hivemind is imported below.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    from dilocox.peer import cli
    from dilocox.pipeline.stage_worker import StagePasses, StageWorker

    own = sys.argv[1:3]
    del sys.argv[1:3]
    showing = _Showing(float(own[0]), Path(own[1]))
    StagePasses.forward = showing.piece(StagePasses.forward, "forward")
    StagePasses.backward = showing.piece(StagePasses.backward, "backward")
    StagePasses.forward_backward = showing.piece(
        StagePasses.forward_backward, "forward", "backward"
    )
    StageWorker.go = showing.inner_step(StageWorker.go)
    execv = os.execv

    def execv_shown(path: str, arguments: list[str]) -> None:
        """A peer that starts itself again, as `python -m dilocox ...`, is still shown."""
        execv(path, [path, __file__, *own, *arguments[3:]])

    os.execv = execv_shown  # pyright: ignore[reportAttributeAccessIssue]
    cli.main()


if __name__ == "__main__":
    main()
