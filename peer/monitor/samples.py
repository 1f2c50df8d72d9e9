"""What the model writes after one prompt as it gets better, and how large it is: by quiet children.

`dilocox generate` fetches the newest anchors, continues the operator's prompt and ends, and its
memory with it. It runs at the lowest priority, in one thread, not for longer than a deadline, and
then none does for so long that all of them together take a small share of one processor.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.peer.monitor.history import thin_out
from dilocox.peer.os_process import Child, start_process

logger = logging.getLogger(__name__)

SHARE = 0.05  # of one processor
FIRST_S = 20.0  # a monitor that has just started has other things to do
LIMIT_S = 900.0  # of one child
LEAVE_LIMIT_S = 10.0
MAX_KEPT = 64
MAX_TEXT = 4000  # letters of an answer
QUIET = ("nice", "-n", "19", sys.executable)
SIZE = """import json, math, sys
from dilocox.pipeline.stage import parameter_shapes
model, stages = json.loads(sys.argv[1]), int(sys.argv[2])
print(sum(math.prod(s) for n in range(stages) for _, s in parameter_shapes(model, stages, n)))"""


@dataclass(frozen=True)
class ModelSample:
    """Of weights of this round or a later one. at: seconds since the epoch."""

    round: int
    tokens: int
    at: float
    prompt: str
    text: str


@dataclass(kw_only=True)
class Kept:
    """What is kept. rows: by round. parameters: of the model, None while nobody counted them."""

    rows: dict[int, ModelSample] = field(default_factory=dict[int, ModelSample])
    parameters: int | None = None


_FILE = TypeAdapter(Kept)


class Sampler:
    """Asks now and then. All calls in the monitor's thread; none of them waits but `close`."""

    def __init__(
        self,
        invite: str,
        folder: Path,
        run: str,
        *,
        python: Sequence[str] = QUIET,
        share: float = SHARE,
        first_s: float = FIRST_S,
    ):
        """folder: for what was written, and the child's output. python: runs the children.
        first_s: after which the first one starts.
        """
        self._invite, self._python, self._share = invite, python, share
        self._file = folder / f"{run}-samples.json"
        self._output = folder / f"{run}-sample.log"
        self._child: Child | None = None
        self._asked: tuple[int, int, float, str] | None = None  # None: it counts parameters
        self._began = time.monotonic()
        self._next = self._began + first_s
        try:
            self.kept = _FILE.validate_json(self._file.read_bytes())
        except (OSError, ValueError):
            self.kept = Kept()

    def turn(self, manifest: Manifest, number: int | None, tokens: int, now: float) -> None:
        """Take what a child has done, start the next one when it is time.

        number, tokens: newest round of stage 0, and of its chain. now: seconds since the epoch.
        """
        if self._child is not None:
            self._look(self._child)
            return
        if time.monotonic() < self._next:
            return
        command = self._next_command(manifest, number, tokens, now)
        if command is None:
            return
        self._began = time.monotonic()
        try:
            self._child = start_process(
                (*self._python, *command), self._output, env={"OMP_NUM_THREADS": "1"}
            )
        except OSError as error:
            self._rest(0.0)
            logger.warning("no sample of the model: %s", error)

    def _next_command(
        self, manifest: Manifest, number: int | None, tokens: int, now: float
    ) -> tuple[str, ...] | None:
        spec = manifest.samples
        if self.kept.parameters is None:
            self._asked = None
            return "-c", SIZE, json.dumps(manifest.model), str(manifest.stages)
        if not spec.prompt or number is None or not self._is_due(manifest, number):
            return None
        self._asked = (number, tokens, now, spec.prompt)
        words = ("--tokens", str(spec.tokens), "--seed", "0", "--log-level", "error")
        return "-m", "dilocox", "generate", *words, "--", self._invite, spec.prompt

    def rows(self, prompt: str) -> list[ModelSample]:
        """Those of this prompt, the newest first."""
        return [
            row for _, row in sorted(self.kept.rows.items(), reverse=True) if row.prompt == prompt
        ]

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait(LEAVE_LIMIT_S)

    def _is_due(self, manifest: Manifest, number: int) -> bool:
        # what the operator set aside is forgotten
        self.kept.rows = {n: row for n, row in self.kept.rows.items() if n <= number}
        newest = next(iter(self.rows(manifest.samples.prompt)), None)
        every = 1 if manifest.operation.state == "ended" else manifest.samples.every
        return newest is None or number >= newest.round + every

    def _look(self, child: Child) -> None:
        took = time.monotonic() - self._began
        if child.returncode is None:
            if took > LIMIT_S + LEAVE_LIMIT_S:
                child.wait(0)
            elif took > LIMIT_S:
                child.terminate()
            return
        self._child = None
        self._rest(took)
        if child.returncode:
            logger.info("no sample of the model: %s", child.last_line())
            return
        with self._output.open(encoding="utf-8", errors="replace") as file:
            said = file.read(4 * MAX_TEXT)
        try:
            self._take(said)
            write_atomically(self._file, _FILE.dump_json(self.kept), durable=False)
        except (EnvironmentFault, ValueError) as error:
            logger.warning("a sample of the model is not kept: %s", error)

    def _rest(self, took: float) -> None:
        self._next = time.monotonic() + max(took, 1.0) * (1 / self._share - 1)

    def _take(self, said: str) -> None:
        if self._asked is None:
            self.kept.parameters = int(said.split()[-1])
            self._next = time.monotonic()
            return
        number, tokens, at, prompt = self._asked
        text = said.partition(prompt)[2]  # what libraries complain of stands before it
        seen = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:MAX_TEXT])
        self.kept.rows[number] = ModelSample(number, tokens, at, prompt, seen.rstrip())
        thin_out(self.kept.rows, MAX_KEPT)
