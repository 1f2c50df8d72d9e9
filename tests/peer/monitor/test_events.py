"""Events of a run as people read them: who came, moved and left, what healed, what is reached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dilocox.dht.manifest_revisions import back_to, in_state, revised
from dilocox.peer.monitor.events import MAX_EVENTS, EventLog
from dilocox.peer.monitor.history import SwarmHistory
from tests.peer.fabricated import NOW, ToldSwarm, digest, manifest_of, peer_id, stage_record


def told(swarm: ToldSwarm) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in swarm.history.events.rows]


def test_what_was_there_before_the_watch_is_no_event() -> None:
    swarm = ToldSwarm()
    swarm.look()
    swarm.look()
    assert told(swarm) == []


def test_who_comes_moves_and_leaves_is_told() -> None:
    swarm = ToldSwarm(stages=2, replicas=1, spares=1)
    swarm.look()
    new, spare = peer_id(7777), peer_id(50)
    swarm.stages[0][new] = stage_record(state="joining")
    swarm.look()
    swarm.stages[1][spare] = swarm.stages[0].pop(spare)
    swarm.look()
    swarm.stages[0][new] = stage_record(state="left")
    swarm.look()
    assert told(swarm) == [
        ("joined", f"peer {new[-6:]} joined stage 0"),
        ("moved", f"peer {spare[-6:]} moved from stage 0 to stage 1"),
        ("left", f"peer {new[-6:]} left stage 0"),
    ]


def test_a_crowd_is_one_line() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    swarm.look()
    for number in range(30):
        swarm.stages[0][peer_id(5000 + number)] = stage_record(state="spare")
    swarm.look()
    assert told(swarm) == [("joined", "30 peers joined")]


def test_a_spare_that_takes_over_heals_a_replica() -> None:
    swarm = ToldSwarm(stages=2, replicas=1, spares=1)
    swarm.look()
    head, lost, spare = swarm.peer(0, 0), swarm.peer(1, 0), peer_id(150)
    del swarm.stages[1][lost]
    swarm.look()
    swarm.replicas[head] = replace(swarm.replicas[head], members=(head, spare), epoch=2)
    swarm.look()
    assert told(swarm) == [
        ("fault", f"peer {lost[-6:]} of stage 1 went silent"),
        ("healed", f"peer {spare[-6:]} took over stage 1 from {lost[-6:]}"),
    ]


def test_what_happens_again_and_again_is_one_line_with_a_number() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    swarm.look()
    (peer,) = swarm.stages[0]
    for voids in range(1, 6):
        swarm.stages[0][peer] = stage_record(voids=voids)
        swarm.look()
    (event,) = swarm.history.events.rows
    assert (event.text, event.count) == ("a round of stage 0 was void", 5)
    assert event.at == swarm.at  # of the last time
    assert swarm.status(swarm.look())["events"][0]["count"] == 5


def test_what_the_operator_changes_is_told_with_its_revision() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    swarm.look()
    for following in (
        in_state(swarm.manifest, "paused"),
        in_state(in_state(swarm.manifest, "paused"), "running"),
    ):
        swarm.manifest = following
        swarm.look()
    swarm.manifest = back_to(swarm.manifest, 1, [digest(0, 1)])
    swarm.look()
    wanted = replace(swarm.manifest, end_tokens=20_000_000)
    swarm.manifest = revised(swarm.manifest, wanted)
    swarm.look()
    swarm.manifest = revised(swarm.manifest, replace(swarm.manifest, about="for all"))
    swarm.look()
    assert [text for _, text in told(swarm)] == [
        "the operator paused the run (revision 1)",
        "the operator resumed the run (revision 2)",
        "the operator went back to round 1 (revision 3)",
        "the operator changed the run's values (revision 4)",
        "the operator revised the run (revision 5)",
    ]


def test_tenths_of_the_run_and_clearly_better_losses_are_milestones() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    swarm.manifest = manifest_of(1, end_tokens=10_000)
    (head,) = swarm.replicas
    for number, loss in enumerate((3.0, 2.99, 2.5, 2.49)):
        record = replace(swarm.replicas[head], round=number, val_round=number - 1, val_loss=loss)
        swarm.replicas[head] = record
        swarm.look()
        swarm.commit(number, tokens=600)
    swarm.look()
    assert told(swarm) == [
        ("milestone", "10 % of the tokens are trained"),
        ("milestone", "validation loss 2.500 after round 1, the best so far"),
        ("milestone", "20 % of the tokens are trained"),
    ]


def test_a_monitor_that_starts_late_does_not_date_old_milestones_today() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    swarm.commit(0, tokens=6_000_000)
    chain, swarm.history = swarm.history, SwarmHistory.begun(1, swarm.manifest.digest, NOW)
    swarm.look()  # its chain is not walked yet
    swarm.history.stages = chain.stages
    swarm.look()
    assert told(swarm) == []


def test_events_outlive_a_restart_and_are_bounded(tmp_path: Path) -> None:
    log = EventLog()
    for number in range(3 * MAX_EVENTS):
        log.add(NOW, "fault", f"fault {number}")
    assert len(log.rows) == MAX_EVENTS and log.rows[-1].text == f"fault {3 * MAX_EVENTS - 1}"
    swarm = ToldSwarm()
    swarm.look()
    swarm.history.events.rows = log.rows
    swarm.history.save(tmp_path / "kept.json")
    again = SwarmHistory.load(tmp_path / "kept.json", 3, swarm.manifest.digest, NOW)
    assert again.events == swarm.history.events
