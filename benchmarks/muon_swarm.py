"""Muon in a real swarm: its dense codecs beside synchronous Muon, and beside AdamW.

    python benchmarks/muon_swarm.py [--tokens 600000] [--seeds 1] [--large] [--muon-rate 4e-3]
                                    [--only NAME ...] [--quick] [--out DIR]

Two replicas of two stages, four real peers (`dilocox peer`) of one thread on loopback, train a
Llama of 3.4 million parameters over bytes (--large: showcase.py's 10.9 million) on the source of
Python's standard library. A row is a run.yaml: synchronous Muon with 16 bits, Muon overlapped with
4 and 2 bits, synchronous AdamW, and AdamW with the codec of a run.yaml that names none. H is 60 for
all; the inner learning rates are 0.001 for AdamW, and for Muon what --muon-rate says, to be tried
with its first row; the outer steps are those that convergence.py found for either. Rows run one
after another until the chain of stage 0 has so many tokens, all of one seed, then of the next.

The loss is that of anchors on held-out windows, as the heads tell it: at the tokens that all rows
reached, between the two records around them; the mean of the seeds, and half of their spread. A
swarm is no simulation: when a record arrives depends on what else the machine does, so a difference
under a percent says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import showcase
from benchmarks.baselines import spread
from benchmarks.convergence_rules import MUON, SYNCHRONOUS, TUNED
from benchmarks.report import SPREAD, Column, Report, parser
from tests.swarm.exchange_costs import WIDE_MODEL
from tests.swarm.harness import ProcessSwarm, memory_folder
from tests.swarm.small_run import MODEL, USUAL_DEADLINES, fixed_steps, run_manifest

STAGES, REPLICAS = 2, 2
INNER_STEPS, QUICK_STEPS = 60, 10
BATCH = {"sequence_length": 128, "microbatch_size": 1, "microbatches": 4}
ROUND_TOKENS = REPLICAS * INNER_STEPS * BATCH["sequence_length"] * BATCH["microbatches"]
INNER = {"learning_rate": 1e-3, "schedule": "constant", "warmup_tokens": ROUND_TOKENS}
START_LIMIT_S = 240.0
LEAST_TOKENS_PER_S = 300.0  # a run that is slower hangs
MUON_RATE = 4e-3
REFERENCE = "Muon, synchronous"
ROWS = (REFERENCE, "Muon, 4 bit", "Muon, 2 bit", "AdamW, synchronous", "AdamW, defaults")


@dataclass(frozen=True)
class Run:
    """A row's losses by tokens of the chain, [(tokens, nats a token)]; what a peer of stage 0 sent
    for a round's average, in bytes; tokens a second of all; voids of all peers.
    """

    losses: list[tuple[float, float]]
    sent_bytes: float
    tokens_per_s: float
    voids: int


def sections(name: str, muon_rate: float) -> dict[str, dict[str, Any]]:
    """What a row's run.yaml has that others have not."""
    muon, bits = name.startswith("Muon"), {"4 bit": 4, "2 bit": 2}
    learning_rate, momentum = TUNED[MUON if muon else SYNCHRONOUS]
    outer: dict[str, Any] = {"learning_rate": learning_rate, "momentum": momentum}
    found: dict[str, dict[str, Any]] = {"outer": outer, "inner": {}}
    if muon:
        found["inner"] = {"optimizer": "muon", "muon_learning_rate": muon_rate}
    codec = name.partition(", ")[2]
    if codec == "synchronous":
        outer["merge"] = "none"
        found["codec"] = {"scheme": "dense", "bits": 16}
    elif codec in bits:
        found["codec"] = {"scheme": "dense", "bits": bits[codec]}
    return found


def description(
    row: dict[str, dict[str, Any]], model: dict[str, Any], steps: int, seed: int
) -> dict[str, Any]:
    """The run.yaml of a row."""
    return run_manifest(
        model=model,
        seed=seed,
        stages=STAGES,
        data={"held_out_windows": 32},
        batch=BATCH,
        inner=INNER | row["inner"],
        rounds=fixed_steps(steps),
        deadlines=USUAL_DEADLINES,
        **{name: section for name, section in row.items() if name != "inner"},
    )


