"""Log lines for people: one format, and hivemind's own chatter kept down.

On a terminal a line takes the place of the progress line (report.py).
"""

from __future__ import annotations

import logging
import os
import sys

from dilocox.dht.errors import InvalidInput

LEVELS = ("debug", "info", "warning", "error")
CLEAR_LINE = "\r\x1b[K"  # what stands in this line of the terminal goes


def set_up_logging(level: str) -> None:
    """Log to standard error; raises InvalidInput for an unknown level.

    Call it before hivemind is imported: it reads its level from the environment.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--log-level {level}: choose one of {', '.join(LEVELS)}")
    logging.addLevelName(logging.WARNING, "WARN")  # as hivemind does where it is imported
    handler = logging.StreamHandler(sys.stderr)
    line = f"{line_start()}%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    root = logging.getLogger("dilocox")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # hivemind prints a traceback for every round that finds no group; what matters we say ourselves
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if level == "debug" else "CRITICAL")


def line_start() -> str:
    """What a line on standard error begins with: whatever thread or process writes it, a peer's
    progress line may stand there.
    """
    return CLEAR_LINE if sys.stderr.isatty() else ""
