"""How a group decides its round: when it may start, the majority vote, and what a retry leaves out.

Every member casts one signed, final vote per attempt: the digest of the record it made, or ABORT
with the members whose bytes it missed. Only the votes of the group's *voters* count, its proven
members (standing.py). More than half of the gathered voters for one digest commit the round, half
of them aborting make it void, and the dead count among them: so no two members can ever decide
differently, whichever votes are lost on the way. (An earlier rule, "all that I see alive agree",
committed here and voided there in 268 of 1024 patterns of cut links between four members.)

Pure rules over facts: nothing here reads a clock, a disk or a socket. How votes are signed, and
prove a record, is ballots.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

MAX_MEMBERS = 256  # of a group
EXCLUSION_WORK = 5000  # sets tried for the smallest exclusion; all sets of 12 peers are fewer


class Verdict(Enum):
    """How an attempt stands as far as one member's votes show."""

    COMMITTED = "committed"
    VOID = "void"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The verdict, and the digest that was committed (None otherwise)."""

    verdict: Verdict
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One member's final choice in one attempt."""

    voter: str
    digest: str | None
    """sha256 of the record, 64 hex characters; None is ABORT."""
    missed: tuple[str, ...] = ()
    """The members whose bytes an aborting voter missed, sorted; empty beside a digest."""


def decide(voters: Collection[str], votes: Iterable[Vote]) -> Decision:
    """What these votes decide.

    Further votes change an UNDECIDED only. Votes of others do not count, a repeated vote counts
    once, and a voter that is seen to vote for two different things counts as dead, so that the
    order in which votes arrive decides nothing.
    """
    chosen = choices(voters, votes)
    for digest, count in Counter(chosen.values()).items():
        if digest is not None and commits(count, voters):
            return Decision(verdict=Verdict.COMMITTED, digest=digest)
    if 2 * sum(digest is None for digest in chosen.values()) >= len(voters):
        return Decision(verdict=Verdict.VOID)
    return Decision(verdict=Verdict.UNDECIDED)


def commits(votes: int, voters: Collection[str]) -> bool:
    """Whether so many votes of these voters for one record commit it: more than half."""
    return 2 * votes > len(voters)


def choices(voters: Collection[str], votes: Iterable[Vote]) -> dict[str, str | None]:
    """What each voter chose; without those that chose two different things."""
    seen: dict[str, set[str | None]] = {}
    for vote in votes:
        if vote.voter in voters:
            seen.setdefault(vote.voter, set()).add(vote.digest)
    return {voter: next(iter(chosen)) for voter, chosen in seen.items() if len(chosen) == 1}


def exclusion(
    aborts: Iterable[Vote], silent: Collection[str], voters: Collection[str]
) -> tuple[str, ...]:
    """The peers that a retry leaves out: those without a vote that two voters missed (or one, where
    only one missed anybody), and the smallest set of voters that covers every pair of a voter and
    another one that it missed. Returned sorted.

    Keys without a vote cost nothing: of more of them than there are voters, all silent, the voters
    would be the smaller set, and one that is sound to all but one would have that left out. They
    average nothing in a retry, so that one which stays voids nothing. Where several sets are the
    smallest, peers are ranked, the silent ones (without a vote cast) before the others and the
    larger id before the smaller, and the set that comes first in that dictionary order wins.

    Exact where the answer is among the first EXCLUSION_WORK sets, the smaller sets first: always
    with up to 12 peers in the pairs, and with more as long as few are to blame. Beyond that, the
    peer in most of the uncovered pairs is taken (the first in rank where they tie) until all are
    covered; that may not be the smallest set. Work is counted in sets and not in seconds, so all
    members that recompute it from the same aborts end with the same set.
    """
    pairs = {(vote.voter, peer) for vote in aborts if vote.digest is None for peer in vote.missed}
    told = Counter(missed for _, missed in pairs if missed not in voters)
    enough = min(2, len({voter for voter, _ in pairs}))
    cheap = {peer for peer, count in told.items() if count >= enough}
    pairs = {(voter, missed) for voter, missed in pairs if missed in voters}
    return tuple(sorted(cheap | _smallest_cover(pairs, set(silent))))


