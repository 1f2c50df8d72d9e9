"""How a bootstrap keeps the run's manifest alive in the DHT: as its operator, or as a copy.

The operator's signs an envelope around the manifest, with a new expiry again and again. A copy has
no key of the operator: it keeps the newest envelope that it saw, in a file, too, and stores it
again as it is, byte for byte. So nobody has to trust a copy, and it helps for as long as the
operator made the envelope valid (records.py).
"""

import contextlib
import logging
import time
from pathlib import Path

from dilocox.dht.errors import (
    DilocoxError,
    EnvironmentFault,
    InvalidInput,
    UnknownRun,
    UnreadableManifest,
)
from dilocox.dht.files import write_atomically
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_revisions import RevisionFolder, check_of_run
from dilocox.dht.records import MANIFEST_LIFETIME_S, manifest_key
from dilocox.dht.swarm import Swarm
from dilocox.dht.wire import MAX_VALUE_BYTES, Refused, unseal

logger = logging.getLogger(__name__)

FIRST_LIMIT_S = 20.0  # as for a peer that joins


class OwnManifest:
    """The operator's.

    run: its id. own: whether it is the operator's. known: whether this folder has a revision of the
    run; until then it may have begun elsewhere. signed: the newest revision. expires_at: Unix time
    until which the DHT may keep what was published last.
    """

    own = True

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        revisions: RevisionFolder,
        *,
        joins: bool = False,
    ):
        """joins: whether this bootstrap was told of others, which must be heard before it begins.

        Raises `InvalidInput` for a manifest that is too large, or not of the run that began.
        """
        revisions.check(manifest)
        newest = revisions.newest()
        self.run = run_id(identity.public_key, manifest.name)
        self.signed = newest or SignedManifest.sign(identity, manifest)
        self.known = newest is not None
        self.expires_at = 0.0
        self._manifest = manifest
        self._revisions = revisions
        self._joins = joins

    @property
    def due(self) -> bool:
        """Whether the operator has signed a newer revision; raises `DilocoxError`."""
        return self._newest() is not self.signed

    def publish(self, swarm: Swarm) -> bool:
        """Sign an envelope anew and store it; whether the DHT took it.

        Where this node has only the operator's key, the swarm may know a newer revision. Raises
        `InvalidInput` or `EnvironmentFault` where the run goes on elsewhere with another one.
        """
        if not self.known:
            self._begin(swarm)
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
                self._revisions.add(found)
                newest = found
        if not swarm.publish_manifest(newest):
            return False
        self.signed = newest
        self.expires_at = time.time() + MANIFEST_LIFETIME_S
        self._revisions.note_published(newest.revision_of(self.run))
        return True

    def _begin(self, swarm: Swarm) -> None:
        """Go on from what the swarm knows of the run; if that is nothing, the run begins.

        Raises `InvalidInput` where the run.yaml is not the run's, `EnvironmentFault` where the
        other bootstraps give no answer or a refused one: a second first revision would split the
        run.
        """
        found = known = None
        try:
            found = swarm.fetch_manifest(FIRST_LIMIT_S) if self._joins else swarm.newest_manifest()
            known = None if found is None else found.verify(self.run)
        except UnreadableManifest:
            raise
        except UnknownRun:
            logger.info("run %s is new: publishing its first manifest", self.run)
        except InvalidInput as error:
            if self._joins:
                raise EnvironmentFault(
                    f"what the other bootstraps have of run {self.run} is not this operator's "
                    f"({error}): check --join and try again"
                ) from error
            # nobody that could know the run was named, and a stranger's word counts for nothing
            logger.warning("refused a manifest of run %s: %s", self.run, error)
        if found is not None and known is not None:
            if known.root != self._manifest.digest:
                check_of_run(self._manifest, self.run, [known])
            elif known.operation.revision > 0:
                self._revisions.add(self.signed)
            self.signed = found
        self._revisions.add(self.signed)
        self.known = True

    def _newest(self) -> SignedManifest:
        return self._revisions.newest() or self.signed


class ManifestCopy:
    """What the operator signed last, as far as this copy of the bootstrap saw it; kept in a file.

    Its attributes are those of `OwnManifest`; nothing is ever due, since what is new comes from the
    DHT.
    """

    own = due = False

    def __init__(self, run: str, path: Path):
        self.run = run
        self.expires_at = 0.0
        self._signed: SignedManifest | None = None
        self._path = path
        self._sealed = b""
        self._order = -1, -1  # its revision, and the sequence of its envelope
        try:
            with path.open("rb") as file:
                self._take(file.read(MAX_VALUE_BYTES + 1))
        except FileNotFoundError:
            pass
        except (OSError, Refused, InvalidInput) as error:
            logger.warning("%s does not count: %s; it is fetched again", path, error)

    @property
    def known(self) -> bool:
        """Whether it has seen one, now or before its last start."""
        return self._signed is not None

    @property
    def signed(self) -> SignedManifest:
        """The newest one, which it has after a `publish`; else RuntimeError."""
        if self._signed is None:
            raise RuntimeError("no manifest has been seen yet")
        return self._signed

    def publish(self, swarm: Swarm) -> bool:
        """Take what is newer than ours from the DHT, else put ours there where it lacks it.

        Raises `InvalidInput` or `EnvironmentFault` where there is none to be had at all.
        """
        if not self.known:
            swarm.fetch_manifest(FIRST_LIMIT_S)  # for its patience and its errors
        found = swarm.sealed_manifest()
        if found is not None and self._newer(found):
            try:
                write_atomically(self._path, found)
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
        if envelope.public_key != signed.run_key or envelope.key != manifest_key(self.run):
            raise Refused("owner", "only the envelope of the operator's bootstrap lasts")
        order = signed.revision_of(self.run), envelope.sequence
        if order <= self._order:
            return False
        self._signed, self.expires_at = signed, envelope.expires_at
        self._sealed, self._order = sealed, order
        return True


ManifestKeeper = OwnManifest | ManifestCopy