def run(manifest: dict[str, Any], tokens: float) -> Run:
    """Train until the chain of stage 0 has so many."""
    with memory_folder() as folder, ProcessSwarm(folder, manifest) as swarm:
        for number in range(STAGES * REPLICAS):
            swarm.add_peer(stage=number % STAGES)
        swarm.wait_until_all_train(START_LIMIT_S)
        heads = swarm.of_stage(0)

        def losses() -> list[tuple[float, float]]:
            trained = {e["round"]: e["chain_tokens"] for head in heads for e in head.rounds}
            told = {e["round"]: e["loss"] for head in heads for e in head.of_kind("validated")}
            return sorted((trained[n], loss) for n, loss in told.items() if n in trained)

        def enough() -> bool:
            reached = any(count >= tokens for count, _ in losses())
            return reached and all(len(head.rounds) > 1 for head in heads)  # for a rate

        swarm.wait(enough, START_LIMIT_S + tokens / LEAST_TOKENS_PER_S, f"{tokens:,.0f} tokens")
        swarm.assert_equal_chains()
        rounds = heads[0].rounds
        seconds = rounds[-1]["time"] - rounds[0]["time"]
        learnt = rounds[-1]["chain_tokens"] - rounds[0]["chain_tokens"]
        return Run(
            losses=losses(),
            sent_bytes=fmean(each["averaging_bytes"] for each in rounds),
            tokens_per_s=learnt / seconds,
            voids=sum(len(peer.of_kind("void")) for peer in swarm.peers),
        )


def loss_at(losses: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """Between the two that are around so many tokens; None where there are none."""
    if tokens in (told := dict(losses)):
        return told[tokens]
    for (before, high), (after, low) in pairwise(losses):
        if before <= tokens <= after and before < after:
            return high + (low - high) * (tokens - before) / (after - before)
    return None


def show(found: dict[str, list[Run]], report: Report) -> None:
    """The table and the curves."""
    common = min(each.losses[-1][0] for runs in found.values() for each in runs)
    losses = {name: [loss_at(each.losses, common) for each in runs] for name, runs in found.items()}
    rows = list[tuple[object, ...]]()
    for name, runs in found.items():
        pairs = zip(losses[name], losses.get(REFERENCE, ()), strict=False)
        over = [loss / reference - 1 for loss, reference in pairs if loss and reference]
        rows.append(
            (
                name,
                *spread([loss for loss in losses[name] if loss]),
                *spread(over),
                fmean(each.sent_bytes for each in runs) / 1e6,
                fmean(each.tokens_per_s for each in runs),
                sum(each.voids for each in runs),
            )
        )
    columns = [
        Column("row"),
        Column(f"at {common / 1e3:,.0f} thousand tokens", ".4f"),
        Column(SPREAD, ".4f"),
        Column(f"over {REFERENCE}", "+.1%"),
        Column(SPREAD, ".1%"),
        Column("MB a round", ",.2f"),
        Column("tokens/s", ",.0f"),
        Column("voids", "d"),
    ]
    report.table(columns, rows, title="nats a token of held-out text, by tokens of the chain")
    lines = {
        name: [(tokens / 1e6, loss) for tokens, loss in runs[0].losses]
        for name, runs in found.items()
    }
    report.plot("million tokens", "nats a token", lines)


def main() -> None:
    """Run the rows, one after another, and print."""
    made = parser(__doc__)
    made.add_argument("--tokens", type=float, default=6e5, help="of the chain, in each row")
    made.add_argument("--seeds", type=int, default=1, help="runs of each row, one a seed")
    made.add_argument("--large", action="store_true", help="10.9 million parameters")
    made.add_argument("--muon-rate", type=float, default=MUON_RATE, help="Muon's learning rate")
    made.add_argument("--only", nargs="+", choices=ROWS, help="of the rows these alone")
    report, arguments = Report.parse(made, "muon-swarm")
    model, tokens, steps = WIDE_MODEL, arguments.tokens, INNER_STEPS
    if arguments.large:
        model = showcase.WHOLE.model
    if arguments.quick:
        model, tokens, steps = MODEL, 3.0 * ROUND_TOKENS * QUICK_STEPS / INNER_STEPS, QUICK_STEPS
    names = arguments.only or (ROWS if not arguments.quick else ROWS[:2])
    found: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(arguments.seeds):
        for name in names:
            row = sections(name, arguments.muon_rate)
            done = run(description(row, model, steps, seed), tokens)
            found[name].append(done)
            reached, loss = done.losses[-1]
            report.say(f"{name}, seed {seed}: loss {loss:.4f} after {reached:,.0f} tokens")
    show(found, report)
    report.close()


if __name__ == "__main__":
    main()
