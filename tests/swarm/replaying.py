"""Replays a state folder's chain as another machine would: other threads, other vector units, and
sums of factors in another order.

    python -m tests.swarm.replaying FOLDER STAGE [--threads N] [--permuted SEED]

A process of its own, because torch and numpy choose their code when they are imported. Prints JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0  # a machine that is full of peers takes minutes
# numpy 2.4 has other names than those before it; what a version does not know it passes over
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR "
    "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX2 FMA3",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """On what a chain is replayed; by default as this process would."""

    name: str
    threads: int = 1
    plain: bool = False  # neither torch nor numpy may use AVX
    permuted: int | None = None  # seed of the order of terms


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came out."""

    checked: list[int]
    replayed: list[int]
    flaws: list[str]
    anchor_sha256: str
    confirmed: list[int]
    capability: str  # of torch
    numpy_paths: list[str]  # of numpy's code for vector units, what it may take


def replay_on(machine: Machine, folder: Path, stage: int = 0) -> Replay:
    """Replay the chain of a peer's, or the bootstrap's, state folder in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.swarm.replaying", str(folder)]
    command += [str(stage), "--threads", str(machine.threads)]
    if machine.permuted is not None:
        command += ["--permuted", str(machine.permuted)]
    environment = os.environ | (PLAIN if machine.plain else {})
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = Replay(**json.loads(done.stdout.splitlines()[-1]))
    if machine.plain:
        assert found.capability == "DEFAULT", "torch may use vector units all the same"
        assert not found.numpy_paths, f"numpy may use {found.numpy_paths} all the same"
    return found


# ---- in that process -----------------------------------------------------------------------------
def _permute_terms(seed: int) -> Callable[[], int]:
    """Let every product sum its terms in another order; how many have been."""
    import torch
    from torch import Tensor

    from dilocox.compression import low_rank

    generator = torch.Generator().manual_seed(seed)
    product = low_rank.exact_product
    count = 0

    def permuted(left: Tensor, right: Tensor, out: Tensor) -> None:
        nonlocal count
        count += 1
        order = torch.randperm(len(left), generator=generator)
        columns = torch.randperm(right.shape[1], generator=generator)
        shuffled = torch.empty_like(out)
        product(left[order], right[order][:, columns], shuffled)
        out[:, columns] = shuffled

    low_rank.exact_product = permuted
    return lambda: count


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--permuted", type=int)
    arguments = parser.parse_args()

    import torch

    from dilocox.peer.chain.replay import replay
    from dilocox.peer.chain.store import kept_run

    torch.set_num_threads(arguments.threads)
    permuted = None if arguments.permuted is None else _permute_terms(arguments.permuted)
    kept, stage = kept_run(arguments.folder), arguments.stage
    chain = kept.stages[stage]
    found = replay(kept.manifest(), kept.run, stage, chain.records, chain.states)
    if permuted is not None and not permuted():
        raise RuntimeError("no product was permuted: is this a run in low rank?")
    numpy_core: Any = importlib.import_module("numpy._core._multiarray_umath")
    features: dict[str, bool] = numpy_core.__cpu_features__
    dispatched: list[str] = numpy_core.__cpu_dispatch__
    facts = {
        "checked": found.checked,
        "replayed": found.replayed,
        "flaws": found.flaws,
        "anchor_sha256": found.anchor_sha256,
        "confirmed": found.confirmed,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "numpy_paths": [name for name in dispatched if features[name]],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
