"""Gathers a peer's whole state into a snapshot, and puts it back after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilocox.peer.chain.journal import Journal, JournaledSend
from dilocox.peer.chain.snapshot_files import Snapshot, oldest_number, read_snapshot, write_snapshot
from dilocox.peer.training.inner_optimizer import InnerOptimizer, InnerState
from dilocox.peer.training.merge import Merge, Send

_SHARED = ("anchor", "momentum")  # in a file of their own, for joiners


@dataclass(frozen=True, kw_only=True)
class Found:
    """The snapshot that a peer started from.

    round: of the last record in it. data: the data position.
    """

    round: int
    data: dict[str, Any]


class Snapshots:
    """The snapshots of one peer, and the journal of the sends since the last one.

    Attributes:
        found: the snapshot that this peer started from, if any.
        sent_since: the sends after it, which may be in records; the oldest first.
    """

    def __init__(self, folder: Path, *, layout: str):
        self._folder = folder
        self._layout = layout
        self._journal = Journal(folder / "journal")
        self._open = found = read_snapshot(folder, layout=layout)
        self._number = -1 if found is None else found.number
        self.found = None if found is None else Found(round=found.round, data=found.facts["data"])
        self.sent_since: tuple[JournaledSend, ...] = self._journal.since(self._number)

    def sending(self, merge: Merge, round_number: int, send: Send, message: str) -> None:
        """Write down that this send is about to leave; EnvironmentFault if the disk is full.

        message: its `fingerprint`.
        """
        self._journal.note(
            JournaledSend(
                after=self._number,
                round=round_number,
                tokens=send.tokens,
                trained=merge.trained_tokens,
                message=message,
            )
        )

    def write(self, merge: Merge, optimizer: InnerOptimizer, data: dict[str, Any]) -> None:
        """Write everything, the data position too; EnvironmentFault if the disk is full."""
        tensors, facts = merge.state()
        inner = optimizer.state_dict()
        local = {f"merge.{name}": value for name, value in tensors.items() if name not in _SHARED}
        local |= {f"inner.{name}": value for name, value in inner.tensors.items()}
        written = write_snapshot(
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
            # or a snapshot after one that was damaged would have sends behind it that it knows of
            above=max(self._number, self._journal.newest_number),
        )
        self._number = int(written.name)
        # one that could not be removed may be needed where the newest cannot be read
        self._journal.forget_before(oldest_number(self._folder))

    def merge_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `Merge.from_state` takes, of the snapshot that was found: to be copied, not kept."""
        snapshot = self._snapshot()
        tensors = _named(snapshot, "merge.")
        shared = {"anchor": snapshot.anchor, "momentum": snapshot.momentum}
        return tensors | shared, snapshot.facts["merge"]

    def inner_state(self) -> InnerState:
        """The inner optimizer's state of the snapshot that was found; to be copied, likewise."""
        snapshot = self._snapshot()
        return InnerState(tensors=_named(snapshot, "inner."), values=snapshot.facts["inner"])

    def close(self) -> None:
        """Everything was copied: let go of the files of the snapshot that was found."""
        self._open = None

    def _snapshot(self) -> Snapshot:
        if self._open is None:
            raise RuntimeError("there is no snapshot, or it was closed")
        return self._open


def _named(snapshot: Snapshot, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in snapshot.tensors.items()
        if name.startswith(prefix)
    }
