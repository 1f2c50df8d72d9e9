"""Names and labels of what peers, bootstraps and the monitor show to Prometheus, and of what the
rules make.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.peer.commands.test_bootstrap import FACTS
from tests.peer.commands.test_bootstrap import text as bootstrap_text
from tests.peer.fabricated import trained
from tests.peer.monitor.test_monitor_metrics import text as monitor_text
from tests.peer.process.test_metrics import Shown

DOCKER = Path(__file__).parents[2] / "docker"
RULES_FILE = DOCKER / "prometheus" / "rules.yml"
RULE_GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in RULE_GROUPS for rule in group["rules"]]
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
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
    for text in (shown.text, monitor_text(trained()), bootstrap_text(FACTS).decode()):
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
