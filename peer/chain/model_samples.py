"""What the model writes after one prompt as it gets better: by quiet children of the operator's
bootstrap. Apart from the command, because it has processes of its own.

`dilocox generate` fetches the newest anchors, continues the operator's prompt and ends, and its
memory with it. It runs at a low priority, in one thread, not for longer than a deadline, and then
none does for so long that all of them together take a small share of one processor: of its seconds,
not of the time that a child waits on a busy machine for its turn. It asks the archive beside it
before volunteers, whose lines have better to carry. One that fails is not tried again before the
next answer would be due; none is after the finished model's, which is tried again each hour. Where
memory is short the child is what the system ends, and not the bootstrap.
"""

from __future__ import annotations

import logging
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import printable
from dilocox.peer.chain.round_history import MAX_LETTERS, ModelSample, RoundHistory
from dilocox.peer.os_process import Child, start_process

logger = logging.getLogger(__name__)

SHARE = 0.05  # of one processor
LIMIT_S = 900.0  # of one child
LEAVE_LIMIT_S = 10.0
LAST_AGAIN_S = 3600.0  # until the question for the finished model's answer that failed comes again
# on a machine whose processors are all taken a tenth of one; at 19 it would be a hundredth, and no
# child would end within its deadline
EXPENDABLE = '{ echo 1000 > /proc/self/oom_score_adj; } 2>/dev/null; exec "$0" "$@"'
QUIET = ("nice", "-n", "10", "sh", "-c", EXPENDABLE, sys.executable)


class Sampler:
    """Asks now and then. All calls in the bootstrap's thread."""

    def __init__(
        self,
        invite: str,
        output: Path,
        history: RoundHistory,
        python: Sequence[str] = QUIET,
        share: float = SHARE,
    ):
        """output: a file for what a child says. history: where it is kept. python: runs the
        children.
        """
        self._invite, self._output, self._history = invite, output, history
        self._python, self._share = python, share
        self._child: Child | None = None
        self._asked: ModelSample | None = None  # last, whatever came of it
        self._rest(1.0)  # what has just started has other things to do

    def turn(self, manifest: Manifest, now: float) -> None:
        """Take what a child has done into the history, start the next one when it is time."""
        try:
            if self._child is not None:
                self._look(self._child)
            elif time.monotonic() >= self._next:
                self._ask(manifest, now)
        except (OSError, EnvironmentFault) as error:
            self._rest(1.0)
            logger.warning("no sample of the model: %s", error)
        except Exception:  # the bootstrap is to live on
            self._rest(1.0)
            logger.exception("no sample of the model")

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(LEAVE_LIMIT_S)
            finally:
                self._place.cleanup()

    def _ask(self, manifest: Manifest, now: float) -> None:
        spec, newest = manifest.samples, self._history.newest(1)
        if not spec.prompt or not newest or (row := newest[0]).round < 0:
            return
        ended = manifest.ended_at(row.tokens)
        every = 1 if ended else spec.every
        # no round comes after the last one, with which its question would come again
        before = self._before(spec.prompt, now - LAST_AGAIN_S if ended else 0.0)
        if any(row.round < each.round + every for each in before):
            return
        self._asked = ModelSample(row.round, row.rules, row.tokens, round(now, 2), spec.prompt)
        words = ("--tokens", str(spec.tokens), "--seed", "0", "--log-level", "error")
        words = ("--archive-first", *words)
        command = ("-m", "dilocox", "generate", *words, "--", self._invite, spec.prompt)
        self._began, self._used_s = time.monotonic(), _children_s()
        # what it downloads goes even if it is killed; a short path, for p2pd's sockets
        self._place = tempfile.TemporaryDirectory(prefix="dilocox-")
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": self._place.name}
        self._child = start_process((*self._python, *command), self._output, env=env)

    def _before(self, prompt: str, since: float) -> list[ModelSample]:
        """The last answer to a prompt, and the last question since then, of rounds that count."""
        kept, asked = self._history.newest_sample(prompt), self._asked
        found = [] if kept is None else [kept]
        if asked is None or asked.prompt != prompt or asked.at < since:
            return found
        return [*found, asked] if self._history.counts(asked.rules, asked.round) else found

    def _look(self, child: Child) -> None:
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
        asked = self._asked
        assert asked is not None  # who has a child has asked
        _, prompt, text = said.partition(f"\n{asked.prompt}")  # behind lines for a terminal
        if not prompt:
            logger.info("no sample of the model: %s", child.last_line())
            return
        # of a model that has just begun it may be nothing
        seen = printable(text[:MAX_LETTERS], kept="\n").rstrip()
        self._history.keep_sample(asked._replace(text=seen))

    def _rest(self, used_s: float) -> None:
        self._next = time.monotonic() + max(used_s, 1.0) * (1 / self._share - 1)


def _children_s() -> float:
    """Processor seconds of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
