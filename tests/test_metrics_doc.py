"""docs/metrics.md has every metric that a program shows, with its labels and its help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from dilocox.peer.commands import bootstrap
from dilocox.peer.http_pages import MetricSpec
from dilocox.peer.monitor import status
from dilocox.peer.process import metrics, resting
from tests.peer.shown_metrics import Shown

TEXT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
TABLES: tuple[tuple[str, Sequence[MetricSpec[Any]]], ...] = (
    (resting.PREFIX, metrics.METRICS),
    (resting.PREFIX, resting.METRICS),
    (status.PREFIX, status.METRICS),
    (bootstrap.PREFIX, bootstrap.METRICS),
)


class Told(NamedTuple):
    """Of one metric; labels: without those that all series of its page have."""

    labels: frozenset[str]
    help: str


def of_tables() -> dict[str, Told]:
    return {
        prefix + spec.name: Told(frozenset(spec.labels), spec.help)
        for prefix, specs in TABLES
        for spec in specs
    }


def counted_by_the_client_library() -> dict[str, str]:
    """What a peer counts in no table, by name: its help."""
    families = text_string_to_metric_families(Shown().text)
    named = {
        family.name + "_total" * (family.type == "counter"): family.documentation
        for family in families
    }
    return {name: text for name, text in named.items() if name not in of_tables()}


def documented() -> dict[str, Told]:
    found: dict[str, Told] = {}
    for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", TEXT, re.MULTILINE):
        name, labels, told = row
        assert name not in found, name
        found[name] = Told(frozenset(re.findall(r"`(\w+)`", labels)), told)
    return found


def test_every_metric_is_explained_with_its_labels() -> None:
    told, tables, others = documented(), of_tables(), counted_by_the_client_library()
    assert len(tables) > 60 and len(others) == 6
    assert told.keys() == tables.keys() | others.keys()
    assert {name: told[name] for name in tables} == tables
    assert {name: told[name].help for name in others} == others
