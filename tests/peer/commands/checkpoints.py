"""Exported folders of small models that nobody trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.peer.commands.export import CheckpointDraft
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]
RUN = "ab" * 16
INFO = {"run": RUN, "round": 12, "digest": "cd" * 32, "tokens": 12345}
LLAMA: Config = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def stage_tensors(config: Config, num_stages: int, stage: int, seed: int = 3) -> Tensors:
    """As peers hold them: views into one flat vector per stage."""
    module = build_stage(config, stage, num_stages, seed)
    layout = FlatLayout.of(parameter_shapes(config, num_stages, stage))
    return layout.view(flatten_parameters(module, layout))


def write(
    folder: Path,
    config: Config = LLAMA,
    num_stages: int = 2,
    seed: int = 3,
    *,
    tokenizer: str = "byt5",
    dtype: torch.dtype = torch.float32,
) -> None:
    with CheckpointDraft(folder, config, num_stages, tokenizer, RUN, dtype) as checkpoint:
        for stage in range(num_stages):
            checkpoint.add({"stage": stage}, stage_tensors(config, num_stages, stage, seed))
        checkpoint.finish(INFO, "# a card\n")
