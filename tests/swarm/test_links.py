"""The lab of slow links itself: rates, delays, cuts, and that nothing of it is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.swarm import namespaces
from tests.swarm.links import Links, available
from tests.swarm.processes import Program
from tests.swarm.relay import Line

PORT = 5000
LIMIT_S = 30.0
TOLERANCE = 0.15
ATTEMPTS = 3  # a machine that is busy for a moment can only make a transfer slower

# What runs on the hosts. The receiver says at how many Mbit/s it got what came after the first
# fifth (in which TCP speeds up); the echo returns datagrams; the sender sends so many bytes.
RECEIVER = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
peer, _ = server.accept()
total, received, marks = int(sys.argv[2]), 0, []
while received < total and (data := peer.recv(1 << 20)):
    received += len(data)
    if received > total / 5:
        marks.append((time.monotonic(), received))
(began, first), (ended, last) = marks[0], marks[-1]
# a receiver that had to wait for its core finds all of a short transfer at once
print((last - first) * 8 / 1e6 / (ended - began) if ended > began else "at once", flush=True)
"""
SENDER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.sendall(bytes(int(sys.argv[3])))
"""
ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(100))
"""
# Sends numbered datagrams every 20 ms and prints, for each that returns, number and milliseconds.
PINGER = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.setblocking(False)
peer.connect((sys.argv[1], 5000))
sent = []
count = int(sys.argv[2])
for number in range(count):
    sent.append(time.monotonic())
    peer.send(b"%d" % number)
    while time.monotonic() < sent[-1] + (0.02 if number < count - 1 else 0.3):
        try:
            back = int(peer.recv(100))
            print(back, (time.monotonic() - sent[back]) * 1e3, flush=True)
        except BlockingIOError:
            time.sleep(0.0005)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := available():
        pytest.skip(reason)
    with Lab() as made:
        yield made


class Lab(ExitStack):
    """Starts links and what runs on their hosts; ends all of it."""

    def links(
        self, hosts: int, *, mbit: float = 100.0, delay_ms: float = 0.0, loss: float = 0.0
    ) -> Links:
        links = Links(hosts, mbit=mbit, delay_ms=delay_ms, loss=loss)
        return self.enter_context(links)

    def start(self, links: Links, host: int, script: str, *arguments: object) -> Program:
        """Start a Python script on a host; without site packages, to be quick."""
        command = [sys.executable, "-S", "-E", "-c", script, *map(str, arguments)]
        program = Program(links.command(host, command))
        self.callback(program.end)
        return program


def flow(lab: Lab, links: Links, source: int, sink: int, mbit: float, *, seconds: float) -> Program:
    """Start a transfer that takes so long at this rate; its receiver."""
    port, size = PORT + source, round(mbit * 1e6 / 8 * seconds)
    receiver = lab.start(links, sink, RECEIVER, port, size)
    assert receiver.line() == "ready"
    lab.start(links, source, SENDER, links.address(sink), port, size)
    return receiver


def rates(
    lab: Lab, links: Links, ways: list[tuple[int, int]], mbit: float, *, seconds: float
) -> list[float]:
    """Mbit/s of simultaneous transfers between hosts, of the attempt with the fastest slowest."""
    best: list[float] = []
    for _ in range(ATTEMPTS):
        flows = [flow(lab, links, source, sink, mbit, seconds=seconds) for source, sink in ways]
        measured = [float(receiver.line()) for receiver in flows]
        assert max(measured) < mbit * (1 + TOLERANCE)
        best = max(best, measured, key=lambda each: min(each, default=0.0))
        if min(best) > mbit * (1 - TOLERANCE):
            break
    return best


# ---- the arithmetic ------------------------------------------------------------------------------
def test_a_line_passes_packets_one_after_the_other_and_drops_what_its_queue_cannot_hold() -> None:
    line = Line(bytes_per_s=1000.0, queue_s=1.0)
    assert [line.send(500, 10.0) for _ in range(3)] == pytest.approx([10.495, 10.995, 11.495])
    assert line.send(1, 10.0) is None
    assert line.send(500, 20.0) == pytest.approx(20.495)


def test_a_line_is_never_ahead_of_the_time() -> None:
    line = Line(bytes_per_s=1e9, queue_s=1.0)
    assert line.send(100, 5.0) == 5.0


