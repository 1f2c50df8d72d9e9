"""What the chain of a stage remembers of each peer: for how many rounds it was heard, how often it
was not, and whether it sits out.

It stands in every record, made of the record before and of the round itself, so all members
know the same. Four rules rest on it:

- *Voters.* A peer that was in three records, or in half as many as any other of its group, votes,
  and judges the others. Any other peer adds what it learnt, and no decision waits for it: else a
  crowd of fresh keys could commit what it likes, or keep a group from every decision.
- *Probation.* A fresh key costs nothing. In an average a peer counts in full once it was in as many
  records as the others, or in ten; before that less, and all such peers together at most a third.
- *Left out.* An attempt had to be repeated without a peer, in its round or the next one, or went
  without it since it gave most voters no mean. Once, that is nobody's fault. If it soon happens
  again, the peer sits out the next 2 rounds, then 4, 8, ... 64.
- *Unheard.* A peer sits out, too, if most of the average lacked its values in six of its last ten
  rounds, because reducers left them out or they came too late; a peer that was in no average yet,
  after two: its key cost nothing, and an exchange waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

VOTING_RECORDS = 3
MOST_CREDITED = 10
MOST_EXCLUSIONS = 7  # that are counted of one peer: 64 rounds
RECENT_ROUNDS = 3  # whose voters make the next record
REMEMBERED_ROUNDS = 5  # that an exclusion is, beyond twice what it cost
FORGOTTEN_ROUNDS = 100  # after which nothing is known of a peer that was away
MAX_STANDINGS = 320  # peers that a record remembers
VOTERS_STANDINGS = 240  # of these places, which peers that could vote have first
HISTORY = 10  # rounds of a peer
MOST_UNHEARD = 6  # of them
MOST_UNHEARD_OF_NEW = 2  # of a peer that was in no average yet
MOST_WEIGHT = 2  # of the group's median
MOST_TOKENS = 8  # of it, too: how much faster one may be, times the rounds others were heard in


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One peer's.

    round: the last one that says anything of it. credited: records whose average held its values,
    up to MOST_CREDITED. unheard: of its last rounds, the newest in the lowest bit, those in which
    most of the average lacked them. times: that it was left out of late, the last one in
    `left_out`, which is 0 without any.
    """

    peer: str
    round: int
    credited: int = 0
    unheard: int = 0
    times: int = 0
    left_out: int = 0

    def sits_out(self, round_number: int) -> bool:
        return self.times > 1 and round_number <= self.left_out + 2 ** (self.times - 1)

    def aged(self, round_number: int) -> Standing | None:
        """What of it still counts in a round; None where nothing does."""
        if self.times and round_number > self.left_out + 2**self.times + REMEMBERED_ROUNDS:
            return replace(self, times=0, left_out=0).aged(round_number)
        known = self.times or round_number <= self.round + FORGOTTEN_ROUNDS
        return self if known else None

    def heard(self, share: float, round_number: int) -> Standing:
        """After a round whose average held its values in this share of it."""
        history = (self.unheard << 1 | (share < 0.5)) % 2**HISTORY
        credited = min(MOST_CREDITED, self.credited + (share > 0))
        following = replace(self, round=round_number, credited=credited, unheard=history)
        if history.bit_count() < (MOST_UNHEARD if credited else MOST_UNHEARD_OF_NEW):
            return following
        return replace(following, unheard=0, times=max(1, self.times)).excluded(round_number)

    def excluded(self, round_number: int) -> Standing:
        """After a round whose attempt had to be repeated without it."""
        times = min(self.times + 1, MOST_EXCLUSIONS)
        return replace(self, round=round_number, times=times, left_out=round_number)


def _as_of(standings: Iterable[Standing], round_number: int) -> tuple[Standing, ...]:
    """These as they stand when the chain goes on with this round.

    Where nobody has a record of so many rounds that all would be forgotten, they are nobody's
    absence: a run that went back goes on behind the rounds that it took back. What is known then
    stands as in the round before.
    """
    known = tuple(standings)
    gap = round_number - 1 - max((each.round for each in known), default=round_number)
    if gap < FORGOTTEN_ROUNDS:
        return known
    return tuple(
        replace(each, round=each.round + gap, left_out=each.left_out + gap if each.times else 0)
        for each in known
    )


