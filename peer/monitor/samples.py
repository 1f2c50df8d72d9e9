"""What the model writes after one prompt as it gets better, and how large it is: by quiet children.
Apart from monitor.py: it has processes of its own.

`dilocox generate` fetches the newest anchors, continues the operator's prompt and ends, and its
memory with it. It runs at a low priority, in one thread, not for longer than a deadline, and then
none does for so long that all of them together take a small share of one processor: of its seconds,
not of the time that a child waits on a busy machine for its turn.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dilocox.dht.manifest import Manifest
from dilocox.peer.monitor.history import ModelSample, SwarmHistory
from dilocox.peer.os_process import Child, start_process

logger = logging.getLogger(__name__)

SHARE = 0.05  # of one processor
LIMIT_S = 900.0  # of one child
LEAVE_LIMIT_S = 10.0
MAX_KEPT = 64
MAX_LETTERS = 4000  # of an answer
# on a machine whose processors are all taken a tenth of one; at 19 it would be a hundredth, and no
# child would end within its deadline
QUIET = ("nice", "-n", "10", sys.executable)
SIZE = """import json, math, sys
from dilocox.pipeline.stage import parameter_shapes
model, stages = json.loads(sys.argv[1]), int(sys.argv[2])
print(sum(math.prod(s) for n in range(stages) for _, s in parameter_shapes(model, stages, n)))"""


class Sampler:
    """Asks now and then. All calls in the monitor's thread."""

    def __init__(
        self, invite: str, output: Path, python: Sequence[str] = QUIET, share: float = SHARE
    ):
        """output: a file for what a child says. python: runs the children."""
        self._invite, self._output, self._python, self._share = invite, output, python, share
        self._child: Child | None = None
        self._asked: ModelSample | None = None  # None: parameters are counted
        self._rest(1.0)  # a monitor that has just started has other things to do

    def turn(self, manifest: Manifest, history: SwarmHistory, now: float) -> None:
        """Take what a child has done into the history, start the next one when it is time."""
        try:
            if self._child is not None:
                self._look(self._child, history)
            elif time.monotonic() >= self._next:
                self._ask(manifest, history, now)
        except (OSError, ValueError) as error:
            self._rest(1.0)
            logger.warning("no sample of the model: %s", error)

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait(LEAVE_LIMIT_S)

    def _ask(self, manifest: Manifest, history: SwarmHistory, now: float) -> None:
        spec, tokens = manifest.samples, history.stages[0].chain_tokens
        head, rows = history.stages[0].head, history.samples_of(spec.prompt)
        every = 1 if manifest.operation.state == "ended" else spec.every
        if history.parameters is None:
            self._asked = None
            command = ("-c", SIZE, json.dumps(manifest.model), str(manifest.stages))
        elif spec.prompt and head and (not rows or head.round >= rows[0].round + every):
            self._asked = ModelSample(head.round, tokens, now, spec.prompt)
            words = ("--tokens", str(spec.tokens), "--seed", "0", "--log-level", "error")
            command = ("-m", "dilocox", "generate", *words, "--", self._invite, spec.prompt)
        else:
            return
        self._began, self._used_s = time.monotonic(), _children_s()
        env = {"OMP_NUM_THREADS": "1"}
        self._child = start_process((*self._python, *command), self._output, env=env)

    def _look(self, child: Child, history: SwarmHistory) -> None:
        if child.returncode is None and time.monotonic() - self._began <= LIMIT_S:
            return
        self.close()
        self._child = None
        self._rest(_children_s() - self._used_s)
        if child.returncode:
            logger.info("no sample of the model: %s", child.last_line())
            return
        with self._output.open(encoding="utf-8", errors="replace") as file:
            said = "\n" + file.read(4 * MAX_LETTERS)
        if (asked := self._asked) is None:
            history.parameters, self._next = int(said.split()[-1]), 0.0  # once for good
            return
        text = said.partition(f"\n{asked.prompt}")[2][:MAX_LETTERS]  # behind lines for a terminal
        seen = "".join(c if c.isprintable() or c == "\n" else " " for c in text).rstrip()
        history.samples_told[asked.round] = replace(asked, text=seen)
        if len(told := history.samples_told) > MAX_KEPT:  # every second one of the older half goes
            for number in sorted(told)[1 : len(told) // 2 : 2]:
                del told[number]

    def _rest(self, used_s: float) -> None:
        self._next = time.monotonic() + max(used_s, 1.0) * (1 / self._share - 1)


def _children_s() -> float:
    """Processor seconds of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
