"""A peer follows the operator's newest manifest, and nobody else's, and never an older one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_revision import in_state
from dilocox.dht.records import ClaimRecord
from dilocox.dht.swarm import Swarm
from dilocox.peer.revision import ManifestWatch, kept_manifest, newer_of
from dilocox.peer.view import that_count

FIRST = Manifest.from_dict({"name": "demo", "model": "tiny", "end_tokens": 1_000_000})
PAUSED = in_state(FIRST, "paused")


class Told:
    """A DHT that has this manifest."""

    def __init__(self) -> None:
        self.signed: SignedManifest | None = None

    def newest_manifest(self, _timeout_s: float) -> SignedManifest | None:
        return self.signed


@pytest.fixture
def run(identities: list[Identity]) -> str:
    return run_id(identities[0].public_key, "demo")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watch(told: Told, run: str, tmp_path: Path) -> ManifestWatch:
    return ManifestWatch(cast("Swarm", told), run, FIRST, tmp_path / "newest.signed")


def test_a_newer_one_counts_and_is_kept_for_the_next_start(
    watch: ManifestWatch, told: Told, identities: list[Identity], run: str, tmp_path: Path
) -> None:
    assert not watch.look(), "the DHT has none"
    first, told.signed = (SignedManifest.sign(identities[0], each) for each in (FIRST, PAUSED))
    assert watch.look()
    assert watch.manifest == PAUSED
    assert not watch.look(), "it is known"
    told.signed = first
    assert not watch.look(), "never back"
    assert watch.manifest == PAUSED
    kept = kept_manifest(tmp_path / "newest.signed", run)
    assert kept is not None
    assert newer_of(first, kept, run).verify(run) == PAUSED
    assert newer_of(first, None, run) is first


def test_what_is_not_the_operators_or_not_to_be_read_counts_nothing(
    watch: ManifestWatch,
    told: Told,
    identities: list[Identity],
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told.signed = SignedManifest.sign(identities[1], PAUSED)
    assert not watch.look()
    monkeypatch.setattr("dilocox.dht.manifest.PROTOCOL_VERSION", 99)
    told.signed = SignedManifest.sign(identities[0], replace(PAUSED, protocol=99))
    monkeypatch.undo()
    assert not watch.look()
    assert "protocol is 99; this dilocox speaks protocol" in caplog.text
    assert watch.manifest == FIRST
    assert kept_manifest(tmp_path / "newest.signed", run) is None


def test_claims_of_records_behind_which_the_operator_went_back_are_not_followed() -> None:
    def claim(number: int, rules: int) -> Any:
        return ClaimRecord(
            round=number,
            digest="ab" * 32,
            tokens=1,
            chain_tokens=1,
            record_bytes=1,
            rules=rules,
        )

    operation = replace(FIRST.operation, revision=4, rules=4, rollbacks=((4, 10),))
    manifest = replace(FIRST, operation=operation)
    claims = {"left": claim(11, 3), "base": claim(10, 3), "new": claim(11, 4), "none": claim(-1, 0)}
    assert set(that_count(claims, manifest)) == {"base", "new", "none"}
