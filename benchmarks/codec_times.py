"""What a member's codec costs it: processor time and memory of one exchange of a stage.

The stage is one layer of a larger model, since small matrices would be timed mostly in Python. All
is done by the classes that a peer uses, with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.codec import peak_memory
from benchmarks.tables import narrow
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec, StageEncoder
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.adaptation import stage_codec

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


def costs(times: Mapping[str, Times]) -> Table:
    """The table of times and memory."""
    table = narrow(f"one core, 100 million parameters (measured on {LAYER.numel:,})")
    table.add_column("codec")
    headings = ("encode s", "decode s", "own s", "products s", "over products", "memory")
    for heading in headings:
        table.add_column(heading, justify="right")
    scale = PER / LAYER.numel
    for name, each in times.items():
        products = (f"{scale * each.products:.2f}", f"{each.ratio:.2f} x")
        memory = "-" if each.peak_bytes is None else f"{each.peak_bytes / LAYER.numel:.2f}"
        table.add_row(
            name,
            *(f"{scale * seconds:.2f}" for seconds in (each.encode, each.decode, each.own)),
            *(products if each.products else ("", "")),
            memory,
        )
    return table


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
        self._average, self._own = torch.zeros(LAYER.numel), torch.zeros(LAYER.numel)
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
        return self._codec.means(self._ranks, vectors).average(out=self._average)

    def encode_and_decode(self) -> Tensor:
        self.encode()
        return self.decode()

    def own(self) -> None:
        means = self._codec.means(self._ranks, self._means)
        means.own(self._message, [slice(0, self._phases[-1].numel)], out=self._own)

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
