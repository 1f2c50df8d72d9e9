"""What an archive keeps of a stage, on the disk. Apart from archive.py, which follows what peers
claim and says what of this is to be made, and when.

On disk a generation has all that a joiner needs, in a folder, complete once its name is a number:
    state/00000000/  the state as in a peer's snapshot folder (snapshot_files.py); not there where
                     the records begin at the initial weights
    log/             the record that the state stands on and those after it, with certificates

The one before the current one, of the same chain, stays beside it as `previous`, for a rollback:
nobody is given its state.

`OlderRecords` are those from before the current generation, for the history, and to know who made
the chain where a generation is damaged. Nobody needs them to go on: they are given only to peers
that ask for `older` ones, to list a run from its first round, or to replay it. The oldest go first,
to make room for newer ones.
"""

from __future__ import annotations

import logging
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import known_files, make_folder, sync
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import anchors_around
from dilocox.peer.chain.rollback import STATE_NAME
from dilocox.peer.chain.snapshot_files import (
    STATE_FILE,
    check_state,
    chunk_digests,
    made_whole,
    state_files,
    write_facts,
)
from dilocox.peer.chain.store import (
    OLDER_NAME,
    PREVIOUS_NAME,
    RoundLog,
    Store,
    Tip,
    kept_state,
)
from dilocox.peer.rounds.ballots import check_certificate
from dilocox.peer.rounds.outer_step import outer_step
from dilocox.peer.rounds.record import RecordRefused, RoundRecord, digest_of, parse_header
from dilocox.peer.state_folder import LOG_FOLDER

logger = logging.getLogger(__name__)


class Generation:
    """One generation; only its log grows.

    state_round: of the record that the state stands on, -1 without a state. donor: the peer that
    gave it, empty after a restart. proven: whether two records have shown the state to be right.
    """

    def __init__(self, folder: Path, check: RecordCheck, *, donor: str = ""):
        self.folder = folder
        self.number = int(folder.name)
        self.donor = donor
        self.states = folder / "state"
        self.state = kept_state(self.states)
        self.log = RoundLog(folder / LOG_FOLDER, manifest_digest=check.root, codec=check.codec)
        self.state_round = -1 if self.state is None else self.state.round
        self.proven = self.state_round < 0
        self.grown()

    @classmethod
    def begun(
        cls,
        folder: Path,
        number: int,
        check: RecordCheck,
        state: tuple[Path, bytes, bytes] | None = None,
        *,
        before: Generation | None = None,
        donor: str = "",
    ) -> Generation:
        """A new one from a checked state, whose file is moved into it, or from the initial weights.

        state: the file, and record and certificate that it stands on. before: the one that has the
        records after that. Raises EnvironmentFault if the disk is full.
        """
        final = folder / f"{number:08d}"
        with made_whole(final) as partial:
            if state is not None:
                file, data, certificate = state
                at = parse_header(data).round
                kept, log = partial / "state" / STATE_NAME, Store(partial / LOG_FOLDER)
                make_folder(kept)
                file.replace(kept / STATE_FILE)
                sync(kept / STATE_FILE)
                chunks = chunk_digests(kept / STATE_FILE)
                write_facts(kept, at, digest_of(data), chunks)
                known_files.see(*state_files(kept))
                make_folder(partial / LOG_FOLDER)
                log.write(at, data, certificate)
                if before is not None:
                    log.share(before.log, [n for n in before.log.rounds() if n > at])
        return cls(final, check, donor=donor)

    @classmethod
    def kept(cls, folder: Path, check: RecordCheck, older: OlderRecords) -> list[Generation]:
        """Those in a folder that are whole, oldest first; the others, whose records `older` takes
        over, and halves are removed.
        """
        make_folder(folder)
        found: list[Generation] = []
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".partial"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdecimal():
                try:
                    found.append(cls._whole(path, check))
                except (ValueError, InvalidInput, OSError) as error:
                    logger.warning("%s: damaged (%s), left out", path, error)
                    # to have them is worth no more than to go on
                    with suppress(EnvironmentFault, ValueError):
                        older.salvage(Store(path / LOG_FOLDER))
                    shutil.rmtree(path, ignore_errors=True)
        return found

    @classmethod
    def _whole(cls, folder: Path, check: RecordCheck) -> Generation:
        """Raises InvalidInput, OSError and ValueError (RecordRefused among them)."""
        made = cls(folder, check)
        state, entries, previous = made.state, made.log.entries(), check.root
        if state is not None:
            check_state(state.file.parent)
            if made.log.find(state.digest) != state.round or state.round != entries[0].round:
                raise RecordRefused("its records do not begin at its state")
        for entry in entries:
            header, certificate = made.log.sound_header(entry.round), entry.certificate()
            if header is None or certificate is None:
                raise RecordRefused(f"round {entry.round} is not whole")
            check_certificate(header, entry.digest, certificate)
            if entry.round != made.state_round and header.previous != previous:
                raise RecordRefused(f"round {entry.round} does not follow the one before it")
            previous = entry.digest
        return made

    @property
    def records_after(self) -> int:
        return len(self.following())

    @property
    def bytes_after(self) -> int:
        entries = self.log.entries()
        return sum(each.record_bytes for each in entries if each.round > self.state_round)

    def grown(self) -> None:
        self.head: Tip = self.log.head()
        self.last: RoundRecord | None = self.log.header(self.head.round)

    def proved(self, check: RecordCheck) -> bool | None:
        """Whether the state is the one its records apply to; None while they are fewer than two.

        Takes the time of decoding a record and reading the state once.
        """
        following = self.following()[:2]
        if self.state is None or len(following) < 2:
            return None
        second = self.log.header(following[1])
        if second is None:
            raise RecordRefused(f"{self.folder}: a record vanished")
        first, found = self._around(following[0], self.state.file, check)
        return found == (first.anchor_before, second.anchor_before)

    def move(self, file: Path, number: int, check: RecordCheck) -> None:
        """Apply the record of this round to the file of a state that stands on the one before.

        Raises RecordRefused if it applies to another anchor, EnvironmentFault if the disk is full.
        """
        record, (before, _) = self._around(number, file, check, move=True)
        if before != record.anchor_before:
            raise RecordRefused(f"{self.folder}: round {number} applies to another anchor")

    def _around(
        self, number: int, file: Path, check: RecordCheck, *, move: bool = False
    ) -> tuple[RoundRecord, tuple[str, str]]:
        record = self.log.read(number)
        if record is None:
            raise RecordRefused(f"{self.folder}: a record vanished")
        outer = outer_step(check.manifest, record.rules)
        return record, anchors_around(file, record.average(check.codec), outer, move=move)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def give_way(self, after: Generation) -> None:
        """Be the previous generation, where the one after it is of its chain; else go, with the
        previous one. A crash meanwhile leaves this one here, to give way at the next start.
        """
        previous = self.folder.with_name(PREVIOUS_NAME)
        gone = previous.with_name(f"{PREVIOUS_NAME}.partial")
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError):
            previous.rename(gone)
        if after.state is not None and self.log.find(after.state.digest) is not None:
            self.log.drop_from(after.state_round + 1)  # they may have lost since
            self.folder.rename(previous)
        else:
            self.remove()
        shutil.rmtree(gone, ignore_errors=True)

    def following(self) -> list[int]:
        return [number for number in self.log.rounds() if number > self.state_round]


