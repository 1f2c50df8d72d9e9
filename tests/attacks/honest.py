"""An honest swarm that is attacked: how fast it was before, and what it has taken up."""

from __future__ import annotations

from dilocox.peer.chain.store import Store
from dilocox.peer.rounds.record import RoundRecord
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.small_run import fixed_steps

INNER_STEPS, STEP_S = 60, 0.08  # about five seconds a round
HONEST_S = 40.0
MOST_MORE_MB = 50.0
LEAST_SHARE = 0.9 / 2  # of the honest rounds a minute, and a factor of two for busy machines


def swarm_of_three(start_swarm: StartSwarm, *first: str) -> ProcessSwarm:
    """first: more options of the first peer."""
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS))
    for options in (first, (), ()):
        swarm.add_peer(*options, step_s=STEP_S)
    swarm.wait_for_rounds(2, 120)
    return swarm


def rounds_in(swarm: ProcessSwarm, seconds: float) -> int:
    """Rounds that the first peer commits in so many seconds."""
    before = len(swarm.peers[0].rounds)
    swarm.let_pass(seconds)
    return len(swarm.peers[0].rounds) - before


def taken(swarm: ProcessSwarm) -> list[RoundRecord]:
    """The records of all peers and of the archive."""
    logs: list[Store] = [swarm.round_log(peer) for peer in swarm.peers]
    kept = swarm.folder.glob("bootstrap/*-archive-*/stage0/[0-9]*[0-9]/log")
    logs += [Store(folder) for folder in kept]
    headers = [log.header(number) for log in logs for number in log.rounds()]
    return [header for header in headers if header is not None]
