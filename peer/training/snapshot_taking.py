"""Gathers a peer's whole state into a snapshot, and puts it back after a restart. `Journal` names
the sends that left this peer since: a line each, on disk before the first byte of the send leaves.

Training waits neither for the disk nor for a copy: another thread (`Background`) reads the state
while inner steps change it, so the values are of different moments. That does no harm, for inner
steps move the live weights and the moments and nothing else: what is unsent is `start - live`,
value by value, whenever a value was read, and tokens and data position are those of the beginning,
so a restart repeats the data of the steps since. Whatever else happens to the state (a send, a
record, an undone send) first interrupts the snapshot, of which nothing stays; the next one is
written twice as fast.

A peer that finds a line of the journal after a restart was killed after a send: what it sent may be
in a record, and the state on disk still holds it as unsent. It goes on from the anchor, so nothing
is sent twice. Each line names the snapshot that was begun last when it was written; a snapshot with
a higher number was begun later, and holds that send already.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, write_atomically
from dilocox.peer.chain.snapshot_files import (
    Snapshot,
    data_position,
    earlier_than_newest,
    newest_number,
    oldest_number,
    read_snapshot,
    split,
    tensors_of,
    write_snapshot,
)
from dilocox.peer.memory_and_disk import disk_free
from dilocox.peer.state_folder import ASIDE
from dilocox.peer.training.inner_optimizer import InnerOptimizer, InnerState
from dilocox.peer.training.merge import Merge, Send

logger = logging.getLogger(__name__)

_SHARED = ("anchor", "momentum")  # in a file of their own, for joiners
MAX_LINES = 64  # of sends between two snapshots: each of them tells that something was sent

REST = 20  # so many times as long as a snapshot took, at least, no other is begun
BYTES_PER_S = 128e6  # to the disk, on which others want to write, too
MOST_HASTE = 16.0  # so many times as fast, at most, after snapshots that were cut off
DISK_LIMIT_S = 60.0
RETRY_S = 300.0  # after a snapshot that the disk refused


class Snapshots:
    """The snapshots of one peer, and the journal of the sends since the last one.

    Attributes:
        found: whether this peer started from a snapshot.
        data: the data position of that, or of the one that the last rollback put aside: what was
            read is not read again. Empty where there is none.
        sent_since: the sends after it, which may be in records; the oldest first.
        round: of the anchor of the newest complete one; -1 where there is none.
        refused: whether the disk did not let the last one be written.
    """

    def __init__(
        self, folder: Path, *, layout: str, period_s: float, bytes_per_s: float = BYTES_PER_S
    ):
        self._folder = folder
        self._bytes_per_s = bytes_per_s
        self._layout = layout
        self._period_s = period_s
        self._journal = Journal(folder / "journal")
        self._open = found = read_snapshot(folder, layout=layout)
        self._number = -1 if found is None else found.number  # of the one begun last
        self._writing: Background | None = None  # or given up, until it has ended
        self._due_at = time.monotonic() + period_s
        self._haste = 1.0
        self.refused = False
        self.round = self._round = -1 if found is None else found.round
        self.found = found is not None
        # where a crash came in between: half of one, and those that a newer one was to replace
        older = earlier_than_newest(folder) if self.found else []
        for left in (*folder.glob("*.partial"), *older):
            shutil.rmtree(left, ignore_errors=True)
        aside = sorted(folder.parent.glob(f"{ASIDE}*/{folder.name}"))
        self.data: dict[str, Any] = found.facts["data"] if found else data_position(aside)
        self.sent_since: tuple[JournaledSend, ...] = self._journal.since(self._number)

    def sending(self, merge: Merge, round_number: int, send: Send) -> None:
        """Write down that this send is about to leave; EnvironmentFault if the disk is full."""
        self._journal.note(
            JournaledSend(
                after=self._number,
                round=round_number,
                tokens=send.tokens,
                trained=merge.trained_tokens,
            )
        )

    def soon(self) -> None:
        """The next snapshot need not wait any longer."""
        self._due_at = min(self._due_at, time.monotonic())

    def advance(
        self,
        merge: Merge,
        optimizer: InnerOptimizer,
        data: Callable[[], dict[str, Any]],
    ) -> bool:
        """Begin a snapshot that is due, between two inner steps. Whether one has become complete.

        Where the disk refuses it the one before stays, and it is tried again: the log keeps the
        records since.
        """
        now = time.monotonic()
        if self._writing is None:
            # a send in flight is two more vectors, and its outcome would cut the snapshot off
            if now < self._due_at or (merge.in_flight and now < self._due_at + self._period_s):
                return False
            snapshot = self._snapshot_of(merge, optimizer, data())
            # tried all the same it would take the last byte from journal and records, too
            if disk_free(self._folder) < sum(each.nbytes for each in tensors_of(snapshot)):
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.refuse(disk_fault(self._folder, error))
                return False
            rate = self._haste * self._bytes_per_s
            self._writing = Background(self._folder, snapshot, self._number, rate)
        if not self._writing.ended:
            return False
        writing, self._writing = self._writing, None
        try:
            seconds = writing.result()
        except EnvironmentFault as error:
            self.refuse(error)
            return False
        if not writing.complete:
            return False
        self._haste = max(1.0, self._haste / 2)
        self._written(seconds)
        return True

    def interrupt(self) -> None:
        """The state is about to change otherwise than by an inner step: what is not read by now is
        of a state that does not exist any more.
        """
        if self._writing is not None and self._writing.cut_off():
            self._haste = min(MOST_HASTE, 2 * self._haste)

    @contextmanager
    def still(self) -> Generator[None]:
        """Nothing of the state is read meanwhile: it is changed, and changed back."""
        if self._writing is None:
            yield
        else:
            with self._writing.still():
                yield

    def write(self, merge: Merge, optimizer: InnerOptimizer, data: dict[str, Any]) -> None:
        """Write everything now, the data position too; EnvironmentFault if the disk is full."""
        if self._writing is not None:
            self._writing.give_up()
            self._writing = None
        began = time.monotonic()
        snapshot = self._snapshot_of(merge, optimizer, data)
        write_snapshot(self._folder, snapshot, number=self._number)
        self._written(time.monotonic() - began)

    def _snapshot_of(
        self, merge: Merge, optimizer: InnerOptimizer, data: dict[str, Any]
    ) -> Snapshot:
        """The state as it is, under the next number."""
        # or a snapshot after one that was damaged would have sends behind it that it knows of
        newest = max(self._number, self._journal.newest_number, newest_number(self._folder))
        self._number, self._round = newest + 1, merge.round
        tensors, facts = merge.state()
        inner = optimizer.state_dict()
        local = {f"merge.{name}": value for name, value in tensors.items() if name not in _SHARED}
        local |= {f"inner.{name}": value for name, value in inner.tensors.items()}
        return Snapshot(
            round=merge.round,
            digest=merge.digest,
            layout=self._layout,
            anchor=merge.anchor,
            momentum=merge.momentum,
            tensors=local,
            facts={"merge": facts, "inner": inner.values, "data": data},
        )

    def refuse(self, error: EnvironmentFault) -> None:
        """Go on with the one before; the next one is tried soon."""
        self._due_at = time.monotonic() + RETRY_S
        if not self.refused:
            self.refused = True
            words = "%s; training goes on, and the snapshot is tried again every %.0f s"
            logger.warning(words, error, RETRY_S)

    def _written(self, seconds: float) -> None:
        self.refused = False
        self.round = self._round
        self._due_at = time.monotonic() + max(self._period_s, REST * seconds)
        # one that could not be removed may be needed where the newest cannot be read
        self._journal.forget_before(oldest_number(self._folder))

    def merge_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `Merge.from_state` takes, of the snapshot that was found: to be copied, not kept."""
        snapshot = self._snapshot()
        tensors = _named(snapshot, "merge.")
        shared = {"anchor": snapshot.anchor, "momentum": snapshot.momentum}
        return tensors | shared, snapshot.facts["merge"]

    def inner_state(self) -> InnerState:
        """The inner optimizer's state of the snapshot that was found: to be copied, not kept."""
        snapshot = self._snapshot()
        return InnerState(tensors=_named(snapshot, "inner."), values=snapshot.facts["inner"])

    def close(self) -> None:
        """Everything was copied: let go of the files of the snapshot that was found."""
        self._open = None

    def _snapshot(self) -> Snapshot:
        if self._open is None:
            raise RuntimeError("there is no snapshot, or it was closed")
        return self._open


