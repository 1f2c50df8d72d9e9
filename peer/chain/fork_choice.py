"""Which claims of a chain count, which peers to ask, which ones lied, and which of two chains wins.

Anybody may claim anything, and anybody can make records that members of its own invention voted
for. So a claim counts only if peers that have something to do with the run stand behind it
(`Trust`): its *witness*, the archive of the operator's bootstrap, or most of those whose values are
in our own chain. What counts is asked for, the most tokens first (`ClaimBook`). A claim whose
record nobody gives for a record lifetime is presumed void: its commit may have failed, and that of
a stranger may never have been. The witness's is not void but out of reach, and tried again later. A
peer that is busy probably has the record, so it is believed for longer, but not for ever. A peer
whose state was wrong is asked again only where nobody else has one.

One book serves a peer (averaging/follower.py), another one each stage of an archive (archive.py).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import PeerBusy
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.rounds.record import RecordRefused, RoundRecord
from dilocox.peer.rounds.standing import RECENT_ROUNDS

if TYPE_CHECKING:
    from dilocox.peer.chain.chain_client import Reached
    from dilocox.peer.chain.store import RoundLog, Store, Tip

BUSY_LIFETIMES = 10  # of a record: no peer that has what it claims is busy for so long
AGAIN_LIFETIMES = 10  # after which a claim of the witness is tried again, then after 20, 40 ...
SLOW_TIMES = 3  # that a record of many bytes did not come in the time for it
MAX_NOTED = 1000  # digests or peers
CREDIT_ROUNDS = 10  # whose contributors stand behind what comes next
SETTLED_RECORDS = 3  # that the witness vouched for: a fork further back is nobody's to choose
LEAST_CREDIT = 3  # of the peers that go on where all others are stuck
STUCK_LIFETIMES = 2  # of records, after which any credit will do
STAND_IN_WEIGHT, WITNESS_WEIGHT = 1 << 20, 1 << 30  # of a bootstrap's word; a peer's is its credit
BUSY_IN_A_ROW = 3  # answers, after which known peers are asked
AGAIN = 0.5  # of the times a known peer that gave nothing is asked, where no other is known


class Credit:
    """The makers of a chain: in how many of its last records each peer had values and a vote, and
    which peers had both in the very last one, and in the last rounds.
    """

    def __init__(self, bootstraps: Collection[str]):
        """bootstraps: known without a record."""
        self._bootstraps = bootstraps
        self.records: Counter[str] = Counter()
        self.last: set[str] = set()
        self.recent: set[str] = set()
        self._digest = ""

    def look(self, log: Store, head: Tip) -> None:
        """Take in what the log has by now; cheap while its head is the same."""
        if self._digest != head.digest:
            made = dict[int, set[str]]()
            for number in log.rounds()[-CREDIT_ROUNDS:]:
                with suppress(RecordRefused):  # a damaged one
                    if (header := log.header(number)) is not None:
                        made[number] = _counting(header)
            self.records = Counter(peer for each in made.values() for peer in each)
            early = max(made, default=0) - RECENT_ROUNDS
            self.last = made[max(made)] if made else set[str]()
            self.recent = {peer for number in made if number > early for peer in made[number]}
            self._digest = head.digest

    def knows(self, peer: str) -> bool:
        """Whether it had a vote in the chain's last records, or is a bootstrap."""
        return peer in self.records or peer in self._bootstraps


