"""The demo as a stranger runs it, with its figures checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dilocox.dht.manifest import Manifest
from dilocox.peer.commands.demo import demo_manifest
from dilocox.peer.options import DemoOptions
from dilocox.peer.training.data import held_out_windows
from tests.swarm.harness import ProcessSwarm

pytestmark = pytest.mark.swarm

LIMIT_S = 360
ROUNDS = 10
REPLICAS = 2
COMPARED_ROUNDS = 5  # the last ones
TOLERANCE = 0.03


@dataclass(frozen=True)
class Demo:
    """A demo that has ended."""

    folder: Path
    figures: dict[str, Any]

    def events(self, stage: int, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the peers of a stage wrote: the file's name, and the event."""
        for path in sorted(self.folder.glob(f"*/*-stage{stage}/events.jsonl")):
            for line in path.read_text().splitlines():
                if (event := json.loads(line))["event"] == kind:
                    yield str(path), event


def run_demo(folder: Path, *options: str) -> Demo:
    figures = folder / "demo.json"
    arguments = ["demo", "--rounds", str(ROUNDS), "--folder", str(folder / "demo"), *options]
    ran = subprocess.run(
        [sys.executable, "-m", "dilocox", *arguments, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return Demo(folder / "demo", json.loads(figures.read_text()))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Two replicas of two stages, as `dilocox demo` starts them."""
    return run_demo(tmp_path_factory.mktemp("two-stages"))


@pytest.mark.demo
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_demo_learns_and_its_checkpoint_has_the_loss_that_it_reports(demo: Demo) -> None:
    result = demo.figures
    assert (result["stages"], result["replicas"]) == (2, 2)
    assert result["rounds_committed"] >= ROUNDS
    assert result["seconds"] < LIMIT_S
    assert 5.4 <= result["val_loss_first"] <= 6.1
    assert result["val_loss_last"] < 2.5
    assert result["waiting_share"] < 0.03
    assert result["bytes_sent_per_round"] < 0.5 * result["bytes_fp16_per_round"]
    # the loss of the exported anchors: by a replica, by the demo, and by plain transformers here
    loss = plain_loss(Path(result["export"]), Manifest.load(demo.folder / "run.yaml"))
    assert round(result["val_loss_export"], 4) == round(loss, 4)
    assert abs(result["val_loss_last"] - loss) < 1e-3


@pytest.mark.demo
@pytest.mark.timeout(LIMIT_S + 60)
def test_all_peers_of_a_stage_have_the_same_chain_and_stages_have_their_own(demo: Demo) -> None:
    assert demo.figures["digests_equal"]
    chains: list[dict[int, str]] = []
    for stage in range(2):
        seen: dict[int, set[tuple[str, str]]] = {}
        reported: dict[str, int] = {}
        for peer, line in demo.events(stage, "round"):
            seen.setdefault(line["round"], set()).add((line["digest"], line["anchor_sha256"]))
            reported[peer] = reported.get(peer, 0) + 1
        assert len(reported) == 2 and min(reported.values()) >= ROUNDS, reported
        assert all(len(found) == 1 for found in seen.values()), seen
        chains.append({number: found.pop()[0] for number, found in seen.items()})
    common = chains[0].keys() & chains[1].keys()
    assert len(common) >= ROUNDS
    assert all(chains[0][number] != chains[1][number] for number in common)


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_two_stages_learn_as_well_as_the_whole_model_on_one_peer(tmp_path: Path) -> None:
    tokens, losses = curve(tmp_path / "two", stages=2)
    whole_tokens, whole_losses = curve(tmp_path / "one", stages=1)
    # at the same tokens, because a round has as many as there was time for
    end = min(tokens[-1], whole_tokens[-1])
    points = [number for number in tokens if number <= end][-COMPARED_ROUNDS:]
    assert len(points) == COMPARED_ROUNDS and points[0] >= whole_tokens[0]
    ours = fmean(np.interp(points, tokens, losses).tolist())
    theirs = fmean(np.interp(points, whole_tokens, whole_losses).tolist())
    print(f"at {points[0]:,} to {points[-1]:,} tokens: 2 stages {ours:.4f}, 1 stage {theirs:.4f}")
    assert abs(ours / theirs - 1) < TOLERANCE


def curve(folder: Path, *, stages: int) -> tuple[list[int], list[float]]:
    """The demo's run with two replicas: tokens behind each evaluated round, and the losses.

    There are as many parts of the data as replicas, so that both read the same however they lease.
    """
    folder.mkdir()
    manifest = demo_manifest(
        DemoOptions(
            replicas=REPLICAS,
            stages=stages,
            rounds=ROUNDS,
            folder=folder,
            json_file=None,
            device="cpu",
            seed=0,
        )
    )
    manifest["data"] |= {"parts": REPLICAS}
    with ProcessSwarm(folder, manifest) as swarm:
        peers = [swarm.add_peer(stage=n % stages) for n in range(REPLICAS * stages)]
        heads = [peer for peer in peers if peer.stage == 0]
        swarm.wait_for_rounds(ROUNDS, LIMIT_S, of=heads)
    tokens = {line["round"]: line["chain_tokens"] for head in heads for line in head.rounds}
    losses = {number: loss for head in heads for number, loss in head.losses.items()}
    rounds = sorted(tokens.keys() & losses.keys())
    return [tokens[number] for number in rounds], [losses[number] for number in rounds]


def plain_loss(export: Path, manifest: Manifest) -> float:
    windows = held_out_windows(
        manifest.data, manifest.batch.sequence_length, manifest.data.held_out_windows
    )
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(input_ids=window[None, :-1]).logits[0], window[1:]
            )
            for window in windows
        ]
    return float(torch.stack(losses).double().mean())
