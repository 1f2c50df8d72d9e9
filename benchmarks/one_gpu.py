"""OpenDiLoCo's 150 M on one GPU: replicas take turns on it; the loss at equal tokens.

    python benchmarks/one_gpu.py [--minutes 9] [--steps 2000] [--compile] [--prepared DIR]
                                 [--only NAME ...] [--out DIR]
    python benchmarks/one_gpu.py --quick        tiny, on any processor

A Llama of OpenDiLoCo's shape (arXiv 2407.07852: 1024 wide, 12 layers, 16 heads; 149 million values
in its layers) with a vocabulary of 8,192 that is learnt from the text. The text is the source of
the Python packages that are installed, 80 MB of it in an order that hashes make, so another machine
trains on other text and only rows of one run compare. Four workers, each with a part of the text of
its own and 4 windows of 512 tokens an inner step; OpenDiLoCo's inner AdamW (4e-4, betas 0.9 and
0.95, decay 0.1) and outer Nesterov (0.7, 0.9), a constant rate after a warm-up of 100 steps.

    data parallel   the workers' gradients are averaged at every inner step
    DiLoCo          synchronous, 16 bits, H = 50 and 500; at 50 also with the manifest's outer step
    ours            overlapped (a record arrives a quarter of a round after its send), 4 bits, with
                    the manifest's outer step
    Muon            inner Muon instead of AdamW, synchronous with 16 bits, and ours with 4 and 2

Each row is a process of its own: while one averages on the CPU, others train on the GPU. Several
with Muon failed on one card (docs/results.md): its rows run only by --only, one by one, with
--prepared.
Inner steps, clipping, codecs, outer step and merge are those of peers (`dilocox.local_swarm`),
means are added up on the GPU. The loss is the anchor's; at its last point a row's record in flight
has arrived. Where the time is over before all rows are done, the table ends at the tokens that were
reached.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import SIZES
from benchmarks.gpu import Size as Shape
from benchmarks.pool import pool
from benchmarks.report import Column, Report, parser
from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import CodecSpec, DataSpec, InnerSpec, OuterSpec, RoundSpec
from dilocox.peer.training.data import Corpus, held_out_windows
from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor, learning_rate
from dilocox.peer.training.local_swarm import LocalSwarm
from dilocox.pipeline.stage import build_stage, chosen_device, flatten_parameters
from dilocox.pipeline.stage_worker import StagePasses

MB = 1e6
LEARNT_FROM_BYTES = 12_000_000  # of the text: the tokenizer
END = "<end>"
ADAMW = InnerSpec(learning_rate=4e-4, schedule="constant")
MUON = replace(ADAMW, optimizer="muon", muon_learning_rate=1e-3)
OPENDILOCO = OuterSpec(merge="none", learning_rate=0.7, momentum=0.9)
SYNCHRONOUS = OuterSpec(merge="none")
FULL, FOUR_BIT, TWO_BIT = (CodecSpec(scheme="dense", bits=bits) for bits in (16, 4, 2))


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its workers, and the text for them; long, short: the two H."""

    shape: Shape = SIZES["150m"]
    vocabulary: int = 8192
    workers: int = 4
    windows: int = 4
    length: int = 512
    short: int = 50
    long: int = 500
    warmup_steps: int = 100
    points: int = 100  # inner steps between two
    held_out: int = 64
    text_mb: float = 80.0

    def model(self) -> dict[str, Any]:
        """As a manifest has it, with the vocabulary that was learnt."""
        model: dict[str, Any] = self.shape.description()["model"]
        return model | {"vocab_size": self.vocabulary, "eos_token_id": 0}

    @property
    def tokens_per_step(self) -> int:
        """Of all workers."""
        return self.workers * self.windows * self.length


