"""What travels along a chain: written, read back, and refused when it is odd."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.pipeline.frames import CODECS, Facts, Frame, FrameRefused
from dilocox.pipeline.messages import Evaluated, Fault, Go, StageReport, Totals
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
NAN = st.just(math.nan)
ONE = Totals(squared_norm=1.0, loss=2.0, reports=(StageReport(anchor_round=1, compute_s=0.5),))
GO = Go(factor=0.5, learning_rate=1e-3, loss=2.0, codecs=("bf16", "int4"))
FAULT = Fault(stage=1, seen_by=0, reason="closed", after_s=0.0)


def travelled(facts: Facts, num_stages: int) -> Facts:
    """The facts of a frame that was really written and read."""
    frame = over_the_wire(Frame(kind="go", facts=facts.to_facts()))
    return type(facts).from_facts(frame.facts, num_stages)


@given(st.floats(0.0) | NAN, LOSSES, st.lists(REPORTS, max_size=8))
def test_totals_arrive_as_they_were(
    squared_norm: float, loss: float, reports: list[StageReport]
) -> None:
    totals = Totals(squared_norm=squared_norm, loss=loss, reports=tuple(reports))
    assert repr(travelled(totals, len(reports))) == repr(totals)  # a NaN is no NaN's equal


@given(
    st.floats(0.0, 1.0) | NAN,
    st.floats(0.0, MAX_LEARNING_RATE),
    LOSSES,
    st.lists(st.sampled_from(CODECS), max_size=8),
)
def test_go_arrives_as_it_was(factor: float, rate: float, loss: float, codecs: list[str]) -> None:
    go = Go(factor=factor, learning_rate=rate, loss=loss, codecs=tuple(codecs))
    assert repr(travelled(go, len(codecs) + 1)) == repr(go)


@pytest.mark.parametrize("reason", ["closed", "silent", "missing", "stuck", "refused", "left"])
def test_a_fault_arrives_as_it_was(reason: Any) -> None:
    fault = Fault(stage=3, seen_by=2, reason=reason, after_s=0.5)
    assert travelled(fault, 4) == fault


@pytest.mark.parametrize("loss", [None, 0.0, 3.5])
def test_an_evaluation_has_a_loss_or_none(loss: float | None) -> None:
    evaluated = Evaluated(batch=7, loss=loss)
    assert travelled(evaluated, 1) == evaluated


def test_an_overflow_is_not_a_number() -> None:
    facts = {"squared_norm": math.inf, "loss": -math.inf}
    facts |= dict.fromkeys(StageReport.model_fields, ())
    read = Totals.from_facts(facts, 0)
    loss = Evaluated.from_facts({"batch": 0, "loss": math.inf}).loss
    assert loss is not None
    assert all(map(math.isnan, (read.squared_norm, read.loss, loss)))


def test_the_report_of_the_stage_above_comes_first() -> None:
    upper = StageReport(anchor_round=2, compute_s=0.1)
    both = ONE.plus(3.0, upper)
    assert both.reports == (upper, *ONE.reports)
    assert (both.squared_norm, both.loss) == (4.0, 2.0)
    assert math.isnan(both.plus(math.nan, upper).squared_norm)


@pytest.mark.parametrize(
    ("good", "num_stages", "name", "odd"),
    [
        (good, num_stages, name, odd)
        for good, num_stages, values in (
            (
                ONE,
                1,
                {
                    "anchor_round": ((math.inf,), ("1",)),
                    "compute_s": ((-1.0,), ()),  # of another number of stages
                    "upper_bytes_per_s": ((math.nan,),),
                    "lower_bytes_per_s": (1.0,),
                    "lower_round_trip_s": ((True,),),
                    "leaving": ((1,),),
                    "squared_norm": (None, -1.0),
                    "window": ((0,), (MAX_WINDOW + 1,)),
                    "loss": ("2",),
                },
            ),
            (
                GO,
                3,
                {
                    "codecs": (("bf16",), ("bf16", "none"), "bf16"),
                    "learning_rate": (-1e-9, MAX_LEARNING_RATE + 1, math.nan),
                    "factor": ("1", 1.5, -0.5),
                    "loss": (None,),
                },
            ),
            (
                FAULT,
                4,
                {
                    "stage": (4, -1),
                    "seen_by": (1.5, 4),
                    "reason": ("bored", 1),
                    "after_s": (-1.0, math.inf),
                },
            ),
            (Evaluated(batch=7, loss=3.5), 1, {"loss": ("low", (1.0,), True)}),
        )
        for name, odds in values.items()
        for odd in odds
    ],
)
def test_an_odd_or_missing_fact_is_refused(
    good: Facts, num_stages: int, name: str, odd: object
) -> None:
    facts = good.to_facts()
    assert type(good).from_facts(facts, num_stages) == good
    with pytest.raises(FrameRefused, match="header"):
        type(good).from_facts(facts | {name: odd}, num_stages)
    if name != "after_s":  # which has a default
        with pytest.raises(FrameRefused, match=name):
            type(good).from_facts({n: facts[n] for n in facts if n != name}, num_stages)
