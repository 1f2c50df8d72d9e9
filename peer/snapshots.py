"""Gathers a peer's whole state into a snapshot, and puts it back after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dilocox.peer.inner import InnerOptimizer, InnerState
from dilocox.peer.merge import Merge
from dilocox.peer.snapshot import Snapshot, read_snapshot, write_snapshot

_SHARED = ("anchor", "momentum")  # in a file of their own, for joiners


class Snapshots:
    """The snapshots of one peer. `found` is the one it started from, if any."""

    def __init__(self, folder: Path, *, layout: str):
        self._folder = folder
        self._layout = layout
        self.found: Snapshot | None = read_snapshot(folder, layout=layout)

    def write(self, merge: Merge, optimizer: InnerOptimizer, data: dict[str, Any]) -> None:
        """Write everything, the data position too; EnvironmentFault if the disk is full."""
        tensors, facts = merge.state()
        inner = optimizer.state_dict()
        local = {f"merge.{name}": value for name, value in tensors.items() if name not in _SHARED}
        local |= {f"inner.{name}": value for name, value in inner.tensors.items()}
        write_snapshot(
            self._folder,
            Snapshot(
                round=merge.round,
                digest=merge.digest,
                layout=self._layout,
                anchor=merge.anchor,
                momentum=merge.momentum,
                tensors={name: value.cpu().contiguous() for name, value in local.items()},
                facts={"merge": facts, "inner": inner.values, "data": data},
            ),
        )

    def merge_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `Merge.from_state` takes, of the snapshot that was found."""
        snapshot = self._snapshot()
        tensors = _named(snapshot, "merge.")
        shared = {"anchor": snapshot.anchor, "momentum": snapshot.momentum}
        return tensors | shared, snapshot.facts["merge"]

    def inner_state(self) -> InnerState:
        """The inner optimizer's state of the snapshot that was found."""
        snapshot = self._snapshot()
        return InnerState(tensors=_named(snapshot, "inner."), values=snapshot.facts["inner"])

    def data_state(self) -> dict[str, Any]:
        """The data position of the snapshot that was found."""
        return self._snapshot().facts["data"]

    def _snapshot(self) -> Snapshot:
        if self.found is None:
            raise RuntimeError("there is no snapshot")
        return self.found


def _named(snapshot: Snapshot, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in snapshot.tensors.items()
        if name.startswith(prefix)
    }
