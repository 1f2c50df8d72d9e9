"""DiLoCoX's ablation (arXiv 2506.21263), of it as published and of ours, and its swarms' size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from benchmarks.convergence_rules import (
    ADAPTIVE,
    DENSE,
    FIXED_RANK,
    FOUR_BIT,
    PUBLISHED,
    SIXTEEN_BIT,
    START_RANK,
    SYNCHRONOUS,
    TUNED,
)
from benchmarks.papers_study import CHANCE, Found, Study, gap, loss
from benchmarks.simulated_swarm import Rule, World

SOURCE = "DiLoCoX"
RANKS = (2, 4, 7, 14, 28)
WHOLE, NO_OVERLAP = "whole", "no overlap"
PAPERS_OUTER = (0.7, 0.9)  # learning rate and momentum of DiLoCo's outer step


def _without(whole: Rule) -> dict[str, Rule]:
    """A rule of adaptive low rank and 4 bits, and the same with one of its parts switched off."""
    codec = whole.compression
    dense = replace(DENSE, bits=4)

    def fixed(rank: int) -> Rule:
        return replace(whole, energy=None, compression=replace(codec, rank=rank, min_rank=1))

    return {
        WHOLE: whole,
        "no low rank": replace(whole, compression=dense, energy=None, decay=0.95),
        "no quantisation": replace(whole, compression=replace(codec, bits=16)),
        "no compression": replace(whole, compression=DENSE, energy=None, decay=0.95),
        "no error feedback": replace(whole, decay=0.0),
        f"not adaptive, rank {FIXED_RANK}": fixed(FIXED_RANK),
        f"not adaptive, rank {START_RANK}": fixed(START_RANK),
    }


def ablation(study: Study) -> None:
    """Each part of the method switched off alone."""
    ours = study.rules()[ADAPTIVE]
    rate, momentum = TUNED[PUBLISHED]
    reset = replace(ours, merge="reset", learning_rate=rate, momentum=momentum)
    bases = {"ours": _without(ours), SOURCE: _without(reset)}
    synchronous = replace(ours, merge="none")
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    for base, rules in bases.items():
        for label, rule in rules.items():
            rows[f"{base}, {label}"] = study.world, rule
            over[f"{base}, {label}"] = f"{base}, {WHOLE}"
        rows.setdefault(f"ours, {NO_OVERLAP}", (study.world, synchronous))
        over[f"ours, {NO_OVERLAP}"] = f"ours, {WHOLE}"
    rows[SYNCHRONOUS] = study.world, study.rules()[SYNCHRONOUS]
    over[SYNCHRONOUS] = f"ours, {WHOLE}"
    found = study.compare(
        "ablation",
        "one part off, over the whole of its merge (ours: rebase at a quarter of the round; "
        "DiLoCoX: reset at its end)",
        rows,
        over,
    )
    study.report.say(
        "The pipeline changes no loss: with fp32 between stages a replica of several stages makes "
        "the steps of the whole model (tests/pipeline/test_replica_equality.py). H adapts to what "
        "exchanges take, which have no duration here: only ranks adapt. Without overlap both "
        "merges are the same rule."
    )
    if found is not None:
        _claims(study, found)


def _claims(study: Study, found: Found) -> None:
    def costs(base: str, label: str) -> float:
        """What the part that is off costs in the whole: the whole over it."""
        return gap(found, f"{base}, {WHOLE}", label)

    for base in ("ours", SOURCE):
        apart = costs(base, SYNCHRONOUS)
        study.claim(
            base,
            "negligible loss beside DiLoCo uncompressed (5 % at most)",
            f"whole {apart:+.1%}",
            apart <= 0.05,
        )
        apart = costs(base, f"ours, {NO_OVERLAP}")
        study.claim(
            base, "overlap costs under 3 %", f"with the same codec {apart:+.1%}", apart <= 0.03
        )
        apart = costs(base, f"{base}, no quantisation")
        study.claim(base, "4 bits cost nothing", f"{apart:+.1%}", apart <= CHANCE)
        apart = costs(base, f"{base}, no low rank")
        study.claim(base, "low rank costs under 3 %", f"{apart:+.1%}", apart <= 0.03)
        apart = gap(found, f"{base}, no error feedback", f"{base}, {WHOLE}")
        study.claim(
            base, "error feedback lowers the loss", f"without it {apart:+.1%}", apart > CHANCE
        )
        apart = gap(found, f"{base}, not adaptive, rank {FIXED_RANK}", f"{base}, {WHOLE}")
        study.claim(
            base,
            "adaptive ranks end no higher than fixed ones of the smallest",
            f"fixed {apart:+.1%}",
            apart >= -CHANCE,
        )


def merges(study: Study) -> None:
    """none, reset and rebase without compression, and the weight of rebase."""
    world, rules = study.world, study.rules()
    base = rules[SIXTEEN_BIT]
    rate, momentum = TUNED[PUBLISHED]
    papers_rate, papers_momentum = PAPERS_OUTER
    none = rules[SYNCHRONOUS]
    rows: dict[str, tuple[World, Rule]] = {
        "none": (world, none),
        "reset": (
            world,
            replace(base, merge="reset", learning_rate=rate, momentum=momentum),
        ),
        "rebase, w 0.75": (world, base),
        "rebase, w 0.5": (world, replace(base, weight=0.5)),
        "rebase, w 1": (world, replace(base, weight=1.0)),
        "rebase at the end": (replace(world, arrival=world.inner_steps), base),
        "none, outer 0.7/0.9": (
            world,
            replace(none, learning_rate=papers_rate, momentum=papers_momentum),
        ),
    }
    found = study.compare("merges", "merge rules, 16 bit", rows, "none")
    if found is not None:
        apart = gap(found, "rebase at the end", "reset")
        study.claim(
            "ours",
            "rebase ends lower than reset, at the same arrival",
            f"{apart:+.1%}, at a quarter {gap(found, 'rebase, w 0.75', 'reset'):+.1%}",
            apart < -CHANCE,
        )


def ranks(study: Study) -> None:
    """Fixed ranks of matrices 64 wide."""
    world, rules = study.world, study.rules()
    base = replace(rules[ADAPTIVE], energy=None)
    dense = rules[FOUR_BIT]
    rows: dict[str, tuple[World, Rule]] = {"dense": (world, dense)}
    for rank in RANKS:
        codec = replace(base.compression, rank=rank, min_rank=1)
        rows[f"rank {rank}"] = world, replace(base, compression=codec)
    found = study.compare("ranks", "ours by rank of 64, 4 bit", rows, "dense")
    if found is not None:
        losses = [loss(found, f"rank {rank}") for rank in RANKS]
        study.report.plot(
            "rank", "loss", {"ours": list(zip(RANKS, losses, strict=True))}, part="ranks"
        )
        study.claim(
            SOURCE,
            "a rank buys loss for bytes: a higher one ends lower",
            ", ".join(f"{rank}: {each:.3f}" for rank, each in zip(RANKS, losses, strict=True)),
            all(after < before * (1 + CHANCE) for before, after in pairwise(losses)),
        )


def workers(study: Study) -> None:
    """16 and 32 workers."""
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    counts = (16, 32)
    for count in counts:
        world = replace(study.world, workers=count, rounds=max(1, study.world.rounds // 4))
        rules = study.rules(world)
        for name in (SYNCHRONOUS, FOUR_BIT, ADAPTIVE, PUBLISHED):
            rows[f"{count}, {name}"] = world, rules[name]
            over[f"{count}, {name}"] = f"{count}, {SYNCHRONOUS}"
    found = study.compare(
        "workers", "large swarms, a quarter of the rounds; over DiLoCo", rows, over
    )
    if found is not None:
        seen = {
            count: gap(found, f"{count}, {ADAPTIVE}", f"{count}, {SYNCHRONOUS}") for count in counts
        }
        published = [
            gap(found, f"{count}, {PUBLISHED}", f"{count}, {SYNCHRONOUS}") for count in counts
        ]
        study.claim(
            "ours",
            "with 16 and 32 workers within 5 % of DiLoCo, adaptive",
            ", ".join(f"{count} {apart:+.1%}" for count, apart in seen.items())
            + f", DiLoCoX as published {published[0]:+.1%} and {published[1]:+.1%}",
            max(seen.values()) <= 0.05,
        )


PARTS = {"ablation": ablation, "merges": merges, "ranks": ranks, "workers": workers}
