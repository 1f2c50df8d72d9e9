"""The workflows of GitHub name what is there, may do little, and say which action they mean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import dilocox

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FILES = sorted((GITHUB / "workflows").glob("*.yml"))
WRITES = {"image": {"packages", "id-token", "attestations"}, "publish": {"id-token"}}


def load(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true
    return {"on" if key is True else str(key): each for key, each in _yaml(path).items()}


def _yaml(path: Path) -> dict[object, Any]:
    return yaml.safe_load(path.read_text())


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_three() -> None:
    assert [path.stem for path in FILES] == ["image", "release", "test"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_a_job_writes_only_what_it_must(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        writes = {what for what, may in job.get("permissions", {}).items() if may == "write"}
        assert writes == WRITES.get(name, set()), name
        assert 0 < job["timeout-minutes"] <= 120
    assert "pull_request_target" not in workflow["on"]  # it would run strangers' code with rights


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_its_major_version(path: Path) -> None:
    for step in steps(load(path)):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step["uses"]
        else:  # what a branch or a title is called must not be read by a shell
            assert "${{" not in step["run"]


def test_the_tests_run_what_the_tree_has_on_the_pythons_that_it_names() -> None:
    workflow = load(GITHUB / "workflows" / "test.yml")
    runs = [step["run"] for step in steps(workflow) if "run" in step]
    assert "bash .ci/run" in runs
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for run in runs for target in re.findall(r"make ([a-z-]+)", run)} <= targets
    pythons = {
        step["with"]["python-version"]
        for step in steps(workflow)
        if "python-version" in step.get("with", {})
    } - {"${{ matrix.python }}"} | set(workflow["jobs"]["unit"]["strategy"]["matrix"]["python"])
    (least, most) = re.findall(
        r"Python (3\.\d+) to (3\.\d+)", (ROOT / "constraints.txt").read_text()
    )[0]
    assert (min(pythons), max(pythons)) == (least, most)


def test_the_image_is_built_with_arguments_that_the_dockerfile_takes() -> None:
    (build,) = [
        step
        for step in steps(load(GITHUB / "workflows" / "image.yml"))
        if step.get("uses", "").startswith("docker/build-push-action@")
    ]
    dockerfile = (ROOT / build["with"]["file"]).read_text()
    known = set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE))
    given = set(re.findall(r"^(\w+)=", build["with"]["build-args"], re.MULTILINE))
    assert given and given <= known
    assert build["with"]["provenance"] == "mode=max"


@pytest.mark.parametrize(
    ("tag", "owner", "changelog", "said"),
    [
        (f"v{dilocox.__version__}", "somebody", dilocox.__version__, ""),
        (f"v{dilocox.__version__}", "OWNER", dilocox.__version__, "set project_urls"),
        (f"v{dilocox.__version__}", "somebody", "0.0.1", f"lacks {dilocox.__version__}"),
        ("v9.9.9", "somebody", dilocox.__version__, "tag v9.9.9"),
    ],
)
def test_the_release_checks_what_it_is_about_to_publish(
    tmp_path: Path, tag: str, owner: str, changelog: str, said: str
) -> None:
    workflow = load(GITHUB / "workflows" / "release.yml")
    (check,) = [step for step in workflow["jobs"]["build"]["steps"] if "env" in step]
    (tmp_path / "dilocox").mkdir()
    shutil.copy(ROOT / "dilocox" / "__init__.py", tmp_path / "dilocox")
    setup = re.sub(r"github\.com/\w+/", f"github.com/{owner}/", (ROOT / "setup.cfg").read_text())
    (tmp_path / "setup.cfg").write_text(setup)
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n## [{changelog}] - 2026-01-01\n")
    done = subprocess.run(
        ["bash", "-e", "-c", check["run"]],
        cwd=tmp_path,
        env=os.environ | {"TAG": tag},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode == 0) == (said == ""), done.stdout
    assert said in done.stdout


def test_a_release_has_no_token() -> None:
    """PyPI's trusted publishing: it knows the repository, the workflow and the environment."""
    workflow = load(GITHUB / "workflows" / "release.yml")
    assert workflow["jobs"]["publish"]["environment"] == "pypi"
    assert not any("password" in step.get("with", {}) for step in steps(workflow))


def test_the_forms_ask_for_what_the_doctor_writes() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "dilocox doctor INVITE --json -" in text
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        assert _yaml(path), path
