"""Runs the benchmarks, each in a process of its own with a deadline, and says how each one ended.

    python benchmarks/run_all.py [--quick] [--only NAME ...] [--out bench-run]

What is run stands in BENCHES, with arguments that let all of it end in about an hour on two cores;
docs/reproduce.md has the commands of the full sizes, and of what is not run here. What computes
alone, on one thread, and prints no times runs two at a time, everything else alone; with --quick,
whose figures say nothing, three of all kinds, the longest first. Each one's tables, plots and what
it printed (log.txt) are in a folder of --out under its name. Ends with 1 if one failed or met its
deadline. What needs shaped links, and so Linux and root, or a GPU is left out elsewhere, and that
is said.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, parser
from tests.swarm.links import available

FOLDER = Path(__file__).resolve().parent
QUICK_LIMIT_S = 200.0  # a minute alone, and three share the cores
AT_ONCE = 2
QUICK_AT_ONCE = 3
LEAVE_S = 20.0  # for a script that was told to end: it ends its swarm first
LAST_LINES = 15
Popen = subprocess.Popen[bytes]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One call of a script.

    arguments: of `make bench`; quick: in their place with --quick, None: takes too long for it.
    limit_s: of the first. computes: one process of one thread whose figures are no times. needs:
    why it cannot run here; empty if it can.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ("--quick",)
    limit_s: float = 300.0
    computes: bool = False
    needs: Callable[[], str] = lambda: ""

    def command(self, out: Path, *, quick: bool) -> list[str]:
        """The whole line."""
        arguments = (self.quick or ()) if quick else self.arguments
        return [sys.executable, str(FOLDER / self.script), *arguments, "--out", str(out)]


def no_links() -> str:
    """Why there are no shaped links here."""
    reason = available()
    return f"no shaped links here: {reason}" if reason else ""


def no_gpu(at_least_gb: float = 0.0) -> str:
    """Why there is no GPU here, or none of this size."""
    if not torch.cuda.is_available():
        return "no GPU here"
    size = torch.cuda.get_device_properties(0).total_memory / 1e9
    return "" if size >= at_least_gb else f"a GPU of {at_least_gb:.0f} GB is needed"


def no_large_gpu() -> str:
    """Why there is none that all rows of one_gpu.py fit on."""
    return no_gpu(100.0)


BENCHES = (
    # on one thread, and the figures are losses and counts: the longest first
    Bench(
        name="attacks",
        script="attacks.py",
        arguments=("--seeds", "1", "--rounds", "20", "--processes", "1"),
        quick=("--quick", "--rounds", "3", "--processes", "1"),
        limit_s=2400,
        computes=True,
    ),
    Bench(
        name="convergence",
        script="convergence.py",
        arguments=("--seeds", "1", "--worlds"),
        limit_s=2400,
        computes=True,
    ),
    Bench(
        name="papers",
        script="papers.py",
        arguments=("--seeds", "1", "--processes", "1"),
        quick=("--quick", "--processes", "1"),
        limit_s=2400,
        computes=True,
    ),
    Bench(
        name="simulate",
        script="simulate.py",
        arguments=("--rounds", "10", "--up-to", "32"),
        limit_s=1200,
        computes=True,
    ),
    Bench(
        name="pareto",
        script="pareto.py",
        arguments=("--seeds", "1"),
        limit_s=1200,
        computes=True,
    ),
    Bench(
        name="muon",
        script="muon.py",
        arguments=("--only", "8 workers"),
        quick=("--quick", "--only", "8 workers"),
        limit_s=1200,
        computes=True,
    ),
    Bench(name="dht-traffic", script="dht_traffic.py", computes=True, limit_s=600),
    Bench(name="grid", script="grid.py", computes=True),
    Bench(name="sizes", script="sizes.py", computes=True),
    Bench(
        name="plan-papers",
        script="plan.py",
        arguments=("--papers",),
        quick=("--papers",),
        computes=True,
    ),
    # alone: times, memory, or processes on both cores
    Bench(name="codec", script="codec.py"),
    Bench(name="codec-times", script="codec_times.py"),
    Bench(
        name="compression",
        script="compression.py",
        arguments=("--inner-steps", "100", "--rounds", "4"),
        limit_s=900,
    ),
    Bench(
        name="simulate-liars",
        script="simulate.py",
        arguments=("--liars",),
        quick=("--liars", "--quick"),
        limit_s=600,
    ),
    Bench(name="plan-costs", script="plan_costs.py"),
    Bench(name="memory", script="memory.py"),
    Bench(
        name="export-size",
        script="export_size.py",
        arguments=("--parameters", "2e8", "--stages", "4"),
    ),
    Bench(name="matchmaking", script="matchmaking.py"),
    Bench(name="gpu", script="gpu.py", needs=no_gpu, limit_s=900),
    Bench(
        name="one-gpu",
        script="one_gpu.py",
        arguments=("--compile", "--steps", "500", "--minutes", "5"),
        needs=no_large_gpu,
        limit_s=600,
    ),
    Bench(name="slow-peer", script="slow_peer.py", arguments=("--rounds", "4"), limit_s=600),
    Bench(
        name="muon-swarm",
        script="muon_swarm.py",
        arguments=("--tokens", "2.5e5", "--only", "Muon, synchronous", "Muon, 2 bit"),
        quick=("--quick", "--only", "Muon, 2 bit"),
        limit_s=900,
    ),
    Bench(
        name="real-size",
        script="real_size.py",
        arguments=("--parameters", "2e7", "--rank", "16", "--round", "8"),
        quick=None,
        limit_s=600,
    ),
    Bench(name="faults", script="faults.py", arguments=("--quick",), limit_s=600),
    Bench(
        name="exchange",
        script="exchange.py",
        arguments=("--rounds", "1", "--inner-steps", "40"),
        limit_s=900,
        needs=no_links,
    ),
    Bench(
        name="pipeline",
        script="pipeline.py",
        arguments=("--loss-seeds", "1"),
        limit_s=900,
    ),
    Bench(
        name="plan",
        script="plan.py",
        arguments=("--only", "dense 4 bit, 10 Mbit/s", "2 stages, int8, 5 Mbit/s"),
        limit_s=600,
        needs=no_links,
    ),
    Bench(
        name="baselines",
        script="baselines.py",
        arguments=("--links", "10", "--runs", "1"),
        limit_s=1500,
        needs=no_links,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a benchmark ended; last: what it printed at the end, where it failed."""

    name: str
    seconds: float
    outcome: str
    last: str = ""

    def line(self) -> str:
        """For the terminal."""
        return f"{self.name:<12} {self.seconds:5.0f} s  {self.outcome}"


