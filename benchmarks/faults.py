"""How pipeline replicas heal: a swarm of real processes is hurt, one fault after the other.

    python benchmarks/faults.py [--faults 20] [--seed 1] [--no-reference] [--quick]
                                [--out DIR]

Three stages, two replicas, and a spare of two of the stages; which, the seed says. Faults are drawn
from {SIGKILL, SIGSTOP of all processes for a while, SIGKILL of p2pd, link cut and healed, SIGTERM}
x {head, middle, last} x {forward, backward, between inner steps, averaging}; cutting a link needs
root and Linux's network namespaces and is left out elsewhere. Prints one line a fault, then a
summary, the validation loss beside that of a run without faults at equal tokens, and a table of all
faults: seconds from the fault until a survivor knew, from then until the chain stood again, between
two inner steps, and until the swarm was whole. The exit code is 1 if anything was as it must not be
(tests/swarm/verdict.py). --quick: one replica of two stages with a spare of the last, whose member
is killed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from tests.swarm.campaign import Fault
from tests.swarm.fault_runs import hurt, run

COLUMNS = (
    Column("fault"),
    Column("spare"),
    Column("known, s", ".2f"),
    Column("spliced, s", ".2f"),
    Column("stood still, s", ".1f"),
    Column("whole, s", ".1f"),
)
QUICK_STAGES = (0, 1, 1)
QUICK = (Fault(kind="kill", role="last", phase="backward"),)


def main() -> int:
    """Hurt, time and judge."""
    made = parser(__doc__)
    made.add_argument("--faults", type=int, default=20, help="how many, 1 to 24")
    made.add_argument("--seed", type=int, default=1, help="of what is drawn")
    made.add_argument("--no-reference", action="store_true", help="no run without faults")
    made.add_argument("--folder", type=Path, help="a new folder that stays, with all logs")
    report, arguments = Report.parse(made, "faults")

    def tell(line: str) -> None:
        report.console.print(line, markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.quick:
            found = hurt(folder, QUICK_STAGES, QUICK, replicas=1, seed=arguments.seed, tell=tell)
        else:
            found = run(
                arguments.faults,
                arguments.seed,
                reference=not arguments.no_reference,
                folder=folder,
                tell=tell,
            )
    rows = [
        (
            f"{each.number}: {each.fault.kind} {each.fault.role} {each.landed}",
            "yes" if each.spare else "no",
            each.detected_s,
            each.splice_s,
            each.stop_s,
            each.back_s,
        )
        for each in found.outcomes
    ]
    report.table(COLUMNS, rows)
    report.close()
    return 1 if found.flaws else 0


if __name__ == "__main__":
    sys.exit(main())