class Interrupted(Exception):
    """The rest of the state that was to be written is gone."""


class Background:
    """A snapshot that is being written, under this number, by a thread of its own, which reads the
    tensors while the thread that made this changes them.

    Attributes:
        complete: whether it is on the disk.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, number: int, bytes_per_s: float):
        self.complete = False
        self._bytes_per_s = bytes_per_s
        tensors = tensors_of(snapshot)
        self._left = sum(tensor.numel() for tensor in tensors)  # values
        self._reading = threading.Lock()  # held while a piece is
        self._given_up = threading.Event()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        # of their own, or each piece would wait for all that is queued for the GPU
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._follow()
        self._error: Exception | None = None
        self._began = time.monotonic()
        self._bytes = 0
        self._thread = threading.Thread(
            target=self._write, args=(folder, snapshot, number), name="snapshot", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it is complete, or never will be."""
        return not self._thread.is_alive()

    def result(self) -> float:
        """How many seconds it took, once it has ended; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return time.monotonic() - self._began

    def cut_off(self) -> bool:
        """Nothing is to stay of it, unless all is read already; whether that is new."""
        with self._reading:
            cut = self._left > 0 and not self._given_up.is_set()
            if cut:
                self._given_up.set()
            return cut

    @contextmanager
    def still(self) -> Generator[None]:
        """No piece is read meanwhile."""
        with self._reading:
            try:
                yield
            finally:
                self._follow()

    def give_up(self) -> None:
        """Let it end, and wait for that; EnvironmentFault where the disk does not let it."""
        self._given_up.set()
        self._thread.join(DISK_LIMIT_S)
        if not self.ended:
            raise EnvironmentFault(f"the disk has not answered for {DISK_LIMIT_S:.0f} s")

    def _follow(self) -> None:
        """What is read from a GPU now is what has been written to it until now, or later."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def _write(self, folder: Path, snapshot: Snapshot, number: int) -> None:
        try:
            write_snapshot(folder, snapshot, number=number, pieces=self._pieces)
            self.complete = True
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001 - the thread that trains raises it
            self._error = error

    def _pieces(self, values: Tensor) -> Iterable[Tensor]:
        """The values of a tensor, no faster than the disk may be used."""
        for piece in split(values):
            early_s = self._bytes / self._bytes_per_s - (time.monotonic() - self._began)
            self._given_up.wait(max(0.0, early_s))
            with self._reading:
                if self._given_up.is_set():
                    raise Interrupted
                read = self._read(piece)
                self._left -= piece.numel()
            self._bytes += read.nbytes
            yield read

    def _read(self, piece: Tensor) -> Tensor:
        if not piece.is_cuda:
            return piece.clone()
        with torch.cuda.stream(self._streams[piece.device]):
            return piece.to("cpu")


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
    """

    after: int
    round: int
    tokens: int
    trained: int


class Journal:
    """The file; one process writes it. Its last line is the sha256 of those before it.

    One that cannot be read names a send since every snapshot: a peer that cannot know whether
    something was sent must not send it again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._readable = True
        self._sends: list[JournaledSend] = []
        try:
            text, _, checked = path.read_text().rstrip("\n").rpartition("\n")
            if checked != _checksum(text):
                raise ValueError("it is not what was written")
            self._sends = [JournaledSend(**json.loads(line)) for line in text.splitlines()]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read (%s): assuming that something was sent", path, error)
            self._readable = False

    @property
    def newest_number(self) -> int:
        """The highest number of a snapshot that a line names, -1 for none."""
        return max((send.after for send in self._sends), default=-1)

    def since(self, number: int) -> tuple[JournaledSend, ...]:
        """The sends that the snapshot of this number does not know of, the oldest first."""
        if not self._readable:
            return (JournaledSend(after=number, round=-1, tokens=0, trained=0),)
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
        text = "\n".join(json.dumps(asdict(send)) for send in sends)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, f"{text}\n{_checksum(text)}\n".encode())
        except OSError as error:
            raise disk_fault(self._path, error) from error
        self._sends, self._readable = sends, True


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
