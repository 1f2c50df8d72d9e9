"""A copy of the bootstrap keeps what the operator signed last, and nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput, UnknownRun
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_keeper import ManifestCopy, OwnManifest
from dilocox.dht.manifest_revisions import RevisionFolder, in_state, revised
from dilocox.dht.records import manifest_key
from dilocox.dht.wire import seal, unseal


class OneValue:
    """A swarm as far as its manifest goes."""

    def __init__(self) -> None:
        self.sealed: bytes | None = None
        self.stored: list[bytes] = []

    def fetch_manifest(self, timeout_s: float) -> None:
        if self.sealed is None:
            raise EnvironmentFault("no manifest of the run")

    def sealed_manifest(self) -> bytes | None:
        return self.sealed

    def store_sealed_manifest(self, sealed: bytes) -> None:
        self.stored.append(sealed)
        self.sealed = sealed


def envelope(
    by: Identity, signed: SignedManifest, run: str, sequence: int, lasts_s: float = 60.0
) -> bytes:
    return seal(
        by,
        key=manifest_key(run),
        sequence=sequence,
        expires_at=time.time() + lasts_s,
        payload=signed.to_bytes(),
    )


@pytest.fixture
def swarm() -> Any:
    return OneValue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.manifest"


def copy(run: str, path: Path) -> ManifestCopy:
    return ManifestCopy(run, path)


def test_a_copy_gives_the_operators_envelope_back_after_a_restart_without_the_operator(
    operator: Identity, manifest: Manifest, run: str, path: Path, swarm: Any
) -> None:
    signed = SignedManifest.sign(operator, manifest)
    newest = swarm.sealed = envelope(operator, signed, run, 2)
    assert copy(run, path).publish(swarm)
    assert swarm.stored == []

    again, empty = copy(run, path), OneValue()  # nobody else is up
    assert again.known
    assert again.publish(empty)  # pyright: ignore[reportArgumentType]
    assert empty.stored == [newest]
    assert again.signed.verify(run) == manifest
    assert again.expires_at == unseal(newest).expires_at


def test_the_newest_wins_on_both_sides(
    operator: Identity, manifest: Manifest, run: str, path: Path, swarm: Any
) -> None:
    signed = SignedManifest.sign(operator, manifest)
    kept = copy(run, path)
    older, newer = (envelope(operator, signed, run, number) for number in (1, 2))
    for each in (older, newer):
        swarm.sealed = each
        assert kept.publish(swarm)
    assert path.read_bytes() == newer
    swarm.sealed = older  # a node that had missed the last one
    assert kept.publish(swarm)
    assert swarm.stored == [newer]


def test_an_older_revision_is_not_taken_though_it_was_signed_later(
    operator: Identity, manifest: Manifest, run: str, path: Path, swarm: Any
) -> None:
    kept = copy(run, path)
    first, second = manifest, in_state(manifest, "paused")
    newer = envelope(operator, SignedManifest.sign(operator, second), run, 5)
    older = envelope(operator, SignedManifest.sign(operator, first), run, 9)
    for each in (newer, older):  # of an operator who has two machines with the key
        swarm.sealed = each
        assert kept.publish(swarm)
    assert kept.signed.verify(run) == second
    assert path.read_bytes() == newer
    renewed = swarm.sealed = envelope(operator, SignedManifest.sign(operator, second), run, 10)
    assert kept.publish(swarm)
    assert path.read_bytes() == renewed


def test_nobody_but_the_operator_makes_an_envelope_that_a_copy_takes(
    operator: Identity, volunteer: Identity, manifest: Manifest, run: str, path: Path, swarm: Any
) -> None:
    signed = SignedManifest.sign(operator, manifest)
    theirs = SignedManifest.sign(volunteer, manifest)
    for by, what in ((volunteer, signed), (volunteer, theirs), (operator, theirs)):
        swarm.sealed = envelope(by, what, run, 9)
        with pytest.raises(EnvironmentFault):
            copy(run, path).publish(swarm)
        assert not path.exists()


def test_a_damaged_file_is_fetched_again(
    operator: Identity,
    manifest: Manifest,
    run: str,
    path: Path,
    swarm: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path.write_bytes(b"half of")
    kept = copy(run, path)
    assert not kept.known
    assert str(path) in caplog.text
    with pytest.raises(EnvironmentFault, match="no manifest"):
        kept.publish(swarm)
    swarm.sealed = envelope(operator, SignedManifest.sign(operator, manifest), run, 1)
    assert kept.publish(swarm)
    assert path.read_bytes() == swarm.sealed


def test_a_disk_that_takes_nothing_and_an_operator_long_gone_do_not_end_a_copy(
    operator: Identity,
    manifest: Manifest,
    run: str,
    path: Path,
    swarm: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    signed = SignedManifest.sign(operator, manifest)
    swarm.sealed = envelope(operator, signed, run, 1, lasts_s=-1.0)
    kept = ManifestCopy(run, path.parent / "gone" / path.name)
    assert kept.publish(swarm)
    swarm.sealed = None
    assert kept.publish(swarm)
    assert swarm.stored == []  # the DHT drops what has expired
    assert "gone/run.manifest: cannot be written" in caplog.text
    assert "operator's bootstrap must run" in caplog.text


class Taking:
    """A DHT that takes a manifest or not, and may know another one."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.takes = True
        self.answers = True
        self.known: SignedManifest | None = None
        self.taken: list[SignedManifest] = []

    def newest_manifest(self) -> SignedManifest | None:
        return self.known

    def fetch_manifest(self, _timeout_s: float) -> SignedManifest:
        if not self.answers:
            raise EnvironmentFault("no manifest of the run")
        if self.known is None:
            raise UnknownRun("the bootstraps answer but know no such run")
        self.known.verify(self.run)
        return self.known

    def publish_manifest(self, signed: SignedManifest) -> bool:
        self.taken.append(signed)
        return self.takes


