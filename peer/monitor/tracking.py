"""`dilocox monitor --track FOLDER`: the run's rounds as event files of TensorBoard.

A round is written once, also when the monitor starts again: `tracked.json` beside the event files
says how far it has come. It is written when three more have come, as its validation loss follows
it. Rounds that the operator goes back behind are purged, as TensorBoard calls it.

tensorboard is an extra (`pip install 'dilocox[tracking]'`): only this file knows it.
"""

# torch.utils.tensorboard carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import make_folder, write_atomically
from dilocox.peer.chain.round_history import FIRST, HistoryRow
from dilocox.peer.monitor.curve import WHOLE, Curve, Point

NOTE = "tracked.json"
SETTLED = 3  # rounds after which no more is expected to be known of one
SCALARS = {
    "loss/train": "train",
    "loss/validation": "validation",
    "tokens/total": "tokens",
    "tokens/per_second": "tokens_per_s",
    "swarm/peers": "peers",
}
"""Attributes of a point by the tags that TensorBoard shows them under."""


class Tracker:
    """Writes into one folder, of one run; all calls in one thread."""

    def __init__(self, folder: Path, run: str):
        """Raises InvalidInput where tensorboard is missing or the folder is of another run."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidInput(
                "--track writes with tensorboard, which is not installed: pip install "
                "'dilocox[tracking]'"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._run = run
        self._written, self._purged = FIRST, 0
        make_folder(folder)
        try:
            note = json.loads((folder / NOTE).read_text())
            of_run, self._written, self._purged = note["run"], note["round"], note["purged"]
            if of_run != run:
                raise InvalidInput(
                    f"--track {folder}: it has rounds of run {of_run}; name another folder"
                )
        except FileNotFoundError:
            pass
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"--track {folder}: {NOTE} in it is damaged; remove it, and the event files beside "
                "it, to write them anew"
            ) from error
        self._writer = SummaryWriter(str(folder))
        self._open: dict[int, Point] = {}
        self._asked = False  # bootstraps, for the rounds before those that were seen

    def take(
        self,
        curve: Curve,
        told: Sequence[HistoryRow] | None,
        *,
        set_aside: tuple[int, int] = (0, 0),
        ended: bool = False,
    ) -> None:
        """Write what is settled, once bootstraps were asked. Raises EnvironmentFault.

        told: what they have just answered, None while they have not. set_aside: the first number of
        the rounds that the last rollback set aside, and the one after the last. ended: the run has.
        """
        self._asked |= told is not None
        first, after = set_aside
        if after > self._purged:
            self._open = {number: each for number, each in self._open.items() if number < first}
            self._writer.close()
            self._writer = self._make(str(self._folder), purge_step=first)
            self._written, self._purged = min(self._written, first - 1), after
            self._note()
        newest = curve.newest("tokens")
        if newest is None or not self._asked:
            return
        last = int(newest[0])
        self._open |= {row.round: Point.of(row) for row in told or ()}
        # older points of the curve may be several rounds
        seen = (
            p for p in curve.points.values() if p.round > last - WHOLE or p.round not in self._open
        )
        self._open |= {point.round: point for point in seen}
        settled = last if ended else last - SETTLED
        points = [self._open[number] for number in sorted(self._open) if number <= settled]
        self._open = {number: each for number, each in self._open.items() if number > settled}
        points = [each for each in points if each.round > self._written and each.tokens is not None]
        for point in points:
            for tag, name in SCALARS.items():
                if (value := getattr(point, name)) is not None:
                    self._writer.add_scalar(tag, value, point.round, walltime=point.at)
        if points:
            self._written = points[-1].round
            self._writer.flush()
            self._note()

    def close(self) -> None:
        self._writer.close()

    def _note(self) -> None:
        note = {"run": self._run, "round": self._written, "purged": self._purged}
        write_atomically(self._folder / NOTE, json.dumps(note).encode(), durable=False)
