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

    def kept_rounds() -> bool:
        files = (swarm.folder / "bootstrap").glob("*-archive-*/history.jsonl")
        return any(len(file.read_text().splitlines()) > 3 for file in files)

    swarm.wait(kept_rounds, TOLD_LIMIT_S, "the bootstrap has seen rounds")
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
    assert 0 in timed and timed[-1] > timed[0] + 1  # from before the kill, and since
    assert rows[0][4] == pytest.approx(validated[0], abs=1e-4)
    assert any(rows[number][7] and rows[number][8] == 2 for number in timed)
    monitor.leave()

    text = swarm.run_command("log", swarm.invite, "--csv", "-", limit_s=120)
    listed = list(csv.DictReader(io.StringIO(text[text.index("round,rules,") :])))
    found = {int(row["round"]): row for row in listed}
    assert rounds.keys() <= found.keys()
    assert found[0]["at"].endswith("Z") and found[0]["validation"]
    assert int(found[0]["record_bytes"]) > head.rounds[0]["payload_bytes"]
    kept = swarm.run_command("log", str(swarm.folder / "bootstrap"), "--json", "-", limit_s=60)
    assert rounds.keys() <= {row["round"] for row in json.loads(kept)["history"]}
    print("\n".join(text.splitlines()[-15:]))
