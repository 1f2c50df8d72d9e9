"""What a bootstrap writes into the history of its run, and says of it. Apart from round_history.py:
that is the file, and what is believed of others' histories; this hears what heads and peers state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import cut
from dilocox.dht.records import (
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    replica_key,
    stage_key,
)
from dilocox.dht.swarm import Swarm
from dilocox.dht.wire import MAX_INTEGER
from dilocox.peer.chain.round_history import SHORT_DIGEST, HistoryRow, RoundHistory, signed_page
from dilocox.peer.chain.stated_facts import (
    MAX_HEARD,
    Spread,
    came_now,
    leading,
    more_voids,
    stated_losses,
)
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source

READ_LIMIT_S = 3.0
OPEN_ROUNDS = 8  # the newest ones, of which more may be heard
SIZED_AFTER = 3  # rounds after which no stage is waited for
LEAST_S = 0.5  # between two rounds, or their times are too rough for a throughput
BACKLOG = 4096  # records of which the headers are read
BELIEVED_ROUNDS = 10  # for which what a head states is written after it was a member
MAX_SHOWN = 80  # letters of a prompt, and of what follows, in the archive's claim

Since = Callable[[Collection[str], int], list[ChainRound]]
"""Records of a chain from after those that are known, by the beginnings of their digests, oldest
first, at most so many.
"""


class HistoryKeeper:
    """Writes a history beside a bootstrap and gives it. A fault of its disk: EnvironmentFault.

    Rounds come from the archive of stage 0, which has checked their records; losses, peers and void
    rounds from what peers state at that time. What is known later of the newest rounds, such as
    validation losses, is added to their rows; what a row says stays. `look` belongs to the
    bootstrap's thread, `take` and `credit` to the archive's.

    parameters: of the stages that are kept, set by their keeper.
    """

    def __init__(
        self,
        history: RoundHistory,
        identity: Identity,
        run: str,
        stages: int,
        now: Callable[[], float],
    ):
        """now: run time, in seconds."""
        self.parameters: dict[int, int] = {}
        self._history = history
        self._identity = identity
        self._run = run
        self._stages = stages
        self._now = now
        self._lock = threading.Lock()
        self._follows = False
        self._taken_at = float("-inf")
        self._credited: dict[int, str] = {}  # the newest record by stage
        self._members: dict[str, int] = {}  # of stage 0, and their last round
        self._train: dict[int, Spread] = {}  # of the most heads that stated one together
        self._validation: dict[int, float] = {}
        self._sizes: dict[int, dict[int, int]] = {}  # bytes of records by round and stage
        self._voids_of: dict[str, int] = {}
        self._voids = 0.0  # that no row has yet
        self._present: tuple[int | None, int | None] = (None, None)  # peers and replicas

    def page(self, after: int) -> Source:
        """What is given of the rounds after this one."""
        numbers = list(self.parameters.values())  # another thread may open a stage meanwhile
        parameters = sum(numbers) if len(numbers) == self._stages else None
        return signed_page(self._history, self._identity, self._run, after, parameters)

    def written(self, prompt: str) -> str:
        """How the model goes on from this prompt now, both short and in quotes; empty where it was
        not asked.
        """
        newest = self._history.newest_sample(prompt)
        if newest is None:
            return ""
        return f'"{cut(prompt, MAX_SHOWN)}" with "{cut(newest.text, MAX_SHOWN)}"'

    def look(self, swarm: Swarm, claims: Mapping[int, ClaimRecord]) -> None:
        """Hear what heads and peers state now; claims: of the archive, by stage."""
        asked: dict[str, type[Record]] = {
            stage_key(self._run, stage): StageRecord for stage in range(self._stages)
        }
        asked[replica_key(self._run)] = ReplicaRecord
        found = swarm.read_many(asked, READ_LIMIT_S, thorough=False)
        if all(each is not None for each in found.values()):
            told = cast("Mapping[str, Any]", found)
            hosts = [told[stage_key(self._run, stage)] for stage in range(self._stages)]
            self.hear(hosts, told[replica_key(self._run)], claims)

    def hear(
        self,
        hosts: Sequence[Mapping[str, StageRecord]],
        replicas: Mapping[str, ReplicaRecord],
        claims: Mapping[int, ClaimRecord],
    ) -> None:
        """The same of what was read: peers by stage, replicas by head."""
        present = [{p: each for p, each in of.items() if each.present} for of in hosts]
        heads = leading(replicas, hosts[0])
        with self._lock:
            if self._members:  # anybody can say that it leads a replica
                heads = {head: each for head, each in heads.items() if head in self._members}
            stated = stated_losses(heads.values())
            for number, said in stated.train.items():
                if said.heads >= self._train.get(number, said).heads:
                    self._train[number] = said
            self._validation |= {n: round(loss, 5) for n, loss in stated.validation.items()}
            for stage, claim in claims.items():
                self._sizes.setdefault(claim.round, {})[stage] = claim.record_bytes
            for table in (self._train, self._validation, self._sizes):
                for number in sorted(table)[:-MAX_HEARD]:
                    del table[number]
            # a peer that moved has left another record behind
            self._history.hear({p: each for of in (*hosts, *present) for p, each in of.items()})
            self._present = sum(map(len, present)), len(heads)
            self._voids += sum(more_voids(peers, self._voids_of) for peers in present)
            self._voids_of = {p: each.voids for peers in present for p, each in peers.items()}
            if -1 in self._validation and not self._history.newest(1):
                self._history.add(HistoryRow(-1, 0, "", None, 0))
            self._fill()

    def take(self, since: Since, *, claimed: bool = True) -> None:
        """Take in what is new in the chain of stage 0.

        claimed: whether others were seen to claim rounds: until then the archive cannot know what
        it missed, and what comes first may be old.
        """
        with self._lock:
            known = self._history.newest(MAX_HEARD)
        found = since([row.digest for row in known], BACKLOG)  # it may read long from a slow disk
        with self._lock:
            new = [each for each in found if self._new(each)]
            begins = all(row.round < 0 for row in known) and bool(new) and new[0].round == 0
            now = self._now()
            live = (self._follows or begins) and came_now(len(new), now - self._taken_at)
            self._follows |= claimed
            self._taken_at = now if new else self._taken_at
            at = now if live else None
            speed = self._speed(new[-1], at) if new and at is not None else None
            for each in new:
                self._commit(each, at, speed)
            self._fill()

    def credit(self, stage: int, since: Since) -> None:
        """Take in the members of a stage's new records; at a start those are the newest ones."""
        known = self._credited.get(stage)
        for each in since([known], BACKLOG) if known else since([], MAX_HEARD):
            self._credited[stage] = each.digest
            self._history.credit(peer for peer, _ in each.contributors)
            if stage == 0:
                with self._lock:
                    self._members |= {peer: each.round for peer, _ in each.contributors}
                    old = each.round - BELIEVED_ROUNDS
                    self._members = {p: last for p, last in self._members.items() if last > old}

    def revise(self, manifest: Manifest) -> None:
        """Go on under a newer revision, which may have set rounds aside."""
        with self._lock:
            if self._history.revise(manifest):
                self._train.clear()  # heads tell of the rounds before until they go back
                self._validation.clear()

    def _new(self, claim: ChainRound) -> bool:
        row = self._history.get(claim.rules, claim.round)
        known = row is not None and claim.digest.startswith(row.digest)
        return not known and self._history.counts(claim.rules, claim.round)

    def _speed(self, newest: ChainRound, at: float) -> float | None:
        """Tokens a second since the row before, of all rounds that are found together with this
        newest one."""
        for row in self._history.newest(1):
            if row.at is not None and at >= row.at + LEAST_S:
                return round(max(0, newest.chain_tokens - row.tokens) / (at - row.at), 2)
        return None

    def _commit(self, claim: ChainRound, at: float | None, speed: float | None) -> None:
        digest, (peers, replicas) = claim.digest[:SHORT_DIGEST], self._present
        row = HistoryRow(claim.round, claim.rules, digest, None, claim.chain_tokens)
        if at is not None:
            row = row._replace(at=round(at, 2), tokens_per_s=speed, peers=peers, replicas=replicas)
            row = row._replace(voids=int(self._voids))
            self._voids -= int(self._voids)
        self._sizes.setdefault(claim.round, {})[0] = claim.record_bytes
        self._history.add(row)

    def _fill(self) -> None:
        """Add to the newest rows what is known by now."""
        for age, row in enumerate(reversed(self._history.newest(OPEN_ROUNDS))):
            sizes, said = self._sizes.get(row.round, {}), self._train.get(row.round)
            told = len(sizes) == self._stages or age >= SIZED_AFTER
            known = row._replace(
                validation=self._validation.get(row.round),
                record_bytes=min(sum(sizes.values()), MAX_INTEGER) if sizes and told else None,
            )
            if said is not None and row.train is None:
                middle, low, high = (round(loss, 5) for loss in said[:3])
                known = known._replace(train=middle, train_low=low, train_high=high)
            if (filled := row.filled(known)) != row:
                self._history.add(filled)
