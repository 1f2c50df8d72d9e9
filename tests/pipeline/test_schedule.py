"""What runs next, and how many microbatches fill a slow chain (by a simulation of it)."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.pipeline.stage_worker import Action, Policy, next_action, window_size


def action(policy: Policy, **changes: Any) -> Action | None:
    state: dict[str, Any] = {
        "warm_up": 2,
        "microbatches": 4,
        "forwards": 1,
        "backwards": 0,
        "forward_ready": True,
        "backward_ready": True,
    }
    return next_action(policy, **{**state, **changes})


class TestNextAction:
    def test_backward_first_runs_whatever_is_there_and_backwards_first(self) -> None:
        assert action("backward_first") == "backward"
        assert action("backward_first", backward_ready=False) == "forward"
        assert action("backward_first", backward_ready=False, forwards=3) == "forward"
        assert action("backward_first", backward_ready=False, forward_ready=False) is None

    def test_1f1b_waits_for_the_piece_whose_turn_it_is(self) -> None:
        assert action("1f1b") == "forward"  # warming up
        assert action("1f1b", forward_ready=False) is None
        assert action("1f1b", forwards=2) == "backward"
        assert action("1f1b", forwards=2, backward_ready=False) is None
        assert action("1f1b", forwards=2, backwards=1) == "forward"
        assert action("1f1b", forwards=4, backwards=3) == "backward"


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


def busy(policy: Policy, *, stages: int, microbatches: int, link_s: float, in_flight: int) -> float:
    """Share of time that stages compute: forwards take 1 s, backwards 2 s, links `link_s` one way.

    Links have delay only; what they carry at a time does not matter here.
    """
    forwards, backwards = [0] * stages, [0] * stages
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
            chosen = next_action(
                policy,
                warm_up=stages - stage,
                microbatches=microbatches,
                forwards=forwards[stage],
                backwards=backwards[stage],
                forward_ready=queued[stage] > 0,
                backward_ready=ready[stage] > 0,
            )
            if free_at[stage] > now or chosen is None:
                continue
            last = stage == stages - 1
            if chosen == "forward":
                queued[stage], forwards[stage] = queued[stage] - 1, forwards[stage] + 1
                free_at[stage] = now + (3 if last else 1)
                if not last:
                    deliver(free_at[stage] + link_s, "forward", stage + 1)
            else:
                ready[stage], free_at[stage] = ready[stage] - 1, now + 2
            if chosen == "backward" or last:
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
        unbounded = busy("backward_first", **chain, in_flight=400)
        assert busy("backward_first", **chain, in_flight=chosen) > 0.97 * unbounded
        assert busy("backward_first", **chain, in_flight=chosen // 2) < 0.8 * unbounded

    def test_over_slow_links_backward_first_beats_1f1b(self) -> None:
        chain = {"stages": 4, "microbatches": 32, "link_s": 3.0, "in_flight": 10}
        assert busy("backward_first", **chain) > 1.3 * busy("1f1b", **chain)

    def test_without_delay_both_fill_the_classic_share(self) -> None:
        for policy in ("backward_first", "1f1b"):
            share = busy(policy, stages=4, microbatches=32, link_s=0.0, in_flight=8)
            assert share == pytest.approx(32 / 35, abs=0.02)  # m / (m + stages - 1)
