"""What a peer tells of itself, and what it makes of the answers to one look at the DHT."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.records import (
    MAX_LIFETIME_S,
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
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.announcer import Announcer, replica_record
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.rounds.round_end import bells_to_read
from dilocox.peer.rounds.standing import Standing
from tests.clocks import TestClock
from tests.peer.local_peers import MANIFEST, RUN, local_peer
from tests.pipeline.swarms import bell_record, stage_record

PEER_ID = "12D3KooW" + "x" * 44
ADDRESSES = tuple(f"/ip4/203.0.113.{n}/tcp/31337/p2p/{PEER_ID}" for n in range(3))
CHAIN = cast(
    "ChainFollower",
    SimpleNamespace(
        head=SimpleNamespace(round=4, digest="e" * 64, chain_tokens=900, record_bytes=77),
        last_record=None,
    ),
)


class Dht:
    """A swarm that answers for the keys it is told to, and keeps what is published."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()
        self.asked: list[dict[str, type[Record]]] = []
        self.refused = Counter[str]()

    def read_many(
        self, keys: Mapping[str, type[Record]], timeout_s: float, *, thorough: bool
    ) -> dict[str, dict[str, Any] | None]:
        self.asked.append(dict(keys))
        return {
            key: None if key in self.silent else dict(self.records.get(key, {})) for key in keys
        }


class Hourly(TestClock):
    """A clock by which every look is an hour later, so that the time of everything has come."""

    def monotonic(self) -> float:
        self.now += 3600.0
        return self.now


def announcer(
    dht: Dht,
    stage: int,
    stages: int = 3,
    clock: TestClock | None = None,
    known: Collection[str] = (),
    left_out: Collection[str] = (),
) -> Announcer:
    """known: who was in a record, by the newest one of its stage, which has none without; and who
    it remembers though it was in none.
    """
    local = local_peer(
        stage=stage,
        manifest=replace(MANIFEST, stages=stages),
        swarm=dht,
        clock=clock or Hourly(),
        addresses=ADDRESSES,
        name="Ada's laptop",
        team="🦊" * 12,
    )
    credited = dict.fromkeys(left_out, 0) | dict.fromkeys(known, 1)
    standings = [Standing(peer=peer, round=4, credited=each) for peer, each in credited.items()]
    last = SimpleNamespace(standings=standings) if known else None
    chain = SimpleNamespace(head=CHAIN.head, last_record=last)
    return Announcer(local, cast("ChainFollower", chain))


def look(looking: Announcer, bells: list[int], *, whole: bool = True) -> bool:
    return looking.look(bells, 5, whole=whole)


def claim(round_number: int) -> ClaimRecord:
    return ClaimRecord(round=round_number, digest="d", chain_tokens=round_number, record_bytes=1)


def bell(round_number: int) -> BellRecord:
    return bell_record(1.0, number=round_number)


def replica() -> Any:
    return replica_record(3, LoopStatus(head="h", members=("h", "a", "b")), hear_s=1.0)


# ---- how often -----------------------------------------------------------------------------------
def crowd(peers: int, stages: int) -> Dht:
    dht = Dht()
    of = {stage: [f"{number}" for number in range(stage, peers, stages)] for stage in range(stages)}
    for stage, members in of.items():
        dht.records[stage_key(RUN, stage)] = {peer: stage_record() for peer in members}
        dht.records[claim_key(RUN, stage)] = {peer: claim(4) for peer in members}
    dht.records[replica_key(RUN)] = {peer: replica() for peer in of[0]}
    return dht


def looked_at(
    dht: Dht, looking: Announcer, seconds: int, clock: TestClock, *, searching: bool = False
) -> Counter[str]:
    """How often each key was asked for in this time, with a look at every heartbeat."""
    dht.asked.clear()
    for _ in range(0, seconds, 10):
        clock.now += 10.0
        looking.look([5], 5, searching=searching)
    return Counter(key for asked in dht.asked for key in asked)


def test_in_a_small_swarm_every_heartbeat_shows_everything() -> None:
    dht, clock = crowd(4, 2), TestClock()
    looking = announcer(dht, 1, 2, clock)
    asked = looked_at(dht, looking, 600, clock)
    assert set(asked.values()) == {60}
    assert looking.cadence.lifetime_s == 30.0


def test_in_a_large_one_other_stages_are_read_more_rarely_than_ones_own() -> None:
    dht, clock = crowd(400, 4), TestClock()
    looking = announcer(dht, 1, 4, clock, dht.records[stage_key(RUN, 1)])
    look(looking, [5])
    asked = looked_at(dht, looking, 3600, clock)
    assert asked[bell_key(RUN, 5)] == 360
    own = (stage_key(RUN, 1), claim_key(RUN, 1), replica_key(RUN))
    assert all(60 < asked[key] < 180 for key in own)
    assert asked[stage_key(RUN, 2)] * 8 < asked[stage_key(RUN, 1)]
    assert len(looking.view.stages) == 4  # and are not forgotten meanwhile
    assert looking.cadence.lifetime_s > 100.0


