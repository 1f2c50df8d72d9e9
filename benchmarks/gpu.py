"""What a GPU makes of a stage: its speed beside plain PyTorch, its memory, and the codec on it.

    python benchmarks/gpu.py [--models 150m 1b] [--recompute] [--device auto] [--json FILE]
                             [--out DIR]
    python benchmarks/gpu.py --quick        a tiny model, in a minute on any processor

Each model is one stage, in a process of its own. Speeds are medians of inner steps after two that
warm up; random tokens.

    dilocox     tokens a second of the classes that a peer uses, in the manifest's precision
    plain       of a loop over the same model of transformers, the same batch, precision and AdamW,
                with transformers' own checkpointing if `--recompute` is given
    of peak     floating point operations of these tokens (6 a parameter that multiplies, 12 for
                each token, position and channel of attention) over what products of large matrices
                alone reach in that precision on this device, in the same process
    memory      most that PyTorch had in use on the GPU in a step, GB; on a CPU nothing is shown;
                and what a peer counts with (`dilocox plan`), without CUDA's own
    send        seconds in which the message of a round is made: weights come from the device in
                chunks, and the rest is arithmetic on the CPU
    codec       seconds that a billion parameters would take in the first exchange's products and in
                packing, on the CPU and on the device, on one layer of 50 million parameters
    same bytes  whether packing gives the same bytes on both; products may differ in rounding, and
                by how much is shown as a share of the largest value

The second table has the bytes per parameter of every vector of the stage, and where it lies.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, for what follows

from benchmarks.memory import Bench
from benchmarks.pool import pool
from benchmarks.report import Column, Report, parser
from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import Manifest
from dilocox.peer.memory_and_disk import CUDA_BYTES
from dilocox.peer.process.prepare import memory_of_stages
from dilocox.peer.rounds.record import stage_codec
from dilocox.pipeline.partition import load_config
from dilocox.pipeline.stage import chosen_device

MODEL_LIMIT_S = 1800.0
GB = 1e9
WARM_UP = 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # others compute in fp32


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, its batch, and how much of everything is measured."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int = 32000
    sequence: int = 1024
    microbatch: int = 8
    microbatches: int = 4
    steps: int = 8
    matrix: int = 8192  # side of the products that the peak is measured by
    codec_rows: int = 8192  # of the codec's one matrix, which has 6144 columns
    rank: int = 64

    def description(self) -> dict[str, Any]:
        """The run.yaml of one stage."""
        return {
            "name": "gpu",
            "model": {
                "model_type": "llama",
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_value_heads,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": 1,
                "pad_token_id": 0,
            },
            "stages": 1,
            "end_tokens": 10**9,
            "batch": {
                "sequence_length": self.sequence,
                "microbatch_size": self.microbatch,
                "microbatches": self.microbatches,
            },
            "codec": {"scheme": "low_rank", "rank": self.rank, "max_rank": self.rank},
        }


SIZES = {
    "150m": Size(hidden=1024, intermediate=2688, layers=12, heads=16, key_value_heads=16),
    "1b": Size(hidden=2048, intermediate=5632, layers=22, heads=32, key_value_heads=4),
    "quick": Size(
        hidden=64,
        intermediate=176,
        layers=2,
        heads=2,
        key_value_heads=2,
        vocabulary=512,
        sequence=64,
        microbatch=2,
        microbatches=2,
        steps=3,
        matrix=256,
        codec_rows=64,
        rank=16,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of inner steps."""

    tokens_per_s: float
    of_peak: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CodecFigures:
    """Seconds per billion parameters, and how the device's results compare with the CPU's."""

    cpu_s: float
    device_s: float
    same_bytes: bool
    products_differ: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one model showed; vectors: device and bytes by kind."""

    model: str
    device: str
    parameters: int
    planned_bytes: int
    peak_flops: float
    dilocox: Speed
    plain: Speed
    send_s: float
    codec: CodecFigures
    vectors: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])


def wait_for(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of it, on the device, too."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def peak_flops(size: Size, device: torch.device, precision: str) -> float:
    """Floating point operations a second of products of large square matrices: the fastest seen."""
    dtype = DTYPES.get(precision, torch.float32)
    a, b = (torch.randn(size.matrix, size.matrix, device=device, dtype=dtype) for _ in range(2))
    return 2 * size.matrix**3 / min(timed(lambda: a @ b, device) for _ in range(10))


def flops_per_token(size: Size, parameters: int) -> int:
    """Forward and backward, without what is computed a second time."""
    multiplying = parameters - size.vocabulary * size.hidden  # the embedding is a lookup
    return 6 * multiplying + 12 * size.layers * size.sequence * size.hidden


def speed_of(
    step: Callable[[], object], size: Size, device: torch.device, *, flops: float, peak: float
) -> Speed:
    """Of an inner step that takes `flops` for a token."""
    tokens = size.sequence * size.microbatch * size.microbatches
    seconds: list[float] = []
    for number in range(WARM_UP + size.steps):
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds.append(timed(step, device))
    rate = tokens / median(seconds[WARM_UP:])
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Speed(tokens_per_s=rate, of_peak=rate * flops / peak, memory_bytes=memory)


class PlainLoop:
    """What anybody would write: the whole model, its own loss, fused AdamW, clipping."""

    def __init__(
        self,
        size: Size,
        manifest: Manifest,
        device: torch.device,
        *,
        precision: str,
        recompute: bool,
    ):
        self._size, self._device, self._dtype = size, device, DTYPES.get(precision)
        model = cast(Any, AutoModelForCausalLM).from_config(
            load_config(manifest.model), dtype=torch.float32
        )
        self._model: Any = model.to(device).train()
        if recompute:
            old = "gradient_checkpointing_enable"  # what older versions call it
            enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
            enable({"use_reentrant": False})
        inner = manifest.inner
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, betas=inner.betas, eps=inner.eps, fused=True
        )

    def step(self) -> None:
        """One inner step on random tokens."""
        size = self._size
        shape = (size.microbatch, size.sequence)
        for _ in range(size.microbatches):
            ids = torch.randint(3, 259, shape).to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None):
                loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / size.microbatches).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def codec_figures(size: Size, manifest: Manifest, device: torch.device) -> CodecFigures:
    """The first exchange's products, and the packing of what they give."""
    layout = FlatLayout.of([("layer", (size.codec_rows, 6144))])
    codec = stage_codec(manifest, layout)
    low_rank, basis = codec.low_rank(codec.first_ranks), codec.first_basis("gpu")
    if low_rank is None or basis is None:
        raise RuntimeError("the benchmark's own codec is of low rank")
    message = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    phases = codec.phases(codec.first_ranks)

    def encode(on: torch.device | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        p = low_rank.project(message, basis, on)
        q = low_rank.contract(message, orthonormal, on)
        place = on or torch.device("cpu")
        packed = [phase.codec.encode(v.to(place)) for phase, v in zip(phases, (p, q), strict=True)]
        return torch.cat([p.cpu(), q.cpu()]), packed

    orthonormal = low_rank.orthonormal(low_rank.project(message, basis))
    on_device = None if device.type == "cpu" else device
    seconds: dict[torch.device | None, float] = {}
    for on in (None, on_device):
        seconds[on] = min(timed(lambda on=on: encode(on), device) for _ in range(3))
    products, _ = encode(on_device)
    reference, payloads = encode(None)
    vectors = reference.split([phase.numel for phase in phases])
    again = [
        phase.codec.encode(vector.to(device)).cpu()
        for phase, vector in zip(phases, vectors, strict=True)
    ]
    largest = float(reference.abs().max())
    return CodecFigures(
        cpu_s=seconds[None] * 1e9 / layout.numel,
        device_s=seconds[on_device] * 1e9 / layout.numel,
        same_bytes=all(torch.equal(a, b) for a, b in zip(again, payloads, strict=True)),
        products_differ=float((products - reference).abs().max()) / largest,
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the stage of dilocox showed."""

    parameters: int
    precision: str
    peak_flops: float
    speed: Speed
    send_s: float
    vectors: dict[str, tuple[str, int]]


def stage_of(size: Size, manifest: Manifest, device: torch.device, *, recompute: bool) -> Stage:
    """The classes that a peer uses, on the whole model as one stage."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(manifest, 0, Path(folder), recompute=recompute, device=device)
        precision = bench.model.optimizer.precision
        peak = peak_flops(size, device, precision)
        parameters = sum(each.numel() for each in bench.model.stage.parameters())

        def step() -> None:
            bench.passes()
            bench.go()

        flops = flops_per_token(size, parameters)
        speed = speed_of(step, size, device, flops=flops, peak=peak)
        send_s = timed(bench.send, device)
        bench.passes()
        return Stage(
            parameters=parameters,
            precision=precision,
            peak_flops=peak,
            speed=speed,
            send_s=send_s,
            vectors=bench.places(),
        )


def planned_bytes(manifest: Manifest, *, recompute: bool) -> int:
    """Of a GPU, what a peer counts with for the one stage."""
    (needs,) = memory_of_stages(manifest, recompute=recompute)
    return needs.on_gpu - 2 * CUDA_BYTES


def measure(name: str, device_option: str, recompute: bool) -> Figures:
    """One model. To be called in a fresh process."""
    size, device = SIZES[name], chosen_device(device_option)
    manifest = Manifest.from_dict(size.description())
    stage = stage_of(size, manifest, device, recompute=recompute)
    gc.collect()  # modules refer to themselves, and the plain loop needs the room
    if device.type == "cuda":
        torch.cuda.empty_cache()
    plain = PlainLoop(size, manifest, device, precision=stage.precision, recompute=recompute)
    flops = flops_per_token(size, stage.parameters)
    theirs = speed_of(plain.step, size, device, flops=flops, peak=stage.peak_flops)
    return Figures(
        model=name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        parameters=stage.parameters,
        planned_bytes=planned_bytes(manifest, recompute=recompute),
        peak_flops=stage.peak_flops,
        dilocox=stage.speed,
        plain=theirs,
        send_s=stage.send_s,
        codec=codec_figures(size, manifest, device),
        vectors=stage.vectors,
    )


def in_fresh_process(name: str, device: str, recompute: bool) -> Figures:
    """`measure` in a process that has done nothing before."""
    with pool(1, threads=None) as one:
        return one.submit(measure, name, device, recompute).result(MODEL_LIMIT_S)


def show(found: list[Figures], report: Report) -> None:
    """The two tables."""
    rows: dict[str, Callable[[Figures], str]] = {
        "million parameters": lambda f: f"{f.parameters / 1e6:.1f}",
        "peak, TFLOP/s": lambda f: f"{f.peak_flops / 1e12:.2f}",
        "dilocox, tokens/s": lambda f: f"{f.dilocox.tokens_per_s:,.0f}",
        "plain, tokens/s": lambda f: f"{f.plain.tokens_per_s:,.0f}",
        "dilocox, of peak": lambda f: f"{f.dilocox.of_peak:.1%}",
        "plain, of peak": lambda f: f"{f.plain.of_peak:.1%}",
        "dilocox, memory GB": lambda f: f"{f.dilocox.memory_bytes / GB:.2f}",
        "planned, memory GB": lambda f: f"{f.planned_bytes / GB:.2f}",
        "plain, memory GB": lambda f: f"{f.plain.memory_bytes / GB:.2f}",
        "send, s": lambda f: f"{f.send_s:.3f}",
        "codec on the CPU, s a billion": lambda f: f"{f.codec.cpu_s:.1f}",
        "codec on the device, s a billion": lambda f: f"{f.codec.device_s:.1f}",
        "same bytes": lambda f: "yes" if f.codec.same_bytes else "NO",
        "products differ by": lambda f: f"{f.codec.products_differ:.1e}",
    }
    cells = [(heading, *(cell(each) for each in found)) for heading, cell in rows.items()]
    names = [each.model for each in found]
    columns = [Column("figure"), *(Column(name) for name in names)]
    report.table(columns, cells, title=f"on {found[0].device}")
    vectors = [
        (kind, place, *(each.vectors[kind][1] / each.parameters for each in found))
        for kind, (place, _) in found[0].vectors.items()
    ]
    columns = [Column("vector"), Column("lies on"), *(Column(name, ".2f") for name in names)]
    report.table(columns, vectors, title="bytes per parameter", part="vectors")


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=("150m", "1b"), default=["150m", "1b"])
    made.add_argument("--recompute", action="store_true", help="layers keep only their inputs")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    made.add_argument("--json", type=Path, help="write the figures to this file, too")
    report, arguments = Report.parse(made, "gpu")
    found: list[Figures] = []
    for name in ["quick"] if arguments.quick else arguments.models:
        try:
            found.append(in_fresh_process(name, arguments.device, arguments.recompute))
        except torch.OutOfMemoryError as error:
            sys.stderr.write(f"{name}: {str(error).partition('.')[0]}; try --recompute\n")
        if arguments.json:  # so that a later model loses nothing
            arguments.json.write_text(json.dumps([asdict(each) for each in found]) + "\n")
    if found:
        show(found, report)
    report.close()


if __name__ == "__main__":
    main()
