"""Gathers a peer's whole state into a snapshot, and puts it back after a restart. `Journal` names
the sends that left this peer since: a line each, on disk before the first byte of the send leaves.

The state of a large stage takes seconds to write, and a group does not wait so long. So only the
line is written before a send, and the state after it, which makes the line obsolete. Who finds a
line after a restart was killed in between: what it sent may be in a record, and the state on disk
still holds it as unsent. It goes on from the anchor, so that nothing is sent twice.

Each line names the snapshot that stood when it was written; a snapshot with a higher number holds
that send already.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilocox.dht.files import disk_fault, sync, write_atomically
from dilocox.peer.chain.snapshot_files import Snapshot, oldest_number, read_snapshot, write_snapshot
from dilocox.peer.training.inner_optimizer import InnerOptimizer, InnerState
from dilocox.peer.training.merge import Merge, Send

logger = logging.getLogger(__name__)

_SHARED = ("anchor", "momentum")  # in a file of their own, for joiners
MAX_LINES = 64  # a snapshot follows each send: more than one or two are never of use


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


# ---- sends ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class JournaledSend:
    """A send that may have left this peer.

    after: the number of the snapshot that stood then, -1 for none.
    tokens: behind the send.
    trained: all tokens that this state was trained on by then.
    message: `fingerprint` of what was sent, for people who look for it.
    """

    after: int
    round: int
    tokens: int
    trained: int
    message: str


class Journal:
    """The file; one process writes it. One that cannot be read names a send since every snapshot:
    who cannot know whether something was sent must not send it again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._readable = True
        self._sends: list[JournaledSend] = []
        try:
            lines = path.read_text().splitlines()
            self._sends = [JournaledSend(**json.loads(line)) for line in lines]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read (%s): as if something had been sent", path, error)
            self._readable = False

    @property
    def newest_number(self) -> int:
        """The highest number of a snapshot that a line names, -1 for none."""
        return max((send.after for send in self._sends), default=-1)

    def since(self, number: int) -> tuple[JournaledSend, ...]:
        """The sends that the snapshot of this number does not know of, the oldest first."""
        if not self._readable:
            return (JournaledSend(after=number, round=-1, tokens=0, trained=0, message=""),)
        return tuple(send for send in self._sends if send.after >= number)

    def note(self, send: JournaledSend) -> None:
        """Write a send down; it is on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        self._write([*self._sends, send][-MAX_LINES:])

    def forget_before(self, number: int) -> None:
        """Drop the sends that snapshots from this number on hold; EnvironmentFault as above."""
        kept = [send for send in self._sends if send.after >= number]
        if kept != self._sends or not self._readable:
            self._write(kept)

    def _write(self, sends: list[JournaledSend]) -> None:
        lines = "".join(json.dumps(asdict(send)) + "\n" for send in sends)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, lines.encode())
            sync(self._path.parent)
        except OSError as error:
            raise disk_fault(self._path, error) from error
        self._sends, self._readable = sends, True
