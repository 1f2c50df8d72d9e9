"""Names and labels of what peers, bootstraps and the monitor show to Prometheus, and of what the
rules make; the dashboard, which asks for them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.peer.fabricated import trained
from tests.peer.shown_metrics import BOOTSTRAP, Shown, bootstrap_text, monitor_text

DOCKER = Path(__file__).parents[2] / "docker"
RULES_FILE = DOCKER / "prometheus" / "rules.yml"
RULE_GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in RULE_GROUPS for rule in group["rules"]]
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
GRAFANA = DOCKER / "grafana"
BOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "dilocox.json").read_text())
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in BOARD["templating"]["list"]}
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGET_LABELS = {"job", "instance", "service"}  # Prometheus adds them

_OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity", "run"}}
_NAME = re.compile(r"\b(?:dilocox_\w+|run\w*:dilocox_[\w:]+|up\b|ALERTS\b)")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\{([^}]*)\}")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby \(([^)]*)\)")


@cache
def exported() -> dict[str, set[str]]:
    """The labels of every series by its name, those of the rules included."""
    shown = Shown()
    shown.everything()
    labels: dict[str, set[str]] = {}
    for text in (shown.text, monitor_text(trained()), bootstrap_text(BOOTSTRAP)):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    for name, rule in RECORDS.items():
        labels[name] = {each for by in _BY.findall(rule["expr"]) for each in by.split(", ")}
    return labels | _OF_PROMETHEUS


def names_in(expr: str) -> set[str]:
    """The series that an expression uses."""
    return set(_NAME.findall(re.sub(r'"[^"]*"', '""', expr)))


def strange_labels(expr: str, labels: dict[str, set[str]]) -> list[str]:
    """What an expression selects by that its series do not have."""
    return [
        f"{name} has no label {label}"
        for name, matchers in _SELECTOR.findall(expr)
        for label in _MATCHER.findall(re.sub(r'"[^"]*"', '""', matchers))
        if label not in labels[name] | TARGET_LABELS
    ]
