"""What tests of peer/ share, since it takes long to make: keys, sizes of activations, a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.peer.process import prepare
from tests.swarm.browser import Window, chromium


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """Four peers, in the order of their ids."""
    folder = tmp_path_factory.mktemp("keys")
    made = [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]
    return sorted(made, key=lambda identity: identity.peer_id)


@pytest.fixture(scope="session")
def known_activations() -> dict[object, Any]:
    """What was reckoned so far."""
    return {}


@pytest.fixture(scope="module")
def activations_are_reckoned_once(known_activations: dict[object, Any]) -> Iterator[None]:
    """Those of a stage take a third of a second, and many tests are of the same model."""
    reckon = prepare.activation_bytes

    def known_or_reckoned(manifest: Manifest, stage: int, **options: Any) -> Any:
        model, inner = json.dumps(manifest.model), replace(manifest.inner, warmup_tokens=0)
        shape = manifest.batch.microbatch_size, manifest.batch.sequence_length
        run = manifest.stages, *shape, inner, manifest.pipeline.recompute, manifest.document_end
        key = model, stage, *run, *sorted(options.items())
        if key not in known_activations:
            known_activations[key] = reckon(manifest, stage, **options)
        return known_activations[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "activation_bytes", known_or_reckoned)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Window]:
    """A start takes a second, a page in it a tenth."""
    if chromium() is None:
        pytest.skip("chromium is not installed (Debian's package is called chromium)")
    with Window() as window:
        yield window
