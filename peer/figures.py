"""What can be asked of a running peer over HTTP: figures, health, readiness.

Everything here is read in the threads of those who ask, while the peer trains: nothing waits, takes
a lock for long, or asks another process.
"""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading

from dilocox import __version__
from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import StageBuffers
from dilocox.peer.coordinator import Coordinator
from dilocox.peer.join import Joined
from dilocox.peer.metrics import Build, PeerMetrics
from dilocox.peer.metrics_server import Pages, health_page, readiness_page
from dilocox.peer.peer_facts import PeerFacts
from dilocox.peer.place import Place
from dilocox.peer.resting import Allowance
from dilocox.peer.tally import Tally
from dilocox.pipeline.desk import Desk
from dilocox.pipeline.network import Network


class Figures:
    """Of one peer. `metrics` is to hear what its reporter tells."""

    def __init__(
        self,
        *,
        place: Place,
        joined: Joined,
        averager: StageAverager,
        buffers: StageBuffers,
        tally: Tally,
        coordinator: Coordinator,
        desk: Desk,
        network: Network,
        allowance: Allowance,
    ):
        self._place = place
        self._joined = joined
        self._averager = averager
        self._buffers = buffers
        self._tally = tally
        self._coordinator = coordinator
        self._desk = desk
        self._network = network
        self._allowance = allowance
        self.metrics = PeerMetrics(
            build=Build(version=__version__, run=place.run, stage=place.stage),
            numel=place.layout.numel,
            facts=self.facts,
        )

    def pages(self) -> Pages:
        """What is served; call it in the thread that trains, once all others run."""
        signs = {
            "training": threading.current_thread().is_alive,
            "coordinator": self._coordinator.is_alive,
            "replica network": lambda: self._network.running,
            "averaging process": lambda: bool(self._averager.is_alive()),
            "DHT process": lambda: bool(self._joined.dht.running),
        }
        return {
            "/metrics": self.metrics.page,
            "/healthz": lambda: health_page(signs),
            "/readyz": lambda: readiness_page(self._not_ready),
        }

    def facts(self) -> PeerFacts:
        """What the metrics ask for."""
        tally, network, swarm = self._tally, self._network, self._joined.swarm
        refused = {
            "pipeline": network.refused + self._desk.refused.copy(),
            "averaging": self._buffers.refused.read(),
            "dht": swarm.refused.copy(),
        }
        hosts = self._coordinator.view.stage.values()
        return PeerFacts(
            not_ready=self._not_ready,
            tokens=tally.tokens,
            inner_steps=tally.inner_steps,
            skipped_steps=tally.skipped_steps,
            computing_s=tally.computing_s(),
            waiting_s=dict(tally.waiting_s),
            sent_bytes=self._buffers.sent.read()
            | {"activations": network.sent_bytes, "dht": swarm.sent_bytes},
            received_bytes=self._buffers.received.read()
            | {"activations": network.received_bytes, "dht": swarm.received_bytes},
            refused={
                f"{source}_{reason}": count
                for source, counts in refused.items()
                for reason, count in counts.items()
            },
            round_trips_s=network.round_trips_s(),
            revision=self._coordinator.revision,
            spares=sum(record.state == "spare" for record in hosts),
            reachability=self._place.reachability,
            month_bytes=self._allowance.used_bytes,
            month_limit_bytes=self._allowance.limit_bytes,
        )

    @property
    def _not_ready(self) -> str:
        """Why this peer does not take part, or empty."""
        state = self._tally.state
        return "" if state == "training" else state
