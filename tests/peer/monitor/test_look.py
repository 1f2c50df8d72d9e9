"""A look at the DHT: what is read, what is kept where no answer comes, whom it believes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.identity import peer_id_of
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined
from dilocox.dht.node import NoAnswer
from dilocox.dht.records import ReplicaRecord, claim_key, replica_key, stage_key
from dilocox.peer.averaging import announcer
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.monitor.look import Looker
from tests.peer.fabricated import (
    NOW,
    RUN,
    claim_record,
    manifest_of,
    peer_id,
    replica_record,
    stage_record,
)

HEAD, MEMBER = peer_id(0), peer_id(100)
MANIFEST = manifest_of(stages=2)


class Dht:
    """What is stored; None for a key that gives no answer. `asked`: the keys of the last look."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Any] | None] = {}
        self.asked: list[str] = []
        self.answering: frozenset[str] | None = frozenset({"boot"})
        self.pings = 0

    def read_many(self, keys: Mapping[str, Any], _timeout_s: float) -> dict[str, Any]:
        self.asked = list(keys)
        return {key: self.stored.get(key, {}) for key in keys}

    def answering_bootstraps(self, _timeout_s: float) -> frozenset[str]:
        self.pings += 1
        if self.answering is None:
            raise NoAnswer("stuck")
        return self.answering

    def looker(self, *ping_s: float) -> Looker:
        local = SimpleNamespace(
            run=RUN,
            manifest=MANIFEST,
            clock=SimpleNamespace(time=lambda: NOW),
            swarm=self,
            dht=self,
            witness="boot",
        )
        return Looker(cast("Joined", local), ("boot", "other"), *ping_s)


@pytest.fixture
def dht() -> Dht:
    made = Dht()
    made.stored = {
        stage_key(RUN, 0): {HEAD: stage_record()},
        stage_key(RUN, 1): {MEMBER: stage_record(), "x": stage_record(state="left")},
        claim_key(RUN, 0): {HEAD: claim_record(3, "a" * 64)},
        replica_key(RUN): {HEAD: replica_record(members=(HEAD, MEMBER))},
    }
    return made


def test_a_look_reads_every_stage_and_the_replicas(dht: Dht) -> None:
    look = dht.looker().look(MANIFEST)
    assert look.at == NOW and look.answered and look.reachable
    assert set(look.stages[1]) == {MEMBER, "x"} and set(look.present(1)) == {MEMBER}
    assert look.claims[0][HEAD].round == 3 and set(look.replicas) == {HEAD}
    assert look.bootstraps == {"boot": True, "other": False}


def test_a_replica_counts_only_under_a_head_that_hosts_stage_0(dht: Dht) -> None:
    dht.stored[replica_key(RUN)] = {
        HEAD: replica_record(members=(HEAD, MEMBER)),
        MEMBER: replica_record(members=(MEMBER,)),
        "liar": replica_record(members=(HEAD, MEMBER)),
        "empty": replica_record(members=()),
    }
    assert set(dht.looker().look(MANIFEST).replicas) == {HEAD}


def test_what_gives_no_answer_stays_as_it_was(dht: Dht) -> None:
    looker = dht.looker()
    before = looker.look(MANIFEST)
    for key in (stage_key(RUN, 1), replica_key(RUN)):
        dht.stored[key] = None
    look = looker.look(MANIFEST)
    assert look.answered and look.stages == before.stages and look.replicas == before.replicas


def test_it_is_unreachable_where_neither_a_peer_nor_a_bootstrap_is_to_be_seen(dht: Dht) -> None:
    looker = dht.looker()
    looker.look(MANIFEST)
    dht.stored = dict.fromkeys(dht.asked)  # no answer at all
    look = looker.look(MANIFEST)
    assert not look.answered and look.reachable  # a bootstrap answers
    dht.stored, dht.answering = {}, None
    look = dht.looker().look(MANIFEST)
    assert look.answered and not look.reachable
    dht.stored, dht.answering = {stage_key(RUN, 0): {HEAD: stage_record()}}, frozenset()
    assert dht.looker().look(MANIFEST).reachable  # peers alone


def test_bootstraps_are_pinged_less_often_than_records_are_read(dht: Dht) -> None:
    seldom, always = dht.looker(), dht.looker(0.0)
    for looker, pings in ((seldom, 1), (seldom, 1), (always, 2), (always, 3)):
        looker.look(MANIFEST)
        assert dht.pings == pings


def test_a_bootstrap_with_two_addresses_counts_once() -> None:
    ids = [peer_id_of(bytes([number]) * 32) for number in (1, 2)]
    places = [f"/ip4/192.0.2.{n}/tcp/1/p2p/{ids[n // 2]}" for n in range(3)]
    assert Invite(RUN, tuple(places)).peer_ids == tuple(ids)


def test_a_head_tells_how_long_it_waited() -> None:
    progress = LoopStatus(head=HEAD, members=(HEAD, MEMBER), round_waiting_share=0.125)
    told = announcer.replica_record(3, progress, hear_s=1.0)
    assert told is not None and told.waiting_share == 0.125
    assert ReplicaRecord.decode(told.encode()) == told
