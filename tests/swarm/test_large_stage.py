"""A stage so large that its snapshot takes longer to write than a group waits for a peer."""

from __future__ import annotations

import pytest

from dilocox.pipeline.stage import parameter_shapes
from tests.swarm.altered import syncs
from tests.swarm.conftest import StartSwarm
from tests.swarm.links import Links
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps
from tests.swarm.spans import watch_rounds

PARAMETERS = 58e6
MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SNAPSHOT_BYTES = 20  # of a parameter, in the larger of its files
SNAPSHOT_S = 6.0
INNER_STEPS = 60
ROUNDS = 10
ROUND_LIMIT_S = 150.0


@pytest.mark.swarm
@pytest.mark.timeout(600 + ROUNDS * ROUND_LIMIT_S)
def test_a_stage_whose_snapshot_takes_six_seconds_commits_every_round(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(
        links=Links(3, mbit=100, delay_ms=5),
        model=MODEL,
        batch={"sequence_length": 16, "microbatch_size": 1},
        codec={"scheme": "dense", "bits": 4},
        rounds=fixed_steps(INNER_STEPS),
        deadlines=USUAL_DEADLINES,
    )
    shapes = parameter_shapes(swarm.manifest.model, 1, 0)
    numel = swarm.stage_codec(0).layout.numel
    assert numel == pytest.approx(PARAMETERS, rel=0.02), shapes
    for _ in range(2):
        swarm.add_peer(disk_bytes_per_s=SNAPSHOT_BYTES * numel / SNAPSHOT_S)
    span = watch_rounds(swarm, ROUNDS, limit_s=ROUND_LIMIT_S)
    slowest = {p.name: max(syncs(swarm.folder / f"{p.name}-syncs").values()) for p in swarm.peers}
    print(f"\n{numel:,} parameters, snapshots of up to {slowest} s\n{span}")
    assert min(slowest.values()) >= 0.9 * SNAPSHOT_S, "the disk was not slow"
    swarm.assert_equal_chains()
    assert len(span.committed) == ROUNDS
    for account in span.accounts:
        assert account.counted == ROUNDS
