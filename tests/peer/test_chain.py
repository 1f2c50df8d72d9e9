"""What the follower of a chain hands to the training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.averager import StageAverager
from dilocox.peer.averaging import Applied
from dilocox.peer.chain import ChainFollower
from dilocox.peer.events import Committed, EventQueue
from dilocox.peer.view import SwarmView
from tests.peer.donors import Donor


def follower(donor: Donor, events: EventQueue, *, me: str, sent: int | None) -> ChainFollower:
    def apply(round_number: int, *, current: int, with_own: bool) -> Any:
        digest = donor.log.head().digest
        done = Applied(
            round=round_number, digest=digest, anchor_sha256="a" * 64, payload_bytes=1, seconds=0.0
        )
        return SimpleNamespace(done=lambda: True, result=lambda timeout: done)

    averager = SimpleNamespace(peer_id=me, apply=apply)
    return ChainFollower(
        averager=cast("StageAverager", averager),
        log=donor.log,
        events=events,
        applied=-1,
        anchor_sha256="b" * 64,
        state_bytes=1 << 30,
        record_lifetime_s=10.0,
        sent_round=lambda: sent,
    )


@pytest.mark.parametrize("sent", [None, 0])
def test_a_record_that_names_this_peer_comes_with_what_its_own_part_is_made_of(
    identities: list[Identity], tmp_path: Path, sent: int | None
) -> None:
    """In the averager's buffers while the send is under way, else in the record's means: a send
    that was presumed void is named by a late record."""
    donor = Donor(identities[0], tmp_path)
    donor.train(0)
    events = EventQueue()
    chain = follower(donor, events, me=donor.peer, sent=sent)
    view = SwarmView(me=donor.peer)
    for _ in range(3):
        chain.tick(view, exchanging=False)
    event = events.get()
    assert isinstance(event, Committed)
    assert event.own_ready == (sent == 0)
    logged = donor.log.read(0)
    assert logged is not None
    if sent is None:
        assert event.record == logged
    else:
        assert event.record == replace(logged, means=())
