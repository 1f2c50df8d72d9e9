"""How a head finds its members, and finds out which are missing. Apart from head.py, which orders
steps among members that it has.

Records say which peers might be free (candidates.py), a ping says how far away a peer is, and only
the peer itself whether it is free (reservation.py). One that gave no answer is left alone a while:
its records live longer than it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilocox.pipeline.candidates import Records, Vacancies, best_chain, candidates, missing
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.link import Answer
from dilocox.pipeline.messages import Fault
from dilocox.pipeline.network import Network

PING_LIMIT_S = 1.0
SECOND_PING_LIMIT_S = 3.0  # of a member: its line may be full of activations
REQUEST_LIMIT_S = 2.0
AVOID_S = 5.0  # how long a peer that gave no answer is not asked again
# how long a peer comes last that answers, but with which no inner step ends: at first, and at most
BLAMED_S, MOST_BLAMED_S = 20.0, 1200.0
NO_COUNTS_S = 1200.0  # for which a peer that said no is asked after those that did not
SAME_LINK_S = 60.0  # a link that breaks twice within so long is given up, and its lower peer
PINGED_AT_ONCE = 32
MEASURED_A_STAGE = 8  # peers whose round trip is measured before one is chosen
UNBOUNDED = 1 << 16
MAX_EPOCHS_AHEAD = 1 << 20  # what a member may say of a head's earlier life


@dataclass(kw_only=True)
class Replica:
    """What a head knows of its replica.

    members: peer ids by stage; clients: whether each can only dial out; limits: how many
    microbatches in flight each has memory for. codecs: by link. done: number, clip factor and
    learning rate of the last GO. broken_links: when a link between two living members broke last,
    by its stages, and `done` then.
    """

    members: dict[int, str]
    clients: dict[int, bool]
    codecs: tuple[str, ...]
    window: int
    limits: dict[int, int] = field(default_factory=dict[int, int])
    done: tuple[int, float, float] | None = None
    broken_links: dict[tuple[int, int], tuple[float, object]] = field(
        default_factory=dict[tuple[int, int], tuple[float, object]]
    )

    @property
    def limit(self) -> int:
        """How many microbatches in flight all members have memory for."""
        return min(self.limits.values(), default=UNBOUNDED)

    @property
    def chain(self) -> tuple[str, ...]:
        """All members in the order of their stages."""
        return tuple(self.members[stage] for stage in sorted(self.members))

    @property
    def others(self) -> dict[int, str]:
        """All members but the head."""
        return {stage: peer for stage, peer in self.members.items() if stage > 0}


class Recruiter:
    """Asks on behalf of one head. `records`: the swarm's peers, as of the last look. `stopping`
    ends the search for a peer.

    Attributes:
        epoch: of the last assignment; the owner counts it on, and an answer may raise it: members
            of this head's earlier life follow later epochs only.
    """

    def __init__(
        self,
        *,
        me: str,
        num_stages: int,
        network: Network,
        records: Callable[[], Records],
        clock: Callable[[], float] = time.monotonic,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.epoch = 0
        self._me = me
        self._num_stages = num_stages
        self._network = network
        self._records = records
        self._clock = clock
        self._stopping = stopping
        self._avoid: dict[str, float] = {}
        self._blamed = dict[str, tuple[int, float]]()  # how often since an inner step, until when
        self._round_trips: dict[str, float] = {}
        self._helped = set[str]()  # peers with which an inner step ended since they said no
        self._said_no: dict[str, float] = {}  # when last

    def recruit(self, replica: Replica, vacant: set[int], *, until: float) -> str:
        """Reserve a peer for each of these stages, the nearest first; why it failed, or empty. No
        other one is asked after `until`.
        """
        now = self._clock()
        self._avoid = {peer: until for peer, until in self._avoid.items() if until > now}
        records = self._records()
        present = {peer for here in records.values() for peer in here}
        self._helped &= present
        self._said_no = {
            peer: at
            for peer, at in self._said_no.items()
            if peer in present and now - at < NO_COUNTS_S
        }
        vacancies = self._vacancies(replica, {p for p, (_, at) in self._blamed.items() if at > now})
        if missing(records, vacancies):  # then those will do
            vacancies = self._vacancies(replica, ())
        if not missing(records, vacancies):
            self._measure(candidates(records, vacancies))
            vacancies = replace(vacancies, avoid={*vacancies.avoid, *self._avoid})
        if reasons := missing(records, vacancies):  # perhaps more, now that they were measured
            return "; ".join(reasons)
        willing = {stage: list(peers) for stage, peers in candidates(records, vacancies).items()}
        clients = {
            peer for here in records.values() for peer, record in here.items() if record.client_mode
        }
        while (chain := best_chain(willing, clients, vacancies)) is not None:
            if self._clock() > until or self._stopping():
                return "its members do not come together in time"
            for stage, peer in sorted(chain.items()):
                if replica.members.get(stage) == peer or self._reserve(replica, stage, peer):
                    continue
                willing[stage].remove(peer)
                if peer in self._avoid and willing[stage]:  # others may be gone with it
                    self._ping(willing[stage][:PINGED_AT_ONCE], limit_s=REQUEST_LIMIT_S)
                    willing[stage] = [each for each in willing[stage] if each not in self._avoid]
                break
            else:
                replica.clients |= {stage: peer in clients for stage, peer in chain.items()}
                return ""
        taken = [stage for stage, peers in willing.items() if not peers]
        return f"stage {min(taken or vacant)} has no free peer"

    def _vacancies(self, replica: Replica, last: Collection[str]) -> Vacancies:
        """What is looked for: none of `last`."""
        return Vacancies(
            me=self._me,
            num_stages=self._num_stages,
            members={stage: replica.clients[stage] for stage in replica.members},
            round_trips=self._round_trips,
            helped=self._helped,
            said_no=self._said_no,
            avoid={*self._avoid, *last},
        )

    def _measure(self, found: Mapping[int, Sequence[str]]) -> None:
        """Ping candidates whose round trip is not known; avoid those that give no answer."""
        unknown = [
            peer
            for peers in found.values()
            for peer in peers[:MEASURED_A_STAGE]
            if peer not in self._round_trips
        ]
        if unknown:
            self._ping(unknown)

    def _ping(self, peers: Collection[str], limit_s: float = PING_LIMIT_S) -> None:
        """Measure the round trips to these peers; avoid those that give no answer."""
        answers = self.ask_all(peers, "ping", limit_s=limit_s)
        for peer, answer in answers.items():
            if answer is None:
                self.avoid([peer])
            else:
                self._round_trips[peer] = answer.round_trip_s

    def _reserve(self, replica: Replica, stage: int, peer: str) -> bool:
        """Reserve a peer; it is a member of the replica then, though it has no assignment yet."""
        if peer in self._avoid:
            return False
        answer = self.ask_all([peer], "reserve", {"stage": stage})[peer]
        if answer is None:
            self.avoid([peer])
        if answer is None or answer.frame.kind != "yes":
            self._said_no[peer] = self._clock()
            self._helped.discard(peer)
            return False
        before = replica.members.get(stage)
        if before is not None:  # another one turned out to fit better
            self.ask_all([before], "release")
        replica.members[stage] = peer
        epoch, window = answer.frame.facts.get("epoch"), answer.frame.facts.get("window")
        if type(epoch) is int and 0 <= epoch <= self.epoch + MAX_EPOCHS_AHEAD:
            self.epoch = max(self.epoch, epoch)
        replica.limits[stage] = window if isinstance(window, int) and window > 0 else UNBOUNDED
        return True

    def missing(self, replica: Replica, fault: Fault | None, *, heard: bool = True) -> set[int]:
        """The stages whose members are not there any more, by asking each of them.

        A member that gives no answer is avoided; one that answers but has left this replica is free
        again. fault: of a link, if any, for which the lower of two living members may be given up;
        heard: whether somebody told of it.
        """
        answers = self.ask_all(replica.others.values(), "ping", limit_s=PING_LIMIT_S)
        silent = [peer for peer, answer in answers.items() if answer is None]
        if silent:  # a busy machine is not a dead one
            answers |= self.ask_all(silent, "ping", limit_s=SECOND_PING_LIMIT_S)
        self.avoid([peer for peer, answer in answers.items() if answer is None])
        gone = {
            stage
            for stage, peer in replica.others.items()
            if (answer := answers[peer]) is None or answer.frame.facts.get("epoch") != self.epoch
        }
        if not gone and fault is not None:
            # Both ends live: the link between them failed. Once is forgiven.
            link = (min(fault.stage, fault.seen_by), max(fault.stage, fault.seen_by))
            now = self._clock()
            at, done = replica.broken_links.get(link, (-math.inf, None))
            replica.broken_links[link] = now, replica.done
            # or one that breaks before each inner step ends would be forgiven for ever
            again = heard and at > -math.inf and done == replica.done
            if now - at < SAME_LINK_S or again:
                gone.add(link[1])
                self.avoid([replica.members[link[1]]])  # it would say yes
        return gone

    def release(self, peers: Iterable[str]) -> None:
        """Let these peers go, if they can hear it."""
        living = [peer for peer in peers if peer not in self._avoid]
        if living:
            self.ask_all(living, "release")

    def avoid(self, peers: Iterable[str]) -> None:
        """Leave these peers alone for a while."""
        until = self._clock() + AVOID_S
        for peer in peers:
            self._avoid[peer] = until
            self._round_trips.pop(peer, None)

    def blame(self, peers: Iterable[str]) -> None:
        """Ask peers last that answer, and with which no inner step ends: each time for twice as
        long.
        """
        for peer in peers:
            times, _ = self._blamed.get(peer, (0, 0.0))
            for_s = min(MOST_BLAMED_S, BLAMED_S * 2**times)
            self._blamed[peer] = times + 1, self._clock() + for_s

    def forgive(self, peers: Iterable[str]) -> None:
        """An inner step has ended with these."""
        for peer in peers:
            self._blamed.pop(peer, None)
            self._helped.add(peer)

    def ask_all(
        self,
        peers: Collection[str],
        kind: str,
        facts: Mapping[str, object] | None = None,
        *,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> dict[str, Answer | None]:
        """Ask several peers the same; None for those that cannot be reached in time."""
        frame = Frame(kind=kind, replica=self._me, epoch=self.epoch, facts=facts or {})
        return self._network.request_all(dict.fromkeys(peers, frame), limit_s)
