"""What benchmarks/baselines.py compares trains the same model in the same way, and its tables pair
what belongs together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.baseline_peer import Peer, Settings
from benchmarks.baseline_runs import ALL_REDUCE, ALONE, AVERAGER, OPEN_DILOCO, OURS, PLAIN, Result
from benchmarks.baselines import Results, claimed
from dilocox.dht.manifest import DataSpec, InnerSpec
from dilocox.peer.training.data import Corpus
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor
from dilocox.pipeline.stage import build_stage
from dilocox.pipeline.stage_worker import next_token_loss
from tests.swarm.small_run import MODEL

BATCH = {"sequence_length": 32, "microbatch_size": 2}
INNER = {"learning_rate": 1e-3, "schedule": "constant"}


def test_a_rivals_inner_steps_are_those_of_the_product(tmp_path: Path) -> None:
    settings = Settings(
        kind="plain",
        rank=1,
        peers=2,
        address="127.0.0.1",
        first_address="127.0.0.1",
        folder=str(tmp_path),
        model=MODEL,
        inner=INNER,
        batch=BATCH,
        parts=8,
        seed=3,
        inner_steps=2,
        model_s=0.0,
    )
    rival = Peer(settings)
    stage, spec = build_stage(MODEL, 0, 1, 3), InnerSpec(learning_rate=1e-3, schedule="constant")
    optimizer = InnerOptimizer(stage.named_parameters(), spec)
    corpus = Corpus(DataSpec(parts=8), **BATCH, seed=3)
    corpus.open_part(1)
    start = torch.cat([p.detach().flatten() for p in stage.parameters()])
    for _ in range(3):
        rival.step()
        windows = next(corpus)
        next_token_loss(stage(windows[:, :-1]), windows).backward()
        optimizer.step(clip_factor(optimizer.squared_norm(), spec.clip_norm), 1e-3)
    ours = dict(stage.named_parameters())
    assert not torch.equal(start, torch.cat([p.detach().flatten() for p in ours.values()]))
    for name, parameter in rival.network.named_parameters():
        torch.testing.assert_close(parameter, ours[name], rtol=1e-3, atol=1e-5)


def result(contestant: str, speed: float, *, turn: str = "a", line: str = "10") -> Result:
    return Result(turn=turn, contestant=contestant, line=line, peers=2, tokens_per_s=speed)


def test_speeds_are_compared_within_a_turn() -> None:
    measured = [
        result(PLAIN, 100.0),
        result(OURS, 90.0),
        result(PLAIN, 200.0, turn="b", line="1"),  # it has no network: any link is the same
        result(OURS, 190.0, turn="b"),
        result(ALL_REDUCE, 2.0, turn="c"),
        replace(result(OURS, 1.0), peers=4),
        replace(result(OURS, 0.0), outcome="hung after 0 joins"),
    ]
    results = Results(measured, 2)
    assert results.ratios(OURS, "10", PLAIN) == pytest.approx([0.9, 0.95])
    assert results.ratios(OURS, "10", ALL_REDUCE) == pytest.approx([70.0])  # of means
    assert results.ratios(OURS, "1", PLAIN) == []


def test_claims_are_told_of_the_links_and_peers_that_ran() -> None:
    measured = [
        result(PLAIN, 7000.0),
        result(OURS, 6500.0),
        result(AVERAGER, 1930.0),
        result(ALONE, 6900.0),
        result(OURS, 6600.0, line="lossy"),
        result(OPEN_DILOCO, 1100.0, line="lossy"),
        result(ALL_REDUCE, 75.0, line="lossy"),
        *(replace(result(name, speed), peers=4) for name, speed in ((OURS, 6.0), (OPEN_DILOCO, 1))),
    ]
    found = claimed(Results(measured, 2), ["10", "lossy"], 2)
    assert [(what, least, turns, verdict) for what, least, _, _, turns, verdict in found] == [
        ("ours over OpenDiLoCo, 10 Mbit/s with delay and loss", 4.5, 1, "reached"),
        ("ours over hivemind averager, 10 Mbit/s", 4.5, 1, "MISSED"),
        ("ours over AllReduce, 10 Mbit/s with delay and loss", 65.0, 1, "reached"),
        ("ours over plain loop, 10 Mbit/s", 0.95, 1, "MISSED"),
        ("ours over plain loop, 10 Mbit/s with delay and loss", 0.95, 1, "MISSED"),
        ("ours, averaging off over plain loop", 0.98, 1, "reached"),
    ]
    ratios = [ratio for _, _, ratio, _, _, _ in found]
    assert ratios == pytest.approx([6.0, 3.368, 88.0, 0.9286, 0.9429, 0.9857], abs=1e-3)
    assert claimed(Results(measured, 4), ["10", "lossy"], 4) == [
        ("ours over OpenDiLoCo, 10 Mbit/s, 4 peers", 4.5, 6.0, None, 1, "reached")
    ]


def test_a_loss_is_that_of_the_newest_joined_weights() -> None:
    models = [(0.0, 0.0, 6.0), (30.0, 100.0, 3.0), (60.0, 200.0, 2.0)]
    overlapped = replace(result(OURS, 3.3), models=models)
    short = replace(result(AVERAGER, 1.0, line="1"), models=models[:1])
    elsewhere = replace(result(AVERAGER, 3.3, line="none"), models=models)
    results = Results([overlapped, short, elsewhere], 2)
    assert results.loss_after(OURS, "10", 199.0) == 3.0
    assert results.loss_at(OURS, "10", 61.0) == 2.0
    assert results.loss_after(OURS, "10", 900.0) is None
    # 1 token/s for 100 s
    assert results.loss_at(AVERAGER, "1", 100.0) == 3.0