class Trust:
    """Which claims for one stage's chain count.

    witness: peer id of the operator's bootstrap, which the run id was made of. Its archive checked
    what it claims record by record, and each record names the one before: so its one signed claim
    vouches for the whole chain behind it. Where it is silent, behind, or no claim of it fits, the
    peers whose values are in the last ten records of our chain vouch: a record counts that more
    than half of them claim, each counted once for every record that it had a vote in. So does one
    that more than half of those in the very last record claim: they may make the next without the
    rest (`may_start` in rounds/vote_count.py), and a peer that does not follow them can make none
    while it sees them. But half of those in the last three rounds must claim it, too, as the last
    record may have left some of them out. Nobody else counts. A peer without a chain takes what the
    witness vouches for; while that is silent, what `stand_ins` do: the bootstraps of its invite.
    Empty: nobody is the witness, as in a swarm without operator, and every claim counts.

    The witness itself believes what half of them claim, so that of two peers one can go on alone.
    It no longer counts a peer that has been silent for a record lifetime; with none left, and
    before the first record, it believes the first sound record. Not so while the run is paused, or
    once it has ended: nobody trains then, and those that made the chain may all be gone. Nor where
    it has lost the chain itself to a damaged disk: then those that made it must give it. One that
    begins anew elsewhere, beside copies of it, believes these, and waits a record lifetime for
    them. It never leaves a chain that it vouched for.

    A peer that has been idle for a record lifetime, as a spare that no head takes, is in no
    exchange and claims no new record before others vouch for it. So it does not count beside peers
    that are not idle: the witness would wait for it, and it for the witness. Nor does the witness
    count a *stuck* peer: its rounds end void, and it claims nothing that the witness lacks. Others
    went on while it was away and the witness down: where its values were in most of the ten
    records, each would wait for the other. Those that go on must have made some of the ten,
    `LEAST_CREDIT` in all, or any after `STUCK_LIFETIMES`: where few came and went, they were in no
    more of them.
    """

    def __init__(
        self,
        *,
        me: str,
        witness: str,
        stand_ins: frozenset[str] = frozenset(),
        record_lifetime_s: float,
        now: Callable[[], float],
    ):
        self._me = me
        self._witness = witness
        self._stand_ins = stand_ins
        self._all_told_at = now() + record_lifetime_s  # by then every living peer has told its own
        self.now = now
        self.record_lifetime_s = record_lifetime_s
        self._at_work: dict[str, float] = {}  # when each whose values are in our chain last was
        # all, but for those of too little credit: on which record, since when, until when seen
        self._stuck = "", 0.0, -math.inf
        self._backed: set[str] = set()  # digests that half of all behind our last records claim
        self._credit = Credit(stand_ins | {witness})
        self._told: ClaimRecord | None = None  # by the witness
        self._found: tuple[tuple[str, str], int | None] = ("", ""), None
        self._settled = ""  # digest of our newest record that the witness has claimed

    @property
    def is_witness(self) -> bool:
        """Whether this is the witness itself."""
        return bool(self._witness) and self._me == self._witness

    def counting(
        self,
        view: SwarmView,
        log: RoundLog,
        head: Tip,
        *,
        trains: bool = True,
        lost: Store | None = None,
        served: Callable[[ClaimRecord], bool] = lambda claim: True,
    ) -> SwarmView:
        """This look at the swarm, with the claims that count. trains: whether the run is neither
        paused nor ended, as far as the witness knows. lost: the records of a chain that it had to
        give up, which say who made it while the log is empty. served: whether it is not known that
        nobody has the record of a claim.
        """
        if not self._witness:
            return view
        told = self._told = view.claims.get(self._witness)
        found = self._find(log, head)
        if told is not None and found is not None:
            self._settled = told.digest
        self._credit.look(log if lost is None or head.round >= 0 else lost, head)
        credit, is_witness = self._credit.records, self.is_witness
        last, recent = self._credit.last, self._credit.recent
        if is_witness:
            self._backed = _backed(view, credit)
        idle = self._idle(view, credit)
        if is_witness and self.now() >= self._all_told_at:
            credit = Counter({peer: n for peer, n in credit.items() if peer in view.claims})
        at_work = Counter({peer: n for peer, n in credit.items() if peer not in idle})
        if at_work or (is_witness and trains):
            credit = at_work
        if is_witness and not credit and ((trains and head.round >= 0) or not self.has_chain):
            return view if self.has_chain else self._first(view, served)
        if is_witness:
            credit = self._going_on(credit, view, head)
        behind, of_last, of_recent = Counter[str](), Counter[str](), Counter[str]()
        for peer, claim in view.claims.items():
            behind[claim.digest] += credit[peer]
            of_last[claim.digest] += peer in last
            of_recent[claim.digest] += peer in recent
        least = credit.total() + (0 if is_witness else 1)
        believed = {digest for digest, count in behind.items() if count and 2 * count >= least}
        going_on = {digest for digest, count in of_last.items() if 2 * count > len(last)}
        believed |= {digest for digest in going_on if 2 * of_recent[digest] >= len(recent)}
        believed.add(head.digest)  # ours: others that have it may give its state
        vouching = {peer: credit[peer] + (peer in last) for peer in view.claims}
        if told is not None and not is_witness:
            believed.add(told.digest)
        elif not credit and not is_witness:
            standing_in = self._stand_ins & view.claims.keys()
            believed |= {view.claims[peer].digest for peer in standing_in}
            vouching |= dict.fromkeys(standing_in, STAND_IN_WEIGHT)
        if told is not None:
            vouching[self._witness] = WITNESS_WEIGHT
        stated = _stated(view, head, vouching)
        counting = {
            peer: _as_stated(each, stated[each.digest])
            for peer, each in view.claims.items()
            if each.digest in believed
        }
        return replace(view, claims=counting)

    def _first(self, view: SwarmView, served: Callable[[ClaimRecord], bool]) -> SwarmView:
        """What a witness without any chain believes: its copies, if there are some, for a record
        lifetime and as long as somebody has what they claim; else anybody.
        """
        claims = view.claims
        told = (claims[peer] for peer in self._stand_ins & claims.keys())
        of_copies = {claim.digest for claim in told if served(claim)}
        if not of_copies and (not self._stand_ins or self.now() >= self._all_told_at):
            return view
        known = {peer: each for peer, each in claims.items() if each.digest in of_copies}
        return replace(view, claims=known)

    def chosen(self, peers: Sequence[str], helpful: Collection[str], *, first: bool) -> str:
        """The peer to ask for something of the chain, of those that claim to have it.

        Keys cost nothing, so most of those may belong to one stranger that gives nothing. helpful:
        those that were not asked in vain. first: whether this peer asked none in vain so far. Then,
        where it has no chain yet, any will do, or all joiners would ask the bootstraps; else it
        asks those whose values are in its last records, and the bootstraps.
        """
        pool = [peer for peer in peers if peer in helpful]
        known = list(filter(self.knows, pool))
        if not known and random.random() < AGAIN:  # it may only have been busy
            known = list(filter(self.knows, peers))
        if known and (self._credit.records or not first):
            return random.choice(known)
        return random.choice(pool or list(peers))

    @property
    def has_chain(self) -> bool:
        """Whether there are records of ours that say which peers count."""
        return bool(self._credit.records)

    def knows(self, peer: str) -> bool:
        """Whether it had a vote in our last records, or is a bootstrap."""
        return self._credit.knows(peer)

    def teller(self, telling: list[str]) -> str:
        """The peer to ask what leads to a record, of those that claim it."""
        trusted = (self._witness, *sorted(self._stand_ins))
        known = list(filter(self.knows, telling))
        return next((peer for peer in trusted if peer in telling), random.choice(known or telling))

    def second(self, peers: Sequence[str], first: str) -> list[str]:
        """The peer to ask as well, of those that claim a record, where headers of the first say
        that it does not lead to our chain; none where that is the witness, or no other is known.
        """
        known = [peer for peer in peers if peer != first and self.knows(peer)]
        if self._witness in known:
            return [self._witness]
        return [] if first == self._witness or not known else [random.choice(known)]

    def witnessed(self, digest: str) -> bool:
        """Whether the witness claims this very record."""
        return self._told is not None and self._told.digest == digest

    def other_chain(self, log: RoundLog, head: Tip) -> ClaimRecord | None:
        """What the witness claims, where our chain goes back so far and has it not."""
        told = self._told
        if told is None or self._find(log, head) is not None or self.is_witness:
            return None
        rounds = log.rounds()
        return told if rounds and rounds[0] <= told.round else None

    def wins(self, digest: str, reached: Reached, log: RoundLog, head: Tip) -> bool:
        """Whether to leave our chain for the one that was walked back from this record.

        reached: of a walk that found a fork. head: of our log.
        """
        if not self._witness:
            return wins(reached, log, head)
        if log.find(digest) is not None:
            return False  # of our own chain, whatever tokens its claim states
        assert reached.fork_round is not None
        settled = log.find(self._settled) if self._settled else None
        if self.is_witness:
            settled = head.round
        given_up = [] if settled is None else log.rounds()
        given_up = [n for n in given_up if reached.fork_round < n <= (settled or 0)]
        if self.witnessed(digest):
            return len(given_up) <= SETTLED_RECORDS
        return not given_up and wins(reached, log, head)

    def may_replace(self, digest: str) -> bool:
        """Whether the state behind this claim may take the place of our chain, where no records
        lead from that to it.

        A witness lets it only if half of all whose values are in its last records claim it: nobody
        is to end its chain by saying that it has no older records.
        """
        return not self.is_witness or not self.has_chain or digest in self._backed

    def _idle(self, view: SwarmView, peers: Collection[str]) -> set[str]:
        """Those of them that claim to be idle, and have for a record lifetime."""
        now, claims = self.now(), view.claims
        self._at_work = {
            peer: self._at_work.get(peer, now) if peer in claims and claims[peer].idle else now
            for peer in peers
        }
        return {peer for peer, at in self._at_work.items() if now - at > self.record_lifetime_s}

    def _going_on(self, credit: Counter[str], view: SwarmView, head: Tip) -> Counter[str]:
        """The credit of peers not stuck on our chain; of all where these made too little."""
        stuck = {
            peer
            for peer in credit.keys() & view.claims.keys()
            if view.claims[peer].stuck and view.claims[peer].chain_tokens <= head.chain_tokens
        }
        rest = Counter({peer: n for peer, n in credit.items() if peer not in stuck})
        if not stuck or not rest or rest.total() >= LEAST_CREDIT:
            self._stuck = "", 0.0, -math.inf
            return rest or credit
        (on, since, seen_at), now = self._stuck, self.now()
        if on != head.digest or now - seen_at > self.record_lifetime_s:
            since = now
        self._stuck = head.digest, since, now
        return rest if now - since > STUCK_LIFETIMES * self.record_lifetime_s else credit

    def _find(self, log: RoundLog, head: Tip) -> int | None:
        """The round of our record that the witness claims."""
        if self._told is None:
            return None
        both = head.digest, self._told.digest
        if self._found[0] != both:
            self._found = both, log.find(self._told.digest)
        return self._found[1]


