"""What tests of peer/ share, since it takes long to make: keys, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dilocox.dht.identity import Identity
from tests.swarm.browser import Window, chromium


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """Four peers, in the order of their ids."""
    folder = tmp_path_factory.mktemp("keys")
    made = [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]
    return sorted(made, key=lambda identity: identity.peer_id)


@pytest.fixture(scope="module")
def browser() -> Iterator[Window]:
    """A start takes a second, a page in it a tenth."""
    if chromium() is None:
        pytest.skip("chromium is not installed (Debian's package is called chromium)")
    with Window() as window:
        yield window