def _smallest_cover(pairs: set[tuple[str, str]], quiet: set[str]) -> set[str]:
    ranked = sorted({peer for pair in pairs for peer in pair}, reverse=True)
    ranked.sort(key=lambda peer: peer not in quiet)
    work = 0
    for size in range(len(ranked) + 1):
        for chosen in combinations(ranked, size):
            if all(voter in chosen or missed in chosen for voter, missed in pairs):
                return set(chosen)
            work += 1
            if work >= EXCLUSION_WORK:
                return _greedy_cover(ranked, pairs)
    return set(ranked)


def _greedy_cover(ranked: list[str], pairs: set[tuple[str, str]]) -> set[str]:
    cover = set[str]()
    while pairs:
        blame = Counter(peer for pair in pairs for peer in pair)
        worst = max(ranked, key=lambda peer: blame[peer])  # max keeps the first where they tie
        cover.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return cover


def may_start(
    members: Collection[str],
    view_of: Mapping[str, Collection[str]],
    recent_voters: Collection[str],
) -> bool:
    """Whether a gathered group may begin its exchange; if not, all leave before a byte is sent.

    `view_of[m]` are the peers that member m counts: those whose stage record says that they train
    or hold unsent tokens, itself included. A member of the group is there, whatever a view says.
    The group must hold more than half of the voters of late that are there, or counted by at least
    half of those that are there: one member's word for peers that nobody else sees is not enough,
    and a new member's does not count. (So where most of those that are there see nobody of the
    rest, which may be cut off from them, both may start, as when all announcements have lapsed; the
    operator's archive takes one record.)

    A group without any of them (the chain is empty, or they are gone) must hold more than half of
    those that at least half of its members count, and nobody of the voters of late among these.
    A member without a view, or with an empty one, stops the group.
    """
    group, last = set(members), set(recent_voters)
    if not group or not all(view_of.get(member) for member in group):
        return False
    here, counted = group & last, counted_by(members, view_of, last)
    if here:
        return 2 * len(here) > len(counted & last | here)
    return not counted & last and 2 * len(group) > len(counted | group)


def counted_by(
    members: Collection[str],
    view_of: Mapping[str, Collection[str]],
    recent_voters: Collection[str],
) -> set[str]:
    """The peers that at least half of a group count: half of its voters of late, or of all its
    members where it has none.
    """
    heard = set(members) & set(recent_voters) or set(members)
    told = Counter(peer for member in heard for peer in set(view_of[member]))
    return {peer for peer, count in told.items() if 2 * count >= len(heard)}


class AloneWatch:
    """Whether a peer may commit alone: nobody else counted was in view for a record lifetime.

    Feed it one observation per heartbeat. The wait starts anew where another peer is in view, where
    no bootstrap answers (then it may be this peer that is cut off), and after a gap of two
    heartbeats (the machine froze, and what it saw before is stale).

    `now_s` comes from any clock that never steps back; one that also counts the time a machine
    sleeps (CLOCK_BOOTTIME) sees that as a freeze, CLOCK_MONOTONIC does not.
    """

    def __init__(self, *, record_lifetime_s: float, heartbeat_s: float):
        self._record_lifetime_s = record_lifetime_s
        self._gap_s = 2 * heartbeat_s
        self._alone_since: float | None = None
        self._observed = float("-inf")

    def observe(self, now_s: float, *, others_in_view: int, bootstrap_answered: bool) -> None:
        """Note one look at the DHT: how many other counted peers of the stage it showed."""
        if others_in_view or not bootstrap_answered:
            self._alone_since = None
        elif self._alone_since is None or self._frozen(now_s):
            self._alone_since = now_s
        self._observed = now_s

    def may_commit(self, now_s: float) -> bool:
        if self._alone_since is None or self._frozen(now_s):
            return False
        return self._observed - self._alone_since >= self._record_lifetime_s

    def _frozen(self, now_s: float) -> bool:
        return now_s - self._observed >= self._gap_s
