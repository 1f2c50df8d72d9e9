"""Carries packets between the hosts of a `Links` as slow lines would; a process of its own.

A host's only way out is a TUN device whose other end is held here. A packet waits for its turn on
the sender's line, then for the delay, then for its turn on the receiver's line; a line whose queue
is full drops it, as a router does, and between the two lines some are lost by chance. Everything is
arithmetic on due times: no kernel module shapes.

Orders come as JSON lines on standard input and each is answered on standard output. At the order to
end, or when the process that started this one is gone, the hosts are removed with all that runs
there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm import namespaces

DEVICE = "wan0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_LONGEST_PACKET = 1 << 16
_READS_AT_ONCE = 64  # then the other hosts have their turn
_TICK_S = 0.0005  # packets due within one tick go together: fewer awakenings, hardly less exact
_CREDIT_S = 0.005  # what a line catches up when this process did not get the processor in time
_LOOK_S = 0.5  # how often to look whether the owner lives


class Line:
    """One direction of a host's link."""

    def __init__(self, bytes_per_s: float, queue_s: float):
        self.bytes_per_s = bytes_per_s
        self._queue_s = queue_s
        self._free_at = 0.0

    def send(self, size: int, now: float) -> float | None:
        """When a packet handed over `now` has passed; None if the queue has no room for it."""
        start = max(self._free_at, now - _CREDIT_S)
        if start - now > self._queue_s:
            return None
        self._free_at = start + size / self.bytes_per_s
        return max(now, self._free_at)


@dataclass
class Host:
    """One host's end of its link. Bytes are those of IP packets. side: of a net in two halves.
    more_s: of delay, for it alone.
    """

    device: int
    up: Line
    down: Line
    cut: bool = False
    side: int = 0
    more_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped_packets: int = 0
    lost_packets: int = 0


class Relay:
    """The lines between hosts, by their IPv4 addresses. loss: the share of packets lost."""

    def __init__(
        self,
        hosts: dict[str, Host],
        delay_s: float,
        owner: int,
        *,
        loss: float = 0.0,
        seed: int = 0,
    ):
        self._loss, self._chance = loss, random.Random(seed)
        self._owner = owner
        self._hosts = list(hosts.values())
        self._by_address = {socket.inet_aton(address): host for address, host in hosts.items()}
        self._by_device = {host.device: host for host in self._hosts}
        self._delay_s = delay_s
        # (due, number, receiver, whether it has passed the receiver's line, packet)
        self._under_way: list[tuple[float, int, Host, bool, bytes]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Carry packets and follow orders until there is nobody left to order."""
        looked_at = time.monotonic()
        orders = sys.stdin.fileno()
        while True:
            due = self._under_way[0][0] - time.monotonic() if self._under_way else _LOOK_S
            wait = min(_LOOK_S, max(_TICK_S, due))
            ready, _, _ = select.select([orders, *self._by_device], [], [], wait)
            for descriptor in ready:
                if descriptor != orders:
                    self._take(self._by_device[descriptor])
                elif not self._follow_order():
                    return
            self._deliver(time.monotonic())
            if time.monotonic() - looked_at > _LOOK_S:
                looked_at = time.monotonic()
                # the input may be held open by other children of an owner that was killed
                if os.getppid() != self._owner:
                    return

    def _take(self, sender: Host) -> None:
        """Put what a host sends on its line."""
        for _ in range(_READS_AT_ONCE):
            try:
                packet = os.read(sender.device, _LONGEST_PACKET)
            except BlockingIOError:
                return
            receiver = self._by_address.get(packet[16:20])  # the destination in an IPv4 header
            if receiver is None or sender.cut or sender.side != receiver.side:
                continue
            left_at = sender.up.send(len(packet), time.monotonic())
            if left_at is None:
                sender.dropped_packets += 1
                continue
            sender.sent_bytes += len(packet)
            if self._loss and self._chance.random() < self._loss:
                sender.lost_packets += 1
                continue
            delay_s = self._delay_s + sender.more_s + receiver.more_s
            self._put(left_at + delay_s, receiver, False, packet)

    def _deliver(self, now: float) -> None:
        """Move on what is due: onto the receiver's line, and from there to the receiver."""
        while self._under_way and self._under_way[0][0] <= now:
            due, _, receiver, passed, packet = heapq.heappop(self._under_way)
            if receiver.cut:
                continue
            if not passed:
                arrives_at = receiver.down.send(len(packet), due)
                if arrives_at is None:
                    receiver.dropped_packets += 1
                else:
                    self._put(arrives_at, receiver, True, packet)
                continue
            with contextlib.suppress(OSError):  # the kernel has no room: lost
                os.write(receiver.device, packet)
                receiver.received_bytes += len(packet)

    def _put(self, due: float, receiver: Host, passed: bool, packet: bytes) -> None:
        heapq.heappush(self._under_way, (due, next(self._numbers), receiver, passed, packet))

    def _follow_order(self) -> bool:
        """Do what the next line says and answer it; False if that is to end."""
        order = json.loads(sys.stdin.buffer.readline() or "null")
        if order is None:
            return False
        host = self._hosts[order["host"]]
        host.cut = order.get("cut", host.cut)
        host.side = order.get("side", host.side)
        host.more_s = order.get("more_s", host.more_s)
        for line in (host.up, host.down):
            line.bytes_per_s = order.get("bytes_per_s", line.bytes_per_s)
        answer(
            sent_bytes=host.sent_bytes,
            received_bytes=host.received_bytes,
            dropped_packets=host.dropped_packets,
            lost_packets=host.lost_packets,
        )
        return True


def answer(**facts: Any) -> None:
    """Write one line to whoever gives the orders."""
    print(json.dumps(facts), flush=True)


def open_device(namespace: str, mtu: int) -> int:
    """Make a TUN device inside a namespace; the descriptor of its other end. IPv4 only."""
    with inside(namespace):
        for scope in ("all", "default"):
            setting = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
            if setting.exists():
                setting.write_text("1")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name_and_flags = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, name_and_flags)
    namespaces.ip("-n", namespace, "link", "set", DEVICE, "mtu", str(mtu))
    return device


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread be in a network namespace, and then in its own again."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with Path("/proc/self/ns/net").open() as own, Path("/run/netns", namespace).open() as other:
        try:
            _enter(libc, other.fileno())
            yield
        finally:
            _enter(libc, own.fileno())


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def main() -> None:
    """Serve the hosts that the only argument describes."""
    plan = json.loads(sys.argv[1])
    # First in line for the processor: tests that compute on all cores must not change the lines.
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    try:
        hosts = {
            address: Host(
                device=open_device(namespace, plan["mtu"]),
                up=Line(plan["bytes_per_s"], plan["queue_s"]),
                down=Line(plan["bytes_per_s"], plan["queue_s"]),
            )
            for namespace, address in plan["hosts"].items()
        }
        answer(ready=True)
        chance = {"loss": plan["loss"], "seed": plan["seed"]}
        Relay(hosts, plan["delay_s"], plan["owner"], **chance).run()
    finally:
        namespaces.remove(list(plan["hosts"]))


if __name__ == "__main__":
    main()
