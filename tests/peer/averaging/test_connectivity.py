"""What a peer's coordinator does about the ways to others."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.addresses import FallbackPeers, Reachability, ReachKind, kept_fallback
from dilocox.dht.reachability import CHECK_S
from dilocox.dht.reconnect import Targets
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.averaging.connectivity import NOTE_AGAIN_S, Connectivity
from dilocox.peer.state_folder import StateFolder
from tests.peer.fabricated import peer_id, stage_record
from tests.peer.local_peers import local_peer

ME, OPEN, SHUT = (peer_id(number) for number in (1, 2, 3))
HOST = replace(stage_record(), addresses=(f"/ip4/198.51.100.7/tcp/1/p2p/{OPEN}",))
CLIENT = replace(stage_record(), client_mode=True)


class Averager:
    def __init__(self, kind: ReachKind = "dial_out") -> None:
        self.dialled: list[Targets] = []
        self.checks: list[bool] = []
        self._kind: ReachKind = kind

    def redial(self, targets: Targets) -> None:
        self.dialled.append(targets)

    def check_reach(self, again: bool) -> Future[Reachability]:
        self.checks.append(again)
        found: Future[Reachability] = Future()
        found.set_result(Reachability(kind=self._kind))
        return found


def ways(
    kind: ReachKind, averager: Averager, *, by_others: bool = True, client_mode: bool = False
) -> Connectivity:
    local = local_peer(
        ME,
        reach=Reachability(kind=kind, by_others=by_others),
        client_mode=client_mode or kind == "dial_out",
    )
    return Connectivity(local, cast("StageAverager", averager))


def test_by_whom_to_come_back_is_kept_now_and_then_and_not_of_the_first_views(
    tmp_path: Path,
) -> None:
    local = local_peer(
        ME, state=tmp_path, dht=SimpleNamespace(client_mode=True, local_network=True, running=True)
    )
    own = Connectivity(local, cast("StageAverager", Averager()))
    file, clock = StateFolder(tmp_path).fallback_peers(local.run), cast("Any", local.clock)
    own.look(view(**{OPEN: HOST}))
    assert not file.exists()
    clock.now += NOTE_AGAIN_S
    own.look(view(**{SHUT: CLIENT}))
    assert not file.exists()
    clock.now += NOTE_AGAIN_S
    own.look(view(**{OPEN: HOST}))
    kept = FallbackPeers(addresses=HOST.addresses, client_mode=True, local_network=True)
    assert kept_fallback(file) == kept
    other = "/ip4/198.51.100.8/tcp/1/p2p/" + peer_id(4)
    both = {OPEN: HOST, peer_id(4): replace(HOST, addresses=(other,))}
    own.look(view(**both))
    assert kept_fallback(file) == kept
    clock.now += NOTE_AGAIN_S
    own.look(view(**both), [peer_id(4)])
    assert kept_fallback(file).addresses == (other,)


def view(**stage: Any) -> SwarmView:
    here = {ME: CLIENT, **stage}
    return SwarmView(me=ME, stage=here, stages={0: here})


def test_a_peer_that_only_dials_out_dials_those_that_come_once() -> None:
    averager = Averager()
    own = ways("dial_out", averager)
    for _ in range(3):
        own.look(view(**{OPEN: HOST}))
    assert averager.dialled == [{OPEN: HOST.addresses}]
    own.look(view(**{SHUT: CLIENT}))
    assert averager.dialled[1:] == [{}]
    other = Averager()
    ways("public", other).look(view(**{OPEN: HOST}))
    assert not other.dialled


def test_a_stage_that_nobody_can_reach_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    own = ways("dial_out", Averager())
    with caplog.at_level(logging.WARNING):
        own.look(view())  # alone it trains and commits
        assert not caplog.messages
        for _ in range(3):
            own.look(view(**{SHUT: CLIENT}))
        (line,) = caplog.messages
        assert "all 2 peers of stage 0 can only dial out" in line and "--announce" in line
        own.look(view(**{SHUT: CLIENT, OPEN: HOST}))
        own.look(view(**{SHUT: CLIENT}))
        assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("at_start", "now", "lost"),
    [
        ("public", "dial_out", True),
        ("mapped", "dial_out", True),
        ("public", "public", False),
        ("public", "unknown", False),
        ("dial_out", "dial_out", False),
        ("unknown", "dial_out", True),
        ("unknown", "unknown", False),
        ("unknown", "public", False),
    ],
)
def test_one_that_passes_for_reachable_and_is_not_is_lost(
    at_start: ReachKind, now: ReachKind, lost: bool
) -> None:
    averager = Averager(now)
    own, at, said = ways(at_start, averager, by_others=at_start != "unknown"), 0.0, False
    for _ in range(5):
        at += 1e6 + CHECK_S
        own.lost(at)  # asks
        said = own.lost(at) or said
    assert said is lost
    first = {"dial_out": [], "unknown": [False]}.get(at_start, [True])
    assert averager.checks[:1] == first  # on whose word it counts as out of reach


def test_the_first_peer_of_a_swarm_asks_as_at_its_start_until_others_have_tried() -> None:
    averager = Averager("public")
    own = ways("public", averager, by_others=False)
    own.lost(2e6 + CHECK_S)
    assert averager.checks == [False]


def test_one_that_was_told_to_only_dial_out_is_not_lost() -> None:
    averager = Averager("dial_out")
    told = ways("unknown", averager, by_others=False, client_mode=True)
    assert not any(told.lost(1e9 + at) for at in range(9))
    assert not averager.checks
