"""How much is served at once to peers that are behind: records and states.

Each upload holds an open file and a chunk of memory, so only so many run at once, and few of one
peer. Nobody can keep the others out. Where all places are taken, an upload that is taken too slowly
ends for the next one. A peer that has none also gets the place of one of a peer that has most, or
of one that has had its turn, which goes on elsewhere; of several the slowest ends. Keys cost
nothing: so a peer that made the chain's last records gets, before that, the place of a peer that
did not, where such peers have more than half.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from dilocox.dht.rpc import CHUNK_BYTES, answer_of, facts_of
from dilocox.peer.chain.snapshot_files import CHUNKS_FILE, STATE_FACTS_FILE, STATE_FILE, newest
from dilocox.peer.chain.store import Store

HEADER_CHUNKS = 4
AT_ONCE = 8
OF_ONE_PEER = 3
TURN_S = 600.0  # after which a place is another one's, if nobody else gives way
# An honest asker takes 15 kB/s even where eight share an uplink of 1 Mbit/s.
LEAST_BYTES_PER_S = 4096.0
LEAST_OVER_S = 60.0  # that an asker was waited for


@dataclass(frozen=True)
class Source:
    """Something to serve: what is said about it, and its bytes."""

    facts: dict[str, Any]
    file: BinaryIO

    @classmethod
    def of(cls, data: bytes, **facts: Any) -> Source:
        return cls({"bytes": len(data)} | facts, io.BytesIO(data))

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def find_in_log(log: Store, what: str, digest: str, *, header: bool = False) -> Source | None:
    """A logged record or certificate, to serve; of a record perhaps only the header.

    A record is served as it lies on the disk: the caller knows its digest.
    """
    round_number = log.find(digest)
    if round_number is None or round_number < 0:
        return None
    if what != "record":
        data = log.certificate(round_number)
        return None if data is None else Source.of(data)
    if header:
        data = log.header_bytes(round_number)
        return None if data is None else Source.of(data)
    file = log.open(round_number)
    return None if file is None else Source({"bytes": os.fstat(file.fileno()).st_size}, file)


def is_urgent(want: Mapping[str, Any], found: Source) -> bool:
    """An exchange waits for a mean; what is few bytes is not worth a place, or a wait, and no more
    are the headers by which a chain is walked: of a group of 128 each has two such chunks.
    """
    few = HEADER_CHUNKS * CHUNK_BYTES if want.get("header") else CHUNK_BYTES
    return want["what"] == "mean" or found.facts["bytes"] <= few


def open_state(folder: Path, want: Mapping[str, Any]) -> Source | None:
    """The anchor and momentum of the newest snapshot, from the byte `offset` on, to serve; where
    `digests` are wanted, those of its chunks.

    `sha256`: the state that is wanted, if not just any: None is served where the newest snapshot
    is another one by now. Once it is open, it is served to its end, whatever snapshots come.
    """
    offset, sha256 = int(want.get("offset", 0)), want.get("sha256")
    snapshot = newest(folder)
    if snapshot is None:
        return None
    facts = json.loads((snapshot / STATE_FACTS_FILE).read_text())
    if sha256 is not None and facts["sha256"] != sha256:
        return None
    if want.get("digests"):
        return Source.of((snapshot / CHUNKS_FILE).read_bytes())
    file = (snapshot / STATE_FILE).open("rb")
    offset = min(max(offset, 0), facts["size"])
    file.seek(offset)
    return Source(facts | {"bytes": facts["size"] - offset}, file)


class UploadRefused(Exception):
    """As many uploads run as there may be."""


class Uploads:
    """Counts what runs. All calls belong to one event loop."""

    def __init__(
        self,
        at_once: int = AT_ONCE,
        *,
        knows: Callable[[str], bool] = lambda peer: False,
    ):
        """knows: whether a peer had a vote in the chain's last records, or is a bootstrap."""
        self._at_once = at_once
        self._knows = knows
        self._running: list[Upload] = []

    async def answer(
        self,
        request: Any,
        peer: str,
        find: Callable[[dict[str, Any]], Awaitable[Source | None]],
        *,
        refuse: Callable[[str], None],
        pace: Callable[[dict[str, Any], Source], Callable[[int], Awaitable[None]]],
    ) -> AsyncGenerator[Any, None]:
        """The frames that answer a `get` of this peer: facts and chunks, or that all places are
        taken.

        find: what it asks for, None if it is not here. refuse: counts what was asked in vain: for
        "question" or our "disk", or while we are "busy". pace: for what was found, what counts so
        many bytes, or waits until they may leave.
        """
        want: dict[str, Any] = {}
        found: Source | None = None
        try:
            want = facts_of(request)
            found = await find(want)
        except OSError:
            refuse("disk")
        except (ValueError, KeyError, TypeError, OverflowError):
            refuse("question")
        if found is None:
            yield answer_of({})
            return
        before_chunk = pace(want, found)
        try:
            with found, self.begin(peer, found.file, urgent=is_urgent(want, found)) as upload:
                with upload.being_taken(0):
                    yield answer_of(found.facts)
                while chunk := upload.read(CHUNK_BYTES):
                    await before_chunk(len(chunk))
                    with upload.being_taken(len(chunk)):
                        yield answer_of({}, chunk)
        except UploadRefused as error:
            refuse("busy")
            yield answer_of({"busy": str(error)})

    @contextmanager
    def begin(self, peer: str, file: BinaryIO, *, urgent: bool) -> Generator[Upload]:
        """An upload to this peer; `urgent`: always, and not counted. UploadRefused: there may be no
        more now.
        """
        upload = Upload(peer, file, self._running)
        if not urgent:
            self._make_place(peer)
            self._running.append(upload)
        try:
            yield upload
        finally:
            upload.end()

    def _make_place(self, peer: str) -> None:
        places = Counter(upload.peer for upload in self._running)
        if places[peer] >= OF_ONE_PEER:
            raise UploadRefused(f"{OF_ONE_PEER} downloads of one peer are served at once")
        if len(self._running) < self._at_once:
            return
        ending = [upload for upload in self._running if upload.drips]
        if not ending and not places[peer] and self._knows(peer):
            unknown = [upload for upload in self._running if not self._knows(upload.peer)]
            ending = unknown if 2 * len(unknown) > self._at_once else []
        most = max(places.values(), default=0)
        if not ending and not places[peer] and most > 1:
            ending = [upload for upload in self._running if places[upload.peer] == most]
        if not ending and not places[peer]:
            ending = [upload for upload in self._running if monotonic() - upload.began >= TURN_S]
        if not ending:
            raise UploadRefused(f"{self._at_once} downloads are served at once")
        min(ending, key=lambda upload: upload.bytes_per_s).end()


