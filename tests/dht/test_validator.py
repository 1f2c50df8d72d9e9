"""What the validator lets into the DHT: records of this run by their owners, and nothing else."""

import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import timed_storage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.dht import validator as validator_module
from dilocox.dht import wire
from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.manifest import Manifest, SignedManifest, hand_over
from dilocox.dht.manifest_revisions import in_state, under_next_key
from dilocox.dht.records import (
    MAX_DECLARATION_LIFETIME_S,
    MAX_LIFETIME_S,
    PartRecord,
    claim_key,
    key_id,
    manifest_key,
    part_key,
    stage_key,
)
from dilocox.dht.rpc import NODE_REFUSALS
from dilocox.dht.validator import CLOCK_SLACK_S, PLAIN, RunRecordValidator
from dilocox.dht.wire import MAX_VALUE_BYTES, Refused, pack, seal

NOW = 1_000_000.0
EXPIRES = NOW + 15.0
PART = PartRecord(part=3, position=77)


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: NOW)


@pytest.fixture
def validator(run: str, operator: Identity) -> RunRecordValidator:
    return RunRecordValidator(run, operator)


@pytest.fixture
def make(run: str, volunteer: Identity) -> Callable[..., DHTRecord]:
    """A good record as hivemind shows it to the validator, with anything about it changed."""

    def record(**changes: Any) -> DHTRecord:
        key = changes.get("key", part_key(run, 3))
        expires_at = changes.get("expires_at", EXPIRES)
        sealed = seal(
            changes.get("signer", volunteer),
            key=key,
            sequence=1,
            expires_at=changes.get("signed_expiry", expires_at),
            payload=changes.get("payload", PART.encode()),
        )
        return DHTRecord(
            changes.get("stored_under", key_id(key) if isinstance(key, str) else key),
            changes.get("subkey", subkey_of(volunteer)),
            changes.get("value", pack(sealed)),
            expires_at,
        )

    return record


def subkey_of(identity: Identity) -> bytes:
    return pack(peer_id_bytes_of(identity.public_key))


def reason(validator: RunRecordValidator, record: DHTRecord) -> str:
    """Why the validator refuses a record."""
    before = Counter(validator.refused.read())
    assert not validator.validate(record)
    ((kind, count),) = (Counter(validator.refused.read()) - before).items()
    assert count == 1
    return kind


Make = Callable[..., DHTRecord]


def test_record_of_its_owner_is_accepted_again_and_again(validator: RunRecordValidator, make: Make):
    record = make()
    assert validator.validate(record)
    assert validator.validate(record)
    assert validator.refused.total == 0


def test_every_reason_to_refuse_a_value_is_counted():
    sources = "".join(Path(str(each.__file__)).read_text() for each in (validator_module, wire))
    reasons = re.findall(r'raise Refused\(\s*"(\w+)"', sources)
    assert len(reasons) == sources.count("raise Refused(") > 20
    assert set(reasons) < set(NODE_REFUSALS)


Changes = Callable[[str, Identity], dict[str, Any]]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (lambda _, other: {"signer": other}, "owner"),
        (lambda *_: {"subkey": PLAIN}, "owner"),
        (lambda run, _: {"stored_under": key_id(part_key(run, 4))}, "key"),
        (lambda run, _: {"key": f"{run}.gossip.3"}, "key"),
        (lambda *_: {"key": part_key("ab" * 16, 3)}, "run"),
        (lambda run, _: {"key": stage_key(run, 0)}, "type"),
        (lambda run, _: {"key": claim_key(run, 0)}, "type"),
        (lambda *_: {"payload": b"\x80"}, "type"),
        (lambda *_: {"expires_at": EXPIRES + 1, "signed_expiry": EXPIRES}, "expiry"),
        (lambda *_: {"expires_at": float("inf")}, "expiry"),
        (lambda *_: {"expires_at": float("nan")}, "expiry"),
        (lambda *_: {"value": bytes(MAX_VALUE_BYTES + 1)}, "size"),
        (lambda *_: {"value": b""}, "malformed"),
        (lambda *_: {"value": b"\xc0"}, "malformed"),
        (lambda *_: {"value": b"\xa3abc"}, "malformed"),
        (lambda *_: {"value": pack([1])}, "malformed"),
    ],
)
def test_what_is_no_record_of_this_run_by_its_owner_is_refused(
    validator: RunRecordValidator,
    make: Make,
    run: str,
    stranger: Identity,
    changes: Changes,
    kind: str,
):
    assert reason(validator, make(**changes(run, stranger))) == kind


