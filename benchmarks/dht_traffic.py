"""What peers send for the DHT, by the size of their swarm.

A swarm of peers that all train: each tells of itself, looks at the others and, as a head, rings a
bell in every round. The intervals are those of peer/averaging/announcer.py and
peer/rounds/round_end.py, the records real ones, encoded and sealed, and the keepers of a key
those of dht/keepers.py: the five nodes nearest to it, of which a look asks one, and a bootstrap,
which is asked for a key every other time, and has no news then. What is modelled is the time only,
and the bytes of a call beside its records (CALL_BYTES, KEY_BYTES); `--real N` prints instead what
nodes on loopback send, by the TCP sockets of their p2pd. The last column is how often one peer asks
one node in 10 s at most, of which dht/rpc.py (`RequestLimit`) answers so many.

The row "before" is the rule that was there until protocol 3: with every heartbeat of 10 s each peer
reads the records of all peers of all stages from all nodes near their key, twenty at most, searches
them likewise for its own announcements, and its signature and key have 550 bytes instead of 96.

    python benchmarks/dht_traffic.py
    python benchmarks/dht_traffic.py --peers 200 --stages 4 --round-s 600
    python benchmarks/dht_traffic.py --peers 3 8 --stages 1 4 --heartbeat-s 0.1
    python benchmarks/dht_traffic.py --real 8
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import hashlib
import heapq
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import socket_bytes
from benchmarks.report import Column, Report, parser
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.records import (
    BellRecord,
    ClaimRecord,
    PartRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    bell_key,
    claim_key,
    key_id,
    part_key,
    replica_key,
    stage_key,
)
from dilocox.dht.rpc import ASKED_WITHIN_S
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator
from dilocox.dht.wire import seal
from dilocox.peer.averaging.announcer import Cadence, Heard
from dilocox.peer.rounds.round_end import LONGEST_LOOK_S, LOOK_S, LOOKS

CALL_BYTES = 500  # of a question and its answer, without keys and records, both ways
KEY_BYTES = 40
ENTRY_BYTES = 60  # of a record in a call: owner, expiry, and what msgpack and protobuf add
MARK_BYTES = 4
UPKEEP_BYTES_PER_S = 70.0  # of a node that neither tells nor looks: pings of the clock
KEEPERS = 5
BEFORE_NODES = 20  # asked in a search of hivemind's
BEFORE_SIGNATURE = 550 - 96  # bytes more in every record
HEARTBEAT_S = 10.0
DIGEST = "ab" * 32
LIMIT_S = 10.0
COLUMNS = (
    *(Column(name) for name in ("peers", "stages")),
    Column("round, s", ".0f"),
    *(Column(name, ",.0f") for name in ("before", "now", "most", "bootstrap")),
    *(Column(name, ".0f") for name in ("told every, s", "seen for, s", "asked in 10 s")),
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one peer's records as they are stored."""

    stage: int
    claim: int
    replica: int
    part: int
    bell: int

    @classmethod
    def real(cls, folder: Path, stages: int) -> Sizes:
        """Of records as peers make them, sealed with a real key."""
        identity = Identity.load_or_create(folder / "sizes.key")
        run = run_id(identity.public_key, "sizes")
        made = records(run, identity.peer_id, stages) | {bell_key(run, 17): bell()}
        sealed = {
            type(record): len(
                seal(
                    identity,
                    key=key,
                    sequence=1_763_640_000_000,
                    expires_at=1_763_640_000.5,
                    payload=record.encode(),
                )
            )
            for key, record in made.items()
        }
        kinds = (StageRecord, ClaimRecord, ReplicaRecord, PartRecord, BellRecord)
        return cls(*(sealed[kind] + ENTRY_BYTES for kind in kinds))


