"""What activations are reckoned to take, against what a stage really keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.dht.manifest import Manifest
from dilocox.peer.process.prepare import StageNeeds, memory_of_stages
from dilocox.peer.training.activations import ActivationBytes, activation_bytes
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.stage import StageModule, build_stage
from dilocox.pipeline.stage_worker import StagePasses
from tests.pipeline.chains import Config
from tests.pipeline.conftest import FAMILIES, MIXTURES

WIDER = {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32}
HIDDEN_BYTES = 2 * 32 * 128 * 4  # of the hidden states of a microbatch of those


def manifest_of(model: Config, stages: int = 2, microbatch_size: int = 2) -> Manifest:
    batch = {"sequence_length": 32, "microbatch_size": microbatch_size, "microbatches": 4}
    return Manifest.from_dict(
        {"name": "a", "model": model, "stages": stages, "end_tokens": 10**9, "batch": batch}
    )


def really_kept(manifest: Manifest, stage: int, *, recompute: bool) -> int:
    """Bytes that autograd says a forward of the stage keeps."""
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed)
    optimizer = InnerOptimizer(module.named_parameters(), manifest.inner)
    passes = StagePasses(module, optimizer, recompute=recompute)
    batch = manifest.batch
    windows = torch.zeros(batch.microbatch_size, batch.sequence_length + 1, dtype=torch.int64)
    hidden = torch.randn(*windows[:, 1:].shape, hidden_size(manifest.model)) if stage else None
    passes.forward(hidden, windows)
    return passes.stored.measured


def reckoned(manifest: Manifest, stage: int, *, recompute: bool = False) -> ActivationBytes:
    found = activation_bytes(manifest, stage, recompute=recompute)
    assert found is not None
    return found


def reckoned_kept(manifest: Manifest, stage: int, *, recompute: bool) -> int:
    return reckoned(manifest, stage, recompute=recompute).kept


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_stage_keeps_is_reckoned_without_its_memory(
    llama_config: Config, stage: int, recompute: bool
) -> None:
    manifest = manifest_of({**llama_config, **WIDER}, stages=3)
    kept, really = (of(manifest, stage, recompute=recompute) for of in (reckoned_kept, really_kept))
    assert kept == pytest.approx(really, abs=0.02 * really + 2 * HIDDEN_BYTES)


def test_every_family_without_experts_is_reckoned(family_config: Config) -> None:
    manifest = manifest_of({**family_config, "vocab_size": 384})
    if family_config["model_type"] in (*MIXTURES, "deepseek_v2"):
        assert activation_bytes(manifest, 0, recompute=False) is None
        roughly = StageNeeds(manifest, 0).memory
        assert 0 < roughly.activations < 4 * 4 * roughly.values
    else:
        kept = really_kept(manifest, 0, recompute=False)
        assert reckoned(manifest, 0).kept == pytest.approx(kept, rel=0.2)


@pytest.mark.parametrize("look", [lambda ids: bool(ids.sum() < 1), lambda ids: ids[ids > 0]])
def test_a_family_that_looks_at_values_is_reckoned_roughly(
    llama_config: Config, monkeypatch: pytest.MonkeyPatch, look: Callable[[Tensor], object]
) -> None:
    run = StageModule.hidden_states

    def looking(self: StageModule, inputs: Tensor, positions: Tensor | None = None) -> Any:
        look(inputs)
        return run(self, inputs, positions)

    monkeypatch.setattr(StageModule, "hidden_states", looking)
    manifest = manifest_of(llama_config)
    assert activation_bytes(manifest, 0, recompute=False) is None
    assert StageNeeds(manifest, 0).memory.activations > 0


def test_batch_logits_and_recomputing_count(llama_config: Config) -> None:
    base = manifest_of(llama_config)
    wide = manifest_of({**llama_config, "vocab_size": 8 * llama_config["vocab_size"]})
    first, last = (reckoned(base, stage).peak for stage in range(2))
    twice = reckoned(manifest_of(llama_config, microbatch_size=4), 0).peak
    assert twice == pytest.approx(2 * first, rel=0.15)
    assert reckoned(wide, 1).peak > 1.2 * last
    assert reckoned(base, 0, recompute=True).peak < 0.8 * first
    recomputed = replace(base, pipeline=replace(base.pipeline, recompute=True))
    assert reckoned(recomputed, 0) == reckoned(base, 0, recompute=True)


def test_a_gpus_precision_counts_what_autocast_makes(llama_config: Config) -> None:
    """Half of the activations, and a narrow copy of the weights that are used."""
    manifest = manifest_of(llama_config)
    narrow = activation_bytes(manifest, 0, recompute=False, precision="bf16")
    assert narrow is not None and narrow != reckoned(manifest, 0)
    needs = StageNeeds(manifest, 0).memory
    assert needs.gpu_activations == narrow.peak
    assert needs.activations == reckoned(manifest, 0).peak


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_masks_of_documents_are_reckoned(family: str) -> None:
    plain = manifest_of({"model_type": family, **FAMILIES[family], "vocab_size": 384})
    masked = replace(plain, data=replace(plain.data, document_masks=True, end_of_text=1))
    assert reckoned(masked, 1).peak > reckoned(plain, 1).peak


def test_stages_that_are_alike_need_alike(llama_config: Config) -> None:
    manifest = manifest_of({**llama_config, "num_hidden_layers": 4}, stages=4)
    needs = memory_of_stages(manifest, recompute=False)
    assert needs[1] is needs[2]
    assert needs == [StageNeeds(manifest, stage).memory for stage in range(4)]
    assert len({each.on_cpu for each in needs}) == 3
