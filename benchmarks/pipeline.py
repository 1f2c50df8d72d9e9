"""What slow links cost a replica, and what codecs win back.

    python benchmarks/pipeline.py [--steps 5] [--pass-s 0.1] [--mbit 50] [--delay-ms 50]
                                  [--loss-seeds 3] [--quick] [--out DIR]

First table: replicas of real peers (`dilocox peer`), one after the other, on this machine's
loopback and on shaped links (tests/swarm/links.py; they need Linux and root). A forward and a
backward of a stage take --pass-s together, mostly asleep (paced_passes.py), so that links make the
difference and not what else the machine does. `computing` is the share of the time in which each
stage computes, the head first; `of loopback` compares tokens/s. Both are over --steps inner steps
after two in which the head measures the links. An inner step ends with an empty pipeline, so even
without links S stages compute M / (M + S - 1) of the time at best. A peer has one line for all its
neighbours: of a microbatch, a stage in the middle sends an activation down and a gradient up.

Second table: losses after --loss-steps inner steps in which all that stages tell each other goes
through a codec (codec_losses.py), for several sizes and learning rates. It depends on the seeds and
the machine's arithmetic only. How far fp32 is from bf16 is chance, what small differences at the
start grow to: one seed says little, hence the mean over several, and the largest beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codec_losses import LOSS_LIMITS, losses, model_description
from benchmarks.paced_passes import LoggedStep, logged_steps, paced_program
from benchmarks.pipeline_plot import Drawing
from benchmarks.report import Column, Report, parser
from tests.swarm.harness import ProcessSwarm
from tests.swarm.links import Links, available
from tests.swarm.small_run import run_manifest

START_LIMIT_S = 180.0
STEP_LIMIT_S = 60.0
LOOK_S = 1.0  # looking costs time of the processor
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One replica of the first table."""

    codec: str
    shaped: bool = True

    @property
    def name(self) -> str:
        """For the plot."""
        return self.codec if self.shaped else f"loopback\n{self.codec}"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What it did."""

    computing: list[float]
    """Share of the time, by stage."""
    tokens_per_s: float


def run_description(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """A run with activations as wide as they are cheap to compute, whose rounds never end."""
    length = arguments.sequence_length
    steps = 10**5
    return run_manifest(
        name="pipeline-benchmark",
        model=model_description(
            hidden_size=arguments.hidden_size, layers=arguments.stages, heads=1, width=32
        ),
        stages=arguments.stages,
        batch={
            "sequence_length": length,
            "microbatch_size": arguments.microbatch_size,
            "microbatches": arguments.microbatches,
        },
        pipeline={"codec": setting.codec},
        rounds={"inner_steps": steps, "min_inner_steps": steps, "max_inner_steps": steps},
    )


def measure(arguments: argparse.Namespace, setting: Setting) -> Speed:
    """Run one replica."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        links: Links | None = None
        if setting.shaped:
            hosts = 1 + arguments.stages
            links = stack.enter_context(
                Links(hosts, mbit=arguments.mbit, delay_ms=arguments.delay_ms)
            )
        manifest = run_description(arguments, setting)
        swarm = ProcessSwarm(folder, manifest, links=links)
        stack.callback(swarm.close)
        files = [folder / f"stage-{stage}-steps" for stage in range(arguments.stages)]
        for stage, file in enumerate(files):
            swarm.add_peer(stage=stage, program=paced_program(arguments.pass_s, file))
        last = WARM_UP_STEPS + arguments.steps
        for count, limit_s in ((1, START_LIMIT_S), (last, last * STEP_LIMIT_S)):
            deadline = time.monotonic() + limit_s
            while min(len(logged_steps(file)) for file in files) < count:
                swarm.look()
                if time.monotonic() > deadline:
                    tails = swarm.tails()
                    raise TimeoutError(f"no {count} inner steps within {limit_s:.0f} s\n{tails}")
                time.sleep(LOOK_S)
        logs = [logged_steps(file)[WARM_UP_STEPS - 1 : last] for file in files]
        tokens = arguments.steps * swarm.manifest.batch.tokens_per_step
        return Speed(
            computing=[_computing(log) for log in logs],
            tokens_per_s=tokens / (logs[0][-1].at_s - logs[0][0].at_s),
        )


def _computing(log: list[LoggedStep]) -> float:
    first, last = log[0], log[-1]
    return (last.computing_s - first.computing_s) / (last.at_s - first.at_s)


def speeds(arguments: argparse.Namespace, report: Report) -> dict[Setting, Speed]:
    """Measure and print the first table."""
    settings = [Setting(codec="bf16", shaped=False)]
    if reason := available():
        report.say(f"no shaped links here: {reason}")
    else:
        settings += [Setting(codec=codec) for codec in arguments.codecs]
    found: dict[Setting, Speed] = {}
    for setting in settings:
        with report.console.status(setting.codec):
            found[setting] = measure(arguments, setting)
    alone = found[settings[0]].tokens_per_s
    rows = [
        (
            "shaped" if setting.shaped else "loopback",
            setting.codec,
            " ".join(f"{share:.0%}" for share in speed.computing),
            statistics.fmean(speed.computing),
            speed.tokens_per_s,
            speed.tokens_per_s / alone,
        )
        for setting, speed in found.items()
    ]
    columns = [
        *(Column(name) for name in ("links", "codec", "computing")),
        Column("mean", ".0%"),
        Column("tokens/s", ",.0f"),
        Column("of loopback", ".0%"),
    ]
    title = (
        f"{arguments.stages} stages, {arguments.microbatches} microbatches of "
        f"{arguments.pass_s * 1e3:g} ms; shaped: {arguments.mbit:g} Mbit/s, "
        f"{arguments.delay_ms:g} ms one way"
    )
    report.table(columns, rows, title=title, part="speeds")
    return found


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--stages", type=int, default=3)
    made.add_argument("--steps", type=int, default=5, help="inner steps to measure; 0: none")
    made.add_argument("--pass-s", type=float, default=0.1, help="a forward and a backward")
    made.add_argument("--mbit", type=float, default=50.0, help="of each shaped link, both ways")
    made.add_argument("--delay-ms", type=float, default=50.0, help="of shaped links, one way")
    made.add_argument("--hidden-size", type=int, default=512)
    made.add_argument("--sequence-length", type=int, default=256)
    made.add_argument("--microbatch-size", type=int, default=4)
    made.add_argument("--microbatches", type=int, default=16, help="of an inner step")
    made.add_argument("--codecs", nargs="+", default=["bf16", "int8", "int4"], help="shaped")
    made.add_argument("--seed", type=int, default=0, help="the first one of the losses")
    made.add_argument("--loss-seeds", type=int, default=3, help="how many from there on")
    made.add_argument("--loss-steps", type=int, default=200, help="0: no losses")
    report, arguments = Report.parse(made, "pipeline")
    if arguments.quick:
        arguments.stages, arguments.steps, arguments.codecs = 2, 2, []
        arguments.loss_seeds, arguments.loss_steps = 1, 2
    drawn = Drawing(limits=LOSS_LIMITS)
    if arguments.steps:
        for setting, speed in speeds(arguments, report).items():
            drawn.add_speed(setting.name, speed.computing, speed.tokens_per_s)
    if arguments.loss_steps:
        seeds = range(arguments.seed, arguments.seed + arguments.loss_seeds)
        drawn.over_bf16 = losses(
            report, stages=arguments.stages, steps=arguments.loss_steps, seeds=seeds
        )
    if file := report.picture():
        drawn.save(file)
    report.close()


if __name__ == "__main__":
    main()
