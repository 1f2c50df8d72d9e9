"""What the rules of averaging and compression do to the loss, at equal tokens and side by side.

    python benchmarks/convergence.py [--full] [--plot convergence.png] [--processes 2]

One small model (116 thousand parameters over bytes) is trained on the standard library's source by
four workers in one process: the same seeds, the same text, the same number of inner steps for every
rule. Merge, outer step, codecs, adaptation and AdamW are the product's own classes; the network is
simulated (simulated_swarm.py): a record arrives a quarter of a round after its send, under DiLoCoX
as published at the round's end. Losses are those of the anchor on held-out text, when all that was
sent has arrived; bytes are those of the encoded payloads, sent by one worker, its part of the means
included. DiLoCoX is given our residual and its best outer step.

Before they are compared, the outer step of every rule was tuned on a seed that no table uses, with
the settings of GRID each; AllReduce, which has none, with as many inner learning rates. TUNED holds
what came out; --full does it anew (and prints it), takes more seeds, and shows in a second table
how the gaps change with more rounds, longer ones, and a larger model. The inner learning rate of
all other rules is the best of three for synchronous DiLoCo.

Results are the same on every run of one machine. Differences under half a percent are chance.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

# the swarm's modules; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence_runs import Runner, gaps, mean, spread
from benchmarks.simulated_swarm import Outcome, Rule, World, fp16_bytes
from dilocox.compression.stage_codec import Compression
from dilocox.dht.manifest import InnerSpec

MODEL = {
    "model_type": "llama",
    "vocab_size": 264,  # no id that never occurs: its rows would compress too well
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LARGER = MODEL | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
WORLD = World(
    model=MODEL, workers=4, inner_steps=8, rounds=60, arrival=2, batch=(4, 32), held_out=128
)
SCALED = {
    "as above": WORLD,
    "2 x rounds": replace(WORLD, rounds=120),
    "2 x H": replace(WORLD, inner_steps=16, arrival=4),
    "larger model": replace(WORLD, model=LARGER),
}
INNER_RATE = 1.5e-3
MUON_RATE = 1.6e-2
WARMUP = 1 / 20  # of the tokens

GRID = tuple(product((0.5, 0.7, 1.0), (0.0, 0.3, 0.5, 0.7)))  # outer learning rate and momentum
RATES = (0.5e-3, 0.7e-3, 1e-3, 1.2e-3, 1.5e-3, 1.8e-3, 2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 7e-3)
TUNING_SEED = 7
FIRST_SEED = 20  # of the tables: none that anything was chosen by

SYNCHRONOUS = "DiLoCo, synchronous, 16 bit"
PUBLISHED = "DiLoCoX as published, low rank + 4 bit"
SIXTEEN_BIT = "ours, 16 bit"
FOUR_BIT = "ours, 4 bit"
ADAPTIVE = "ours, adaptive rank + 4 bit"
TOP_K = "ours, top-k + 2 bit"
MUON = "DiLoCo, synchronous, 16 bit, Muon"
MUON_FOUR_BIT = "ours, 4 bit, Muon"
REFERENCES = {MUON_FOUR_BIT: MUON}  # of all others: SYNCHRONOUS

DENSE = Compression(
    scheme="dense", bits=16, max_factor=1e4, rank=1, min_rank=1, max_rank=64, top_k=128
)
# Ranks are those of a model 64 wide, and grow with the width.
FIXED_RANK = 7
START_RANK, MIN_RANK, MAX_RANK = 14, 7, 14
ENERGY = 0.85

TUNED = {
    SYNCHRONOUS: (0.7, 0.5),
    PUBLISHED: (0.5, 0.0),
    SIXTEEN_BIT: (1.0, 0.0),
    FOUR_BIT: (1.0, 0.0),
    ADAPTIVE: (1.0, 0.0),
    TOP_K: (1.0, 0.5),
    MUON: (0.7, 0.5),
    MUON_FOUR_BIT: (1.0, 0.0),
}
TUNED_RATE = 2e-3  # of AllReduce


@dataclass(frozen=True, kw_only=True)
class Goal:
    """`row` should end at least so much (a share) below or above the loss of `over`."""

    row: str
    over: str
    at_most: float
    bytes_share: float = 1.0
    """Of what synchronous DiLoCo would send in fp16."""


GOALS = (
    Goal(row=FOUR_BIT, over=SYNCHRONOUS, at_most=0.03),
    Goal(row=ADAPTIVE, over=SYNCHRONOUS, at_most=0.05, bytes_share=1 / 20),
    Goal(row=ADAPTIVE, over=PUBLISHED, at_most=-0.05),
)


def rules(world: World) -> dict[str, Rule]:
    """The rows of the table, with the outer steps of TUNED."""
    adamw = InnerSpec(learning_rate=INNER_RATE, warmup_tokens=int(world.tokens * WARMUP))
    muon = replace(adamw, optimizer="muon", muon_learning_rate=MUON_RATE)
    fast = replace(adamw, learning_rate=TUNED_RATE)
    four_bit = replace(DENSE, bits=4)
    low_rank = replace(four_bit, scheme="low_rank")
    wider = world.model["hidden_size"] // 64
    fixed = replace(low_rank, rank=wider * FIXED_RANK)
    adapted = replace(
        low_rank, rank=wider * START_RANK, min_rank=wider * MIN_RANK, max_rank=wider * MAX_RANK
    )
    found = {
        "AllReduce each step, fp16": Rule(merge="gradients", compression=DENSE, inner=fast),
        SYNCHRONOUS: Rule(merge="none", compression=DENSE, inner=adamw),
        PUBLISHED: Rule(merge="reset", compression=fixed, inner=adamw),
        SIXTEEN_BIT: Rule(merge="rebase", compression=DENSE, inner=adamw),
        FOUR_BIT: Rule(merge="rebase", compression=four_bit, inner=adamw),
        ADAPTIVE: Rule(merge="rebase", compression=adapted, energy=ENERGY, inner=adamw),
        TOP_K: Rule(merge="rebase", compression=replace(four_bit, scheme="top_k"), inner=adamw),
        MUON: Rule(merge="none", compression=DENSE, inner=muon),
        MUON_FOUR_BIT: Rule(merge="rebase", compression=four_bit, inner=muon),
    }
    return {
        name: _with_outer(rule, TUNED[name]) if name in TUNED else rule
        for name, rule in found.items()
    }


def tuned(runner: Runner, world: World, console: Console) -> dict[str, Rule]:
    """Every rule with the best of its settings, which are printed."""
    candidates: dict[str, list[Rule]] = {}
    for name, rule in rules(world).items():
        if rule.merge == "gradients":
            inners = [replace(rule.inner, learning_rate=rate) for rate in RATES]
            candidates[name] = [replace(rule, inner=inner) for inner in inners]
        else:
            candidates[name] = [_with_outer(rule, setting) for setting in GRID]
    every = [rule for rules_ in candidates.values() for rule in rules_]
    found = iter(runner.run(world, every, [TUNING_SEED]))
    best: dict[str, Rule] = {}
    table = Table(title=f"tuned on seed {TUNING_SEED}: {len(GRID)} settings each")
    for heading in ("rule", "best", "loss", "second", "worst"):
        table.add_column(heading)
    for name, tried in candidates.items():
        ranked = sorted((next(found)[0].loss, index) for index in range(len(tried)))
        best[name] = rule = tried[ranked[0][1]]
        setting = f"{rule.learning_rate:g} / {rule.momentum:g}"
        if rule.merge == "gradients":
            setting = f"inner {rule.inner.learning_rate:g}"
        losses = [f"{loss:.4f}" for loss, _ in (ranked[0], ranked[1], ranked[-1])]
        table.add_row(name, setting, *losses)
    console.print(table)
    return best


def compare(
    runner: Runner, world: World, rows: Mapping[str, Rule], seeds: Sequence[int]
) -> dict[str, list[Outcome]]:
    """Every rule from every seed."""
    return dict(zip(rows, runner.run(world, list(rows.values()), seeds), strict=True))


def print_table(world: World, found: Mapping[str, list[Outcome]], console: Console) -> None:
    """The main table, and which goals were reached."""
    fp16 = fp16_bytes(world)
    seeds = len(found[SYNCHRONOUS])
    table = Table(
        title=f"{world.workers} workers, {world.rounds} rounds of {world.inner_steps} inner steps, "
        f"{world.tokens / 1e3:.0f} thousand tokens, record after {world.arrival} inner steps, "
        f"{seeds} seeds"
    )
    table.add_column("rule")
    for heading in ("outer", "loss", "spread", "over DiLoCo", "of seeds", "MB sent", "of fp16"):
        table.add_column(heading, justify="right")
    for name, outcomes in found.items():
        rule = outcomes[0].trial.rule
        over = gaps(outcomes, found[REFERENCES.get(name, SYNCHRONOUS)])
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        losses = [outcome.loss for outcome in outcomes]
        outer = f"{rule.learning_rate:g} / {rule.momentum:g}"
        table.add_row(
            name,
            "" if rule.merge == "gradients" else outer,
            f"{mean(losses):.4f}",
            f"{spread(losses):.4f}",
            f"{mean(over):+.1%}",
            f"{min(over):+.1%} .. {max(over):+.1%}",
            f"{sent / 1e6:.2f}",
            f"1/{fp16 / sent:.1f}" if sent < fp16 else f"{sent / fp16:.1f}",
        )
    console.print(table)
    console.print("Muon over synchronous DiLoCo with Muon; spread: largest minus smallest loss")
    for goal in GOALS:
        over = mean(gaps(found[goal.row], found[goal.over]))
        share = mean([outcome.bytes_sent for outcome in found[goal.row]]) / fp16
        reached = over <= goal.at_most and share <= goal.bytes_share
        within = "" if goal.bytes_share == 1 else f" at 1/{1 / goal.bytes_share:.0f} of its bytes"
        console.print(
            f"{goal.row} against {goal.over}: {over:+.1%} at 1/{1 / share:.1f}; goal: "
            f"{goal.at_most:+.0%}{within}: {'reached' if reached else 'MISSED'}"
        )


def print_scaling(runner: Runner, seeds: Sequence[int], console: Console) -> None:
    """How the gaps change with more rounds, longer ones and a larger model."""
    rows = (SIXTEEN_BIT, FOUR_BIT, ADAPTIVE, PUBLISHED)
    table = Table(title=f"loss over synchronous DiLoCo's, {len(seeds)} seeds")
    for heading in ("", SYNCHRONOUS, *rows, "bytes adaptive"):
        table.add_column(heading)
    for label, world in SCALED.items():
        chosen = {name: rule for name, rule in rules(world).items() if name in (SYNCHRONOUS, *rows)}
        found = compare(runner, world, chosen, seeds)
        share = mean([outcome.bytes_sent for outcome in found[ADAPTIVE]]) / fp16_bytes(world)
        table.add_row(
            label,
            f"{mean([outcome.loss for outcome in found[SYNCHRONOUS]]):.4f}",
            *(f"{mean(gaps(found[row], found[SYNCHRONOUS])):+.1%}" for row in rows),
            f"1/{1 / share:.1f}",
        )
    console.print(table)


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the default: under three minutes")
    size.add_argument("--full", action="store_true", help="tune, more seeds, more worlds: an hour")
    parser.add_argument("--seeds", type=int, default=0, help="0: two, with --full four")
    parser.add_argument("--processes", type=int, default=1, help="of one thread each")
    parser.add_argument("--plot", type=Path, help="draw the loss curves into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    begun = time.monotonic()
    count = arguments.seeds or (4 if arguments.full else 2)
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    with Runner(arguments.processes, points=12 if arguments.plot else 1) as runner:
        rows = tuned(runner, WORLD, console) if arguments.full else rules(WORLD)
        found = compare(runner, WORLD, rows, seeds)
        print_table(WORLD, found, console)
        if arguments.full:
            print_scaling(runner, seeds[:2], console)
    if arguments.plot:
        from benchmarks.convergence_plot import draw

        draw(found, arguments.plot)
    console.print(f"{time.monotonic() - begun:.0f} s")


def _with_outer(rule: Rule, setting: tuple[float, float]) -> Rule:
    return replace(rule, learning_rate=setting[0], momentum=setting[1])


if __name__ == "__main__":
    main()
