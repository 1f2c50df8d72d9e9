"""Heads that go first: those whose members' values are in the records of this stage."""

from __future__ import annotations

from dataclasses import replace

from dilocox.dht.records import ClaimRecord, ReplicaRecord, StageRecord
from dilocox.dht.swarm_view import Heads, SwarmView
from dilocox.peer.averaging.proven_heads import PROVEN_ROUNDS, ProvenHeads, others_pace
from dilocox.peer.rounds.record import Contribution, ReducedShare, RoundRecord
from dilocox.peer.rounds.standing import FORGOTTEN_ROUNDS, Standing
from tests.peer.fabricated import digest, stage_record
from tests.peer.members import template
from tests.pipeline.swarms import bell_record, replica_record


def record(number: int, *members: str) -> RoundRecord:
    whole = ReducedShare(phase=0, reducer=members[0], start=0, stop=64, contributors=members)
    return template(
        round=number,
        previous=digest(0, number - 1),
        members=tuple(Contribution(peer=peer, tokens=1) for peer in members),
        parts=(whole,),
    )


def hosts(**replicas: str) -> dict[str, StageRecord]:
    return {peer: stage_record(replica=head) for peer, head in replicas.items()}


def test_a_head_is_known_once_its_members_were_in_some_records_and_forgotten_later() -> None:
    heads = ProvenHeads()
    here = hosts(a="A", b="B", c="", d="C")  # d says so, and was in no record
    heads.see(None, here)
    for number in range(PROVEN_ROUNDS):
        assert heads.peers == frozenset()
        for _ in range(5):  # looks between two records
            heads.see(record(number, "a", "b", "c", "gone"), here)
    assert heads.peers == {"A", "B"}
    heads.see(record(50, "a"), hosts(a="A", b="Z"))
    assert heads.peers == {"A", "B"}  # its member is gone, and it looks for another one
    heads.see(record(PROVEN_ROUNDS - 1 + FORGOTTEN_ROUNDS, "a"), here)
    assert heads.peers == {"A"}


def test_a_head_that_only_holds_a_spare_is_not() -> None:
    """What the spare learnt before is in one record yet."""
    heads = ProvenHeads()
    for number in range(3 * PROVEN_ROUNDS):
        members = ("a", "spare") if number == 1 else ("a",)
        heads.see(record(number, *members), hosts(a="A", spare="stranger"))
    assert heads.peers == {"A"}


# ---- whose bells count ---------------------------------------------------------------------------
def of_heads(*names: str) -> dict[str, ReplicaRecord]:
    return {name: replica_record(members=(name,)) for name in names}


def counting(stage: int, view: SwarmView, *credited: str, times: int = 9) -> Heads:
    """Who counts after a record that says that these peers were in so many."""
    known = tuple(Standing(peer=peer, round=3, credited=times) for peer in sorted(credited))
    newest = replace(record(3, "any"), standings=known)
    return ProvenHeads().counting(view, newest, stage=stage)


CROWD = [f"fresh {place}" for place in range(12)]


def test_a_crowd_that_says_it_leads_replicas_counts_for_nothing() -> None:
    claim = ClaimRecord(round=3, digest="d", chain_tokens=10**12, record_bytes=1)
    view = SwarmView(
        me="a",
        replicas=of_heads("a", "b", *CROWD),
        bells={4: dict.fromkeys(["a", "b", "gone", *CROWD], bell_record(0.0, (0.0, 0.0)))},
        run_claims=dict.fromkeys(["b", "archive", *CROWD], claim),
    )
    heads = counting(0, view, "a", "b", "gone")
    assert heads == {"a", "b", "gone"}, "who rang and left has rung"
    said = view.of_heads(heads, {"archive"})
    assert said.replicas.keys() == {"a", "b"}
    assert said.run_claims.keys() == {"b", "archive"}
    assert counting(0, view, "a", "b", times=1) is None
    assert ProvenHeads().counting(view, None, stage=0) is None, "a run begins"
    assert view.of_heads(None, ()) == view


def test_peers_of_later_stages_go_by_whom_those_name_that_vote_in_theirs() -> None:
    told = {"x": "A", "y": "", "me": "", **dict.fromkeys(CROWD, "Z")}
    view = SwarmView(me="me", stage=hosts(**told), replicas=of_heads("A", "B", "Z"))
    assert counting(1, view, "x", "y", "me") == {"A"}
    assert counting(1, view, "x", "y", times=1) is None, "where all are new, all count"
    assert counting(1, view, "y") is None, "nobody of them is in a replica"


def test_where_the_old_heads_are_gone_the_new_ones_go_on() -> None:
    view = SwarmView(me="new", replicas=of_heads("new", "newer"))
    assert counting(0, view, "gone") == {"new", "newer"}


# ---- how fast the others train -------------------------------------------------------------------
def pace(own: int, *others: int, counted: bool = True) -> float:
    """By a record in which members stated these tokens."""
    tokens = {"me": own} | {f"other {place}": each for place, each in enumerate(others)}
    tokens = dict(sorted(tokens.items()))
    made = record(3, *(peer for peer in tokens if counted or peer != "me"))
    members = tuple(Contribution(peer=peer, tokens=each) for peer, each in tokens.items())
    return others_pace(SwarmView(me="me"), replace(made, members=members))


def test_the_others_train_as_fast_as_the_newest_record_says_but_none_faster_than_this_peer() -> (
    None
):
    assert pace(100) == 0
    assert pace(100, 100, 100, 100) == 3
    assert pace(400, 100, 100, 100) == 0.75, "this machine is fast"
    assert pace(1, 100, 100, 100) == 3, "it came at the round's end"
    assert pace(100, 100, 300, counted=False) == 2


def test_before_the_first_record_heads_in_view_count_and_of_a_crowd_a_few() -> None:
    assert others_pace(SwarmView(me="a"), None) == 0
    assert others_pace(SwarmView(me="a", replicas=of_heads("a", "b", "c")), None) == 2
    crowd = SwarmView(me="a", replicas=of_heads("a", *CROWD, *map(str, range(1000))))
    assert others_pace(crowd, None) < 16