def _holds_room(file: BinaryIO) -> bool:
    """Whether the file was removed and its room is lacking: no disk is planned for old states."""
    try:
        found, disk = os.fstat(file.fileno()), os.fstatvfs(file.fileno())
    except OSError:  # it is in memory
        return False
    return not found.st_nlink and disk.f_bavail * disk.f_frsize < found.st_size


class Upload:
    """One that runs; in this list while it has a place."""

    def __init__(self, peer: str, file: BinaryIO, running: list[Upload]):
        self.peer = peer
        self.began = monotonic()
        self._file = file
        self._running = running
        self._ended = False
        self._taken, self._waited_s = 0, 0.0  # since it last was fast enough
        self._waits_since: float | None = None

    @property
    def bytes_per_s(self) -> float:
        return self._taken / max(1e-6, self._all_waited_s)

    @property
    def drips(self) -> bool:
        """Whether the peer takes it too slowly to keep the place from another one."""
        return self._all_waited_s >= LEAST_OVER_S and self.bytes_per_s < LEAST_BYTES_PER_S

    @property
    def _all_waited_s(self) -> float:
        """For the peer; the waits for our own limit are not its fault."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else monotonic() - since)

    def read(self, count: int) -> bytes:
        """The next bytes; none at the end of the file, or once the upload was ended: it is, too,
        where it alone keeps a file on a disk that has no room for another such file.
        """
        if not self._ended and _holds_room(self._file):
            self.end()
        return b"" if self._ended else self._file.read(count)

    @contextmanager
    def being_taken(self, count: int) -> Generator[None]:
        """While the peer takes a chunk of so many bytes."""
        self._waits_since = monotonic()
        try:
            yield
        finally:
            self._waited_s, self._waits_since = self._all_waited_s, None
        self._taken += count
        if self._waited_s >= LEAST_OVER_S and not self.drips:
            self._taken, self._waited_s = 0, 0.0

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._file.close()
            if self in self._running:
                self._running.remove(self)
