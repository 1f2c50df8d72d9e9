"""Swarms for tests; each is ended, and checked to have left nothing, when its test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import LocalSwarm, run_manifest

StartSwarm = Callable[..., LocalSwarm]


@pytest.fixture
def start_swarm(tmp_path: Path) -> Iterator[StartSwarm]:
    """Start a swarm: `start_swarm(rounds={"inner_steps": 10})` changes the manifest's sections."""
    swarms: list[LocalSwarm] = []

    def start(**sections: Any) -> LocalSwarm:
        swarms.append(LocalSwarm(tmp_path, run_manifest(**sections)))
        return swarms[-1]

    yield start
    for swarm in swarms:
        try:
            swarm.close()
        finally:
            print(swarm.tails())  # noqa: T201 - pytest shows it where a test failed
