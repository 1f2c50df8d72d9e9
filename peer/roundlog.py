"""The round log on disk: the newest records of one stage's chain, each with its certificate.

A folder with three kinds of file: `<round>.record` (see record.py), `<round>.certificate` (the
signed votes that committed it, written first, so that a record on disk always has one) and
`<round>-<attempt>.vote` (this peer's own vote, on disk before it leaves, so that a restarted peer
cannot vote twice).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dilocox.compression.codec import GroupCodec
from dilocox.peer.files import make_folder, write_atomically
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of, parse_record


@dataclass(frozen=True, kw_only=True)
class Head:
    """The end of a chain; `round` is -1 where only the manifest stands."""

    round: int
    digest: str
    chain_tokens: int


class RoundLog:
    """Append-only records of one stage. Two processes may read it; one appends."""

    def __init__(self, folder: Path, *, manifest_digest: str, codecs: Mapping[int, GroupCodec]):
        self._folder = folder
        self._codecs = codecs
        self._root = Head(round=-1, digest=manifest_digest, chain_tokens=0)
        make_folder(folder)

    def rounds(self) -> list[int]:
        """The rounds whose records are here, in chain order."""
        return sorted(int(path.stem) for path in self._folder.glob("*.record"))

    def read(self, round_number: int) -> RoundRecord | None:
        """The record of a round, checked, or None if it is not here."""
        data = self.read_bytes(round_number)
        return None if data is None else parse_record(data, codec_for=self._codecs)

    def read_bytes(self, round_number: int) -> bytes | None:
        """The bytes of a record, or None if it is not here."""
        return _read(self._record_path(round_number))

    def certificate(self, round_number: int) -> bytes | None:
        """The votes that committed a record."""
        return _read(self._record_path(round_number).with_suffix(".certificate"))

    def find(self, digest: str) -> int | None:
        """The round whose record has this digest (-1 for the manifest), None if it is not here."""
        if digest == self._root.digest:
            return self._root.round
        for round_number in reversed(self.rounds()):
            data = self.read_bytes(round_number)
            if data is not None and digest_of(data) == digest:
                return round_number
        return None

    def head(self) -> Head:
        """The newest record."""
        rounds = self.rounds()
        if not rounds:
            return self._root
        data = self.read_bytes(rounds[-1])
        if data is None:
            raise RecordRefused(f"{self._record_path(rounds[-1])} vanished while it was read")
        record = parse_record(data, codec_for=self._codecs)
        return Head(round=record.round, digest=digest_of(data), chain_tokens=record.chain_tokens)

    def append(self, data: bytes, certificate: bytes) -> RoundRecord:
        """Add the next record of the chain.

        Raises:
            RecordRefused: malformed, or not the successor of the head.
            EnvironmentFault: the disk is full.
        """
        record = parse_record(data, codec_for=self._codecs)
        head = self.head()
        if record.previous != head.digest or record.round <= head.round:
            raise RecordRefused(
                f"record {record.round} follows {record.previous[:12]}, the log ends with round "
                f"{head.round}, {head.digest[:12]}"
            )
        if record.chain_tokens != head.chain_tokens + record.tokens:
            raise RecordRefused(f"record {record.round} miscounts the tokens of the chain")
        self._write(record.round, data, certificate)
        return record

    def start_from(self, data: bytes, certificate: bytes) -> RoundRecord:
        """Forget everything and begin with this record (after a state was taken from a peer)."""
        record = parse_record(data, codec_for=self._codecs)
        self.truncate(-1)
        self._write(record.round, data, certificate)
        return record

    def truncate(self, last: int) -> None:
        """Remove the records after round `last`, newest first, so that the rest stays a chain."""
        for round_number in reversed(self.rounds()):
            if round_number > last:
                self._record_path(round_number).unlink(missing_ok=True)
                self._record_path(round_number).with_suffix(".certificate").unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Keep only the newest records, and no vote older than they are."""
        rounds = self.rounds()
        for round_number in rounds[:-keep]:
            self._record_path(round_number).unlink(missing_ok=True)
            self._record_path(round_number).with_suffix(".certificate").unlink(missing_ok=True)
        oldest = rounds[-keep:][0] if rounds else 0
        for path in self._folder.glob("*.vote"):
            if int(path.stem.split("-")[0]) < oldest:
                path.unlink(missing_ok=True)

    def save_vote(self, round_number: int, attempt: int, vote: bytes) -> None:
        """Put this peer's vote on disk; call it before the vote leaves."""
        write_atomically(self._vote_path(round_number, attempt), vote)

    def own_vote(self, round_number: int, attempt: int) -> bytes | None:
        """The vote this peer cast in that attempt, also before a restart."""
        return _read(self._vote_path(round_number, attempt))

    def _write(self, round_number: int, data: bytes, certificate: bytes) -> None:
        path = self._record_path(round_number)
        write_atomically(path.with_suffix(".certificate"), certificate)
        write_atomically(path, data)

    def _record_path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:08d}.record"

    def _vote_path(self, round_number: int, attempt: int) -> Path:
        return self._folder / f"{round_number:08d}-{attempt}.vote"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