def test_who_looks_for_peers_of_other_stages_sees_at_once_who_is_there_now() -> None:
    dht, clock = crowd(400, 4), TestClock()
    looking = announcer(dht, 1, 4, clock, dht.records[stage_key(RUN, 1)])
    looked_at(dht, looking, 1800, clock)
    assert not looking.sees_others
    asked = looked_at(dht, looking, 10, clock, searching=True)
    assert asked[stage_key(RUN, 2)] == 1
    assert looking.sees_others
    asked = looked_at(dht, looking, 3600, clock, searching=True)
    assert 60 < asked[stage_key(RUN, 2)] <= asked[stage_key(RUN, 1)] < 180
    assert looking.sees_others


def test_a_look_at_other_stages_without_an_answer_is_soon_repeated_but_not_every_time() -> None:
    dht, clock = crowd(400, 4), TestClock()
    looking = announcer(dht, 1, 4, clock, dht.records[stage_key(RUN, 1)])
    looked_at(dht, looking, 1800, clock)
    dht.silent = {stage_key(RUN, 2)}
    asked = looked_at(dht, looking, 3600, clock)
    assert 60 < asked[stage_key(RUN, 2)] < 180
    dht.silent = set()
    looked_at(dht, looking, 60, clock)
    assert looked_at(dht, looking, 3600, clock)[stage_key(RUN, 2)] < 20


def test_a_crowd_of_keys_that_were_in_no_record_slows_nobody() -> None:
    known = ("0", "4", "8")  # of stage 0
    quiet, busy = crowd(12, 4), crowd(12, 4)
    for number in range(2700):
        for stage in range(4):
            busy.records[stage_key(RUN, stage)][f"new-{number}"] = stage_record()
            busy.records[claim_key(RUN, stage)][f"new-{number}"] = claim(4)
        busy.records[replica_key(RUN)][f"new-{number}"] = replica()
    intervals: list[float] = []
    for dht in (quiet, busy):
        left_out = [f"new-{number}" for number in range(300)]
        looking = announcer(dht, 0, 4, TestClock(), known, left_out)
        look(looking, [5])
        intervals.append(looking.cadence.announce_s)
    # as if there were twice as many, and a few
    assert intervals[1] < 5 * intervals[0]
    looking = announcer(busy, 0, 4, TestClock())
    look(looking, [5])
    assert looking.cadence.announce_s < 60.0  # before the first record


def test_who_waits_for_a_record_and_who_sees_nobody_looks_with_every_heartbeat() -> None:
    dht, clock = crowd(400, 4), TestClock()
    looking = announcer(dht, 1, 4, clock, dht.records[stage_key(RUN, 1)])
    for _ in range(10):
        looking.look([5], 5, eager=True)
    assert all(stage_key(RUN, 1) in asked for asked in dht.asked)
    dht.records[stage_key(RUN, 1)] = {}
    asked = looked_at(dht, looking, 3600, clock)
    assert asked[stage_key(RUN, 1)] > 300


# ---- looking -------------------------------------------------------------------------------------
@pytest.fixture
def dht() -> Dht:
    """Three stages, of which this peer is of the second."""
    dht = Dht()
    dht.records = {
        stage_key(RUN, 0): {"h": stage_record(state="training", replica="h")},
        stage_key(RUN, 1): {"me": stage_record(), "x": stage_record()},
        stage_key(RUN, 2): {"z": stage_record()},
        claim_key(RUN, 0): {"h": claim(7)},
        claim_key(RUN, 1): {"x": claim(4)},
        claim_key(RUN, 2): {"z": claim(99)},
        replica_key(RUN): {"h": replica()},
        bell_key(RUN, 5): {"h": bell(5)},
    }
    return dht


def test_one_look_asks_for_everything_at_once(dht: Dht) -> None:
    looking = announcer(dht, 1)
    assert look(looking, [5, 6])
    assert len(dht.asked) == 1
    bells = {key for key, kind in dht.asked[0].items() if kind is BellRecord}
    assert bells == {bell_key(RUN, 5), bell_key(RUN, 6)}
    view = looking.view
    assert set(view.stage) == {"me", "x"}  # of one's own stage
    hosts = {stage: set(here) for stage, here in view.stages.items()}
    assert hosts == {0: {"h"}, 1: {"me", "x"}, 2: {"z"}}
    assert set(view.replicas) == {"h"}
    assert {number: set(bells) for number, bells in view.bells.items()} == {5: {"h"}, 6: set()}
    assert (view.claims, view.run_claims) == ({"x": claim(4)}, {"h": claim(7)})
    run = announcer(dht, 0)  # whose own chain is that of the run
    assert look(run, [])
    assert run.view.claims == run.view.run_claims == {"h": claim(7)}


