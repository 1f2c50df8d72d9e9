"""How many microbatches fill a slow chain (by a simulation of it)."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.pipeline.stage_worker import window_size


def window(**changes: Any) -> int:
    state: dict[str, Any] = {
        "stages": 4,
        "microbatches": 100,
        "round_trip_s": 0.9,
        "compute_s": 0.3,
        "limit": 1000,
    }
    return window_size(**{**state, **changes})


class TestWindowSize:
    def test_it_covers_the_stages_and_the_time_on_links(self) -> None:
        assert window() == 11  # 1.5 * (4 + 3)
        assert window(round_trip_s=1.2) == 12
        assert window(round_trip_s=0.0) == 6

    def test_twice_the_stages_while_nothing_is_known(self) -> None:
        assert window(round_trip_s=None) == 8
        assert window(compute_s=0.0) == 8

    def test_never_more_than_there_are(self) -> None:
        assert window(microbatches=5) == 5
        assert window(microbatches=5, round_trip_s=None) == 5
        assert window(round_trip_s=1e300, compute_s=1e-300) == 100

    def test_memory_goes_before_speed_but_one_is_always_let_through(self) -> None:
        assert window(limit=2) == 2
        assert window(limit=0) == 1

    @given(
        stages=st.integers(1, 64),
        microbatches=st.integers(1, 512),
        round_trip_s=st.none() | st.floats(0, 1e6),
        compute_s=st.floats(0, 1e6),
        limit=st.integers(1, 1024),
    )
    def test_bounds(self, **state: Any) -> None:
        most = min(state["microbatches"], state["limit"])
        assert min(state["stages"], most) <= window_size(**state) <= most


def busy(*, stages: int, microbatches: int, link_s: float, in_flight: int) -> float:
    """Share of time that stages compute: forwards take 1 s, backwards 2 s, links `link_s` one way.

    Links have delay only; what they carry at a time does not matter here.
    """
    backwards = [0] * stages
    queued, ready = [0] * stages, [0] * stages
    free_at = [0.0] * stages
    arrivals: list[tuple[float, int, str, int]] = []  # time, serial, kind, stage
    serial, fed, now = 0, 0, 0.0

    def deliver(time: float, kind: str, stage: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(arrivals, (time, serial, kind, stage))

    while backwards[0] < microbatches:
        while fed < microbatches and fed - backwards[0] < in_flight:
            fed, queued[0] = fed + 1, queued[0] + 1
        for stage in range(stages):
            if free_at[stage] > now or not (queued[stage] or ready[stage]):
                continue
            last, backward = stage == stages - 1, ready[stage] > 0
            if not backward:
                queued[stage] -= 1
                free_at[stage] = now + (3 if last else 1)
                if not last:
                    deliver(free_at[stage] + link_s, "forward", stage + 1)
            else:
                ready[stage], free_at[stage] = ready[stage] - 1, now + 2
            if backward or last:
                deliver(free_at[stage], "done", stage)
                if stage:
                    deliver(free_at[stage] + link_s, "backward", stage - 1)
            deliver(free_at[stage], "free", stage)
        now, _, kind, stage = heapq.heappop(arrivals)
        queued[stage] += kind == "forward"
        ready[stage] += kind == "backward"
        backwards[stage] += kind == "done"
    return 3 * microbatches / now


class TestSimulatedChain:
    @pytest.mark.parametrize("stages", [2, 4, 8])
    @pytest.mark.parametrize("link_s", [0.0, 1.0, 5.0])
    def test_the_window_keeps_stages_as_busy_as_an_unbounded_one(
        self, stages: int, link_s: float
    ) -> None:
        chosen = window_size(
            stages=stages,
            microbatches=400,
            round_trip_s=2 * (stages - 1) * link_s,
            compute_s=3.0,
            limit=1000,
        )
        chain = {"stages": stages, "microbatches": 400, "link_s": link_s}
        unbounded = busy(**chain, in_flight=400)
        assert busy(**chain, in_flight=chosen) > 0.97 * unbounded
        assert busy(**chain, in_flight=chosen // 2) < 0.8 * unbounded

    def test_without_delay_it_fills_the_classic_share(self) -> None:
        share = busy(stages=4, microbatches=32, link_s=0.0, in_flight=8)
        assert share == pytest.approx(32 / 35, abs=0.02)  # m / (m + stages - 1)
