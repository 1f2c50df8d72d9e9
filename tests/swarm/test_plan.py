"""`dilocox plan --from` asks a live run for what a plan is made of."""

from __future__ import annotations

import json

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.small_run import fixed_steps

pytestmark = pytest.mark.swarm

LIMIT_S = 120.0


@pytest.mark.timeout(400)
def test_a_live_run_tells_its_peers_speed_h_and_link(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(rounds=fixed_steps(30))
    for _ in range(2):
        swarm.add_peer(step_s=0.2)
    swarm.wait_for_rounds(2, LIMIT_S)
    file = swarm.folder / "plan.json"
    swarm.run_command("plan", "--from", swarm.invite, "--json", str(file), limit_s=LIMIT_S)
    told = json.loads(file.read_text())
    print(f"\n{told['machines']}\n{told['measured']}\n{told['methods'][0]}")
    assert told["run"] == swarm.manifest.name and told["fits"]
    assert told["machines"]["peers"] == told["replicas"] == told["measured"]["peers"] == 2
    assert told["measured"]["inner_steps"] == 30
    assert told["machines"]["up_bytes_s"] > 1e5, "of the loopback"
    # its steps are paced, so the speed that it states is the one that follows
    paced = 2 * swarm.manifest.batch.tokens_per_step / 0.2
    assert 0.5 * paced < told["methods"][0]["tokens_per_s"] < 1.1 * paced
    swarm.run_command("plan", "--from", swarm.invite, "--mbit", "10", limit_s=LIMIT_S)
