"""Two chains of one stage, made while their peers could not see each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm import links
from tests.swarm.harness import START_LIMIT_S, ProcessSwarm
from tests.swarm.small_run import fixed_steps, run_manifest

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(links.available()), reason=links.available() or "-"),
]

STEP_S, INNER_STEPS = 0.08, 40


def test_who_lost_a_young_chain_goes_on_where_only_the_archive_has_the_other_one(
    tmp_path: Path,
) -> None:
    """Two are cut off and go on; the third is alone with the bootstrap, whose archive follows it,
    and leaves. The archive vouches for its chain, and has no state yet.
    """
    with (
        links.Links(4, mbit=100.0, delay_ms=10.0) as between,
        ProcessSwarm(
            tmp_path, run_manifest(rounds=fixed_steps(INNER_STEPS)), links=between
        ) as swarm,
    ):
        first, second, third = (swarm.add_peer(step_s=STEP_S) for _ in range(3))
        swarm.wait_for_rounds(2, 2 * START_LIMIT_S)
        between.part([swarm.host(first), swarm.host(second)])
        apart_at = max(line["round"] for peer in (first, second) for line in peer.rounds)

        def alone() -> bool:
            kept = [line["round"] for line in third.rounds if line["members"] == 1]
            return any(number > apart_at and number in swarm.archived(0) for number in kept)

        swarm.wait(alone, 120, "the third one goes on alone")
        swarm.terminate(third)
        lasting = {entry.round: entry.digest for entry in swarm.round_log(third).entries()}
        between.unite()

        def going_on() -> bool:
            return all(
                any(line["round"] == -1 for line in peer.of_kind("resynced"))
                and peer.rounds[-1]["round"] > max(lasting)
                for peer in (first, second)
            )

        swarm.wait(going_on, 180, "who lost begins anew, and goes on")
        for peer in (first, second):
            kept = {entry.round: entry.digest for entry in swarm.round_log(peer).entries()}
            assert kept == lasting | kept, "it is on the archive's chain"
