"""How often a peer tells and hears, so that what it costs stays within a budget of bytes.

Every announcement of a peer is carried to all who look where it was made. In a swarm of equals a
peer therefore pays, for each of its announcements, what it hears when all of them announce once;
and that grows with the swarm. So announcements are made in intervals that stretch with it, and
records live for three of them, whatever that is: nobody vanishes between two. What must be prompt,
a bell or the news of a record, is told at once and paid from what was saved for it.

A look costs little where nothing is new, so looks are made several times between two announcements
of the others. Other stages than one's own are looked at once in four intervals.

    budget   1.3 kB/s, and 2 B/s more for each peer above 200; more where the manifest's heartbeat
             is shorter than 10 s: who sets that wants answers sooner
    interval (bytes heard when all announce once) / (two thirds of the budget), no shorter than the
             manifest's heartbeat, no longer than a record may live

Pure rules over numbers and the times that the caller gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.dht.keys import MAX_LIFETIME_S

BUDGET_BYTES_PER_S = 1300.0
BUDGET_OF_LARGE = 2.0  # bytes/s more for each peer above LARGE_SWARM
LARGE_SWARM = 200
USUAL_HEARTBEAT_S = 10.0
REGULAR_SHARE = 2 / 3  # of the budget is for regular announcements; the rest is saved
SAVED_ANNOUNCEMENTS = 4  # as many can be made at once after a while without any
LIFETIMES = 3  # intervals that a record lives
LONGEST_S = min(MAX_LIFETIME_S["stage"], MAX_LIFETIME_S["bell"]) / LIFETIMES
LOOKS = 4  # at one's own stage, between two announcements of the others
OTHERS_SHARE = 4  # intervals between two looks at other stages


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What stood in the last looks.

    peers: of all stages that are known. own_bytes: of the records that this peer looks at with
        every look, its own stage's and the replicas'. other_bytes: of those of other stages.
    """

    peers: int = 0
    own_bytes: int = 0
    other_bytes: int = 0


class Cadence:
    """The intervals of one peer. Times are seconds of any clock that does not step back."""

    def __init__(self, *, heartbeat_s: float, now_s: float):
        """heartbeat_s: of the manifest, the shortest interval."""
        self._heartbeat_s = heartbeat_s
        self._heard = Heard()
        self._saved = float(SAVED_ANNOUNCEMENTS)  # who comes has something to tell
        self._filled_at = now_s

    def hear(self, heard: Heard) -> None:
        """Take in what a look has shown; this alone may be called from another thread."""
        self._heard = heard

    @property
    def budget_bytes_per_s(self) -> float:
        """What looks and announcements of this peer may cost on average."""
        above = max(0, self._heard.peers - LARGE_SWARM)
        haste = max(1.0, USUAL_HEARTBEAT_S / self._heartbeat_s)
        return haste * (BUDGET_BYTES_PER_S + BUDGET_OF_LARGE * above)

    @property
    def announce_s(self) -> float:
        """Seconds between two regular announcements."""
        wanted = self._announcement_bytes / (REGULAR_SHARE * self.budget_bytes_per_s)
        return min(max(wanted, self._heartbeat_s), LONGEST_S)

    @property
    def lifetime_s(self) -> float:
        """Seconds that what is announced now lives."""
        return LIFETIMES * self.announce_s

    @property
    def look_s(self) -> float:
        """Seconds between two looks at one's own stage and the replicas."""
        return max(self._heartbeat_s, self.announce_s / LOOKS)

    @property
    def look_at_others_s(self) -> float:
        """Seconds between two looks at the other stages."""
        # a swarm that pays for little is seen whole with every look
        stretched = self.announce_s > self._heartbeat_s
        return OTHERS_SHARE * self.announce_s if stretched else self.look_s

    def may_hurry(self, now_s: float) -> bool:
        """Whether enough was saved for an announcement before its time."""
        self._fill(now_s)
        return self._saved >= 1.0

    def hurried(self, now_s: float, share: float = 1.0) -> None:
        """An announcement was made before its time, or a `share` of one, as a bell alone is.

        It is paid for also where nothing was saved: the next ones wait longer.
        """
        self._fill(now_s)
        self._saved -= share

    def _fill(self, now_s: float) -> None:
        """Announcements are what is saved: what one costs changes with the swarm."""
        one_in_s = self._announcement_bytes / ((1 - REGULAR_SHARE) * self.budget_bytes_per_s)
        since_s, self._filled_at = now_s - self._filled_at, now_s
        # a bell costs little where nobody is: a hundred announcements a second are enough
        self._saved = min(SAVED_ANNOUNCEMENTS, self._saved + since_s / max(one_in_s, 0.01))

    @property
    def _announcement_bytes(self) -> float:
        """What it costs a peer when all announce once."""
        return self._heard.own_bytes + self._heard.other_bytes / OTHERS_SHARE
