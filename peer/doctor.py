"""The command `dilocox doctor`: what of this machine fits a run, what does not, and what to do."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dilocox import __version__
from dilocox.dht.invite import Invite
from dilocox.peer.doctor_checks import Check, Status
from dilocox.peer.doctor_exam import DoctorOptions, Examination, Part
from dilocox.peer.doctor_run_checks import rounded
from dilocox.peer.files import write_atomically
from dilocox.peer.signals import StopSignal

__all__ = ["DoctorOptions", "run_doctor"]

STOPPED = 130  # before it was done
COLOURS: dict[Status, str] = {
    "ok": "green",
    "warning": "yellow",
    "failed": "bold red",
    "skipped": "dim",
}
MARK_WIDTH, NAME_WIDTH = 9, 11
MAX_WIDTH = 120


def run_doctor(options: DoctorOptions) -> int:
    """Examine, show, and say whether this machine could take part; the exit code."""
    with StopSignal():
        checks = _shown(options) if options.json_file is None else _written(options)
        return 1 if any(check.status == "failed" for check in checks) else 0
    return STOPPED


def _shown(options: DoctorOptions) -> list[Check]:
    page = Page(Console(highlight=False, soft_wrap=False))
    examination = Examination(options, page.busy)
    try:
        checks = page.show(examination.checks())
    finally:
        page.busy("")
    page.say("")
    page.say(verdict(checks, examination.part))
    return checks


def _written(options: DoctorOptions) -> list[Check]:
    examination = Examination(options, lambda _: None)
    checks = list(examination.checks())
    told = as_json(checks, examination.part, options.invite)
    text = json.dumps(told, indent=2) + "\n"
    if str(options.json_file) == "-":
        typer.echo(text, nl=False)
    elif options.json_file is not None:
        write_atomically(options.json_file, text.encode())
    return checks


def as_json(checks: Sequence[Check], part: Part | None, invite: Invite) -> dict[str, Any]:
    """What scripts read: the lines, and what this machine would contribute."""
    return {
        "run": invite.run_id,
        "version": __version__,
        "can_take_part": all(check.status != "failed" for check in checks),
        "verdict": verdict(checks, part),
        "part": None if part is None else asdict(part),
        "checks": [asdict(check) for check in checks],
    }


def verdict(checks: Sequence[Check], part: Part | None) -> str:
    """What it comes to, in one sentence."""
    failed = [check.name for check in checks if check.status == "failed"]
    if failed:
        return f"This machine cannot take part yet: mend {', '.join(dict.fromkeys(failed))}."
    text = "This machine can take part"
    if part is not None:
        text += f": stage {part.stage}, about {rounded(part.tokens_per_s)} tokens/s"
    warned = list(dict.fromkeys(check.name for check in checks if check.status == "warning"))
    return f"{text}; see the warnings: {', '.join(warned)}." if warned else f"{text}."


class Page:
    """The lines on a terminal or in a file: mark, name, text, and the mend below it."""

    def __init__(self, console: Console):
        self._console = console
        self._width = min(console.width, MAX_WIDTH)

    def show(self, checks: Iterable[Check]) -> list[Check]:
        """Print them as they come; all of them."""
        shown: list[Check] = []
        for check in checks:
            self.busy("")
            self._line(check)
            shown.append(check)
        return shown

    def say(self, text: str) -> None:
        """A sentence of its own."""
        for line in _wrapped(text, self._width):
            self._console.print(Text(line), soft_wrap=True)

    def busy(self, doing: str) -> None:
        """Show what takes a while, on a terminal; the next line takes its place.

        No thread draws it: what is forked meanwhile would inherit its locks.
        """
        if self._console.is_terminal:
            sys.stdout.write(f"\r\x1b[K{doing + ' ...' if doing else ''}")
            sys.stdout.flush()

    def _line(self, check: Check) -> None:
        indent = MARK_WIDTH + NAME_WIDTH
        room = max(20, self._width - indent)
        lines, mend = _wrapped(check.text, room), _wrapped(f"-> {check.mend}", room, "   ")
        if check.mend and len(lines) == len(mend) == 1 and len(lines[0] + mend[0]) < room:
            lines, mend = [f"{lines[0]} {mend[0]}"], []  # it fits into the same line
        lines += mend if check.mend else []
        head = Text.assemble(
            (check.status.ljust(MARK_WIDTH), COLOURS[check.status]), check.name.ljust(NAME_WIDTH)
        )
        for line in lines:
            self._console.print(head + Text(line), soft_wrap=True)
            head = Text(" " * indent)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """In lines of this width; what some peer said may not steer the terminal."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return textwrap.wrap(printable, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
