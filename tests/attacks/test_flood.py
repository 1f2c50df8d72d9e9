"""A hundred thousand messages that nobody honest sends, to everybody of a run: nobody ends or
hangs, no memory is kept, and what is refused is counted.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from urllib.request import urlopen

import pytest

from dilocox.peer.os_process import start_process
from tests.attacks.honest import (
    HONEST_S,
    LEAST_SHARE,
    MOST_MORE_MB,
    rounds_in,
    swarm_of_three,
)
from tests.ports import free_port
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.processes import family

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(2400)]

MESSAGES, SEEDS = 100_000, (1, 2)
FLOOD_LIMIT_S = 1800.0
LEFT_MB = 20.0
AFTER_S = 60.0
REFUSED = re.compile(r'^\w+_refused_total{.*reason="([\w ]+)".*} ([\d.]+)$', re.MULTILINE)


def memory_mb(swarm: ProcessSwarm) -> dict[str, float]:
    """That of all processes of the bootstrap and of each peer; of their p2pd by itself."""
    found = defaultdict[str, float](float)
    for name in ("bootstrap", *(peer.name for peer in swarm.peers)):
        for process in family(f"{swarm.tag}.{name}"):
            kind = "p2pd" if process.name == "p2pd" else "python"
            found[f"{name} {kind}"] += process.anonymous_mb
    return found


def refused(port: int) -> dict[str, int]:
    """What a peer has refused, by reason."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as page:
        return {
            reason: int(float(count)) for reason, count in REFUSED.findall(page.read().decode())
        }


def most_more(now: Mapping[str, float], before: Mapping[str, float], kind: str) -> float:
    return max(now[name] - before[name] for name in before if name.endswith(kind))


def flood(swarm: ProcessSwarm, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Send all; what the stranger says at last, and the most memory that was taken meanwhile."""
    log = swarm.folder / f"flood-{seed}.log"
    command = [sys.executable, "-m", "tests.attacks.flood", swarm.invite]
    command += [str(swarm.folder / "flood"), str(MESSAGES), str(seed)]
    child = start_process(command, log, env=swarm.environment("hostile"))
    peak: dict[str, float] = {}

    def all_sent() -> bool:
        for name, mb in memory_mb(swarm).items():
            peak[name] = max(mb, peak.get(name, 0.0))
        return child.returncode is not None

    try:
        swarm.wait(all_sent, FLOOD_LIMIT_S, "all messages are sent")
    finally:
        child.terminate()
        child.wait(10.0)
    return json.loads(log.read_text().splitlines()[-1]), peak


def test_a_flood_of_nonsense_ends_nobody_and_stays_in_nobodys_memory(
    start_swarm: StartSwarm,
) -> None:
    port = free_port()
    swarm = swarm_of_three(start_swarm, "--metrics-port", str(port))
    honest = rounds_in(swarm, HONEST_S)
    held = [memory_mb(swarm)]
    for seed in SEEDS:
        began, rounds = time.monotonic(), len(swarm.peers[0].rounds)
        last, peak = flood(swarm, seed)
        seconds = time.monotonic() - began
        rounds = len(swarm.peers[0].rounds) - rounds
        swarm.let_pass(AFTER_S)
        held.append(memory_mb(swarm))
        counted = refused(port)
        more = [
            f"{kind} {most_more(peak, held[-2], kind):.0f} MB more at most, "
            f"{most_more(held[-1], held[-2], kind):.0f} a minute after"
            for kind in ("python", "p2pd")
        ]
        print(
            f"{last['sent']} messages in {seconds:.0f} s, {rounds} rounds ({honest} in "
            f"{HONEST_S:.0f} s before); {'; '.join(more)}; refused {counted}"
        )
        assert last["done"] and last["sent"] == MESSAGES
        assert rounds >= LEAST_SHARE * honest / HONEST_S * seconds
        assert most_more(peak, held[-2], "") < MOST_MORE_MB
        kinds = [f"averaging_{kind}" for kind in ("frame", "vote", "question")]
        assert all(
            counted[kind] for kind in (*kinds, "dht_question", "dht_type", "probe_question")
        ), counted
        print(last["results"])
    # allocators give back later than in a minute, if at all: what must not be is that it goes on
    assert most_more(held[-1], held[-2], "") < LEFT_MB
    swarm.assert_equal_chains()
    logs = [*swarm.folder.glob("peer-*.log"), *swarm.folder.glob("bootstrap*.log")]
    assert not [each for each in logs if re.search("Traceback|exception", each.read_text())]
