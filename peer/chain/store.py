"""Round records as files: found, read, and removed when there are too many of them.

A `Store` is a folder with two kinds of file: `<round>-<digest>.record` (rounds/record.py) and
`<round>.certificate` (the signed votes that committed it, written first, so that a record on disk
always has one). Nothing here checks what a record says: appending does (`RoundLog`), or replaying
(replay.py). It is checked against the digest in its name when it is read; where only its header
matters, only that is read, so a peer looks over all its files when it starts (`drop_damaged`).

`RoundLog` is the store of a peer, with the newest records of its stage's chain. Beside them lies
`<round>-<attempt>.vote`: this peer's own vote, on disk before it leaves, so that a restarted peer
cannot vote twice. A record is checked when it is added.

`kept_run` finds what a state folder holds of a run: records, and states that some of them lead to.
A peer keeps the newest records and one state (`RUN-stage0/log`, `.../snapshots`), a bootstrap more
of both, for every stage (`RUN-archive-DIGEST/stage0/older`, `.../00000003/log`, `.../state`,
`.../previous` with the same two; and `.../initial` where the run starts from a checkpoint).
A reader needs no lock here: the owner may be running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import known_files, make_folder, sync, write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import RoundSpec
from dilocox.peer.chain.record_check import flaws_after
from dilocox.peer.chain.snapshot_files import STATE_FACTS_FILE, STATE_FILE, newest
from dilocox.peer.rounds.ballots import check_certificate
from dilocox.peer.rounds.record import (
    MAX_HEADER_BYTES,
    RecordRefused,
    RoundRecord,
    digest_of,
    parse_header,
    parse_record,
)
from dilocox.peer.state_folder import LOG_FOLDER, MANIFEST_FILE, SNAPSHOT_FOLDER

logger = logging.getLogger(__name__)

HEADER_BYTES = MAX_HEADER_BYTES + 8
RECORDS_NEEDED = 4  # a peer that takes our state needs the record it stands on, and those since


def log_limits(rounds: RoundSpec, record_bytes: int) -> tuple[int, int]:
    """How many of its newest records, each of so many bytes, a peer keeps at most, and how many
    bytes of them: see `Store.prune`."""
    least_bytes = RECORDS_NEEDED * record_bytes
    return max(rounds.records_kept, RECORDS_NEEDED), max(rounds.log_bytes, least_bytes)


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """A record that lies in a folder."""

    round: int
    digest: str
    record_bytes: int
    store: Store = field(repr=False, compare=False)

    def header(self) -> RoundRecord | None:
        """The record without its means; None if it is gone by now (RecordRefused: damaged)."""
        return self.store.header(self.round)

    def data(self) -> bytes | None:
        """The record's bytes; None if it is gone by now (RecordRefused: damaged)."""
        return self.store.read_bytes(self.round)

    def certificate(self) -> bytes | None:
        return self.store.certificate(self.round)


