"""The experiments of the papers that seeded this project, at a size that two cores afford.

    python benchmarks/papers.py [--quick] [--part NAME ...] [--seeds 2] [--processes 2] [--out DIR]

The swarm is that of convergence.py (simulated_swarm.py: the product's merge, outer step, codecs and
inner optimizers, 116 thousand parameters over bytes, four workers in rounds of 8 inner steps), for
40 rounds. One table a part:

    OpenDiLoCo (arXiv 2407.07852; DiLoCo, 2311.08105)      DiLoCoX (arXiv 2506.21263)
    inner-steps  H from 10 to 1000 at equal tokens         ablation  one part off, each alone
    families     llama, opt, gpt_neox                      merges    none, reset, rebase
    precision    pseudo-gradients in fp32 and fp16         ranks     2 to 28 of 64
    replicas     2 to 16 at equal tokens                   workers   16 and 32
    uneven       shards, speeds, absence
    links        10 to 500 Mbit/s, 100 and 500 ms          (arithmetic)
    arrival      of a record, 1/8 to all of a round

Rules have the settings that convergence.py tuned, here as there. Then each claim: what it says,
what was seen, whether that reaches it. Differences under half a percent are chance.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# the simulation's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import papers_dilocox, papers_opendiloco
from benchmarks.convergence_runs import Runner
from benchmarks.papers_study import Study
from benchmarks.report import Report, parser

FIRST_SEED = 60  # nothing was tuned on these
PARTS = papers_opendiloco.PARTS | papers_dilocox.PARTS


def main() -> None:
    """Run the parts, print tables and claims."""
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=list(PARTS), help="these only")
    options.add_argument("--seeds", type=int, default=2, help="of each row; one with --quick")
    options.add_argument("--processes", type=int, default=2, help="of one thread each")
    report, arguments = Report.parse(options, "papers")
    torch.set_num_threads(1)
    count = 1 if arguments.quick else arguments.seeds
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    report.say(f"{count} seed{'s' * (count > 1)}: mean, and half the spread")
    with Runner(arguments.processes, points=1) as runner:
        study = Study(report=report, runner=runner, seeds=seeds, quick=arguments.quick)
        for name in arguments.part or PARTS:
            PARTS[name](study)
    if study.claims:
        report.say("claims: who makes it: what it says: what was seen: verdict")
    for claim in study.claims:
        report.say(claim.line())
    report.close()


if __name__ == "__main__":
    main()
