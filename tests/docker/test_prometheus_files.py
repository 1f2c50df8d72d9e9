"""Prometheus's files: its own tool takes them, every alert is tested, and the names are right."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from tests.docker.exported import (
    ALERTS,
    DOCKER,
    RECORDS,
    RULES,
    exported,
    names_in,
    strange_labels,
)

FOLDER = DOCKER / "prometheus"
CONFIG: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
JOBS: dict[str, dict[str, Any]] = {job["job_name"]: job for job in CONFIG["scrape_configs"]}
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())[
    "services"
]
# what an operator must be told about
WANTED = {
    "DilocoxStageEmpty",
    "DilocoxStageUnreachable",
    "DilocoxRoundStalled",
    "DilocoxLossNotFinite",
    "DilocoxLossRising",
    "DilocoxVoidRounds",
    "DilocoxBootstrapDown",
    "DilocoxPeersLeaving",
    "DilocoxCompressionErrorHigh",
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (it comes with Debian's package prometheus)",
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


# ---- by Prometheus's tool ------------------------------------------------------------------------
@needs_promtool
def test_promtool_takes_configuration_and_rules() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(FOLDER / "rules.yml"))


@needs_promtool
@pytest.mark.sweep  # hours of many swarms, minute by minute
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(FOLDER / "rules_test.yml"))


@pytest.mark.skipif(
    shutil.which("amtool") is None,
    reason="amtool is not installed (it comes with Debian's package prometheus-alertmanager)",
)
def test_amtool_takes_the_sample_of_alertmanager() -> None:
    done = subprocess.run(
        ["amtool", "check-config", str(FOLDER / "alertmanager.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_go_to_the_alertmanager_of_the_compose_file_by_names_that_there_are() -> None:
    (where,) = CONFIG["alerting"]["alertmanagers"]
    (found,) = where["dns_sd_configs"]
    (name,) = found["names"]
    assert f"127.0.0.1:{found['port']}:{found['port']}" in SERVICES[name]["ports"]
    sample = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())
    named = re.findall(r"Dilocox\w+", str(sample["inhibit_rules"]))
    assert set(named) <= ALERTS.keys()
    receivers = {each["name"] for each in sample["receivers"] if each["webhook_configs"]}
    used = {sample["route"]["receiver"], *(each["receiver"] for each in sample["route"]["routes"])}
    assert used == receivers


# ---- rules ---------------------------------------------------------------------------------------
def test_there_is_an_alert_for_everything_that_was_asked_for() -> None:
    assert ALERTS.keys() >= WANTED


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_means_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["for"]
    assert rule["annotations"].keys() == {"summary", "description", "what_to_do"}
    assert len(rule["annotations"]["summary"]) < 100  # the subject of a message
    for text in ("description", "what_to_do"):
        assert len(rule["annotations"][text]) > 60
        assert rule["annotations"][text].endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_is_made_of_figures_that_there_are(rule: dict[str, Any]) -> None:
    labels = exported()
    assert names_in(rule["expr"])
    assert names_in(rule["expr"]) <= labels.keys()
    assert not strange_labels(rule["expr"], labels)


@pytest.mark.parametrize("name", RECORDS)
def test_a_recorded_series_is_named_after_its_labels(name: str) -> None:
    level = name.partition(":")[0]
    assert set(level.split("_")) <= exported()[name]


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_seen_to_fire_and_to_be_silent(name: str) -> None:
    fires = silent = False
    for check in _checks():
        if not re.fullmatch(rf'ALERTS(\{{alertname="{name}"\}})?', check["expr"]):
            continue
        shown = [_labels(sample["labels"]) for sample in check["exp_samples"]]
        states = {each["alertstate"] for each in shown if each["alertname"] == name}
        fires = fires or states == {"firing"}
        silent = silent or (not states and check["expr"] != "ALERTS")
    assert fires, "no test sees it fire"
    assert silent, "no test of its own sees it silent"


@pytest.mark.parametrize("name", RECORDS)
def test_each_recorded_series_has_a_test_of_its_value(name: str) -> None:
    assert any(name in check["expr"] for check in _checks() if check["exp_samples"])


@cache
def _checks() -> list[dict[str, Any]]:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    return [check for test in tests for check in test["promql_expr_test"]]


def _labels(series: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


# ---- what is scraped -----------------------------------------------------------------------------
def test_scraped_names_are_services_of_the_compose_file() -> None:
    assert JOBS.keys() == {"monitor", "bootstrap", "peer", "prometheus"}
    (monitor,) = JOBS["monitor"]["static_configs"]
    assert monitor["targets"] == [f"monitor:{SERVICES['monitor']['environment']['DILOCOX_PORT']}"]
    image = (DOCKER / "Dockerfile").read_text()
    named: dict[str, list[str]] = {}
    for job in ("bootstrap", "peer"):
        (found,) = JOBS[job]["dns_sd_configs"]
        assert f"DILOCOX_METRICS_PORT={found['port']}" in image
        named[job] = found["names"]
    for job, names in named.items():
        run_it = [name for name, each in SERVICES.items() if each.get("command") == [job]]
        run_it += [] if job == "bootstrap" else [n for n in SERVICES if n.startswith("demo-stage-")]
        assert sorted(names) == sorted(set(run_it))


def test_files_of_more_targets_are_there_and_empty() -> None:
    for job in ("bootstrap", "peer"):
        (found,) = JOBS[job]["file_sd_configs"]
        (path,) = found["files"]
        assert yaml.safe_load((FOLDER / path).read_text()) == []
