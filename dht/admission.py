"""Which peers may take part in a run: all, or, where its manifest says `admission: listed`, those
that its operator has admitted.

The list stands in the newest revision of the manifest, so it spreads, lasts and is proven as that
is (manifest_revisions.py), and a peer has nothing to show. A peer that is not, or no longer, on it
is refused wherever a peer hears others: records of the DHT (swarm.py), streams, groups, downloads.
The operator's own bootstrap is always on it. `dilocox operate admit` and `revoke` change it.

An admission ends with a day. Three days before, it is said once a day where it can be read: to its
peer, and for all of them to the operator's bootstrap. Whose time is over waits for the operator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from dilocox.dht.errors import AdmissionLapsed, NotAdmitted
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import kept_manifest

logger = logging.getLogger(__name__)

DAY_S = 86400
WARNED_S = 3 * DAY_S  # before an admission ends
SHOWN_S = DAY_S  # after it has ended
RENEW_ALL = "dilocox operate admit $(dilocox operate admitted | sed -n 's/ until .*//p')"
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
        self._remind_at = float("-inf")  # of run time
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
        run = f"run {self._run} ({self._manifest.name}) takes only peers that its operator admits"
        if (until := self._until.get(peer)) is not None:
            return AdmissionLapsed(
                f"{run}, and this one's time ended on {date(until)}: ask for `dilocox operate "
                f"admit {peer}`"
            )
        return NotAdmitted(
            f"{run}; this one is not, or no longer, among them: ask for `dilocox operate admit "
            f"{peer}`, then start again"
        )

    @property
    def first_end(self) -> int | None:
        """Unix time when the first admission ends, or has ended within a day; None where none
        does.
        """
        if self._manifest.admission == "open":
            return None
        since = self._now() - SHOWN_S
        return min((until for until in self._until.values() if until > since), default=None)

    def remind(self, me: str) -> None:
        """Warn, once a day, of this peer's admission where it ends soon or is over; where it is the
        operator's bootstrap, of all that do.
        """
        now, operator = self._now(), me == self._operator
        if self._manifest.admission == "open" or now < self._remind_at:
            return
        since = now - SHOWN_S if operator else 0
        of = self._until.values() if operator else [self._until.get(me, 0)]
        soon = [until for until in of if since < until < now + WARNED_S]
        if not soon:
            return
        self._remind_at = now + DAY_S
        if operator:
            logger.warning(
                "of %d admissions %d end within three days, or have just ended, the first on %s "
                "(0:00 UTC); `dilocox operate admit ID` renews one, `%s` all of them, and `dilocox "
                "operate admitted` lists them",
                len(self._until),
                len(soon),
                date(min(soon)),
                RENEW_ALL,
            )
        else:
            logger.warning(
                "the operator has admitted this peer until %s (0:00 UTC): ask for `dilocox operate "
                "admit %s`, or the others refuse it from then on",
                date(soon[0]),
                me,
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


def date(until: int) -> str:
    """The day that begins at this Unix time."""
    return time.strftime("%Y-%m-%d", time.gmtime(until))
