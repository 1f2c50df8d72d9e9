"""The run's rounds as other programs' files: `dilocox monitor --track FOLDER` writes event files of
TensorBoard, `--track-wandb FOLDER` the offline files of wandb, which `wandb sync` uploads. Apart
from monitor.py: the only place that knows those programs.

A round is written once, also when the monitor starts again: `tracked.json` beside the files says
how far it has come. It is written when three more have come, as its validation loss follows it.
Rounds that the operator goes back behind are purged, as TensorBoard calls it; wandb keeps them.

tensorboard and wandb are extras: only this file knows them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import make_folder, write_atomically
from dilocox.peer.chain.round_history import FIRST, HistoryRow
from dilocox.peer.monitor.history import WHOLE, Point, SwarmHistory

NOTE = "tracked.json"
SETTLED = 3  # rounds after which no more is expected to be known of one
SCALARS = {
    "loss/train": "train",
    "loss/validation": "validation",
    "tokens/total": "tokens",
    "tokens/per_second": "tokens_per_s",
    "swarm/peers": "peers",
}
"""Attributes of a point by the tags that they are shown under."""


class TensorBoard:
    """Event files in a folder."""

    option = "--track"

    def __init__(self, folder: Path, run: str):
        """Raises InvalidInput where tensorboard is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidInput(
                "--track writes with tensorboard, which is not installed: pip install "
                "'dilocox[tracking]'"
            ) from error
        self._make: Any = partial(SummaryWriter, str(folder))
        self._writer = self._make()

    def add(self, number: int, at: float | None, values: Mapping[str, float]) -> None:
        """A round's figures. at: seconds since the epoch, if known."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, number, walltime=at)

    def purge(self, first: int) -> None:
        """Hide the rounds from this one on, of those that are there."""
        self.close()
        self._writer = self._make(purge_step=first)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Offline runs in a folder, one each time that a monitor starts, all with the id of the run."""

    option = "--track-wandb"

    def __init__(self, folder: Path, run: str):
        """Raises InvalidInput where wandb is missing."""
        if find_spec("wandb") is None:
            raise InvalidInput(
                "--track-wandb writes with wandb, which is not installed: pip install "
                "'dilocox[tracking]'"
            )
        self._folder, self._id = folder, run
        self._run: Any = None  # begun with the first round: it has threads, and we fork before

    def add(self, number: int, at: float | None, values: Mapping[str, float]) -> None:
        """A round's figures; the one before the first record is step 0. Raises EnvironmentFault."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would call home
        import wandb

        try:
            if self._run is None:
                quiet = wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                )
                self._run = wandb.init(
                    mode="offline",
                    project="dilocox",
                    id=self._id,
                    name=self._id[:12],
                    dir=self._folder,
                    resume="allow",
                    settings=quiet,
                )
                self._run.define_metric("*", step_metric="round")
            when = {} if at is None else {"_timestamp": at}
            self._run.log({"round": number, **when, **values}, step=number + 1)
        except wandb.Error as error:
            raise EnvironmentFault(f"wandb wrote nothing: {error}") from error

    def purge(self, first: int) -> None:
        """What is written stays: rounds that come now have higher numbers."""

    def flush(self) -> None:
        """It does so by itself."""

    def close(self) -> None:
        if self._run is not None:
            import wandb

            self._run.finish()
            wandb.teardown()  # its other process, which a monitor that starts again would keep


class Tracker:
    """Has the rounds of one run written into one folder, as `option` asks for; all calls in one
    thread.
    """

    def __init__(self, folder: Path, run: str, kind: type[TensorBoard | Wandb]):
        """Raises InvalidInput where the folder is of another run, EnvironmentFault where nothing
        can be written into it.
        """
        self.option = kind.option
        self._folder = folder
        self._run = run
        self._written, self._purged = FIRST, 0
        make_folder(folder)
        try:
            note = json.loads((folder / NOTE).read_text())
            of_run, self._written, self._purged = note["run"], note["round"], note["purged"]
            if of_run != run:
                raise InvalidInput(
                    f"{self.option} {folder}: it has rounds of run {of_run}; name another folder"
                )
        except FileNotFoundError:
            pass
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"{self.option} {folder}: {NOTE} in it is damaged; remove it, and the files beside "
                "it, to write them anew"
            ) from error
        self._writer = kind(folder, run)
        self._open: dict[int, Point] = {}
        self._asked = False  # bootstraps, for the rounds before those that were seen

    def take(
        self, history: SwarmHistory, told: Sequence[HistoryRow] | None, *, ended: bool = False
    ) -> None:
        """Write what is settled, once bootstraps were asked. Raises EnvironmentFault.

        told: what they have just answered, None while they have not. ended: the run has.
        """
        self._asked |= told is not None
        curve, (first, after) = history.curve, history.set_aside
        if after > self._purged:
            self._open = {number: each for number, each in self._open.items() if number < first}
            self._writer.purge(first)
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
            figures = {tag: getattr(point, name) for tag, name in SCALARS.items()}
            known = {tag: value for tag, value in figures.items() if value is not None}
            self._writer.add(point.round, point.at, known)
        if points:
            self._written = points[-1].round
            self._writer.flush()
            self._note()

    def close(self) -> None:
        self._writer.close()

    def _note(self) -> None:
        note = {"run": self._run, "round": self._written, "purged": self._purged}
        write_atomically(self._folder / NOTE, json.dumps(note).encode(), durable=False)
