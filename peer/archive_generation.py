"""A state of one stage and the records after it, on disk: what a joiner needs, complete by itself.

A folder, complete once its name is a number:
    state/00000000/  the state as in a peer's snapshot folder (snapshot.py); not there where the
                     records begin at the initial weights
    log/             the record that the state stands on and those after it, with certificates
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from dilocox.peer.files import disk_fault, make_folder, write_atomically
from dilocox.peer.plan import outer_step
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of, parse_header
from dilocox.peer.record_check import RecordCheck
from dilocox.peer.roundlog import Head, RoundLog
from dilocox.peer.snapshot import STATE_FACTS_FILE, STATE_FILE, newest, sha256_of_file
from dilocox.peer.state_file import StateOffer, anchors_around

logger = logging.getLogger(__name__)

STATE_NAME = "00000000"


class Generation:
    """One generation; only its log grows.

    state_round: of the record that the state stands on, -1 without a state. donor: who gave the
    state, empty after a restart. proven: whether two records have shown the state to be right.
    """

    def __init__(self, folder: Path, check: RecordCheck, *, donor: str = ""):
        self.folder = folder
        self.number = int(folder.name)
        self.donor = donor
        self.states = folder / "state"
        self.log = RoundLog(folder / "log", manifest_digest=check.root, codec=check.codec)
        self.state_round = int(self._state_facts().get("round", -1))
        self.proven = self.state_round < 0
        self.grown()

    @classmethod
    def begun(
        cls,
        folder: Path,
        number: int,
        check: RecordCheck,
        state: tuple[StateOffer, Path] | None = None,
    ) -> Generation:
        """A new one from a checked state, whose file is moved into it, or from the initial weights.

        Raises EnvironmentFault if the disk is full.
        """
        final, partial = folder / f"{number:08d}", folder / f"{number:08d}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            make_folder(partial)
            if state is not None:
                offer, file = state
                _keep_state(partial / "state" / STATE_NAME, offer, file)
                log = RoundLog(partial / "log", manifest_digest=check.root, codec=check.codec)
                log.start_from(offer.record_bytes, offer.certificate)
            partial.rename(final)
        except OSError as error:
            raise disk_fault(final, error) from error
        return cls(final, check, donor="" if state is None else state[0].peer)

    @classmethod
    def kept(cls, folder: Path, check: RecordCheck) -> list[Generation]:
        """Those in a folder that are whole, oldest first; the others, and halves, are removed."""
        make_folder(folder)
        found: list[Generation] = []
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".partial"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdecimal():
                try:
                    found.append(cls._whole(path, check))
                except (ValueError, KeyError, TypeError, OSError) as error:
                    logger.warning("%s: damaged (%s), left out", path, error)
                    shutil.rmtree(path, ignore_errors=True)
        return found

    @classmethod
    def _whole(cls, folder: Path, check: RecordCheck) -> Generation:
        """Raises what parsing raises, or RecordRefused."""
        made = cls(folder, check)
        rounds, facts = made.log.rounds(), made._state_facts()
        previous = check.root
        if facts:
            if sha256_of_file(made.state_file) != facts["sha256"]:
                raise RecordRefused("its state is not what it was")
            if made.log.find(facts["digest"]) != made.state_round or made.state_round != rounds[0]:
                raise RecordRefused("its records do not begin at its state")
        for number in rounds:
            data = made.log.read_bytes(number)
            if data is None or made.log.certificate(number) is None:
                raise RecordRefused(f"round {number} is not whole")
            if number != made.state_round and parse_header(data).previous != previous:
                raise RecordRefused(f"round {number} does not follow the one before it")
            previous = digest_of(data)
        return made

    @property
    def state_file(self) -> Path:
        """The file of its state; there is none where it begins at the initial weights."""
        return self.states / STATE_NAME / STATE_FILE

    @property
    def records_after(self) -> int:
        """How many records follow the state."""
        return len(self._following())

    def grown(self) -> None:
        """Look at the log's end anew."""
        self.head: Head = self.log.head()
        self.last: RoundRecord | None = (
            self.log.header(self.head.round) if self.head.round >= 0 else None
        )

    def proved(self, check: RecordCheck) -> bool | None:
        """Whether the state is the one its records apply to; None while they are fewer than two.

        Takes the time of decoding a record and reading the state once.
        """
        following = self._following()[:2]
        if len(following) < 2:
            return None
        first, second = self.log.read(following[0]), self.log.header(following[1])
        if first is None or second is None:
            raise RecordRefused(f"{self.folder}: a record vanished")
        average = first.average(check.codec)
        outer = outer_step(check.manifest, first.rules)
        found = anchors_around(self.state_file, average, outer)
        return found == (first.anchor_before, second.anchor_before)

    def remove(self) -> None:
        """Take it from the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _following(self) -> list[int]:
        return [number for number in self.log.rounds() if number > self.state_round]

    def _state_facts(self) -> dict[str, Any]:
        found = newest(self.states)
        return {} if found is None else json.loads((found / STATE_FACTS_FILE).read_text())


def _keep_state(folder: Path, offer: StateOffer, file: Path) -> None:
    facts = {
        "round": offer.record.round,
        "digest": offer.digest,
        "size": offer.size,
        "sha256": offer.sha256,
    }
    make_folder(folder)
    file.replace(folder / STATE_FILE)
    with (folder / STATE_FILE).open("rb") as moved:
        os.fsync(moved.fileno())
    write_atomically(folder / STATE_FACTS_FILE, json.dumps(facts).encode())
