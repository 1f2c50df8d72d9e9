"""Peers are hurt at random, many at once: the run goes on, and all adds up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.swarm import chaos

# `make chaos` says how many seeds, from which one on, and for how long
FIRST = int(os.environ.get("CHAOS_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("CHAOS_SEEDS", "1")))
SECONDS = 60.0 * float(os.environ.get("CHAOS_MINUTES", "3"))

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(SECONDS + 1200)]


@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS)
def test_after_chaos_all_adds_up(tmp_path: Path, seed: int) -> None:
    def tell(line: str) -> None:
        print(f"seed {seed}: {line}", flush=True)

    assert not chaos.run(tmp_path, seed, SECONDS, tell)