# ---- rate and delay ------------------------------------------------------------------------------
@pytest.mark.swarm
@pytest.mark.parametrize(("mbit", "delay_ms"), [(10, 20), (100, 0), (100, 25)])
def test_tcp_gets_the_rate_of_the_link(lab: Lab, mbit: float, delay_ms: float) -> None:
    links = lab.links(2, mbit=mbit, delay_ms=delay_ms)
    assert rates(lab, links, [(1, 0)], mbit, seconds=2.0) == pytest.approx([mbit], rel=TOLERANCE)


@pytest.mark.swarm
def test_a_link_is_slowed_and_quickened_while_it_is_used(lab: Lab) -> None:
    links = lab.links(2, mbit=50)
    links.slow(1, 10.0, 20.0)
    assert rates(lab, links, [(1, 0)], 10.0, seconds=2.0) == pytest.approx([10.0], rel=TOLERANCE)
    links.quicken(1)
    assert rates(lab, links, [(1, 0)], 50.0, seconds=2.0) == pytest.approx([50.0], rel=TOLERANCE)


@pytest.mark.swarm
def test_what_passes_a_link_is_counted(lab: Lab) -> None:
    links, payload = lab.links(2, mbit=50), 50e6 / 8
    assert flow(lab, links, 1, 0, 50, seconds=1.0).line()
    received = links.counters(0)  # before the sender's, which still gets acknowledgements
    sent = links.counters(1)
    assert payload < received.received_bytes <= sent.sent_bytes < 1.15 * payload
    assert 0 < sent.received_bytes < 0.05 * payload


@pytest.mark.swarm
def test_both_directions_have_the_whole_rate(lab: Lab) -> None:
    links = lab.links(2, mbit=100, delay_ms=25)
    measured = rates(lab, links, [(0, 1), (1, 0)], 100, seconds=3.0)
    assert measured == pytest.approx([100, 100], rel=TOLERANCE)


@pytest.mark.swarm
def test_two_senders_share_the_line_of_their_receiver(lab: Lab) -> None:
    links = lab.links(3, mbit=40)
    receivers = [flow(lab, links, source, 0, 20, seconds=2.0) for source in (1, 2)]
    began, payload = links.counters(0).received_bytes, 2 * 20e6 / 8 * 2.0
    started = time.monotonic()
    for receiver in receivers:
        assert receiver.line()
    rate = (links.counters(0).received_bytes - began) * 8 / 1e6 / (time.monotonic() - started)
    assert rate < 40 * (1 + TOLERANCE)
    assert links.counters(0).received_bytes > payload


@pytest.mark.swarm
@pytest.mark.parametrize("delay_ms", [0, 30])
def test_a_round_trip_takes_twice_the_delay(lab: Lab, delay_ms: float) -> None:
    links = lab.links(2, mbit=100, delay_ms=delay_ms)
    assert lab.start(links, 0, ECHO).line() == "ready"
    pings = lab.start(links, 1, PINGER, links.address(0), 40).lines()
    trips = sorted(float(line.split()[1]) for line in pings)
    assert len(trips) >= 30
    assert 2 * delay_ms <= trips[0] < 2 * delay_ms + 5  # not all: the machine may be busy


# ---- loss --------------------------------------------------------------------------------------
@pytest.mark.swarm
def test_a_lossy_link_loses_its_share_of_packets_and_tcp_gets_through_all_the_same(
    lab: Lab,
) -> None:
    links = lab.links(2, mbit=100, loss=0.2)
    assert lab.start(links, 0, ECHO).line() == "ready"
    returned = len(lab.start(links, 1, PINGER, links.address(0), 200).lines())
    # both ways: 0.8 * 0.8 of 200, with a standard deviation of 7
    assert 95 < returned < 160
    counters = [links.counters(host) for host in range(2)]
    assert all(each.lost_packets > 10 for each in counters)
    assert not any(each.dropped_packets for each in counters)
    assert flow(lab, links, 1, 0, 1.0, seconds=1.0).line()


@pytest.mark.parametrize("loss", [-0.1, 1.0])
def test_a_loss_that_no_link_can_have_is_refused(loss: float) -> None:
    with pytest.raises(ValueError, match="lose"):
        Links(2, loss=loss)


# ---- cuts ----------------------------------------------------------------------------------------
@pytest.mark.swarm
@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_swallows_packets_both_ways_until_it_is_healed(lab: Lab, cut: int) -> None:
    links = lab.links(2, mbit=100, delay_ms=1)
    assert lab.start(links, 0, ECHO).line() == "ready"
    pinger = lab.start(links, 1, PINGER, links.address(0), 150)
    assert pinger.line()
    links.cut(cut)
    before = links.counters(cut)
    time.sleep(0.8)
    assert links.counters(cut) == before
    links.heal(cut)
    numbers = [int(line.split()[0]) for line in pinger.lines()]  # ends without an error
    lost = set(range(numbers[-1])) - set(numbers)
    assert 20 <= len(lost) <= 60
    assert len(range(min(lost), max(lost))) < len(lost) + 5  # in one piece
    assert numbers[-1] > 100


