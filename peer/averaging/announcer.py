"""When and how a peer tells the swarm about itself, and hears the others: records in and out of the
DHT. `look` waits for the DHT, in a thread of its own; the rest makes records and waits for nothing.
Apart from coordinator.py, which decides by what is heard.

`Cadence` says how often a peer tells and hears, so that it costs no more than a budget of bytes, in
a swarm of those that records remember.

Every announcement of a peer is carried to all that look where it was made. In a swarm of equals a
peer therefore pays, for each of its announcements, what it hears when all of them announce once;
and that grows with the swarm. So announcements are made in intervals that stretch with it, and
records live for three of them, whatever that is: nobody vanishes between two. What must be prompt,
a bell or the news of a record, is told at once and paid from what was saved for it.

A look costs little where nothing is new, so looks are made several times between two announcements
of the others. Other stages than one's own are looked at once in four intervals, but as often as
one's own while this peer looks for members or is about to move, and after a look without an answer.

    budget   1.3 kB/s, and 2 B/s more for each peer above 200; more where the manifest's heartbeat
             is shorter than 10 s: an operator that sets that wants answers sooner
    interval (bytes heard when all announce once) / (two thirds of the budget), no shorter than the
             manifest's heartbeat, no longer than a record may live; where it has grown since the
             last announcement, no longer than two thirds of what that lives

A key costs nothing, so a crowd of them must not slow down the others: no more peers of a stage
count than twice as many as are in view of those whose values some average held, and a few.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dilocox import __version__
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.records import (
    MAX_LIFETIME_S,
    MAX_TEXTS,
    BellRecord,
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    bell_key,
    claim_key,
    replica_key,
    stage_key,
)
from dilocox.dht.swarm_view import SwarmView, that_count
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.rounds.round_end import newest_credible
from dilocox.peer.rounds.standing import ever_credited

R = TypeVar("R", bound=Record)

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
RENEWED_AT = 2 / 3  # of its lifetime, a record at the latest: the intervals may have grown since
# how many peers of a stage count: so many times those that were in a record of late, and a few
COUNTED_TIMES, COUNTED_MORE = 2, 4
COUNTED_FIRST = 16  # before it has one


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What stood in the last looks, as far as it counts.

    peers: of all stages that are known. own_bytes: of the records that this peer looks at with
        every look, its own stage's and the replicas'. other_bytes: of those of other stages.
    """

    peers: int = 0
    own_bytes: int = 0
    other_bytes: int = 0


class Cadence:
    """The intervals of one peer. Times are seconds of any clock that does not step back.

    Attributes:
        announce_s: between two regular announcements; see `due`. lifetime_s: that what is announced
            lives.
        look_s: between two looks at one's own stage and the replicas.
        look_at_others_s: between two looks at the other stages.
    """

    def __init__(self, *, heartbeat_s: float, now_s: float):
        """heartbeat_s: of the manifest, the shortest interval."""
        self._heartbeat_s = heartbeat_s
        self._saved = float(SAVED_ANNOUNCEMENTS)  # a peer that has just come has something to tell
        self._filled_at = now_s
        self.hear(Heard())

    def hear(self, heard: Heard) -> None:
        """Take in what a look has shown; this alone may be called from another thread."""
        haste = max(1.0, USUAL_HEARTBEAT_S / self._heartbeat_s)
        above = max(0, heard.peers - LARGE_SWARM)
        budget = haste * (BUDGET_BYTES_PER_S + BUDGET_OF_LARGE * above)
        once_bytes = heard.own_bytes + heard.other_bytes / OTHERS_SHARE  # when all announce once
        announce_s = max(once_bytes / (REGULAR_SHARE * budget), self._heartbeat_s)
        self.announce_s = announce_s = min(announce_s, LONGEST_S)
        self.lifetime_s = LIFETIMES * announce_s
        self.look_s = max(self._heartbeat_s, announce_s / LOOKS)
        # a swarm that pays for little is seen whole with every look
        stretched = announce_s > self._heartbeat_s
        self.look_at_others_s = OTHERS_SHARE * announce_s if stretched else self.look_s
        # a bell costs little where nobody is: a hundred announcements a second are enough
        self._one_in_s = max(once_bytes / ((1 - REGULAR_SHARE) * budget), 0.01)

    def due(self, since_s: float, lived_s: float) -> bool:
        """Whether it is time to announce all: so long ago it was done last, to live for so long."""
        return since_s >= min(self.announce_s, RENEWED_AT * lived_s)

    def may_hurry(self, now_s: float, beside: float = 0.0) -> bool:
        """Whether enough was saved for an announcement before its time, and that share of one."""
        self._fill(now_s)
        return self._saved >= 1.0 + beside

    def hurried(self, now_s: float, share: float = 1.0) -> None:
        """An announcement was made before its time, or a `share` of one, as bell and claim are.

        It is paid for also where nothing was saved: the next ones wait longer.
        """
        self._fill(now_s)
        self._saved -= share

    def _fill(self, now_s: float) -> None:
        """Announcements are what is saved: what one costs changes with the swarm."""
        since_s, self._filled_at = now_s - self._filled_at, now_s
        self._saved = min(SAVED_ANNOUNCEMENTS, self._saved + since_s / self._one_in_s)


