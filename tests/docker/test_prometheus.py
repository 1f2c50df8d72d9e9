"""A real Prometheus scrapes a real swarm: all panels and rules have figures, an alert rises."""

from __future__ import annotations

import re
import shutil
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.docker.exported import ALERTS, PANELS, RECORDS, VARIABLES
from tests.docker.prometheus import RunningPrometheus
from tests.ports import free_ports
from tests.swarm.harness import ProcessSwarm
from tests.swarm.monitors import WatchingMonitor
from tests.swarm.small_run import run_manifest

STAGES = 2
REPLICAS = 2
ROUNDS = 4
ROUNDS_LIMIT_S = 240.0
DATA_LIMIT_S = 120.0  # a look of the monitor, a scrape, an evaluation of the rules, and patience
LOST_LIMIT_S = 60.0  # three heartbeats until the records expire, and the same

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.watch,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian's package is called prometheus)",
    ),
]


@dataclass
class Watched:
    """A swarm with its monitor and its Prometheus."""

    swarm: ProcessSwarm
    monitor: WatchingMonitor
    prometheus: RunningPrometheus

    @property
    def run(self) -> str:
        (run,) = self.prometheus.label_values("run", "dilocox_swarm_healthy")
        return run

    def with_data(self, expressions: set[str], limit_s: float = DATA_LIMIT_S) -> None:
        """Wait until each of these has given figures once; what has not is told."""
        missing = set(expressions)

        def all_there() -> bool:
            missing.difference_update([each for each in missing if self.prometheus.query(each)])
            return not missing

        try:
            self.swarm.wait(all_there, limit_s, "figures")
        except AssertionError as error:
            raise AssertionError(f"no figures of {sorted(missing)}; {error}") from error


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    own_port, *ports = free_ports(1 + STAGES * REPLICAS)
    swarm = ProcessSwarm(
        folder, run_manifest(stages=STAGES), bootstrap=("--metrics-port", str(own_port))
    )
    started: list[WatchingMonitor | RunningPrometheus] = []
    try:
        monitor = WatchingMonitor(swarm.invite, folder)
        started.append(monitor)
        place = urllib.parse.urlsplit(monitor.url)
        assert place.port is not None
        prometheus = RunningPrometheus(
            folder / "prometheus", monitor=place.port, bootstraps=[own_port], peers=ports
        )
        started.append(prometheus)
        for number, port in enumerate(ports):
            swarm.add_peer("--metrics-port", str(port), stage=number % STAGES)
        swarm.wait_for_rounds(ROUNDS, ROUNDS_LIMIT_S)
        swarm.wait(lambda: prometheus.ready, DATA_LIMIT_S, "Prometheus answers")
        yield Watched(swarm, monitor, prometheus)
    except BaseException:
        print(swarm.tails())
        raise
    finally:
        for each in reversed(started):
            each.close()
        swarm.close()


def test_the_monitor_the_bootstrap_and_every_scraped_peer_answer(watched: Watched) -> None:
    wanted = {"monitor": [1.0], "bootstrap": [1.0], "peer": [1.0] * STAGES * REPLICAS}
    watched.swarm.wait(
        lambda: watched.prometheus.up().items() >= wanted.items(), DATA_LIMIT_S, "all answer"
    )
    (invited,) = re.findall(r"dilocox:([0-9a-f]+)@", watched.swarm.invite)
    assert watched.run == invited[:12]


def test_every_recording_rule_gives_figures_and_no_rule_fails(watched: Watched) -> None:
    watched.with_data({f'{name}{{run="{watched.run}"}}' for name in RECORDS})
    rules = watched.prometheus.rules()
    assert {rule["name"] for rule in rules} == RECORDS.keys() | ALERTS.keys()
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


def test_every_panel_has_figures_for_all_stages_and_for_one(watched: Watched) -> None:
    queries = VARIABLES["stage"]["definition"].replace("$run", watched.run)
    series = re.fullmatch(r"label_values\((.*), stage\)", queries)
    assert series is not None
    assert watched.prometheus.label_values("stage", series[1]) == ["0", "1"]
    expressions = {
        _filled(target["expr"], watched.run, stage)
        for panel in PANELS
        for target in panel["targets"]
        for stage in (".*", "0", "1")
    }
    print(f"{len(PANELS)} panels, {len(expressions)} expressions")
    watched.with_data(expressions)


def test_every_legend_is_filled(watched: Watched) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            for labels, value in watched.prometheus.query(_filled(target["expr"], watched.run)):
                shown = {name: labels[name] for name in wanted if name in labels}
                print(f"{panel['title']}: {shown} {value:.4g}")
                # "or vector(0)" has no labels, where nothing happened
                assert shown.keys() == wanted or (not labels and value == 0), panel["title"]


def test_a_healthy_swarm_has_no_alert_and_an_empty_stage_raises_one(watched: Watched) -> None:
    prometheus, swarm = watched.prometheus, watched.swarm
    healthy = f'dilocox_swarm_healthy{{run="{watched.run}"}} == 1'
    # at any one moment a busy machine may be late with records that live for six seconds
    swarm.wait(
        lambda: prometheus.query(healthy) and not prometheus.query("ALERTS"),
        DATA_LIMIT_S,
        "the monitor to call the swarm healthy, without a pending alert",
    )
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    for peer in swarm.of_stage(1):
        swarm.kill(peer)
    # pending is enough: it fires when this lasts as long as the rule says
    alert = f'ALERTS{{alertname="DilocoxStageEmpty",run="{watched.run}",stage="1"}}'
    swarm.wait(lambda: prometheus.query(alert), LOST_LIMIT_S, "the alert of stage 1")
    assert not prometheus.query(alert.replace('stage="1"', 'stage="0"'))


def _filled(expr: str, run: str, stage: str = ".*") -> str:
    """An expression as Grafana asks it."""
    filled = expr.replace("$__rate_interval", "1m").replace("$run", run).replace("$stage", stage)
    assert "$" not in filled
    return filled