class Store:
    """Records of one stage, in chain order. Many processes may read them; one writes."""

    def __init__(self, folder: Path):
        """The folder need not be there; then it is empty, and nobody makes it."""
        self._folder = folder

    # ---- reading; what is not here, or no longer, is None ----------------------------------------
    def rounds(self) -> list[int]:
        return sorted(self._records())

    def entries(self) -> list[LogEntry]:
        found = (self._entry(number, path) for number, path in sorted(self._records().items()))
        return [entry for entry in found if entry is not None]

    def newest(self) -> LogEntry | None:
        records = self._records()
        if not records:
            return None
        entry = self._entry(*max(records.items()))
        if entry is None:
            raise RecordRefused(f"record {max(records)} vanished while it was read")
        return entry

    def counting(self, manifest: Manifest) -> list[LogEntry]:
        """The records that no rollback has taken back."""
        return still_counting(self.entries(), manifest)

    def header(self, round_number: int) -> RoundRecord | None:
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
        """The first bytes of a record, up to its means."""
        file = self.open(round_number)
        if file is None:
            return None
        with file:
            length = file.read(8)
            return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))

    def open(self, round_number: int) -> BinaryIO | None:
        path = self._records().get(round_number)
        try:
            return None if path is None else path.open("rb")
        except FileNotFoundError:
            return None

    def read_bytes(self, round_number: int) -> bytes | None:
        """The bytes of a record; RecordRefused if the file is not what its name says."""
        path = self._records().get(round_number)
        data = None if path is None else read_file(path)
        if path is not None and data is not None and digest_of(data) != _digest(path):
            raise RecordRefused(f"{path}: damaged on disk; remove it to fetch it again")
        return data

    def sound_header(self, round_number: int) -> RoundRecord | None:
        """The record without its means. All of it is looked at, but where this process wrote or
        looked at the file and nobody has written it since; RecordRefused as `read_bytes`.
        """
        path = self._records().get(round_number)
        with contextlib.suppress(FileNotFoundError):
            if path is not None:
                known_files.see(path, look=lambda: self.read_bytes(round_number))
        return self.header(round_number)

    def certificate(self, round_number: int) -> bytes | None:
        return read_file(self._certificate_path(round_number))

    def find(self, digest: str) -> int | None:
        return next((n for n, path in self._records().items() if _digest(path) == digest), None)

    # ---- writing ---------------------------------------------------------------------------------
    def write(self, round_number: int, data: bytes, certificate: bytes) -> None:
        """Put a record into the folder; EnvironmentFault if the disk is full."""
        write_atomically(self._certificate_path(round_number), certificate)
        path = self._folder / f"{round_number:08d}-{digest_of(data)}.record"
        write_atomically(path, data)
        known_files.see(path)

    def share(self, other: Store, rounds: Iterable[int]) -> None:
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
        sync(self._folder)  # `other` may go as soon as this returns

    def prune(
        self, keep: int, keep_bytes: int | None = None, *, applied: int | None = None
    ) -> None:
        """Keep only the newest records, and no certificate or vote older than they are.

        Args:
            keep: so many at most.
            keep_bytes: of so many bytes at most, but four records (or `keep`) in any case.
            applied: a round whose record, and those after it, are kept in any case.
        """
        kept: list[int] = []
        total = 0
        for entry in reversed(self.entries()):
            total += entry.record_bytes
            fits = keep_bytes is None or total <= keep_bytes or len(kept) < RECORDS_NEEDED
            if not (len(kept) < keep and fits) and (applied is None or entry.round < applied):
                break
            kept.append(entry.round)
        first = min(kept, default=0)
        for pattern in ("*.record", "*.certificate", "*.vote"):
            for path in self._folder.glob(pattern):
                if _round(path) < first:
                    path.unlink(missing_ok=True)

    def drop_damaged(self, *, applied: int) -> None:
        """Look whether each record and certificate is what was written; remove those that are not.

        So that the chain stays whole, all before a damaged one go with it; where it is not
        `applied` yet, all after it, which can be had from others. What a killed writer left goes,
        too: nobody writes yet.
        """
        for left in self._folder.glob(".*.partial"):
            left.unlink(missing_ok=True)
        damaged: list[int] = []
        for number, path in sorted(self._records().items()):
            try:
                self._check(number)
            except RecordRefused:
                logger.warning("%s or its certificate is damaged: removed", path)
                damaged.append(number)
        old = [number for number in damaged if number <= applied]
        new = [number for number in damaged if number > applied]
        if new:
            self.drop_from(new[0])
        for number, path in self._records().items():
            if old and number <= old[-1]:
                path.unlink(missing_ok=True)
                self._certificate_path(number).unlink(missing_ok=True)

    def _check(self, round_number: int) -> None:
        data, certificate = self.read_bytes(round_number), self.certificate(round_number)
        if data is None or certificate is None:
            raise RecordRefused("without its certificate")
        check_certificate(parse_header(data), digest_of(data), certificate)

    def drop_from(self, first: int) -> None:
        """Remove the records of this round and all after it, with their certificates; the newest
        first, so that what a kill leaves is a chain.
        """
        for number, path in sorted(self._records().items(), reverse=True):
            if number >= first:
                path.unlink(missing_ok=True)
                self._certificate_path(number).unlink(missing_ok=True)

    def _records(self) -> dict[int, Path]:
        return {_round(path): path for path in self._folder.glob("*.record")}

    def _entry(self, number: int, path: Path) -> LogEntry | None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # the writer removed it meanwhile
            return None
        return LogEntry(round=number, digest=_digest(path), record_bytes=size, store=self)

    def _certificate_path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:08d}.certificate"