# Of records as peers make them, with envelope, signature and their place in an answer: what others
# state may be longer, so that all would be silent for longer.
STAGE_BYTES, CLAIM_BYTES, REPLICA_BYTES, MEMBER_BYTES = 630, 400, 410, 55
READ_LIMIT_S = 3.0  # of each look; a slow one must not keep an exchange from its time
STARTED_OVER = "its weights were not finite; it goes on from the anchor"
SAID_S = 1.5 * MAX_LIFETIME_S["stage"]  # what was said is gone by then, whatever the clocks are
MAX_BLOCKED = 160  # characters: a run of many stages may lack peers for most of them


class Announcer:
    """Makes a peer's records, and looks at those of others as often as `cadence` allows. `view` is
    what the last looks showed, and `revision` the newest of the manifest that somebody knows.
    """

    def __init__(self, local: LocalPeer, chain: ChainFollower):
        self._local = local
        self._chain = chain
        self.cadence = Cadence(
            heartbeat_s=local.manifest.deadlines.heartbeat_s, now_s=local.clock.monotonic()
        )
        self._looked_at = self._looked_at_others_at = self._saw_others_at = float("-inf")
        self._answered = False
        self.view = SwarmView(me=local.me)
        self.revision = 0
        self._began = math.inf  # to look; what its start said without this lapses after it
        self._said = dict[int, float]()  # hashes of what this process said of its stage, and when

    @property
    def sees_others(self) -> bool:
        """Whether the other stages' part of `view` is as new as that of one's own has to be."""
        age_s = self._local.clock.monotonic() - self._saw_others_at
        return age_s <= self.cadence.look_s + self._slack_s + READ_LIMIT_S

    @property
    def _slack_s(self) -> float:
        return self._local.manifest.deadlines.heartbeat_s / 2  # looks come with heartbeats

    def look(
        self,
        bell_rounds: Iterable[int],
        own_round: int,
        *,
        whole: bool = True,
        eager: bool = False,
        searching: bool = False,
    ) -> bool:
        """Read what the others say; what gives no answer stays as it was. Whether all answered.

        own_round: of this peer; replicas in rounds far from it and from its chain's newest record
        are counted as refused, and not believed. whole: everything whose time has come; else only
        the bells, which must be heard at once. eager: the time of one's own stage has come,
        whatever the cadence says. searching: this peer goes by who is in the other stages, so they
        are looked at as often as one's own. Where nobody else of the stage is in view all nodes
        are asked that may know somebody, every time.

        Raises EnvironmentFault where another machine speaks in this peer's name.
        """
        local, view, now = self._local, self.view, self._local.clock.monotonic()
        run, stage = local.run, local.stage
        self._began = min(self._began, now)
        rings = {bell_key(run, number): number for number in bell_rounds}
        hosts = {stage_key(run, number): number for number in range(local.manifest.stages)}
        own_claims, run_claims = claim_key(run, stage), claim_key(run, 0)
        asked: dict[str, type[Record]] = dict.fromkeys(rings, BellRecord)
        slack_s = self._slack_s
        alone = not view.stage.keys() - {local.me}
        eager = eager or alone or now + slack_s >= self._looked_at + self.cadence.look_s
        if whole and eager:
            self._looked_at = now
            asked |= {stage_key(run, stage): StageRecord, own_claims: ClaimRecord}
            asked[replica_key(run)] = ReplicaRecord
        soon = searching or self._saw_others_at < self._looked_at_others_at
        others_s = self.cadence.look_s if soon else self.cadence.look_at_others_s
        others = whole and now + slack_s >= self._looked_at_others_at + others_s
        if others:
            self._looked_at_others_at = now
            asked |= dict.fromkeys(hosts, StageRecord) | {run_claims: ClaimRecord}
        answers = local.swarm.read_many(asked, timeout_s=READ_LIMIT_S, thorough=whole and alone)
        found: dict[str, Any] = {key: here for key, here in answers.items() if here is not None}
        if others and {*hosts, run_claims} <= found.keys():
            self._saw_others_at = local.clock.monotonic()
        if (told := found.get(own_claims)) is not None:  # of peers under any rules
            self.revision = max((claim.revision for claim in told.values()), default=0)
        for key in {own_claims, run_claims} & found.keys():
            found[key] = that_count(found[key], local.manifest)
        if (replicas := found.get(replica_key(run))) is not None:
            found[replica_key(run)] = self._credible(replicas, own_round)
        stages = {
            number: found.get(key, view.stages.get(number))
            for key, number in hosts.items()
            if key in found or number in view.stages
        }
        self.view = SwarmView(
            me=local.me,
            stage=stages.get(stage, {}),
            stages=stages,
            replicas=found.get(replica_key(run), view.replicas),
            bells={
                number: found.get(key, view.bells.get(number, {})) for key, number in rings.items()
            },
            claims=found.get(own_claims, view.claims),
            run_claims=found.get(run_claims, view.run_claims),
        )
        if (said := found.get(stage_key(run, stage), {}).get(local.me)) is not None:
            self._expect_own(said, now)
        self._reckon()
        if stage_key(run, stage) in asked:
            self._answered = {stage_key(run, stage), own_claims} <= found.keys()
        return self._answered

    def of_stage(
        self,
        state: str,
        *,
        round_number: int,
        inner_steps: int,
        voids: int,
        own: LoopStatus,
        stuck: bool = False,
        revision: int = 0,
    ) -> dict[str, Record]:
        """That this peer hosts its stage, and the last record it holds."""
        local = self._local
        if own.started_over and state != "left":
            state = "joining"  # nobody is to wait for it in this round
        hosting = _told(
            StageRecord,
            own,
            state=state,
            round=round_number,
            inner_steps=inner_steps,
            replica=own.head,
            tokens=0 if state == "left" else own.unsent_tokens,
            client_mode=local.client_mode,
            voids=voids,
            version=__version__,
            name=local.options.name,
            team=local.options.team,
            addresses=local.addresses,
            blocked=(STARTED_OVER if own.started_over else own.blocked)[:MAX_BLOCKED],
        )
        self._remember(hosting)
        claim = self.of_record(own, stuck=stuck, revision=revision)
        return {stage_key(local.run, local.stage): hosting} | claim

    def of_record(
        self, own: LoopStatus, *, stuck: bool = False, revision: int = 0
    ) -> dict[str, Record]:
        """The last record it holds."""
        local, head, last = self._local, self._chain.head, self._chain.last_record
        claim = ClaimRecord(
            round=head.round,
            digest=head.digest,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
            rules=0 if last is None else last.rules,
            revision=revision,
            idle=not own.head and own.unsent_tokens <= 0,
            stuck=stuck,
        )
        return {claim_key(local.run, local.stage): claim}

    def _remember(self, hosting: StageRecord) -> None:
        now, name = self._local.clock.monotonic(), hash(hosting)
        self._said.pop(name, None)
        self._said[name] = now
        while next(iter(self._said.values())) < now - SAID_S:
            del self._said[next(iter(self._said))]

    def _expect_own(self, said: StageRecord, now: float) -> None:
        """Raise EnvironmentFault where another process says it in this peer's name; only once all
        that was said before it began to look has lapsed.
        """
        if now > self._began + SAID_S and hash(said) not in self._said:
            raise EnvironmentFault(
                "another machine takes part with this identity.key, too: each needs its own; stop "
                "the peer on one of them, remove the key there, and start it again"
            )

    def of_bells(self, bells: Iterable[BellRecord]) -> dict[str, Record]:
        return {bell_key(self._local.run, bell.round): bell for bell in bells}

    def _reckon(self) -> None:
        """What it costs this peer when all that count announce once."""
        view, stage, stages = self.view, self._local.stage, self._local.manifest.stages
        most = self._most_counted()

        def counted(records: Collection[Any]) -> int:
            return min(len(records), most)

        others = [counted(hosts) for number, hosts in view.stages.items() if number != stage]
        replica_bytes = REPLICA_BYTES + MEMBER_BYTES * min(stages, MAX_TEXTS)
        own_bytes = STAGE_BYTES * counted(view.stage) + CLAIM_BYTES * counted(view.claims)
        run_claims = counted(view.run_claims) if stage else 0
        heard = Heard(
            peers=counted(view.stage) + sum(others),
            own_bytes=own_bytes + replica_bytes * counted(view.replicas),
            other_bytes=STAGE_BYTES * sum(others) + CLAIM_BYTES * run_claims,
        )
        self.cadence.hear(heard)

    def _most_counted(self) -> int:
        """Peers of a stage; of other stages, too, whose records this peer does not keep."""
        last = self._chain.last_record
        if last is None:
            return COUNTED_FIRST
        known = ever_credited(last.standings) & self.view.stage.keys()
        return COUNTED_TIMES * len(known) + COUNTED_MORE

    def _credible(
        self, replicas: Mapping[str, ReplicaRecord], own_round: int
    ) -> dict[str, ReplicaRecord]:
        stated = [replica.round for replica in replicas.values()]
        newest = newest_credible(own_round, self._chain.head.round, stated)
        credible = {peer: each for peer, each in replicas.items() if each.round <= newest}
        self._local.swarm.refused["round"] += len(replicas) - len(credible)
        return credible


def replica_record(round_number: int, own: LoopStatus, *, hear_s: float) -> ReplicaRecord | None:
    """The record of the replica that this peer leads, None if it leads none."""
    if not own.members:
        return None
    return _told(
        ReplicaRecord,
        own,
        # a record has room for that many; of more stages the last ones are not told
        members=own.members[:MAX_TEXTS],
        round=round_number,
        # a record holds finite numbers only; `val_round` alone says that there was a loss
        val_loss=own.val_loss if math.isfinite(own.val_loss or 0.0) else None,
        waiting_share=own.round_waiting_share,
        hear_s=hear_s,
    )


def _told(kind: type[R], own: LoopStatus, **facts: Any) -> R:
    """A record of these facts and, for its other fields, the loop's figures of the same names."""
    names = {spec.name for spec in fields(kind)} - facts.keys()
    return kind(**facts, **{name: getattr(own, name) for name in names})
