"""What memory a peer takes for its stage: the whole model cut into one, two and four stages.

    python benchmarks/memory.py [--stages 1 2 4] [--layers 8] [--hidden-size 384] [--recompute]
                                [--quick] [--out DIR]

The figures of docs/operator.md are those of one stage, `--stages 1 --microbatches 2`, with
`--hidden-size 512`, and with `--layers 12 --hidden-size 768 --vocabulary 8192`.

Every stage is built in a process of its own by the classes that a peer uses; it makes an inner
step, sends, makes another one with the send in flight, and applies the record that holds the send.
The neighbours' microbatches and gradients are random numbers.

The first table says what the stage's vectors take, in bytes per parameter, counted in the tensors
themselves at the end of the second step's last backward. `other shared` are the three vectors in
shared memory besides the current anchor and outer momentum: message, and the next anchor and
momentum.

The second one says how that and the activations add up. `in flight` are microbatches times what one
of them keeps for its backward. `peak` is how far resident memory rose above what it was before the
stage was built; `rest` is the part of it that nothing of the above explains: temporaries, the
allocator's and the kernels' own. A peer that held anything of another stage would show it there.
Read from Linux's /proc. A peer's four other processes are not in it. `plan` is what the doctor says
without them (peer/memory_and_disk.py), and `plan/peak` how far it is from what was measured.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pool import pool
from benchmarks.report import Column, Report, parser
from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.averager import StageBuffers
from dilocox.peer.memory_and_disk import PROCESSES_BYTES
from dilocox.peer.process.prepare import StageNeeds, local_model
from dilocox.peer.rounds.outer_step import outer_step
from dilocox.peer.training.merge import RecordFacts, Remainder
from dilocox.peer.training.snapshot_taking import Snapshots
from dilocox.peer.training.unsent_progress import chunks
from dilocox.pipeline.partition import plan_stages
from dilocox.pipeline.stage import parameter_shapes
from dilocox.pipeline.stage_worker import StageWorker, window_size

STAGE_LIMIT_S = 600.0
LEARNING_RATE = 1e-4
ON_GPU = ("weights", "gradients", "AdamW moments")
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one stage took, in bytes."""

    num_stages: int
    stage: int
    parameters: int
    vectors: dict[str, int]
    """By kind."""
    microbatch_bytes: int
    in_flight: int
    """Most microbatches that were kept at once."""
    before_bytes: int
    """Resident before the stage was built: interpreter and libraries."""
    peak_bytes: int
    """Resident at the peak."""
    planned_bytes: int
    """The plan for as many microbatches, without processes and what an exchange encodes."""

    @property
    def peak_bytes_per_parameter(self) -> float:
        """How far resident memory rose at the peak, activations included."""
        return (self.peak_bytes - self.before_bytes) / self.parameters

    @property
    def host_bytes_beside_gpu(self) -> float:
        """Bytes a parameter of the vectors that stay in the machine's memory beside a GPU."""
        there = sum(size for kind, size in self.vectors.items() if kind not in ON_GPU)
        return there / self.parameters

    @property
    def explained_bytes(self) -> int:
        """Vectors and activations."""
        return sum(self.vectors.values()) + self.in_flight * self.microbatch_bytes


