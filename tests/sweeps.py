"""The same test over many cases: a few of them in `make test`, all others in `make test-sweeps`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], kept: int | Collection[Any] = 1) -> list[Any]:
    """What to parametrize with. kept: the cases of `make test`, or how many of the first."""
    cases = list(cases)
    chosen = cases[:kept] if isinstance(kept, int) else kept
    return [case if case in chosen else _swept(case) for case in cases]


def _swept(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.sweep)
