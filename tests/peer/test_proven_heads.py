"""Heads that go first: those whose members' values are in the records of this stage."""

from __future__ import annotations

from dilocox.dht.records import StageRecord
from dilocox.peer.averaging.proven_heads import PROVEN_ROUNDS, ProvenHeads
from dilocox.peer.rounds.record import Contribution, ReducedShare, RoundRecord
from dilocox.peer.rounds.standing import FORGOTTEN_ROUNDS
from tests.peer.fabricated import digest, stage_record
from tests.peer.members import template


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