def records(run: str, peer: str, stages: int, stage: int = 0) -> dict[str, Record]:
    """What a head tells with every announcement."""
    return {
        stage_key(run, stage): StageRecord(
            state="training",
            round=17,
            inner_steps=120,
            replica=peer,
            tokens=123_456,
            tokens_per_s=1234.5,
            client_mode=False,
            voids=1,
            version="0.1.0",
            addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{peer}",),
            blocked="",
            compression_error=0.125,
        ),
        claim_key(run, stage): ClaimRecord(
            round=16,
            digest=DIGEST,
            chain_tokens=1_234_567_890,
            record_bytes=1_234_567,
            rules=0,
            revision=1,
        ),
        replica_key(run): ReplicaRecord(
            members=(peer,) * min(stages, 12),
            epoch=1,
            round=17,
            inner_step=55,
            step_s=1.25,
            tokens_per_s=1234.5,
            train_loss=3.25,
            val_loss=3.5,
            val_round=12,
            waiting_share=0.01,
            codec="bf16",
            last_fault="",
        ),
        part_key(run, 7): PartRecord(part=7, position=123_456),
    }


def bell() -> BellRecord:
    """Of a head that finished a round and knows when its group meets."""
    return BellRecord(
        round=17,
        finished_at=1_763_640_000.5,
        round_s=612.5,
        send_after=1_763_640_100.5,
        scheduled_at=1_763_640_110.5,
    )


@dataclass
class Topic:
    """The records under one key: who keeps them, and when each was written."""

    record_bytes: int
    keepers: tuple[int, ...]
    written: list[float] = field(default_factory=list[float])
    owners: set[int] = field(default_factory=set[int])

    def write(self, owner: int, now: float) -> None:
        """This owner tells, also anew."""
        self.owners.add(owner)
        self.written.append(now)

    def news(self, since: float, now: float) -> int:
        """Owners that wrote in this time, each counted once."""
        first, last = (bisect.bisect_right(self.written, at) for at in (since, now))
        return min(last - first, len(self.owners))


