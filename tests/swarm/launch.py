"""Starts any command as `dilocox` starts its own: it does not outlive whoever started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dilocox.peer.subprocesses import PR_SET_PDEATHSIG, PREFIX, Child


def launch(command: Sequence[str], log: Path, *, env: Mapping[str, str]) -> Child:
    """Start it in a session of its own, with its output in the log file; SIGTERM when we die.

    `env` comes on top of ours, of which the options of `dilocox` are left out.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was too late to be told
            os._exit(1)

    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - looked up before the fork
            env={**inherited, **env},
        )
    return Child(process, log)