class ClaimBook:
    """What is known of the claims for one stage's chain, and of the peers that make them."""

    def __init__(self, trust: Trust):
        self._trust = trust
        # what could not be had, by digest and whether its holders were only busy: since when, and
        # how often
        self._failing: dict[tuple[str, bool], tuple[float, int]] = {}
        self._ignored: set[str] = set()
        # what the witness claims, for how long it is passed over, in seconds, and until when
        self._out_of_reach = "", 0.0, 0.0
        self._liars: set[str] = set()
        self._in_vain: set[str] = set()  # peers that were asked, and gave nothing
        self._busy = 0  # answers in a row

    # ---- claims ----------------------------------------------------------------------------------
    def ahead(
        self, view: SwarmView, head: Tip, other_chain: ClaimRecord | None = None
    ) -> list[ClaimRecord]:
        """What others claim beyond our chain or against it, each digest once, the most tokens
        first; other_chain: as of `best`.
        """
        found, passed = list[ClaimRecord](), set(self._passed())
        while best := view.best_claim(head.chain_tokens, head.digest, passed):
            found.append(best)
            passed.add(best.digest)
        if other_chain is not None and other_chain.digest not in passed:
            found.append(other_chain)
        return found

    def best(
        self, view: SwarmView, head: Tip, other_chain: ClaimRecord | None = None
    ) -> ClaimRecord | None:
        """other_chain: what else will do, whatever tokens it has."""
        found = view.best_claim(head.chain_tokens, head.digest, self._passed())
        if found is not None:
            return found
        return other_chain if other_chain is not None and self.believed(other_chain) else None

    def believed(self, claim: ClaimRecord) -> bool:
        """Whether it is not one of those that nobody could prove."""
        return claim.digest not in self._passed()

    def came(self, digest: str) -> None:
        """Records came from peers that claim this: none is doubted, even if some are missing."""
        for busy in (False, True):
            self._failing.pop((digest, busy), None)

    def failed(self, digest: str, error: Exception, *, came: bool = False) -> bool:
        """It could not be had this time, whatever `came` of what leads to it; whether it is ignored
        from now on.
        """
        if came:
            self.came(digest)
            return False
        busy, now = isinstance(error, PeerBusy), self._trust.now()
        if (digest, busy) not in self._failing and len(self._failing) >= MAX_NOTED:
            self._failing.clear()
        since, times = self._failing.get((digest, busy), (now, 0))
        self._failing[digest, busy] = since, times + 1
        if now - since <= (BUSY_LIFETIMES if busy else 1) * self._trust.record_lifetime_s:
            return False
        if isinstance(error, asyncio.TimeoutError) and times + 1 < SLOW_TIMES:
            return False  # one try may take longer than a lifetime
        if self._trust.witnessed(digest):  # who is on another chain would stay there for ever
            last, pause_s, _ = self._out_of_reach
            first_s = AGAIN_LIFETIMES * self._trust.record_lifetime_s
            pause_s = 2 * pause_s if last == digest else first_s
            self._out_of_reach = digest, pause_s, now + pause_s
            self.came(digest)
        else:
            self.ignore(digest)
        return True

    def failing(self, digest: str) -> bool:
        """Whether it could not be had the last time."""
        return any((digest, busy) in self._failing for busy in (False, True))

    def ignore(self, digest: str) -> None:
        """It is void, or its chain lost against ours."""
        _note(self._ignored, digest)
        self.came(digest)

    def switching(self, digest: str, reached: Reached) -> str:
        """What to tell where our chain is left for the one walked back from this record."""
        told = f"two certified chains since round {reached.fork_round}; switching to the one "
        witnessed = self._trust.witnessed(digest)
        return told + ("of the operator's archive" if witnessed else "with more tokens")

    def _passed(self) -> set[str]:
        digest, _, until = self._out_of_reach
        return self._ignored | {digest} if self._trust.now() < until else self._ignored

    # ---- the holders of records and states ------------------------------------------------------
    def asked_in_vain(self, peer: str, error: Exception) -> None:
        """It gave nothing of what it claims. A busy peer may do so later; but strangers could say
        that they are busy, one after the other, for ever.
        """
        busy = isinstance(error, PeerBusy)
        self._busy += busy
        if not busy or self._trust.knows(peer) or self._busy >= BUSY_IN_A_ROW:
            _note(self._in_vain, peer)

    def all_in_vain(self, peers: Collection[str]) -> bool:
        """Whether each of them was asked, and gave nothing."""
        return self._in_vain.issuperset(peers)

    def gave(self, peer: str) -> None:
        self._in_vain.discard(peer)
        self._busy = 0

    def chosen(self, peers: Sequence[str]) -> str:
        """The peer to ask, of those that claim what is wanted: see `Trust.chosen`."""
        helpful = set(peers) - self._in_vain
        return self._trust.chosen(peers, helpful, first=not self._in_vain)

    def lied(self, peer: str) -> float:
        """Its state was wrong. For how many seconds to take none: 0 if that never happened before,
        else nobody's traffic is to be spent on one wrong state after the other.
        """
        before = peer in self._liars
        _note(self._liars, peer)
        return self._trust.record_lifetime_s / 2 if before else 0.0

    def donors(self, peers: Collection[str]) -> list[str]:
        """Those of them to ask for a state: liars only where there is nobody else."""
        return [peer for peer in peers if peer not in self._liars] or list(peers)


