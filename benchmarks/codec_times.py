"""What a member's codec costs it: processor time and memory of one exchange of a stage.

The stage is one layer of a larger model, since small matrices would be timed mostly in Python. All
is done by the classes that a peer uses, with one thread.

    python benchmarks/codec_times.py [--threads 1 2] [--ranks 16 64] [--quick] [--out DIR]

prints where an exchange computes, on stages of 26 and 103 million parameters: `before` its group
meets, `in` it, and to `apply` its record; `all in` it is what the exchange took before there was a
difference, and `apply anew` what a record took that found no P^. Then the constants of
`LowRank.core_seconds`: of one core, which is a third of a modest one's time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codec import peak_memory
from benchmarks.report import Column, Report, parser
from dilocox.compression.layout import FlatLayout
from dilocox.compression.low_rank import LowRank
from dilocox.compression.stage_codec import Compression, StageCodec, StageEncoder
from dilocox.compression.workers import Workers
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.record import stage_codec

HIDDEN, INTERMEDIATE = 2048, 5632
MATRICES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN, HIDDEN),
    "v": (HIDDEN, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
LAYER = FlatLayout.of([*MATRICES.items(), ("norm", (HIDDEN,)), ("second_norm", (HIDDEN,))])
PER = 100_000_000  # parameters
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one core, medians, and memory, for LAYER.

    encode: a message to payloads of all phases. decode: the means' payloads to the average. own:
    what the member itself put in, for the residual. products: of the two matrix products M Q and
    M^T P alone; 0 unless the scheme is low_rank. ratio: encode and decode over products, median.
    peak_bytes: resident memory at the peak of encode and decode beyond what was there before: the
    message, the basis and the vector that the average goes into.
    """

    encode: float
    decode: float
    own: float
    products: float
    ratio: float
    peak_bytes: int | None


def measured(manifest: Manifest, rank: int | None = None) -> Times:
    """Of the run's codec, in the first exchange, or with this rank wherever it is smaller."""
    codec = stage_codec(manifest, LAYER)
    ranks = codec.first_ranks
    if rank is not None:
        ranks = tuple(min(rank, limit) for limit in codec.limits)
    member = _Member(codec, ranks)
    steps = (member.encode, member.decode, member.own, member.products)
    seconds: list[list[float]] = [[_seconds(step) for step in steps] for _ in range(REPEATS + 1)]
    encode, decode, own, products = zip(*seconds[1:], strict=True)  # the first to warm up
    factored = member.low_rank is not None
    return Times(
        encode=median(encode),
        decode=median(decode),
        own=median(own),
        products=median(products) if factored else 0.0,
        ratio=median((e + d) / p for e, d, p in zip(encode, decode, products, strict=True))
        if factored
        else 0.0,
        peak_bytes=peak_memory(member.encode_and_decode),
    )


def costs(report: Report, times: Mapping[str, Times]) -> None:
    """The table of times and memory."""
    scale = PER / LAYER.numel
    columns = [
        Column("codec"),
        *(Column(f"{name} s", ".2f") for name in ("encode", "decode", "own", "products")),
        Column("over products", ".2f"),
        Column("memory", ".2f"),
    ]
    rows = [
        (
            name,
            *(scale * seconds for seconds in (each.encode, each.decode, each.own)),
            *((scale * each.products, each.ratio) if each.products else (None, None)),
            None if each.peak_bytes is None else each.peak_bytes / LAYER.numel,
        )
        for name, each in times.items()
    ]
    title = f"one core, 100 million parameters (measured on {LAYER.numel:,})"
    report.table(columns, rows, title=title, part="times")


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()  # not the wall's: other processes may share the core
    step()
    return time.process_time() - start


class _Member:
    """One member between its message and the average; each method is a step of an exchange."""

    def __init__(self, codec: StageCodec, ranks: tuple[int, ...]):
        self._codec, self._ranks = codec, ranks
        self._phases = codec.phases(ranks)
        self.low_rank = codec.low_rank(ranks)
        self._message = torch.randn(LAYER.numel, generator=torch.Generator().manual_seed(0)) * 1e-3
        self._basis = None if self.low_rank is None else self.low_rank.initial_basis("times")
        self._means: list[Tensor] = []
        self._payloads: list[Tensor] = []
        for number, phase in enumerate(self._phases):
            vector = self._encoder().vector(number, self._means)
            self._payloads.append(phase.codec.encode(vector))
            self._means.append(phase.codec.decode(self._payloads[-1], phase.numel))

    def encode(self) -> None:
        encoder = self._encoder()
        for number, phase in enumerate(self._phases):
            phase.codec.encode(encoder.vector(number, self._means))

    def decode(self) -> Tensor:
        vectors = [torch.empty(phase.numel) for phase in self._phases]
        for phase, payload, vector in zip(self._phases, self._payloads, vectors, strict=True):
            phase.codec.decode(payload, phase.numel, out=vector)
        return self._codec.means(self._ranks, vectors).average()

    def encode_and_decode(self) -> Tensor:
        self.encode()
        return self.decode()

    def own(self) -> None:
        means = self._codec.means(self._ranks, self._means)
        means.take_out(self._message.clone(), [slice(0, self._phases[-1].numel)])

    def products(self) -> None:
        low_rank, basis = self.low_rank, self._basis
        if low_rank is None or basis is None:
            return
        p, q = torch.empty(low_rank.p_numel), torch.empty(low_rank.q_numel)
        for matrix in low_rank.factored:
            update = matrix.matrix(self._message)
            torch.mm(matrix.basis(basis), update.T, out=matrix.p(p))
            torch.mm(matrix.p(p), update, out=matrix.q(q))

    def _encoder(self) -> StageEncoder:
        return self._codec.encoder(self._message, self._ranks, self._agreed_basis)

    def _agreed_basis(self) -> Tensor | None:
        """From the means of the exchange before, of which these are as good as any."""
        low_rank = self.low_rank
        if low_rank is None or len(self._means) < 2:
            return self._basis
        return low_rank.next_basis(self._means[1], low_rank, "times")


