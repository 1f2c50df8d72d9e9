"""A replica of real processes computes what the whole model computes in one process.

With fp32 on every wire, an outer step of size 1 without momentum, and all unsent progress kept in
the live weights, a record moves nothing but bookkeeping: the anchor after it is the weights of
plain training after as many inner steps as the stage had made at its send. Neighbouring stages may
send at different inner steps; each is compared at its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.dht.manifest import Manifest
from dilocox.peer.chain.snapshot_files import read_snapshot
from dilocox.peer.process.prepare import held_out
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from dilocox.peer.training.data import Corpus, validation_loss
from dilocox.peer.training.inner_optimizer import InnerOptimizer, learning_rate
from dilocox.pipeline.stage import StageModule, build_stage
from tests.pipeline.conftest import FAMILIES
from tests.pipeline.whole_model import train_step
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm

Weights = dict[str, Tensor]

STEP_S = 0.1  # paced, so that a round has tens of inner steps and not hundreds
FEWEST_STEPS, MOST_STEPS = 20, 150  # rounding errors grow, so anchors far on are not compared
TOLERANCE = 1e-5
LIMIT_S = 240.0


@dataclass(frozen=True)
class Anchor:
    """Of one stage after one record: the inner steps behind it, and the weights."""

    round: int
    steps: int
    weights: Weights


@pytest.mark.swarm
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("family", "stages", "microbatches"),
    [("llama", 3, 2), ("llama", 3, 5), ("gpt_neox", 2, 3), ("qwen3", 4, 6)],
)
def test_every_stage_has_the_weights_of_the_whole_model_in_one_process(
    start_swarm: StartSwarm, family: str, stages: int, microbatches: int
) -> None:
    swarm = start_swarm(
        stages=stages,
        # room for the bytes of the tokenizer
        model={"model_type": family, **FAMILIES[family], "vocab_size": 384},
        data={"parts": 1},
        batch={"sequence_length": 32, "microbatch_size": 2, "microbatches": microbatches},
        # the bias of a key has no gradient but rounding, which a small eps would blow up
        inner={"eps": 1e-5, "clip_norm": 0.5, "warmup_tokens": 30 * 64 * microbatches},
        outer={"learning_rate": 1.0, "momentum": 0.0, "rebase_weight": 1.0},
        codec={"bits": 32},
        pipeline={"codec": "fp32"},
        rounds={"inner_steps": 8},
        deadlines={"heartbeat_s": 1.0, "silence_s": 6.0},
    )
    peers = [swarm.add_peer(stage=stage, step_s=STEP_S) for stage in range(stages)]
    swarm.wait(
        lambda: (
            all(_steps(swarm.manifest, peer) >= FEWEST_STEPS for peer in peers)
            and any(number >= 0 for number in peers[0].losses)
        ),
        LIMIT_S,
        f"anchors of all stages after {FEWEST_STEPS} inner steps",
    )
    swarm.close()
    anchors = [list(_anchors(swarm, peer)) for peer in peers]
    _compare_weights(swarm.manifest, anchors)
    _compare_losses(swarm.manifest, anchors, peers[0].losses)


def _steps(manifest: Manifest, peer: Peer) -> int:
    """The inner steps in the newest anchor of a peer."""
    tokens = peer.rounds[-1]["chain_tokens"] if peer.rounds else 0
    return tokens // manifest.batch.tokens_per_step


def _anchors(swarm: ProcessSwarm, peer: Peer) -> Iterator[Anchor]:
    """A stage's anchors, made anew from its log, as far as they are compared."""
    manifest, stage = swarm.manifest, peer.stage
    log, codec = swarm.round_log(peer), swarm.stage_codec(stage)
    layout = codec.layout
    anchor = torch.zeros(layout.numel)
    initial = build_stage(manifest.model, stage, manifest.stages, manifest.seed)
    for name, parameter in initial.named_parameters():
        layout.view(anchor)[name].copy_(parameter.detach())
    outer, unused = OuterStep(1.0, 0.0), torch.zeros(layout.numel)
    said = {line["round"]: line for line in peer.rounds}
    for number in log.rounds():
        record = log.read(number)
        assert record is not None
        assert [member.peer for member in record.members] == [peer.peer_id]
        outer.apply(anchor, unused, record.average(codec), anchor, unused)
        steps, rest = divmod(record.chain_tokens, manifest.batch.tokens_per_step)
        assert not rest
        if number in said:  # the last one may have come when the peer had stopped to take any
            assert said[number]["anchor_sha256"] == anchor_sha256(anchor)
        if steps <= MOST_STEPS:
            weights = {name: view.clone() for name, view in layout.view(anchor).items()}
            yield Anchor(number, steps, weights)
    (snapshots,) = peer.state.glob(f"*-stage{stage}/snapshots")
    kept = read_snapshot(snapshots, layout=layout.digest)
    assert kept is not None
    if kept.round == max(said):
        assert anchor_sha256(kept.anchor) == said[kept.round]["anchor_sha256"]


# ---- one process -------------------------------------------------------------------------------
def _compare_weights(manifest: Manifest, anchors: list[list[Anchor]]) -> None:
    needed = {anchor.steps for of_stage in anchors for anchor in of_stage}
    reference = _trained(manifest, needed)
    for stage, of_stage in enumerate(anchors):
        assert max(anchor.steps for anchor in of_stage) >= FEWEST_STEPS
        for anchor in of_stage:
            expected = reference[anchor.steps]
            error = max(
                float((values - expected[name]).abs().max())
                for name, values in anchor.weights.items()
            )
            print(f"stage {stage}, {anchor.steps:3d} inner steps: off by {error:.1e} at most")
            assert error < TOLERANCE
            moved = max(
                float((values - reference[0][name]).abs().max())
                for name, values in anchor.weights.items()
            )
            assert moved > 100 * TOLERANCE  # else there would be nothing to compare


def _trained(manifest: Manifest, needed: set[int]) -> dict[int, Weights]:
    """The weights of the whole model after so many inner steps, by their number; 0 is the start."""
    batch = manifest.batch
    corpus = Corpus(
        manifest.data,
        sequence_length=batch.sequence_length,
        microbatch_size=batch.microbatch_size,
        seed=manifest.seed,
    )
    corpus.open_part(0)
    whole = build_stage(manifest.model, 0, 1, manifest.seed)
    optimizer = InnerOptimizer(whole.named_parameters(), manifest.inner)
    found: dict[int, Weights] = {0: _copied(whole)}
    for step in range(1, max(needed) + 1):
        tokens = step * batch.tokens_per_step
        rate = learning_rate(manifest.inner, manifest.end_tokens, tokens)
        train_step(whole, optimizer, list(islice(corpus, batch.microbatches)), rate)
        if step in needed:
            found[step] = _copied(whole)
    return found


def _copied(module: StageModule) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _compare_losses(
    manifest: Manifest, anchors: list[list[Anchor]], losses: dict[int, float]
) -> None:
    """The validation losses that the head had from the pipeline, of anchors of one round."""
    whole = build_stage(manifest.model, 0, 1, manifest.seed)
    windows = held_out(manifest)
    compared = 0
    for number, loss in losses.items():
        found = [a.weights for of_stage in anchors for a in of_stage if a.round == number]
        if number >= 0 and len(found) < len(anchors):
            continue  # beyond the anchors that are compared
        weights: dict[str, Any] = {name: values for each in found for name, values in each.items()}
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                if number >= 0:
                    parameter.copy_(weights[name])
        assert loss == pytest.approx(validation_loss(whole, windows), abs=1e-4)
        compared += number >= 0
    assert compared
