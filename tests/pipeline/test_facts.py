"""The readers of a frame's facts: the right type within its bounds, or FrameRefused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import pytest

from dilocox.pipeline import frames
from dilocox.pipeline.frames import FrameRefused, numbers

FACTS: Mapping[str, object] = {
    "int": 5,
    "float": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "text": "abc",
    "texts": ("a", "b"),
    "flags": (True, False),
    "none": None,
    "mixed": ("a", 1),
    "numbers": (1, 0.5),
}


def test_facts_are_read_as_their_types():
    assert frames.integer(FACTS, "int", 5, 5) == 5
    assert frames.number(FACTS, "int") == 5.0 and type(frames.number(FACTS, "int")) is float
    assert frames.number(FACTS, "float", 0.5, 0.5) == 0.5
    assert math.isnan(frames.number(FACTS, "nan", nan=True))
    assert math.isnan(frames.number(FACTS, "inf", 0, 1, nan=True))
    assert frames.flag(FACTS, "true") is True
    assert frames.text(FACTS, "text", 3) == "abc"
    assert frames.texts(FACTS, "texts") == frames.texts(FACTS, "texts", 2) == ("a", "b")
    assert frames.flags(FACTS, "flags", 2) == (True, False)
    assert numbers(FACTS, "numbers", 2, 0.5) == (1.0, 0.5)


@pytest.mark.parametrize(
    "read",
    [
        lambda: frames.integer(FACTS, "int", 6, 9),
        lambda: frames.integer(FACTS, "int", 0, 4),
        lambda: frames.integer(FACTS, "float", 0, 9),
        lambda: frames.integer(FACTS, "true", 0, 9),
        lambda: frames.integer(FACTS, "missing", 0, 9),
        lambda: frames.number(FACTS, "nan"),
        lambda: frames.number(FACTS, "inf"),
        lambda: frames.number(FACTS, "true"),
        lambda: frames.number(FACTS, "none", nan=True),
        lambda: frames.number(FACTS, "float", 0.6),
        lambda: frames.number(FACTS, "float", 0, 0.4),
        lambda: frames.flag(FACTS, "int"),
        lambda: frames.text(FACTS, "text", 2),
        lambda: frames.text(FACTS, "none"),
        lambda: frames.texts(FACTS, "texts", 3),
        lambda: frames.texts(FACTS, "text"),
        lambda: frames.texts(FACTS, "mixed"),
        lambda: frames.texts(FACTS, "missing"),
        lambda: frames.flags(FACTS, "texts"),
        lambda: numbers(FACTS, "numbers", 3),
        lambda: numbers(FACTS, "numbers", 2, 0.6),
        lambda: numbers(FACTS, "mixed", 2),
        lambda: frames.flags(FACTS, "flags", 0),
    ],
)
def test_a_fact_that_is_missing_or_odd_refuses_the_frame(read: Any):
    with pytest.raises(FrameRefused) as caught:
        read()
    assert caught.value.kind == "header"


def test_a_value_nested_deeper_than_python_can_print_is_refused():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FrameRefused, match="x is list"):
        frames.flag({"x": deep}, "x")
    while deep:  # or its end would be the recursion
        deep = cast("list[object]", deep.pop())