class SwarmTraffic:
    """Peers of several stages, and a bootstrap, the last node; `sent` are the bytes that each node
    put on its line, `most_asked` the most calls of one peer to one node in ASKED_WITHIN_S.
    """

    def __init__(
        self,
        *,
        peers: int,
        stages: int,
        round_s: float,
        sizes: Sizes,
        heartbeat_s: float = HEARTBEAT_S,
        seed: int = 0,
    ):
        self._dice = random.Random(seed)
        self._stages, self._round_s, self._sizes = stages, round_s, sizes
        self._nodes = [_distance_id(f"node {number}") for number in range(peers)]
        self._topics: dict[str, Topic] = {}
        self._events: list[tuple[float, int, int, Callable[[int, float], float]]] = []
        self._looked: dict[tuple[int, str], float] = {}
        self._heartbeat_s = heartbeat_s
        self._cadences = [Cadence(heartbeat_s=heartbeat_s, now_s=0.0) for _ in range(peers)]
        self.peers = peers
        self.sent = [0.0] * (peers + 1)
        self._bootstrap_asked = set[tuple[int, str]]()
        self.most_asked = 0
        self._asked: Counter[tuple[int, int]] = Counter()
        self._window = 0

    def run(self, seconds: float) -> None:
        """Let them train for so long."""
        for peer in range(self.peers):
            for act in (self._announce, self._look, self._look_at_others, self._hear_bells):
                self._at(self._dice.uniform(0.0, self._heartbeat_s), peer, act)
            if peer % self._stages == 0:
                self._at(self._dice.uniform(0.8, 1.2) * self._round_s, peer, self._ring)
        while self._events and self._events[0][0] < seconds:
            now, _, peer, act = heapq.heappop(self._events)
            self._at(now + act(peer, now), peer, act)
        for node in range(self.peers + 1):
            self.sent[node] += UPKEEP_BYTES_PER_S * seconds

    @property
    def cadence(self) -> Cadence:
        """Of one of its peers."""
        return self._cadences[0]

    # ---- what a peer does; each returns seconds until it does so again ---------------------------
    def _announce(self, peer: int, now: float) -> float:
        sizes, stage = self._sizes, peer % self._stages
        self._write(peer, f"stage {stage}", sizes.stage, now)
        self._write(peer, f"claim {stage}", sizes.claim, now)
        if stage == 0:
            self._write(peer, "replica", sizes.replica, now)
            self._write(peer, f"part {peer}", sizes.part, now)
        return self._cadences[peer].announce_s

    def _look(self, peer: int, now: float) -> float:
        stage, cadence = peer % self._stages, self._cadences[peer]
        topics = [f"stage {stage}", f"claim {stage}", "replica"]
        self._read(peer, topics, now)
        known = [self._topics[name] for name in topics if name in self._topics]
        own = sum(len(topic.owners) * topic.record_bytes for topic in known)
        others = [
            self._topics[name]
            for number in range(self._stages)
            if number != stage and (name := f"stage {number}") in self._topics
        ]
        cadence.hear(
            Heard(
                peers=self.peers,
                own_bytes=own,
                other_bytes=sum(len(topic.owners) * topic.record_bytes for topic in others),
            )
        )
        return cadence.look_s

    def _look_at_others(self, peer: int, now: float) -> float:
        stage = peer % self._stages
        others = [f"stage {number}" for number in range(self._stages) if number != stage]
        self._read(peer, [*others, *(["claim 0"] if stage else [])], now)
        return self._cadences[peer].look_at_others_s

    def _ring(self, peer: int, now: float) -> float:
        """Its finish of a round, then T_R, then once more while the round's group meets."""
        number = int(now / self._round_s)
        self._write(peer, f"bell {number}", self._sizes.bell, now)
        # as a head does whose round is over, and the claim of the record that follows
        self._write(peer, f"claim {peer % self._stages}", self._sizes.claim, now)
        return self._round_s

    def _hear_bells(self, peer: int, now: float) -> float:
        number = int(now / self._round_s)
        self._read(peer, [f"bell {number}", f"bell {number + 1}"], now)
        return look_s(self._round_s)

    # ---- the DHT ---------------------------------------------------------------------------------
    def _write(self, peer: int, name: str, record_bytes: int, now: float) -> None:
        topic = self._topic(name, record_bytes)
        topic.write(peer, now)
        for keeper in topic.keepers:
            if keeper != peer:
                self.sent[peer] += CALL_BYTES / 2 + KEY_BYTES + record_bytes
                self.sent[keeper] += CALL_BYTES / 2
                self._count(peer, keeper, now)

    def _read(self, peer: int, names: list[str], now: float) -> None:
        """One look: of each key one keeper is asked, and one call serves the keys that it keeps."""
        left, bootstrap = names, self.peers
        while left:
            others = [node for node in self._topic(left[0], 0).keepers[:KEEPERS] if node != peer]
            asked = self._dice.choice(others)
            kept = [name for name in left if asked in self._topic(name, 0).keepers]
            left = [name for name in left if name not in kept]
            for name in kept:
                topic = self._topic(name, 0)
                news = topic.news(self._looked.get((peer, name), -1.0), now)
                self._looked[peer, name] = now
                self.sent[peer] += KEY_BYTES + MARK_BYTES * len(topic.owners)
                self.sent[asked] += news * topic.record_bytes
            self._call(peer, asked, now)
        due = {(peer, name) for name in names} - self._bootstrap_asked
        self._bootstrap_asked = (self._bootstrap_asked - {(peer, name) for name in names}) | due
        if due:
            known = sum(len(self._topic(name, 0).owners) for _, name in due)
            self.sent[peer] += KEY_BYTES * len(due) + MARK_BYTES * known
            self._call(peer, bootstrap, now)

    def _call(self, peer: int, asked: int, now: float) -> None:
        self.sent[peer] += CALL_BYTES / 2
        self.sent[asked] += CALL_BYTES / 2
        self._count(peer, asked, now)

    def _count(self, peer: int, asked: int, now: float) -> None:
        """A call at this time, which does not fall."""
        if (window := int(now / ASKED_WITHIN_S)) != self._window:
            self._window, self._asked = window, Counter()
        self._asked[peer, asked] += 1
        self.most_asked = max(self.most_asked, self._asked[peer, asked])

    def _topic(self, name: str, record_bytes: int) -> Topic:
        if name not in self._topics:
            place = _distance_id(name)
            nearest = sorted(range(self.peers), key=lambda node: self._nodes[node] ^ place)
            self._topics[name] = Topic(record_bytes, (*nearest[:KEEPERS], self.peers))
        topic = self._topics[name]
        topic.record_bytes = record_bytes or topic.record_bytes
        return topic

    def _at(self, when: float, peer: int, act: Callable[[int, float], float]) -> None:
        heapq.heappush(self._events, (when, self._dice.getrandbits(40), peer, act))


