"""Peers are hurt at random, many at once: the run goes on, and all adds up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.swarm import chaos

# `make chaos` says how many seeds, and for how long
SEEDS = range(1, 1 + int(os.environ.get("CHAOS_SEEDS", "1")))
SECONDS = 60.0 * float(os.environ.get("CHAOS_MINUTES", "3"))

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(SECONDS + 900)]


@pytest.mark.parametrize("seed", SEEDS)
def test_after_chaos_all_adds_up(tmp_path: Path, seed: int) -> None:
    def tell(line: str) -> None:
        print(f"seed {seed}: {line}", flush=True)

    assert not chaos.run(tmp_path, seed, SECONDS, tell)
