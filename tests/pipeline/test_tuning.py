"""Codecs and windows follow from what the stages report."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dilocox.pipeline.codecs import encoded_bytes
from dilocox.pipeline.happenings import StageReport
from dilocox.pipeline.tuning import Tuning

SHAPE = (2, 8, 64)
BF16, INT8 = encoded_bytes("bf16", SHAPE), encoded_bytes("int8", SHAPE)
UNLIMITED = 1000


def tuning(*, codec: str = "auto", window: int = 0, microbatches: int = 100) -> Tuning:
    return Tuning(microbatches=microbatches, shape=SHAPE, codec=codec, window=window)


def reports(
    *links: tuple[float, float], compute_s: float = 1.0, round_trip_s: float = 0.0
) -> list[StageReport]:
    """links: bytes/s as the lower and as the upper end of each link measured them."""
    ends = [(0.0, 0.0), *links, (0.0, 0.0)]
    return [
        StageReport(
            anchor_round=0,
            compute_s=compute_s,
            upper_bytes_per_s=above[0],
            lower_bytes_per_s=below[1],
            lower_round_trip_s=round_trip_s if stage < len(links) else 0.0,
        )
        for stage, (above, below) in enumerate(pairwise(ends))
    ]


class TestTheFirst:
    def test_codecs_are_bf16_until_links_are_measured(self) -> None:
        assert tuning().first_codecs(3) == ("bf16", "bf16")
        assert tuning(codec="int4").first_codecs(2) == ("int4",)
        assert tuning().first_codecs(1) == ()

    def test_window_is_the_manifests_or_two_a_stage(self) -> None:
        assert tuning().first_window(3) == 6
        assert tuning(microbatches=4).first_window(3) == 4
        assert tuning(window=2).first_window(3) == 2
        assert tuning(window=9, microbatches=4).first_window(3) == 4


class TestCodecs:
    @pytest.mark.parametrize(
        ("speed", "codec"),
        [
            (BF16, "bf16"),
            (BF16 - 1, "int8"),
            (INT8, "int8"),
            (INT8 - 1, "int4"),
            (1.0, "int4"),
        ],
    )
    def test_a_link_has_the_most_faithful_that_fits_its_slower_direction(
        self, speed: float, codec: str
    ) -> None:
        for link in ((speed, 1e9), (1e9, speed), (speed, 0.0), (0.0, speed)):
            codecs, _ = tuning().next(reports(link), ("int4",), UNLIMITED)
            assert codecs == (codec,)

    def test_each_link_has_its_own(self) -> None:
        measured = reports((1e9, 1e9), (1.0, 1.0), (float(INT8), 1e9))
        codecs, _ = tuning().next(measured, ("int8",) * 3, UNLIMITED)
        assert codecs == ("bf16", "int4", "int8")

    def test_the_slowest_stage_sets_how_much_time_there_is(self) -> None:
        measured = reports((float(INT8), 0.0))
        slow = StageReport(anchor_round=0, compute_s=2.0, upper_bytes_per_s=float(INT8))
        codecs, _ = tuning().next([measured[0], slow], ("bf16",), UNLIMITED)
        assert codecs == ("bf16",)

    def test_what_was_not_measured_stays(self) -> None:
        codecs, _ = tuning().next(reports((0.0, 0.0), (1.0, 1.0)), ("int8", "bf16"), UNLIMITED)
        assert codecs == ("int8", "int4")

    def test_what_the_manifest_says_stays(self) -> None:
        codecs, _ = tuning(codec="fp32").next(reports((1.0, 1.0)), ("fp32",), UNLIMITED)
        assert codecs == ("fp32",)


class TestWindow:
    def window(self, measured: list[StageReport], limit: int = UNLIMITED, **options: int) -> int:
        codecs = ("fp32",) * (len(measured) - 1)
        return tuning(codec="fp32", **options).next(measured, codecs, limit)[1]

    def test_it_covers_what_is_on_the_links(self) -> None:
        assert self.window(reports((0.0, 0.0))) == 3  # half as many again as stages
        assert self.window(reports((0.0, 0.0), round_trip_s=4.0)) == 9
        # an activation down and a gradient up, one second each
        speed = float(encoded_bytes("fp32", SHAPE))
        assert self.window(reports((speed, speed))) == 6
        assert self.window(reports((speed, speed), (speed, speed), round_trip_s=1.0)) == 14

    def test_of_one_stage_there_are_no_links(self) -> None:
        assert self.window(reports()) == 2

    def test_it_is_bounded(self) -> None:
        far = reports((0.0, 0.0), round_trip_s=1000.0)
        assert self.window(far) == 100
        assert self.window(far, microbatches=7) == 7
        assert self.window(far, limit=5) == 5

    def test_what_the_manifest_says_stays_within_memory(self) -> None:
        far = reports((0.0, 0.0), round_trip_s=1000.0)
        assert self.window(far, window=4) == 4
        assert self.window(far, limit=3, window=4) == 3
