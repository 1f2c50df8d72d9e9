"""The history of a run outlives its monitors and a killed bootstrap: who looks late sees all."""

from __future__ import annotations

import csv
import io
import json
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.monitors import WatchingMonitor

pytestmark = pytest.mark.swarm

STEP_S = 0.05
ROUND_LIMIT_S = 120.0
TOLD_LIMIT_S = 60.0


@pytest.mark.timeout(480)
def test_a_monitor_that_starts_late_shows_all_rounds_though_the_bootstrap_was_killed(
    start_swarm: StartSwarm, ended: ExitStack
) -> None:
    swarm = start_swarm(stages=2, rounds={"inner_steps": 20})
    head, other = swarm.add_peer(stage=0, step_s=STEP_S), swarm.add_peer(stage=1)
    swarm.wait_for_rounds(3, ROUND_LIMIT_S, of=[head, other])
    swarm.kill_bootstrap()
    swarm.restart_bootstrap()
    swarm.wait_for_rounds(3, ROUND_LIMIT_S, of=[head, other])
    validated = {event["round"]: event["loss"] for event in head.of_kind("validated")}
    rounds = {event["round"]: event["chain_tokens"] for event in head.rounds}

    monitor = ended.enter_context(closing(WatchingMonitor(swarm.invite, swarm.folder)))

    def drawn() -> dict[int, list[Any]] | None:
        rows = {row[0]: row for row in monitor.status.get("curve", [])}
        return rows if rounds.keys() <= rows.keys() else None

    rows = swarm.wait(drawn, TOLD_LIMIT_S, "the curve has every round")
    assert {number: rows[number][1] for number in rounds} == rounds
    timed = [number for number in rounds if rows[number][2] is not None]
    assert {0, 1} <= set(timed) and len(timed) >= len(rounds) - 3  # but for its absence
    assert rows[1][4] == pytest.approx(validated[1], abs=1e-4)
    assert rows[1][7] > 0 and rows[1][8] == 2
    monitor.leave()

    text = swarm.run_command("log", swarm.invite, "--csv", "-", limit_s=120)
    listed = list(csv.DictReader(io.StringIO(text[text.index("round,time,") :])))
    found = {int(row["round"]): row for row in listed}
    assert rounds.keys() <= found.keys()
    assert found[0]["time"].endswith("Z") and found[1]["validation_loss"]
    assert int(found[1]["record_bytes"]) > head.rounds[1]["payload_bytes"]
    kept = swarm.run_command("log", str(swarm.folder / "bootstrap"), "--json", "-", limit_s=60)
    assert rounds.keys() <= {row["round"] for row in json.loads(kept)["history"]}
    print("\n".join(text.splitlines()[-15:]))
