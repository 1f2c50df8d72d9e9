"""What a process starts ends with it, also where it ends before the kernel is asked for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.dht.processes import is_alive, wait_until

STARTS = """
import signal, subprocess, sys, time
from dilocox.dht.parent_death import dying_with_parent
child = subprocess.Popen(["sleep", "600"], preexec_fn=dying_with_parent(signal.SIGKILL))
print(child.pid, flush=True)
time.sleep(600)
"""
# of one that computes for a benchmark
POOL = """
import os, time
from benchmarks.pool import pool
if __name__ == "__main__":
    with pool(1) as processes:
        print(processes.submit(os.getpid).result(), flush=True)
        processes.submit(time.sleep, 600)
        time.sleep(600)
"""
# of a process whose parent is another one than that which was to start it
TOO_LATE = """
import os, signal
from dilocox.dht.parent_death import dying_with_parent
be_told = dying_with_parent(signal.SIGKILL)
between = os.fork()
if between == 0:
    late = os.fork()
    if late == 0:
        be_told()
        os._exit(7)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]))
print(os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]))
"""


@pytest.mark.parametrize("starts", [STARTS, POOL])
def test_a_program_ends_when_its_parent_is_killed(starts: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30.0)
    wait_until(lambda: not is_alive(child), 30.0)  # killed, but the kernel may take its time


def test_a_program_that_starts_when_its_parent_is_gone_ends_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TOO_LATE], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "1\n"
