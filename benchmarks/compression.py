"""What each codec makes of the pseudo-gradients of a real run: size, error, time, memory.

    python benchmarks/compression.py [--inner-steps 20 100] [--rounds 8] [--no-sockets]
                                     [--quick] [--out DIR]

First tables, one for each H: four workers train a Llama of 3 million parameters over bytes
(pseudo_gradients.py), and every codec exchanges the same pseudo-gradients, round after round, with
a residual and a basis of its own; the columns are of the last round. The run itself is averaged
without loss, so all codecs meet the same updates; what a codec does to a run's loss is another
question (convergence.py).

    rank             of the factored matrices, the mean. Factors travel in 4 bit. `adaptive` begins
                     at rank 16 as a run does, `adaptive, 64` at 64: a few rounds are not enough to
                     settle, but from above and below they show where that will be
    bits a weight    of a message on its way to the reducers, and of the average on its way back,
                     over the values of the 2-D weights; with low rank without what the norms take.
                     16 bit stands for fp16: it has groups of 64 with a scale, 16.25 bits a value
    sockets          bytes per parameter that a member of four sends, and on the average receives,
                     in one exchange, as the kernel counts them at p2pd's TCP sockets
                     (socket_bytes.py), from when the group stands to the committed record. Where
                     a size depends on the codec alone it is measured once. `payload`: the parts
                     and means in it, 3/4 of a message and 3/4 of an average
    error            of the round's average, relative to the mean of the messages, which hold what
                     the rounds before left unsent
    all rounds       error of the sum of all averages, relative to the sum of all mean
                     pseudo-gradients: what of the run has not come through by now

Second table: processor seconds of one core for 100 million parameters, one thread, on one layer of
a larger model (codec_times.py). `own` is what a member computes for its residual, later. `products`
are M Q and M^T P, the two matrix products that low rank needs, as fast as torch makes them here;
the last column is encode and decode over these. `memory` is the peak of resident memory of encode
and decode beyond message, basis and the vector that the average goes into, in bytes a parameter.

Figures of time are medians of ratios or of processor time, not of the wall's.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import socket_bytes
from benchmarks.codec_times import LAYER, PER, Times, costs, measured
from benchmarks.pseudo_gradients import (
    WORKERS,
    Exchanged,
    exchange_all,
    manifest_of,
    relative_error,
    train,
)
from benchmarks.report import Column, Report, parser
from benchmarks.socket_bytes import Carried, Members
from dilocox.dht.identity import Identity

FIXED_RANKS = (4, 8, 16, 32, 64)
Codecs = Mapping[str, dict[str, Any]]
"""The manifests' codec sections by name."""
CODECS: Codecs = {
    "16 bit": {"scheme": "dense", "bits": 16},
    "8 bit": {"scheme": "dense", "bits": 8},
    "4 bit": {"scheme": "dense", "bits": 4},
    "2 bit": {"scheme": "dense", "bits": 2},
    **{f"rank {rank}": {"rank": rank, "adaptive": False} for rank in FIXED_RANKS},
    "adaptive": {},
    "adaptive, 64": {"rank": 64},
}
ADAPTIVE, FROM_ABOVE = "adaptive", "adaptive, 64"
SIZES_VARY = (ADAPTIVE, FROM_ABOVE)  # with the run
QUICK = ("rank 16", ADAPTIVE, FROM_ABOVE)
BITS_LIMIT = 1.0  # of adaptive, at the larger H
RATIO_LIMIT = 1.5  # of rank 16
SAME = 0.01
COLUMNS = (
    Column("codec"),
    Column("rank", ".1f"),
    Column("bits a weight"),
    *(Column(name, ".4f") for name in ("payload", "sockets")),
    *(Column(name, ".1%") for name in ("error", "all rounds")),
)
COLOURS = ("#4477aa", "#ee6677", "#ccbb44")
MARKERS = {ADAPTIVE: "*", FROM_ABOVE: "*"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A codec at one H."""

    exchanged: Exchanged
    carried: Carried | None


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--inner-steps", type=int, nargs="+", default=[20, 100], help="H")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--no-sockets", action="store_true", help="leave them out: 2 minutes less")
    report, arguments = Report.parse(made, "compression")
    if arguments.quick:
        arguments.inner_steps, arguments.rounds, arguments.no_sockets = [2], 2, True
    codecs = {name: CODECS[name] for name in (QUICK if arguments.quick else CODECS)}
    if arguments.rounds < 2 or min(arguments.inner_steps) < 1:
        made.error("choose 2 rounds or more, of 1 inner step or more")
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes work so only
    reason = "as asked" if arguments.no_sockets else socket_bytes.available()
    if reason:
        report.say(f"the sockets are not counted: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = (Identity.load_or_create(folder / f"{index}.key") for index in range(WORKERS))
        identities = sorted(made, key=lambda identity: identity.peer_id)
        members = [identity.peer_id for identity in identities]
        found = {
            steps: all_codecs(report, codecs, steps, arguments.rounds, members)
            for steps in arguments.inner_steps
        }
        carried = {} if reason else counted(report, folder, identities, found)
    rows = {
        steps: {
            name: Row(exchanged=each, carried=carried.get((steps, name)))
            for name, each in exchanges.items()
        }
        for steps, exchanges in found.items()
    }
    for steps, table_rows in rows.items():
        sizes(report, steps, arguments.rounds, table_rows)
    if carried:
        search = statistics.median(each.search_bytes for each in carried.values())
        report.say(f"beside that, {WORKERS} members sent {search:,.0f} bytes to find each other")
    times = timed(report, codecs, found[max(found)])
    costs(report, times)
    for name in (ADAPTIVE, FROM_ABOVE):
        each = found[max(found)][name]
        report.say(
            f"{name} at H = {max(found)}: {max(each.bits):.2f} bits a weight, ranks "
            f"{min(each.ranks)} to {max(each.ranks)} (goal: {BITS_LIMIT:g} bit)"
        )
    ratio = times["rank 16"].ratio
    report.say(f"rank 16: {ratio:.2f} times its two products (goal: {RATIO_LIMIT:g})")
    if file := report.picture():
        draw(file, rows, times)
    report.close()


def all_codecs(
    report: Report,
    codecs: Codecs,
    inner_steps: int,
    rounds: int,
    members: Sequence[str],
) -> dict[str, Exchanged]:
    """Train at one H and run every codec over it."""
    with report.console.status(f"training, H = {inner_steps}"):
        training = train(inner_steps, rounds)
    report.say(f"H = {inner_steps}: training loss {training.loss:.3f} after {rounds} rounds")
    manifests = [manifest_of(codec, inner_steps) for codec in codecs.values()]
    with (
        report.console.status(f"all codecs, H = {inner_steps}"),
        ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        each = pool.map(
            lambda manifest: exchange_all(manifest, training, members, socket_bytes.RUN), manifests
        )
        return dict(zip(codecs, each, strict=True))


def counted(
    report: Report,
    folder: Path,
    identities: Sequence[Identity],
    found: Mapping[int, Mapping[str, Exchanged]],
) -> dict[tuple[int, str], Carried]:
    """Exchange the last rounds again, by real members over sockets."""
    largest = max(found)
    wanted = [
        (steps, name)
        for steps, exchanges in found.items()
        for name in exchanges
        if steps == largest or name in SIZES_VARY
    ]
    low_rank = ("low_rank", 4)
    by_codec: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for steps, name in wanted:
        codec = CODECS[name]
        key = (codec.get("scheme", low_rank[0]), codec.get("bits", low_rank[1]))
        by_codec.setdefault(key, []).append((steps, name))
    carried: dict[tuple[int, str], Carried] = {}
    layout = found[largest][ADAPTIVE].codec.layout
    with Members(folder, identities, layout) as members:
        for (scheme, bits), rows in by_codec.items():
            # ranks come from the record before, so one manifest serves all of them
            manifest = manifest_of({"scheme": scheme, "bits": bits}, largest)
            exchanges = [found[steps][name] for steps, name in rows]
            with report.console.status(f"sockets: {scheme}, {bits} bit"):
                each = members.exchanges(manifest, [(e.before, e.messages) for e in exchanges])
            for row, one, exchanged in zip(rows, each, exchanges, strict=True):
                _check_equal(row, one, exchanged)
                carried[row] = one
    same = {(steps, name): carried[largest, name] for steps in found for name in found[steps]}
    return same | carried


def _check_equal(row: tuple[int, str], carried: Carried, exchanged: Exchanged) -> None:
    """Sums depend on the order in which parts arrive, in the last bit; what follows is small."""
    codec = exchanged.codec
    averages = [each.record.average(codec) for each in (carried, exchanged)]
    if relative_error(*averages) > SAME:
        raise RuntimeError(f"{row}: the members' average is another one")


def timed(report: Report, codecs: Codecs, exchanged: Mapping[str, Exchanged]) -> dict[str, Times]:
    """The costs of every codec; adaptive with the ranks that it came to, on the average."""
    found: dict[str, Times] = {}
    for name, codec in codecs.items():
        adaptive = name in (ADAPTIVE, FROM_ABOVE)
        rank = round(statistics.fmean(exchanged[name].ranks)) if adaptive else None
        with report.console.status(f"times: {name}"):
            found[name] = measured(manifest_of(codec, 1), rank)
    return found


def sizes(report: Report, inner_steps: int, rounds: int, rows: Mapping[str, Row]) -> None:
    """The table of one H."""
    made: list[tuple[str | float | None, ...]] = []
    for name, row in rows.items():
        exchanged, carried = row.exchanged, row.carried
        sent: tuple[float | None, ...] = (None, None)
        if carried:
            each = WORKERS * sum(piece.numel for piece in exchanged.codec.layout.slices)
            sent = (carried.payload_bytes / each, carried.sent_bytes / each)
        rank = statistics.fmean(exchanged.ranks) if exchanged.ranks else None
        bits = "/".join(f"{bits:.2f}" for bits in exchanged.bits)
        made.append((name, rank, bits, *sent, exchanged.error, exchanged.error_so_far))
    report.table(
        COLUMNS, made, title=f"H = {inner_steps}, round {rounds} of a run", part=f"{inner_steps}"
    )


def draw(file: Path, rows: Mapping[int, Mapping[str, Row]], times: Mapping[str, Times]) -> None:
    """Errors over sizes, for each H, and the times beside them."""
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    panels = (
        (left, "error of one round, residual included", lambda each: each.error),
        (middle, "error of the sum of all rounds", lambda each: each.error_so_far),
    )
    for axes, title, value in panels:
        for colour, (steps, each) in zip(COLOURS, rows.items(), strict=False):
            line = [
                (sum(row.exchanged.bits) / 2, value(row.exchanged), name)
                for name, row in each.items()
            ]
            low_rank = [point for point in line if point[2].startswith("rank")]
            axes.plot(*zip(*(p[:2] for p in low_rank), strict=True), color=colour, linewidth=0.8)
            for bits, error, name in line:
                marker = MARKERS.get(name, "o")
                axes.plot(bits, error, marker, color=colour, markersize=9 if marker != "o" else 5)
                if steps == max(rows):
                    below = name in MARKERS  # where another name stands above
                    place = (5, -11 if below else 5)
                    axes.annotate(name, (bits, error), place, textcoords="offset points", size=7)
            axes.plot([], [], "o", color=colour, label=f"H = {steps}")
        axes.set(xscale="log", ylim=(0, 1), xlabel="bits a weight and direction", title=title)
        axes.legend(frameon=False)
    scale = PER / LAYER.numel
    names = list(times)[::-1]
    start = [0.0] * len(names)
    for colour, part in zip(COLOURS, ("encode", "decode", "own"), strict=False):
        seconds = [scale * getattr(times[name], part) for name in names]
        right.barh(names, seconds, 0.6, start, color=colour, label=part)
        start = [a + b for a, b in zip(start, seconds, strict=True)]
    right.set(xlabel="s of one core", title="100 million parameters")
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