class Bench:
    """One stage, fed like a stage in the middle of a replica."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        folder: Path,
        *,
        recompute: bool,
        device: torch.device | None = None,
    ):
        self._batch, self._stage, self._num_stages = manifest.batch, stage, manifest.stages
        self._manifest = manifest
        self._hidden_size: int = manifest.model["hidden_size"]
        layout = FlatLayout.of(parameter_shapes(manifest.model, manifest.stages, stage))
        self.buffers = StageBuffers.allocate(layout.numel)
        snapshots = Snapshots(folder, layout=layout.digest, period_s=1500.0)
        device = device or torch.device("cpu")
        self.model = local_model(manifest, stage, layout, self.buffers, snapshots, device)
        self.worker = StageWorker(
            self.model.stage,
            self.model.optimizer,
            microbatches=self._batch.microbatches,
            recompute=recompute,
            document_end=manifest.document_end,
        )
        self.in_flight = 0

    def passes(self) -> None:
        """All forwards and backwards of one inner step, with as many in flight as at the start."""
        window = window_size(
            stages=self._num_stages,
            microbatches=self._batch.microbatches,
            round_trip_s=0.0,
            compute_s=0.0,
            limit=self._batch.microbatches,
        )
        batch = self._batch
        hidden = (batch.microbatch_size, batch.sequence_length, self._hidden_size)
        waiting: deque[int] = deque()
        for microbatch in range(batch.microbatches):
            windows = torch.randint(3, 259, (batch.microbatch_size, batch.sequence_length + 1))
            self.worker.feed(microbatch, torch.randn(hidden) if self._stage else None, windows)
            produced = self.worker.run_one()
            kept = self.worker.in_flight
            if produced is not None and produced.kind == "forward":
                waiting.append(microbatch)
            else:  # the last stage keeps a microbatch only while it runs
                kept += 1
            self.in_flight = max(self.in_flight, kept)
            if len(waiting) == window:
                self._backward(waiting.popleft(), hidden)
        while waiting:
            self._backward(waiting.popleft(), hidden)
        if not self.worker.finished:
            raise RuntimeError(f"stage {self._stage} did not finish its inner step")

    def _backward(self, microbatch: int, shape: tuple[int, ...]) -> None:
        self.worker.feed_gradient(microbatch, torch.randn(shape) * 1e-4)
        self.worker.run_one()

    def go(self) -> None:
        """End the inner step."""
        if not self.worker.go(1.0, LEARNING_RATE):
            raise RuntimeError(f"stage {self._stage} skipped its inner step")
        self.model.merge.trained(self._batch.tokens_per_step)

    def send(self) -> None:
        """Take what was learnt as the send of round 0, as at the end of a round."""
        self.model.merge.send(0)

    def commit(self) -> None:
        """Apply the record of round 0, which holds the send, as both processes of a peer do."""
        merge, buffers, outer = self.model.merge, self.buffers, outer_step(self._manifest, 0)
        anchor, momentum = merge.anchor, merge.momentum
        for part in chunks(anchor):  # of a peer alone the average is its own message
            outer.apply(
                anchor[part], momentum[part], buffers.message[part], anchor[part], momentum[part]
            )
        record = RecordFacts(round=0, digest="", previous=merge.digest, contributor=True)
        merge.commit(record, anchor, momentum, Remainder(buffers.message))

    def vectors(self) -> dict[str, int]:
        """Bytes of the stage's vectors by kind, in the middle of an inner step."""
        return {kind: sum(each.nbytes for each in held) for kind, held in self._held().items()}

    def places(self) -> dict[str, tuple[str, int]]:
        """The same with where each lies."""
        return {
            kind: (
                ", ".join(sorted({each.device.type for each in held if each.numel() > 1})),
                sum(each.nbytes for each in held),
            )
            for kind, held in self._held().items()
        }

    def _held(self) -> dict[str, list[Tensor]]:
        merge, buffers = self.model.merge, self.buffers
        gradients = [each.grad for each in self.model.stage.parameters() if each.grad is not None]
        return {
            "weights": [merge.progress.live],
            "gradients": gradients,
            "AdamW moments": list(self.model.optimizer.state_dict().tensors.values()),
            "anchor": [merge.anchor],
            "outer momentum": [merge.momentum],
            "start of the round": [merge.progress.start],
            "residual or message": [buffers.message],
            "send in flight": [send.delta for send in merge.in_flight.values()],
        }


def measure(description: dict[str, Any], stage: int, recompute: bool) -> Figures:
    """Build one stage and let it work. To be called in a fresh process."""
    manifest = Manifest.from_dict(description)
    plan = plan_stages(manifest.model, manifest.stages)[stage]
    load_kernels()
    before = reset_peak()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(manifest, stage, Path(folder), recompute=recompute)
        bench.passes()
        bench.go()
        bench.send()
        bench.passes()
        vectors = bench.vectors()
        bench.go()
        bench.commit()
    peak = resident_bytes("VmHWM")
    needs = StageNeeds(manifest, stage, recompute=recompute).memory
    more = (bench.in_flight - 1) * bench.worker.stored_bytes
    return Figures(
        num_stages=manifest.stages,
        stage=stage,
        parameters=plan.num_parameters,
        vectors=vectors,
        microbatch_bytes=bench.worker.stored_bytes,
        in_flight=bench.in_flight,
        before_bytes=before,
        peak_bytes=peak,
        planned_bytes=needs.on_cpu - PROCESSES_BYTES - needs.encoded + more,
    )


