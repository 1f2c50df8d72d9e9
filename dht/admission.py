"""Which peers may take part in a run: all, or, where its manifest says `admission: listed`, those
that its operator has admitted.

The list stands in the newest revision of the manifest, so it spreads, lasts and is proven as that
is (manifest_revisions.py), and a peer has nothing to show. A peer that is not, or no longer, on it
is refused wherever a peer hears others: records of the DHT (swarm.py), streams, groups, downloads.
The operator's own bootstrap is always on it. `dilocox operate admit` and `revoke` change it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dilocox.dht.errors import NotAdmitted
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import kept_manifest

DAY_S = 86400
FOLLOW_S = 1.0  # between two looks at the file


class Admission:
    """Which peers are admitted to one run now; may be asked by any thread."""

    def __init__(
        self,
        run: str,
        manifest: Manifest,
        operator: str,
        now: Callable[[], float],
        kept: Path | None = None,
    ):
        """operator: the peer id of its key. now: run time. kept: a file into which another process
        writes newer revisions, which are followed.
        """
        self._run = run
        self._operator = operator
        self._now = now
        self._kept = kept
        self._looked_at = float("-inf")
        self._stamp = (0, 0)
        self._manifest = manifest
        self._until: dict[str, int] = {}
        self.take(manifest)

    def take(self, manifest: Manifest) -> None:
        """Go by this revision."""
        self._until = {peer: day * DAY_S for peer, day in manifest.operation.admitted}
        self._manifest = manifest

    def admits(self, peer: str) -> bool:
        """Whether this peer (its id) may take part now."""
        self._follow()
        if self._manifest.admission == "open" or peer == self._operator:
            return True
        return self._now() < self._until.get(peer, 0)

    def refusal(self, peer: str) -> NotAdmitted | None:
        """What to tell the volunteer of a peer that is not admitted; None if it is."""
        if self.admits(peer):
            return None
        return NotAdmitted(
            f"run {self._run} ({self._manifest.name}) takes only peers that its operator admits; "
            f"this one is not, or no longer, among them: ask for `dilocox operate admit {peer}`, "
            "then start again"
        )

    def _follow(self) -> None:
        if self._kept is None or time.monotonic() - self._looked_at < FOLLOW_S:
            return
        self._looked_at = time.monotonic()
        try:
            found = self._kept.stat()
        except OSError:  # none yet
            return
        if self._stamp == (stamp := (found.st_mtime_ns, found.st_ino)):
            return
        self._stamp = stamp
        signed = kept_manifest(self._kept, self._run)
        newer = None if signed is None else signed.readable(self._run)
        if newer and newer.operation.revision > self._manifest.operation.revision:
            self.take(newer)
