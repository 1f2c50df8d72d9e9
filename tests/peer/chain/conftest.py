"""Peers that have made a chain, for those who download, check, keep or replay it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.dht.identity import Identity
from tests.peer.chain.archives import donor_of
from tests.peer.kept_chains import ChainMaker, manifest_of


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    return ChainMaker(identities[0], tmp_path / "state", manifest_of())


@pytest.fixture
def donor(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    """One of the archive's run."""
    return donor_of(identities[0], tmp_path / "donor")
