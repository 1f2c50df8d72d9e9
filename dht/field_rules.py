"""How a manifest is checked: one rule beside each field, one message for each mistake.

A section of the manifest is a frozen dataclass derived from `Section`. Every field has a rule, its
own or that of its type (a Literal, a bool), which turns what YAML or JSON gave into the field's
type or says what the value must be. The message names the field, the value and the remedy, as in
`rounds.inner_steps is 0; it must be an integer from 1 to 100000`.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from dilocox.dht.errors import InvalidInput

Rule = Callable[[object], object]  # raises ValueError("it must be ...")
S = TypeVar("S", bound="Section")

# YAML 1.1 reads 3e-4 as text: only 3.0e-4 is a number to it.
_NUMERAL = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def integer(low: int, high: int) -> Rule:
    """An integer from `low` to `high`; 2e6 counts as one."""

    def rule(value: object) -> int:
        number = _number(value)
        if number is None or not low <= number <= high or number != int(number):
            raise ValueError(f"it must be an integer from {low} to {high}")
        return int(number)

    return rule


def number(low: float, high: float, *, above: bool = False) -> Rule:
    """A finite number from `low` to `high`; with `above`, `low` itself is too small."""

    def rule(value: object) -> float:
        parsed = _number(value)
        if parsed is None or not low <= parsed <= high or (above and parsed == low):
            bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise ValueError(f"it must be a number {bounds}")
        return float(parsed)

    return rule


def choice(*allowed: object) -> Rule:

    def rule(value: object) -> object:
        for item in allowed:
            if type(value) is type(item) and value == item:
                return item
        names = [str(item) for item in allowed]
        wanted = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
        raise ValueError(f"it must be {wanted}")

    return rule


def text(pattern: str, wanted: str, *, optional: bool = False) -> Rule:
    """Text that matches `pattern` as a whole; `wanted` says in words what that is."""
    compiled = re.compile(pattern)

    def rule(value: object) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError(f"it must be {wanted}")
        return value

    return rule


def pair_of_fractions(value: object) -> tuple[float, float]:
    items = cast(list[object], value) if isinstance(value, list | tuple) else []
    numbers = [parsed for parsed in map(_number, items) if parsed is not None and 0 <= parsed < 1]
    if len(items) != 2 or len(numbers) != 2:
        raise ValueError("it must be two numbers from 0 to below 1, like [0.9, 0.95]")
    return float(numbers[0]), float(numbers[1])


def rows(*columns: Rule, most: int) -> Rule:
    """A list of at most `most` rows; each column has its own rule."""

    def row(value: object) -> tuple[object, ...]:
        cells = cast(list[object], value) if isinstance(value, list | tuple) else []
        if len(cells) != len(columns):
            raise ValueError(f"it must have rows of {len(columns)} values")
        return tuple(check(cell) for check, cell in zip(columns, cells, strict=True))

    return _many(row, "rows", most)


def texts(pattern: str, wanted: str, *, most: int) -> Rule:
    """A list of at most `most` texts, each as `text` has it."""
    return _many(text(pattern, wanted), "texts", most)


def sections(kind: "type[S]", where: str, *, most: int) -> Rule:
    """A list of at most `most` sections; `where` is the field's name, for messages."""

    def rule(value: object) -> tuple[object, ...]:
        given = cast(list[object], value) if isinstance(value, list | tuple) else None
        if given is None or len(given) > most:
            raise ValueError(f"it must be a list of at most {most} sections")
        return tuple(
            item if isinstance(item, kind) else build(kind, item, f"{where}[{index}]")
            for index, item in enumerate(given)
        )

    return rule


def _many(one: Rule, what: str, most: int) -> Rule:
    def rule(value: object) -> tuple[object, ...]:
        given = cast(list[object], value) if isinstance(value, list | tuple) else None
        if given is None or len(given) > most:
            raise ValueError(f"it must be a list of at most {most} {what}")
        return tuple(one(item) for item in given)

    return rule


def model_configuration(value: object) -> dict[str, Any]:
    """A Hugging Face configuration: plain JSON values with a model_type; copied."""
    if not isinstance(value, Mapping):
        raise ValueError("it must be the name of a preset or a Hugging Face configuration")
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it must hold plain finite values only ({error})") from error
    model_type = copy.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError("it must name its model_type, like llama")
    return copy


def checked(rule: Rule, default: object = MISSING) -> Any:
    """A dataclass field with its rule; without a default the manifest must give it."""
    return field(default=default, metadata={"rule": rule})


def section(kind: "type[S]") -> S:
    """A dataclass field that holds a section; a manifest that leaves it out gets its defaults."""
    return field(default_factory=kind, metadata={"section": kind})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the manifest. Every way to make one checks it (`InvalidInput`)."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            if "section" not in spec.metadata:
                converted = _apply(spec, getattr(self, spec.name), "")
                object.__setattr__(self, spec.name, converted)


def build(kind: type[S], data: object, where: str = "") -> S:
    """Make a section from what YAML or JSON gave; `InvalidInput` names the first mistake."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{where or 'the manifest'} is {shown(data)}; it must hold named fields")
    given = {str(name): value for name, value in cast(Mapping[object, object], data).items()}
    prefix = f"{where}." if where else ""
    known = {spec.name: spec for spec in fields(kind)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            printable = repr(name)[1:-1][:60]
            raise InvalidInput(f"{prefix}{printable} is not a field of the manifest; {remedy}")
    values: dict[str, Any] = {}
    for name, spec in known.items():
        if name in given:
            values[name] = _value(spec, given[name], prefix)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise InvalidInput(f"{prefix}{name} is missing; {_wanted(spec)}")
    return kind(**values)


def shown(value: object) -> str:
    """A value as it stands in a message: short, on one line."""
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."


def _rule(spec: "Field[Any]") -> Rule:
    if spec.type is bool:
        return choice(False, True)
    if get_origin(spec.type) is Literal:
        return choice(*get_args(spec.type))
    return spec.metadata["rule"]


def _value(spec: "Field[Any]", value: object, prefix: str) -> object:
    if "section" in spec.metadata:
        return build(spec.metadata["section"], value, prefix + spec.name)
    return _apply(spec, value, prefix)


def _apply(spec: "Field[Any]", value: object, prefix: str) -> object:
    try:
        return _rule(spec)(value)
    except ValueError as error:
        raise InvalidInput(f"{prefix}{spec.name} is {shown(value)}; {error}") from error


def _wanted(spec: "Field[Any]") -> str:
    try:
        _rule(spec)(None)
    except ValueError as error:
        return str(error)
    return "it must be given"


def _number(value: object) -> int | float | None:
    if isinstance(value, str) and _NUMERAL.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None
