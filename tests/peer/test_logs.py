"""Log lines for people: their format, and what they do to a terminal's progress line."""

from __future__ import annotations

import io
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.peer.os_process import line_start, set_up_logging
from dilocox.peer.training.report import Reporter, progress_line
from tests.peer.told_reports import STATUS


class Terminal(io.StringIO):
    """What a person would see in each of its lines."""

    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        return [line.rpartition("\x1b[K")[2] for line in self.getvalue().split("\n")]


def test_a_line_of_any_logger_takes_the_place_of_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    set_up_logging("info")
    Reporter(tmp_path).status(STATUS, force=True)
    logging.getLogger("dilocox.peer.process.peer").info("left: stopped on request")
    Reporter(tmp_path).status(STATUS, force=True)
    logging.getLogger("dilocox.dht").warning("no bootstrap answers")
    seen = terminal.seen()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    left: stopped on request", seen[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARN    no bootstrap answers", seen[1])
    assert seen[2] == ""


def test_a_file_gets_the_lines_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    set_up_logging("info")
    logging.getLogger("dilocox.peer").info("going on")
    assert file.getvalue().endswith("INFO    going on\n") and file.getvalue()[0].isdigit()
    assert line_start() == ""


def test_the_progress_line_has_a_speed_only_where_a_replica_trains() -> None:
    assert "  1,234 tokens/s  " in progress_line(STATUS)
    assert "  - tokens/s  " in progress_line(replace(STATUS, head=""))
