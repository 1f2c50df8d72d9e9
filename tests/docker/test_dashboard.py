"""The dashboard is whole: panels, variables, and figures that peers, monitor or rules give.

Grafana itself is not needed; test_prometheus.py asks a real Prometheus what the panels would ask.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.docker.exported import (
    BOARD,
    DOCKER,
    GRAFANA,
    PANELS,
    TARGET_LABELS,
    VARIABLES,
    exported,
    names_in,
    strange_labels,
)

ROWS = [panel for panel in BOARD["panels"] if panel["type"] == "row"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
KINDS = {"stat", "timeseries", "bargauge", "state-timeline"}
# Grafana's names; what stands after a colon is free text
UNITS = {"none", "short", "s", "bytes", "Bps", "percentunit", "si:tok/s", "suffix:x"}
BUILT_IN = {"__rate_interval"}

each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["id"]))


def test_rows_come_in_the_order_of_questions() -> None:
    assert [row["title"] for row in ROWS] == [
        "Swarm",
        "Training",
        "Stages and replicas",
        "Network and compression",
        "Faults",
        "Contribution",
        "Bootstraps",
    ]
    assert BOARD["panels"][0] is ROWS[0]
    for row in ROWS:  # an expanded row holds nothing: its panels come after it
        assert row["collapsed"] is False
        assert row["panels"] == []


def test_panels_have_their_own_id_and_title() -> None:
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    titles: list[str] = []  # of the row so far
    for panel in BOARD["panels"]:
        if panel["type"] == "row":
            titles.clear()
        assert panel["title"] not in titles
        titles.append(panel["title"])


def test_panels_lie_within_the_grid_and_on_no_other() -> None:
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert min(place["w"], place["h"]) > 0
        assert min(place["x"], place["y"]) >= 0
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
    for one, other in combinations(BOARD["panels"], 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


@each_panel
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == SOURCE


@each_panel
def test_a_panel_asks_for_figures_that_there_are(panel: dict[str, Any]) -> None:
    labels = exported()
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        expr = target["expr"]
        assert expr.count("(") == expr.count(")")
        assert names_in(expr), expr
        assert names_in(expr) <= labels.keys(), expr
        assert not strange_labels(expr, labels)
        told = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        shown = {label for name in names_in(expr) for label in labels[name]}
        assert told <= shown | TARGET_LABELS
        if len(panel["targets"]) > 1:
            assert target["legendFormat"]


@each_panel
def test_a_panel_is_of_the_chosen_run_and_stages(panel: dict[str, Any]) -> None:
    labels = exported()
    for target in panel["targets"]:
        expr = target["expr"]
        assert "$run" in expr
        used = set(re.findall(r"\$\{?(\w+)", expr))
        assert used <= VARIABLES.keys() | BUILT_IN, expr
        by_stage = any("stage" in labels[name] for name in names_in(expr))
        # a stat is of the whole run
        assert ("$stage" in expr) == (by_stage and panel["type"] != "stat"), expr


def test_variables_choose_data_source_run_and_stages() -> None:
    assert list(VARIABLES) == ["datasource", "run", "stage"]
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    labels = exported()
    for name in ("run", "stage"):
        variable = VARIABLES[name]
        assert (variable["type"], variable["datasource"]) == ("query", SOURCE)
        assert variable["query"]["query"] == variable["definition"]
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert asked is not None
        assert asked[2] == name
        assert names_in(asked[1]) <= labels.keys()
        assert name in labels[names_in(asked[1]).pop()]
    # All must match figures of the whole swarm, too
    assert (VARIABLES["stage"]["includeAll"], VARIABLES["stage"]["allValue"]) == (True, ".*")


def test_what_grafana_is_given_fits_the_compose_file() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    provisioning = GRAFANA / "provisioning"
    source = _one(provisioning / "datasources" / "prometheus.yaml", "datasources")
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    scraping = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    provider = _one(provisioning / "dashboards" / "dilocox.yaml", "providers")
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]


def _one(path: Any, kind: str) -> dict[str, Any]:
    settings = yaml.safe_load(path.read_text())
    assert settings["apiVersion"] == 1
    (one,) = settings[kind]
    return one
