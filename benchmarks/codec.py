"""What the codec costs: speed on one core, size and memory, beside a plain copy of the same values.

    python benchmarks/codec.py [--numel 20000000] [--seconds 2] [--quick] [--out DIR]

One row per codec. `size` is the payload over the fp32 input. `encode`, `decode` and `decode into`
(a vector that exists already, as in an exchange) are gigabytes of fp32 input per second of one
core's time with one torch thread: the median over as many calls as fit into --seconds. `memory` is
the peak of resident memory during each of the three beyond what was there before, result included,
over the input; it is read from Linux's /proc. The values are normal, of a pseudo-gradient's size.

`clone()` is what any code pays that makes a new vector, most of it for fresh pages from the kernel;
`copy_`, its neighbour in the column `decode into`, writes to a vector that exists.

A second table has what two bits lose with other levels and groups than the product's: the squared
error over the values' square, of three distributions. `levels` is the outer level over the inner
one; the step is fitted as the product does it.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory import resident_bytes
from benchmarks.report import Column, Report, parser
from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.two_bits import FIRST_THRESHOLD, LEVELS, TWO_BIT_GROUP

_MIN_CALLS = 5
PEAKS = ("encode", "decode", "decode into")
COLUMNS = (
    Column("codec"),
    Column("size", ".4f"),
    *(Column(name, ".1f") for name in PEAKS),
    *(Column(f"memory of {name}", ".2f") for name in PEAKS),
)
RATIOS, GROUPS = (2.5, 3.0, 3.33, 3.5, 4.0, 5.0), (32, 64, 128, 256, 512, 1024)
TAILS = ("normal", "Laplace", "Student, 4 degrees")
Row = tuple[str | float | None, ...]
"""Name, size, three speeds in GB/s, three peaks of memory; the last in multiples of the input."""


def speed(call: Callable[[], object], input_bytes: int, seconds: float) -> float:
    """Gigabytes of input per second of processor time, median over calls, after one to warm up."""
    call()
    durations: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(durations) < _MIN_CALLS or time.perf_counter() < deadline:
        start = time.process_time()  # not the wall's: other processes may share the core
        call()
        durations.append(time.process_time() - start)
    return input_bytes / statistics.median(durations) / 1e9


def peak_memory(call: Callable[[], Tensor]) -> int | None:
    """Bytes of resident memory at the peak of `call` beyond those before it; None where unknown."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else the allocator serves the call from what it kept
    clear.write_text("5")  # the peak starts anew
    before = resident_bytes("VmRSS")
    result = call()
    peak = resident_bytes("VmHWM")
    del result
    return max(0, peak - before)


def measure(values: Tensor, bits: int, seconds: float) -> Row:
    """The row of one codec."""
    codec, numel, input_bytes = GroupCodec(bits), values.numel(), 4 * values.numel()
    payload, out = codec.encode(values), torch.zeros_like(values)
    speeds = [
        speed(lambda: codec.encode(values), input_bytes, seconds),
        speed(lambda: codec.decode(payload, numel), input_bytes, seconds),
        speed(lambda: codec.decode(payload, numel, out), input_bytes, seconds),
    ]
    peaks = [
        peak_memory(lambda: codec.encode(values)),
        peak_memory(lambda: codec.decode(payload, numel)),
        peak_memory(lambda: codec.decode(payload, numel, out)),
    ]
    name = "fp32" if bits == 32 else f"int{bits}"
    return row(name, payload.numel() / input_bytes, speeds, peaks, input_bytes)


def measure_copies(values: Tensor, seconds: float) -> Row:
    """The row of plain copies: clone() in place of encode and decode, copy_ of decode into."""
    input_bytes, out = 4 * values.numel(), torch.zeros_like(values)
    clone = speed(values.clone, input_bytes, seconds)
    copy = speed(lambda: out.copy_(values), input_bytes, seconds)
    peaks = [
        peak_memory(values.clone),
        peak_memory(values.clone),
        peak_memory(lambda: out.copy_(values)),
    ]
    return row("clone() / copy_", 1.0, [clone, clone, copy], peaks, input_bytes)


def lost(values: Tensor, ratio: float, group: int) -> float:
    """The share of the square of values [n] that two bits lose with these levels."""
    grouped = values[: len(values) // group * group].view(-1, group)
    sizes = grouped.abs()
    outer = sizes > FIRST_THRESHOLD * sizes.mean(dim=1, keepdim=True)
    weights = torch.where(outer, ratio, 1.0)
    steps = (sizes * weights).sum(1, keepdim=True) / weights.square().sum(1, keepdim=True)
    levels = torch.where(sizes > (1 + ratio) / 2 * steps, ratio * steps, steps)
    return float((sizes - levels).square().sum() / sizes.square().sum())


def levels(report: Report, numel: int) -> None:
    """Print what other levels and groups lose."""
    torch.manual_seed(0)
    students = torch.distributions.StudentT(4.0).sample((numel,))
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((numel,))
    drawn = dict(zip(TAILS, (torch.randn(numel), laplace, students), strict=True))
    own = LEVELS[1] / LEVELS[0]
    tried = [(ratio, TWO_BIT_GROUP) for ratio in RATIOS] + [(own, group) for group in GROUPS]
    rows = [
        (f"{ratio:g}", str(group), 2 + 16 / group, *(lost(v, ratio, group) for v in drawn.values()))
        for ratio, group in tried
    ]
    columns = [Column("levels"), Column("group"), Column("bits", ".3f")]
    columns += [Column(name, ".4f") for name in TAILS]
    report.table(columns, rows, title="two bits: squared error over the values' square", part="two")


def row(
    name: str, size: float, speeds: list[float], peaks: Sequence[int | None], input_bytes: int
) -> Row:
    """One row of the table."""
    multiples = [None if peak is None else peak / input_bytes for peak in peaks]
    return (name, size, *speeds, *multiples)


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--numel", type=int, default=20_000_000, help="values to encode")
    made.add_argument("--seconds", type=float, default=2.0, help="time per number, in seconds")
    report, arguments = Report.parse(made, "codec")
    if arguments.quick:
        arguments.numel, arguments.seconds = 2_000_000, 0.1
    if arguments.numel < 1:
        made.error(f"--numel {arguments.numel}: must be 1 or more")
    torch.set_num_threads(1)
    values = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    rows = [measure_copies(values, arguments.seconds)]
    rows += [measure(values, bits, arguments.seconds) for bits in (2, 4, 8, 16, 32)]
    title = f"{arguments.numel:,} fp32 values, one core, GB/s of input"
    report.table(COLUMNS, rows, title=title)
    levels(report, min(arguments.numel, 1 << 22))
    report.close()


if __name__ == "__main__":
    main()
