"""Prints what buildah needs to use this machine's pip settings during a build, one argument a line.

They go into the file named as argument, which is given as a secret, so that they do not end in the
image; folders that they name (of wheels, of certificates) are mounted where they are.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path


def main(config: Path) -> None:
    """Write the settings to a file and print the arguments."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = parsed(listed)
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    config.write_text("[global]\n" + "".join(lines))
    arguments = [f"--secret=id=pip,src={config}"]
    arguments += [f"--volume={folder}:{folder}:ro" for folder in folders(settings)]
    sys.stdout.write("".join(f"{argument}\n" for argument in arguments))


def parsed(listed: str) -> dict[str, str]:
    """The settings by name, as `pip config list` prints them; the environment's win."""
    settings: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[option] = str(ast.literal_eval(value)).replace("\n", " ")
    return settings


def folders(settings: dict[str, str]) -> list[Path]:
    """The folders of this machine that the settings name.

    An index in a folder called `simple` has its files beside it; then the parent is meant.
    """
    found: set[Path] = set()
    for value in settings.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                folder = path if path.is_dir() else path.parent
                found.add(folder.parent if folder.name == "simple" else folder)
    return sorted(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
