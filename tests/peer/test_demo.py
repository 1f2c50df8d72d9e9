"""The demo's own logic: its figures, and the commands that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.peer import demo, subprocesses
from dilocox.peer.demo import DemoOptions, demo_manifest
from dilocox.peer.subprocesses import Child, start_command
from dilocox.peer.swarm_table import SwarmTable
from dilocox.peer.watched import WatchedPeer

OPTIONS = DemoOptions(
    replicas=2, stages=1, rounds=3, folder=Path("x"), json_file=None, device="cpu", seed=5
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
    }


def watched(*rounds: dict[str, Any], **facts: Any) -> WatchedPeer:
    return WatchedPeer(
        name="p",
        state=Path("s"),
        child=cast("Child", None),
        rounds=list(rounds),
        status={"waiting_share": facts.pop("waiting_share", 0.0)},
        **facts,
    )


def result(*peers: WatchedPeer) -> demo.DemoResult:
    return demo._result(OPTIONS, list(peers), None, 60.0)


def test_figures_of_a_swarm_are_counted_once_and_averaged_over_peers() -> None:
    first = watched(line(0), line(1), training_s=10.0, waiting_share=0.02, losses={-1: 5.5, 0: 4.0})
    second = watched(line(1), line(2), training_s=20.0, waiting_share=0.04, voids=2)
    found = result(first, second)
    assert (found.rounds_committed, found.rounds_void) == (3, 2)
    assert (found.tokens, found.tokens_per_s) == (3000, 200.0)
    assert found.waiting_share == pytest.approx(0.03)
    assert (found.bytes_sent_per_round, found.bytes_fp16_per_round) == (200, 400)
    assert (found.val_loss_first, found.val_loss_export, found.export) == (5.5, None, "")


def test_digests_are_equal_only_if_those_of_every_round_and_anchor_are() -> None:
    assert result(watched(line(0), line(1)), watched(line(0), line(1))).digests_equal
    assert result(watched(line(0)), watched(line(1, "other"))).digests_equal
    assert not result(watched(line(0), line(1)), watched(line(0), line(1, "other"))).digests_equal
    assert not result(watched(line(0)), watched(line(0, anchor="other"))).digests_equal


def test_a_demo_that_never_began_has_figures_too() -> None:
    assert result().rounds_committed == 0


def test_the_demos_manifest_is_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(demo_manifest(OPTIONS)))
    manifest = Manifest.load(tmp_path / "run.yaml")
    assert (manifest.seed, manifest.stages, manifest.preset) == (5, 1, "tiny")
    per_round = OPTIONS.replicas * manifest.rounds.inner_steps * manifest.batch.tokens_per_step
    assert manifest.end_tokens > 2 * OPTIONS.rounds * per_round  # it stops before the run's end


def test_without_a_terminal_the_table_is_one_line_a_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = watched(line(0), line(1), losses={-1: 5.5, 0: 4.25})
    with SwarmTable(rounds=3) as table:
        table.update([peer])
        table.update([peer])
        peer.losses[1] = 3.5
        table.update([peer])
    printed = capsys.readouterr().out
    assert printed.count("round 0:") == printed.count("round 1:") == 1
    assert "validation loss 4.2500" in printed


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
    monkeypatch.setattr(subprocesses.os, "getpid", lambda: 1)
    child = start_command(["peer"], tmp_path / "log")
    child.wait(20.0)
    assert child.returncode == 1
    assert child.last_line() == "(its log is empty)"
