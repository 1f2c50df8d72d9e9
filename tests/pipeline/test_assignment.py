"""An assignment comes from a stranger's machine: it is whole and consistent, or it is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.pipeline.frames import FrameRefused, checked_facts
from dilocox.pipeline.reservation import Assignment
from tests.pipeline.reservations import assignment


@pytest.mark.parametrize(
    "given", [assignment(), assignment(done=None), assignment(done=(3, math.nan, 0.0))]
)
def test_assignment_reads_back_equal(given: Assignment) -> None:
    facts = given.to_facts()
    assert checked_facts(facts) == facts  # what a frame can carry
    assert repr(Assignment.from_facts(facts, 3)) == repr(given)


def test_largest_run_fits_into_a_frame() -> None:
    members = tuple(f"{number:0>60}" for number in range(256))
    large = assignment(members[0], members=members, clients=(False,) * 256, codecs=("int8",) * 255)
    assert Assignment.from_facts(checked_facts(large.to_facts()), 256) == large


@pytest.mark.parametrize(
    "odd",
    [
        {"replica": "B"},
        {"replica": 7},
        {"head": "me"},
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 2**60},
        {"members": ("A", "me")},
        {"members": ("A", "me", "me")},
        {"members": ("A", "me", "")},
        {"members": ("A", "me", "x" * 65)},
        {"members": "Ame"},
        {"clients": (True, True, False)},
        {"clients": (False, 1, False)},
        {"clients": (False, False)},
        {"codecs": ("bf16",)},
        {"codecs": ("bf16", "none")},
        {"codecs": ("bf16", "zip")},
        {"step": 3},
        {"step": 1.0},
        {"done_step": None},
        {"done_factor": None},
        {"done_factor": "much"},
        {"done_factor": -0.5},
        {"done_learning_rate": math.nan},
        {"done_learning_rate": math.inf},
        {"done_learning_rate": -1e-3},
    ],
    ids=str,
)
def test_odd_assignment_is_refused(odd: dict[str, object]) -> None:
    facts = assignment().to_facts() | odd
    with pytest.raises(FrameRefused):
        Assignment.from_facts(facts, 3)
    with pytest.raises(FrameRefused):
        Assignment.from_facts({name: facts[name] for name in facts if name not in odd}, 3)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70)
NAMES = st.sampled_from(sorted(assignment().to_facts()))


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), max_size=4))
def test_any_facts_are_an_assignment_or_refused(facts: dict[str, object]) -> None:
    changed = assignment().to_facts() | facts
    try:
        Assignment.from_facts(changed, 3)
    except FrameRefused as reason:
        assert reason.kind == "header"