def run(bench: Bench, out: Path, *, quick: bool, running: list[Popen]) -> Ended:
    """Run one to its end, or to its deadline; `running` gets its process."""
    folder = out / bench.name
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / "log.txt", time.monotonic()
    limit_s = QUICK_LIMIT_S if quick else bench.limit_s
    with log.open("w") as file:
        # a session of its own, so that all that it started can be ended with it
        process = subprocess.Popen(
            bench.command(folder, quick=quick),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(process)
        try:
            code = process.wait(limit_s)
            outcome = "ok" if code == 0 else f"FAILED with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: not done within {limit_s:.0f} s"
        finally:
            end(process)
    seconds = time.monotonic() - began
    if outcome == "ok":
        return Ended(name=bench.name, seconds=seconds, outcome=outcome)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return Ended(name=bench.name, seconds=seconds, outcome=outcome, last=last)


def end(process: Popen) -> None:
    """End a script, which then ends its swarm, and whatever of its session is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_each(benches: Sequence[Bench], out: Path, *, quick: bool, at_once: int) -> Iterator[Ended]:
    """Run them, so many at a time, in their order; as they end."""
    running: list[Popen] = []
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(run, bench, out, quick=quick, running=running) for bench in benches]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # Ctrl-C, which does not reach their sessions
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            raise


def in_turns(benches: Sequence[Bench], out: Path, *, quick: bool) -> Iterator[Ended]:
    """All of them, as they end: see the head of this file."""
    if quick:
        yield from run_each(benches[::-1], out, quick=True, at_once=QUICK_AT_ONCE)
        return
    together = [bench for bench in benches if bench.computes]
    alone = [bench for bench in benches if not bench.computes]
    yield from run_each(together, out, quick=False, at_once=AT_ONCE)
    yield from run_each(alone, out, quick=False, at_once=1)


def main() -> int:
    """Run what was asked for; 1 if something failed."""
    # a shell's `&` ignores it, and what is started here would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = [bench.name for bench in BENCHES]
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    made.set_defaults(out=Path("bench-run"))
    report, arguments = Report.parse(made, "bench")
    benches = [bench for bench in BENCHES if bench.name in (arguments.only or names)]
    ended: list[Ended] = []
    possible: list[Bench] = []
    for bench in benches:
        reason = "takes minutes" if arguments.quick and bench.quick is None else bench.needs()
        if reason:
            report.say(f"{bench.name:<12} left out: {reason}")
        else:
            possible.append(bench)
    for each in in_turns(possible, arguments.out, quick=arguments.quick):
        ended.append(each)
        report.console.print(each.line(), markup=False)
        if each.last:
            report.console.print(each.last, markup=False)
    report.csv(("name", "seconds", "outcome"), [(e.name, e.seconds, e.outcome) for e in ended])
    failed = [each.name for each in ended if each.outcome != "ok"]
    report.say(
        f"{len(ended)} run, {len(failed)} failed" + (": " + ", ".join(failed)) * bool(failed)
    )
    report.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
