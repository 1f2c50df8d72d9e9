"""The sizes of three runs as examples, as docs/operator.md has them, in the columns of
peer/process/sizes.py.

    python benchmarks/sizes.py

`dilocox bootstrap run.yaml --check` prints the same of a run of one's own.
"""

from __future__ import annotations

from typing import Any

from dilocox.dht.manifest import Manifest
from dilocox.peer.process.sizes import print_sizes


def llama(hidden_size: int, layers: int, vocab_size: int) -> dict[str, Any]:
    """The configuration of a Llama of usual proportions."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def examples() -> list[Manifest]:
    """The guide's first run, and two of more usual sizes."""
    runs: list[tuple[str, Any, int]] = [
        ("tiny", "tiny", 3),
        ("50-million", llama(512, 16, 384), 2),
        ("1-billion", llama(2048, 20, 384), 8),
    ]
    return [
        Manifest.from_dict({"name": name, "model": model, "stages": stages, "end_tokens": 10**9})
        for name, model, stages in runs
    ]


def main() -> None:
    """Reckon and print."""
    for manifest in examples():
        print_sizes(manifest)


if __name__ == "__main__":
    main()
