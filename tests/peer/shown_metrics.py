"""What a peer, the monitor and a bootstrap show to Prometheus, of parts that are only told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dilocox.compression.layout import FlatLayout
from dilocox.peer.commands import bootstrap
from dilocox.peer.commands.bootstrap import BootstrapFacts
from dilocox.peer.http_pages import metrics_page
from dilocox.peer.monitor import status
from dilocox.peer.process.metrics import PeerMetrics
from dilocox.peer.training.report import WAITING, RoundReport, Waiting
from tests.peer.fabricated import RUN, ToldSwarm
from tests.peer.local_peers import local_peer
from tests.peer.told_reports import REPORT, STATUS

NUMEL = 1024
WAITED_S: dict[Waiting, float] = dict.fromkeys(WAITING, 0.0)
WAITED_S["merge"], WAITED_S["neighbours"] = 0.25, 3.0
ROUND = replace(
    REPORT,
    exchange_s=0.3,
    matchmaking_s=4.0,
    ranks=(4, 8, 32),
    payload_bytes=500,
    compression_error=0.2,
    residual_norm=1.5,
)
BOOTSTRAP = BootstrapFacts(
    role="copy",
    not_ready="",
    dht_peers=7,
    memory_bytes=400_000_000,
    manifest_until=1.8e9,
    admission_end=1_790_000_000,
    archive_bytes={0: 1000, 1: 2000},
    archive_rounds={0: 11, 1: -1},
    served_bytes={"state": 5},
    refused={"dht_expiry": 3},
)


def counts(**kinds: int) -> Any:
    return SimpleNamespace(read=lambda: kinds)


class Shown:
    """A peer's metrics, and what they show of parts that are only told."""

    def __init__(self) -> None:
        self.meter = SimpleNamespace(
            state="training",
            compression_error=0.2,
            tokens=640,
            inner_steps=10,
            skipped_steps=1,
            computing_s=lambda: 12.5,
            waiting_s=WAITED_S,
        )
        self.allowance = SimpleNamespace(used_bytes=7_000_000, limit_bytes=5e9)
        self.local = local_peer(
            stage=1,
            layout=FlatLayout.of([("w", (NUMEL,))]),
            swarm=SimpleNamespace(sent_bytes=4, received_bytes=8, all_refused=Counter(often=3)),
        )
        self.lives = True  # of the coordinator and the averaging process
        self.coordinator = SimpleNamespace(
            is_alive=lambda: self.lives,
            revision=4,
            view=SimpleNamespace(stage={n: SimpleNamespace(state="spare") for n in "ab"}),
        )
        self.network = SimpleNamespace(
            running=True,
            sent_bytes=3,
            received_bytes=7,
            refused=Counter({"header": 2}),
            round_trips_s=lambda: {"upper": 0.05},
        )
        parts: dict[str, Any] = {
            "local": self.local,
            "averager": SimpleNamespace(is_alive=lambda: self.lives),
            "buffers": SimpleNamespace(
                sent=counts(averaging=1, state=2),
                received=counts(averaging=5, state=6),
                refused=counts(frame=0),
                probe_refused=counts(often=5),
            ),
            "meter": self.meter,
            "coordinator": self.coordinator,
            "reservation": SimpleNamespace(refused=Counter()),
            "network": self.network,
            "allowance": self.allowance,
        }
        self.metrics = PeerMetrics(**parts)

    @property
    def text(self) -> str:
        return self.metrics.pages()["/metrics"]().body.decode()

    def __call__(self, name: str, **labels: str) -> float | None:
        """The value of a sample of this stage; None where there is none."""
        wanted = {"stage": "1"} | labels
        values = [
            value for found, given, value in self.samples() if (found, given) == (name, wanted)
        ]
        assert len(values) <= 1
        return values[0] if values else None

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                yield sample.name.removeprefix("dilocox_"), sample.labels, sample.value

    def round(self, report: RoundReport = ROUND) -> None:
        self.metrics.on_event("round", asdict(report))

    def everything(self) -> None:
        """At least one sample of every metric."""
        self.metrics.on_status(replace(STATUS, train_loss=2.75))
        self.round()
        self.metrics.on_event("replica", {"epoch": 3, "members": ["a", "b"]})
        self.metrics.on_event("fault", {"stage": 1, "reason": "closed", "peer": "x"})
        self.metrics.on_event("healed", {"epoch": 4, "seconds": 0.7})


def monitor_text(swarm: ToldSwarm) -> str:
    return metrics_page(status.metrics_of(swarm.seen(swarm.look()))).body.decode()


def bootstrap_text(facts: BootstrapFacts) -> str:
    return metrics_page(bootstrap.metrics_of(RUN, lambda: facts)).body.decode()
