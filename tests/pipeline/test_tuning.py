"""Codecs and windows follow from what the stages report."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.pipeline.frames import Shape, encoded_bytes
from dilocox.pipeline.link import MEASURED_BYTES
from dilocox.pipeline.messages import StageReport
from dilocox.pipeline.stage_worker import window_size
from dilocox.pipeline.tuning import AUTO_CODECS, Tuning, next_codec

SHAPE = (2, 8, 64)
LARGE = (4, 256, 512)  # in 0.1 s bf16 needs 83.9 Mbit/s, int8 43.3, int4 22.8
BF16, INT8 = encoded_bytes("bf16", SHAPE), encoded_bytes("int8", SHAPE)
UNLIMITED = 1000


def tuning(
    *, codec: str = "auto", window: int = 0, microbatches: int = 100, shape: Shape = SHAPE
) -> Tuning:
    return Tuning(microbatches=microbatches, shape=shape, codec=codec, window=window)


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
    def test_codecs_are_int8_until_links_are_measured(self) -> None:
        assert tuning(shape=LARGE).first_codecs(3) == ("int8", "int8")
        assert tuning(codec="int4").first_codecs(2) == ("int4",)
        assert tuning(codec="bf16", shape=LARGE).first_codecs(2) == ("bf16",)
        assert tuning().first_codecs(1) == ()

    def test_codecs_are_bf16_where_int8_would_never_be_measured(self) -> None:
        width = MEASURED_BYTES // 66 * 64  # 66 bytes a group, and 8 in front
        assert tuning(shape=(1, 1, width)).first_codecs(2) == ("bf16",)
        assert tuning(shape=(1, 1, width + 64)).first_codecs(2) == ("int8",)

    def test_window_is_the_manifests_or_two_a_stage(self) -> None:
        assert tuning().first_window(3) == 6
        assert tuning(microbatches=4).first_window(3) == 4
        assert tuning(window=2).first_window(3) == 2
        assert tuning(window=9, microbatches=4).first_window(3) == 4


class TestCodecs:
    @pytest.mark.parametrize(
        ("speed", "codec"),
        [(BF16, "bf16"), (BF16 - 1, "int8"), (INT8, "int8"), (INT8 - 1, "int4"), (1.0, "int4")],
    )
    def test_a_link_keeps_what_fits_its_slower_direction(self, speed: float, codec: str) -> None:
        for link in ((speed, 1e9), (1e9, speed), (speed, 0.0), (0.0, speed)):
            codecs, _ = tuning().next(reports(link), ("bf16",), UNLIMITED)
            assert codecs == (codec,)

    @pytest.mark.parametrize(("links", "needed"), [(1, 1.25), (2, 2.5), (3, 2.5)])
    def test_more_faith_needs_more_room_and_twice_that_beside_a_middle_stage(
        self, links: int, needed: float
    ) -> None:
        for payload, codec, lesser in ((INT8, "int8", "int4"), (BF16, "bf16", "int8")):
            for speed, expected in ((needed * payload, codec), (needed * payload - 1, lesser)):
                codecs, _ = tuning().next(
                    reports(*[(speed, speed)] * links), (lesser,) * links, UNLIMITED
                )
                assert codecs == (expected,) * links

    def test_each_link_has_its_own(self) -> None:
        measured = reports((1e9, 1e9), (1.0, 1.0), (float(INT8), 1e9))
        codecs, _ = tuning().next(measured, ("int8",) * 3, UNLIMITED)
        assert codecs == ("bf16", "int4", "int8")

    def test_what_was_not_measured_or_the_manifest_says_stays(self) -> None:
        codecs, _ = tuning().next(reports((0.0, 0.0), (1.0, 1.0)), ("int8", "bf16"), UNLIMITED)
        assert codecs == ("int8", "int4")
        codecs, _ = tuning(codec="fp32").next(reports((1.0, 1.0)), ("fp32",), UNLIMITED)
        assert codecs == ("fp32",)


class TestALineOfSoManyMbit:
    """A line shows a payload all of its speed while it is not full, else the payload's share."""

    PASS_S = 0.1

    def measured(self, mbit: float, codec: str, payloads: int) -> float:
        room = mbit * 1e6 / 8 * self.PASS_S
        return room if payloads * encoded_bytes(codec, LARGE) <= room else room / payloads

    def settled(self, mbit: float, codec: str, payloads: int) -> str:
        codecs = [codec]
        for _ in range(6):
            room = self.measured(mbit, codecs[-1], payloads)
            codecs.append(next_codec(codecs[-1], room, LARGE, payloads=payloads))
        assert len(set(codecs[2:])) == 1, f"{mbit} Mbit/s: {codecs}"
        return codecs[-1]

    @pytest.mark.parametrize("payloads", [1, 2])
    @pytest.mark.parametrize("first", AUTO_CODECS)
    def test_settles_within_two_steps_on_what_keeps_up(self, payloads: int, first: str) -> None:
        for mbit in range(1, 400):
            codec = self.settled(mbit, first, payloads)
            room = mbit * 1e6 / 8 * self.PASS_S
            assert codec == "int4" or payloads * encoded_bytes(codec, LARGE) <= room
            for better in AUTO_CODECS[: AUTO_CODECS.index(codec)]:
                assert 1.25 * payloads * encoded_bytes(better, LARGE) > room

    @pytest.mark.parametrize("payloads", [1, 2])
    def test_that_varies_by_a_tenth_is_not_tried_twice(self, payloads: int) -> None:
        dice = random.Random(0)
        for mbit in range(20, 300, 5):
            codec, before = "int8", set[str]()
            for _ in range(50):
                room = self.measured(mbit, codec, payloads) * dice.uniform(0.9, 1.1)
                following = next_codec(codec, room, LARGE, payloads=payloads)
                if following != codec:
                    assert following not in before, f"{mbit} Mbit/s: back at {following}"
                    before.add(codec)
                    codec = following


class TestWindow:
    def window(
        self,
        measured: list[StageReport],
        *,
        limit: int = UNLIMITED,
        window: int = 0,
        microbatches: int = 100,
    ) -> int:
        codecs = ("fp32",) * (len(measured) - 1)
        tuned = tuning(codec="fp32", window=window, microbatches=microbatches)
        return tuned.next(measured, codecs, limit)[1]

    def test_it_covers_what_is_on_the_links(self) -> None:
        assert self.window(reports()) == 2  # one stage, no links
        assert self.window(reports((0.0, 0.0))) == 3  # half as many again as stages
        assert self.window(reports((0.0, 0.0), round_trip_s=4.0)) == 9
        # an activation down and a gradient up, one second each
        speed = float(encoded_bytes("fp32", SHAPE))
        assert self.window(reports((speed, speed))) == 6
        assert self.window(reports((speed, speed), (speed, speed), round_trip_s=1.0)) == 14

    def test_it_is_bounded(self) -> None:
        far = reports((0.0, 0.0), round_trip_s=1000.0)
        assert self.window(far) == 100
        assert self.window(far, microbatches=7) == 7
        assert self.window(far, limit=5) == 5
        assert self.window(far, window=4) == 4  # the manifest's
        assert self.window(far, limit=3, window=4) == 3


@given(
    stages=st.integers(1, 64),
    microbatches=st.integers(1, 512),
    round_trip_s=st.floats(0, 1e6),
    compute_s=st.floats(0, 1e6),
    limit=st.integers(1, 1024),
)
def test_a_window_is_within_its_bounds(**state: Any) -> None:
    most = min(state["microbatches"], state["limit"])
    assert min(state["stages"], most) <= window_size(**state) <= most
