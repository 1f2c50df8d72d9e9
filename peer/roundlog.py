"""The round log on disk: the newest records of one stage's chain, each with its certificate.

A folder with three kinds of file: `<round>-<digest>.record` (see record.py), `<round>.certificate`
(the signed votes that committed it, written first, so that a record on disk always has one) and
`<round>-<attempt>.vote` (this peer's own vote, on disk before it leaves, so that a restarted peer
cannot vote twice). A record is checked when it is added, and against the digest in its name when
it is read; where only its header matters, only that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dilocox.compression.stage_codec import StageCodec
from dilocox.peer.files import make_folder, write_atomically
from dilocox.peer.record import (
    MAX_HEADER_BYTES,
    RecordRefused,
    RoundRecord,
    digest_of,
    parse_header,
    parse_record,
)

HEADER_BYTES = MAX_HEADER_BYTES + 8


@dataclass(frozen=True, kw_only=True)
class Head:
    """The end of a chain; `round` is -1 where only the manifest stands."""

    round: int
    digest: str
    chain_tokens: int
    record_bytes: int


class RoundLog:
    """Append-only records of one stage. Two processes may read it; one appends."""

    def __init__(self, folder: Path, *, manifest_digest: str, codec: StageCodec):
        self._folder = folder
        self._codec = codec
        self._root = Head(round=-1, digest=manifest_digest, chain_tokens=0, record_bytes=0)
        make_folder(folder)

    def rounds(self) -> list[int]:
        """The rounds whose records are here, in chain order."""
        return sorted(self._records())

    def read(self, round_number: int) -> RoundRecord | None:
        """The record of a round, checked, or None if it is not here."""
        data = self.read_bytes(round_number)
        return None if data is None else parse_record(data, self._codec)

    def header(self, round_number: int) -> RoundRecord | None:
        """The record of a round without its means, or None if it is not here."""
        path = self._records().get(round_number)
        data = None if path is None else _read(path, HEADER_BYTES)
        if data is None:
            return None
        try:
            return parse_header(data)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordRefused(
                f"{path}: damaged on disk; move the log folder away to fetch it again"
            ) from error

    def read_bytes(self, round_number: int) -> bytes | None:
        """The bytes of a record, or None if it is not here.

        Raises:
            RecordRefused: the file is not what its name says.
        """
        path = self._records().get(round_number)
        data = None if path is None else _read(path)
        if path is not None and data is not None and digest_of(data) != _digest(path):
            raise RecordRefused(f"{path}: damaged on disk; remove it to fetch it again")
        return data

    def certificate(self, round_number: int) -> bytes | None:
        """The votes that committed a record."""
        return _read(self._certificate_path(round_number))

    def find(self, digest: str) -> int | None:
        """The round whose record has this digest (-1 for the manifest), None if it is not here."""
        if digest == self._root.digest:
            return self._root.round
        return next((n for n, path in self._records().items() if _digest(path) == digest), None)

    def head(self) -> Head:
        """The newest record."""
        records = self._records()
        if not records:
            return self._root
        newest = max(records)
        header = self.header(newest)
        if header is None:
            raise RecordRefused(f"{records[newest]} vanished while it was read")
        return Head(
            round=newest,
            digest=_digest(records[newest]),
            chain_tokens=header.chain_tokens,
            record_bytes=records[newest].stat().st_size,
        )

    def append(self, data: bytes, certificate: bytes) -> RoundRecord:
        """Add the next record of the chain.

        Raises:
            RecordRefused: malformed, or not the successor of the head.
            EnvironmentFault: the disk is full.
        """
        record = parse_record(data, self._codec)
        head = self.head()
        if record.previous != head.digest or record.round <= head.round:
            raise RecordRefused(
                f"record {record.round} follows {record.previous[:12]}, the log ends with round "
                f"{head.round}, {head.digest[:12]}"
            )
        if record.chain_tokens != head.chain_tokens + record.tokens:
            raise RecordRefused(f"record {record.round} miscounts the tokens of the chain")
        last = self.header(head.round) if head.round >= 0 else None
        if record.ranks != (self._codec.first_ranks if last is None else last.next_ranks):
            raise RecordRefused(f"record {record.round} has other ranks than were planned")
        self._write(record.round, data, certificate)
        return record

    def start_from(self, data: bytes, certificate: bytes) -> RoundRecord:
        """Begin with this record and forget all others (after a state was taken from a peer)."""
        record = parse_record(data, self._codec)
        others = self._records()
        same = others.pop(record.round, None)
        if same is not None:  # never two records of one round, whenever a crash comes
            same.unlink(missing_ok=True)
        self._write(record.round, data, certificate)
        for path in others.values():
            path.unlink(missing_ok=True)
        return record

    def prune(self, keep: int) -> None:
        """Keep only the newest records, and no certificate or vote older than they are."""
        records = self._records()
        kept = sorted(records)[-keep:]
        for round_number in records.keys() - set(kept):
            records[round_number].unlink(missing_ok=True)
        for pattern in ("*.certificate", "*.vote"):
            for path in self._folder.glob(pattern):
                if kept and int(path.stem.split("-")[0]) < kept[0]:
                    path.unlink(missing_ok=True)

    def save_vote(self, round_number: int, attempt: int, vote: bytes) -> None:
        """Put this peer's vote on disk; call it before the vote leaves."""
        write_atomically(self._vote_path(round_number, attempt), vote)

    def own_vote(self, round_number: int, attempt: int) -> bytes | None:
        """The vote this peer cast in that attempt, also before a restart."""
        return _read(self._vote_path(round_number, attempt))

    def _write(self, round_number: int, data: bytes, certificate: bytes) -> None:
        write_atomically(self._certificate_path(round_number), certificate)
        write_atomically(self._folder / f"{round_number:08d}-{digest_of(data)}.record", data)

    def _records(self) -> dict[int, Path]:
        return {int(path.stem.split("-")[0]): path for path in self._folder.glob("*.record")}

    def _certificate_path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:08d}.certificate"

    def _vote_path(self, round_number: int, attempt: int) -> Path:
        return self._folder / f"{round_number:08d}-{attempt}.vote"


def _digest(record_path: Path) -> str:
    return record_path.stem.split("-")[1]


def _read(path: Path, limit: int = -1) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        return None
