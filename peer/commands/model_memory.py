"""The memory that a whole model takes here that writes text: reckoned before anything of it is
downloaded, for `dilocox serve` and `dilocox generate`.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.memory_and_disk import PROCESSES_BYTES, available_bytes, size
from dilocox.pipeline.partition import build_skeleton
from dilocox.pipeline.stage import stage_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_POSITIONS = 4096  # of prompt and text: what attention keeps of them is in memory
# Anchor, momentum, the mean that moves them and a copy in the folder's dtype, of fp32 values.
FETCH_BYTES = 16


def writing_bytes(manifest: Manifest, dtype: str, *, refreshes: bool = False) -> int:
    """What it takes at the peak, on the processor: the weights, or a stage's while that is
    downloaded, and what attention keeps of the longest text.

    refreshes: whether other weights come beside those that write.
    """
    sizes = [stage_layout(manifest, stage).numel for stage in range(manifest.stages)]
    item = DTYPES[dtype].itemsize
    weights, fetched = item * sum(sizes), FETCH_BYTES * max(sizes)
    config = cast(Any, build_skeleton(manifest.model).model).config
    positions = getattr(config, "max_position_embeddings", None) or MAX_POSITIONS
    kept = 2 * config.num_hidden_layers * config.hidden_size * min(positions, MAX_POSITIONS)
    beside = weights + max(weights, fetched) if refreshes else max(weights, fetched)
    return PROCESSES_BYTES + beside + item * kept


def check_model_memory(
    what: str, needed: int, remedy: str, limit_bytes: float | None = None
) -> None:
    """Raise InvalidInput where that is over the limit, EnvironmentFault where it is not free.

    what: is done with the model, as in "to serve". remedy: what else one may do, before "or".
    """
    takes = f"{what} this model takes about {size(needed)} of memory"
    if limit_bytes is not None and needed > limit_bytes:
        raise InvalidInput(
            f"--memory-limit {limit_bytes / 1e9:.1f}: {takes}: {remedy} or raise the limit"
        )
    if needed > (free := available_bytes()):
        raise EnvironmentFault(f"{takes}, {size(free)} are free: {remedy} or close other programs")
