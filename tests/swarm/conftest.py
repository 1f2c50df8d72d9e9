"""Swarms for tests; each is ended, and checked to have left nothing, when its test is over."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import ProcessSwarm, memory_folder
from tests.swarm.links import Links, available
from tests.swarm.small_run import run_manifest

StartSwarm = Callable[..., ProcessSwarm]

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know whether their test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def start_swarm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartSwarm]:
    """Start a swarm: `start_swarm(rounds={"inner_steps": 10})` changes the manifest's sections.

    `links`: its hosts, which are made here and removed when the swarm has ended; where there can be
    none the test is skipped. `in_memory`: all its files are there, not on this machine's disk.
    """

    def tell(swarm: ProcessSwarm) -> None:
        if request.node.stash.get(FAILED, False):
            print(swarm.tails())

    def start(
        *, links: Links | None = None, in_memory: bool = False, **sections: Any
    ) -> ProcessSwarm:
        if links is not None:
            if reason := available():
                pytest.skip(reason)
            places.enter_context(links)
        folder = places.enter_context(memory_folder()) if in_memory else tmp_path
        swarm = ProcessSwarm(folder, run_manifest(**sections), links=links)
        places.callback(tell, swarm)
        return places.enter_context(swarm)

    with ExitStack() as places:
        yield start


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """Ends what it is given, however its test went, the last one first."""
    with ExitStack() as stack:
        yield stack
