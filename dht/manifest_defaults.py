"""What a run.yaml may leave out because it follows from something else, and the presets that ship.

A preset names a model only. The manifest that is signed spells everything out, so that peers of
another version never fill in another default.
"""

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest_checks import shown

ENDINGS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def preset_names() -> list[str]:
    """Names that `model` may give instead of a configuration."""
    folder = resources.files("dilocox.dht") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from other fields; mistakes are left to the checks."""
    model = given.get("model")
    if isinstance(model, str):
        given |= {"model": _preset(model), "preset": model}
    match given.get("data"):
        case {"source": str(source), **rest} if "format" not in rest and source != "stdlib":
            ending = ENDINGS.get(Path(source).suffix)
            if ending is None:
                raise InvalidInput("data.format is missing; it must be text, json, parquet or hub")
            given["data"] = given["data"] | {"format": ending}
        case _:
            pass
    match given.get("outer"):
        case {"merge": "reset"}:
            given["outer"] = {"apply": "round_end", "momentum": 0.0} | given["outer"]
        case _:
            pass
    match given.get("codec"):
        case {"bits": 16 | 32, **rest} if "scheme" not in rest:
            given["codec"] = {"scheme": "dense"} | given["codec"]
        case _:
            pass
    match given.get("rounds"):
        case {"inner_steps": int(steps)} if 1 <= steps <= 100_000:
            bounds = {
                "min_inner_steps": max(1, steps // 4),
                "max_inner_steps": min(4 * steps, 100_000),
            }
            given["rounds"] = bounds | given["rounds"]
        case _:
            pass
    return given


def _preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise InvalidInput(f"model is {shown(name)}; presets are {', '.join(preset_names())}")
    file = resources.files("dilocox.dht") / "presets" / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))
