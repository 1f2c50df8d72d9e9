"""Who is admitted to a run: by the newest revision, until a day, in every process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht import admission as admission_module
from dilocox.dht.admission import DAY_S, RENEW_ALL, Admission
from dilocox.dht.errors import AdmissionLapsed, InvalidInput, NotAdmitted
from dilocox.dht.identity import Identity, peer_id_of
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import Manifest, SignedManifest, preset_names
from dilocox.dht.manifest_revisions import admitting, in_state, revoking
from tests.clocks import TestClock

PEER, OTHER = (peer_id_of(bytes([number]) * 32) for number in (1, 2))
TODAY = 20_000
OPEN = Manifest.from_dict({"name": "run", "model": preset_names()[0], "end_tokens": 10**9})
LISTED = replace(OPEN, admission="listed")


def today() -> TestClock:
    """A minute after the day began."""
    return TestClock(TODAY * DAY_S + 60.0)


def admission(manifest: Manifest, clock: TestClock, operator: str = OTHER) -> Admission:
    return Admission("0" * 32, manifest, operator, clock.time)


def test_an_open_run_admits_everybody_whoever_is_listed() -> None:
    assert admission(OPEN, today()).admits(PEER)
    assert admission(admitting(OPEN, {PEER: TODAY + 1}, TODAY), today()).refusal(OTHER) is None


def test_a_listed_run_admits_its_operator_and_those_it_listed_until_their_day() -> None:
    clock = today()
    asked = admission(LISTED, clock)
    assert asked.admits(OTHER), "the operator's own bootstrap"
    with pytest.raises(NotAdmitted, match=f"not, or no longer, among them: .*operate admit {PEER}"):
        raise asked.refusal(PEER) or AssertionError
    asked.take(admitting(LISTED, {PEER: TODAY + 2}, TODAY))
    assert asked.admits(PEER)
    clock.now += 2 * DAY_S - 61
    assert asked.admits(PEER)
    clock.now += 2
    with pytest.raises(AdmissionLapsed, match=f"time ended on 2024-10-06: .* admit {PEER}`"):
        raise asked.refusal(PEER) or AssertionError
    asked.take(admitting(LISTED, {PEER: TODAY + 30}, TODAY + 2))
    assert asked.refusal(PEER) is None


def test_from_three_days_before_an_end_its_peer_and_the_operator_are_warned_once_a_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three hundred of one day ended at one midnight, and nobody had said a word."""
    clock = today()
    third = peer_id_of(bytes([3]) * 32)
    listed = admitting(LISTED, {PEER: TODAY + 30, third: TODAY + 30}, TODAY)
    of_peer, of_operator, of_open = (
        admission(listed, clock),
        admission(listed, clock),
        admission(replace(listed, admission="open"), clock),
    )

    def warned() -> list[str]:
        caplog.clear()
        of_peer.remind(PEER)
        of_operator.remind(OTHER)
        of_open.remind(PEER)
        return caplog.messages

    end = (TODAY + 30) * DAY_S
    assert of_operator.first_end == end and of_open.first_end is None
    clock.now = end - 3 * DAY_S - 1.0
    assert warned() == []
    clock.now += 2
    to_peer, to_operator = warned()
    assert "until 2024-11-03" in to_peer and f"dilocox operate admit {PEER}" in to_peer
    assert "of 2 admissions 2 end within three days" in to_operator and RENEW_ALL in to_operator
    clock.now += 3600.0
    assert warned() == []
    clock.now += DAY_S
    assert len(warned()) == 2
    clock.now = end + 3600.0
    assert len(warned()) == 2, "a copy of the bootstrap goes on"
    assert of_operator.first_end == end, "an alert that ends with the admission helps nobody"
    renewed = admitting(listed, {PEER: TODAY + 60, third: TODAY + 60}, TODAY + 30)
    for each in (of_peer, of_operator):
        each.take(renewed)
    clock.now += 2 * DAY_S
    assert warned() == [] and of_operator.first_end == (TODAY + 60) * DAY_S


def test_the_list_is_no_new_rules_and_forgets_those_whose_days_are_over() -> None:
    first = admitting(LISTED, {PEER: TODAY + 1}, TODAY)
    assert (first.operation.revision, first.rules, first.root) == (1, 0, LISTED.digest)
    later = admitting(first, {OTHER: TODAY + 9}, TODAY + 9)
    assert later.operation.admitted == ((OTHER, TODAY + 9),)
    soon = admitting(first, {OTHER: TODAY + 9}, TODAY + 5)
    assert dict(soon.operation.admitted).keys() == {PEER, OTHER}, "it is renewed, or was withdrawn?"
    longer = admitting(first, {PEER: TODAY + 30}, TODAY)
    assert longer.operation.admitted == ((PEER, TODAY + 30),)
    assert Manifest.from_bytes(longer.to_bytes()) == longer


def test_who_is_revoked_is_not_admitted_and_who_never_was_is_named() -> None:
    both = admitting(LISTED, {PEER: TODAY + 1, OTHER: TODAY + 1}, TODAY)
    asked = admission(revoking(both, [PEER]), today())
    assert asked.admits(OTHER)
    assert not asked.admits(PEER)
    assert not isinstance(asked.refusal(PEER), AdmissionLapsed), "it would wait for ever"
    with pytest.raises(InvalidInput, match=f"{PEER} is not admitted"):
        revoking(LISTED, [PEER])
    with pytest.raises(InvalidInput, match="the run has ended"):
        admitting(in_state(both, "ended"), {PEER: TODAY + 1}, TODAY)


def test_six_hundred_fit_into_a_manifest_and_too_many_are_refused_with_the_mend(
    tmp_path: Path,
) -> None:
    identity = Identity.load_or_create(tmp_path / "key")
    peers = [peer_id_of(os.urandom(32)) for _ in range(1000)]
    many = admitting(LISTED, dict.fromkeys(peers[:600], TODAY + 30), TODAY)
    assert SignedManifest.from_bytes(SignedManifest.sign(identity, many).to_bytes())
    with pytest.raises(InvalidInput, match="revoke peers that are gone"):
        SignedManifest.sign(identity, admitting(many, dict.fromkeys(peers, TODAY + 30), TODAY))


def test_another_process_of_the_peer_follows_the_revision_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "FOLLOW_S", 0.0)
    identity, kept = Identity.load_or_create(tmp_path / "key"), tmp_path / "newer"
    run = run_id(identity.public_key, LISTED.name)
    asked = Admission(run, LISTED, identity.peer_id, today().time, kept)
    assert not asked.admits(PEER)

    def keep(by: Identity, manifest: Manifest) -> None:
        draft = tmp_path / "draft"  # as the product does: another file comes into its place
        draft.write_bytes(SignedManifest.sign(by, manifest).to_bytes())
        draft.replace(kept)

    revision = admitting(LISTED, {PEER: TODAY + 1}, TODAY)
    keep(identity, revision)
    assert asked.admits(PEER)
    keep(Identity.load_or_create(tmp_path / "stranger"), revoking(revision, [PEER]))
    assert asked.admits(PEER), "only the operator's revisions count"
    keep(identity, revoking(revision, [PEER]))
    assert not asked.admits(PEER)
    keep(identity, revision)
    assert not asked.admits(PEER), "an older revision does not come back"
