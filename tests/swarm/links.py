"""Hosts on one machine, joined by links of a chosen rate, delay and loss, to be cut in silence.

    with Links(hosts=2, mbit=100, delay_ms=25) as links:
        server = subprocess.Popen(links.command(0, ["python", "-m", "http.server"]))
        links.cut(0)  # from now on nothing reaches it or comes from it, and nobody is told

Each host is a network namespace with one device, `wan0`, that leads to a relay in userspace
(relay.py). It needs Linux, root, iproute2 and /dev/net/tun, and touches nothing outside the
namespaces that it made; `available` says what is missing. All is removed at exit, and soon after
the process was killed, by the relay; the next `Links` removes what even that has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.swarm import namespaces
from tests.swarm.namespaces import Hosts
from tests.swarm.relay import DEVICE

ANSWER_LIMIT_S = 20.0
CLOSE_LIMIT_S = 15.0
_ROOT = Path(__file__).resolve().parents[2]
_MTU_RANGE = (1500, 9000)  # large packets cost the relay less, but none may block a line for long
_PACKET_S = 0.001
_MOST_HOSTS = 250


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What passed one host's link since the start, in IP packets, headers included."""

    sent_bytes: int
    received_bytes: int
    dropped_packets: int
    """Lost because one of the host's two queues was full; what a cut swallows is not counted."""
    lost_packets: int
    """Of what it sent: lost by chance, see `loss`. They are among its sent bytes."""


class Links(Hosts):
    """A context manager: hosts 0 to `hosts` - 1, each reached by all others at its address.

    Args:
        hosts: how many, 1 to 250.
        mbit: rate of each host's link in each direction, in 10^6 bits/s of IP packets.
        delay_ms: from any host to any other, one way; a round trip takes twice as long.
        queue_ms: how much, in time at that rate, can wait before each line.
        loss: the share of packets that never arrive, 0 to below 1: each is drawn by itself, once on
            its way from one host to another.
        seed: of the draws. Their order is the packets', which no two runs of real programs share:
            it makes the losses of a benchmark alike, not the same.
    """

    def __init__(
        self,
        hosts: int,
        *,
        mbit: float = 100.0,
        delay_ms: float = 0.0,
        queue_ms: float = 100.0,
        loss: float = 0.0,
        seed: int = 0,
    ):
        if not 1 <= hosts <= _MOST_HOSTS or mbit <= 0 or delay_ms < 0 or queue_ms <= 0:
            raise ValueError(f"no links of {hosts} hosts, {mbit} Mbit/s, {delay_ms}, {queue_ms} ms")
        if not 0 <= loss < 1:
            raise ValueError(f"no links that lose {loss} of the packets: choose from 0 to below 1")
        self.hosts = hosts
        bytes_per_s = mbit * 1e6 / 8
        super().__init__(namespaces.new_names(hosts), available)
        self._plan = {
            "owner": os.getpid(),
            "hosts": {name: self.address(host) for host, name in enumerate(self._names)},
            "bytes_per_s": bytes_per_s,
            "delay_s": delay_ms / 1e3,
            "queue_s": queue_ms / 1e3,
            "loss": loss,
            "seed": seed,
            "mtu": round(min(max(bytes_per_s * _PACKET_S, _MTU_RANGE[0]), _MTU_RANGE[1])),
        }
        self._relay: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def _set_up(self) -> None:
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "tests.swarm.relay", json.dumps(self._plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,  # else Ctrl-C would end it before what it carries
        )
        self._answer(self._relay)
        for host, name in enumerate(self._names):
            namespaces.ip("-n", name, "-batch", "-", lines=_set_up(self.address(host)))

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; twice does no harm."""
        relay, self._relay = self._relay, None
        if relay is not None:
            assert relay.stdin is not None and relay.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                relay.stdin.write(b"null\n")  # to close is not enough: forked children hold it open
                relay.stdin.flush()
            try:
                relay.wait(CLOSE_LIMIT_S)
            except subprocess.TimeoutExpired:
                relay.kill()
                relay.wait()
            relay.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                relay.stdin.close()
        super().close()

    # ---- use -------------------------------------------------------------------------------------
    def address(self, host: int) -> str:
        """The IPv4 address of a host, the same in every `Links`."""
        return f"10.88.0.{range(self.hosts)[host] + 1}"

    def processes(self, host: int) -> list[int]:
        """The ids of the processes that run on a host."""
        return namespaces.processes(self._names[host])

    @property
    def relay(self) -> int:
        """The id of the process that carries the packets."""
        if self._relay is None:
            raise RuntimeError("these links are closed")
        return self._relay.pid

    def cut(self, host: int) -> None:
        """Let every packet from and to a host vanish, from the return of this call on."""
        self._order(host, cut=True)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._order(host, cut=False)

    def part(self, hosts: Collection[int]) -> None:
        """Let every packet between these hosts and the others vanish, until `unite`."""
        for host in range(self.hosts):
            self._order(host, side=int(host in hosts))

    def unite(self) -> None:
        """Undo `part`."""
        self.part(())

    def slow(self, host: int, mbit: float, delay_ms: float) -> None:
        """From now on this is a host's rate, and a packet from or to it takes so much longer."""
        self._order(host, bytes_per_s=mbit * 1e6 / 8, more_s=delay_ms / 1e3)

    def quicken(self, host: int) -> None:
        """Undo `slow`."""
        self._order(host, bytes_per_s=self._plan["bytes_per_s"], more_s=0.0)

    def counters(self, host: int) -> Counters:
        """What has passed a host's link."""
        return Counters(**self._order(host))

    def _order(self, host: int, **changes: Any) -> dict[str, Any]:
        relay = self._relay
        if relay is None:
            raise RuntimeError("these links are closed")
        with self._lock:
            assert relay.stdin is not None
            order = {"host": range(self.hosts)[host], **changes}
            relay.stdin.write(json.dumps(order).encode() + b"\n")
            relay.stdin.flush()
            return self._answer(relay)

    def _answer(self, relay: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert relay.stdout is not None
        ready, _, _ = select.select([relay.stdout], [], [], ANSWER_LIMIT_S)
        line = relay.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"the relay does not answer (exit code {relay.poll()})")
        return json.loads(line)


@cache
def available() -> str:
    """Why there can be no links on this machine; empty if there can."""

    def probe(name: str) -> None:
        namespaces.ip("-n", name, "tuntap", "add", "dev", DEVICE, "mode", "tun")

    return namespaces.missing({"ip": "iproute2"}, ["/dev/net/tun"], probe)


def _set_up(address: str) -> str:
    """What a host's `ip` is to do, a line each.

    With a route to everywhere, a packet to an address that does not exist is lost as on the
    internet and not refused at once.
    """
    return (
        "link set lo up\n"
        f"address add {address}/24 dev {DEVICE}\n"
        f"link set {DEVICE} up\n"
        f"route add default dev {DEVICE}\n"
    )
