"""A monitor of 200 peers stays small and answers at once."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles

import pytest

from dilocox.peer.memory_and_disk import proportional_bytes
from tests.dht.processes import NodeProgram, wait_until
from tests.swarm.monitors import WatchingMonitor, start_bootstrap
from tests.swarm.processes import TAG, Process, family

PEERS, STAGES, ROUNDS = 200, 4, 400
WATCH_S = 60.0
PAUSE_S = 0.25  # between two requests
MOST_MORE_MB = 100
MOST_MEDIAN_S = 0.2


@pytest.mark.swarm
@pytest.mark.timeout(420)
def test_a_monitor_of_200_peers_is_small_and_quick(
    tmp_path: Path, ended: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = {"heartbeat_s": 30.0, "matchmaking_s": 2.0, "exchange_s": 10.0, "vote_s": 5.0}
    bootstrap, invite = start_bootstrap(
        tmp_path, stages=STAGES, deadlines=deadlines, end_tokens=10**12
    )
    ended.callback(bootstrap.close)
    peers = _told(invite, tmp_path / "told")
    ended.callback(_end, peers)
    assert peers.stdout is not None and peers.stdout.readline() == "told\n"

    idle = uuid.uuid4().hex
    monkeypatch.setenv(TAG, idle)
    ended.callback(NodeProgram.start(tmp_path / "idle.key").end)
    monkeypatch.delenv(TAG)
    monitor = ended.enter_context(closing(WatchingMonitor(invite, tmp_path)))
    wait_until(lambda: _all_known(monitor), 120)
    took = _answers(monitor, WATCH_S)
    assert _all_known(monitor)

    of_idle, of_monitor = _megabytes(family(idle)), _megabytes(monitor.command.family.alive())
    sizes = [len(monitor.fetch(path)) for path in ("metrics", "status.json")]
    print(
        f"\n{PEERS} peers, {STAGES} stages, over {ROUNDS // 2} rounds: "
        f"monitor {of_monitor:.0f} MB, idle node {of_idle:.0f} MB; "
        f"/metrics median {1e3 * median(took):.1f} ms, 99 % {1e3 * quantiles(took, n=100)[98]:.1f} "
        f"ms of {len(took)}; {sizes[0]:,} bytes, status {sizes[1]:,} bytes"
    )
    assert of_monitor - of_idle < MOST_MORE_MB
    assert median(took) < MOST_MEDIAN_S
    monitor.leave()


def _told(invite: str, folder: Path) -> subprocess.Popen[str]:
    arguments = [invite, str(folder), str(PEERS), str(STAGES), str(ROUNDS)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.swarm.told_peers", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Its standard input ends, and so does it; its children watch it."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _all_known(monitor: WatchingMonitor) -> bool:
    """Whether every peer and all rounds are in its figures; one peer hosts all the stages."""
    status = monitor.status
    if not status:
        return False
    rounds = [stage["rounds"] for stage in status["stages"]]
    return (
        status["totals"]["peers"] == PEERS + STAGES - 1
        and min(rounds) > ROUNDS // 2
        and status["totals"]["contributors"] == PEERS
        and status["health"]["state"] == "training"
    )


def _answers(monitor: WatchingMonitor, seconds: float) -> list[float]:
    """How long each answer took while the monitor goes on looking."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        assert b"dilocox_swarm_healthy" in monitor.fetch("metrics")
        took.append(time.monotonic() - began)
        time.sleep(PAUSE_S)
    return took


def _megabytes(tree: list[Process]) -> float:
    """Memory of these processes; what they share with others enters by its share."""
    return sum(proportional_bytes(process.pid) for process in tree) / 1e6
