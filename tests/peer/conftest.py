"""Keys for the tests of peer/, of which one takes a tenth of a second."""

from __future__ import annotations

import pytest

from dilocox.dht.identity import Identity


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """Four peers, in the order of their ids."""
    folder = tmp_path_factory.mktemp("keys")
    made = [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]
    return sorted(made, key=lambda identity: identity.peer_id)
