"""The embedded default text: the source of the running Python's own standard library.

Every machine that can run a peer has it, so a first run needs no network, no account and no
files. It is a few megabytes of real text with structure worth learning. What is left out: tests,
generated tables (encodings, pydoc topics, build settings), programs beside the library, and the
largest files, each of which would be a noticeable share of one data part.

The held-out part is a list of module names that every supported Python has. The library differs
between Python versions, so its digest belongs beside every validation loss: losses compare only
at equal digests.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dilocox.dht.errors import EnvironmentFault

HELD_OUT_MODULES = (
    "argparse",
    "bisect",
    "calendar",
    "csv",
    "email/message",
    "fractions",
    "heapq",
    "html/parser",
    "json/decoder",
    "logging/handlers",
    "queue",
    "shlex",
    "statistics",
    "textwrap",
    "unittest/case",
)
"""Modules whose files are never trained on: about 5 % of the text, from many corners of the
library.
"""

MAX_FILE_BYTES = 150_000

_LEFT_OUT_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "idlelib",
        "distutils",
        "turtledemo",
    }
)
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


class SourceFile(NamedTuple):
    """One file of a corpus: its name, the same on every machine, where it is, and its size."""

    name: str
    path: str
    size: int


def library_files(library: Path | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """List the training files and the held-out files, each sorted by name.

    Args:
        library: the library's folder; the running Python's when None.

    Raises:
        EnvironmentFault: this Python carries no sources (zipped, or stripped for a small image).
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    held_out_names = {f"{module}.py" for module in HELD_OUT_MODULES}
    training: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for path in _source_paths(library):
        name, size = path.relative_to(library).as_posix(), path.stat().st_size
        if 0 < size <= MAX_FILE_BYTES:
            files = held_out if name in held_out_names else training
            files.append(SourceFile(name, str(path), size))
    if not training or not held_out:
        raise EnvironmentFault(
            f"the standard library of this Python, {library}, has no sources (zipped or stripped): "
            "give text of your own with --data, or data.source in run.yaml, or use a full Python"
        )
    return sorted(training), sorted(held_out)


def _source_paths(library: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(library):
        # Pruned in place, so that a site-packages of a hundred thousand files is never walked.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and not name.startswith(_LEFT_OUT_PREFIXES) and path.is_file():
                yield path
