"""What a head changes from step to step: the codec of each link and the microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.pipeline.activations import chosen_codec
from dilocox.pipeline.codecs import encoded_bytes
from dilocox.pipeline.happenings import StageReport
from dilocox.pipeline.ports import Shape
from dilocox.pipeline.schedule import window_size

UNMEASURED_CODEC = "bf16"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the manifest says (see PipelineSpec): `codec` may be "auto", `window` 0.

    microbatches: of an inner step. shape: [b, t, d] of an activation.
    """

    microbatches: int
    shape: Shape
    codec: str
    window: int

    def first_codecs(self, num_stages: int) -> tuple[str, ...]:
        """Of the links of a new replica."""
        codec = UNMEASURED_CODEC if self.codec == "auto" else self.codec
        return (codec,) * (num_stages - 1)

    def first_window(self, num_stages: int) -> int:
        """Of a new replica."""
        return min(self.window or 2 * num_stages, self.microbatches)

    def next(
        self, reports: Sequence[StageReport], codecs: Sequence[str], limit: int
    ) -> tuple[tuple[str, ...], int]:
        """Codecs by link and window of the next inner step, from what the last one measured.

        limit: what the members have memory for.
        """
        compute_s = max(report.compute_s for report in reports)
        travel_s = 0.0
        chosen: list[str] = []
        for link, codec in enumerate(codecs):
            upper, lower = reports[link], reports[link + 1]
            measured = [s for s in (lower.upper_bytes_per_s, upper.lower_bytes_per_s) if s > 0]
            speed = min(measured) if measured else None
            fixed = self.codec != "auto" or speed is None
            chosen.append(codec if fixed else chosen_codec(speed, self.shape, compute_s))
            travel_s += upper.lower_round_trip_s
            if speed is not None:
                travel_s += 2 * encoded_bytes(chosen[-1], self.shape) / speed
        window = window_size(
            stages=len(reports),
            microbatches=self.microbatches,
            round_trip_s=travel_s,
            compute_s=compute_s,
            limit=limit,
        )
        return tuple(chosen), min(self.window, limit) if self.window else window
