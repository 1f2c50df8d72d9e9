"""The compose file and the Dockerfile agree with each other, with the tree and with the options.

That they work is seen by docker/test-image.sh, which needs root and minutes.
"""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.cli import app, known_variables

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = re.sub(r"\\\n", " ", (DOCKER / "Dockerfile").read_text())
OURS = sorted(name for name in SERVICES if SERVICES[name]["image"].startswith("dilocox:"))
PROFILES = {"bootstrap", "peer", "gpu", "monitoring", "alerting", "demo"}


def variables_of(command: str) -> set[str]:
    """The environment variables of a command's options."""
    commands: Any = getattr(typer.main.get_command(app), "commands", {})
    return {param.envvar for param in commands[command].params if param.envvar}


def command_named(words: str) -> Any:
    """A command of dilocox, of a group by both words."""
    found: Any = typer.main.get_command(app)
    for word in words.split():
        found = found.commands[word]
    return found


def image_variables() -> set[str]:
    """The options that the image itself sets."""
    return set(re.findall(r"\b(DILOCOX_[A-Z_]+)=", DOCKERFILE))


def test_every_service_has_a_profile_and_every_profile_a_service() -> None:
    assert all(service.get("profiles") for service in SERVICES.values())
    assert {profile for each in SERVICES.values() for profile in each["profiles"]} == PROFILES


def test_foreign_images_have_exact_versions() -> None:
    images = {service["image"] for name, service in SERVICES.items() if name not in OURS}
    images |= set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    assert len(images) == 4  # Prometheus, Alertmanager, Grafana, one Python for both stages
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+(-[a-z-]+)?$", image), image


@pytest.mark.parametrize("name", OURS)
def test_our_containers_are_bounded_and_have_time_to_leave(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= 360
    assert "privileged" not in service


@pytest.mark.parametrize("name", OURS)
def test_variables_of_our_containers_are_options(name: str) -> None:
    ours = {key for key in SERVICES[name]["environment"] if key.startswith("DILOCOX_")}
    assert ours | image_variables() <= known_variables()


@pytest.mark.parametrize(
    ("name", "command"), [("bootstrap", "bootstrap"), ("peer", "peer"), ("peer-gpu", "peer")]
)
def test_every_option_can_be_set_from_outside(name: str, command: str) -> None:
    assert SERVICES[name]["command"] == [command]
    missing = variables_of(command) - set(SERVICES[name]["environment"]) - image_variables()
    assert not missing, "pass these through in docker/compose.yaml"


@pytest.mark.parametrize(
    ("guide", "commands"),
    [
        (
            "operator",
            {f"operate {each}" for each in ("pause", "resume", "revise", "rollback", "end")},
        ),
        ("volunteer", {"pause", "resume", "doctor"}),
    ],
)
def test_what_a_guide_types_into_a_container_lacks_nothing_there(
    guide: str, commands: set[str]
) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "docs" / f"{guide}.md").read_text())
    typed = re.findall(
        r"^.*docker compose -f docker/compose\.yaml (?:exec|run)(?: -\S+)* +(\S+) +"
        r"(?:.*\bdilocox )?((?:operate )?[a-z]+)\b(.*)$",
        text,
        re.MULTILINE,
    )
    typed = [each for each in typed if each[1] not in ("cat", "sh")]
    assert {command for _, command, _ in typed} == commands
    for service, command, rest in typed:
        known = set(SERVICES[service]["environment"]) | image_variables()
        params = {param.envvar: param for param in command_named(command).params if param.envvar}
        assert "DILOCOX_STATE" in params.keys() & image_variables()
        lacking = {name for name, param in params.items() if param.required} - known
        assert all(set(params[name].opts) & set(rest.split()) for name in lacking), command


def test_no_peer_is_started_again_for_what_only_a_person_can_mend() -> None:
    (entrypoint,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    tini, *rest = json.loads(entrypoint)
    peers = [each for each in SERVICES.values() if each.get("restart") == "on-failure"]
    assert len(peers) == 2
    for peer in peers:
        assert peer["entrypoint"] == [tini, "-e", str(InvalidInput.exit_code), *rest]


def test_the_guide_says_how_a_peer_comes_back_after_a_reboot() -> None:
    text = (ROOT / "docs" / "volunteer.md").read_text()
    (service,) = re.findall(r"`docker compose -f docker/compose\.yaml start (\S+)`", text)
    assert SERVICES[service]["restart"] == "on-failure"  # it ended in order, so nothing starts it


def test_what_is_mounted_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_a_bootstrap_takes_the_mounted_manifest_unless_it_is_a_copy() -> None:
    bootstrap = SERVICES["bootstrap"]
    given = re.fullmatch(r"\$\{BOOTSTRAP_OF:-(.*)\}", bootstrap["environment"]["DILOCOX_MANIFEST"])
    assert given is not None
    assert any(volume.endswith(f":{given[1]}:ro") for volume in bootstrap["volumes"])


def test_the_demo_trains_the_stages_that_its_manifest_has() -> None:
    stages = Manifest.load(DOCKER / "demo.yaml").stages
    found = [
        SERVICES[name]["environment"]["DILOCOX_STAGE"]
        for name in sorted(SERVICES)
        if name.startswith("demo-stage-")
    ]
    assert found == list(range(stages))


def test_the_image_is_made_of_every_package_and_nothing_that_is_ignored() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    for source in copied:
        assert (ROOT / source).exists(), source
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = [line.partition("=")[2].strip() for line in _lines(setup["options"]["package_dir"])]
    assert set(folders) <= copied
    rules = _lines((ROOT / ".dockerignore").read_text())
    assert "*" in rules
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
