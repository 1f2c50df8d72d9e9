"""Which sends left this peer since its state was last written: a line each, on disk before the
first byte of the send leaves.

The state of a large stage takes seconds to write, and a group does not wait so long. So only this
is written before a send, and the state after it, which makes the line obsolete. Who finds a line
after a restart was killed in between: what it sent may be in a record, and the state on disk still
holds it as unsent. It goes on from the anchor, so that nothing is sent twice.

Each line names the snapshot that stood when it was written; a snapshot with a higher number holds
that send already.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from dilocox.dht.files import disk_fault, sync, write_atomically

logger = logging.getLogger(__name__)

MAX_LINES = 64  # a snapshot follows each send: more than one or two are never of use


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
