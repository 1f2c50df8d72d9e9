"""A peer follows the operator's newest manifest, and nobody else's, and never an older one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dilocox.dht.errors import UnreadableManifest
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import SignedManifest
from dilocox.dht.manifest_revisions import (
    REVISION_S,
    ManifestWatch,
    in_state,
    kept_manifest,
    newer_of,
)
from dilocox.dht.records import ClaimRecord
from dilocox.dht.swarm import Swarm
from dilocox.dht.swarm_view import that_count
from tests.dht.revisions import FIRST, PAUSED, unreadable


class ToldDHT:
    """A DHT that has this manifest."""

    def __init__(self) -> None:
        self.signed: SignedManifest | None = None
        self.admission = None
        self.asked = 0

    def newest_manifest(self, _timeout_s: float) -> SignedManifest | None:
        self.asked += 1
        return self.signed


@pytest.fixture
def run(identities: list[Identity]) -> str:
    return run_id(identities[0].public_key, "demo")


@pytest.fixture
def told() -> ToldDHT:
    return ToldDHT()


@pytest.fixture
def watch(told: ToldDHT, run: str, tmp_path: Path) -> ManifestWatch:
    return ManifestWatch(cast("Swarm", told), run, FIRST, tmp_path / "newest.signed")


def test_a_newer_one_counts_and_is_kept_for_the_next_start(
    watch: ManifestWatch, told: ToldDHT, identities: list[Identity], run: str, tmp_path: Path
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


def test_what_is_not_the_operators_counts_nothing_and_ends_nobody(
    watch: ManifestWatch, told: ToldDHT, identities: list[Identity], run: str, tmp_path: Path
) -> None:
    told.signed = SignedManifest.sign(identities[1], PAUSED)
    assert not watch.look()
    told.signed = replace(unreadable(identities[0], protocol=99), signature=bytes(256))
    assert not watch.look()
    assert (watch.manifest, watch.unreadable) == (FIRST, None)
    assert kept_manifest(tmp_path / "newest.signed", run) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [({"protocol": 99}, "protocol is 99"), ({"wings": 2}, "wings is not a field")],
)
def test_what_the_operator_signed_and_nobody_here_can_read_is_a_reason_to_end_also_at_the_start(
    watch: ManifestWatch,
    told: ToldDHT,
    identities: list[Identity],
    run: str,
    tmp_path: Path,
    values: dict[str, Any],
    words: str,
) -> None:
    told.signed = unreadable(identities[0], **values)
    assert not watch.look()
    assert watch.manifest == FIRST
    said = str(watch.unreadable)
    assert words in said
    assert said.count("install the version that the operator runs") == 1
    kept = kept_manifest(tmp_path / "newest.signed", run)
    assert kept is not None
    with pytest.raises(
        UnreadableManifest, match="install the version"
    ):  # a DHT may give an older one
        newer_of(SignedManifest.sign(identities[0], FIRST), kept, run).verify(run)
    told.signed = SignedManifest.sign(identities[0], in_state(PAUSED, "running"))
    assert watch.look()
    assert watch.unreadable is None, "the operator took it back"


def test_who_tells_of_revisions_that_nobody_has_is_believed_less_and_less(
    watch: ManifestWatch, told: ToldDHT, identities: list[Identity]
) -> None:
    began, heartbeat_s = time.monotonic(), 4.0

    def asked(since_s: float, until_s: float, tells: Callable[[int], int]) -> int:
        before = told.asked
        for second in range(int(since_s), int(until_s)):
            watch.follow(tells(second), heartbeat_s, began + second)
        return told.asked - before

    assert asked(1, 300, lambda _: 0) == 299 // REVISION_S
    assert asked(302, 303, lambda _: 1) == 1, "what is told is looked for at once"
    lies = asked(303, 903, lambda second: second)
    assert 600 / REVISION_S <= lies <= 600 / REVISION_S + 4
    assert asked(903, 1203, lambda second: second if second % 2 else 0) <= 2 * 300 / REVISION_S
    told.signed = SignedManifest.sign(identities[0], PAUSED)
    asked(1203, 1203 + REVISION_S + 1, lambda _: 1)
    assert watch.manifest == PAUSED, "no later than if nobody told of it"
    assert asked(1240, 1243, lambda _: 2) == 1, "who told the truth is believed again"


def test_claims_of_records_behind_which_the_operator_went_back_are_not_followed() -> None:
    def claim(number: int, rules: int) -> Any:
        return ClaimRecord(
            round=number,
            digest="ab" * 32,
            chain_tokens=1,
            record_bytes=1,
            rules=rules,
        )

    operation = replace(FIRST.operation, revision=4, rules=4, rollbacks=((4, 10),))
    manifest = replace(FIRST, operation=operation)
    claims = {"left": claim(11, 3), "base": claim(10, 3), "new": claim(11, 4), "none": claim(-1, 0)}
    assert set(that_count(claims, manifest)) == {"base", "new", "none"}
