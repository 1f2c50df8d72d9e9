"""Round records as files: found, read, and removed when there are too many of them.

A folder with two kinds of file: `<round>-<digest>.record` (see record.py) and `<round>.certificate`
(the signed votes that committed it, written first, so that a record on disk always has one). Here
nobody checks what a record says: who appends does (roundlog.py), or who replays (replay.py). It is
checked against the digest in its name when it is read; where only its header matters, only that is
read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dilocox.peer.files import make_folder, write_atomically
from dilocox.peer.record import (
    MAX_HEADER_BYTES,
    RecordRefused,
    RoundRecord,
    digest_of,
    parse_header,
)

HEADER_BYTES = MAX_HEADER_BYTES + 8
RECORDS_NEEDED = 4  # whoever takes our state needs the record it stands on, and those since


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A record that lies in a folder."""

    round: int
    digest: str
    record_bytes: int
    folder: RecordFolder = field(repr=False, compare=False)

    def header(self) -> RoundRecord | None:
        """The record without its means; None if it is gone by now (RecordRefused: damaged)."""
        return self.folder.header(self.round)

    def data(self) -> bytes | None:
        """The record's bytes; None if it is gone by now (RecordRefused: damaged)."""
        return self.folder.read_bytes(self.round)


class RecordFolder:
    """Records of one stage. Many processes may read it; one writes."""

    def __init__(self, folder: Path):
        """The folder need not be there; then it is empty, and nobody makes it."""
        self._folder = folder

    def rounds(self) -> list[int]:
        """The rounds whose records are here, in chain order."""
        return sorted(self._records())

    def entries(self) -> list[Entry]:
        """The records that are here, in chain order."""
        found: list[Entry] = []
        for number, path in sorted(self._records().items()):
            with contextlib.suppress(FileNotFoundError):  # the writer removed it meanwhile
                found.append(_entry(self, number, path))
        return found

    def newest(self) -> Entry | None:
        """The record of the highest round."""
        records = self._records()
        if not records:
            return None
        number = max(records)
        try:
            return _entry(self, number, records[number])
        except FileNotFoundError as error:
            raise RecordRefused(f"{records[number]} vanished while it was read") from error

    def header(self, round_number: int) -> RoundRecord | None:
        """The record of a round without its means, or None if it is not here."""
        data = self.header_bytes(round_number)
        if data is None:
            return None
        try:
            return parse_header(data)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordRefused(
                f"{self._records().get(round_number)}: damaged on disk; move the log folder away "
                "to fetch it again"
            ) from error

    def header_bytes(self, round_number: int) -> bytes | None:
        """The first bytes of a record, up to its means, or None if it is not here."""
        file = self.open(round_number)
        if file is None:
            return None
        with file:
            length = file.read(8)
            return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))

    def open(self, round_number: int) -> BinaryIO | None:
        """The file of a record, unchecked, or None if it is not here."""
        path = self._records().get(round_number)
        try:
            return None if path is None else path.open("rb")
        except FileNotFoundError:
            return None

    def read_bytes(self, round_number: int) -> bytes | None:
        """The bytes of a record, or None if it is not here.

        Raises:
            RecordRefused: the file is not what its name says.
        """
        path = self._records().get(round_number)
        data = None if path is None else read_file(path)
        if path is not None and data is not None and digest_of(data) != _digest(path):
            raise RecordRefused(f"{path}: damaged on disk; remove it to fetch it again")
        return data

    def certificate(self, round_number: int) -> bytes | None:
        """The votes that committed a record."""
        return read_file(self._certificate_path(round_number))

    def find(self, digest: str) -> int | None:
        """The round whose record has this digest, None if it is not here."""
        return next((n for n, path in self._records().items() if _digest(path) == digest), None)

    def write(self, round_number: int, data: bytes, certificate: bytes) -> None:
        """Put a record into the folder; EnvironmentFault if the disk is full."""
        write_atomically(self._certificate_path(round_number), certificate)
        write_atomically(self._folder / _record_name(round_number, digest_of(data)), data)

    def share(self, other: RecordFolder, rounds: Iterable[int]) -> None:
        """Have these records of another folder here, too, as far as they are there.

        They take no room twice where the disk has hard links. EnvironmentFault if it is full.
        """
        make_folder(self._folder)
        records, own = other._records(), self._records()
        for number in sorted(set(rounds) & records.keys()):
            if number in own and own[number].name != records[number].name:
                own[number].unlink(missing_ok=True)  # never two records of one round
                self._certificate_path(number).unlink(missing_ok=True)
            for source in (other._certificate_path(number), records[number]):
                _share(source, self._folder / source.name)

    def prune(
        self, keep: int, keep_bytes: int | None = None, *, applied: int | None = None
    ) -> None:
        """Keep only the newest records, and no certificate or vote older than they are.

        Args:
            keep: so many at most.
            keep_bytes: of so many bytes at most, but four records (or `keep`) in any case.
            applied: a round whose record, and those after it, are kept in any case.
        """
        entries = self.entries()
        kept: set[int] = set()
        total = 0
        for entry in reversed(entries):
            total += entry.record_bytes
            fits = keep_bytes is None or total <= keep_bytes or len(kept) < RECORDS_NEEDED
            if not (len(kept) < keep and fits) and (applied is None or entry.round < applied):
                break
            kept.add(entry.round)
        records = self._records()
        for entry in entries:
            if entry.round not in kept:
                records[entry.round].unlink(missing_ok=True)
        self._prune_others(min(kept, default=0))

    def drop_from(self, first: int) -> None:
        """Remove the records of this round and all after it, with their certificates."""
        for number, path in self._records().items():
            if number >= first:
                path.unlink(missing_ok=True)
                self._certificate_path(number).unlink(missing_ok=True)

    def _prune_others(self, first: int) -> None:
        for pattern in ("*.certificate", "*.vote"):
            for path in self._folder.glob(pattern):
                if int(path.stem.split("-")[0]) < first:
                    path.unlink(missing_ok=True)

    def _records(self) -> dict[int, Path]:
        return {int(path.stem.split("-")[0]): path for path in self._folder.glob("*.record")}

    def _certificate_path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:08d}.certificate"


def _entry(folder: RecordFolder, number: int, path: Path) -> Entry:
    size = path.stat().st_size
    return Entry(round=number, digest=_digest(path), record_bytes=size, folder=folder)


def _record_name(round_number: int, digest: str) -> str:
    return f"{round_number:08d}-{digest}.record"


def _digest(record_path: Path) -> str:
    return record_path.stem.split("-")[1]


def _share(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        pass
    except OSError:  # this disk has none
        write_atomically(target, source.read_bytes())


def read_file(path: Path, limit: int = -1) -> bytes | None:
    """The first bytes of a file, by default all; None if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        return None
