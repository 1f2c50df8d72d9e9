"""The round log on disk: the newest records of one stage's chain, each with its certificate.

A folder of records (record_folder.py) in which, beside them, lies `<round>-<attempt>.vote`: this
peer's own vote, on disk before it leaves, so that a restarted peer cannot vote twice. A record is
checked when it is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dilocox.compression.stage_codec import StageCodec
from dilocox.peer.files import make_folder, write_atomically
from dilocox.peer.record import RecordRefused, RoundRecord, parse_record
from dilocox.peer.record_folder import RecordFolder, read_file


@dataclass(frozen=True, kw_only=True)
class Head:
    """The end of a chain; `round` is -1 where only the manifest stands."""

    round: int
    digest: str
    chain_tokens: int
    record_bytes: int


class RoundLog(RecordFolder):
    """Append-only records of one stage. Two processes may read it; one appends."""

    def __init__(self, folder: Path, *, manifest_digest: str, codec: StageCodec):
        super().__init__(folder)
        self._codec = codec
        self._root = Head(round=-1, digest=manifest_digest, chain_tokens=0, record_bytes=0)
        make_folder(folder)

    def read(self, round_number: int) -> RoundRecord | None:
        """The record of a round, checked, or None if it is not here."""
        data = self.read_bytes(round_number)
        return None if data is None else parse_record(data, self._codec)

    def find(self, digest: str) -> int | None:
        """The round whose record has this digest (-1 for the manifest), None if it is not here."""
        if digest == self._root.digest:
            return self._root.round
        return super().find(digest)

    def head(self) -> Head:
        """The newest record."""
        newest = self.newest()
        if newest is None:
            return self._root
        header = newest.header()
        if header is None:
            raise RecordRefused(f"record {newest.round} vanished while it was read")
        return Head(
            round=newest.round,
            digest=newest.digest,
            chain_tokens=header.chain_tokens,
            record_bytes=newest.record_bytes,
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
        if last is not None and record.rules < last.rules:
            raise RecordRefused(f"record {record.round} is under older rules than the one before")
        if record.ranks != (self._codec.first_ranks if last is None else last.next_ranks):
            raise RecordRefused(f"record {record.round} has other ranks than were planned")
        self.write(record.round, data, certificate)
        return record

    def start_from(self, data: bytes, certificate: bytes) -> RoundRecord:
        """Begin with this record and forget all others (after a state was taken from a peer)."""
        record = parse_record(data, self._codec)
        others = self._records()
        same = others.pop(record.round, None)
        if same is not None:  # never two records of one round, whenever a crash comes
            same.unlink(missing_ok=True)
        self.write(record.round, data, certificate)
        for path in others.values():
            path.unlink(missing_ok=True)
        return record

    def save_vote(self, round_number: int, attempt: int, vote: bytes) -> None:
        """Put this peer's vote on disk; call it before the vote leaves."""
        write_atomically(self._vote_path(round_number, attempt), vote)

    def own_vote(self, round_number: int, attempt: int) -> bytes | None:
        """The vote this peer cast in that attempt, also before a restart."""
        return read_file(self._vote_path(round_number, attempt))

    def _vote_path(self, round_number: int, attempt: int) -> Path:
        return self._folder / f"{round_number:08d}-{attempt}.vote"
