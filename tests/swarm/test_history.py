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

    monitor = ended.enter_context(closing(WatchingMonitor(swarm.invite, swarm.folder)))
    last = int(head.rounds[-1]["round"])

    def drawn() -> list[list[Any]] | None:
        rows = monitor.status.get("curve", [])
        known = {row[0] for row in rows if row[1] is not None}
        return rows if set(range(last + 1)) <= known else None

    rows = swarm.wait(drawn, TOLD_LIMIT_S, "the curve has every round")
    by_round = {row[0]: row for row in rows}
    tokens = [by_round[number][1] for number in range(last + 1)]
    assert tokens == sorted(tokens)
    timed = [number for number in range(last + 1) if by_round[number][2] is not None]
    assert {0, 1} <= set(timed) and len(timed) >= last - 3  # but for those during its absence
    told = {number: by_round[number][4] for number in range(2) if number in validated}
    assert told == {number: pytest.approx(validated[number], abs=1e-4) for number in told} != {}
    monitor.leave()

    text = swarm.run_command("log", swarm.invite, "--csv", "-", limit_s=120)
    listed = list(csv.DictReader(io.StringIO(text[text.index("round,time,") :])))
    found = {int(row["round"]): row for row in listed}
    assert set(range(last + 1)) <= set(found)
    assert found[0]["time"].endswith("Z") and found[0]["train_loss"]
    assert int(found[1]["record_bytes"]) > head.rounds[1]["payload_bytes"]  # of both stages
    kept = swarm.run_command("log", str(swarm.folder / "bootstrap"), "--json", "-", limit_s=60)
    history = json.loads(kept)["history"]
    assert [row["round"] for row in history if row["round"] >= 0][: last + 1] == list(
        range(last + 1)
    )
    print("\n".join(text.splitlines()[-15:]))
