"""What travels along a chain: written, read back, and refused when it is odd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.pipeline.frames import CODECS, Frame, FrameRefused
from dilocox.pipeline.messages import FAULT_REASONS, Evaluated, Fault, Go, StageReport, Totals
from dilocox.pipeline.reservation import MAX_LEARNING_RATE, MAX_WINDOW
from tests.pipeline.wires import over_the_wire

SECONDS = st.floats(0.0, 1e9)
SPEEDS = st.floats(0.0, 1e12)
REPORTS = st.builds(
    StageReport,
    anchor_round=st.integers(-1, 2**40),
    compute_s=SECONDS,
    upper_bytes_per_s=SPEEDS,
    lower_bytes_per_s=SPEEDS,
    lower_round_trip_s=SECONDS,
    window=st.integers(1, MAX_WINDOW),
    leaving=st.booleans(),
)
LOSSES = st.floats(allow_infinity=False)
SUMS = st.floats(0.0, allow_infinity=False) | st.just(math.nan)
ONE = Totals(squared_norm=1.0, loss=2.0, reports=(StageReport(anchor_round=1, compute_s=0.5),))
GO = Go(factor=0.5, learning_rate=1e-3, loss=2.0, codecs=("bf16", "int4"))


def travelled(kind: str, facts: dict[str, object]) -> Any:
    """The facts of a frame that was really written and read."""
    return over_the_wire(Frame(kind=kind, facts=facts)).facts


FAULT = Fault(stage=1, seen_by=0, reason="closed", after_s=0.0)
READERS: dict[str, tuple[dict[str, object], Callable[[Mapping[str, object]], object]]] = {
    "sum": (ONE.to_facts(), lambda facts: Totals.from_facts(facts, 1)),
    "go": (GO.to_facts(), lambda facts: Go.from_facts(facts, 3)),
    "fault": (FAULT.to_facts(), lambda facts: Fault.from_facts(facts, 4)),
    "evaluated": (
        {"loss": 3.5},
        lambda facts: Evaluated.of(Frame(kind="evaluated", facts=facts)),
    ),
}


@given(SUMS, LOSSES, st.lists(REPORTS, max_size=8))
def test_totals_arrive_as_they_were(
    squared_norm: float, loss: float, reports: list[StageReport]
) -> None:
    totals = Totals(squared_norm=squared_norm, loss=loss, reports=tuple(reports))
    read = Totals.from_facts(travelled("sum", totals.to_facts()), len(reports))
    assert repr(read) == repr(totals)  # a NaN is no NaN's equal


@given(
    st.floats(0.0, 1.0) | st.just(math.nan),
    st.floats(0.0, MAX_LEARNING_RATE),
    LOSSES,
    st.lists(st.sampled_from(CODECS), max_size=8),
)
def test_go_arrives_as_it_was(factor: float, rate: float, loss: float, codecs: list[str]) -> None:
    go = Go(factor=factor, learning_rate=rate, loss=loss, codecs=tuple(codecs))
    read = Go.from_facts(travelled("go", go.to_facts()), len(codecs) + 1)
    assert repr(read) == repr(go)


@given(st.integers(0, 3), st.integers(0, 3), st.sampled_from(FAULT_REASONS), SECONDS)
def test_a_fault_arrives_as_it_was(stage: int, seen_by: int, reason: str, after_s: float) -> None:
    fault = Fault(stage=stage, seen_by=seen_by, reason=reason, after_s=after_s)
    assert Fault.from_facts(travelled("fault", fault.to_facts()), 4) == fault


@pytest.mark.parametrize("loss", [None, 0.0, 3.5])
def test_an_evaluation_has_a_loss_or_none(loss: float | None) -> None:
    frame = Frame(kind="evaluated", microbatch=7, facts={"loss": loss})
    assert Evaluated.of(over_the_wire(frame)) == Evaluated(batch=7, loss=loss)


def test_an_overflow_is_not_a_number() -> None:
    totals = Totals(squared_norm=math.inf, loss=math.nan)
    read = Totals.from_facts(travelled("sum", totals.to_facts()), 0)
    loss = Evaluated.of(Frame(kind="evaluated", facts={"loss": math.inf})).loss
    assert loss is not None
    assert all(map(math.isnan, (read.squared_norm, read.loss, loss)))


def test_the_report_of_the_stage_above_comes_first() -> None:
    upper = StageReport(anchor_round=2, compute_s=0.1)
    both = ONE.plus(3.0, upper)
    assert both.reports == (upper, *ONE.reports)
    assert (both.squared_norm, both.loss) == (4.0, 2.0)
    assert math.isnan(both.plus(math.nan, upper).squared_norm)


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        *(
            ("sum", {name: value})
            for name, value in (
                ("anchor_round", [math.inf]),
                ("anchor_round", ["1"]),
                ("compute_s", [-1.0]),
                ("compute_s", []),  # of another number of stages
                ("upper_bytes_per_s", [math.nan]),
                ("lower_bytes_per_s", 1.0),
                ("lower_round_trip_s", [True]),
                ("leaving", [1]),
                ("squared_norm", None),
                ("squared_norm", -1.0),
                ("window", [0]),
                ("window", [MAX_WINDOW + 1]),
                ("loss", "2"),
            )
        ),
        *(
            ("go", {name: value})
            for name, value in (
                ("codecs", ["bf16"]),
                ("codecs", ["bf16", "none"]),
                ("codecs", "bf16"),
                ("learning_rate", -1e-9),
                ("learning_rate", MAX_LEARNING_RATE + 1),
                ("learning_rate", math.nan),
                ("factor", "1"),
                ("factor", 1.5),
                ("factor", -0.5),
                ("loss", None),
            )
        ),
        *(
            ("fault", {name: value})
            for name, value in (
                ("stage", 4),
                ("stage", -1),
                ("seen_by", 1.5),
                ("reason", "x" * 100),
                ("reason", 1),
                ("after_s", -1.0),
                ("after_s", math.inf),
            )
        ),
        *(("evaluated", {"loss": value}) for value in ("low", [1.0], True)),
    ],
)
def test_an_odd_or_missing_fact_is_refused(kind: str, odd: dict[str, object]) -> None:
    facts, read = READERS[kind]
    read(facts)
    with pytest.raises(FrameRefused, match="header"):
        read(facts | odd)
    if kind != "evaluated":  # which may have no loss
        with pytest.raises(FrameRefused, match="header"):
            read({name: value for name, value in facts.items() if name not in odd})