def test_an_operator_who_has_only_the_key_left_goes_on_from_what_the_swarm_knows(
    operator: Identity, stranger: Identity, manifest: Manifest, run: str, tmp_path: Path
) -> None:
    swarm: Any = Taking(run)
    own = OwnManifest(operator, manifest, RevisionFolder(tmp_path, run))
    swarm.known = SignedManifest.sign(stranger, in_state(manifest, "ended"))
    assert own.publish(swarm)
    assert swarm.taken[-1].manifest_bytes == manifest.to_bytes(), "a stranger's counts nothing"
    swarm.known = SignedManifest.sign(operator, in_state(manifest, "paused"))
    assert own.publish(swarm)
    assert own.signed is swarm.taken[-1] is swarm.known


def test_two_manifests_of_one_revision_are_refused_loudly(
    operator: Identity, manifest: Manifest, run: str, tmp_path: Path
) -> None:
    swarm: Any = Taking(run)
    own = OwnManifest(operator, manifest, RevisionFolder(tmp_path, run))
    swarm.known = SignedManifest.sign(operator, in_state(manifest, "paused"))
    assert own.publish(swarm)
    swarm.known = SignedManifest.sign(operator, in_state(manifest, "ended"))
    with pytest.raises(EnvironmentFault, match="another manifest of revision 1"):
        own.publish(swarm)


@pytest.mark.parametrize("joins", [False, True])
def test_a_new_folder_goes_on_with_the_run_that_has_begun_and_splits_none(
    operator: Identity, manifest: Manifest, run: str, tmp_path: Path, joins: bool
) -> None:
    swarm: Any = Taking(run)
    edited = replace(manifest, end_tokens=manifest.end_tokens + 1)
    second = revised(manifest, edited)
    cases: list[tuple[Manifest, Manifest, list[int]]] = [
        (manifest, manifest, [0]),
        (manifest, edited, []),
        (second, manifest, [0, 1]),
        (second, edited, [1]),
        (second, replace(edited, seed=7), []),
    ]
    for number, (known, given, numbers) in enumerate(cases):
        swarm.known = SignedManifest.sign(operator, known)
        revisions = RevisionFolder(tmp_path / str(number), run)
        own = OwnManifest(operator, given, revisions, joins=joins)
        assert not own.known
        if not numbers:
            with pytest.raises(InvalidInput, match=r"run\.yaml says"):
                own.publish(swarm)
        else:
            assert own.publish(swarm)
            assert own.known
            assert swarm.taken[-1].manifest_bytes == known.to_bytes()
        assert revisions.numbers == numbers


def test_a_first_revision_is_signed_only_when_a_bootstrap_that_was_named_knows_of_none(
    operator: Identity, manifest: Manifest, run: str, tmp_path: Path
) -> None:
    swarm: Any = Taking(run)
    swarm.answers = False
    revisions = RevisionFolder(tmp_path, run)
    own = OwnManifest(operator, manifest, revisions, joins=True)
    with pytest.raises(EnvironmentFault, match="no manifest"):
        own.publish(swarm)
    assert (swarm.taken, revisions.numbers, own.known) == ([], [], False)
    swarm.answers = True
    assert own.publish(swarm)
    assert (revisions.numbers, own.known) == ([0], True)
    swarm.answers = False
    assert OwnManifest(operator, manifest, revisions, joins=True).publish(swarm)


def test_what_is_not_the_operators_is_no_word_that_nobody_knows_the_run(
    operator: Identity, stranger: Identity, manifest: Manifest, run: str, tmp_path: Path
) -> None:
    swarm: Any = Taking(run)
    swarm.known = SignedManifest.sign(stranger, manifest)
    revisions = RevisionFolder(tmp_path, run)
    own = OwnManifest(operator, manifest, revisions, joins=True)
    with pytest.raises(EnvironmentFault, match=f"run {run} is not this operator's"):
        own.publish(swarm)
    assert (swarm.taken, revisions.numbers, own.known) == ([], [], False)
    swarm.known = SignedManifest.sign(operator, manifest)  # the one that it should have heard
    assert own.publish(swarm)
    assert revisions.numbers == [0]


def test_the_operator_signs_anew_each_time(
    operator: Identity, manifest: Manifest, run: str, tmp_path: Path
) -> None:
    swarm: Any = Taking(run)
    swarm.takes = False
    own = OwnManifest(operator, manifest, RevisionFolder(tmp_path, run))
    assert not own.publish(swarm)
    assert own.expires_at == 0.0
    swarm.takes = True
    assert own.publish(swarm)
    assert own.expires_at > time.time() + 86400  # a weekend without the operator is nothing
