"""Who may import whom, read from the syntax trees, so that an import inside a function counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "compression": set[str](),
    "dht": set[str](),
    "pipeline": {"compression", "dht"},
    "peer": {"compression", "dht", "pipeline"},
}
# Libraries that a few files keep from all others, by the part of the house and the file's name.
ONLY_IN = {
    "hivemind": {
        "dht": {
            "clock",
            "daemon",
            "keepers",
            "node",
            "protocol",
            "questions",
            "sockets",
            "validator",
        },
        "peer": {
            "archive_keeper",
            "averager",
            "dialling",
            "doctor_swarm",
            "driver",
            "matchmaking",
            "probe",
            "reachability",
            "redial",
            "service",
            "transport",
            "ways",
        },
        "pipeline": {"door"},
    },
    "transformers": {"pipeline": {"partition"}, "peer": {"export", "tokens"}},
    "prometheus_client": {"peer": {"metrics"}},
}
NUMBERS_ONLY = {"torch", "numpy"}  # all that compression needs beside the standard library


def modules() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The full names that a file imports; names of modules given as text count too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"{path} has a relative import: write dilocox.<package>")
            case ast.Call(args=[ast.Constant(value=str(name)), *_], func=function):
                if "import_module" in ast.unparse(function):
                    yield name
            case _:
                pass


def test_there_is_something_to_look_at() -> None:
    packages = {path.relative_to(ROOT).parts[0] for path in modules()}
    assert packages == set(MAY_IMPORT)
    assert "dilocox.dht.errors.DilocoxError" in set(imports(ROOT / "peer" / "cli.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_place_in_the_house_allows(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        words = name.split(".")
        # a top-level folder's name on its own would find this repository only from its root
        assert words[0] not in MAY_IMPORT, f"import dilocox.{name}, not {name}"
        if words[0] == "dilocox" and words[1] in MAY_IMPORT:
            assert words[1] in MAY_IMPORT[package] | {package}, f"{package} may not import {name}"
        if words[0] in ONLY_IN:
            assert path.stem in ONLY_IN[words[0]].get(package, set()), f"{name} is not for {path}"


def test_compression_needs_nothing_but_torch_and_numpy() -> None:
    import sys

    for path in (ROOT / "compression").rglob("*.py"):
        for name in imports(path):
            first = name.split(".")[0]
            assert first in NUMBERS_ONLY | {"dilocox"} or first in sys.stdlib_module_names, name


def test_compression_is_a_namespace_so_that_the_standard_librarys_package_stays_visible() -> None:
    assert not (ROOT / "compression" / "__init__.py").exists()
