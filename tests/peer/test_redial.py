"""Whom a peer that only dials out keeps ways open to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilocox.dht.records import StageRecord
from dilocox.peer import redial
from dilocox.peer.redial import dial_targets, relays_between
from tests.peer.fabricated import peer_id, stage_record

ME = peer_id(99)


def host(number: int, **changes: object) -> tuple[str, StageRecord]:
    peer = peer_id(number)
    address = f"/ip4/198.51.100.{number}/tcp/31337/p2p/{peer}"
    return peer, replace(stage_record(), addresses=(address,), **changes)  # type: ignore[arg-type]


def test_those_who_may_call_it_come_first() -> None:
    stages = {stage: dict([host(stage)]) for stage in range(6)}
    assert list(dial_targets(stages, ME, 4)) == [peer_id(n) for n in (4, 3, 5, 0, 2, 1)]


def test_they_are_bounded() -> None:
    stages = {0: dict(host(number) for number in range(1, 90))}
    assert len(dial_targets(stages, ME, 0)) == redial.MAX_DIALLED


def test_nobody_is_dialled_who_cannot_be_or_is_gone_or_names_another() -> None:
    liar, theirs = host(5)
    stages = {
        0: dict(
            [
                host(1, client_mode=True),
                host(2, state="left"),
                (peer_id(3), replace(stage_record(), addresses=())),
                (ME, host(4)[1]),
                (peer_id(6), theirs),
                (peer_id(7), replace(theirs, addresses=("nonsense", f"/ip4/x/udp/1/p2p/{liar}"))),
            ]
        )
    }
    assert dial_targets(stages, ME, 0) == {}


def test_between_two_that_only_dial_out_those_pass_letters_on_whom_both_have_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_home, far = host(50, client_mode=True), host(51, client_mode=True)
    stages = {
        0: dict([at_home, host(1)]),
        1: dict([host(2)]),
        2: dict([far, host(3, state="left")]),
    }
    orders = [relays_between(stages, at_home[0], 0, far[0]) for _ in range(50)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted((peer_id(1), peer_id(2))))}
    assert len({tuple(order) for order in orders}) == 2, "the same are asked again and again"
    assert relays_between(stages, at_home[0], 0, peer_id(2)) == [], "it can be dialled"
    assert relays_between(stages, at_home[0], 0, peer_id(77)) == []
    monkeypatch.setattr(redial, "MAX_DIALLED", 1)  # each keeps ways to those of its own stage
    assert relays_between(stages, at_home[0], 0, far[0]) == []
