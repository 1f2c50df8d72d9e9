"""The source archive holds every tracked file, the wheel exactly those of the packages."""

from __future__ import annotations

import configparser
import email
import email.policy
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dilocox

ROOT = Path(__file__).parents[1]
PACKAGES = ("compression", "dht", "peer", "pipeline")
# `pip wheel` needs an index for what builds; here setuptools is installed already
BUILD = "import setuptools.build_meta as build, sys; print(build.build_sdist(sys.argv[1]))"


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
def source(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that nothing left by other builds gets in."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    out = tmp_path_factory.mktemp("archive")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True
    )
    (path,) = out.glob("dilocox-*.tar.gz")
    with tarfile.open(path) as tar:
        tar.extractall(out, filter="data")
    return out / path.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source archive, which lacks the links of `dilocox/`, as an index's are."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", *options, "--wheel-dir", str(out)],
        cwd=archive,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("dilocox-*.whl")
    return zipfile.ZipFile(path)


def test_the_source_archive_holds_every_tracked_file(archive: Path, tracked: list[str]) -> None:
    held = {
        str(path.relative_to(archive))
        for path in archive.rglob("*")
        if path.is_file() and "egg-info" not in str(path) and path.name != "PKG-INFO"
    }
    assert held == {name for name in tracked if not (ROOT / name).is_symlink()}


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
    assert any(name.startswith("dilocox/peer/monitor/page/") for name in held)


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"dilocox = dilocox.peer.cli:main" in wheel.read(points)
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_the_indexs_page_says_what_it_is_as_the_readme_does_and_links_to_no_file(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    facts = email.message_from_bytes(wheel.read(name), policy=email.policy.default)
    assert facts["Description-Content-Type"] == "text/markdown"
    text, readme = str(facts.get_content()), (ROOT / "README.md").read_text()
    assert text.strip().startswith(readme.partition("\n![")[0].strip())
    assert "![" not in text and not re.search(r"\]\((?!https://)", text)


def test_version_and_address_stand_in_one_place_each(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    facts = email.message_from_bytes(wheel.read(name))
    assert facts["Version"] == dilocox.__version__
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: dilocox.__version__"
    (url,) = facts.get_all("Project-URL", [])
    label, _, address = url.partition(", ")
    assert f"{label} = {address}" in setup["metadata"]["project_urls"]
    for file in ("pyproject.toml", "CITATION.cff", "docker/Dockerfile", "docker/compose.yaml"):
        text = (ROOT / file).read_text()
        assert address not in text and "OWNER" not in text, file
        assert not re.search(
            r"(?i)^[^#\n]*\bversion\b\W+\d+\.\d", text.replace("cff-version", "")
        ), file


def test_the_changelog_has_this_version_or_what_comes_after_it() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert dilocox.__version__ in headings
