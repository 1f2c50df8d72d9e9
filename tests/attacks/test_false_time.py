"""A bootstrap that says a wrong time: who is in the run goes on, and has its records kept later."""

from __future__ import annotations

import pytest

from tests.attacks.honest import HONEST_S, LEAST_SHARE, rounds_in, swarm_of_three
from tests.swarm.conftest import StartSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

FALSE_S = 3600.0
KEPT_LIMIT_S = 90.0


@pytest.mark.parametrize("by", [FALSE_S, -FALSE_S])  # A10
def test_a_bootstrap_whose_clock_lies_stops_no_round(start_swarm: StartSwarm, by: float) -> None:
    swarm = swarm_of_three(start_swarm)
    honest = rounds_in(swarm, HONEST_S)
    swarm.kill_bootstrap()
    swarm.restart_bootstrap(skew_s=by)
    swarm.wait_for_bootstrap()
    lied_to = rounds_in(swarm, 2 * HONEST_S)
    print(
        f"{by:.0f} s: {honest} rounds in {HONEST_S:.0f} s, then {lied_to} in {2 * HONEST_S:.0f} s"
    )
    assert lied_to >= 2 * LEAST_SHARE * honest
    swarm.kill_bootstrap()
    swarm.restart_bootstrap()
    newest = max(swarm.chain())
    swarm.wait(lambda: newest in swarm.archived(0), KEPT_LIMIT_S, "the archive has what it missed")
    swarm.assert_equal_chains()