def look_s(round_s: float) -> float:
    """Seconds between two looks at the bells."""
    return min(max(round_s / LOOKS, LOOK_S), LONGEST_LOOK_S)


def before(peers: int, stages: int, round_s: float, sizes: Sizes) -> float:
    """Bytes a second that a peer sent by the rule before."""
    more, heads = BEFORE_SIGNATURE, peers / stages
    own = peers / stages
    nodes = min(BEFORE_NODES, peers - 1)
    table = nodes * 62  # every answer names the nodes nearest to the key
    of_stages = peers * (sizes.stage + more)
    claims = (2 if stages > 1 else 1) * own * (sizes.claim + more)
    replicas = heads * (sizes.replica + more)
    look = nodes * (of_stages + claims + replicas + (stages + 3) * (table + CALL_BYTES))
    # a store searches first, and the search brings what is under the key
    tell = nodes * (own * (sizes.stage + sizes.claim + 2 * more) + 4 * (table + CALL_BYTES))
    tell += nodes * replicas * heads / peers
    bells = nodes * heads * (sizes.bell + more) / 2 + 2 * nodes * (table + CALL_BYTES)
    hearing = bells * 0.25 + bells * (HEARTBEAT_S / 4) / HEARTBEAT_S / 4  # in the last quarter
    return (look + tell) / HEARTBEAT_S + hearing


def main() -> None:
    """Print the table, or what real nodes send."""
    made = parser(__doc__)
    made.add_argument("--peers", type=int, nargs="+", default=[8, 50, 200, 1000])
    made.add_argument("--stages", type=int, nargs="+", default=[1, 4])
    made.add_argument("--round-s", type=float, nargs="+", default=[600.0, 3600.0])
    made.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S)
    made.add_argument("--real", type=int, help="measure so many nodes on loopback instead")
    report, arguments = Report.parse(made, "dht-traffic")
    if arguments.real:
        real(report, arguments.real)
    else:
        modelled(report, arguments)
    report.close()


def modelled(report: Report, arguments: argparse.Namespace) -> None:
    """The table, and a line of its plot for each number of stages and length of round."""
    rows: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for peers in [8] if arguments.quick else arguments.peers:
            for stages in arguments.stages:
                sizes = Sizes.real(Path(folder), stages)
                rows += [
                    row(peers, stages, round_s, sizes, arguments.heartbeat_s)
                    for round_s in arguments.round_s
                ]
    report.table(COLUMNS, rows, title="bytes a second that a peer sends for the DHT")
    lines = {
        f"rounds of {round_s:.0f} s, {stages} stages": [
            (peers, now) for peers, s, r, _, now, *_ in rows if (s, r) == (stages, round_s)
        ]
        for stages in arguments.stages
        for round_s in arguments.round_s
    }
    report.plot("peers", "bytes/s of a peer", lines, log_x=True)


