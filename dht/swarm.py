"""What a peer says to the swarm and hears from it: signed records in, checked records out.

All calls block up to a deadline. One thread may publish while another one reads. Everything read is
taken for hostile until it has passed the same checks as in the DHT node; what does not pass is
skipped and counted. A record once seen is kept until it expires or its owner writes a newer one, so
an answer that misses it, or that brings an older one, does not make its owner vanish.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from dilocox.dht.admission import Admission
from dilocox.dht.clock import RunClock
from dilocox.dht.errors import BootstrapsSilent, InvalidInput, UnknownRun
from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.node import NoAnswer, RunDHT, StoredValue
from dilocox.dht.protocol import Entry
from dilocox.dht.records import MANIFEST_LIFETIME_S, MAX_LIFETIME_S, Record, manifest_key, parse_key
from dilocox.dht.wire import Envelope, Malformed, Refused, seal, sealed_bytes, unseal

R = TypeVar("R", bound=Record)

CALL_TIMEOUT_S = 10.0
FETCH_PAUSE_S = 0.5
FETCH_PING_S = 5.0
# hivemind replaces a value only by one that expires later.
LATER_S = 0.001
MAX_KEYS_KEPT = 256
MAX_OWNERS = 8192  # under one key: a keeper that lies may tell of keys without end
MAX_PASSED_OVER = 1024  # refused values under one key that are named when more is asked for


@dataclass(frozen=True)
class _Seen(Generic[R]):
    mark: bytes
    sequence: int
    expires_at: float
    record: R


class Swarm:
    """The records of one run, through one DHT node.

    `refused` counts what was read and not accepted, by reason; `sent_bytes` and `received_bytes`
    the signed values that were published and read. `admission`: whose records are heard, set once
    the manifest is known; None: anybody's.
    """

    def __init__(
        self,
        dht: RunDHT,
        run: str,
        identity: Identity,
        clock: RunClock,
        *,
        most_owners: int = MAX_OWNERS,
    ):
        """most_owners: under one key, that are heard; owners that come later are not."""
        self.refused: Counter[str] = Counter()
        self.admission: Admission | None = None
        self.sent_bytes = self.received_bytes = 0
        self._dht = dht
        self._run = run
        self._identity = identity
        self._clock = clock
        self._most_owners = most_owners
        self._sequence = 0
        self._expiries: dict[str, float] = {}
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._seen: dict[str, dict[str, _Seen[Record]]] = {}
        self._passed_over: dict[str, dict[bytes, float]] = {}  # marks, and when they expire

    @property
    def all_refused(self) -> Counter[str]:
        """What was refused of others, here and by the node; without what never was."""
        return self.refused.copy() + Counter(self._dht.refused.read())

    def time(self) -> float:
        """Run time, in seconds."""
        return self._clock.time()

    def publish(
        self, key: str, record: Record, lifetime_s: float, timeout_s: float = CALL_TIMEOUT_S
    ) -> bool:
        """Store a record under this peer's id; whether the DHT took it in time.

        Raises `ValueError` for a record that is too long or under a key of another kind.
        """
        return self.publish_many({key: record}, lifetime_s, timeout_s)

    def publish_many(
        self, records: Mapping[str, Record], lifetime_s: float, timeout_s: float = CALL_TIMEOUT_S
    ) -> bool:
        """As `publish`, for many keys in one search; whether the DHT took all of them in time."""
        for key, record in records.items():
            if parse_key(key).kind != record.kind:
                raise ValueError(f"a {record.kind} record does not belong under {key}")
        owner = peer_id_bytes_of(self._identity.public_key)
        payloads = {key: record.encode() for key, record in records.items()}
        return self._store(payloads, lifetime_s, owner, timeout_s)

    def read(
        self, key: str, record_type: type[R], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, R] | None:
        """The records under a key by peer id, this peer's own among them; None without an answer.

        All nodes that keep the key are asked. An empty answer and an unreachable swarm look alike:
        `bootstrap_answers` tells them apart.
        """
        return self.read_many({key: record_type}, timeout_s)[key]

    def read_many(
        self,
        keys: Mapping[str, type[R]],
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        thorough: bool = True,
    ) -> dict[str, dict[str, R] | None]:
        """As `read`, for many keys at once: None for those keys that gave no answer in time.

        Only what is not known yet is told. `thorough`: all nodes that keep a key are asked. A
        caller that looks again and again asks one of them each time, which costs a fifth: what that
        one has missed is heard from the next.
        """
        for key, record_type in keys.items():
            if parse_key(key).kind != record_type.kind:
                raise ValueError(f"no {record_type.kind} records are under {key}")
        with self._reading:
            known = {key: self._known(key) for key in keys}
        try:
            found = self._dht.find_news(known, thorough=thorough, timeout_s=timeout_s)
        except NoAnswer:
            found = dict[str, list[Entry]]()
        with self._reading:
            return {
                key: self._merge(key, record_type, found[key]) if key in found else None
                for key, record_type in keys.items()
            }

    def _find_manifest(self, timeout_s: float) -> tuple[bytes | None, bool]:
        """The newest as it is stored, if anybody gave one, and whether anybody answered: all are
        asked, for one may have missed the last, and older ones stay valid. Raises `NoAnswer`.
        """
        key = manifest_key(self._run)
        found = self._dht.find_news({key: ()}, thorough=True, timeout_s=timeout_s).get(key)
        plain = [each for each in found or () if each.subkey is None]
        newest = max(plain, key=lambda each: each.expires_at, default=None)
        return None if newest is None else newest.value, found is not None

    def publish_manifest(self, signed: SignedManifest) -> bool:
        """Store the manifest for a week; whether the DHT took it. Only the operator can."""
        payloads = {manifest_key(self._run): signed.to_bytes()}
        return self._store(payloads, MANIFEST_LIFETIME_S, None, CALL_TIMEOUT_S)

    def sealed_manifest(self) -> bytes | None:
        """The manifest that the operator signed last, in its envelope; None if nobody gave it."""
        with contextlib.suppress(NoAnswer, Refused):
            stored, _ = self._find_manifest(CALL_TIMEOUT_S)
            return None if stored is None else sealed_bytes(stored)
        return None

    def store_sealed_manifest(self, sealed: bytes) -> None:
        """Store what `sealed_manifest` gave, as it is; raises `Refused` if it is no envelope."""
        expires_at = unseal(sealed, check_signature=False).expires_at
        stored = StoredValue(manifest_key(self._run), sealed, expires_at)
        with contextlib.suppress(NoAnswer):
            self._dht.put_many([stored], timeout_s=CALL_TIMEOUT_S)

    def fetch_manifest(self, timeout_s: float) -> SignedManifest:
        """Find the manifest of the run and check that it is the operator's.

        Raises `InvalidInput` when what the swarm has does not fit the run id, `UnknownRun` when it
        has none, `BootstrapsSilent` when it does not answer.
        """
        deadline = time.monotonic() + timeout_s
        answered = False
        while (left := deadline - time.monotonic()) > 0:
            try:
                found, heard = self._find_manifest(left)
            except NoAnswer:
                break
            answered |= heard
            if found is not None:
                signed = self._unsealed_manifest(found)
                signed.verify(self._run)
                return signed
            # On a busy machine the first ping of a bootstrap is lost, and then this node knows
            # nobody to ask: a ping that is answered puts the bootstrap into its routing table.
            self.bootstrap_answers(min(FETCH_PING_S, left))
            time.sleep(min(FETCH_PAUSE_S, left))
        if answered and self.bootstrap_answers(CALL_TIMEOUT_S):
            raise UnknownRun(f"the bootstraps answer but know no run {self._run}: check the invite")
        raise BootstrapsSilent(
            f"no manifest of run {self._run} within {timeout_s:.0f} s: "
            "check that this machine is online and that the bootstrap runs"
        )

    def newest_manifest(self, timeout_s: float = CALL_TIMEOUT_S) -> SignedManifest | None:
        """The newest of this run, checked but for what it says; None if nobody gave it.

        Raises `InvalidInput` where it is not the operator's.
        """
        try:
            stored, _ = self._find_manifest(timeout_s)
        except NoAnswer:
            return None
        if stored is None:
            return None
        signed = self._unsealed_manifest(stored)
        signed.revision_of(self._run)
        return signed

    def admit_by(self, manifest: Manifest, operator: str, kept: Path | None = None) -> None:
        """Hear only peers that the run's newest manifest admits; arguments as of `Admission`."""
        self.admission = Admission(self._run, manifest, operator, self._clock.time, kept)

    def admits(self, peer: str) -> bool:
        """Whether this peer may take part in the run now."""
        return self.admission is None or self.admission.admits(peer)

    def bootstrap_answers(self, timeout_s: float) -> bool:
        """Whether one of the bootstraps answers; true on the first node of a swarm."""
        return self._dht.bootstrap_answers(timeout_s)

    def _unsealed_manifest(self, stored: bytes) -> SignedManifest:
        try:
            return SignedManifest.from_bytes(unseal(sealed_bytes(stored)).payload)
        except Refused as reason:
            raise InvalidInput(f"manifest of run {self._run} is refused ({reason})") from reason

    def _store(
        self,
        payloads: Mapping[str, bytes],
        lifetime_s: float,
        owner: bytes | None,
        timeout_s: float,
    ) -> bool:
        with self._writing:
            values = [
                self._sealed(key, payload, lifetime_s, owner) for key, payload in payloads.items()
            ]
            self.sent_bytes += sum(len(each.value) for each in values)
        try:
            return self._dht.put_many(values, timeout_s=timeout_s)
        except NoAnswer:
            return False

    def _sealed(
        self, key: str, payload: bytes, lifetime_s: float, owner: bytes | None
    ) -> StoredValue:
        longest = MAX_LIFETIME_S[parse_key(key).kind]
        if not 0 < lifetime_s <= longest:
            raise ValueError(f"{key} may live up to {longest:g} s, not {lifetime_s:g}")
        now = self._clock.time()
        self._sequence = max(self._sequence + 1, int(now * 1000))
        self._expiries = {name: at for name, at in self._expiries.items() if at > now}
        expires_at = max(now + lifetime_s, self._expiries.get(key, 0.0) + LATER_S)
        self._expiries[key] = expires_at
        sealed = seal(
            self._identity,
            key=key,
            sequence=self._sequence,
            expires_at=expires_at,
            payload=payload,
        )
        return StoredValue(key, sealed, expires_at, owner)

    def _merge(self, key: str, record_type: type[R], entries: Iterable[Entry]) -> dict[str, R]:
        """Take in an answer; what is known under the key now, without what has expired."""
        seen = cast("dict[str, _Seen[R]]", self._seen.setdefault(key, {}))
        now = self._clock.time()
        for owner, each in list(seen.items()):
            if each.expires_at <= now or not self.admits(owner):
                del seen[owner]
        for entry in entries:
            self.received_bytes += len(entry.value)
            try:
                envelope = self._opened(key, entry)
                if not self.admits(envelope.owner):
                    raise Refused("admission", "its owner is not admitted to the run")
                record = record_type.decode(envelope.payload)
            except Refused as reason:
                self._pass_over(key, entry, reason.kind)
            except Malformed:
                self._pass_over(key, entry, "type")
            else:
                before = seen.get(envelope.owner)
                if before is None and len(seen) >= self._most_owners:
                    self._pass_over(key, entry, "full")
                elif before is None or before.sequence < envelope.sequence:
                    seen[envelope.owner] = _Seen(
                        entry.mark, envelope.sequence, envelope.expires_at, record
                    )
                else:
                    self._pass_over(key, entry, "older")
        self._forget_old_keys(now)
        return {owner: each.record for owner, each in seen.items() if each.expires_at > now}

    def _known(self, key: str) -> list[bytes]:
        """The marks of what need not be told again under a key."""
        now, passed = self._clock.time(), self._passed_over.get(key, {})
        self._passed_over[key] = {mark: until for mark, until in passed.items() if until > now}
        return [*(each.mark for each in self._seen.get(key, {}).values()), *self._passed_over[key]]

    def _pass_over(self, key: str, entry: Entry, reason: str) -> None:
        """What is refused is not to be told again and again, or it would hide what is new."""
        self.refused[reason] += 1
        passed = self._passed_over.setdefault(key, {})
        if len(passed) < MAX_PASSED_OVER:
            passed[entry.mark] = entry.expires_at

    def _opened(self, key: str, entry: Entry) -> Envelope:
        envelope = unseal(sealed_bytes(entry.value))
        if envelope.key != key:
            raise Refused("key", "it was signed for another key")
        if envelope.owner_bytes != entry.subkey:
            raise Refused("owner", "it is under another peer's id")
        if envelope.expires_at != entry.expires_at:
            raise Refused("expiry", "it is not the one that was signed")
        return envelope

    def _forget_old_keys(self, now: float) -> None:
        if len(self._seen) > MAX_KEYS_KEPT:
            self._seen = {
                key: seen
                for key, seen in self._seen.items()
                if any(each.expires_at > now for each in seen.values())
            }
            self._passed_over = {
                k: each for k, each in self._passed_over.items() if k in self._seen
            }
