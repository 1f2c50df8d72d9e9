"""Follows the manifest of a run: the operator may sign a newer revision at any time.

A state alone (paused, ended, running again) takes effect in the running process. New rules enter
the outer step, the deadlines of an exchange or the records that count, and are spread over several
processes: for them a peer starts again from its snapshot, between two inner steps with no send in
flight. Records name the rules that they were made under, so it does not matter who is first. Who
cannot read the new rules must leave all the same: under the old ones it would make a chain of its
own.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from dilocox.dht.errors import InvalidInput, UnreadableManifest
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.swarm import Swarm
from dilocox.peer.files import write_atomically

logger = logging.getLogger(__name__)

LOOK_LIMIT_S = 3.0
REVISION_S = 30.0  # between two looks for what nobody tells of
MAX_IN_VAIN = 10


class ManifestWatch:
    """The newest manifest that this process knows; one thread looks, others may read.

    manifest: is set whole. unreadable: what is wrong with a newer one that the operator signed and
    this program cannot read; None where there is none.
    """

    def __init__(self, swarm: Swarm, run: str, manifest: Manifest, file: Path | None = None):
        """file: where a newer one is kept for the next start."""
        self.manifest = manifest
        self.unreadable: UnreadableManifest | None = None
        self._swarm = swarm
        self._run = run
        self._file = file
        self._refused = ""
        self._looked_at: float | None = None
        self._in_vain = 0  # looks for what was told

    def follow(self, told: int, heartbeat_s: float, now: float) -> bool:
        """Look where somebody tells of a newer one, else now and then: it is large.

        Anybody may tell anything. The more often nobody had what was told, the later is looked
        again. told: the highest revision of all. now: of the monotonic clock. Returns as `look`.
        """
        newer = told > self.manifest.operation.revision
        pause_s = REVISION_S
        if newer:
            pause_s = min(pause_s, heartbeat_s / 2 * 2**self._in_vain)
        if self._looked_at is None:
            self._looked_at = now
        if now - self._looked_at < pause_s:
            return False
        self._looked_at = now
        found = self.look()
        self._in_vain = min(MAX_IN_VAIN, self._in_vain + 1) if newer and not found else 0
        return found

    def look(self) -> bool:
        """Ask the DHT; whether there is a newer one. EnvironmentFault if the disk is full."""
        try:
            signed = self._swarm.newest_manifest(LOOK_LIMIT_S)
            if signed is None or signed.revision_of(self._run) <= self.manifest.operation.revision:
                return False
            newer = self._read(signed)
        except InvalidInput as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the newest manifest is refused: %s", error)
            return False
        if self._file is not None:
            write_atomically(self._file, signed.to_bytes())
        if newer is None:
            return False
        before, self.manifest = self.manifest, newer
        _tell(before, newer)
        return True

    def _read(self, signed: SignedManifest) -> Manifest | None:
        """None if it is the operator's, but not to be read; raises InvalidInput."""
        known = self.unreadable
        try:
            newer = signed.verify(self._run)
        except UnreadableManifest as error:
            if str(error) != str(known):
                logger.error("%s", error)
                self.unreadable = error
            return None
        self.unreadable = None
        return newer


def kept_manifest(file: Path, run: str) -> SignedManifest | None:
    """What a watch kept there; None if there is nothing, or nothing of the run's operator."""
    with contextlib.suppress(OSError, InvalidInput):
        signed = SignedManifest.from_bytes(file.read_bytes())
        signed.revision_of(run)
        return signed
    return None


def newer_of(found: SignedManifest, kept: SignedManifest | None, run: str) -> SignedManifest:
    """The one of the higher revision; both are of this run."""
    if kept is None or kept.revision_of(run) <= found.revision_of(run):
        return found
    return kept


def _tell(before: Manifest, newer: Manifest) -> None:
    old, new = before.operation, newer.operation
    told = f"revision {new.revision} of the manifest"
    if new.state != old.state:
        words = {"paused": "pauses", "ended": "ends", "running": "resumes"}
        logger.warning("%s: the operator %s the run", told, words[new.state])
    if new.rollbacks != old.rollbacks:
        logger.warning("%s: the operator goes back to round %d", told, new.rollbacks[-1][1])
    elif new.rules != old.rules:
        logger.warning("%s: new values", told)
