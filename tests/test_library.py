"""`from dilocox import ...`, and the guide's example beside the benchmark whose row it makes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dilocox
from benchmarks.convergence_rules import FOUR_BIT, MODEL, WORLD, rules
from benchmarks.simulated_swarm import Trial, run_trials

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "library.md").read_text()
SOURCE = (ROOT / "dilocox" / "__init__.py").read_text()
TYPED = re.findall(r"^    from dilocox\.(\S+) import (\w+) as \2$", SOURCE, re.MULTILINE)
ROUNDS, HELD_OUT = 2, 8


def test_every_name_that_a_type_checker_sees_is_there_and_the_guide_has_it() -> None:
    assert len(TYPED) > 10
    for home, name in TYPED:
        found = getattr(importlib.import_module(f"dilocox.{home}"), name)
        assert getattr(dilocox, name) is found
        assert f"`{name}`" in GUIDE, name


def test_every_name_of_the_guide_is_one_that_a_type_checker_sees() -> None:
    (table,) = re.findall(r"\n\| name \|.*?\n\n", GUIDE, re.DOTALL)
    first = "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
    assert set(re.findall(r"`(\w+)`", first)) == {name for _, name in TYPED}


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dilocox.nonsense  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def test_importing_dilocox_imports_nothing_heavy() -> None:
    asks = (
        "import sys, dilocox; print(*({'torch', 'numpy', 'hivemind', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ("Project-URL: Source, https://example.org/dilocox", "https://example.org/dilocox"),
        ("Project-URL: Source, https://github.com/OWNER/dilocox", ""),  # the placeholder
        ("Summary: it states none", ""),
    ],
)
def test_the_projects_url_is_that_of_the_installed_package(
    stated: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "dilocox-1.0.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.4\nName: dilocox\nVersion: 1.0\n{stated}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert told == dilocox.PROJECT_URL


# ---- the example ---------------------------------------------------------------------------------
CODE, PARTS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_example_makes_the_row_that_the_benchmark_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two of its sixty rounds; alone or side by side, arithmetic differs in the last bits."""
    sizes = "= 20, 4, {}, 8, 4, 32, {}\n"
    assert sizes.format(60, 128) in CODE
    code = CODE.replace(sizes.format(60, 128), sizes.format(ROUNDS, HELD_OUT))
    found: dict[str, Any] = {}
    exec(compile(code, "docs/library.md", "exec"), found)
    world = replace(WORLD, rounds=ROUNDS, held_out=HELD_OUT)
    (outcome,) = run_trials(world, [Trial(rule=rules(world)[FOUR_BIT], seed=20)])
    assert found["loss"] == pytest.approx(outcome.loss, abs=1e-3)
    printed = capsys.readouterr().out
    assert printed == (
        f"{found['loss']:.3f} nats a byte, {outcome.bytes_sent / 1e6:.1f} MB sent by each worker\n"
    )
    assert found["MODEL"] == MODEL


def test_the_example_is_one_that_is_read_at_once() -> None:
    lines = [line for line in CODE.splitlines() if line]
    assert max(map(len, lines)) <= 100 and len(lines) <= 35
    assert set(re.findall(r"^from (\w+)", CODE, re.MULTILINE)) == {"torch", "dilocox"}


def test_the_parts_work_alone_and_live_stands_on_the_anchor() -> None:
    found: dict[str, Any] = {}
    exec(compile(PARTS, "docs/library.md", "exec"), found)
    assert found["merge"].anchor is found["next_anchor"]
    assert torch.equal(found["live"], found["next_anchor"])
    assert len(found["payload"]) < 1024 * 4.4 / 8
    assert found["merge"].residual.norm > 0