def test_a_quick_look_asks_for_bells_and_forgets_nothing(dht: Dht) -> None:
    looking = announcer(dht, 1)
    assert look(looking, [5])
    before = looking.view
    dht.records = {claim_key(RUN, 1): {"x": claim(5)}, bell_key(RUN, 5): {"y": bell(5)}}
    look(looking, [5], whole=False)
    assert set(dht.asked[-1]) == {bell_key(RUN, 5)}
    assert looking.view == replace(before, bells={5: {"y": bell(5)}})


def test_what_gives_no_answer_stays_as_it_was_and_an_empty_answer_does_not(dht: Dht) -> None:
    looking = announcer(dht, 1)
    assert look(looking, [5])
    before = looking.view
    dht.silent, dht.records = set(dht.records), {}
    assert not look(looking, [5])
    assert looking.view == before
    dht.silent = set()
    assert look(looking, [5])
    assert looking.view == SwarmView(me="me", stages={0: {}, 1: {}, 2: {}}, bells={5: {}})


def test_a_stage_that_never_answered_is_unknown_and_not_empty(dht: Dht) -> None:
    dht.silent = {stage_key(RUN, 2)}
    looking = announcer(dht, 1)
    assert look(looking, [])
    assert set(looking.view.stages) == {0, 1}


@pytest.mark.parametrize(
    ("silent", "answered"),
    [
        (stage_key(RUN, 1), False),
        (claim_key(RUN, 1), False),
        (stage_key(RUN, 0), True),  # what a joiner needs to know is of its own stage
        (claim_key(RUN, 0), True),
        (replica_key(RUN), True),
    ],
)
def test_a_look_has_its_answer_with_the_records_of_the_own_stage(
    silent: str, answered: bool
) -> None:
    dht = Dht()
    dht.silent = {silent}
    assert look(announcer(dht, 1), []) is answered


# ---- telling -------------------------------------------------------------------------------------
def told(own: LoopStatus, state: str = "training", stages: int = 3) -> StageRecord:
    records = announcer(Dht(), 1, stages).of_stage(
        state, round_number=5, inner_steps=70, voids=2, own=own
    )
    for record in records.values():
        record.encode()  # what is too long raises
    record, claimed = records[stage_key(RUN, 1)], records[claim_key(RUN, 1)]
    assert isinstance(claimed, ClaimRecord) and isinstance(record, StageRecord)
    assert (claimed.round, claimed.chain_tokens, record.inner_steps) == (4, 900, 70)
    return record


def test_a_stage_record_names_the_replica_that_a_peer_is_in_and_what_keeps_it_from_one() -> None:
    member = told(LoopStatus(head="h", unsent_tokens=64, computing_share=0.97))
    assert (member.name, member.team) == ("Ada's laptop", "🦊" * 12)
    assert member.computing_share == 0.97
    assert (member.state, member.replica, member.tokens) == ("training", "h", 64)
    blocked = told(LoopStatus(blocked="stage 1 has no peer"), "spare")
    assert (blocked.replica, blocked.blocked) == ("", "stage 1 has no peer")


@pytest.mark.parametrize("stuck", [False, True])
def test_a_claim_says_whether_its_peer_is_stuck(stuck: bool) -> None:
    """Whatever round it is in: a bell can lead it anywhere."""
    records = announcer(Dht(), 1, 3).of_stage(
        "training", round_number=9, inner_steps=70, voids=2, own=LoopStatus(), stuck=stuck
    )
    claimed = records[claim_key(RUN, 1)]
    assert isinstance(claimed, ClaimRecord)
    assert claimed.stuck is stuck


def test_nobody_is_told_to_wait_for_a_peer_that_starts_over() -> None:
    over = LoopStatus(head="h", started_over=True)
    assert told(over).state == "joining"
    assert told(over, "left").state == "left"
    view = SwarmView(me="me", stage={"me": told(LoopStatus(head="h")), "x": told(over)})
    assert view.counted() == ("me",)


def test_who_has_left_holds_no_tokens_that_others_would_wait_for() -> None:
    assert told(LoopStatus(head="h", unsent_tokens=64), "left").tokens == 0


def test_a_run_that_lacks_peers_for_most_stages_still_fits_into_a_record() -> None:
    reasons = "; ".join(f"stage {n} has no free peer (3 train in other replicas)" for n in range(9))
    record = told(LoopStatus(head=PEER_ID, blocked=reasons), stages=10)
    assert record.blocked.startswith("stage 0 has no free peer")


