"""Attacks run against the swarms of tests/swarm."""

from tests.swarm.conftest import pytest_runtest_makereport, start_swarm

__all__ = ["pytest_runtest_makereport", "start_swarm"]
