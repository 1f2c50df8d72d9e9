"""Follows the manifest of a run: the operator may sign a newer revision at any time.

A state alone (paused, ended, running again) takes effect in the running process. New rules enter
the outer step, the deadlines of an exchange or the records that count, and are spread over several
processes: for them a peer starts again from its snapshot, between two inner steps with no send in
flight. Records name the rules that they were made under, so it does not matter who is first.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.swarm import Swarm
from dilocox.peer.files import write_atomically

logger = logging.getLogger(__name__)

LOOK_LIMIT_S = 3.0


class ManifestWatch:
    """The newest manifest that this process knows; one thread looks, others may read.

    manifest: is set whole.
    """

    def __init__(self, swarm: Swarm, run: str, manifest: Manifest, file: Path | None = None):
        """file: where a newer one is kept for the next start."""
        self.manifest = manifest
        self._swarm = swarm
        self._run = run
        self._file = file
        self._refused = ""

    def look(self) -> bool:
        """Ask the DHT; whether there is a newer one. EnvironmentFault if the disk is full."""
        try:
            signed = self._swarm.newest_manifest(LOOK_LIMIT_S)
            if signed is None or signed.revision_of(self._run) <= self.manifest.operation.revision:
                return False
            newer = signed.verify(self._run)
        except InvalidInput as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the operator's newest manifest is refused: %s", error)
            return False
        if self._file is not None:
            write_atomically(self._file, signed.to_bytes())
        before, self.manifest = self.manifest, newer
        _tell(before, newer)
        return True


def kept_manifest(file: Path, run: str) -> SignedManifest | None:
    """What a watch kept there; None if there is nothing, or nothing that this program reads."""
    with contextlib.suppress(OSError, InvalidInput):
        signed = SignedManifest.from_bytes(file.read_bytes())
        signed.verify(run)
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
