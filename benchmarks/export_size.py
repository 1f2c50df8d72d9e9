"""The memory that an export takes, and that one that was killed goes on.

    python benchmarks/export_size.py [--parameters 1e9] [--stages 8] [--dtype bf16] [--quick]
                                     [--out DIR]

For each stage of a Llama a peer's folder is made: random weights after two records, and a third
record of random values (tests/peer/kept_chains.py). A process exports the run from these folders,
over streams in memory in place of a network, and is killed when half of the shards are written;
another one exports it again. Then a shard is compared with the anchor that it was made of.

parameters  of the model, in millions, and of a stage
killed      shards that the first process left
again       shards that the second one downloaded
peak        resident memory of the second process, GB, most of a stage included
seconds     of the second process
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

# the folders of peers that the tests make; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory import resident_bytes
from benchmarks.pool import pool
from benchmarks.report import Column, Report, parser
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.chain.uploads import Source, find_in_log, open_state
from dilocox.peer.commands.export import export_run
from dilocox.peer.commands.model_memory import DTYPES
from dilocox.peer.options import AnchorOptions
from dilocox.peer.rounds.record import stage_codec
from dilocox.pipeline.partition import plan_stages
from dilocox.pipeline.stage import stage_layout
from tests.peer.kept_chains import RUN, ChainMaker
from tests.peer.memory_swarm import MemorySwarm

LIMIT_S = 1800.0
LOOK_S = 0.2
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `measure` saw; `left` and `downloaded` are numbers of shards."""

    parameters: int
    stages: int
    left: int
    downloaded: int
    peak_bytes: int
    seconds: float


def manifest_of(parameters: float, stages: int) -> Manifest:
    """A Llama of about so many parameters."""
    layers = max(1, round(24 / stages)) * stages
    width = 64 * max(1, round(math.sqrt(parameters / layers / 12.25) / 64))
    model = {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return Manifest.from_dict(
        {"name": "export", "model": model, "stages": stages, "end_tokens": 10**9}
    )


def make_donor(manifest: Manifest, stage: int, folder: Path) -> None:
    """A peer's folder: a state after two records, and the record after it. In a process of its own,
    which gives its memory back.
    """
    identity = Identity.load_or_create(folder / f"identity{stage}.key")
    maker = ChainMaker(identity, folder, manifest, stage=stage)
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2)
    torch.save(maker.anchor[:: max(1, maker.layout.numel // 1000)].clone(), folder / f"some{stage}")


class Donor:
    """A peer of a stage, as its folder says."""

    def __init__(self, manifest: Manifest, stage: int, folder: Path):
        self.peer = Identity.load_or_create(folder / f"identity{stage}.key").peer_id
        own, codec = (
            folder / f"{RUN}-stage{stage}",
            stage_codec(manifest, stage_layout(manifest, stage)),
        )
        self._snapshots = own / "snapshots"
        self._log = RoundLog(own / "log", manifest_digest=manifest.root, codec=codec)
        head = self._log.head()
        self.claim = ClaimRecord(
            round=head.round,
            digest=head.digest,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
        )

    def find(self, want: dict[str, Any]) -> Source | None:
        if want["what"] == "state":
            return open_state(self._snapshots, want)
        header = bool(want.get("header"))
        return find_in_log(self._log, want["what"], want["digest"], header=header)


def export(manifest: Manifest, folder: Path, target: Path, dtype: Any) -> None:
    """Export the run, and note what it took. In a process of its own."""
    began = time.monotonic()
    donors = [Donor(manifest, stage, folder) for stage in range(manifest.stages)]
    swarm = MemorySwarm(**{donor.peer: donor.find for donor in donors})
    place = swarm.place(manifest, lambda stage: {donors[stage].peer: donors[stage].claim})
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{donors[0].peer}"  # its byte tokenizer asks nobody
    invite = Invite(run_id=RUN, bootstraps=(address,))
    export_run(place, target, AnchorOptions(invite=invite, dtype=dtype, timeout_s=LIMIT_S))
    took = {
        "downloaded": len({peer for peer, _ in swarm.asked}),
        "peak": resident_bytes("VmHWM"),
        "seconds": time.monotonic() - began,
    }
    (folder / "took.json").write_text(json.dumps(took))


def measure(parameters: float, stages: int, dtype: str, folder: Path) -> Found:
    """Make the folders, export, kill, and export again."""
    manifest, target = manifest_of(parameters, stages), folder / "model"
    for stage in range(stages):
        with pool(1, threads=None) as one:
            one.submit(make_donor, manifest, stage, folder).result(LIMIT_S)
    context = multiprocessing.get_context("spawn")
    progress = folder / ".model.partial" / "export.json"
    first = context.Process(target=export, args=(manifest, folder, target, dtype))
    first.start()
    deadline = time.monotonic() + LIMIT_S
    while (left := _shards(progress)) < stages // 2:
        if time.monotonic() > deadline or not first.is_alive():
            raise RuntimeError("the first export did not come half way")
        time.sleep(LOOK_S)
    first.kill()
    first.join()
    second = context.Process(target=export, args=(manifest, folder, target, dtype))
    second.start()
    second.join(LIMIT_S)
    if second.exitcode != 0:
        second.kill()
        raise RuntimeError("the second export failed")
    _compare(manifest, folder, target, dtype)
    took = json.loads((folder / "took.json").read_text())
    return Found(
        parameters=sum(plan.num_parameters for plan in plan_stages(manifest.model, stages)),
        stages=stages,
        left=left,
        downloaded=took["downloaded"],
        peak_bytes=took["peak"],
        seconds=took["seconds"],
    )


def _shards(progress: Path) -> int:
    """How many a draft has."""
    try:
        return len(json.loads(progress.read_text())["done"])
    except (OSError, ValueError):
        return 0


def _compare(manifest: Manifest, folder: Path, target: Path, dtype: str) -> None:
    """Some values of the first and the last shard with those that the peer's anchor had."""
    for stage in {0, manifest.stages - 1}:
        layout = stage_layout(manifest, stage)
        flat = torch.zeros(layout.numel)
        name = f"model-{stage + 1:05d}-of-{manifest.stages:05d}.safetensors"
        with safe_open(target / name, framework="pt") as shard:
            for key, view in layout.view(flat).items():
                view.copy_(shard.get_tensor(key))
        some = torch.load(folder / f"some{stage}", weights_only=True)
        expected = some.to(DTYPES[dtype]).float()
        if not torch.equal(flat[:: max(1, layout.numel // 1000)], expected):
            raise RuntimeError(f"the shard of stage {stage} is not its anchor")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--parameters", type=float, default=1e9)
    made.add_argument("--stages", type=int, default=8)
    made.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    report, arguments = Report.parse(made, "export-size")
    if arguments.quick:
        arguments.parameters, arguments.stages = 5e6, 2
    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder)
        found = measure(arguments.parameters, arguments.stages, arguments.dtype, place)
    columns = [
        *(Column(name, ",.1f") for name in ("parameters", "of a stage")),
        *(Column(name) for name in ("killed", "again")),
        Column("peak", ".2f"),
        Column("seconds", ".0f"),
    ]
    millions = found.parameters / 1e6
    killed = f"{found.left} of {found.stages}"
    peak = found.peak_bytes / GB
    row = (millions, millions / found.stages, killed, found.downloaded, peak, found.seconds)
    title = f"an export in {arguments.dtype}, killed half way and begun again"
    report.table(columns, [row], title=title)
    report.close()


if __name__ == "__main__":
    main()