def test_only_a_peer_that_leads_a_replica_has_a_replica_record() -> None:
    assert replica_record(3, LoopStatus(head="h"), hear_s=1.0) is None
    own = LoopStatus(
        head="me",
        members=("me", "a", "b"),
        epoch=4,
        inner_step=9,
        step_s=1.5,
        val_loss=2.5,
        val_round=2,
        codec="int8",
        last_fault="stage 1 silent",
    )
    record = replica_record(3, own, hear_s=2.5)
    assert record is not None
    assert (record.members, record.epoch, record.round) == (("me", "a", "b"), 4, 3)
    assert (record.inner_step, record.step_s, record.hear_s) == (9, 1.5, 2.5)
    assert (record.val_loss, record.val_round) == (2.5, 2)
    assert (record.codec, record.last_fault) == ("int8", "stage 1 silent")


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_record_has_no_loss_that_is_not_finite_but_its_round(loss: float | None) -> None:
    own = LoopStatus(head="me", members=("me",), val_loss=loss, val_round=4)
    record = replica_record(5, own, hear_s=1.0)
    assert record is not None
    assert ReplicaRecord.decode(record.encode()) == record
    assert (record.val_loss, record.val_round) == (None, 4)


@pytest.mark.parametrize("stages", [1, 13, 40, 64])
def test_the_record_of_a_replica_of_many_stages_names_all_of_its_members(stages: int) -> None:
    members = tuple(f"{PEER_ID[:-2]}{number:02}" for number in range(stages))
    own = LoopStatus(
        head=members[0],
        members=members,
        epoch=2**40,
        inner_step=10**6,
        codec=",".join(["bf16"] * stages)[:256],
        last_fault="stage 39 missing" * 10,
    )
    record = replica_record(10**6, own, hear_s=2.5)
    assert record is not None and record.members == members
    assert ReplicaRecord.decode(record.encode()) == record


def test_a_bell_is_told_under_its_round() -> None:
    told = announcer(Dht(), 0).of_bells([bell(6), bell(7)])
    assert told == {bell_key(RUN, 6): bell(6), bell_key(RUN, 7): bell(7)}


def test_a_replica_in_a_round_that_nobody_can_be_in_is_not_believed() -> None:
    """Its bells would have keys that are none, and it would count among those that must ring."""
    dht = Dht()
    own = LoopStatus(head="me", members=("me",))
    rounds = {
        "a": 5,
        "b": 6,
        "c": 5,
        "d": 5,
        "far": 4 + 64,
        "farther": 4 + 65,
        "large": 9_999_999_999,
        "all": 2**53,
    }
    dht.records[replica_key(RUN)] = {
        peer: replica_record(number, own, hear_s=1.0) for peer, number in rounds.items()
    }
    looking = announcer(dht, 0)
    for _ in range(2):
        look(looking, [5, 6])
    assert set(looking.view.replicas) == {"a", "b", "c", "d", "far"}
    assert dht.refused["round"] == 6
    for number in bells_to_read(5, looking.view.replicas.values()):
        bell_key(RUN, number)


def test_a_record_that_would_be_longer_if_we_wrote_it_is_read_all_the_same() -> None:
    """Numbers may be written in fewer bytes than ours: one that was full is too long then."""
    dht = Dht()
    dht.records[stage_key(RUN, 0)] = {"a": replace(stage_record(), blocked="x" * 2000)}
    looking = announcer(dht, 0)
    look(looking, [5])
    assert set(looking.view.stage) == {"a"}


def test_a_copied_key_is_noticed_and_what_this_peer_said_itself_is_not_taken_for_that() -> None:
    """Its records of before a restart live for an hour, and each that it said may be seen again."""
    dht, clock = Dht(), TestClock()
    peer = announcer(dht, 1, 3, clock)
    clock.now += 2 * MAX_LIFETIME_S["stage"]  # of a start, of which a thread tells
    here = dht.records.setdefault(stage_key(RUN, 1), {})

    def look_at(record: StageRecord) -> None:
        here["me"] = record
        peer.look([5], 5, eager=True)

    def say(number: int) -> StageRecord:
        status = LoopStatus(tokens_per_s=number / 3)
        record = peer.of_stage("spare", round_number=5, inner_steps=7, voids=0, own=status)
        return StageRecord.decode(record[stage_key(RUN, 1)].encode())

    of_before = own = stage_record()
    for number in range(360):
        own = say(number)
        look_at(of_before)
        clock.now += 10.0
        look_at(own)
    clock.now += 3600.0
    look_at(own)  # of a write that came late
    with pytest.raises(EnvironmentFault, match=r"another machine .* identity\.key"):
        look_at(of_before)
