"""A record of odd values, signed by somebody who may: whoever reads it goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.records import (
    ClaimRecord,
    PartRecord,
    Record,
    ReplicaRecord,
    StageRecord,
)
from dilocox.dht.swarm_view import SwarmView, believed_first
from dilocox.dht.wire import Malformed, pack
from dilocox.peer.averaging.data_lease import PartLease
from dilocox.peer.averaging.proven_heads import ProvenHeads
from dilocox.peer.chain.fork_choice import ClaimBook, Trust
from dilocox.peer.chain.history_keeper import HistoryKeeper
from dilocox.peer.chain.round_history import RoundHistory
from dilocox.peer.http_pages import metrics_page
from dilocox.peer.monitor.status import metrics_of
from dilocox.peer.rounds.round_end import MAX_AHEAD, RoundKeeper, newest_credible
from dilocox.pipeline.candidates import Vacancies, candidates, missing, unfilled
from dilocox.pipeline.stage_choice import Mover, choose_stage, next_move
from tests.clocks import TestClock
from tests.peer.fabricated import NOW, RUN, ToldSwarm, claim_record, digest, trained
from tests.peer.kept_chains import ChainMaker, manifest_of
from tests.peer.local_peers import local_peer
from tests.pipeline.swarms import bell_record

ODD: list[Any] = [0, -1, 1, 2**31, 2**53, 2**63, 1.5, -1.5, 1e308, 5e-324, -0.0]
ODD += [math.inf, -math.inf, math.nan, "", "x" * 250, "\x00\u202e<b>", "x" * 65536]
ODD += [None, True, False, b"", [], [[]], ["x"] * 8, [""] * 64, {}, {"a": 1}]
STAGES = 3


def odd_ones(record: Record) -> Iterator[Any]:
    """The record with each odd value in each field, where it can be read so."""
    told = dataclasses.asdict(record)
    for name in told:
        for odd in ODD:
            try:
                yield type(record).decode(pack(told | {name: odd}))
            except Malformed:
                continue


def view_of(swarm: ToldSwarm, stage: int, me: str, bells: dict[int, Any]) -> SwarmView:
    """As a look of the announcer's, which passes on no replica of an incredible round."""
    newest = newest_credible(4, 3, [each.round for each in swarm.replicas.values()])
    return SwarmView(
        me=me,
        stage=swarm.stages[stage],
        stages=swarm.stages,
        replicas={head: each for head, each in swarm.replicas.items() if each.round <= newest},
        claims=swarm.claims[stage],
        run_claims=swarm.claims[0],
        bells=bells,
    )


@pytest.fixture
def readers(identities: list[Identity], tmp_path: Path) -> Any:
    """All that reads what others say of themselves; called with what is told."""
    clock = TestClock(NOW)
    chain = ChainMaker(identities[0], tmp_path / "chain", manifest_of())
    chain.train(0, 1)
    trust = Trust(me="me", witness="boot0", record_lifetime_s=60.0, now=clock.monotonic)
    book, proven = ClaimBook(trust), ProvenHeads()
    kept = RoundHistory(tmp_path / "history", trained(stages=STAGES).manifest)
    history = HistoryKeeper(kept, identities[0], RUN, STAGES, clock.time)

    def read(swarm: ToldSwarm, bells: dict[int, Any]) -> None:
        look = swarm.look()
        assert swarm.status(look)["stages"] and metrics_page(metrics_of(swarm.seen(look))).body
        hosts = [swarm.stages[stage] for stage in range(STAGES)]
        history.hear(hosts, swarm.replicas, {n: claim_record(4, "c") for n in range(STAGES)})
        for stage in range(STAGES):
            me = swarm.peer(stage, 0)
            view = view_of(swarm, stage, me, bells)
            assert set(believed_first(view.claims, "boot0")) == set(view.claims)
            counting = trust.counting(view, chain.log, chain.log.head())
            book.ahead(counting, chain.log.head())
            book.best(counting, chain.log.head())
            proven.see(chain.last, view.stage)
            heads = proven.counting(view, chain.last, stage=stage)
            keeper = RoundKeeper(me, clock, meeting_s=5.0)
            keeper.start(dataclasses.replace(view, bells={}), 3, heads=heads)
            for step in (1, 50):
                wanted = {number: bells.get(number, {}) for number in keeper.wanted_bells(view)}
                keeper.follow(
                    dataclasses.replace(view, bells=wanted),
                    swarm.replicas.get(me) and dataclasses.replace(REPLICA, inner_step=step),
                    clock.time(),
                    head=swarm.peer(0, 0),
                    heads=heads,
                    last_record=3,
                    inner_steps=20,
                    tokens=1,
                    undecided=False,
                )
                assert keeper.round <= 3 + MAX_AHEAD
            view.says_ended(swarm.manifest, "boot0")
            view.run_tokens("")
            choose_stage(swarm.stages, me="new", num_stages=STAGES)
            next_move(swarm.stages, num_stages=STAGES, turn=7)
            Mover(me=me, stage=stage, num_stages=STAGES).observe(swarm.stages, free=True, turn=7)
        vacancies = Vacancies(me=swarm.peer(0, 0), num_stages=STAGES, members={0: False})
        assert set(candidates(swarm.stages, vacancies)) == {1, 2}
        missing(swarm.stages, vacancies)
        unfilled(swarm.stages, STAGES)

    return read


SOUND = trained(stages=STAGES)
STAGE = SOUND.stages[1][SOUND.peer(1, 1)]
REPLICA = SOUND.replicas[SOUND.peer(0, 1)]
CLAIM = claim_record(3, digest(0, 3), 1000)
BELL = bell_record(NOW, (NOW, NOW + 1), number=4)


@pytest.mark.parametrize("record", [STAGE, REPLICA, CLAIM, BELL], ids=lambda record: record.kind)
def test_one_odd_record_ends_no_reader(readers: Any, record: Record) -> None:
    count = 0
    for odd in odd_ones(record):
        told, bells = trained(stages=STAGES), dict[int, Any]()
        for stage in range(STAGES):
            liar = told.peer(stage, 1)
            match odd:
                case StageRecord():
                    told.stages[stage][liar] = odd
                case ClaimRecord():
                    told.claims[stage][liar] = odd
                case ReplicaRecord():
                    told.replicas[told.peer(0, 1)] = odd
                case _:
                    bells = {odd.round: {told.peer(0, 1): odd}, 4: {told.peer(0, 1): odd}}
        readers(told, bells)
        count += 1
    assert count > 2 * len(dataclasses.fields(record))


def test_an_odd_part_of_the_data_ends_no_lease() -> None:
    for odd in odd_ones(PartRecord(part=3, position=0)):
        told = SimpleNamespace(
            read_many=lambda keys, thorough, odd=odd: {k: {"b": odd} for k in keys}
        )
        lease = PartLease(local_peer("me", swarm=told), None)
        lease.settle()
        assert lease.part >= 0 and lease.position >= 0
