"""A running `dilocox monitor` as a test sees it, and a bootstrap that it watches."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.dht.processes import wait_until
from tests.peer.real_commands import START_LIMIT_S, Command, write_manifest

ANSWER_LIMIT_S = 10.0
LEAVE_LIMIT_S = 20.0


def series_of(text: str, prefix: str) -> dict[str, float]:
    """Metrics by their names without the prefix, and their labels without the run."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = sorted(each for each in sample.labels.items() if each[0] != "run")
            labels = ",".join(f'{label}="{value}"' for label, value in own)
            name = sample.name.removeprefix(prefix)
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def start_bootstrap(folder: Path, port: int = 0, **sections: Any) -> tuple[Command, str]:
    """The bootstrap of a run, and its invite; it can be started there again, at its port."""
    manifest = write_manifest(folder / "run.yaml", **sections)
    place = ["--state", str(folder / "bootstrap"), "--host", "127.0.0.1", "--port", str(port)]
    bootstrap = Command("bootstrap", str(manifest), *place, folder=folder)
    invite = folder / "bootstrap" / "invite"
    try:
        wait_until(invite.exists, START_LIMIT_S)
    except AssertionError:
        bootstrap.close()
        raise
    return bootstrap, invite.read_text().strip()


class WatchingMonitor:
    """The command and its pages."""

    def __init__(self, invite: str, folder: Path, *more: str):
        place = ["--port", "0", "--state", str(folder / "monitor"), *more]
        self.command = Command("monitor", invite, *place, folder=folder)
        self.command.wait_for("and figures at /metrics")
        found = re.search(r"status page (http://\S+/)", self.command.output())
        assert found is not None
        self.url = found[1]

    def fetch(self, path: str) -> bytes:
        """What it answers under a path."""
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_LIMIT_S) as answer:
            return answer.read()

    @property
    def status(self) -> dict[str, Any]:
        """The figures of the status page, empty before the first look."""
        return json.loads(self.fetch("status.json"))

    @property
    def series(self) -> dict[str, float]:
        """The metrics by name and labels, as in `peers{stage="0",state="spare"}`."""
        return series_of(self.fetch("metrics").decode(), "dilocox_swarm_")

    @property
    def ready(self) -> bool:
        """Whether it has looked."""
        try:
            return self.fetch("readyz") == b"ready\n"
        except urllib.error.HTTPError:
            return False

    def wait_for(self, state: str, limit_s: float) -> str:
        """Wait for a state of health; the sentence."""
        health: dict[str, str] = {}

        def there() -> bool:
            health.update(self.status.get("health", {}))
            return health.get("state") == state

        try:
            wait_until(there, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{state} not reached: {health}") from error
        return health["sentence"]

    def leave(self) -> None:
        """SIGTERM; it must leave nothing behind and end with 0."""
        self.command.process.send_signal(signal.SIGTERM)
        assert self.command.exit_code(LEAVE_LIMIT_S) == 0, self.command.output()
        self.command.clean_within(LEAVE_LIMIT_S)

    def close(self) -> None:
        """For the end of a test."""
        self.command.close()
