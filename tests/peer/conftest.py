"""Keys for the tests of peer/, of which one takes a tenth of a second, and a single thread.

No example of hypothesis has a deadline: a busy machine stands still for longer than any of them.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from dilocox.dht.identity import Identity

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors are small here: on a busy machine a second thread costs more than it does."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """Four peers, in the order of their ids."""
    folder = tmp_path_factory.mktemp("keys")
    made = [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]
    return sorted(made, key=lambda identity: identity.peer_id)
