"""What the documents say is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
import yaml

from benchmarks.run_all import BENCHES
from dilocox.dht.manifest import PROTOCOL_VERSION, Manifest
from dilocox.peer.cli import app

ROOT = Path(__file__).parents[1]


def test_the_annotated_run_yaml_spells_out_the_defaults() -> None:
    path = ROOT / "docs" / "run.yaml"
    written = Manifest.load(path)
    given = yaml.safe_load(path.read_text())
    shortest = {name: given[name] for name in ("name", "model", "end_tokens")}
    assert written == Manifest.from_dict(shortest)
    for section, values in written.to_dict().items():
        if isinstance(values, dict) and section not in ("model", "operation"):  # not to be written
            assert set(values) == set(given[section]), f"{section} misses a field"


def test_the_readme_names_only_make_targets_and_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", text)) <= targets | {"it"}
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^\s*dilocox ([a-z]+)", text, re.MULTILINE)) <= commands


def test_the_readmes_first_screen_says_what_it_is_shows_it_and_how_to_run_it() -> None:
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(first.splitlines()) <= 30
    assert first.count("![") == 1
    for line in (
        "docker run --gpus all ",
        "make demo",
        "pip install .",
        "pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install .",
    ):
        assert line in first


def test_the_changelog_names_the_newest_protocol() -> None:
    told = re.findall(r"Protocol (\d+)", (ROOT / "CHANGELOG.md").read_text())
    assert int(told[0]) == max(map(int, told)) == PROTOCOL_VERSION


def test_the_architecture_names_every_file_of_the_product_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tops = ("dht", "compression", "pipeline", "peer")
    files = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py", text))  # some by name alone, beside one of their folder
    short = {each for each in named if "/" not in each}
    for name in {each for each in named - short if each.startswith(tops)}:
        assert (ROOT / name).exists(), name
    left = [path for path in files if str(path.relative_to(ROOT)) not in named]
    assert {path.name for path in left} <= short | {"__init__.py"}


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_benchmarks_run_as_their_heads_say_with_only_their_own_folder_on_the_path() -> None:
    """Anywhere else the root is on the path, so that a script that cannot start looks sound."""
    scripts = [
        path
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        if f"python benchmarks/{path.name}" in path.read_text()
    ]
    assert len(scripts) > 8
    for path in scripts:
        text = path.read_text()
        needs_root = re.search(r"^from (benchmarks|tests)\b", text, re.MULTILINE)
        if needs_root is not None:
            assert "sys.path.insert(0," in text[: needs_root.start()], path.name


def test_every_benchmark_that_a_document_names_exists() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"\bbenchmarks/([a-z_]+\.py)", path.read_text()):
            assert (ROOT / "benchmarks" / name).exists(), f"{path.name}: {name}"


def test_each_table_of_the_results_has_its_command_and_each_benchmark_a_line() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text()
    results = (ROOT / "docs" / "results.md").read_text()
    headings = re.findall(r"^## (.+?) \((`.+)\)$", results, re.MULTILINE)
    assert len(headings) > 8
    for heading, commands in headings:
        assert f"| {heading} |" in text, heading
        for command in re.findall(r"`([^`]+)`", commands):
            shown = command if command.startswith("make ") else f"python benchmarks/{command}"
            assert shown in text, f"{heading}: {command}"
    for bench in BENCHES:
        assert f"`python benchmarks/{bench.script}" in text, bench.name