def forget_records(log: Path) -> None:
    """Remove what came of another chain beside this log; the newest first, so that what a kill
    leaves is no whole chain."""
    Store(log / FROM_START).drop_from(0)
    shutil.rmtree(log / FROM_START, ignore_errors=True)


def still_counting(entries: Iterable[LogEntry], manifest: Manifest) -> list[LogEntry]:
    """Those records that no rollback has taken back."""
    found: list[LogEntry] = []
    for entry in entries:
        header = entry.header()
        if header is not None and not manifest.rolled_back(entry.round, header.rules):
            found.append(entry)
    return found


def _round(path: Path) -> int:
    return int(path.stem.split("-")[0])


def _digest(record_path: Path) -> str:
    return record_path.stem.split("-")[1]


def _share(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        pass
    except OSError:  # this disk has none
        write_atomically(target, source.read_bytes())


def read_file(path: Path) -> bytes | None:
    """A file's bytes; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Tip:
    """The end of a chain; `round` is -1 where only the manifest stands."""

    round: int
    digest: str
    chain_tokens: int
    record_bytes: int


class RoundLog(Store):
    """Append-only records of one stage. Two processes may read it; one appends."""

    def __init__(self, folder: Path, *, manifest_digest: str, codec: StageCodec):
        super().__init__(folder)
        self._codec = codec
        self._root = Tip(round=-1, digest=manifest_digest, chain_tokens=0, record_bytes=0)
        make_folder(folder)

    def read(self, round_number: int) -> RoundRecord | None:
        data = self.read_bytes(round_number)
        return None if data is None else parse_record(data, self._codec)

    def find(self, digest: str) -> int | None:
        """The round whose record has this digest (-1 for the manifest), None if it is not here."""
        if digest == self._root.digest:
            return self._root.round
        return super().find(digest)

    def head(self) -> Tip:
        newest = self.newest()
        if newest is None:
            return self._root
        header = newest.header()
        if header is None:
            raise RecordRefused(f"record {newest.round} vanished while it was read")
        return Tip(
            round=newest.round,
            digest=newest.digest,
            chain_tokens=header.chain_tokens,
            record_bytes=newest.record_bytes,
        )

    def append(self, data: bytes, certificate: bytes) -> None:
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
        for flaw in flaws_after(record, self.header(head.round), self._codec.first_ranks):
            raise RecordRefused(f"record {record.round} {flaw}")
        self.write(record.round, data, certificate)

    def start_from(self, data: bytes, certificate: bytes) -> None:
        """Begin with this record and forget all others (after a state was taken from a peer)."""
        record = parse_record(data, self._codec)
        others = self._records()
        same = others.pop(record.round, None)
        if same is not None:  # never two records of one round, whenever a crash comes
            same.unlink(missing_ok=True)
        self.write(record.round, data, certificate)
        for path in others.values():
            path.unlink(missing_ok=True)

    def save_vote(self, round_number: int, attempt: int, vote: bytes) -> None:
        """Put this peer's vote on disk; call it before the vote leaves."""
        write_atomically(self._vote_path(round_number, attempt), vote)

    def own_vote(self, round_number: int, attempt: int) -> bytes | None:
        """The vote this peer cast in that attempt, also before a restart."""
        return read_file(self._vote_path(round_number, attempt))

    def _vote_path(self, round_number: int, attempt: int) -> Path:
        return self._folder / f"{round_number:08d}-{attempt}.vote"


FROM_START = "from-start"  # in a peer's log: the records of another chain, until all are here
OLDER_NAME = "older"
PREVIOUS_NAME = "previous"  # the generation before the current one, for a rollback alone
INITIAL_NAME = "initial"  # of a run that starts from a checkpoint: its state of round -1, for ever
TOKENIZER_NAME = "tokenizer"  # the run's, beside the archive of stage 0

_OF_PEER = re.compile(r"[0-9a-f]{32}-stage[0-9]{1,3}")
_OF_ARCHIVE = re.compile(r"[0-9a-f]{32}-archive-[0-9a-f]{16}")
_STAGE = re.compile(r"stage(?P<stage>[0-9]{1,3})")


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """An anchor and momentum on disk, and the record that they stand on."""

    round: int  # -1 for the initial weights
    digest: str  # of that record, or of the manifest
    sha256: str  # of the file
    file: Path


@dataclass(frozen=True, kw_only=True)
class KeptChain:
    """One stage's chain, as far as it is kept; the records are in chain order."""

    stage: int
    records: tuple[LogEntry, ...]
    states: tuple[KeptState, ...]

    def counting(self, manifest: Manifest) -> list[LogEntry]:
        """The records that no rollback has taken back."""
        return still_counting(self.records, manifest)


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """What a state folder holds of a run, by stage."""

    run: str
    stages: Mapping[int, KeptChain]
    folder: Path  # the manifest is in it

    def manifest(self) -> Manifest:
        """The run's manifest, as its owner knew it; InvalidInput if it is not there."""
        path = self.folder / MANIFEST_FILE
        try:
            return Manifest.from_bytes(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                f"{path}: cannot be read ({error.strerror}); a peer or bootstrap writes it when it "
                "starts: start it once, or give the invite instead of the folder"
            ) from error
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error


def archive_folder(state: Path, run: str, manifest: Manifest) -> Path:
    """Where a bootstrap keeps a run; with another root nothing of it would fit."""
    return state / f"{run}-archive-{manifest.root[:16]}"


def keep_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest beside what is kept under it; EnvironmentFault if the disk is full."""
    make_folder(folder)
    write_atomically(folder / MANIFEST_FILE, manifest.to_bytes())


def kept_run(path: Path) -> KeptRun:
    """What is kept in a state folder, or in one of its folders that belong to a run.

    Raises:
        InvalidInput: there is nothing of the kind, or of several runs.
    """
    path = path.resolve()
    inside = sorted(path.iterdir()) if path.is_dir() else []
    peers = [each for each in (path, *inside) if _OF_PEER.fullmatch(each.name)]
    archives = [each for each in (path, *inside) if _OF_ARCHIVE.fullmatch(each.name)]
    if not peers and not archives:
        raise InvalidInput(
            f"{path}: there is no round log; name the folder that a peer or bootstrap was given as "
            "--state, or an invite"
        )
    owners = {each.name.partition("-")[0] for each in peers} | {each.name for each in archives}
    if len(owners) > 1:
        names = ", ".join(str(each) for each in (*peers, *archives))
        raise InvalidInput(f"{path}: holds several runs; name one of {names}")
    chains = [_of_peer(each) for each in peers] if peers else _of_archive(archives[0])
    return KeptRun(
        run=(peers + archives)[0].name.partition("-")[0],
        stages={chain.stage: chain for chain in chains},
        folder=(peers + archives)[0],
    )


def _of_peer(folder: Path) -> KeptChain:
    stage = int(folder.name.rpartition("-stage")[2])
    return _chain(stage, [folder / LOG_FOLDER], [folder / SNAPSHOT_FOLDER])


def _of_archive(folder: Path) -> list[KeptChain]:
    """All that an archive keeps of its stages: see archive.py."""
    chains: list[KeptChain] = []
    for path in sorted(folder.iterdir()):
        if match := _STAGE.fullmatch(path.name):
            generations = sorted(each for each in path.iterdir() if each.name.isdecimal())
            generations.append(path / PREVIOUS_NAME)
            logs = [each / LOG_FOLDER for each in generations]
            states = [path / INITIAL_NAME, *(each / "state" for each in generations)]
            chains.append(_chain(int(match["stage"]), [*logs, path / OLDER_NAME], states))
    return chains


def _chain(stage: int, logs: Iterable[Path], states: Iterable[Path]) -> KeptChain:
    records: dict[int, LogEntry] = {}
    for log in logs:  # what two of them have is the same; else the first one counts
        for entry in Store(log).entries():
            records.setdefault(entry.round, entry)
    found = [state for folder in states if (state := kept_state(folder)) is not None]
    return KeptChain(
        stage=stage,
        records=tuple(records[number] for number in sorted(records)),
        states=tuple(found),
    )


def kept_state(folder: Path) -> KeptState | None:
    """The newest state in a folder of snapshots; InvalidInput if what is said of it is damaged."""
    snapshot = newest(folder)
    if snapshot is None:
        return None
    try:
        facts = json.loads((snapshot / STATE_FACTS_FILE).read_text())
        return KeptState(
            round=int(facts["round"]),
            digest=str(facts["digest"]),
            sha256=str(facts["sha256"]),
            file=snapshot / STATE_FILE,
        )
    except FileNotFoundError:  # its owner wrote a newer one meanwhile
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{snapshot}: the snapshot is damaged ({error})") from error