def load_kernels() -> None:
    """Run a little of everything, so that what libraries load at first use is there before."""
    layer = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(256, 256)).square().mean().backward()
    torch.nn.utils.get_total_norm(
        [each.grad for each in layer.parameters() if each.grad is not None]
    )
    optimizer.step()


def reset_peak() -> int:
    """Let the peak of resident memory start anew; what is resident now, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # else the stage gets what the imports have left
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def in_fresh_process(description: dict[str, Any], stage: int, recompute: bool) -> Figures:
    """`measure` in a process that has done nothing before."""
    with pool(1, threads=None) as one:
        return one.submit(measure, description, stage, recompute).result(STAGE_LIMIT_S)


def run_description(arguments: argparse.Namespace, num_stages: int) -> dict[str, Any]:
    """The run.yaml of a Llama over bytes."""
    heads = max(1, arguments.hidden_size // 64)
    return {
        "name": "memory",
        "model": {
            "model_type": "llama",
            "vocab_size": arguments.vocabulary,
            "hidden_size": arguments.hidden_size,
            "intermediate_size": arguments.hidden_size * 11 // 4,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        "stages": num_stages,
        "end_tokens": 10**9,
        "batch": {
            "sequence_length": arguments.sequence_length,
            "microbatch_size": arguments.microbatch_size,
            "microbatches": arguments.microbatches,
        },
    }


def kinds_table(report: Report, figures: list[Figures]) -> None:
    """Bytes per parameter by kind, a column per stage."""
    rows = [
        (kind, *(each.vectors[kind] / each.parameters for each in figures))
        for kind in figures[0].vectors
    ]
    rows += [
        ("total", *(sum(each.vectors.values()) / each.parameters for each in figures)),
        ("beside a GPU", *(each.host_bytes_beside_gpu for each in figures)),
        ("peak", *(each.peak_bytes_per_parameter for each in figures)),
    ]
    stages = [Column(f"{each.stage + 1}/{each.num_stages}", ".2f") for each in figures]
    title = "bytes per parameter of the stage"
    report.table([Column("kind"), *stages], rows, title=title, part="kinds")


def stages_table(report: Report, figures: list[Figures]) -> None:
    """How vectors and activations add up, beside what was measured."""
    rows: list[tuple[str | float, ...]] = []
    for each in figures:
        risen = each.peak_bytes - each.before_bytes
        rows.append(
            (
                f"{each.stage + 1}/{each.num_stages}",
                each.parameters,
                sum(each.vectors.values()) / MB,
                f"{each.in_flight} x {each.microbatch_bytes / MB:.1f}",
                each.explained_bytes / MB,
                risen / MB,
                (risen - each.explained_bytes) / MB,
                each.before_bytes / MB,
                each.planned_bytes / MB,
                each.planned_bytes / risen,
            )
        )
    columns = [
        Column("stage"),
        Column("parameters", ","),
        Column("vectors", ".0f"),
        Column("in flight"),
        *(Column(name, ".0f") for name in ("sum", "peak")),
        Column("rest", "+.0f"),
        *(Column(name, ".0f") for name in ("before", "plan")),
        Column("plan/peak", ".2f"),
    ]
    report.table(columns, rows, title="a stage in memory, MB")


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="to cut into")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--hidden-size", type=int, default=384)
    made.add_argument("--vocabulary", type=int, default=4096)
    made.add_argument("--sequence-length", type=int, default=128)
    made.add_argument("--microbatch-size", type=int, default=2)
    made.add_argument("--microbatches", type=int, default=8, help="of an inner step")
    made.add_argument("--recompute", action="store_true", help="keep only the forwards' inputs")
    report, arguments = Report.parse(made, "memory")
    if not Path("/proc/self/clear_refs").exists():
        made.error("resident memory is read from Linux's /proc, which is not here")
    if arguments.quick:
        arguments.stages, arguments.layers, arguments.hidden_size = [1], 2, 128
    descriptions = [run_description(arguments, count) for count in arguments.stages]
    try:
        for description in descriptions:
            plan_stages(Manifest.from_dict(description).model, description["stages"])
    except InvalidInput as error:
        made.error(str(error))
    figures = [
        in_fresh_process(description, stage, arguments.recompute)
        for description in descriptions
        for stage in range(description["stages"])
    ]
    kinds_table(report, figures)
    stages_table(report, figures)
    report.close()


if __name__ == "__main__":
    main()
