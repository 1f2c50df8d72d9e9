"""The history of a run outlives its monitors and a killed bootstrap: who looks late sees all, also
in TensorBoard and wandb.
"""

from __future__ import annotations

import csv
import io
import json
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import pytest

from dilocox.peer.chain.round_history import parsed_row
from dilocox.peer.monitor.tracking import SETTLED
from tests.peer.monitor.tracked import scalars, wandb_history
from tests.swarm.conftest import StartSwarm
from tests.swarm.monitors import WatchingMonitor

pytestmark = pytest.mark.swarm

STEP_S = 0.05
ROUND_LIMIT_S = 120.0
MORE_ROUNDS = 28  # so that the monitor starts after round 30
TOLD_LIMIT_S = 60.0


@pytest.mark.timeout(900)
def test_a_monitor_that_starts_late_shows_all_rounds_though_the_bootstrap_was_killed(
    start_swarm: StartSwarm, ended: ExitStack
) -> None:
    swarm = start_swarm(stages=2, rounds={"inner_steps": 20})
    head = swarm.add_peer(stage=0, step_s=STEP_S)
    other = swarm.add_peer("--name", "Ada", "--team", "Foxes", stage=1)
    swarm.wait_for_rounds(3, ROUND_LIMIT_S, of=[head, other])

    def told_of() -> list[int] | None:
        """Rounds of which the bootstrap heard a loss: a head states its newest one alone."""
        files = (swarm.folder / "bootstrap").glob("*-archive-*/history.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines()]
        listed = map(json.loads, lines[:-1])  # the last may be half written
        rows = [parsed_row(each) for each in listed if isinstance(each[0], int)]  # others are names
        heard = [row.round for row in rows if row.round >= 0 and row.validation is not None]
        return sorted(set(heard)) if len(rows) > 3 and heard else None

    heard = swarm.wait(told_of, ROUND_LIMIT_S, "the bootstrap has seen rounds, and a loss")[0]
    swarm.kill_bootstrap()
    swarm.restart_bootstrap()
    swarm.wait_for_rounds(MORE_ROUNDS, 3 * ROUND_LIMIT_S, of=[head, other])
    validated = {event["round"]: event["loss"] for event in head.of_kind("validated")}
    rounds = {event["round"]: event["chain_tokens"] for event in head.rounds}
    assert max(rounds) >= 30

    tracked = swarm.folder / "tracked"
    track = ["--track", str(tracked)]
    if find_spec("wandb") is not None:
        track += ["--track-wandb", str(swarm.folder / "wandb-files")]
    watching = WatchingMonitor(swarm.invite, swarm.folder, *track)
    monitor = ended.enter_context(closing(watching))

    def drawn() -> dict[int, list[Any]] | None:
        rows = {row[0]: row for row in monitor.status.get("curve", [])}
        return rows if rounds.keys() <= rows.keys() else None

    rows = swarm.wait(drawn, TOLD_LIMIT_S, "the curve has every round")
    assert {number: rows[number][1] for number in rounds} == rounds
    timed = [number for number in rounds if rows[number][2] is not None]
    assert 0 in timed and timed[-1] > timed[0] + 1  # from before the kill, and since
    assert rows[heard][4] == pytest.approx(validated[heard], abs=1e-4)
    assert any(rows[number][7] and rows[number][8] == 2 for number in timed)
    seen = max(rounds) - SETTLED  # of what came meanwhile there may be more

    def noted() -> bool:
        note = tracked / "tracked.json"
        return note.exists() and json.loads(note.read_text())["round"] >= seen

    swarm.wait(noted, TOLD_LIMIT_S, "the event files have every round")
    monitor.leave()
    losses, tokens = (scalars(tracked, tag) for tag in ("loss/validation", "tokens/total"))
    steps = [step for step, _ in tokens if step >= 0]
    # one may be void, in which no bootstrap was there
    assert steps == [event["round"] for event in head.rounds if event["round"] <= steps[-1]]
    assert {n: dict(tokens)[n] for n in rounds if n <= seen} == {
        number: count for number, count in rounds.items() if number <= seen
    }
    assert len(dict(losses)) == len(losses)
    assert dict(losses)[heard] == pytest.approx(validated[heard], abs=1e-4)
    if find_spec("wandb") is not None:
        (file,) = (swarm.folder / "wandb-files").glob("wandb/offline-run-*/run-*.wandb")
        written = {each["round"]: each.get("tokens/total") for each in wandb_history(file)}
        assert written == dict(tokens)
    print(f"tracked: {len(tokens)} rounds, {len(losses)} validation losses: {losses}")

    assert swarm.terminate(other) == 0
    text = swarm.run_command("log", swarm.invite, "--csv", "-", limit_s=120)
    listed = list(csv.DictReader(io.StringIO(text[text.index("round,rules,") :])))
    found = {int(row["round"]): row for row in listed}
    assert rounds.keys() <= found.keys()
    assert found[0]["at"].endswith("Z") and found[heard]["validation"]
    assert int(found[0]["record_bytes"]) > head.rounds[0]["payload_bytes"]
    kept = swarm.run_command("log", str(swarm.folder / "bootstrap"), "--json", "-", limit_s=60)
    assert rounds.keys() <= {row["round"] for row in json.loads(kept)["history"]}
    (ada,) = json.loads(kept)["names"]  # a folder knows nothing of who is there
    assert ada["name"] == "Ada" and ada["tokens"] > 0
    given = swarm.run_command("log", swarm.invite, "--contributions", limit_s=120)
    assert "(name Ada, team Foxes): " in given and "\nteam Foxes: " in given
    print("\n".join(text.splitlines()[-15:]))
