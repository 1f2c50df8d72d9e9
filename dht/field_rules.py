"""How a manifest is checked: pydantic's rules beside each field, one message for each mistake.

A section of the manifest is a frozen dataclass of pydantic, so every way to make one checks it.
`build` makes one from what YAML or JSON gave. Its message names the field, the value and the
remedy, as in `rounds.inner_steps is 0; it must be an integer from 1 to 100000`.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from dilocox.dht.errors import InvalidInput

S = TypeVar("S")

CHECKED: Final = ConfigDict(extra="forbid", allow_inf_nan=False)

# YAML 1.1 reads 3e-4 as text: only 3.0e-4 is a number to it.
_NUMERAL = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def _numeral(value: object) -> object:
    if isinstance(value, str) and _NUMERAL.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return value


def _configuration(value: object) -> dict[str, Any]:
    """A Hugging Face configuration: plain JSON values with a model_type; copied."""
    if not isinstance(value, Mapping):
        raise ValueError
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it must hold plain finite values only ({error})") from error
    if not isinstance(copy.get("model_type"), str) or not copy["model_type"]:
        raise ValueError("it must name its model_type, like llama")
    return copy


Integer = Annotated[int, BeforeValidator(_numeral)]  # 2e6 counts as one
Number = Annotated[float, BeforeValidator(_numeral)]
ModelConfiguration = Annotated[dict[str, Any], BeforeValidator(_configuration)]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,512}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
DigestOrEmpty = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]


def build(kind: type[S], data: object) -> S:
    """Make a section from what YAML or JSON gave; `InvalidInput` names the first mistake."""
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        unknown = [each for each in mistakes if each["type"] in _UNKNOWN]
        raise InvalidInput(_message(kind, data, (unknown or mistakes)[0])) from error


def shown(value: object) -> str:
    """A value as it stands in a message: short, on one line."""
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."


_UNKNOWN: Final = ("unexpected_keyword_argument", "invalid_key")
_NAMED: Final = "it must hold named fields"


@lru_cache(maxsize=16)
def _adapter(kind: type[S]) -> TypeAdapter[S]:
    return TypeAdapter(kind)


def _message(section: Any, value: Any, mistake: Mapping[str, Any]) -> str:
    """What is wrong, with the name and value of the innermost field: the mistake may lie in it."""
    name, wanted = "", _NAMED
    for step in mistake["loc"]:
        if section is None:
            break
        if isinstance(value, list | tuple):  # of sections
            name, wanted = f"{name}[{step}]", _NAMED
            value = cast("list[Any]", value)[int(step)]
            continue
        known: Mapping[str, FieldInfo] = section.__pydantic_fields__
        name = f"{name}.{step}" if name else str(step)
        if step not in known:
            near = difflib.get_close_matches(str(step), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            return f"{repr(name)[1:-1][:120]} is not a field of the manifest; {remedy}"
        section, wanted = _section_in(known[step]), _wanted(known[step])
        if step not in value:
            return f"{name} is missing; {wanted}"
        value = value[step]
    cause = mistake.get("ctx", {}).get("error")
    return f"{name or 'the manifest'} is {shown(value)}; {str(cause or '') or wanted}"


def _section_in(field: FieldInfo) -> type | None:
    """The section that a field holds, or holds a list of."""
    kinds = cast("list[type]", [field.annotation, *get_args(field.annotation)])
    return next((kind for kind in kinds if is_dataclass(kind)), None)


def _wanted(field: FieldInfo) -> str:
    if field.description:
        return f"it must be {field.description}"
    if field.annotation is bool or get_origin(field.annotation) is Literal:
        *most, last = map(str, get_args(field.annotation) or (False, True))
        return f"it must be {', '.join(most)} or {last}"
    if not (field.annotation is int or field.annotation is float):
        return _NAMED
    rules = [rule for rule in field.metadata if isinstance(rule, Gt | Ge | Le)]
    bounds = {name: bound for rule in rules for name, bound in asdict(rule).items()}
    low, high = bounds.get("gt", bounds.get("ge")), bounds["le"]
    if field.annotation is int:
        return f"it must be an integer from {low} to {high}"
    if "gt" in bounds:
        return f"it must be a number above {low:g} and at most {high:g}"
    return f"it must be a number from {low:g} to {high:g}"
