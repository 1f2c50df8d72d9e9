"""Whether a plan can be believed: what `dilocox plan` foretells beside what real swarms then do.

    python benchmarks/plan.py [--quick] [--only NAME ...] [--kept FILE] [--out DIR]
    python benchmarks/plan.py --papers

Each row of the first table is a swarm of real peers (plan_runs.py), each behind a shaped link (it
needs Linux and root). The plan is told the link's rate and round trip, and how long an inner step
of each stage takes, which the doctor's bench measures before, in a process of its own; nothing of
what the swarm did. `error` is foretold over measured. Bytes are the payload that a member sends in
a round, `computing` the share of the time in which stages compute. The whole table takes about 15
minutes; with --kept FILE a swarm that is in the file already is not run again.

--papers measures nothing: it prints what DiLoCoX and OpenDiLoCo report beside what the plan says of
such runs. What they do not state is derived from one of their figures, and said in the last column.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.plan_papers import paper_rows
from benchmarks.plan_runs import SETTINGS, Measured, Setting, measure, measured_steps
from benchmarks.report import Column, Report, parser
from dilocox.peer.process.run_plan import Machines, RunPlan
from tests.swarm.links import available

QUICK = ("dense 4 bit, 100 Mbit/s",)
FIGURES = ("tokens/s", "exchange", "bytes", "computing")


def foretold(setting: Setting, steps: Sequence[tuple[float, float]]) -> RunPlan:
    """What the plan says of a swarm, of its links and, for each stage, of the seconds of a step and
    the share of a core that it takes: what peers on one machine leave each other of its cores."""
    manifest, rate = setting.manifest, setting.mbit * 1e6 / 8
    peers, cores = setting.replicas * setting.stages, len(os.sched_getaffinity(0))
    machines = Machines(
        peers=peers,
        up_bytes_s=rate,
        down_bytes_s=rate,
        rtt_s=2 * setting.delay_ms / 1e3,
        stage_tokens_s=tuple(manifest.batch.tokens_per_step / seconds for seconds, _ in steps),
        core=min(1.0, max(0.1, cores / peers - max(busy for _, busy in steps))),
    )
    return RunPlan(manifest, machines, memory=False)


def figures(found: RunPlan, measured: Measured) -> dict[str, tuple[float, float]]:
    """Of what is compared: foretold, measured."""
    seconds = found.exchange.seconds - found.exchange.products_s  # as a peer counts it
    return {
        "tokens/s": (found.ours.tokens_per_s, measured.tokens_per_s),
        "exchange": (seconds, measured.exchange_s),
        "bytes": (found.exchange.up_bytes, measured.payload_bytes),
        "computing": (found.ours.computing, measured.computing),
    }


def _runs(report: Report, settings: Sequence[Setting], kept: Path | None) -> None:
    known = _read(kept)
    rows: list[list[Any]] = []
    errors: dict[str, list[float]] = {name: [] for name in FIGURES}
    for setting in settings:
        facts = known.get(setting.name)
        if facts is None or facts["setting"] != asdict(setting):
            alike = [each for each in known.values() if _setting(each).computed == setting.computed]
            steps = alike[0]["steps"] if alike else measured_steps(setting)
            measured = asdict(measure(setting))
            facts = {"setting": asdict(setting), "steps": steps, "measured": measured}
            known[setting.name] = facts
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(facts) + "\n")
        measured = Measured(**facts["measured"])
        compared = figures(foretold(setting, facts["steps"]), measured)
        row: list[Any] = [setting.name]
        every: list[float] = []
        for name, (said, seen) in compared.items():
            if not (said and seen):  # of one replica: it exchanges nothing
                row += [None, None]
                continue
            row += [said, seen]
            every.append(abs(said / seen - 1))
            errors[name].append(every[-1])
        rows.append([*row, max(every)])
        report.say(f"{setting.name}: worst error {max(every):.1%}")
    columns = [Column("swarm")]
    forms = (",.0f", ".2f", lambda count: f"{count / 1e3:,.0f}", ".1%")
    for name, form in zip(("tokens/s", "exchange s", "kB", "computing"), forms, strict=True):
        columns += [Column(name, form), Column("seen", form)]
    report.table([*columns, Column("worst", ".1%")], rows, title="foretold, and seen")
    table = [(name, statistics.median(each), max(each)) for name, each in errors.items() if each]
    flat = [error for each in errors.values() for error in each]
    table.append(("all", statistics.median(flat), max(flat)))
    columns = [Column("figure"), Column("median error", ".1%"), Column("worst", ".1%")]
    report.table(columns, table, part="errors")
    lines = {
        name: [(row[1 + 2 * n + 1], row[1 + 2 * n]) for row in rows] for n, name in ((0, "x"),)
    }
    report.plot("tokens/s seen", "tokens/s foretold", {"swarms": sorted(lines["x"])}, part="speed")


def _setting(facts: Mapping[str, Any]) -> Setting:
    return Setting(**facts["setting"])


def _read(kept: Path | None) -> dict[str, dict[str, Any]]:
    if kept is None or not kept.exists():
        return {}
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    return {line["setting"]["name"]: line for line in lines}


def main() -> None:
    """Measure, or not, and print."""
    options = parser(__doc__)
    options.add_argument("--papers", action="store_true", help="what papers report; no measuring")
    options.add_argument("--only", nargs="+", help="of the swarms those with these names")
    options.add_argument("--kept", type=Path, help="file in which what was measured is kept")
    report, arguments = Report.parse(options, "plan")
    if arguments.papers:
        columns = [Column("run"), Column("what"), Column("paper"), Column("plan"), Column("given")]
        report.table(columns, list(paper_rows()), part="papers")
    else:
        if reason := available():
            options.error(f"no links here: {reason}")
        names = arguments.only or (QUICK if arguments.quick else list(SETTINGS))
        if unknown := set(names) - set(SETTINGS):
            options.error(f"no swarms {', '.join(sorted(unknown))}: {', '.join(SETTINGS)}")
        settings = [SETTINGS[name] for name in names]
        if arguments.quick:
            settings = [replace(each, rounds=1) for each in settings]
        _runs(report, settings, arguments.kept)
    report.close()


if __name__ == "__main__":
    main()
