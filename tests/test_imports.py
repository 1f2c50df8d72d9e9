"""Who may import whom, read from the syntax trees, so that an import inside a function counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The rooms from the lowest to the highest: each may import those that stand before it.
ROOMS = (
    "compression",
    "dht",
    "pipeline",
    "peer",  # its own files: options, folders, memory and disk, processes
    "peer/rounds",
    "peer/chain",
    "peer/averaging",
    "peer/training",
    "peer/process",
    "peer/monitor",
    "peer/commands",
    "peer/cli",
)
LESS = {  # what a room leaves out of those
    "dht": {"compression"},
    "peer": {"compression", "pipeline"},
    "peer/rounds": {"pipeline", "peer"},
    "peer/monitor": {"compression", "peer/averaging", "peer/training", "peer/process"},
    "peer/commands": {"peer/monitor"},
}
# Libraries that a few files keep from all others.
ONLY_IN = {
    "hivemind": {
        "dht/clock",
        "dht/keepers",
        "dht/node",
        "dht/node_process",
        "dht/p2p_daemon",
        "dht/protocol",
        "dht/streams",
        "dht/reachability",
        "dht/reconnect",
        "dht/rpc",
        "dht/storage",
        "dht/validator",
        "peer/averaging/averager",
        "peer/averaging/driver",
        "peer/averaging/matchmaking",
        "peer/averaging/service",
        "peer/chain/archive_keeper",
        "peer/commands/doctor_swarm",
        "peer/rounds/group_calls",
        "pipeline/requests",
    },
    "transformers": {"pipeline/partition", "peer/commands/export", "peer/training/data"},
    "prometheus_client": {"peer/http_pages", "peer/process/metrics"},
}
NUMBERS_ONLY = {"torch", "numpy"}  # all that compression needs beside the standard library


PACKAGES = tuple(room for room in ROOMS if "/" not in room)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def room_of(module: str) -> str:
    """The room of a module, given as its path without `.py`, or of a name in it."""
    return max((room for room in ROOMS if f"{module}/".startswith(f"{room}/")), key=len)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The full names that a file imports; names of modules given as text count too."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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
            case ast.Call(args=[*_, ast.Constant(value=str(place))], func=ast.Name(id="command")):
                yield "dilocox.peer." + place.replace(":", ".")  # peer/cli.py imports it then
            case _:
                pass


def test_there_is_something_to_look_at() -> None:
    found = {room_of(str(path.relative_to(ROOT).with_suffix(""))) for path in modules()}
    assert found == set(ROOMS)
    assert "dilocox.dht.errors.DilocoxError" in set(imports(ROOT / "peer" / "cli.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_place_in_the_house_allows(path: Path) -> None:
    module = str(path.relative_to(ROOT).with_suffix(""))
    room = room_of(module)
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) - LESS.get(room, set())
    for name in imports(path):
        words = name.split(".")
        # a top-level folder's name on its own would find this repository only from its root
        assert words[0] not in PACKAGES, f"import dilocox.{name}, not {name}"
        if words[0] == "dilocox" and words[1] in PACKAGES:
            assert room_of("/".join(words[1:])) in allowed, f"{room} may not import {name}"
        if words[0] in ONLY_IN:
            assert module in ONLY_IN[words[0]], f"{name} is not for {path}"


def arrows() -> list[str]:
    """The picture of docs/architecture.md: from each room to those below it that it imports, but
    for what is reached by others of them anyway.
    """
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in modules():
        room = room_of(str(path.relative_to(ROOT).with_suffix("")))
        words = (name.split(".") for name in imports(path))
        ours = (each[1:] for each in words if each[0] == "dilocox" and each[1:])
        found = {room_of("/".join(each)) for each in ours if each[0] in PACKAGES}
        below[room] |= found - {room}
    reached: dict[str, set[str]] = {}
    drawn: list[str] = []
    for room in ROOMS:
        reached[room] = below[room].union(*(reached[each] for each in below[room]))
        direct = [
            each
            for each in ROOMS
            if each in below[room] - {b for a in below[room] for b in reached[a]}
        ]
        names = ["base" if each == "peer" else Path(each).name for each in (room, *direct)]
        drawn += [f"{names[0]} --> {' & '.join(names[1:])}"] if direct else []
    return drawn


def test_the_picture_of_the_rooms_is_what_the_imports_make() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    found = [line.strip() for line in picture.splitlines() if "-->" in line]
    assert found == arrows(), "\n".join(arrows())


def test_who_may_use_a_library_does() -> None:
    for library, allowed in ONLY_IN.items():
        found = {
            str(path.relative_to(ROOT).with_suffix(""))
            for path in modules()
            if any(name.split(".")[0] == library for name in imports(path))
        }
        assert found == allowed


def test_peer_has_few_files_of_its_own_and_no_file_is_too_long_to_read() -> None:
    own = [path for path in (ROOT / "peer").glob("*.py") if path.name != "__init__.py"]
    assert len(own) <= 8
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lines = {path: len(path.read_text().splitlines()) for path in (*modules(), *others)}
    assert not {path: count for path, count in lines.items() if count > 650}


def test_a_file_that_one_other_needs_says_at_once_why_it_stands_apart() -> None:
    """But for commands, which only cli.py names."""
    for path in modules():
        module = "dilocox." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        users = {
            user
            for user in modules()
            if any(f"{name}.".startswith(f"{module}.") for name in imports(user))
        }
        if len(users) == 1 and users != {ROOT / "peer" / "cli.py"}:
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
            assert "apart" in first.lower(), f"{path}: only {users} imports it"


def test_compression_needs_nothing_but_torch_and_numpy() -> None:
    import sys

    for path in (ROOT / "compression").rglob("*.py"):
        for name in imports(path):
            first = name.split(".")[0]
            assert first in NUMBERS_ONLY | {"dilocox"} or first in sys.stdlib_module_names, name


def test_compression_is_a_namespace_so_that_the_standard_librarys_package_stays_visible() -> None:
    assert not (ROOT / "compression" / "__init__.py").exists()
