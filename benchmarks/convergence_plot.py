"""Draws what benchmarks/convergence.py found: loss curves, and loss at the end over bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.convergence_runs import mean
from benchmarks.simulated_swarm import Outcome

COLOURS = ("#999999", "#000000", "#ee6677", "#66ccee", "#4477aa", "#228833", "#ccbb44", "#aa3377")
TOP_LOSS = 3.5  # the first rounds would hide all differences


def draw(found: Mapping[str, Sequence[Outcome]], file: Path) -> None:
    """Write the picture, in the format that the file's ending says."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    curves: Any = figure.add_subplot(1, 2, 1)
    ends: Any = figure.add_subplot(1, 2, 2)
    for index, (name, outcomes) in enumerate(found.items()):
        colour = COLOURS[index % len(COLOURS)]
        tokens = [point.tokens / 1e3 for point in outcomes[0].curve]
        losses = [[outcome.curve[i].loss for outcome in outcomes] for i in range(len(tokens))]
        means = [mean(each) for each in losses]
        style = "--" if "Muon" in name else "-"
        curves.plot(tokens, means, style, color=colour, label=name, linewidth=1.5)
        lows, highs = [min(each) for each in losses], [max(each) for each in losses]
        curves.fill_between(tokens, lows, highs, color=colour, alpha=0.15, linewidth=0)
        sent = mean([outcome.bytes_sent for outcome in outcomes]) / 1e6
        ends.plot(sent, means[-1], "o", color=colour)
        ends.annotate(name, (sent, means[-1]), (5, 4), textcoords="offset points", fontsize=8)
    curves.set(xlabel="thousand tokens, all workers", ylabel="validation loss of the anchor, nats")
    curves.set_ylim(top=TOP_LOSS)
    curves.legend(fontsize=8)
    ends.set(xlabel="MB sent by each worker", ylabel="loss at the end", xscale="log")
    figure.savefig(file, dpi=150)