def _backed(view: SwarmView, credit: Counter[str]) -> set[str]:
    """The digests that half of these claim, counting those that are away, idle or stuck."""
    behind = Counter[str]()
    for peer, claim in view.claims.items():
        behind[claim.digest] += credit[peer]
    return {digest for digest, count in behind.items() if count and 2 * count >= credit.total()}


def _counting(header: RoundRecord) -> set[str]:
    """The voters of a record whose values are in it: not peers that had just come."""
    return {each.peer for each in header.contributions} & header.voters


def holders(view: SwarmView, digest: str) -> list[str]:
    """The peers that claim this record: one that is out of reach must not hide the others."""
    return [
        peer for peer, claim in view.claims.items() if peer != view.me and claim.digest == digest
    ]


def _stated(
    view: SwarmView, head: Tip, vouching: Mapping[str, int]
) -> dict[str, tuple[int, int, int]]:
    """What counts of each record that is claimed: its round, the chain's tokens, its bytes. As most
    of its vouchers state them, and as they are for ours: anybody may claim a record that others
    vouch for, with other numbers.
    """
    said = Counter[tuple[str, tuple[int, int, int]]]()
    for peer, claim in view.claims.items():
        said[claim.digest, (claim.round, claim.chain_tokens, claim.record_bytes)] += vouching[peer]
    found = {digest: numbers for (digest, numbers), _ in reversed(said.most_common())}
    return found | {head.digest: (head.round, head.chain_tokens, head.record_bytes)}


def _as_stated(claim: ClaimRecord, numbers: tuple[int, int, int]) -> ClaimRecord:
    round_number, chain_tokens, record_bytes = numbers
    return replace(claim, round=round_number, chain_tokens=chain_tokens, record_bytes=record_bytes)


def wins(reached: Reached, log: RoundLog, head: Tip) -> bool:
    """Whether the chain that was walked beats ours since the fork: by more tokens, or as many and
    the smaller digest of its first record.

    reached: of a walk that found a fork. head: of our log.
    """
    assert reached.fork_round is not None
    following = [number for number in log.rounds() if number > reached.fork_round]
    second = log.header(following[1]) if len(following) > 1 else None
    first = head.digest if second is None else second.previous
    return (-reached.chain_tokens, reached.fork_digest) < (-head.chain_tokens, first)


def _note(noted: set[str], name: str) -> None:
    if len(noted) >= MAX_NOTED:
        noted.clear()
    noted.add(name)
