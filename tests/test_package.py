"""The wheel holds exactly the tracked files of the packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("compression", "dht", "peer", "pipeline")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The repository's files as git tracks them, new ones that it does not ignore included."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the tracked files, so that nothing left by other builds gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", *options, "--wheel-dir", str(out)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("dilocox-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_exactly_the_tracked_files_of_the_packages(
    wheel: zipfile.ZipFile, tracked: list[str]
) -> None:
    expected = {f"dilocox/{name}" for name in tracked if name.split("/")[0] in PACKAGES}
    expected |= {
        name for name in tracked if name.startswith("dilocox/") and not (ROOT / name).is_symlink()
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert "dilocox/py.typed" in held
    assert any(name.startswith("dilocox/dht/presets/") for name in held)


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"dilocox = dilocox.peer.cli:main" in wheel.read(points)
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
