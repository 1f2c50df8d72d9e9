"""A hundred thousand messages that nobody honest sends, to everybody of a run: nobody ends or
hangs, no memory is kept, and what is refused is counted.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from dilocox.peer.os_process import start_process
from tests.attacks.test_strangers import HONEST_S, LEAST_SHARE, rounds_in, swarm_of_three
from tests.docker.prometheus import free_ports
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import LocalSwarm
from tests.swarm.processes import family

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(2400)]

MESSAGES, SEED = 100_000, 1
FLOOD_LIMIT_S = 1800.0
MOST_MORE_MB = 50.0  # of a peer, or of the bootstrap
AFTER_S = 60.0
REFUSED = re.compile(r'^\w+_refused_total{.*reason="([\w ]+)".*} ([\d.]+)$', re.MULTILINE)


def private_mb(pid: int) -> float:
    """The memory that belongs to this process alone."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", rollup, re.MULTILINE)
    return sum(map(int, found)) / 1e3


def memory_mb(swarm: LocalSwarm) -> dict[str, float]:
    """That of all processes of the bootstrap and of each peer."""
    names = ("bootstrap", *(peer.name for peer in swarm.peers))
    return {
        name: sum(private_mb(process.pid) for process in family(f"{swarm.tag}.{name}"))
        for name in names
    }


def refused(port: int) -> dict[str, int]:
    """What a peer has refused, by reason."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as page:
        return {
            reason: int(float(count)) for reason, count in REFUSED.findall(page.read().decode())
        }


def most_more(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    return max(now[name] - before[name] for name in before)


def test_a_flood_of_nonsense_ends_nobody_and_stays_in_nobodys_memory(
    start_swarm: StartSwarm,
) -> None:
    (port,) = free_ports(1)
    swarm = swarm_of_three(start_swarm, "--metrics-port", str(port))
    honest = rounds_in(swarm, HONEST_S)
    before = memory_mb(swarm)
    log = swarm.folder / "flood.log"
    command = [sys.executable, "-m", "tests.attacks.flood", swarm.invite]
    command += [str(swarm.folder / "flood"), str(MESSAGES), str(SEED)]
    began, rounds = time.monotonic(), len(swarm.peers[0].rounds)
    child = start_process(command, log, env=swarm.environment("hostile"))
    more = [0.0]

    def all_sent() -> bool:
        more.append(most_more(memory_mb(swarm), before))
        return child.returncode is not None

    try:
        swarm.wait(all_sent, FLOOD_LIMIT_S, "all messages are sent")
    finally:
        child.terminate()
        child.wait(10.0)
    seconds = time.monotonic() - began
    rounds = len(swarm.peers[0].rounds) - rounds
    last: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    swarm.let_pass(AFTER_S)
    after = most_more(memory_mb(swarm), before)
    counted = refused(port)
    print(
        f"{last['sent']} messages in {seconds:.0f} s, {rounds} rounds; {honest} in "
        f"{HONEST_S:.0f} s before; at most {max(more):.0f} MB more, {after:.0f} a minute after; "
        f"refused {counted}; {last['results']}"
    )
    assert last["done"] and last["sent"] == MESSAGES
    assert rounds >= LEAST_SHARE * honest / HONEST_S * seconds
    assert max(more) < MOST_MORE_MB
    assert after < MOST_MORE_MB / 2
    kinds = ("frame", "group", "vote", "question")
    assert all(counted[f"averaging_{kind}"] for kind in kinds), counted
    swarm.assert_equal_chains()
    logs = [*swarm.folder.glob("peer-*.log"), *swarm.folder.glob("bootstrap*.log")]
    assert not [each for each in logs if re.search("Traceback|exception", each.read_text())]
