"""`dilocox` whose passes take a given time, asleep for most of it, and that logs its inner steps.

    python paced_passes.py PASS_S FILE peer INVITE ...

A forward and a backward last at least PASS_S together, so that several stages share two cores
without slowing each other and links are all that differs between two runs. To the peer it is time
spent computing. Each inner step is a line in FILE: monotonic seconds, and all seconds spent
computing so far. Nothing of the product knows of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

# As peer/os_process.py does, but before hivemind is imported below.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")

from dilocox.peer import cli
from dilocox.pipeline.stage import StageModule
from dilocox.pipeline.stage_worker import (
    Smoothed,
    StageOptimizer,
    StagePasses,
    StageWorker,
    Stopwatch,
)

FORWARD_SHARE = 1 / 3  # of a forward and a backward together


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One line of the file: when an inner step ended, and what the stage had computed by then."""

    at_s: float
    computing_s: float


def paced_program(pass_s: float, file: Path) -> tuple[str, ...]:
    """What python runs for a peer that is paced, and logs to the file."""
    return __file__, str(pass_s), str(file)


def logged_steps(file: Path) -> list[LoggedStep]:
    """All whole lines so far."""
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [LoggedStep(**json.loads(line)) for line in lines]


class _PacedWatch(Stopwatch):
    """A stopwatch under which everything that is smoothed takes at least its time."""

    def __init__(self, watch: Stopwatch, least_s: dict[Smoothed, float]):
        self.__dict__.update(watch.__dict__)
        self._least_s = least_s

    @contextlib.contextmanager
    def running(self, smoothed: Smoothed | None = None) -> Generator[None]:
        with super().running(smoothed):
            end = time.monotonic() + (self._least_s[smoothed] if smoothed else 0.0)
            yield
            time.sleep(max(0.0, end - time.monotonic()))


def pace(pass_s: float) -> None:
    """Let a forward and a backward last at least so long together."""
    fast_init = StagePasses.__init__

    def init(
        self: StagePasses,
        stage: StageModule,
        optimizer: StageOptimizer,
        *,
        recompute: bool,
        document_end: int | None = None,
        logits_at_once: int | None = None,
    ) -> None:
        fast_init(
            self,
            stage,
            optimizer,
            recompute=recompute,
            document_end=document_end,
            logits_at_once=logits_at_once,
        )
        forward_s = FORWARD_SHARE * pass_s
        # the one pass of the last stage does both, and counts as a backward
        backward_s = pass_s if stage.is_last else pass_s - forward_s
        least_s = {self.forward_s: forward_s, self.backward_s: backward_s}
        self.watch = _PacedWatch(self.watch, least_s)

    StagePasses.__init__ = init


def log_steps(file: Path) -> None:
    """Write a line at every inner step's end."""
    silent_go = StageWorker.go

    def go(self: StageWorker, factor: float, learning_rate: float) -> bool:
        taken = silent_go(self, factor, learning_rate)
        line = json.dumps({"at_s": time.monotonic(), "computing_s": self.computing_s})
        with file.open("a") as log:
            log.write(line + "\n")
        return taken

    StageWorker.go = go


def main() -> None:
    """Take the first two arguments away, pace and log, and go on as `dilocox`."""
    # Who sleeps most of the time may go first. Niceness counts only within a session's group.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-10")
    pass_s, file = sys.argv[1:3]
    del sys.argv[1:3]
    pace(float(pass_s))
    log_steps(Path(file))
    cli.main()


if __name__ == "__main__":
    main()