def test_every_changed_byte_is_noticed(validator: RunRecordValidator, make: Make):
    good = make()
    for position in range(0, len(good.value), 7):
        value = bytearray(good.value)
        value[position] ^= 0x01
        assert not validator.validate(make(value=bytes(value))), position


def test_accepted_value_is_still_refused_elsewhere(
    validator: RunRecordValidator, make: Make, stranger: Identity, run: str
):
    value = make().value
    assert validator.validate(make(value=value))
    moved = make(value=value, stored_under=key_id(part_key(run, 4)))
    assert reason(validator, moved) == "key"
    assert reason(validator, make(value=value, subkey=subkey_of(stranger))) == "owner"
    assert reason(validator, make(value=value, expires_at=EXPIRES + 1)) == "expiry"


def test_longest_life_of_a_record_is_that_of_its_kind(validator: RunRecordValidator, make: Make):
    latest = NOW + MAX_LIFETIME_S["part"] + CLOCK_SLACK_S
    assert validator.validate(make(expires_at=latest))
    assert reason(validator, make(expires_at=latest + 0.1)) == "expiry"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.binary(max_size=300), subkey=st.binary(max_size=40), wrapped=st.booleans())
def test_any_bytes_are_refused_without_an_error(
    validator: RunRecordValidator, make: Make, value: bytes, subkey: bytes, wrapped: bool
):
    record = make(value=pack(value) if wrapped else value, subkey=subkey)
    assert not validator.validate(record)
    assert isinstance(validator.strip_value(record), bytes)


def test_only_the_operators_manifest_in_its_place_is_accepted(
    validator: RunRecordValidator,
    make: Make,
    run: str,
    operator: Identity,
    stranger: Identity,
    manifest: Manifest,
):
    signed = SignedManifest.sign(operator, manifest)
    given = {"key": manifest_key(run), "subkey": PLAIN, "payload": signed.to_bytes()}
    assert validator.validate(make(**given, signer=operator))
    assert reason(validator, make(**given)) == "owner"
    below = given | {"subkey": subkey_of(operator)}
    assert reason(validator, make(**below, signer=operator)) == "owner"
    forged = given | {"payload": SignedManifest.sign(stranger, manifest).to_bytes()}
    assert reason(validator, make(**forged, signer=stranger)) == "manifest"


DECLARED = DHTID.generate(source="dilocox-abc-stage0.0b").to_bytes()


def declaration(validator: RunRecordValidator, identity: Identity, **changes: Any) -> DHTRecord:
    """A declaration of hivemind's matchmaking as the node of `validator` stores it."""
    bare = DHTRecord(
        changes.get("key", DECLARED),
        subkey_of(identity),
        changes.get("value", pack(True)),
        changes.get("expires_at", EXPIRES),
    )
    return DHTRecord(bare.key, bare.subkey, validator.sign_value(bare), bare.expiration_time)


def test_declaration_of_matchmaking_passes_and_reads_back_bare(
    validator: RunRecordValidator, run: str, operator: Identity, volunteer: Identity
):
    record = declaration(validator, operator)
    other = RunRecordValidator(run, volunteer)
    assert other.validate(record)
    assert other.strip_value(record) == pack(True)


