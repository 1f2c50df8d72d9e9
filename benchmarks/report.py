"""What every benchmark leaves behind: tables on the terminal and, with --out, CSV files and plots.

    report = Report.parse(parser(__doc__), "links")   # takes --quick and --out
    report.table([Column("links"), Column("tokens/s", ",.0f")], [("10 Mbit/s", 6150.3)])
    report.plot("Mbit/s", "tokens/s", {"ours": [(10, 6150), (100, 6090)]})

The first line that is printed names the machine and the date. A CSV has the numbers as they are,
the terminal as their column rounds them. Plots need matplotlib, from the dev extra.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dilocox.peer.os_process import wide_console

GB = 1 << 30
SPREAD = "±"  # the name of a column that says how far the one before it is from run to run


@dataclass(frozen=True)
class Column:
    """A heading, and how its numbers are shown: a format as of `format`, or what makes the text."""

    name: str
    form: str | Callable[[Any], str] = ""

    def shown(self, value: Any) -> str:
        """A cell's text; nothing is "-"."""
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        return self.form(value) if callable(self.form) else format(value, self.form)


class Report:
    """Prints tables; writes their CSV files and plots into a folder, if there is one."""

    def __init__(self, name: str, out: Path | None = None):
        """name: of the files, without ending. out: their folder, which is made; None: no files."""
        if out is not None and importlib.util.find_spec("matplotlib") is None:
            raise SystemExit(
                "--out draws plots, for which matplotlib is missing: pip install '.[dev]'"
            )
        self.console = wide_console(highlight=False)
        self._name, self._out = name, out
        self._begun = time.monotonic()
        self.console.print(machine())

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser, name: str) -> tuple[Report, argparse.Namespace]:
        """The report and the arguments, which are read here; see `parser`."""
        arguments = parser.parse_args()
        return cls(name, arguments.out), arguments

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        *,
        title: str | None = None,
        part: str = "",
    ) -> None:
        """Print a table, write it as CSV, and draw its numbers: a panel a column, a bar a row.

        title: a line above it. part: distinguishes the file from those of other tables.
        """
        if title:
            self.say(title)  # as rich's own title it would be broken at the table's width
        shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # narrow: it fits into 80
        for index, column in enumerate(columns):
            shown.add_column(column.name, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*(column.shown(cell) for column, cell in zip(columns, row, strict=True)))
        self.console.print(shown)
        names = [column.name for column in columns]
        self.csv(names, rows, part=part)
        self._draw(names, rows, "-".join(filter(None, (part, "table"))))

    def csv(self, names: Sequence[str], rows: Sequence[Sequence[Any]], *, part: str = "") -> None:
        """Write rows as CSV only, where they were printed in another way."""
        if (path := self._path(part, "csv")) is not None:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(names)
                writer.writerows(rows)

    def _draw(self, names: Sequence[str], rows: Sequence[Sequence[Any]], part: str) -> None:
        cells = [[row[place] for row in rows] for place in range(len(names))]
        told = [place for place, each in enumerate(cells) if place and _numbers(each)]
        numbers = [place for place in told if names[place] != SPREAD]
        if not numbers or (path := self._path(part, "svg")) is None:
            return
        from matplotlib.figure import Figure

        words = [place for place in range(len(names)) if place not in told]
        labels = [" ".join(str(row[place]) for place in words) for row in rows]
        figure = Figure(figsize=(4.0 + 2.5 * len(numbers), 1.2 + 0.25 * len(rows)))
        figure.set_layout_engine("constrained")
        panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
        for axes, place in zip(panels, numbers, strict=True):
            spread = cells[place + 1] if names[place + 1 : place + 2] == [SPREAD] else None
            lengths, ends = (
                # what there is no number of, or an infinite one, has no bar
                [cell if cell and math.isfinite(cell) else 0.0 for cell in each or ()]
                for each in (cells[place], spread)
            )
            axes.barh(range(len(rows)), lengths, xerr=ends or None)
            axes.set_xlabel(names[place].strip())
            axes.set_yticks(range(len(rows)), labels)
            axes.grid(alpha=0.3, axis="x")
        panels[0].invert_yaxis()
        figure.savefig(path)

    def plot(
        self,
        x: str,
        y: str,
        lines: Mapping[str, Sequence[tuple[float, float]]],
        *,
        log_x: bool = False,
        log_y: bool = False,
        part: str = "",
    ) -> None:
        """Draw lines of points under their names as SVG, with what the axes are called."""
        if (path := self._path(part, "svg")) is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set(xlabel=x, ylabel=y)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)

    def picture(self, part: str = "") -> Path | None:
        """The file for a picture that a script draws by itself, as SVG; None without --out."""
        return self._path(part, "svg")

    def say(self, line: str) -> None:
        """Print a line beside the tables."""
        self.console.print(line)

    def close(self) -> None:
        """Say how long it took, and what was written where."""
        took = (
            f"{time.monotonic() - self._begun:.0f} s, {time.process_time():.0f} s of them computing"
        )
        self.console.print(took + (f"; files in {self._out}" if self._out else ""))

    def _path(self, part: str, ending: str) -> Path | None:
        if self._out is None:
            return None
        self._out.mkdir(parents=True, exist_ok=True)
        return self._out / f"{'-'.join(filter(None, (self._name, part)))}.{ending}"


def _numbers(cells: Sequence[Any]) -> bool:
    told = [cell for cell in cells if cell is not None]
    return bool(told) and all(isinstance(cell, (int, float)) for cell in told)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the first line of a script's docstring, --quick and --out."""
    made = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="the shortest form, in a minute or two: its figures say nothing",
    )
    made.add_argument("--out", type=Path, help="folder for CSV files and plots")
    return made


def machine() -> str:
    """What the figures were measured on, and when."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} "
        f"cores ({platform.machine()}), {memory:.0f} GB{gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
