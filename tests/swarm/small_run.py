"""The run.yaml of a run so small that several of its peers fit on two cores."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dilocox.dht.manifest import DeadlineSpec

# 131 thousand parameters over bytes: an inner step takes a few milliseconds.
MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DEADLINES = {
    "heartbeat_s": 2.0,
    "silence_s": 3.0,
    "matchmaking_s": 2.0,
    "exchange_s": 12.0,
    "vote_s": 4.0,
}
# Of a run.yaml that names none: for tests whose rounds are as long as those of real runs.
USUAL_DEADLINES = asdict(DeadlineSpec())


def run_manifest(**sections: Any) -> dict[str, Any]:
    """The run.yaml of a small run; sections are merged into the defaults."""
    manifest: dict[str, Any] = {
        "name": "swarm-test",
        "model": MODEL,
        "end_tokens": 10**9,
        # each round's loss is to be seen
        "data": {"source": "stdlib", "parts": 8, "held_out_windows": 8, "validation_share": 1.0},
        "batch": {"sequence_length": 64, "microbatch_size": 4, "microbatches": 1},
        "inner": {"learning_rate": 3e-3},
        "rounds": {"inner_steps": 20},
        "deadlines": DEADLINES,
    }
    for name, section in sections.items():
        whole = name == "model" or not isinstance(section, dict)
        manifest[name] = section if whole else manifest.get(name, {}) | section
    return manifest


def fixed_steps(count: int) -> dict[str, int]:
    """The rounds of a run whose H no record changes."""
    return {"inner_steps": count, "min_inner_steps": count, "max_inner_steps": count}
