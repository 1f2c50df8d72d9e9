"""Draws the loss curves of benchmarks/convergence.py: the mean over the seeds, and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen is needed

from matplotlib import pyplot as plt

from benchmarks.simulated_swarm import Outcome

COLOURS = ("#999999", "#000000", "#ee6677", "#66ccee", "#4477aa", "#228833", "#ccbb44", "#aa3377")


def draw(found: Mapping[str, Sequence[Outcome]], file: Path) -> None:
    """Write an image whose format follows from the file's ending (png, svg, pdf)."""
    figure, (curves, bars) = plt.subplots(
        1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": (3, 2)}, layout="constrained"
    )
    for index, (name, outcomes) in enumerate(found.items()):
        colour = COLOURS[index % len(COLOURS)]
        tokens = [point.tokens / 1e3 for point in outcomes[0].curve]
        losses = list(zip(*([p.loss for p in outcome.curve] for outcome in outcomes), strict=True))
        means = [sum(each) / len(each) for each in losses]
        style = "--" if "Muon" in name else "-"
        curves.plot(tokens, means, style, color=colour, label=name, linewidth=1.5)
        lows, highs = [min(each) for each in losses], [max(each) for each in losses]
        curves.fill_between(tokens, lows, highs, color=colour, alpha=0.15, linewidth=0)
        sent = sum(outcome.bytes_sent for outcome in outcomes) / len(outcomes) / 1e6
        bars.plot(sent, means[-1], "o", color=colour)
        bars.annotate(name, (sent, means[-1]), (4, 4), textcoords="offset points", fontsize=7)
    curves.set(xlabel="thousand tokens, all workers", ylabel="validation loss of the anchor, nats")
    curves.set_ylim(top=3.5)
    curves.legend(fontsize=8)
    bars.set(xlabel="MB sent by each worker", ylabel="loss at the end", xscale="log")
    figure.savefig(file, dpi=150)
    plt.close(figure)
