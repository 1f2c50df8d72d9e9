"""Draws what benchmarks/pipeline.py measured: shares of computing, tokens/s, losses over bf16's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677")
GREY = "#555555"


@dataclass(kw_only=True)
class Drawing:
    """What is drawn; panels of what is not there are left out.

    limits: of losses over bf16's, by codec. over_bf16: losses over bf16's by setting and codec, one
    for each seed.
    """

    limits: Mapping[str, float]
    over_bf16: Mapping[str, Mapping[str, Sequence[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    _names: list[str] = field(default_factory=list[str])
    _computing: list[list[float]] = field(default_factory=list[list[float]])
    _tokens_per_s: list[float] = field(default_factory=list[float])

    def add_speed(self, name: str, computing: list[float], tokens_per_s: float) -> None:
        """A replica: the share of the time in which each stage computed, the head first."""
        self._names.append(name)
        self._computing.append(computing)
        self._tokens_per_s.append(tokens_per_s)

    def save(self, file: Path) -> None:
        """Write the picture, in the format that the file's ending says; needs matplotlib."""
        from matplotlib.figure import Figure  # only who draws needs it

        panels = [self._draw_computing, self._draw_tokens] if self._names else []
        panels += [self._draw_losses] if self.over_bf16 else []
        if not panels:
            raise ValueError("there is nothing to draw")
        figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for draw, axes in zip(panels, row, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
        figure.savefig(file, dpi=150)

    def _draw_computing(self, axes: Any) -> None:
        stages = len(self._computing[0])
        width = 0.8 / stages
        for stage in range(stages):
            places = [
                place + (stage - (stages - 1) / 2) * width for place in range(len(self._names))
            ]
            shares = [100 * computing[stage] for computing in self._computing]
            colour = COLOURS[stage % len(COLOURS)]
            axes.bar(places, shares, width, color=colour, label=f"stage {stage}")
        axes.set_xticks(range(len(self._names)), self._names)
        axes.set(ylim=(0, 100), ylabel="% of the time", title="computing")
        axes.legend(frameon=False)

    def _draw_tokens(self, axes: Any) -> None:
        axes.bar(range(len(self._names)), self._tokens_per_s, 0.6, color=COLOURS[0])
        axes.set_xticks(range(len(self._names)), self._names)
        axes.set(ylabel="tokens/s", title="speed of a replica")

    def _draw_losses(self, axes: Any) -> None:
        settings = list(self.over_bf16)
        codecs = [codec for codec in self.over_bf16[settings[0]] if codec != "bf16"]
        width = 0.8 / len(codecs)
        for number, codec in enumerate(codecs):
            colour = COLOURS[number % len(COLOURS)]
            for place, setting in enumerate(settings):
                at = place + (number - (len(codecs) - 1) / 2) * width
                each = [100 * over for over in self.over_bf16[setting][codec]]
                label = codec if place == 0 else None
                axes.bar(at, statistics.fmean(each), 0.9 * width, color=colour, label=label)
                axes.plot([at] * len(each), each, ".", color=GREY, markersize=4)
                if codec in self.limits:
                    ends = (at - 0.45 * width, at + 0.45 * width)
                    axes.hlines(100 * self.limits[codec], *ends, color=GREY, linestyles="dashed")
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(settings)), [name.replace(", ", "\n") for name in settings])
        axes.set(ylabel="% over bf16 (dots: seeds; dashed: limit)", title="validation loss")
        axes.margins(y=0.2)
        axes.legend(frameon=False, ncols=len(codecs), loc="upper center")
