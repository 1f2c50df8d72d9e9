"""The one place that decides which values of the DHT are accepted, on the way in and on the way
out.

hivemind asks it about every value that somebody wants stored here and about every value that comes
back from a search; only what passes is kept or used. Accepted are records and the manifest of this
run in their envelopes, and the declarations of hivemind's matchmaking, which are signed here with
the node's own key. A value is refused unless size, signature, owner, run, key, expiry and type fit.
Sequence numbers order the records of one owner; readers use them (swarm.py), since hivemind drops a
whole answer when one value in it is refused.
"""

import contextlib
import hashlib
import logging
from collections import OrderedDict

from hivemind.dht.validation import (
    DHTRecord,
    RecordValidatorBase,
)
from hivemind.utils import timed_storage

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Handover, SignedManifest
from dilocox.dht.records import (
    MAX_DECLARATION_LIFETIME_S,
    MAX_LIFETIME_S,
    RECORD_TYPES,
    key_id,
    parse_key,
)
from dilocox.dht.records import manifest_key as manifest_key_of
from dilocox.dht.rpc import NODE_REFUSALS, Counts
from dilocox.dht.wire import (
    MAX_VALUE_BYTES,
    Envelope,
    Malformed,
    Refused,
    pack,
    seal,
    sealed_bytes,
    unseal,
)

logger = logging.getLogger(__name__)

# Clocks are equal within milliseconds, but not before a peer has measured its own.
CLOCK_SLACK_S = 10.0
# hivemind's mark of a plain value, one without a subkey.
PLAIN = pack(None)
DECLARATION = pack(True)  # nobody takes one back
REMEMBERED_VALUES = 8192


class RunRecordValidator(RecordValidatorBase):
    """Accepts what belongs to one run; `refused` counts the rest by reason, as all does that the
    node refuses, and is shared with its process."""

    def __init__(self, run: str, identity: Identity):
        self.run = run
        self.refused = Counts(NODE_REFUSALS, shared=True)
        self._identity = identity
        self._manifest_key_id = key_id(manifest_key_of(run))
        self._revision = 0  # of the manifest, the highest that was seen
        self._handovers: tuple[Handover, ...] = ()  # that it came with
        # The same records are read again and again; a signature is checked once.
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Whether hivemind may keep or return this value."""
        try:
            self._check(record)
        except Refused as reason:
            self.refused.add(reason.kind)
            logger.debug("refused a value of the DHT: %s", reason)
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Seal a declaration of matchmaking; records come here in their envelopes already."""
        if record.value != DECLARATION:
            return record.value
        sealed = seal(
            self._identity,
            key=record.key,
            sequence=max(0, int(timed_storage.get_dht_time() * 1000)),
            expires_at=record.expiration_time,
            payload=record.value,
        )
        return pack(sealed)

    def strip_value(self, record: DHTRecord) -> bytes:
        """What a reader gets: the envelope of a record, the bare value of a declaration."""
        with contextlib.suppress(Refused):
            envelope = unseal(sealed_bytes(record.value), check_signature=False)
            if isinstance(envelope.key, bytes):
                return envelope.payload
        return record.value

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """A second validator of the same run adds nothing."""
        return isinstance(other, RunRecordValidator) and other.run == self.run

    def _check(self, record: DHTRecord) -> None:
        if len(record.value) > MAX_VALUE_BYTES:
            raise Refused("size", f"{len(record.value)} bytes, at most {MAX_VALUE_BYTES}")
        digest = hashlib.sha256(
            pack([record.key, record.subkey, record.expiration_time, record.value])
        ).digest()
        if digest in self._accepted:
            self._accepted.move_to_end(digest)
            return
        envelope = unseal(sealed_bytes(record.value))
        if envelope.expires_at != record.expiration_time:
            raise Refused("expiry", "it is not the one that was signed")
        if isinstance(envelope.key, bytes):
            self._check_declaration(envelope, record)
        else:
            self._check_record(envelope, envelope.key, record)
        self._accepted[digest] = None
        if len(self._accepted) > REMEMBERED_VALUES:
            self._accepted.popitem(last=False)

    def _check_declaration(self, envelope: Envelope, record: DHTRecord) -> None:
        if envelope.key != record.key:
            raise Refused("key", "it was signed for another key")
        if record.key == self._manifest_key_id:
            # A subkey with a later expiry would push the manifest out of hivemind's storage.
            raise Refused("key", "a declaration in the place of the manifest")
        if envelope.payload != DECLARATION:
            raise Refused("type", "neither a record nor a declaration")
        _check_owner(envelope, record)
        _check_expiry(envelope, MAX_DECLARATION_LIFETIME_S)

    def _check_record(self, envelope: Envelope, key: str, record: DHTRecord) -> None:
        try:
            parsed = parse_key(key)
        except ValueError as error:
            raise Refused("key", str(error)) from error
        if parsed.run != self.run:
            raise Refused("run", f"it is of run {parsed.run}")
        if key_id(key) != record.key:
            raise Refused("key", "it was signed for another key")
        _check_expiry(envelope, MAX_LIFETIME_S[parsed.kind])
        if parsed.kind == "manifest":
            self._check_manifest(envelope, record)
            return
        _check_owner(envelope, record)
        try:
            RECORD_TYPES[parsed.kind].decode(envelope.payload)
        except Malformed as error:
            raise Refused("type", str(error)) from error

    def _check_manifest(self, envelope: Envelope, record: DHTRecord) -> None:
        if record.subkey != PLAIN:
            raise Refused("owner", "the manifest has no subkeys")
        try:
            signed = SignedManifest.from_bytes(envelope.payload)
            revision = signed.revision_of(self.run)
        except InvalidInput as error:
            raise Refused("manifest", str(error)) from error
        if signed.run_key != envelope.public_key:
            raise Refused("owner", "only the operator's bootstrap keeps the manifest alive")
        if signed.handovers[: len(self._handovers)] != self._handovers:
            raise Refused("manifest", "it is of a key that the operator has replaced")
        if revision < self._revision:
            raise Refused("manifest", f"revision {revision}, when {self._revision} is known")
        if revision > self._revision:
            self._revision, self._handovers = revision, signed.handovers
            self._accepted.clear()  # the ones before it are among them


def _check_owner(envelope: Envelope, record: DHTRecord) -> None:
    if record.subkey != pack(envelope.owner_bytes):
        raise Refused("owner", f"{envelope.owner} signed what is not under its own peer id")


def _check_expiry(envelope: Envelope, max_lifetime_s: float) -> None:
    latest = timed_storage.get_dht_time() + max_lifetime_s + CLOCK_SLACK_S
    # What has expired is hivemind's to drop: a refusal would take the whole answer with it.
    if envelope.expires_at > latest:
        raise Refused("expiry", f"it would live longer than {max_lifetime_s:g} s")
