"""Replicas are hurt in every way, at every moment: they heal in time, and nothing goes wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.swarm import fault_runs
from tests.swarm.campaign import Fault

FAULTS, SEED = 20, 1
# A member, a head without a spare for it, and a member's p2pd.
SHORT = (
    Fault(kind="kill", role="last", phase="backward"),
    Fault(kind="freeze", role="head", phase="forward"),
    Fault(kind="p2pd", role="last", phase="between"),
)

pytestmark = pytest.mark.swarm
SHORT_STAGES = (0, 0, 1, 1, 1)


def told(line: str) -> None:
    print(line, flush=True)


@pytest.mark.timeout(400)
def test_two_stages_heal_after_a_kill_a_freeze_and_a_lost_p2pd(tmp_path: Path) -> None:
    began = time.monotonic()
    found = fault_runs.hurt(tmp_path, SHORT_STAGES, SHORT, replicas=2, seed=SEED, tell=told)
    print(f"{time.monotonic() - began:.0f} s")
    assert not found.flaws
    assert found.losses[-1][1] < found.losses[0][1]


@pytest.mark.timeout(7200)
def test_three_stages_heal_after_twenty_faults_and_learn_as_without_them(tmp_path: Path) -> None:
    assert not fault_runs.run(FAULTS, SEED, reference=True, folder=tmp_path, tell=told).flaws