# ---- where an exchange computes ------------------------------------------------------------------
def layers(hidden: int, intermediate: int) -> FlatLayout:
    """Two layers of a Llama."""
    scale = {HIDDEN: hidden, INTERMEDIATE: intermediate}
    return FlatLayout.of(
        (f"{number}.{name}", tuple(scale[size] for size in shape))
        for number in range(2)
        for name, shape in MATRICES.items()
    )


STAGES = (layers(1024, 2816), layers(HIDDEN, INTERMEDIATE))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of the steps of one member's exchange, the least of several; in their order."""

    basis: float
    p: float
    p_hat: float
    q: float
    codes: float
    average: float
    own: float

    @property
    def before(self) -> float:
        """What does not need the group."""
        return self.basis + self.p

    @property
    def inside(self) -> float:
        """What needs the group's means."""
        return self.p_hat + self.q + self.codes

    @property
    def apply(self) -> float:
        """What a record takes whose P^ is known."""
        return self.average + self.own


def steps(layout: FlatLayout, rank: int, threads: int) -> Steps:
    """Of a member with so many threads, by the wall's clock: the machine should have nothing else
    to do."""
    compression = Compression(
        scheme="low_rank", bits=4, max_factor=1e4, rank=rank, min_rank=4, max_rank=64
    )
    codec = StageCodec(layout, compression, Workers(threads))
    ranks, low_rank = codec.first_ranks, codec.low_rank(codec.first_ranks)
    if low_rank is None:
        raise RuntimeError("the benchmark's own codec is of low rank")
    phases = codec.phases(ranks)
    message = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    basis = low_rank.initial_basis("times")
    found: dict[str, list[float]] = {name: [] for name in Steps.__annotations__}

    def timed(name: str, step: Callable[..., Any], *arguments: object) -> Any:
        start = time.perf_counter()
        result = step(*arguments)
        found[name].append(time.perf_counter() - start)
        return result

    def coded(*vectors: Tensor) -> Tensor:
        for phase, vector in zip(phases, vectors, strict=True):
            phase.codec.decode(phase.codec.encode(vector), phase.numel)
        return vectors[-1]

    counted = [slice(0, phases[1].numel)]
    for repeat in range(REPEATS):
        p = timed("p", low_rank.project, message, basis)
        p[0] += repeat * 1e-3  # a mean that is not known from the time before
        p_hat = timed("p_hat", low_rank.orthonormal, p)
        q = timed("q", low_rank.contract, message, p_hat)
        timed("codes", coded, p, q)
        means = codec.means(ranks, [p, q])
        timed("average", means.average_pieces, lambda part, values: None)
        timed("own", means.take_out, message.clone(), counted)
        basis = timed("basis", low_rank.next_basis, q, low_rank, "times")
    return Steps(**{name: min(seconds) for name, seconds in found.items()})


def where_it_computes(
    report: Report, stages: Sequence[FlatLayout], ranks: Sequence[int], threads: Sequence[int]
) -> None:
    """Seconds a billion parameters, by stage, rank and threads."""
    rows: list[tuple[float, ...]] = []
    for layout in stages:
        for rank in ranks:
            for count in threads:
                each = steps(layout, rank, count)
                seconds = (
                    each.before,
                    each.inside,
                    each.apply,
                    each.before + each.inside,
                    each.apply + each.p_hat,
                )
                billion = [1e9 * each / layout.numel for each in seconds]
                rows.append((layout.numel / 1e6, rank, count, *billion))
    columns = [
        Column("million", ".0f"),
        *(Column(name) for name in ("rank", "threads")),
        *(Column(name, ".2f") for name in ("before", "in", "apply", "all in", "apply anew")),
    ]
    report.table(columns, rows, title="seconds a billion parameters")


def constants(layout: FlatLayout, rank: int) -> str:
    """Of `LowRank.core_seconds`, on this core."""
    each = steps(layout, rank, 1)
    low_rank = LowRank(layout, [rank] * len(layout.slices))
    products = sum(m.rank * m.rows * m.cols for m in low_rank.factored)
    rows = sum(m.rank**2 * m.rows for m in low_rank.factored)
    return f"a product {each.q / products:.1e} s, Gram-Schmidt {each.p_hat / rows:.1e} s"


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    report, arguments = Report.parse(made, "codec-times")
    torch.set_num_threads(1)
    stages = STAGES
    if arguments.quick:
        stages, arguments.ranks, arguments.threads = (layers(512, 1408),), [16], [1]
    where_it_computes(report, stages, arguments.ranks, arguments.threads)
    for rank in arguments.ranks:
        report.say(f"one core, rank {rank}: {constants(stages[-1], rank)}")
    report.close()


if __name__ == "__main__":
    main()
