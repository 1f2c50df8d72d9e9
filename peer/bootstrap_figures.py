"""What can be asked of a running bootstrap over HTTP: figures, health, readiness.

The bootstrap's thread looks every few seconds, because the DHT process answers it alone; who asks
gets what it saw last. The text is written as the monitor's is.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from dilocox import __version__
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import PROTOCOL_VERSION
from dilocox.dht.manifest_keeper import ManifestKeeper
from dilocox.dht.node import RunDHT
from dilocox.dht.swarm import Swarm
from dilocox.peer.archive import Archive
from dilocox.peer.files import bytes_below
from dilocox.peer.memory import proportional_bytes
from dilocox.peer.metrics_server import Page, Pages, health_page, readiness_page
from dilocox.peer.monitor_metrics import CONTENT_TYPE, RUN_LABEL, Family

PREFIX = "dilocox_bootstrap_"
LOOK_PERIOD_S = 10.0
DISK_PERIOD_S = 60.0  # the archive may have many files
ASK_LIMIT_S = 2.0
STUCK_AFTER_S = 90.0  # a turn of the bootstrap's thread waits for the DHT for up to half a minute

Role = Literal["operator", "copy"]


@dataclass(frozen=True, kw_only=True)
class BootstrapFacts:
    """What was seen at one look; None and empty what is not known. Counts are since the start.

    archive_bytes, archive_rounds: by stage. served_bytes: by what it was. refused: by who refused
    and why. manifest_until: Unix time.
    """

    not_ready: str = "the first look is to come"
    dht_peers: int | None = None
    memory_bytes: int | None = None
    manifest_until: float = 0.0
    archive_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    archive_rounds: Mapping[int, int] = field(default_factory=dict[int, int])
    served_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, int] = field(default_factory=dict[str, int])


class BootstrapFigures:
    """Of one bootstrap; `tick` belongs to its thread, the pages to those who ask."""

    def __init__(
        self,
        *,
        role: Role,
        keeper: ManifestKeeper,
        dht: RunDHT,
        swarm: Swarm,
        archive: Archive,
        folder: Path,
    ):
        """folder: the archive's."""
        self._role: Role = role
        self._keeper = keeper
        self._dht = dht
        self._swarm = swarm
        self._archive = archive
        self._folder = folder
        self._facts = BootstrapFacts()
        self._archive_bytes: Mapping[int, int] = {}
        self._turn_at = time.monotonic()
        self._looked_at = self._measured_at = float("-inf")

    def tick(self) -> None:
        """Look, if it is due; takes a few seconds at most."""
        now = self._turn_at = time.monotonic()
        if now < self._looked_at + LOOK_PERIOD_S:
            return
        self._looked_at = now
        if now >= self._measured_at + DISK_PERIOD_S:
            self._measured_at = now
            self._archive_bytes = bytes_by_stage(self._folder)
        self._facts = self._look()

    def pages(self) -> Pages:
        """What is served."""
        signs = {
            "main thread": lambda: time.monotonic() < self._turn_at + STUCK_AFTER_S,
            "DHT process": lambda: bool(self._dht.running),
            "archive": lambda: self._archive.keeper is not None,
        }
        return {
            "/metrics": self.page,
            "/healthz": lambda: health_page(signs),
            "/readyz": lambda: readiness_page(self._facts.not_ready),
        }

    def page(self) -> Page:
        """The text of `/metrics`."""
        body = exposition(self._keeper.run[:RUN_LABEL], self._role, self._facts)
        return Page(body=body, content_type=CONTENT_TYPE)

    def _look(self) -> BootstrapFacts:
        keeper = self._archive.keeper
        refused = {
            "dht": self._swarm.refused.copy(),
            "archive": Counter[str]() if keeper is None else keeper.refused.copy(),
        }
        try:
            dht_peers = self._dht.known_nodes(ASK_LIMIT_S)
            refused["dht"] += self._dht.refused_values(ASK_LIMIT_S)
            not_ready = ""
        except EnvironmentFault as error:
            dht_peers, not_ready = None, str(error)
        if keeper is None:
            not_ready = not_ready or "the archive does not run"
        child = cast("int | None", self._dht.pid)  # pyright: ignore[reportUnknownMemberType]
        pids = (os.getpid(), child, self._dht.p2pd_pid)
        return BootstrapFacts(
            not_ready=not_ready,
            dht_peers=dht_peers,
            memory_bytes=sum(proportional_bytes(pid) for pid in pids if pid),
            manifest_until=self._keeper.expires_at,
            archive_bytes=self._archive_bytes,
            archive_rounds={} if keeper is None else keeper.rounds,
            served_bytes={} if keeper is None else keeper.served.copy(),
            refused={
                f"{source}_{reason}": count
                for source, counts in refused.items()
                for reason, count in counts.items()
            },
        )


def bytes_by_stage(folder: Path) -> dict[int, int]:
    """What the files of each stage's archive hold together; those that vanish meanwhile do not."""
    found: dict[int, int] = {}
    for path in folder.glob("stage*"):
        if path.name.removeprefix("stage").isdecimal():
            found[int(path.name.removeprefix("stage"))] = bytes_below(path)
    return found


def exposition(run: str, role: Role, facts: BootstrapFacts) -> bytes:
    """Everything as Prometheus reads it; run: the label's value."""
    lines = [
        line
        for family in _families(role, facts)
        if family.series
        for line in family.lines(run, PREFIX)
    ]
    return ("\n".join(lines) + "\n").encode()


def _families(role: Role, facts: BootstrapFacts) -> Iterable[Family]:
    def many(
        name: str,
        kind: Literal["gauge", "counter"],
        text: str,
        label: str,
        values: Mapping[int, int] | Mapping[str, int],
    ) -> Family:
        family = Family(name, kind, text)
        for key, value in values.items():
            family.add(value, **{label: key})
        return family

    def one(name: str, text: str, value: float | None) -> Family:
        family = Family(name, "gauge", text)
        family.add(value)
        return family

    build = Family("build_info", "gauge", "What runs here: the operator's bootstrap, or a copy.")
    build.add(1, version=__version__, protocol=PROTOCOL_VERSION, role=role)
    yield build
    yield one("ready", "Whether peers can join and fetch here.", float(not facts.not_ready))
    yield one("dht_peers", "Other DHT nodes that this one knows.", facts.dht_peers)
    memory = "Of all processes, proportional set size."
    yield one("memory_bytes", memory, facts.memory_bytes)
    until = "Until when the manifest is valid, if the operator's bootstrap does not renew it."
    yield one("manifest_expiry_timestamp_seconds", until, facts.manifest_until or None)
    kept = "Bytes on the disk of a stage's states and records."
    yield many("archive_bytes", "gauge", kept, "stage", facts.archive_bytes)
    newest = "The newest round of a stage that is kept; -1 before the first one."
    yield many("archive_round", "gauge", newest, "stage", facts.archive_rounds)
    served = {"state": 0, "record": 0} | dict(facts.served_bytes)
    sent = "Payload bytes of what was kept, sent to those who asked."
    yield many("served_bytes_total", "counter", sent, "kind", served)
    refused = "Records of others and requests that were refused, by who refused them and why."
    yield many("refused_total", "counter", refused, "reason", facts.refused)