def test_declaration_for_another_peer_or_of_anything_but_yes_is_refused(
    validator: RunRecordValidator, operator: Identity, volunteer: Identity, make: Make
):
    assert reason(validator, declaration(validator, volunteer)) == "owner"
    assert reason(validator, declaration(validator, operator, value=pack(1))) == "malformed"
    for payload in (pack("text"), pack(False)):
        assert reason(validator, make(key=DECLARED, payload=payload)) == "type"


def test_declaration_moved_or_prolonged_is_refused(
    validator: RunRecordValidator, make: Make, run: str
):
    given = {"key": DECLARED, "payload": pack(True)}
    assert validator.validate(make(**given))
    assert reason(validator, make(**given, stored_under=key_id(stage_key(run, 0)))) == "key"
    assert reason(validator, make(**given, expires_at=EXPIRES, signed_expiry=NOW)) == "expiry"
    late = NOW + MAX_DECLARATION_LIFETIME_S + CLOCK_SLACK_S + 1
    assert reason(validator, make(**given, expires_at=late)) == "expiry"


def test_a_node_that_saw_a_revision_takes_no_lower_one(
    validator: RunRecordValidator, make: Make, operator: Identity, manifest: Manifest, run: str
):
    def sealed(revision: Manifest) -> Any:
        payload = SignedManifest.sign(operator, revision).to_bytes()
        return make(signer=operator, key=manifest_key(run), subkey=PLAIN, payload=payload)

    first, second = sealed(manifest), sealed(in_state(manifest, "paused"))
    assert validator.validate(first)
    assert validator.validate(second)
    assert reason(validator, first) == "manifest"
    assert validator.validate(second)


def test_after_a_handover_the_bootstrap_goes_on_and_the_former_key_hands_over_to_no_other(
    validator: RunRecordValidator,
    make: Make,
    operator: Identity,
    stranger: Identity,
    manifest: Manifest,
    run: str,
    tmp_path: Path,
) -> None:
    thief = Identity.load_or_create(tmp_path / "thief.key")

    def handed_over(to: Identity, manifest: Manifest, by: Identity) -> DHTRecord:
        handovers = (hand_over(operator, to.public_key),)
        payload = SignedManifest.sign(to, manifest, handovers).to_bytes()
        return make(signer=by, key=manifest_key(run), subkey=PLAIN, payload=payload)

    following = under_next_key(manifest)
    assert validator.validate(handed_over(stranger, following, operator))
    later = in_state(following, "paused")
    assert reason(validator, handed_over(thief, later, operator)) == "manifest"
    assert reason(validator, handed_over(stranger, later, stranger)) == "owner"
    assert validator.validate(handed_over(stranger, later, operator))


def test_declaration_cannot_take_the_place_of_the_manifest(
    validator: RunRecordValidator, run: str, operator: Identity
):
    record = declaration(validator, operator, key=key_id(manifest_key(run)))
    assert reason(validator, record) == "key"


def test_records_keep_their_envelope_when_hivemind_strips_them(
    validator: RunRecordValidator, make: Make
):
    record = make()
    assert validator.sign_value(record) == record.value
    assert validator.strip_value(record) == record.value


def test_pickled_validator_signs_and_refuses_as_before(
    validator: RunRecordValidator, make: Make, operator: Identity, stranger: Identity
):
    copy = pickle.loads(pickle.dumps(validator))
    assert copy.validate(declaration(copy, operator))
    assert not copy.validate(make(signer=stranger))


def test_second_validator_of_a_run_is_merged_and_another_is_not(
    validator: RunRecordValidator, run: str, volunteer: Identity
):
    assert validator.merge_with(RunRecordValidator(run, volunteer))
    assert not validator.merge_with(RunRecordValidator("ab" * 16, volunteer))
    together = CompositeValidator([validator, RunRecordValidator(run, volunteer)])
    assert together._validators == [validator]


def test_envelope_over_the_limit_is_not_even_sealed(volunteer: Identity, run: str):
    with pytest.raises(Refused, match="size"):
        seal(
            volunteer,
            key=part_key(run, 0),
            sequence=1,
            expires_at=EXPIRES,
            payload=bytes(MAX_VALUE_BYTES),
        )
