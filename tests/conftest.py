"""For all tests: one thread each, no deadlines for examples, and the longest test first.

Tests run in several processes at once (`make test`), on machines that do other work.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

# A busy machine stands still for longer than any deadline of one example.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

gc.disable()  # until all is imported, of which nothing is garbage


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Equal sums need equal orders of summation, and tensors here are too small for threads."""
    import torch  # here, so that the process that only hands out tests has not to load it

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs in this process leaves nothing of its settings to the next test."""
    root, name = logging.getLogger("dilocox"), logging.getLevelName(logging.WARNING)
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before
    logging.addLevelName(logging.WARNING, name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look through it for garbage took a sixteenth of all time."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The smoke swarm is the longest: it starts first, so that no process ends with it alone."""
    items.sort(key=lambda item: item.get_closest_marker("smoke") is None)
