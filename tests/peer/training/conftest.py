"""A training loop in a test's own folder, and the time of its roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.peer.training import roles
from tests.clocks import TestClock
from tests.peer.loops import Loop


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TestClock:
    """What the roles of a head and of a member see of time."""
    clock = TestClock()
    monkeypatch.setattr(roles, "time", clock)
    return clock
