"""Log lines for people: one format, and hivemind's own chatter kept down."""

from __future__ import annotations

import logging
import os
import sys

from dilocox.dht.errors import InvalidInput

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str) -> None:
    """Log to standard error; raises InvalidInput for an unknown level.

    Call it before hivemind is imported: it reads its level from the environment.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--log-level {level}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("dilocox")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # hivemind prints a traceback for every round that finds no group; what matters we say ourselves
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if level == "debug" else "CRITICAL")
