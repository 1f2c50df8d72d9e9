"""A model that plain transformers trained goes on in a swarm of two replicas of two stages."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

from dilocox.dht.manifest import DataSpec
from dilocox.peer.commands.export import evaluate_checkpoint
from dilocox.peer.training.data import Corpus, held_out_windows
from tests.peer.corpora import write_tokenizer
from tests.swarm.conftest import StartSwarm
from tests.swarm.small_run import MODEL

STEPS = 40
LIMIT_S = 100.0


def trained_by_transformers(folder: Path) -> None:
    """Write a byte-level checkpoint with tied embeddings after a few steps of plain AdamW."""
    torch.manual_seed(5)
    config = LlamaConfig(**{**MODEL, "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config)
    corpus = Corpus(DataSpec(parts=8), sequence_length=64, microbatch_size=8, seed=1)
    corpus.open_part(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for window in islice(corpus, STEPS):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)


@pytest.mark.swarm
@pytest.mark.timeout(360)
def test_a_checkpoint_trains_on_from_its_own_loss_with_or_without_its_files(
    start_swarm: StartSwarm, tmp_path: Path
) -> None:
    checkpoint, away = tmp_path / "checkpoint", tmp_path / "away"
    trained_by_transformers(checkpoint)
    swarm = start_swarm(
        model={"from": str(checkpoint)},
        stages=2,
        batch={"microbatches": 2},
        pipeline={"codec": "fp32"},
    )
    checkpoint.rename(away)  # the first replica has nothing but the bootstrap
    taking = [swarm.add_peer(stage=stage) for stage in range(2)]
    first = swarm.wait(lambda: taking[0].losses.get(-1), LIMIT_S, "the first validation loss")
    away.rename(checkpoint)
    reading = [swarm.add_peer(stage=stage) for stage in range(2)]
    windows = held_out_windows(swarm.manifest.data, 64, swarm.manifest.data.held_out_windows)
    plain = evaluate_checkpoint(checkpoint, windows)
    assert first == pytest.approx(plain, abs=5e-5)
    assert plain < 4.0  # a random one has 5.9
    swarm.wait_for_replicas(2, LIMIT_S)
    swarm.wait_for_rounds(3, LIMIT_S)
    swarm.assert_equal_chains()
    assert all("taking those of others" in peer.log_text() for peer in taking)
    assert not any("taking those of others" in peer.log_text() for peer in reading)
    last = max(number for peer in swarm.peers for number in peer.losses)
    assert next(p.losses[last] for p in swarm.peers if last in p.losses) < plain


@pytest.mark.swarm
@pytest.mark.timeout(240)
def test_a_tokenizer_that_only_the_operator_has_comes_from_the_bootstrap(
    start_swarm: StartSwarm, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    write_tokenizer(tokenizer)
    swarm = start_swarm(data={"tokenizer": str(tokenizer)})
    tokenizer.rename(tmp_path / "away")
    peer = swarm.add_peer()
    swarm.wait_for_counted(peer, after_round=-1, limit_s=LIMIT_S)
    assert "taking the bootstrap's" in peer.log_text()
    words = "generate", swarm.invite, "def ", "--tokens", "4", "--host", "127.0.0.1"
    # the text may go on in another line
    assert "\ndef " in f"\n{swarm.run_command(*words, limit_s=60)}"
    swarm.terminate(peer)
    before = peer.log_text()
    swarm.restart(peer)
    swarm.wait_for_counted(peer, after_round=max(swarm.chain()), limit_s=LIMIT_S)
    assert "taking the bootstrap's" not in peer.log_text().removeprefix(before)
