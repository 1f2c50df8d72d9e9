"""For tests of exchanges, most of which have a member that errs or lies."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What others do wrong is no error of this peer's."""
    yield
    assert not [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
