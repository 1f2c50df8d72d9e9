"""The sizes of three runs as examples, as docs/operator.md has them, in the columns of
peer/process/sizes.py.

    python benchmarks/sizes.py [--quick] [--out DIR]

`dilocox bootstrap run.yaml --check` prints the same of a run of one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from dilocox.dht.manifest import Manifest
from dilocox.peer.process.prepare import stage_kinds
from dilocox.peer.process.sizes import HEADS, row


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
    """Reckon and print; the largest takes most of the time."""
    report, arguments = Report.parse(parser(__doc__), "sizes")
    for manifest in examples()[: 1 if arguments.quick else None]:
        rows = [row(manifest, stage) for stage in stage_kinds(manifest)]
        report.table(
            [Column(name) for name in HEADS], rows, title=manifest.name, part=manifest.name
        )
    report.close()


if __name__ == "__main__":
    main()
