"""What `dilocox monitor --track` wrote, as TensorBoard and wandb read it."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Rounds and values that TensorBoard reads."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: Any = loader.EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows of a run, from LevelDB's log format in which wandb keeps them."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, held, found = file.read_bytes(), 7, b"", list[dict[str, Any]]()
    while at + 7 <= len(data):
        if (left := (1 << 15) - at % (1 << 15)) < 7:  # no header fits at a block's end
            at += left
            continue
        length, kind = struct.unpack("<xxxxHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record.FromString(held)
            held = b""
            items = record.history.item
            if items:
                names = ((each.key or ".".join(each.nested_key), each) for each in items)
                found.append({name: json.loads(each.value_json) for name, each in names})
    return found