@pytest.mark.swarm
def test_a_transfer_outlives_a_cut_and_other_hosts_do_not_feel_it(lab: Lab) -> None:
    links = lab.links(4, mbit=20)
    through = flow(lab, links, 1, 0, 20, seconds=1.0)
    deadline = time.monotonic() + LIMIT_S
    while links.counters(0).received_bytes < 200_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    links.cut(1)
    assert rates(lab, links, [(3, 2)], 20, seconds=1.5) == pytest.approx([20], rel=TOLERANCE)
    assert not through.line(0.1)
    links.heal(1)
    assert through.line()


@pytest.mark.swarm
def test_parted_hosts_hear_only_those_of_their_side(lab: Lab) -> None:
    links = lab.links(3, mbit=100, delay_ms=1)
    for host in (0, 1):
        assert lab.start(links, host, ECHO).line() == "ready"
    links.part([0, 2])
    assert lab.start(links, 2, PINGER, links.address(0), 10).line()
    assert not lab.start(links, 2, PINGER, links.address(1), 10).line()
    links.unite()
    assert lab.start(links, 2, PINGER, links.address(1), 10).line()


# ---- nothing is left -----------------------------------------------------------------------------
@pytest.mark.swarm
def test_all_is_gone_at_exit_also_what_ran_there(lab: Lab) -> None:
    own = (namespaces.ip("link"), namespaces.ip("route"))
    links = lab.links(2)
    names = [links.command(host, [])[-1] for host in range(2)]
    echo = lab.start(links, 0, ECHO)
    assert echo.line() == "ready"
    assert links.processes(0) == [echo.pid]
    assert set(names) <= set(namespaces.existing())
    links.close()
    links.close()
    assert echo.ends_within(1.0)
    assert not set(names) & set(namespaces.existing())
    assert own == (namespaces.ip("link"), namespaces.ip("route"))
    with pytest.raises(RuntimeError, match="closed"):
        links.cut(0)


@pytest.mark.swarm
@pytest.mark.parametrize("relay_too", [False, True])
def test_links_of_a_killed_process_are_removed(lab: Lab, relay_too: bool) -> None:
    script = """
import subprocess, sys, time
from tests.swarm.links import Links
with Links(2) as links:
    inside = subprocess.Popen(links.command(1, ["sleep", "100"]))
    while links.processes(1) != [inside.pid]:
        time.sleep(0.01)
    print(inside.pid, links._relay.pid, *links._names, flush=True)
    time.sleep(100)
"""
    owner = Program([sys.executable, "-c", script])
    try:
        inside, relay, *names = owner.line().split()
        if relay_too:
            os.kill(int(relay), signal.SIGKILL)
    finally:
        owner.end()
    assert len(names) == 2
    if relay_too:  # the next ones do it
        assert set(names) <= set(namespaces.existing())
        lab.links(1)
    deadline = time.monotonic() + 5.0
    while set(names) & set(namespaces.existing()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(names) & set(namespaces.existing())
    assert not Path(f"/proc/{inside}/cmdline").exists() or is_zombie(int(inside))


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.swarm
def test_two_labs_at_once_do_not_meet(lab: Lab) -> None:
    one, other = lab.links(3), lab.links(2)
    assert lab.start(one, 2, ECHO).line() == "ready"
    assert not lab.start(other, 1, PINGER, one.address(2), 10).lines()
    assert one.counters(2).received_bytes == 0
    assert lab.start(one, 1, PINGER, one.address(2), 10).lines()


# ---- what cannot be ------------------------------------------------------------------------------
def test_the_reason_is_told_where_there_can_be_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in available.__wrapped__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "iproute2" in available.__wrapped__()


@pytest.mark.parametrize("options", [{"hosts": 0}, {"hosts": 2, "mbit": 0}, {"hosts": 251}])
def test_impossible_links_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no links"):
        Links(**options)


def test_a_host_that_does_not_exist_has_no_address() -> None:
    with pytest.raises(IndexError):
        Links(2).address(2)
    assert socket.inet_aton(Links(250).address(249))
