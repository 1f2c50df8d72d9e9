"""The judge of fault campaigns itself, without a swarm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.peer.rounds.ballots import SignedVote
from dilocox.peer.rounds.vote_count import Vote
from tests.swarm import verdict
from tests.swarm.altered import Shown
from tests.swarm.campaign import KINDS, PHASES, ROLES, Fault, Outcome, draw
from tests.swarm.harness import Peer, ProcessSwarm

OUTCOME = {
    "number": 1,
    "fault": Fault(kind="kill", role="last", phase="forward"),
    "victim": "peer-1",
    "peer_id": "victim",
    "hit_at": 100.0,
    "spare": True,
    "landed": "forward",
    "detected_s": 3.0,
    "reason": "silent",
    "splice_s": 1.0,
    "stop_s": 4.0,
    "back_s": 20.0,
}


def outcome(**changes: Any) -> Outcome:
    return Outcome(**(OUTCOME | changes))


def swarm_of(**faults: list[tuple[float, str]]) -> ProcessSwarm:
    """Heads by peer id with the faults that they told: (time, peer)."""
    heads: list[Peer] = []
    for peer_id, told in faults.items():
        events = [{"event": "fault", "time": time, "peer": peer} for time, peer in told]
        events.append({"event": "training", "time": 0.0})
        head = Peer(name=peer_id, state=Path(peer_id), child=cast(Any, None), events=events)
        head.__dict__["peer_id"] = peer_id
        heads.append(head)
    silence = SimpleNamespace(deadlines=SimpleNamespace(silence_s=3.0), stages=1)
    swarm = SimpleNamespace(
        of_stage=lambda _: heads,
        peers=heads,
        manifest=silence,
        folder=Path("nowhere"),
        assert_equal_chains=lambda: None,
    )
    return cast(ProcessSwarm, swarm)


def test_every_kind_role_and_phase_is_drawn_equally_often_and_nothing_twice() -> None:
    faults = draw(20, seed=1)
    assert len(set(faults)) == 20
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 4)
    assert Counter(fault.phase for fault in faults) == dict.fromkeys(PHASES, 5)
    assert set(Counter(fault.role for fault in faults).values()) == {6, 7}
    assert {fault.role for fault in faults} == set(ROLES)
    assert draw(20, seed=1) == faults != draw(20, seed=2)


def test_a_fault_told_of_a_peer_that_nobody_hurt_is_false() -> None:
    told = [(104.0, "victim"), (110.0, "other"), (121.0, "victim")]
    found = list(verdict.false_detections(swarm_of(head=told), [outcome()]))
    assert len(found) == 2
    assert "'time': 110.0" in found[0]
    assert "'time': 121.0" in found[1]


def test_a_head_that_was_cut_off_itself_may_miss_its_members() -> None:
    assert not list(verdict.false_detections(swarm_of(victim=[(104.0, "other")]), [outcome()]))


def test_a_long_stop_is_a_flaw_only_beside_a_spare() -> None:
    swarm = swarm_of(head=[])
    assert not verdict.flaws(swarm, [outcome(stop_s=12.9)])
    assert verdict.flaws(swarm, [outcome(stop_s=13.1)])
    assert verdict.flaws(swarm, [outcome(stop_s=None)])
    assert not verdict.flaws(swarm, [outcome(stop_s=60.0, spare=False)])


def test_the_median_splice_counts() -> None:
    slow, quick = outcome(splice_s=9.0), outcome(splice_s=0.5)
    assert not verdict.flaws(swarm_of(head=[]), [slow, quick, quick])
    assert verdict.flaws(swarm_of(head=[]), [slow, slow, quick])


def test_a_peer_that_started_again_unhurt_is_a_flaw() -> None:
    swarm = swarm_of(head=[])
    swarm.peers[0].events.append({"event": "training", "time": 50.0})
    assert verdict.flaws(swarm, [outcome()])
    assert not verdict.flaws(swarm, [outcome(victim="head")])


def test_losses_are_compared_at_equal_tokens() -> None:
    reference = [(0, 6.0), (100, 4.0), (200, 3.0), (400, 2.0)]
    curve = [(0, 6.0), (50, 5.5), (100, 4.0), (150, 3.5), (300, 2.5)]
    assert verdict.loss_beside(curve, reference) == pytest.approx((10 / 3, 10 / 3))
    with pytest.raises(ValueError, match="no loss at 500 tokens"):
        verdict.loss_beside([(500, 2.0)], reference)


def test_what_a_peer_shows_is_seen_from_outside(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    assert shown.phase == "waiting"
    (tmp_path / "steps").write_bytes(b"\0" * 20)  # two whole times and a half
    with (tmp_path / "phase").open("r+b") as file:
        file.write(b"\2")
    shown.look()
    assert shown.phase == "backward"
    assert shown.steps == [0.0, 0.0]
    shown.look()
    assert shown.steps == [0.0, 0.0]


def test_the_votes_that_a_dead_peer_left_on_its_disk_are_read(tmp_path: Path) -> None:
    state = tmp_path / "peer-1"
    left = cast("Peer", SimpleNamespace(state=state))
    assert Peer.votes(left, 7) == []
    log = state / "run-stage0" / "log"
    log.mkdir(parents=True)
    cast_ = [Vote(voter="me", digest=None, missed=("b",)), Vote(voter="me", digest="d" * 64)]
    for attempt, vote in enumerate(cast_):
        signed = SignedVote(vote=vote, public_key=b"key", signature=b"signature")
        (log / f"00000007-{attempt}.vote").write_bytes(signed.to_bytes())
    assert Peer.votes(left, 7) == cast_ and Peer.votes(left, 8) == []
