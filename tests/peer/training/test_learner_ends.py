"""How the loop ends and changes its rules: nothing learnt is lost, and nobody waits for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault, UnreadableManifest
from dilocox.peer.averaging.coordinator import ChildDied
from dilocox.peer.averaging.events import Failed, Voided
from dilocox.peer.training import loop as loop_module
from tests.peer.loops import STEP_TOKENS, Loop, fill_disk, manifest


# ---- leaving -------------------------------------------------------------------------------------
def test_a_leaver_waits_for_the_exchange_in_flight_and_keeps_all_on_disk(loop: Loop) -> None:
    loop.end_round(2)
    loop.train()
    loop.stop.set()  # which must not end this wait

    loop.fake.events.to_come.extend([lambda: None, loop.own_record])
    loop.learner.leave(ended=False)
    assert loop.fake.told[-1] == ("leave",)
    assert loop.meter.state == "leaving"
    again = Loop(loop.folder)
    assert again.snapshots.found
    assert (again.learner.round, again.model.merge.tokens) == (0, STEP_TOKENS)
    assert torch.equal(again.live, loop.live)


def test_a_leaver_whose_exchange_is_not_decided_takes_it_up_after_its_return(loop: Loop) -> None:
    loop.end_round(2)
    (send,) = loop.model.merge.in_flight.values()
    loop.learner.leave(ended=False, limit_s=0.05)
    again = Loop(loop.folder)
    assert torch.equal(again.model.merge.in_flight[0].message, send.message)
    assert torch.equal(again.buffers.message, send.message)
    assert again.learner.unsent


def test_at_the_end_of_the_run_a_bootstrap_gets_the_time_to_keep_the_last_record(
    loop: Loop,
) -> None:
    def kept() -> None:
        loop.fake.archived = True

    loop.fake.archived = False
    loop.fake.events.to_come.extend([lambda: None, kept])
    loop.learner.leave(ended=True)
    assert loop.fake.told == [("leave",), ("announce",)] and loop.fake.archived


def test_a_disk_that_is_full_at_the_end_keeps_no_record_from_the_others(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> None:
        loop.fake.archived = True

    fill_disk(monkeypatch)
    loop.fake.archived = False
    loop.fake.events.to_come.extend([lambda: None, kept])
    with pytest.raises(EnvironmentFault, match="no space left on the disk"):
        loop.learner.leave(ended=True)
    assert loop.fake.told == [("leave",), ("announce",)] and loop.fake.archived


@pytest.mark.parametrize("alone", [True, False])
def test_the_last_peer_of_a_stage_gives_a_bootstrap_a_moment_to_keep_its_last_record(
    tmp_path: Path, alone: bool
) -> None:
    def kept() -> None:
        loop.fake.archived = True

    loop = Loop(tmp_path)
    loop.fake.archived, loop.fake.holds_alone = False, alone
    loop.fake.events.to_come.extend([lambda: None, kept])
    loop.stop.set()
    loop.learner.leave(ended=False)
    assert loop.fake.archived is alone, "others hold it, too"


def test_a_child_that_dies_meanwhile_makes_no_fault_of_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.fake.archived, loop.fake.holds_alone = False, True
    failed = Failed(error=ChildDied("the DHT process or p2pd has died"))
    loop.fake.events.to_come.append(lambda: loop.fake.events.put(failed))
    loop.stop.set()
    loop.learner.leave(ended=False)
    assert Loop(loop.folder).snapshots.found


def test_a_child_that_dies_while_an_exchange_is_waited_for_costs_no_snapshot(loop: Loop) -> None:
    loop.end_round(2)
    loop.train()
    failed = Failed(error=ChildDied("the DHT process or p2pd has died"))
    loop.fake.events.to_come.append(lambda: loop.fake.events.put(failed))
    with pytest.raises(ChildDied):
        loop.learner.leave(ended=False)
    again = Loop(loop.folder)
    assert torch.equal(again.live, loop.live) and again.model.merge.in_flight


def test_who_must_end_keeps_its_state_if_that_is_whole(loop: Loop) -> None:
    loop.train(2)
    loop.fake.alive = False
    loop.learner.keep()
    assert torch.equal(Loop(loop.folder).live, loop.live)


def test_who_must_end_keeps_no_state_that_the_averaging_process_was_changing(loop: Loop) -> None:
    loop.train(2)
    loop.fake.events.lease.offer()
    assert loop.fake.events.lease.take()
    loop.fake.alive = False
    loop.learner.keep()
    assert not Loop(loop.folder).snapshots.found


@pytest.mark.parametrize("case", ["none keeps it", "told to leave", "no end of the run"])
def test_nobody_waits_long_for_a_bootstrap_that_keeps_nothing(tmp_path: Path, case: str) -> None:
    run = manifest(deadlines={"heartbeat_s": 0.5, "exchange_s": 3.0})
    loop = Loop(tmp_path, run)
    loop.fake.archived = False
    if case == "told to leave":
        loop.stop.set()
    began = time.monotonic()
    loop.learner.leave(ended=case != "no end of the run")
    took_s = time.monotonic() - began
    assert 3.0 <= took_s < 6.0 if case == "none keeps it" else took_s < 1.5


def test_what_a_peer_read_before_a_restart_stays_known_until_a_head_reads_on(loop: Loop) -> None:
    loop.learner.data_state = lambda: {"part": 3, "used": 9}
    loop.learner.leave(ended=False)
    again = Loop(loop.folder)
    assert again.learner.data_state() == {"part": 3, "used": 9}
    again.learner.leave(ended=False)
    assert Loop(loop.folder).learner.data_state() == {"part": 3, "used": 9}


# ---- the operator --------------------------------------------------------------------------------
def test_new_rules_wait_for_the_send_in_flight_and_nothing_new_is_sent(loop: Loop) -> None:
    loop.end_round(2)
    loop.train(1)
    loop.fake.revised, loop.fake.due = True, (1, 200.0)
    loop.learner.between_steps()  # its message may be in a record under the old rules
    loop.fake.events.put(loop.committed(0, 0.1, mine=True))
    with pytest.raises(loop_module.Revised):
        loop.learner.between_steps()
    assert [told[1] for told in loop.fake.of_kind("submit")] == [0]
    assert loop.model.merge.tokens == STEP_TOKENS, "what was learnt since is kept"


def test_new_rules_reach_a_paused_peer_whose_send_is_in_flight(tmp_path: Path) -> None:
    loop = Loop(tmp_path, manifest(outer={"apply": "round_end"}))
    loop.end_round(2)
    loop.fake.paused = True
    loop.fake.events.put(loop.committed(0, 0.1, mine=True))
    loop.learner.between_steps()
    assert loop.model.merge.in_flight, "records are taken at the end of the round"
    loop.fake.revised = True
    with pytest.raises(loop_module.Revised):
        loop.learner.between_steps()
    assert loop.learner.round == 0


def test_who_cannot_read_the_new_rules_ends_with_the_reason_when_its_send_is_decided(
    loop: Loop,
) -> None:
    loop.end_round(2)
    loop.fake.revised, loop.fake.cannot_follow = True, UnreadableManifest("update dilocox")
    loop.learner.between_steps()
    loop.fake.events.put(loop.committed(0, 0.1, mine=True))
    with pytest.raises(UnreadableManifest, match="update dilocox"):
        loop.learner.between_steps()


def test_new_rules_reach_a_peer_that_is_still_joining(loop: Loop) -> None:
    loop.fake.revised = True
    with pytest.raises(loop_module.Revised):
        loop.learner.join()


def test_in_a_run_that_ends_a_peer_is_done_when_all_that_it_learnt_is_in_a_record(
    loop: Loop,
) -> None:
    loop.train(1)
    loop.fake.ending = True
    assert not loop.learner.finished, "its replica trains"
    loop.fake.stopped = True
    assert not loop.learner.finished, "there is something to be sent"
    loop.fake.due = (0, 100.0)
    loop.learner.between_steps()
    assert not loop.learner.finished, "its record is to come"
    loop.fake.events.put(Voided(round=0, reason="nobody came", certain=True))
    loop.learner.between_steps()
    assert not loop.learner.finished, "it goes with another round"
    loop.fake.due = (1, 200.0)
    loop.learner.between_steps()
    loop.fake.events.put(loop.committed(1, 0.1, mine=True))
    loop.learner.between_steps()
    assert loop.learner.finished
    assert loop.model.merge.tokens == loop.model.merge.lost_tokens == 0


def test_who_has_nothing_to_send_leaves_a_run_that_ends_at_once(loop: Loop) -> None:
    assert not loop.learner.finished
    loop.fake.ending = loop.fake.stopped = True
    assert loop.learner.finished


def test_under_round_end_who_makes_the_last_steps_lends_the_anchor_as_no_round_may_end(
    tmp_path: Path,
) -> None:
    """A member that had sent with the last round took its record after a bell of its own."""
    loop = Loop(tmp_path, manifest(outer={"apply": "round_end"}))
    loop.train()
    loop.fake.ending = True
    loop.learner.between_steps()
    assert loop.fake.events.lease.take()


def test_nobody_waits_for_ever_for_the_last_record_of_a_run(loop: Loop) -> None:
    loop.train(1)
    loop.fake.ending = loop.fake.stopped = True
    loop.fake.end_limit_s = 0.0
    loop.learner.finished  # noqa: B018 - the clock starts
    assert loop.learner.finished


@pytest.mark.parametrize("apply", ["arrival", "round_end"])
def test_who_stands_still_takes_the_last_record_which_no_round_follows(
    tmp_path: Path, apply: str
) -> None:
    loop = Loop(tmp_path, manifest(outer={"apply": apply}))
    loop.end_round(2)
    loop.fake.events.put(loop.committed(0, 0.1, mine=True))
    loop.fake.ending = loop.fake.stopped = True
    loop.learner.stand_still()
    assert loop.learner.finished
