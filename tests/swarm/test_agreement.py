"""All peers of a stage hold the same bytes, and a peer alone is plain DiLoCo to the last bit."""

from __future__ import annotations

import hashlib
import math
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import Manifest
from dilocox.peer.training.data import Corpus
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from tests.swarm.conftest import StartSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

ROUNDS = 5
INNER_STEPS, STEP_S = 60, 0.1  # rounds of six seconds


def test_three_peers_have_the_same_digest_and_anchor_after_every_round(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(codec={"bits": 4}, rounds={"inner_steps": 100})
    peers = [swarm.add_peer() for _ in range(3)]
    swarm.wait_for_rounds(ROUNDS, 200)
    last = min(peer.rounds[ROUNDS - 1]["round"] for peer in peers)
    histories = [
        [(line["round"], line["digest"], line["anchor_sha256"]) for line in peer.rounds]
        for peer in peers
    ]
    for history in histories:
        assert [line for line in history if line[0] <= last] == [
            line for line in histories[0] if line[0] <= last
        ]
    swarm.assert_equal_chains()
    assert any(line["members"] == 3 for line in peers[0].rounds)


def test_one_peer_without_overlap_in_fp32_is_plain_adamw_and_nesterov(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(
        data={"parts": 1},
        batch={"microbatches": 2, "microbatch_size": 2},
        inner={"warmup_tokens": 20_000, "weight_decay": 0.1},
        outer={"merge": "none", "learning_rate": 0.7, "momentum": 0.9},
        codec={"bits": 32},
        end_tokens=10**6,
        deadlines={"heartbeat_s": 1.0},
    )
    peer = swarm.add_peer()
    swarm.wait_for_rounds(ROUNDS, 200)
    lines = peer.rounds[:ROUNDS]
    assert not peer.of_kind("void")
    expected = plain_diloco(swarm.manifest, [line["inner_steps"] for line in lines])
    assert [line["anchor_sha256"] for line in lines] == expected


@pytest.mark.parametrize("merge", [pytest.param("reset", marks=pytest.mark.faults), "rebase"])
def test_records_that_wait_for_the_end_of_a_round_hold_no_round_up(
    start_swarm: StartSwarm, merge: str
) -> None:
    """With `reset` this is DiLoCoX as published. A round that waited until its last send was
    applied, which waited for the round, never ended.
    """
    swarm = start_swarm(
        outer={"merge": merge, "apply": "round_end"}, rounds={"inner_steps": INNER_STEPS}
    )
    peers = [swarm.add_peer(step_s=STEP_S) for _ in range(2)]
    swarm.wait_for_rounds(3, 120)
    for peer in peers:
        first, second, third = peer.rounds[:3]
        assert third["round"] <= 4 and third["val_loss"] < first["val_loss"]
        assert second["inner_steps"] < 3 * INNER_STEPS
    assert all(line["members"] == 2 for peer in peers for line in peer.rounds[1:])
    swarm.assert_equal_chains()


def plain_diloco(manifest: Manifest, inner_steps: list[int]) -> list[str]:
    """The sha256 of the weights after each round of textbook DiLoCo with one worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the peer: the order of sums inside a step depends on it
    try:
        return _plain_diloco(manifest, inner_steps)
    finally:
        torch.set_num_threads(threads)


def _plain_diloco(manifest: Manifest, inner_steps: list[int]) -> list[str]:
    batch, inner, outer = manifest.batch, manifest.inner, manifest.outer
    layout = FlatLayout.of(parameter_shapes(manifest.model, 1, 0))
    model = build_stage(manifest.model, 0, 1, manifest.seed, torch.device("cpu"))
    weights = flatten_parameters(model, layout)  # the parameters are views of it
    corpus = Corpus(
        manifest.data,
        sequence_length=batch.sequence_length,
        microbatch_size=batch.microbatch_size,
        seed=manifest.seed,
    )
    corpus.open_part(0)
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": inner.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=inner.betas,
        eps=inner.eps,
        fused=True,  # as the peer: the same formula, rounded once less often
    )
    anchor, momentum = weights.detach().clone(), torch.zeros_like(weights)
    tokens, hashes = 0, list[str]()
    for steps in inner_steps:
        for _ in range(steps):
            tokens += batch.tokens_per_step
            for group in adamw.param_groups:
                group["lr"] = _rate(manifest, tokens)
            adamw.zero_grad()
            for windows in islice(corpus, batch.microbatches):
                logits = model(windows[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                (loss / batch.microbatches).backward()
            nn.utils.clip_grad_norm_(parameters, inner.clip_norm)
            adamw.step()
        with torch.no_grad():
            pseudo_gradient = anchor - weights
            momentum = outer.momentum * momentum + pseudo_gradient
            direction = pseudo_gradient + outer.momentum * momentum
            anchor = anchor - outer.learning_rate * direction
            weights.copy_(anchor)
        hashes.append(_sha256(anchor))
    return hashes


def _rate(manifest: Manifest, tokens: int) -> float:
    """Linear warmup, then half a cosine down to the final fraction."""
    inner = manifest.inner
    if tokens < inner.warmup_tokens:
        return inner.learning_rate * tokens / inner.warmup_tokens
    share = (tokens - inner.warmup_tokens) / (manifest.end_tokens - inner.warmup_tokens)
    cosine = (1 + math.cos(math.pi * share)) / 2
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)


def _sha256(vector: Tensor) -> str:
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()