class OlderRecords:
    """Records that end where a generation begins; empty where its chain is not theirs."""

    def __init__(self, folder: Path, keep_bytes: int):
        """folder: of the stage. keep_bytes: of records, the newest four aside."""
        self.records = Store(folder / OLDER_NAME)
        self._keep_bytes = keep_bytes

    def keep(self, log: Store) -> None:
        """Take over all records of a generation that is given up for its state alone."""
        self._take(log, log.rounds())

    def salvage(self, log: Store) -> None:
        """Take over the newest records of a damaged generation, from the first sound one back to
        the next that is not: they say who made the chain.
        """
        sound, wanted = list[int](), ""
        for number in reversed(log.rounds()):
            try:
                data, certificate = log.read_bytes(number), log.certificate(number)
                if data is None or certificate is None:
                    raise RecordRefused(f"round {number} is not whole")
                digest, header = digest_of(data), parse_header(data)
                check_certificate(header, digest, certificate)
            except (RecordRefused, OSError):
                if sound:
                    break
                continue
            if wanted not in ("", digest):
                break
            sound.append(number)
            wanted = header.previous
        self._take(log, sound)

    def lead_to(self, generation: Generation, before: Generation | None = None) -> None:
        """Be the records before this generation's first one.

        before: the generation that it replaces; what is here ends where that begins. It may be
            removed afterwards, and not sooner: a crash in between costs nothing.
        """
        first = next(iter(generation.log.entries()), None)
        header = None if first is None or generation.state_round < 0 else first.header()
        if first is None or header is None:  # it begins at the initial weights
            self.records.drop_from(0)
            return
        log = None if before is None else before.log
        for source in (log, self.records):
            newest = None if source is None else source.newest()
            if source is None or newest is None:
                continue
            if source.find(first.digest) is not None or newest.digest == header.previous:
                if before is not None and source is log:
                    if before.state_round < 0:
                        self.records.drop_from(0)  # that one has all of its chain
                    self._take(source, [n for n in source.rounds() if n < first.round])
                self.records.drop_from(first.round)
                return
        self.records.drop_from(0)

    def _take(self, log: Store, rounds: list[int]) -> None:
        self.records.share(log, rounds)
        self.records.prune(sys.maxsize, self._keep_bytes)
