"""docs/events.md has every event that the program writes, with its fields."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from dilocox.peer.averaging.loop_status import OwnContribution
from dilocox.peer.training.merge import Outcome
from dilocox.peer.training.report import RoundReport

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "events.md").read_text()
TELLS = ("event", "tell", "_tell")


def written() -> dict[str, set[str]]:
    """Fields by kind, as the calls in the code name them."""
    found: dict[str, set[str]] = {}
    for room in ("pipeline", "peer"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr=name),
                        args=[ast.Constant(value=str(kind))],
                        keywords=keywords,
                    ) if name in TELLS:
                        named = {word.arg for word in keywords if word.arg is not None}
                        found.setdefault(kind, set()).update(named)
                    case _:
                        pass
    return found


def documented() -> dict[str, set[str]]:
    """The same as the first table has it."""
    table = TEXT.partition("| event |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    return {kind.strip(" `"): set(re.findall(r"`([a-z_]+)`", told)) for kind, _, told in rows}


def test_every_kind_of_event_is_explained_with_its_fields() -> None:
    found, told = written(), documented()
    found["gave"] |= {each.name for each in fields(OwnContribution)}
    assert len(found) > 10 and found.keys() == told.keys()
    assert {kind: names for kind, names in told.items() if kind != "round"} == {
        kind: names for kind, names in found.items() if kind != "round"
    }


def test_every_field_of_a_round_is_explained() -> None:
    table = TEXT.partition("| field |")[2]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for first in firsts for name in re.findall(r"`([a-z_0-9]+)`", first)}
    assert named == {each.name for each in fields(RoundReport)}
    (line,) = [line for line in table.splitlines() if line.startswith("| `outcome`")]
    assert set(re.findall(r"`([a-z_]+)`", line)) - {"outcome"} == {each.value for each in Outcome}
