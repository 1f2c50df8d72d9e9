"""What a monitor remembers of a swarm: losses, who came and went, faults, voids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.manifest_revisions import back_to
from dilocox.peer.chain.round_history import HistoryRow, ModelSample, NamedPeer, ToldHistory
from dilocox.peer.chain.stated_facts import MOST_VOIDS, more_voids
from dilocox.peer.monitor.history import MAX_REMEMBERED, MAX_SAMPLES, Samples, SwarmHistory
from tests.peer.fabricated import NOW, ToldSwarm, digest, peer_id, stage_record


def losses(swarm: ToldSwarm) -> dict[int, tuple[float | None, float | None]]:
    """Train and validation loss by round."""
    points = sorted(swarm.history.curve.points.items())
    return {number: (each.train, each.validation) for number, each in points}


def texts(swarm: ToldSwarm) -> list[str]:
    return [event.text for event in swarm.history.events.rows if event.kind == "fault"]


def test_losses_are_kept_by_round_of_several_heads_the_middle_one() -> None:
    swarm = ToldSwarm(replicas=4)
    first, second, third, liar = swarm.replicas
    swarm.replicas[liar] = replace(swarm.replicas[liar], round=10**9, val_round=10**9)
    for loss, head in ((2.0, first), (2.25, second), (9000.0, third)):
        swarm.replicas[head] = replace(swarm.replicas[head], train_loss=loss, tokens_per_s=1e12)
    swarm.look()
    assert losses(swarm) == {3: (None, 2.4), 4: (2.25, None)}
    assert swarm.history.train == (4, 2.25) and swarm.history.validation == (3, 2.4)
    for loss, head in zip((2.0, 2.1, 900.0), list(swarm.replicas)[:3], strict=True):
        swarm.replicas[head] = replace(swarm.replicas[head], round=4, val_round=3, val_loss=loss)
    swarm.look()
    assert swarm.history.validation == (3, 2.1)


def trained_and_back(tmp_path: Path, *, down: bool = False) -> ToldSwarm:
    """Losses up to round 24, then the operator went back to round 1; `down`: unwatched."""
    swarm = ToldSwarm(stages=1, replicas=2, spares=0)
    for number in range(24):
        told(swarm, number)
        swarm.commit(number)
        swarm.look()
    swarm.manifest = back_to(swarm.manifest, 1, [digest(0, 1)])
    if down:
        swarm.history.save(tmp_path / "kept.json")
        swarm.history = SwarmHistory.load(
            tmp_path / "kept.json", 1, swarm.manifest.root, swarm.at + 60
        )
    swarm.look()  # its heads tell of round 24 still
    return swarm


def told(swarm: ToldSwarm, number: int) -> None:
    """The heads tell of a round under way, and of the anchor before it."""
    for head, record in swarm.replicas.items():
        swarm.replicas[head] = replace(
            record, round=number, val_round=number - 1, train_loss=2.0, val_loss=3.0 - number / 10
        )


@pytest.mark.parametrize("down", [False, True])
def test_losses_of_rounds_that_the_operator_set_aside_leave_the_curve(
    tmp_path: Path, down: bool
) -> None:
    swarm = trained_and_back(tmp_path, down=down)
    assert swarm.history.validation == (1, pytest.approx(2.8))
    assert sorted(losses(swarm)) == [-1, 0, 1]
    told(swarm, 24)
    swarm.commit(24, branch="x", before=1)
    told(swarm, 25)
    swarm.look()
    assert sorted(losses(swarm)) == [-1, 0, 1, 24, 25]


def test_what_bootstraps_tell_of_rounds_that_were_set_aside_is_not_drawn(tmp_path: Path) -> None:
    swarm = trained_and_back(tmp_path)
    late = [HistoryRow(number, 0, "", NOW, 100, 2.0, 2.0) for number in (1, 2, 30)]
    swarm.history.told(
        ToldHistory(late, {}), swarm.manifest
    )  # one that has not heard of the rollback
    assert sorted(losses(swarm)) == [-1, 0, 1] and swarm.history.curve.told == 1


def test_what_is_newest_after_a_rollback_is_so_even_under_smaller_numbers(tmp_path: Path) -> None:
    swarm = trained_and_back(tmp_path)
    swarm.commit(2, branch="x", before=1)
    told(swarm, 3)
    swarm.look()
    assert swarm.history.validation == (2, pytest.approx(2.7))
    assert swarm.history.train == (3, 2.0)


def test_a_rollback_is_no_stall_and_its_tokens_are_not_counted(tmp_path: Path) -> None:
    swarm = trained_and_back(tmp_path)
    look = swarm.look(after_s=30.0)
    assert swarm.health(look).state == "training"
    assert swarm.status(look)["totals"]["tokens"] == 2 * 2 * 1000


def test_heads_that_evaluated_and_have_no_finite_loss_are_counted_as_long_as_they_say_so() -> None:
    swarm = ToldSwarm(replicas=5)
    fine, one, other, early, liar = swarm.replicas
    swarm.look()
    assert swarm.history.losses_not_finite == 0
    swarm.replicas[one] = replace(swarm.replicas[one], val_loss=None, val_round=4)
    swarm.replicas[other] = replace(swarm.replicas[other], val_loss=1e30, val_round=4)
    # nothing was evaluated yet, and a round that no other replica is near
    swarm.replicas[early] = replace(swarm.replicas[early], val_loss=None, val_round=-1)
    swarm.replicas[liar] = replace(swarm.replicas[liar], val_loss=None, val_round=10**9)
    swarm.look()
    assert swarm.history.losses_not_finite == 2
    assert swarm.history.validation == (3, 2.4)  # the last one that was a number
    swarm.replicas = {fine: swarm.replicas[fine]}
    swarm.look()
    assert swarm.history.losses_not_finite == 0


def test_peers_that_come_leave_and_fall_silent_are_counted() -> None:
    swarm = ToldSwarm(stages=2, replicas=1, spares=1)
    swarm.look()
    assert (swarm.history.joined_total, swarm.history.left_total) == (4, 0)
    polite, silent = peer_id(50), peer_id(150)
    swarm.stages[0][polite] = stage_record(state="left")
    swarm.look()
    del swarm.stages[0][polite], swarm.stages[1][silent]
    swarm.look()
    assert swarm.history.left_total == 2
    assert texts(swarm) == [f"peer {silent[-6:]} of stage 1 went silent"]
    swarm.stages[1][polite] = stage_record(state="joining")
    swarm.look()
    assert (swarm.history.joined_total, swarm.history.left_total) == (5, 2)
    swarm.stages[0][polite] = swarm.stages[1].pop(polite)  # who moves neither left nor joined
    swarm.look()
    assert (swarm.history.joined_total, swarm.history.left_total) == (5, 2)


def test_a_peer_that_comes_again_is_the_same_peer(tmp_path: Path) -> None:
    swarm = ToldSwarm(stages=1, replicas=2, spares=0)
    everybody = dict(swarm.stages[0])
    for _ in range(3):  # as at a pause or a revision
        swarm.stages[0] = dict(everybody)
        swarm.look()
        swarm.stages[0].clear()
        swarm.look()
    history = swarm.history
    assert (history.peers_total, history.present) == (2, {})
    history.save(tmp_path / "kept.json")
    swarm.history = SwarmHistory.load(tmp_path / "kept.json", 1, swarm.manifest.digest, NOW)
    swarm.stages[0] = dict(everybody)
    totals = swarm.status(swarm.look())["totals"]
    assert (totals["joined"], totals["left"]) == (2, 0)
    # for the alert on peers that leave, each return balances a leaving
    assert (swarm.history.joined_total, swarm.history.left_total) == (8, 6)


def test_no_answer_of_the_dht_changes_nothing() -> None:
    swarm = ToldSwarm()
    swarm.look()
    swarm.answered = False
    for peers in swarm.stages.values():
        peers.clear()
    swarm.look()
    assert swarm.history.left_total == 0 and texts(swarm) == []


def test_a_fault_of_a_replica_is_told_once() -> None:
    swarm = ToldSwarm()
    head = next(iter(swarm.replicas))
    swarm.replicas[head] = replace(swarm.replicas[head], last_fault="stage 1 silent")
    swarm.look()  # from before the watch
    assert swarm.history.faults_total == 0
    for _ in range(3):
        fault = "stage 2 closed, epoch 1"
        swarm.replicas[head] = replace(swarm.replicas[head], last_fault=fault, epoch=2)
        swarm.look()
    assert swarm.history.faults_total == 1
    assert texts(swarm) == [f"replica of {head[-6:]}: the link of stage 2 broke"]
    fault = "stage 2 closed, epoch 2"  # of who took over
    swarm.replicas[head] = replace(swarm.replicas[head], last_fault=fault, epoch=3)
    swarm.look()
    assert swarm.history.faults_total == 2
    assert [event.count for event in swarm.history.events.rows if event.kind == "fault"] == [2]


def test_of_one_peer_no_more_voids_count_than_there_can_be_between_two_looks() -> None:
    """One that said 0 and 2^53 in turns made a row of the history that nobody could read."""
    peers = {"a": stage_record(voids=2**53), "b": stage_record(voids=1)}
    assert more_voids(peers, {"a": 0, "b": 1}) == MOST_VOIDS / 2


def test_voids_are_a_mean_over_the_peers_of_a_stage() -> None:
    swarm = ToldSwarm(stages=1, replicas=2, spares=0)
    swarm.look()
    first, second = swarm.stages[0]
    for peer in (first, second):  # the same void, told one look after the other
        swarm.stages[0][peer] = stage_record(voids=1)
        swarm.look()
    assert swarm.history.voids == [1.0]
    assert texts(swarm) == ["a round of stage 0 was void"]
    swarm.stages[0][first] = stage_record(voids=0)  # it started anew
    swarm.look()
    assert swarm.history.voids == [1.0]


def test_the_share_of_waiting_is_a_mean_within_its_bounds() -> None:
    swarm = ToldSwarm(replicas=0)
    assert swarm.look().waiting_share is None
    swarm = ToldSwarm(replicas=3)
    for share, head in zip((0.01, 0.05, 1e308), list(swarm.replicas), strict=True):
        swarm.replicas[head] = replace(swarm.replicas[head], waiting_share=share)
    assert swarm.look().waiting_share == pytest.approx((0.01 + 0.05 + 1) / 3)


def test_samples_double_their_spacing_and_keep_the_mean() -> None:
    samples = Samples()
    for number in range(5 * MAX_SAMPLES):
        samples.add(NOW + 5.0 * number, 100.0 + number % 2, 4)
    assert len(samples.rows) <= MAX_SAMPLES + 1 and samples.spacing_s >= 20
    assert samples.rows[0][0] == NOW
    mean = sum(speed for _, speed, _ in samples.rows) / len(samples.rows)
    assert mean == pytest.approx(100.5, abs=0.01)


def test_the_name_of_a_peer_is_remembered_when_it_has_left(tmp_path: Path) -> None:
    swarm = ToldSwarm(stages=1, replicas=2, spares=0)
    one, other = swarm.stages[0]
    swarm.stages[0][one] = stage_record(name="Ada\x1b[2J", team="Foxes" * 9)
    swarm.look()
    swarm.commit(0)
    del swarm.stages[0][one]
    swarm.look()
    assert texts(swarm) == [f"peer Ada [2J ({one[-6:]}) of stage 0 went silent"]
    swarm.history.save(tmp_path / "kept.json")
    swarm.history = SwarmHistory.load(tmp_path / "kept.json", 1, swarm.manifest.root, NOW + 9999)
    rows = {row["id"]: row for row in swarm.history.contributions(100)}
    assert (rows[one]["name"], rows[one]["here"]) == ("Ada [2J", False)
    assert len(rows[one]["team"]) == 24 and rows[one]["since"] == NOW + 5
    assert (rows[other]["name"], rows[other]["here"]) == ("", True)


def test_a_late_monitor_has_the_names_that_bootstraps_keep_and_live_records_go_first() -> None:
    swarm = ToldSwarm(stages=1, replicas=2, spares=0)
    one, other = swarm.stages[0]
    swarm.commit(0)
    swarm.stages[0] = {one: stage_record(name="Ada")}
    swarm.look()
    names = {peer: NamedPeer(peer, "Bob", "Foxes") for peer in (one, other)}
    swarm.history.told(ToldHistory([], names), swarm.manifest)
    rows = {row["id"]: row for row in swarm.history.contributions(100)}
    assert (rows[one]["name"], rows[one]["team"]) == ("Ada", "")
    assert (rows[other]["name"], rows[other]["team"], rows[other]["since"]) == (
        "Bob",
        "Foxes",
        None,
    )
    swarm.stages[0][other] = stage_record(name="Eve")
    look = swarm.look()
    assert swarm.history.stated[other] == ("Eve", "", look.at)


def test_a_late_monitor_has_what_the_model_wrote_in_rounds_that_count() -> None:
    swarm = ToldSwarm(stages=1)
    for number in range(9):
        swarm.commit(number)
    swarm.look()
    wrote = {n: ModelSample(n, 0, 100, NOW, "Once", " upon") for n in (1, 5, 700)}
    swarm.history.told(ToldHistory([], {}, wrote, 51_790_336), swarm.manifest)
    assert [each.round for each in swarm.history.samples_of("Once")] == [5, 1]
    assert swarm.status(swarm.look())["trained"]["parameters"] == 51_790_336
    swarm.manifest = back_to(swarm.manifest, 2, [digest(0, 2)])
    swarm.look()
    swarm.history.told(
        ToldHistory([], {}, wrote), swarm.manifest
    )  # by one that has not heard of it
    assert [each.round for each in swarm.history.samples_of("Once")] == [1]
    assert swarm.history.parameters == 51_790_336


def test_a_file_of_an_older_version_is_read_and_its_peers_have_no_name(tmp_path: Path) -> None:
    swarm = ToldSwarm(stages=1)
    swarm.look()
    swarm.commit(0)
    swarm.history.save(tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    del kept["stated"]
    for stage in kept["stages"]:
        del stage["token_seconds"]
        for each in [stage["head"], *stage["recent"].values()]:
            del each["token_seconds"]
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    history = SwarmHistory.load(tmp_path / "kept.json", 1, swarm.manifest.root, NOW)
    row = history.contributions(100)[0]
    assert (row["tokens"], row["hours"], row["name"], row["since"]) == (1000, 0.0, "", None)


def test_names_of_ever_new_peers_are_bounded() -> None:
    swarm = ToldSwarm(stages=1, replicas=1, spares=0)
    for crowd in range(3):
        swarm.stages[0] |= {
            peer_id(10_000 * (1 + crowd) + number): stage_record(name="x") for number in range(2000)
        }
        swarm.look()
    assert len(swarm.history.stated) == MAX_REMEMBERED


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    swarm = ToldSwarm()
    swarm.look()
    for number in range(5):
        swarm.commit(number)
        swarm.look()
    head = next(iter(swarm.replicas))
    swarm.replicas[head] = replace(swarm.replicas[head], last_fault="stage 1 silent")
    swarm.look()
    before, file = swarm.history, tmp_path / "kept.json"
    before.save(file)
    again = SwarmHistory.load(file, 3, swarm.manifest.digest, NOW + 9999)
    assert again == replace(before, watched_since=NOW + 9999, seen_at=None)
    assert again.curve.points and again.stages[2].recent and again.stages[0].progress_at
    swarm.history = again
    totals = (again.joined_total, again.left_total, again.faults_total)
    swarm.look()
    assert (again.joined_total, again.left_total, again.faults_total) == totals


@pytest.mark.parametrize(
    "other",
    ["", "{}", '{"version": 1', "[]", {"version": 1}, {"root": "other"}, {"stages": []}],
    ids=str,
)
def test_a_file_that_is_damaged_or_of_another_version_or_manifest_is_set_aside_with_a_warning(
    tmp_path: Path, other: str | dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kept.json"
    SwarmHistory.begun(2, "root", NOW).save(file)
    damaged = isinstance(other, str)
    file.write_text(other if damaged else json.dumps(json.loads(file.read_text()) | other))
    before = file.read_bytes()
    made = SwarmHistory.load(file, 2, "root", NOW + 1)
    assert made.since == NOW + 1 and made.curve.points == {} and len(made.stages) == 2
    made.save(file)
    assert file.with_name("kept.json.old").read_bytes() == before
    (warning,) = caplog.messages
    assert "set aside as kept.json.old" in warning
