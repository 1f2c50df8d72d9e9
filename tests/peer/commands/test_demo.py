"""The demo's own logic: its figures, and the commands that it starts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer import os_process
from dilocox.peer.commands import demo
from dilocox.peer.commands.demo import (
    Demo,
    DemoResult,
    SwarmTable,
    WatchedPeer,
    clear,
    demo_manifest,
    demo_result,
    exported_round,
    loss_told,
    run_demo,
    swarm_table,
)
from dilocox.peer.options import DemoOptions
from dilocox.peer.os_process import Child, start_command

OPTIONS = DemoOptions(
    replicas=2, stages=2, rounds=3, folder=Path("x"), json_file=None, device="cpu", seed=5
)


def line(round_number: int, digest: str = "d", anchor: str = "a") -> dict[str, Any]:
    return {
        "round": round_number,
        "digest": digest,
        "anchor_sha256": anchor,
        "chain_tokens": 1000 * (round_number + 1),
        "sent_bytes": 100 * (round_number + 1),
        "fp16_bytes": 400,
        "members": 2,
        "train_loss": 3.0,
        "outcome": "counted",
    }


def watched(*rounds: dict[str, Any], stage: int = 0, **facts: Any) -> WatchedPeer:
    return WatchedPeer(
        name="p",
        state=Path("s"),
        child=cast("Child", None),
        stage=stage,
        rounds=list(rounds),
        status={"waiting_share": facts.pop("waiting_share", 0.0)} | facts.pop("status", {}),
        **facts,
    )


def result(*peers: WatchedPeer) -> DemoResult:
    return demo_result(peers, None, None, 60.0)


def test_rounds_and_tokens_are_those_of_stage_0_and_bytes_those_of_all_stages() -> None:
    first = watched(line(0), line(1), training_s=10.0, waiting_share=0.02, losses={-1: 5.5, 0: 4.0})
    second = watched(line(1), training_s=10.0, voids=2)
    last = watched(line(0), line(1), line(2), stage=1, training_s=90.0, waiting_share=0.04)
    found = result(first, second, last)
    assert (found.stages, found.replicas) == (2, 2)
    assert (found.rounds_committed, found.rounds_void) == (2, 2)
    assert (found.tokens, found.tokens_per_s) == (2000, 200.0)
    assert found.waiting_share == pytest.approx(0.02)
    assert found.bytes_sent_per_round == pytest.approx((300 + 600) / 5)
    assert found.bytes_uploaded_per_round == pytest.approx((300 + 200 + 600) / 6)
    assert found.bytes_fp16_per_round == 400
    assert (found.val_loss_first, found.val_loss_export, found.export) == (5.5, None, "")


def test_what_a_peer_served_or_did_not_take_part_in_is_not_sent_for_averages() -> None:
    served, late = (
        line(0) | {"sent_bytes": 9000},
        line(0) | {"outcome": "followed", "sent_bytes": 0},
    )
    found = result(watched(served), watched(line(0)), watched(late))
    assert found.bytes_sent_per_round == 100
    assert found.bytes_uploaded_per_round == pytest.approx(9100 / 3)


def test_digests_are_equal_only_if_those_of_every_round_and_anchor_of_a_stage_are() -> None:
    assert result(watched(line(0), line(1)), watched(line(0), line(1))).digests_equal
    assert result(watched(line(0)), watched(line(1, "other"))).digests_equal
    assert result(watched(line(0)), watched(line(0, "other"), stage=1)).digests_equal
    assert not result(watched(line(0), line(1)), watched(line(0), line(1, "other"))).digests_equal
    assert not result(watched(line(0)), watched(line(0, anchor="other"))).digests_equal


@pytest.mark.parametrize(("rounds", "found"), [((4, 4), 4), ((4, 5), None)])
def test_an_export_is_of_a_round_if_all_its_stages_are(
    tmp_path: Path, rounds: tuple[int, ...], found: int | None
) -> None:
    info = {"stages": [{"round": number, "digest": "d"} for number in rounds]}
    (tmp_path / "dilocox.json").write_text(json.dumps(info))
    assert exported_round(tmp_path) == found


def test_a_demo_that_never_began_has_figures_too() -> None:
    assert result().rounds_committed == 0


def test_the_loss_of_a_round_is_waited_for_until_a_later_one_is_told(tmp_path: Path) -> None:
    peer = watched(losses={-1: 5.5, 1: 4.0})
    peer.state = tmp_path
    end = time.monotonic() + 20
    assert loss_told([peer], 1, end)
    assert not loss_told([peer], 0, end)  # no head evaluated it
    assert not loss_told([peer], None, end)  # nobody could
    assert time.monotonic() < end - 15
    assert not loss_told([peer], 2, time.monotonic() + 0.1)


def test_more_stages_than_layers_are_refused_before_anything_is_started_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("an earlier demo's")
    started: list[object] = []
    monkeypatch.setattr(demo, "start_command", lambda *arguments: started.append(arguments))
    with pytest.raises(InvalidInput, match=r"16 stages .* 4 layers; choose 1 to 4 stages"):
        run_demo(replace(OPTIONS, stages=16, folder=tmp_path))
    assert not started
    assert (tmp_path / "run.yaml").read_text() == "an earlier demo's"


def test_a_demo_takes_the_place_of_a_demo_and_of_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo-run"
    clear(folder)
    (folder / "run.yaml").write_text("a demo's")
    assert capsys.readouterr().out == ""
    clear(folder)
    assert not (folder / "run.yaml").exists()
    assert capsys.readouterr().out == f"removing the earlier demo in {folder}\n"
    of_operator = tmp_path / "run"
    of_operator.mkdir()
    for name in ("run.yaml", "operator.key"):
        (of_operator / name).write_text("not to be had again")
    with pytest.raises(InvalidInput, match="not an earlier demo"):
        clear(of_operator)
    assert len(list(of_operator.iterdir())) == 2


def test_peers_are_started_for_their_stages_and_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(demo, "start_command", lambda arguments, _: started.append(arguments))
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: range(9))
    swarm = Demo(replace(OPTIONS, folder=tmp_path))
    swarm.start_peers("invite")
    assert len({(peer.state, peer.name) for peer in swarm.peers}) == 4
    assert [peer.stage for peer in swarm.peers] == [0, 1, 0, 1]
    for peer, arguments in zip(swarm.peers, started, strict=True):
        given = dict(zip(arguments[2::2], arguments[3::2], strict=True))
        assert given["--stage"] == str(peer.stage)
        assert (given["--state"], given["--threads"]) == (str(peer.state), "2")


def test_the_demos_manifest_is_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(demo_manifest(OPTIONS)))
    manifest = Manifest.load(tmp_path / "run.yaml")
    assert (manifest.seed, manifest.stages, manifest.preset) == (5, 2, "tiny")
    per_round = OPTIONS.replicas * manifest.rounds.inner_steps * manifest.batch.tokens_per_step
    assert manifest.end_tokens > 2 * OPTIONS.rounds * per_round  # it stops before the run's end


def test_without_a_terminal_the_table_is_one_line_a_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = watched(line(0), line(1), line(2), losses={-1: 5.5, 0: 4.25})
    with SwarmTable(rounds=3) as table:
        table.update([peer, watched(line(0, "other"), stage=1)])
        table.update([peer])
        peer.losses[2] = 3.5  # nobody evaluated round 1
        table.update([peer])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("round 0:") and "validation loss 4.2500" in first
    assert second.endswith("validation loss -, digest of stage 0 d")
    assert third.startswith("round 2:") and "validation loss 3.5000" in third


def test_on_a_terminal_the_table_shows_stages_and_whose_replica_a_peer_is_in() -> None:
    head = watched(line(0), status={"head": "QmHead", "state": "training"}, number=1)
    member = watched(line(0), stage=1, status={"head": "QmHead"})
    spare = watched(stage=1, status={"state": "spare"})
    table = swarm_table([head, member, spare], 3)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["stage"] == ["0", "1", "1"]
    assert columns["replica"] == ["1 (head)", "1", "-"]
    assert columns["state"] == ["training", "starting", "spare"]


# ---- child processes -----------------------------------------------------------------------------
def program(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Let `python -m dilocox` be this program."""
    (folder / "dilocox.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")


