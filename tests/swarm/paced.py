"""`dilocox` with inner steps that take at least a given time: a slower machine, without the load.

    python paced.py SECONDS peer INVITE ...

The time that a step lacks is slept, so peers of different speed can share two cores. Nothing of
the product knows of it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

# As peer/logs.py does, but before hivemind is imported below.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")

from dilocox.peer import cli, trainer


def main() -> None:
    """Take the first argument away, slow the training loop's step, and go on as `dilocox`."""
    step_s = float(sys.argv.pop(1))
    fast_step = trainer.train_step

    def paced_step(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        result = fast_step(*arguments, **options)
        time.sleep(max(0.0, began + step_s - time.monotonic()))
        return result

    trainer.train_step = paced_step
    cli.main()


if __name__ == "__main__":
    main()
