"""What an archive keeps of a stage's chain from before its current generation, for the history.

Nobody needs these records to go on: they are given only to those who ask for `older` ones, to list
a run from its first round, or to replay it. Oldest first they make room for newer ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dilocox.peer.archive_generation import Generation
from dilocox.peer.kept_chain import OLDER_NAME
from dilocox.peer.record_folder import RecordFolder


class OlderRecords:
    """Records that end where a generation begins; empty where its chain is not theirs."""

    def __init__(self, folder: Path, keep_bytes: int):
        """folder: of the stage. keep_bytes: of records, the newest four aside."""
        self.records = RecordFolder(folder / OLDER_NAME)
        self._keep_bytes = keep_bytes

    def keep(self, log: RecordFolder) -> None:
        """Take over all records of a generation that is given up for its state alone."""
        self._take(log, log.rounds())

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

    def _take(self, log: RecordFolder, rounds: list[int]) -> None:
        self.records.share(log, rounds)
        self.records.prune(sys.maxsize, self._keep_bytes)
