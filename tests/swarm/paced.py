"""`dilocox` with inner steps that take at least a given time: a slower machine, without the load.

    python paced.py SECONDS peer INVITE ...

What this peer's stage lacks of that time is slept at the end of its inner step, so peers of
different speed can share two cores; the other stages of its replica wait for it as for a slow
machine. Nothing of the product knows of it.
"""

from __future__ import annotations

import os
import sys
import time

from torch import Tensor

# As peer/os_process.py does, but before hivemind is imported below.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")

from dilocox.peer import cli
from dilocox.pipeline.stage_worker import StageWorker


def pace(step_s: float) -> None:
    """Let every inner step of a stage last at least so long, from its first microbatch on."""
    fast_feed, fast_go = StageWorker.feed, StageWorker.go
    began_at = 0.0

    def feed(self: StageWorker, microbatch: int, inputs: Tensor | None, windows: Tensor) -> None:
        nonlocal began_at
        if self.idle:
            began_at = time.monotonic()
        fast_feed(self, microbatch, inputs, windows)

    def go(self: StageWorker, factor: float, learning_rate: float) -> bool:
        taken = fast_go(self, factor, learning_rate)
        time.sleep(max(0.0, began_at + step_s - time.monotonic()))
        return taken

    StageWorker.feed, StageWorker.go = feed, go


def main() -> None:
    """Take the first argument away, slow the stage's inner steps, and go on as `dilocox`."""
    pace(float(sys.argv.pop(1)))
    cli.main()


if __name__ == "__main__":
    main()
