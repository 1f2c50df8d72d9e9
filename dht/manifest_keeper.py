"""How a bootstrap keeps the run's manifest alive in the DHT: as its operator, or as a copy.

The operator's signs an envelope around the manifest, with a new expiry again and again. A copy has
no key of the operator: it keeps the newest envelope that it saw, in a file, too, and stores it
again as it is, byte for byte. So nobody has to trust a copy, and it helps for as long as the
operator made the envelope valid (keys.py).
"""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dilocox.dht.envelope import MAX_VALUE_BYTES, Refused, unseal
from dilocox.dht.errors import DilocoxError, EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.keys import MANIFEST_LIFETIME_S, manifest_key
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.swarm import Swarm

logger = logging.getLogger(__name__)

FIRST_LIMIT_S = 20.0  # as for a peer that joins


class ManifestKeeper(Protocol):
    """What a bootstrap needs of either.

    run: its id. own: whether it is the operator's. expires_at: Unix time until which the DHT may
    keep what was published last.
    """

    run: str
    own: bool
    expires_at: float

    @property
    def known(self) -> bool:
        """Whether it has a manifest: a copy has none before it first sees one."""
        ...

    @property
    def due(self) -> bool:
        """Whether there is something new to publish."""
        ...

    @property
    def signed(self) -> SignedManifest:
        """The newest one, which it has after a `publish`; else RuntimeError."""
        ...

    def publish(self, swarm: Swarm) -> bool:
        """See to it that the DHT has the newest one; whether it has one.

        Raises `InvalidInput` or `EnvironmentFault` where there is none to be had at all.
        """
        ...


class Revisions(Protocol):
    """Where the operator's commands put what they sign."""

    def begin(self, identity: Identity, manifest: Manifest) -> SignedManifest:
        """The newest one at the start; `manifest` is signed as the first one if there is none."""
        ...

    def newest(self) -> SignedManifest | None:
        """The one of the highest revision."""
        ...

    def add(self, signed: SignedManifest) -> int:
        """Keep another revision; its number."""
        ...

    def note_published(self, number: int) -> None:
        """This revision is in the DHT."""
        ...


class OwnManifest:
    """The operator's."""

    def __init__(self, identity: Identity, manifest: Manifest, revisions: Revisions | None = None):
        """Raises `InvalidInput` for a manifest that is too large, or not of the run that began."""
        self.run = run_id(identity.public_key, manifest.name)
        self.signed = (
            SignedManifest.sign(identity, manifest)
            if revisions is None
            else revisions.begin(identity, manifest)
        )
        self.own = self.known = True
        self.expires_at = 0.0
        self._revisions = revisions

    @property
    def due(self) -> bool:
        """Whether the operator has signed a newer revision; raises `DilocoxError`."""
        return self._newest() is not self.signed

    def publish(self, swarm: Swarm) -> bool:
        """Sign an envelope anew and store it.

        Where this node has only the operator's key, the swarm may know a newer revision.
        """
        newest = self._newest()
        with contextlib.suppress(InvalidInput):
            found = swarm.newest_manifest()
            own = newest.revision_of(self.run)
            told = own if found is None else found.revision_of(self.run)
            if found is not None and told == own and found.manifest_bytes != newest.manifest_bytes:
                raise EnvironmentFault(
                    f"the swarm has another manifest of revision {own}, signed with this key: go "
                    "on with the state folder that made it, or remove this one's folder of "
                    "revisions"
                )
            if found is not None and told > own:
                logger.warning("going on from revision %d, as the swarm knows it", told)
                if self._revisions is not None:
                    self._revisions.add(found)
                newest = found
        if not swarm.publish_manifest(newest):
            return False
        self.signed = newest
        self.expires_at = time.time() + MANIFEST_LIFETIME_S
        if self._revisions is not None:
            self._revisions.note_published(newest.revision_of(self.run))
        return True

    def _newest(self) -> SignedManifest:
        newest = None if self._revisions is None else self._revisions.newest()
        return newest or self.signed


class ManifestCopy:
    """What the operator signed last, as far as this copy of the bootstrap saw it."""

    def __init__(self, run: str, path: Path, write: Callable[[Path, bytes], object]):
        """write: puts bytes into a file, whole or not at all; raises `EnvironmentFault`."""
        self.run = run
        self.own = False
        self.expires_at = 0.0
        self._signed: SignedManifest | None = None
        self._path = path
        self._write = write
        self._sealed = b""
        self._sequence = -1
        # where it is missing or damaged it is fetched again
        with contextlib.suppress(OSError, Refused, InvalidInput), path.open("rb") as file:
            self._take(file.read(MAX_VALUE_BYTES + 1))

    @property
    def known(self) -> bool:
        """Whether it has seen one, now or before its last start."""
        return self._signed is not None

    @property
    def signed(self) -> SignedManifest:
        """The newest one."""
        if self._signed is None:
            raise RuntimeError("no manifest has been seen yet")
        return self._signed

    @property
    def due(self) -> bool:
        """Never: what is new comes from the DHT."""
        return False

    def publish(self, swarm: Swarm) -> bool:
        """Take what is newer than ours from the DHT, else put ours there where it lacks it."""
        if not self.known:
            swarm.fetch_manifest(self.run, FIRST_LIMIT_S)  # for its patience and its errors
        found = swarm.sealed_manifest()
        if found is not None and self._newer(found):
            try:
                self._write(self._path, found)
            except DilocoxError as error:  # a full disk: it is in memory
                logger.warning("%s", error)
        if not self.known:
            raise EnvironmentFault(f"the manifest of run {self.run} came and went: try again")
        if self.expires_at < time.time():
            logger.warning(
                "nobody can join: the operator has not renewed the manifest for %.0f days; the "
                "operator's bootstrap must run",
                MANIFEST_LIFETIME_S / 86400,
            )
        elif self._sealed != found:
            swarm.store_sealed_manifest(self._sealed)
        return True

    def _newer(self, sealed: bytes) -> bool:
        try:
            return self._take(sealed)
        except (Refused, InvalidInput) as error:
            logger.warning("a manifest of the DHT is refused: %s", error)
            return False

    def _take(self, sealed: bytes) -> bool:
        """Whether it is newer than what is kept, which it then replaces."""
        envelope = unseal(sealed)
        signed = SignedManifest.from_bytes(envelope.payload)
        signed.verify(self.run)
        if envelope.public_key != signed.public_key or envelope.key != manifest_key(self.run):
            raise Refused("owner", "only the operator's envelope lasts")
        if envelope.sequence <= self._sequence:
            return False
        self._signed, self.expires_at = signed, envelope.expires_at
        self._sealed, self._sequence = sealed, envelope.sequence
        return True
