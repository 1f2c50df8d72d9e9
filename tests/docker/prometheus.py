"""A real Prometheus with the files that we ship, pointed at ports of this machine."""

from __future__ import annotations

import json
import math
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dilocox.peer.os_process import start_process
from tests.docker.exported import DOCKER
from tests.ports import free_port

ANSWER_LIMIT_S = 10.0
LEAVE_LIMIT_S = 20.0
PERIOD = "1s"  # the shipped one would make the test long

Series = tuple[dict[str, str], float]


class RunningPrometheus:
    """The server, with its data in a folder.

    `bootstraps`, `peers`: ports where they show their figures.
    """

    def __init__(
        self, folder: Path, *, monitor: int, bootstraps: Sequence[int], peers: Sequence[int]
    ):
        self.folder = folder
        shutil.copytree(DOCKER / "prometheus", folder, dirs_exist_ok=True)
        self._adapt(monitor, {"bootstraps": bootstraps, "peers": peers})
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        self._child = start_process(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            folder / "prometheus.log",
            env=None,
        )

    def _adapt(self, monitor: int, named: dict[str, Sequence[int]]) -> None:
        """Names of containers mean nothing here: others are named in the files for it."""
        path = self.folder / "prometheus.yml"
        config = yaml.safe_load(path.read_text())
        for name in ("scrape_interval", "scrape_timeout", "evaluation_interval"):
            config["global"][name] = PERIOD
        for job in config["scrape_configs"]:
            job.pop("dns_sd_configs", None)
            if job["job_name"] == "monitor":
                job["static_configs"] = [{"targets": [f"127.0.0.1:{monitor}"]}]
        path.write_text(yaml.safe_dump(config))
        for name, ports in named.items():
            targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
            (self.folder / "targets" / f"{name}.yml").write_text(yaml.safe_dump(targets))

    def query(self, expr: str) -> list[Series]:
        """Labels and values now; those that are no finite number are left out."""
        found = self._ask("query", query=expr)
        assert found["resultType"] in ("vector", "scalar"), expr
        rows = found["result"] if found["resultType"] == "vector" else [{"value": found["result"]}]
        values = [(row.get("metric", {}), float(row["value"][1])) for row in rows]
        return [(labels, value) for labels, value in values if math.isfinite(value)]

    def label_values(self, label: str, series: str) -> list[str]:
        """What Grafana offers for a variable."""
        return self._ask(f"label/{label}/values", **{"match[]": series})

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def up(self) -> dict[str, list[float]]:
        """By job: 1 for each target that answers, 0 for each that does not."""
        jobs: dict[str, list[float]] = {}
        for labels, value in self.query("up"):
            jobs.setdefault(labels["job"], []).append(value)
        return jobs

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        self._child.check()
        try:
            return bool(self.query("vector(1)"))
        except OSError:
            return False

    def close(self) -> None:
        """End it."""
        self._child.terminate()
        self._child.wait(LEAVE_LIMIT_S)

    def _ask(self, what: str, **arguments: str) -> Any:
        url = f"{self._url}{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_LIMIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