QUICK = Size(
    shape=SIZES["quick"],
    vocabulary=512,
    workers=2,
    windows=2,
    length=32,
    short=3,
    long=6,
    warmup_steps=2,
    points=3,
    held_out=4,
    text_mb=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A row. inner_steps: H; None: gradients are averaged."""

    name: str
    inner_steps: int | None
    outer: OuterSpec = field(default_factory=OuterSpec)
    codec: CodecSpec = FULL
    inner: InnerSpec = ADAMW


def contestants(size: Size) -> list[Contestant]:
    """The rows of the table."""
    short, long = size.short, size.long
    return [
        Contestant(name="data parallel", inner_steps=None),
        Contestant(name=f"DiLoCo, H = {short}", inner_steps=short, outer=OPENDILOCO),
        Contestant(name=f"DiLoCo, H = {long}", inner_steps=long, outer=OPENDILOCO),
        Contestant(
            name=f"DiLoCo, outer of ours, H = {short}", inner_steps=short, outer=SYNCHRONOUS
        ),
        Contestant(name=f"ours, H = {short}", inner_steps=short, codec=FOUR_BIT),
        Contestant(name=f"ours, H = {long}", inner_steps=long, codec=FOUR_BIT),
        Contestant(
            name=f"Muon, H = {short}",
            inner_steps=short,
            outer=SYNCHRONOUS,
            inner=MUON,
        ),
        Contestant(
            name=f"ours, Muon, H = {short}",
            inner_steps=short,
            codec=FOUR_BIT,
            inner=MUON,
        ),
        Contestant(
            name=f"ours, Muon 2 bit, H = {short}",
            inner_steps=short,
            codec=TWO_BIT,
            inner=MUON,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a contestant reports: after so many inner steps, nats a token of held-out text, bytes
    that each worker has sent, and seconds since its first step.
    """

    steps: int
    loss: float
    sent: float
    seconds: float


class Replica:
    """One worker's weights and inner optimizer on the device."""

    def __init__(self, first: Tensor, layout: FlatLayout, inner: InnerSpec, device: torch.device):
        self.live = first.to(device, copy=True)
        self.parameters = {
            name: nn.Parameter(view) for name, view in layout.view(self.live).items()
        }
        self.optimizer = InnerOptimizer(self.parameters.items(), inner)


class Card:
    """The device with one model, whose parameters are in turn those of each replica."""

    def __init__(self, size: Size, inner: InnerSpec, replicas: int, *, device: str, compiled: bool):
        self.device = chosen_device(device)
        self._module = build_stage(size.model(), 0, 1, seed=0)
        shapes = [(name, tuple(p.shape)) for name, p in self._module.named_parameters()]
        self.layout = FlatLayout.of(shapes)
        first = flatten_parameters(self._module, self.layout)
        self._module.to(self.device)
        self.replicas = [Replica(first, self.layout, inner, self.device) for _ in range(replicas)]
        self._judged = first.to(self.device, copy=True)
        self._clip_norm = inner.clip_norm
        if compiled:
            self._module.compile_layers()
        # all of the optimizers compute in one precision, and without a loss scale
        self._passes = StagePasses(self._module, self.replicas[0].optimizer, recompute=False)

    @property
    def module(self) -> nn.Module:
        """The model, whatever its parameters are just now."""
        return self._module

    def step(self, replica: Replica, batches: Sequence[Tensor], rate: float) -> None:
        """An inner step on the mean over batches int64 [b, t + 1]."""
        self._become(replica.parameters)
        for batch in batches:
            self._passes.forward_backward(None, batch, len(batches))
        for own, theirs in zip(self._module.parameters(), replica.parameters.values(), strict=True):
            theirs.grad, own.grad = own.grad, None
        optimizer = replica.optimizer
        if not optimizer.step(clip_factor(optimizer.squared_norm(), self._clip_norm), rate):
            raise RuntimeError("an inner step was not finite")

    def validation_loss(self, weights: Tensor, windows: Tensor) -> float:
        """Nats a token of weights fp32 [n] on windows int64 [m, t + 1]."""
        self._judged.copy_(weights)
        self._become(self.layout.view(self._judged))
        total = 0.0
        for batch in windows.split(8):
            total += float(self._passes.evaluate(None, batch))
        return total / windows[:, 1:].numel()

    def _become(self, tensors: Mapping[str, Tensor]) -> None:
        for own, theirs in zip(self._module.parameters(), tensors.values(), strict=True):
            own.data = theirs.data


class SwarmOnCard(LocalSwarm):
    """Its reducers compute on the device, where the codec gives the same bytes."""

    def __init__(self, *arguments: Any, device: torch.device, **named: Any):
        super().__init__(*arguments, **named)
        self._device = device

    def reduce(
        self, phase: int, reducer: int, values: Mapping[str, Tensor], weight: Mapping[str, int]
    ) -> tuple[Tensor, Sequence[str]]:
        """The decoded mean [n] of the reducer's part; everybody counts the same."""
        codec, numel = self.codec.phases(self.ranks)[phase].codec, len(values["0"])
        total = torch.zeros(numel, device=self._device)
        for part in values.values():
            total += codec.decode(codec.encode(part.to(self._device)), numel)
        mean = codec.encode(total / len(values))
        self.bytes_sent += 2 * (len(values) - 1) * mean.numel()  # their parts, and the mean
        return codec.decode(mean, numel).cpu(), list(values)


def train(
    contestant: Contestant, size: Size, steps: int, prepared: Path, *, device: str, compiled: bool
) -> Iterator[Point]:
    """Its points, as they come."""
    shares = contestant.inner_steps is not None
    inner = replace(contestant.inner, warmup_tokens=size.warmup_steps * size.tokens_per_step)
    card = Card(size, inner, size.workers if shares else 1, device=device, compiled=compiled)
    windows = [np.load(part_file(prepared, n), mmap_mode="r") for n in range(size.workers)]
    held_out = torch.from_numpy(np.load(prepared / "held_out.npy"))
    swarm = None
    if contestant.inner_steps is not None:
        swarm = SwarmOnCard(
            [card.module],
            device=card.device,
            rounds=RoundSpec(inner_steps=contestant.inner_steps, robust="none"),
            arrival=max(1, contestant.inner_steps // 4),
            outer=contestant.outer,
            codec=contestant.codec,
            weights=[replica.live for replica in card.replicas],
        )
    began = time.monotonic()
    for step in range(1, steps + 1):
        batches = [torch.from_numpy(each[step - 1].astype(np.int64)) for each in windows]
        rate = learning_rate(inner, 1, step * size.tokens_per_step)
        if swarm is None:
            card.step(card.replicas[0], batches, rate)
        else:
            for replica, batch in zip(card.replicas, batches, strict=True):
                card.step(replica, [batch], rate)
            swarm.trained(size.windows * size.length)
        whole = step % (contestant.inner_steps or 1) == 0
        if step == steps or (step % size.points == 0 and whole):
            weights, sent = card.replicas[0].live, step * data_parallel_bytes(size, card.layout)
            if swarm is not None:
                if step == steps:
                    swarm.arrive()
                weights, sent = swarm.anchor, swarm.bytes_sent / size.workers
            loss = card.validation_loss(weights, held_out)
            yield Point(steps=step, loss=loss, sent=sent, seconds=time.monotonic() - began)


def data_parallel_bytes(size: Size, layout: FlatLayout) -> float:
    """What a worker sends in an all-reduce of gradients in fp16."""
    return 2 * (size.workers - 1) / size.workers * 2 * layout.numel


def part_file(prepared: Path, worker: int) -> Path:
    """Where a worker's windows lie, int32 [steps, b, t + 1]."""
    return prepared / f"worker-{worker}.npy"


def prepare(folder: Path, size: Size, steps: int) -> None:
    """Text, tokenizer, and every worker's windows, unless the folder has them."""
    made_for, asked = folder / "made-for.txt", f"{size}, {steps} steps\n"
    if made_for.exists():
        if made_for.read_text() != asked:
            raise SystemExit(f"{folder} holds windows of other sizes: remove it, or name another")
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_bytes(b"".join(installed_text(int(size.text_mb * MB))))
    learn_tokenizer(text.read_bytes()[:LEARNT_FROM_BYTES], size.vocabulary, folder / "tokenizer")
    data = DataSpec(
        source=str(text), format="text", tokenizer=str(folder / "tokenizer"), parts=size.workers
    )
    with pool(size.workers, threads=None) as processes:
        for made in [
            processes.submit(save_part, data, size, worker, steps, folder)
            for worker in range(size.workers)
        ]:
            made.result()
    held_out = held_out_windows(data, size.length, size.held_out)
    np.save(folder / "held_out.npy", held_out.numpy())
    made_for.write_text(asked)


def installed_text(limit: int) -> Iterator[bytes]:
    """The source of installed packages, each text once, in the order of their paths' hashes."""
    root = Path(sysconfig.get_paths()["purelib"])
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    seen = set[bytes]()
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = (root / name).read_bytes()
        digest = hashlib.sha256(text).digest()
        if 200 < len(text) < 200_000 and digest not in seen:
            seen.add(digest)
            yield text
            limit -= len(text)
            if limit <= 0:
                return


def learn_tokenizer(text: bytes, vocabulary: int, folder: Path) -> None:
    """Byte pairs, saved as transformers opens them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = text.decode(errors="replace").splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    saved: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    saved.save_pretrained(str(folder))


def save_part(data: DataSpec, size: Size, worker: int, steps: int, folder: Path) -> None:
    """A worker's windows. To be called in a fresh process."""
    corpus = Corpus(data, sequence_length=size.length, microbatch_size=size.windows, seed=0)
    corpus.open_part(worker)
    windows = [batch.to(torch.int32) for batch in islice(corpus, steps)]
    np.save(part_file(folder, worker), torch.stack(windows).numpy())


def contest(
    reports: Any, contestant: Contestant, size: Size, steps: int, prepared: Path, options: Any
) -> None:
    """A contestant's process: its points, then None; or what it failed by."""
    torch.set_num_threads(options["threads"])
    try:
        for point in train(
            contestant,
            size,
            steps,
            prepared,
            device=options["device"],
            compiled=options["compiled"],
        ):
            reports.put((contestant.name, point))
        reports.put((contestant.name, None))
    except Exception as error:  # noqa: BLE001 - the others go on
        reports.put((contestant.name, f"{type(error).__name__}: {error}"))


def run_all(
    rows: Sequence[Contestant],
    size: Size,
    steps: int,
    prepared: Path,
    options: Mapping[str, Any],
    until: float,
    report: Report,
) -> dict[str, list[Point]]:
    """All rows at once, until they are done or `until` (monotonic seconds) has come."""
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    children = {
        row.name: context.Process(
            target=contest,
            args=(reports, row, size, steps, prepared, dict(options)),
            daemon=True,
        )
        for row in rows
    }
    found: dict[str, list[Point]] = {row.name: [] for row in rows}
    for child in children.values():
        child.start()
    running = set(children)
    while running and time.monotonic() < until:
        try:
            name, said = reports.get(timeout=1.0)
        except queue.Empty:
            lost = {name for name in running if not children[name].is_alive()}
            for name in lost:
                report.say(f"{name}: its process ended with {children[name].exitcode}")
            running -= lost
            continue
        if isinstance(said, Point):
            found[name].append(said)
            report.say(
                f"{name}: {said.steps} steps, loss {said.loss:.4f}, "
                f"{said.sent / MB:,.1f} MB sent, {said.seconds:.0f} s"
            )
        else:
            running.discard(name)
            if said is not None:
                report.say(f"{name}: {said}")
    for child in children.values():
        child.kill()
        child.join()
    return found


def show(found: Mapping[str, Sequence[Point]], size: Size, report: Report) -> None:
    """The table: a column for every second point; bytes are those of the last one of them that data
    parallel has, too.
    """
    every = 2 * size.points
    marks = sorted({p.steps for points in found.values() for p in points if p.steps % every == 0})
    columns = [Column("row")]
    columns += [
        Column(f"{mark * size.tokens_per_step / 1e6:.1f} M tokens", ".4f") for mark in marks
    ]
    columns += [Column("MB a worker", ",.1f"), Column("over data parallel", "+.2%")]
    by_steps = {name: {p.steps: p for p in points} for name, points in found.items()}
    beside = by_steps.get("data parallel", {})
    rows = list[tuple[object, ...]]()
    for name, points in by_steps.items():
        losses = [points[mark].loss if mark in points else None for mark in marks]
        common = [mark for mark in marks if mark in points and mark in beside]
        last = points[common[-1]] if common else None
        over = last.loss / beside[last.steps].loss - 1 if last else None
        rows.append((name, *losses, last.sent / MB if last else None, over))
    report.table(columns, rows, title="nats a token of held-out text, by tokens of all workers")
    lines = {
        name: [(p.steps * size.tokens_per_step / 1e6, p.loss) for p in points]
        for name, points in found.items()
        if points
    }
    report.plot("million tokens", "nats a token", lines)
    report.csv(
        ["row", "tokens", "loss", "bytes", "seconds"],
        [
            (name, p.steps * size.tokens_per_step, p.loss, p.sent, p.seconds)
            for name, points in found.items()
            for p in points
        ],
        part="curves",
    )


def main() -> None:
    """Prepare, train, print."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=2000, help="inner steps of each worker")
    made.add_argument("--minutes", type=float, default=9.0, help="for training, all rows at once")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    made.add_argument("--compile", action="store_true", help="layers run compiled")
    made.add_argument("--prepared", type=Path, help="where text and windows are kept for reruns")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these rows; all with AdamW")
    report, arguments = Report.parse(made, "one-gpu")
    size, steps = (QUICK, 12) if arguments.quick else (Size(), arguments.steps)
    rows = {row.name: row for row in contestants(size)}
    if unknown := set(arguments.only or ()) - rows.keys():
        made.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    with_adamw = [name for name, row in rows.items() if row.inner is not MUON]
    chosen = [rows[name] for name in arguments.only or with_adamw]
    with tempfile.TemporaryDirectory() as folder:
        prepared = arguments.prepared or Path(folder)
        began = time.monotonic()
        prepare(prepared, size, steps)
        report.say(f"text and tokens: {time.monotonic() - began:.0f} s")
        options = {
            "threads": max(1, (torch.get_num_threads() - 1) // len(chosen)),
            "device": arguments.device,
            "compiled": arguments.compile,
        }
        until = time.monotonic() + 60 * arguments.minutes
        show(run_all(chosen, size, steps, prepared, options, until, report), size, report)
    report.close()


if __name__ == "__main__":
    main()