def following_standings(
    before: Iterable[Standing],
    round_number: int,
    heard: Mapping[str, float],
    excluded: Collection[str],
) -> tuple[Standing, ...]:
    """What the record of a round remembers, sorted by peer.

    before: of the record before it. heard: by member, which share of the average holds its values.
    excluded: peers that its attempt left out, since others were void.
    """
    aged = (each.aged(round_number) for each in _as_of(before, round_number))
    known = {each.peer: each for each in aged if each is not None}
    for peer, share in heard.items():
        found = known.get(peer, Standing(peer=peer, round=round_number))
        known[peer] = found.heard(share, round_number)
    for peer in excluded:
        found = known.get(peer, Standing(peer=peer, round=round_number))
        known[peer] = found.excluded(round_number)
    # a crowd of keys that only came, or gave zeros twice, would else make all others forgotten
    newest = sorted(known.values(), key=lambda each: (-each.round, -each.credited, each.peer))
    voting = [each for each in newest if each.credited >= VOTING_RECORDS][:VOTERS_STANDINGS]
    chosen = {each.peer for each in voting}
    others = [each for each in newest if each.peer not in chosen]
    others.sort(key=lambda each: not each.credited)
    kept = [*voting, *others][:MAX_STANDINGS]
    return tuple(sorted(kept, key=lambda each: each.peer))


def follows(
    after: Sequence[Standing],
    before: Iterable[Standing],
    round_number: int,
    heard: Mapping[str, float],
) -> bool:
    """Whether what a record remembers is what follows from the record before it; it may add only
    the peers that its attempt left out.
    """
    excluded = {
        each.peer for each in after if each.left_out == round_number and each.peer not in heard
    }
    return tuple(after) == following_standings(before, round_number, heard, excluded)


def voters_before(after: Iterable[Standing], heard: Mapping[str, float]) -> frozenset[str]:
    """The voters among a record's members, by what it remembers, and by the share of its average
    that each of them was in.
    """
    now = {each.peer: each.credited for each in after}
    return voters({peer: max(0, now.get(peer, 0) - (share > 0)) for peer, share in heard.items()})


def sitting_out(before: Iterable[Standing], round_number: int) -> set[str]:
    """The peers that take no part in a round, by the record before it."""
    return {each.peer for each in _as_of(before, round_number) if each.sits_out(round_number)}


def of_last_rounds(standings: Iterable[Standing], last_round: int) -> set[str]:
    """The peers that a record of this round remembers, whose values an average of the last rounds
    held, and that were not left out since.

    More than half of those that have a vote and are there must be in the next group. Were it those
    of the last record alone, a peer that gathers a group could leave some out of that, and the next
    one out of the rest.
    """
    return {
        each.peer
        for each in standings
        if each.round > last_round - RECENT_ROUNDS and each.credited
        if not (each.times and each.left_out == each.round)
    }


def ever_credited(standings: Iterable[Standing]) -> set[str]:
    """The peers that a record remembers and whose values some average held."""
    return {each.peer for each in standings if each.credited}


def credits(
    members: Iterable[str], before: Iterable[Standing], round_number: int
) -> dict[str, int]:
    """In how many records each of these peers was, as far as it counts in a round."""
    aged = (each.aged(round_number) for each in _as_of(before, round_number))
    known = {each.peer: each.credited for each in aged if each is not None}
    return {peer: known.get(peer, 0) for peer in members}


def voters(credited: Mapping[str, int], among: Collection[str] | None = None) -> frozenset[str]:
    """Those of a group that decide, by what `credits` says of them. among: the peers that they are
    measured by, if not all.
    """
    most = max((credited[peer] for peer in (credited if among is None else among)), default=0)
    least = min(VOTING_RECORDS, most // 2)
    return frozenset(peer for peer, count in credited.items() if count >= least)


def most_tokens(tokens: Mapping[str, int], voting: Collection[str], cap: int) -> dict[str, int]:
    """The most tokens that each member of a group is believed, by what its voters state.

    Nobody sees another one learn. But all had the same time for it, the clock of the others is what
    they learnt in it, and nobody is faster than that without end. Members without a vote, whose
    keys cost nothing, are together believed as much as one of the others may be, or as all of these
    learnt: the run ends by the sum of all. Of what is believed it is the same once more. cap: what
    nobody can have more of.
    """
    most = min(cap, int(MOST_TOKENS * median(tokens[peer] for peer in voting)))
    learnt = sum(min(tokens[peer], most) for peer in voting)
    new = tokens.keys() - set(voting)
    most_of_new = max(1, min(most, max(most, learnt) // max(1, len(new))))
    return {peer: most_of_new if peer in new else most for peer in tokens}


def bounded_weights(tokens: Mapping[str, int], credited: Mapping[str, int]) -> dict[str, int]:
    """What each member counts in an average, in a unit of their own: its tokens, no more than twice
    the voters' median, and less on probation. credited: of some of them, as `credits`.
    """
    credited = {peer: credited.get(peer, 0) for peer in tokens}
    most = int(MOST_WEIGHT * median(tokens[peer] for peer in voters(credited)))
    full = max(credited.values())
    weight = {
        peer: max(1, min(count, most)) * (1 + credited[peer]) for peer, count in tokens.items()
    }
    new = sum(count for peer, count in weight.items() if credited[peer] < full)
    old = sum(weight.values()) - new
    if 2 * new <= old:
        return weight
    return {
        peer: count if credited[peer] == full else max(1, count * old // (2 * new))
        for peer, count in weight.items()
    }