def row(
    peers: int, stages: int, round_s: float, sizes: Sizes, heartbeat_s: float
) -> tuple[float, ...]:
    """One line of the table."""
    seconds = max(3600.0, 2 * round_s)
    swarm = SwarmTraffic(
        peers=peers, stages=stages, round_s=round_s, sizes=sizes, heartbeat_s=heartbeat_s
    )
    swarm.run(seconds)
    *rates, bootstrap = [sent / seconds for sent in swarm.sent]
    cadence = swarm.cadence
    return (
        peers,
        stages,
        round_s,
        before(peers, stages, round_s, sizes),
        sum(rates) / peers,
        max(rates),
        bootstrap,
        cadence.announce_s,
        cadence.lifetime_s,
        swarm.most_asked,
    )


def _distance_id(name: str) -> int:
    return int.from_bytes(key_id(hashlib.sha256(name.encode()).hexdigest()), "big")


# ---- real nodes ----------------------------------------------------------------------------------
def real(report: Report, count: int) -> None:
    """What nodes on loopback send for an announcement, a look with news, and one without."""
    if reason := socket_bytes.available():
        raise SystemExit(reason)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        identities = [Identity.load_or_create(folder / f"{number}.key") for number in range(count)]
        run = run_id(identities[0].public_key, "real")
        nodes = [open_one(run, identities[0], ())]
        stack.callback(nodes[0][0].close)
        first = nodes[0][0].visible_addresses()
        for identity in identities[1:]:
            nodes.append(open_one(run, identity, first))
            stack.callback(nodes[-1][0].close)
        costs = Costs(nodes, [records(run, each.peer_id, 1) for each in identities])
        idle = costs.idle(30.0)
        costs.announce()
        costs.look()
        told, heard, quiet = (
            costs.of(each, idle) for each in (costs.announce, costs.look, costs.look)
        )
    heads = ("at rest, a second", "an announcement", "a look at all news", "a look at none")
    columns = [Column(name, ".0f") for name in heads]
    title = f"{count} nodes on loopback, bytes a node"
    report.table(columns, [(idle, told, heard, quiet)], title=title, part="real")


def open_one(run: str, identity: Identity, bootstraps: tuple[str, ...]) -> tuple[RunDHT, Swarm]:
    """A node on loopback."""
    clock = RunClock()
    dht = open_dht(
        identity=identity,
        bootstraps=bootstraps,
        listen=("/ip4/127.0.0.1/tcp/0",),
        announce=(),
        client_mode=False,
        validator=RunRecordValidator(run, identity),
        clock=clock,
    )
    return dht, Swarm(dht, run, identity, clock)


class Costs:
    """What all nodes send while something is done, for each of them."""

    def __init__(self, nodes: list[tuple[RunDHT, Swarm]], told: list[dict[str, Record]]):
        self._nodes, self._told = nodes, told

    def idle(self, seconds: float) -> float:
        """Bytes a second of a node that does nothing."""
        sent = self._sent()
        time.sleep(seconds)
        return (self._sent() - sent) / seconds / len(self._nodes)

    def of(self, act: Callable[[], None], idle: float) -> float:
        """Bytes a node for doing this once, without what it sends at rest."""
        sent, began = self._sent(), time.monotonic()
        act()
        time.sleep(1.0)
        seconds = time.monotonic() - began
        return (self._sent() - sent) / len(self._nodes) - idle * seconds

    def announce(self) -> None:
        """All tell of themselves."""
        for (_, swarm), told in zip(self._nodes, self._told, strict=True):
            if not swarm.publish_many(told, 600.0, LIMIT_S):
                raise RuntimeError("the DHT took no records")

    def look(self) -> None:
        """All look at the records that all tell of."""
        asked = {key: type(record) for told in self._told for key, record in told.items()}
        for _, swarm in self._nodes:
            found = swarm.read_many(asked, LIMIT_S, thorough=False)
            if any(each is None or len(each) < len(self._nodes) for each in found.values()):
                raise RuntimeError("not all records were found")

    def _sent(self) -> int:
        return socket_bytes.sent_by([dht.p2pd_pid for dht, _ in self._nodes])


if __name__ == "__main__":
    main()
