"""What a head changes from step to step: the codec of each link and the microbatches in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.pipeline.frames import CODECS, Shape, encoded_bytes
from dilocox.pipeline.link import MEASURED_BYTES
from dilocox.pipeline.messages import StageReport
from dilocox.pipeline.stage_worker import window_size

AUTO_CODECS = CODECS[1:]  # most faithful first
_MARGIN = 1.25  # a measured speed varies by so much


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
        """Of the links of a new replica; of "auto" int8, which is slow on no link for long.

        Where that is too little to measure a link's speed by, bf16: it would stay for ever.
        """
        codec = self.codec
        if codec == "auto":
            measurable = encoded_bytes("int8", self.shape) >= MEASURED_BYTES
            codec = "int8" if measurable else "bf16"
        return (codec,) * (num_stages - 1)

    def first_window(self, num_stages: int) -> int:
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
        payloads = line_payloads(len(reports))
        for link, last in enumerate(codecs):
            upper, lower = reports[link], reports[link + 1]
            measured = [s for s in (lower.upper_bytes_per_s, upper.lower_bytes_per_s) if s > 0]
            speed = min(measured) if measured else None
            fixed = self.codec != "auto" or speed is None
            room = math.inf if speed is None else speed * compute_s
            codec = last if fixed else next_codec(last, room, self.shape, payloads=payloads)
            chosen.append(codec)
            travel_s += upper.lower_round_trip_s
            if speed is not None:
                travel_s += 2 * encoded_bytes(codec, self.shape) / speed
        window = window_size(
            stages=len(reports),
            microbatches=self.microbatches,
            round_trip_s=travel_s,
            compute_s=compute_s,
            limit=limit,
        )
        return tuple(chosen), min(self.window, limit) if self.window else window


def line_payloads(stages: int) -> int:
    """How many payloads of a microbatch go out over the line of the busiest stage, which has one
    for all its neighbours: 2 of one in the middle, an activation down and a gradient up, else 1.
    """
    return 1 if stages == 2 else 2


def next_codec(codec: str, room: float, shape: Shape, *, payloads: int) -> str:
    """The most faithful of bf16, int8 and int4 under which a link does not hold its stages up.

    codec: that of the last inner step. room: bytes that pass the link one way, as fast as payloads
    passed it then, during one forward plus one backward. shape: [b, t, d]. payloads: as
    `line_payloads` says.

    A payload has to fit into `room`, for while a line is full, what was measured is a payload's
    share of it. A more faithful codec than `codec` needs room for `payloads` and a margin, because
    a line that was not full showed all of its speed to each of them. So a link that stays as it is
    keeps its codec. If none fits, int4.
    """
    for better in AUTO_CODECS:
        is_new = AUTO_CODECS.index(better) < AUTO_CODECS.index(codec)
        needed = encoded_bytes(better, shape) * (payloads * _MARGIN if is_new else 1)
        if needed <= room:
            return better
    return AUTO_CODECS[-1]
