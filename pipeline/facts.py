"""The small facts that frames carry, and why a frame is refused.

What: `checked_facts` lets plain values and flat lists of them pass; the readers (`integer`,
`number`, `flag`, `text`, `texts`, `flags`) take one fact out, of the type and within the bounds
that the reader of a kind asks for.
Why: whatever a peer wrote, a fact that is missing or odd becomes a `FrameRefused`, never a KeyError
or a NaN in the middle of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, cast

MAX_INTEGER: Final = 2**53
MAX_NAME: Final = 64  # characters of a fact's name
MAX_TEXT: Final = 1024  # characters of a text
MAX_ITEMS: Final = 256  # facts of a frame, items of a list


class FrameRefused(ValueError):
    """A frame that is not as it must be; `kind` is a short reason, to count refusals by.

    Kinds raised here: version, kind, length, header, shape, dtype, codec. Others raise it for what
    only they can tell, such as "values" (of a payload), "epoch" or "order".
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)  # both, or it could not be pickled
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"frame refused ({self.kind})" + (f": {self.message}" if self.message else "")


def integer(facts: Mapping[str, object], name: str, low: int, high: int) -> int:
    """The fact `name`: an integer from `low` to `high`. Raises FrameRefused (header)."""
    value = facts.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _odd(name, value, f"no integer from {low} to {high}")
    return value


def number(
    facts: Mapping[str, object],
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    nan: bool = False,
) -> float:
    """The fact `name`: a finite number from `low` to `high`; integers pass.

    With `nan`, what is not finite passes too, and all of it as NaN: a sum that overflowed is no
    sender's fault. Raises FrameRefused (header).
    """
    value = facts.get(name)
    if type(value) is not float and type(value) is not int:
        raise _odd(name, value, "no number")
    if not math.isfinite(value):
        if nan:
            return math.nan
        raise _odd(name, value, "not finite")
    if not low <= value <= high:
        raise _odd(name, value, f"not from {low:g} to {high:g}")
    return float(value)


def flag(facts: Mapping[str, object], name: str) -> bool:
    """The fact `name`: true or false. Raises FrameRefused (header)."""
    value = facts.get(name)
    if not isinstance(value, bool):
        raise _odd(name, value, "neither true nor false")
    return value


def text(facts: Mapping[str, object], name: str, max_length: int = MAX_TEXT) -> str:
    """The fact `name`: a text, perhaps empty. Raises FrameRefused (header)."""
    value = facts.get(name)
    if not isinstance(value, str) or len(value) > max_length:
        raise _odd(name, value, f"no text of at most {max_length} characters")
    return value


def texts(
    facts: Mapping[str, object], name: str, count: int | None = None, max_length: int = MAX_TEXT
) -> tuple[str, ...]:
    """The fact `name`: a list of texts, of exactly `count` where given. Raises FrameRefused."""
    return tuple(text({name: item}, name, max_length) for item in _items(facts, name, count))


def flags(facts: Mapping[str, object], name: str, count: int | None = None) -> tuple[bool, ...]:
    """The fact `name`: a list of truth values, of exactly `count` where given; as `texts`."""
    return tuple(flag({name: item}, name) for item in _items(facts, name, count))


def numbers(
    facts: Mapping[str, object],
    name: str,
    count: int | None = None,
    low: float = -math.inf,
    high: float = math.inf,
) -> tuple[float, ...]:
    """The fact `name`: a list of finite numbers from `low` to `high`; as `texts`."""
    items = _items(facts, name, count)
    return tuple(number({name: item}, name, low, high) for item in items)


def checked_facts(value: object) -> dict[str, object]:
    """`value` as a map of short names to plain values or flat lists of them, which become tuples.

    Raises FrameRefused (header).
    """
    if not isinstance(value, dict):
        raise FrameRefused("header", "facts are no map")
    given = cast("dict[object, object]", value)
    if len(given) > MAX_ITEMS:
        raise FrameRefused("header", f"{len(given)} facts, at most {MAX_ITEMS} are allowed")
    facts: dict[str, object] = {}
    for name, fact in given.items():
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise FrameRefused("header", f"a fact is called {show(name)}")
        if isinstance(fact, list | tuple):
            items = _items({name: cast("list[object]", fact)}, name, None)
            facts[name] = tuple(_plain(name, item) for item in items)
        else:
            facts[name] = _plain(name, fact)
    return facts


def show(value: object) -> str:
    """A peer's value for a message: short, and safe for what is nested deeply."""
    if isinstance(value, dict | list | tuple):
        return type(cast(object, value)).__name__
    return repr(
        value if value is None or isinstance(value, bool | int | float) else str(value)[:60]
    )


def _plain(name: str, value: object) -> object:
    if type(value) is int:
        plain = -MAX_INTEGER <= value <= MAX_INTEGER
    elif isinstance(value, str):
        plain = len(value) <= MAX_TEXT
    else:
        plain = value is None or isinstance(value, bool | float)
    if not plain:
        raise _odd(name, value, "no plain value")
    return value


def _items(facts: Mapping[str, object], name: str, count: int | None) -> tuple[object, ...]:
    value = facts.get(name)
    if not isinstance(value, list | tuple):
        raise _odd(name, value, "no list")
    items = tuple(cast("list[object]", value))
    if len(items) > MAX_ITEMS or count not in (None, len(items)):
        raise _odd(name, f"{len(items)} items", f"no list of {count or f'at most {MAX_ITEMS}'}")
    return items


def _odd(name: str, value: object, fault: str) -> FrameRefused:
    return FrameRefused("header", f"{name} is {show(value)}: {fault}")
