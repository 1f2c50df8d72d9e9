"""A model that each inner optimizer trains in an instant, and what it is fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.stage import build_stage

VOCABULARY = 32
SPEC = InnerSpec(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5, warmup_tokens=100)
MUON = replace(SPEC, optimizer="muon", muon_learning_rate=3e-3, muon_momentum=0.9)
SPECS = {"adamw": SPEC, "muon": MUON}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EITHER = pytest.mark.parametrize("kind", SPECS)


def model(kind: str = "adamw", seed: int = 0) -> nn.Module:
    """Three small layers, or for Muon a llama, of whose weights it takes some."""
    torch.manual_seed(seed)
    if kind == "muon":
        return build_stage(LLAMA, 0, 1, seed)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=True)
    )


def batches(steps: int, microbatches: int = 2, seed: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(VOCABULARY, (3, 9), generator=generator, dtype=torch.int64)
            for _ in range(microbatches)
        ]
        for _ in range(steps)
    ]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def optimizer_of(module: nn.Module, kind: str = "adamw", **options: Any) -> InnerOptimizer:
    return InnerOptimizer(module.named_parameters(), SPECS[kind], **options)