def test_a_child_gets_its_arguments_and_not_the_environments_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(monkeypatch, tmp_path, "import os, sys; print(sorted(os.environ), sys.argv[1:])")
    monkeypatch.setenv("DILOCOX_PORT", "31337")
    child = start_command(["peer", "x"], tmp_path / "log", env={"DILOCOX_STATE": "s"})
    child.wait(20.0)
    assert child.returncode == 0
    assert "'DILOCOX_STATE'" in child.last_line() and "'PATH'" in child.last_line()
    assert "DILOCOX_PORT" not in child.last_line()
    assert child.last_line().endswith("['peer', 'x']")


def test_a_child_that_ended_by_itself_is_named_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(monkeypatch, tmp_path, "print('one'); raise SystemExit('error: two')")
    child = start_command(["peer"], tmp_path / "peer-3.log")
    child.wait(20.0)
    with pytest.raises(EnvironmentFault, match="peer-3 ended by itself: error: two"):
        child.check()


def test_a_child_that_does_not_leave_is_killed_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    program(monkeypatch, tmp_path, text + "time.sleep(60)")
    child = start_command(["peer"], tmp_path / "log")
    while not child.log.read_text():
        child.check()
    child.terminate()
    child.wait(0.2)
    assert child.returncode == -9
    child.terminate()  # once more does no harm


def test_a_child_whose_parent_died_before_it_could_be_told_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(monkeypatch, tmp_path, "print('started')")
    monkeypatch.setattr(os_process.os, "getpid", lambda: 1)
    child = start_command(["peer"], tmp_path / "log")
    child.wait(20.0)
    assert child.returncode == 1
    assert child.last_line() == "(its log is empty)"
