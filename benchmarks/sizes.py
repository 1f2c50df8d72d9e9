"""What a run asks of a machine, by stage: memory, disk and traffic, before anything is started.

    python benchmarks/sizes.py [RUN_YAML ...]

Without files it shows three runs as examples, all with the default batch and codecs. It reckons as
`dilocox doctor` and `--memory-limit` do and measures nothing; a row is one stage.

    parameters  of the stage, in millions
    memory      of a peer that computes on a CPU, all its processes, with one microbatch, GB
    with a GPU  the same where a GPU computes: the machine's memory, and the GPU's
    disk        snapshots and kept records of a peer, at most, GB
    exchange    what a peer sends in the averaging of a round, with four members, and receives, MB
    token       what it sends its neighbours for a token, with 4 bits and with bf16, kB
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dilocox.dht.manifest import Manifest
from dilocox.peer.os_process import wide_console
from dilocox.peer.process.prepare import StageNeeds

MEMBERS = 4
GB, MB = 1e9, 1e6


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


def row(manifest: Manifest, stage: int) -> list[str]:
    """The cells of one stage."""
    needs = StageNeeds(manifest, stage)
    tokens = [_with_codec(needs, codec).link_bytes_per_token() / 1e3 for codec in ("int4", "bf16")]
    return [
        manifest.name,
        f"{stage} of {manifest.stages}",
        f"{needs.values / MB:.1f}",
        f"{needs.memory.on_cpu / GB:.1f}",
        f"{needs.memory.beside_gpu / GB:.1f} + {needs.memory.on_gpu / GB:.1f}",
        f"{needs.disk_bytes / GB:.2f}",
        f"{needs.exchange_bytes(MEMBERS) / MB:.2f}",
        f"{tokens[0]:.2f} / {tokens[1]:.2f}",
    ]


def _with_codec(needs: StageNeeds, codec: Any) -> StageNeeds:
    pipeline = replace(needs.manifest.pipeline, codec=codec)
    return StageNeeds(replace(needs.manifest, pipeline=pipeline), needs.stage)


def main() -> None:
    """Reckon and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="descriptions of runs, run.yaml")
    manifests = [Manifest.load(file) for file in parser.parse_args().files] or examples()
    table = Table(title="what a peer of a stage needs")
    heads = ("run", "stage", "parameters", "memory", "with a GPU", "disk", "exchange", "token")
    for name in heads:
        table.add_column(name, justify="right")
    for manifest in manifests:
        # the first and the last stage hold more than those between, which are alike
        for stage in sorted({0, min(1, manifest.stages - 1), manifest.stages - 1}):
            table.add_row(*row(manifest, stage))
    wide_console().print(table)


if __name__ == "__main__":
    main()
