"""What the guides say of commands, fields, alerts, sizes and messages is what the program has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.sizes import examples
from dilocox.dht.manifest import Manifest, preset_names
from dilocox.peer.cli import app, known_variables
from dilocox.peer.process import sizes
from dilocox.peer.process.prepare import stage_kinds
from dilocox.pipeline.partition import plan_stages
from tests.guide_blocks import DOCS, GUIDES, blocks, sections
from tests.sweeps import sweep

ROOT = DOCS.parent
RULES = ROOT / "docker" / "prometheus" / "rules.yml"
TEXTS = {guide: (DOCS / f"{guide}.md").read_text() for guide in GUIDES}
EXAMPLES = {manifest.name: manifest for manifest in examples()}
LEAST_LETTERS = 4  # of a piece of a message that is looked for

_GAP = re.compile(r"\.\.\.|\b\d[\d:]*( UTC)?\b")
_COMMAND = re.compile(r"(?:^|`)dilocox ((?:operate )?[a-z]+)((?:[ \\\n]+[^\s`|]+)*)", re.MULTILINE)


def commands() -> dict[str, set[str]]:
    """The options of every command; of those of a group by both words."""
    found: dict[str, set[str]] = {}

    def take(name: str, command: Any) -> None:
        for inner, each in getattr(command, "commands", {}).items():
            take(f"{name} {inner}".strip(), each)
        found[name] = {option for param in command.params for option in param.opts} | {"--help"}

    take("", typer.main.get_command(app))
    return found


def tables(guide: str, heading: str) -> list[list[str]]:
    """The cells of the rows of all tables under a heading, without the heads."""
    part = TEXTS[guide].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [
        row
        for number, row in enumerate(rows)
        if not row[0].startswith("---")
        and not (number + 1 < len(rows) and "---" in rows[number + 1][0])
    ]


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_and_options_exist(guide: str) -> None:
    known = commands()
    found = list(_COMMAND.finditer(TEXTS[guide]))
    assert len(found) > 10
    for match in found:
        name, rest = match[1], match[2]
        assert name in known, match[0]
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
            assert option in known[name], match[0]
    options = set().union(*known.values())
    for text in re.findall(r"`(--[a-z-]+)[^`]*`", TEXTS[guide]):
        assert text in options | {"--profile"}, text
    assert set(re.findall(r"DILOCOX_\w+", TEXTS[guide])) <= known_variables()


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in sections(guide)}
    links = re.findall(r"\]\(([^)]+)\)", TEXTS[guide])
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        if file:
            assert (DOCS / file).exists(), link
        else:
            assert anchor in anchors, link


def test_fields_of_run_yaml_exist() -> None:
    known = asdict(Manifest.load(DOCS / "run.yaml"))
    rows = tables("operator", "Describe the run")
    assert len(rows) > 10
    for cells in rows:
        section = ""
        for name in re.findall(r"`([^`]+)`", cells[0]):
            first, _, second = name.rpartition(".")
            section = first or section
            assert second in (known[section] if section else known), name


def test_the_runs_of_the_guide_are_ones_that_the_program_takes() -> None:
    describe, check = [each for each in blocks("operator") if each.section == "Describe the run"]
    assert describe.text.startswith("dilocox init --yes ") and "--stages 3" in describe.text
    assert check.text == "dilocox bootstrap run.yaml --check"
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXTS["operator"], re.DOTALL)
    manifest = Manifest.from_dict(yaml.safe_load(text))
    plans = plan_stages(manifest.model, manifest.stages)
    assert 45e6 < sum(plan.num_parameters for plan in plans) < 55e6, "it says 50 million"


def test_every_alert_is_explained_with_its_severity() -> None:
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    alerts = {f"`{r['alert']}` ({r['labels']['severity']})" for r in rules if "alert" in r}
    assert {row[0] for row in tables("operator", "What the alerts mean")} == alerts


def test_the_table_of_sizes_has_the_columns_and_runs_of_the_script() -> None:
    assert {run for run, *_ in tables("operator", "How much it takes")} == EXAMPLES.keys()
    assert f"| {' | '.join(('run', *sizes.HEADS))} |" in TEXTS["operator"]


@pytest.mark.parametrize("run", sweep(EXAMPLES))
def test_the_sizes_are_those_that_the_script_prints(run: str) -> None:
    shown = {tuple(row) for row in tables("operator", "How much it takes") if row[0] == run}
    manifest = EXAMPLES[run]
    assert shown == {(run, *sizes.row(manifest, stage)) for stage in stage_kinds(manifest)}


def test_the_guide_names_every_preset() -> None:
    part = TEXTS["operator"].partition("\n## Describe the run\n")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in part for name in preset_names())


@pytest.mark.parametrize(
    ("guide", "heading"),
    [
        ("operator", "When something is wrong"),
        ("operator", "Watch"),
        ("volunteer", "When something is wrong"),
        ("volunteer", "What it says"),
    ],
)
def test_messages_are_those_of_the_program(guide: str, heading: str) -> None:
    rows = tables(guide, heading)
    assert len(rows) > 4
    for row in rows:
        for phrase in re.findall(r"`([^`]+)`", row[0]):
            if phrase == "Killed":  # the system's word
                continue
            assert _said(phrase), f"{phrase!r} is in no message of the program"


def _said(phrase: str) -> bool:
    """Whether the pieces between what differs stand in one message, in this order."""
    pieces = [piece.strip(" :,") for piece in _GAP.split(phrase) if piece]
    pieces = [piece for piece in pieces if len(piece) >= LEAST_LETTERS]
    wanted = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return bool(pieces) and any(wanted.search(message) for message in _messages())


@cache
def _messages() -> tuple[str, ...]:
    """All texts in the source, with a # for what is filled in."""
    files = [path for part in ("peer", "dht", "pipeline") for path in (ROOT / part).rglob("*.py")]
    return tuple(text for file in files for text in _texts(file))


def _texts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "#" for each in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
