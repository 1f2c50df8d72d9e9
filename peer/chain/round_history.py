"""The history of a run's rounds: when each was committed, after how many tokens, with what loss.

Records say who gave what, but neither when nor how well the model did. Every bootstrap keeps that
beside its archive in `history.jsonl`: for each round a line, a JSON array in the order of
`HistoryRow`, appended when the round is seen to come and once more when its losses are known; of
several lines of one round the last counts. A line that a crash cut is dropped at the next start. A
rollback removes nothing: a row names the rules it was made under, and the manifest says which of
them count.

Whoever asks a bootstrap gets pages of it, each signed with the key behind its peer id, so that a
page can be shown to others, too. What bootstraps say is merged (`merge`): the witness, the
operator's, is believed; the others fill in what it has not seen. None of it has any say in which
chain wins.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from pydantic import Field, TypeAdapter

from dilocox.dht.files import disk_fault, make_folder, write_atomically
from dilocox.dht.identity import Identity, public_key_of, verify
from dilocox.dht.manifest import Manifest
from dilocox.dht.rpc import REFUSED, Blob, CallRefused, Client
from dilocox.peer.chain.stated import MAX_LOSS, MAX_NUMBER
from dilocox.peer.chain.uploads import Source

logger = logging.getLogger(__name__)

FILE = "history.jsonl"
PURPOSE = b"dilocox history\0"
MAX_ROWS = 100_000
PAGE_ROWS = 8192
MAX_PAGE_BYTES = 4 << 20
PAGE_LIMIT_S = 60.0
FIRST = -2  # less than any round
SHORT_DIGEST = 16  # hex digits
SPARE_LINES = 1000
MAX_TIME = 1e11  # which is still a date

Count = Annotated[int, Field(ge=0, le=2**53)]
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]
Number = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Time = Annotated[float, Field(ge=0, le=MAX_TIME)]


class HistoryRow(NamedTuple):
    """A committed round; None is what this bootstrap has not seen.

    round: -1 for the initial weights. rules: as in the record. digest: how that of stage 0's record
    begins. at: when it came, run time in seconds. tokens: of the whole chain of stage 0. train,
    validation: medians of what heads stated, nats a token. tokens_per_s: of the rounds that were
    found together with it, since those before. peers, replicas: in view when it came.
    record_bytes: of the records of all stages. voids: void rounds that peers told since the row
    before.
    """

    round: Annotated[int, Field(ge=-1, le=2**53)]
    rules: Count
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
    at: Time | None
    tokens: Count
    train: Loss | None = None
    validation: Loss | None = None
    tokens_per_s: Number | None = None
    peers: Count | None = None
    replicas: Count | None = None
    record_bytes: Count | None = None
    voids: Count | None = None

    def filled(self, other: HistoryRow) -> HistoryRow:
        """The same with what only the other one knows."""
        pairs = zip(self, other, strict=True)
        return HistoryRow._make(theirs if mine is None else mine for mine, theirs in pairs)


_ROW = TypeAdapter(HistoryRow)
_COLUMNS = len(HistoryRow._fields)


def parsed_row(given: object) -> HistoryRow:
    """A row of a file or an answer, checked; further columns, of newer versions, are passed over.

    Raises ValueError for what is none.
    """
    if not isinstance(given, list):
        raise ValueError("a row of the history is no list")
    return _ROW.validate_python(cast("list[object]", given)[:_COLUMNS])


class RoundHistory:
    """The file; any thread may call. Nothing is written before the first `add`."""

    def __init__(self, path: Path, manifest: Manifest):
        """Raises EnvironmentFault where the file cannot be read."""
        self._path = path
        self._manifest = manifest
        self._lock = threading.RLock()
        self._rows: dict[tuple[int, int], HistoryRow] = {}  # by rules and round
        self._counting: list[HistoryRow] | None = None
        self._lines = 0  # in the file
        self._damaged = False
        self._load()

    def revise(self, manifest: Manifest) -> bool:
        """Go on under a newer revision; whether it has set rounds aside."""
        with self._lock:
            before, self._manifest, self._counting = self.rows(), manifest, None
            return self.rows() != before

    def counts(self, rules: int, number: int) -> bool:
        """Whether no rollback has set this round aside."""
        return not self._manifest.rolled_back(number, rules)

    def get(self, rules: int, number: int) -> HistoryRow | None:
        return self._rows.get((rules, number))

    def newest(self, count: int) -> list[HistoryRow]:
        """The last rows that count, oldest first."""
        return self.rows()[-count:]

    def rows(self) -> list[HistoryRow]:
        """All that count, by round."""
        with self._lock:
            if self._counting is None:
                rows = sorted(self._rows.items())  # of two with one number the later rules' counts
                found = {row.round: row for key, row in rows if self.counts(*key)}
                self._counting = [found[number] for number in sorted(found)]
            return self._counting

    def add(self, row: HistoryRow) -> None:
        """Put in a row, or another one of the same round; EnvironmentFault if the disk is full."""
        with self._lock:
            self._put(row)
            if self._damaged or self._lines > 4 * len(self._rows) + SPARE_LINES:
                rows = [_line(each) for _, each in sorted(self._rows.items())]
                write_atomically(self._path, b"".join(rows))
                self._lines, self._damaged = len(rows), False
                return
            self._damaged = True  # half a line may be there
            make_folder(self._path.parent)
            try:
                with self._path.open("ab") as file:
                    file.write(_line(row))
            except OSError as error:
                raise disk_fault(self._path, error) from error
            self._lines, self._damaged = self._lines + 1, False

    def _put(self, row: HistoryRow) -> None:
        key, gone = (row.rules, row.round), list[tuple[int, int]]()
        before, self._rows[key], self._counting = self._rows.get(key), row, None
        if before is not None and before.digest != row.digest:
            # the archive has changed to another chain: what followed there is of no chain any more
            gone = [each for each in self._rows if each[0] == row.rules and each > key]
        if len(self._rows) > MAX_ROWS:
            gone = sorted(self._rows)[1 : MAX_ROWS // 2 : 2]
        for each in gone:
            del self._rows[each]

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_fault(self._path, error) from error
        lines, damaged = data.splitlines(), 0
        for line in lines:
            try:
                self._put(parsed_row(json.loads(line)))
            except ValueError:
                damaged += 1
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self._path, damaged)
        self._lines = len(lines)
        self._damaged = bool(damaged) or not data.endswith(b"\n")


def _line(row: HistoryRow) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# ---- giving and asking ---------------------------------------------------------------------------
def signed_page(history: RoundHistory, identity: Identity, run: str, after: int) -> Source:
    """The rows after a round, as many as go into one answer."""
    rows = history.rows()
    start = bisect_right(rows, after, key=lambda row: row.round)
    page, more = rows[start : start + PAGE_ROWS], start + PAGE_ROWS < len(rows)
    facts = {"run": run, "after": after, "more": more, "rows": page}
    data = json.dumps(facts, separators=(",", ":")).encode()
    return Source.of(data, signature=identity.sign(PURPOSE + data))


async def ask_history(
    client: Client,
    bootstraps: Sequence[str],
    run: str,
    manifest: Manifest,
    after: int = FIRST,
    silent: set[str] | None = None,
) -> list[HistoryRow]:
    """What bootstraps have after a round, merged; the first one, the witness, is believed.

    Empty where none answers or all are of an older version. client: with stage 0's namespace.
    silent: who gave none before, for those who ask again and again: only news of that is said.
    """
    found: dict[int, HistoryRow] = {}
    silent = set() if silent is None else silent
    for peer in bootstraps:
        merge(found, await _told_by(client, peer, run, after, silent), manifest)
    return [found[number] for number in sorted(found)]


def merge(rows: dict[int, HistoryRow], more: Iterable[HistoryRow], manifest: Manifest) -> None:
    """Take in what another bootstrap says where these rows, by round, say nothing; but no rounds
    after the newest of them.
    """
    newest = max(rows, default=None)
    for row in more:
        mine = rows.get(row.round)
        later = newest is not None and row.round > newest
        if later or manifest.rolled_back(row.round, row.rules):
            continue
        if mine is None:
            rows[row.round] = row
        elif mine.digest == row.digest:
            rows[row.round] = mine.filled(row)


async def _told_by(
    client: Client, peer: str, run: str, after: int, silent: set[str]
) -> list[HistoryRow]:
    rows: list[HistoryRow] = []
    try:
        while len(rows) < MAX_ROWS:
            want = {"what": "history", "after": after}
            asked = client.fetch(peer, want, limit_bytes=MAX_PAGE_BYTES)
            blob = await asyncio.wait_for(asked, PAGE_LIMIT_S)
            if blob is None:  # of an older version, or there is no round yet
                break
            page, more = checked_page(blob, peer, run, after)
            rows += page
            if not more or not page:
                break
            after = page[-1].round
    except REFUSED as error:
        if peer not in silent:
            reason = (str(error) or type(error).__name__).replace(peer, "it")
            logger.info("no history from bootstrap %s yet: %s", peer[-6:], reason)
        silent.add(peer)
    else:
        if peer in silent:
            logger.info("bootstrap %s gives its history now", peer[-6:])
        silent.discard(peer)
    return rows


def checked_page(blob: Blob, peer: str, run: str, after: int) -> tuple[list[HistoryRow], bool]:
    """The rows of an answer, and whether there are more. CallRefused: it is not signed by this
    peer, not an answer to this question, or no history.
    """
    signature = blob.facts.get("signature")
    signed = isinstance(signature, bytes) and verify(
        public_key_of(peer), PURPOSE + blob.data, signature
    )
    if not signed:
        raise CallRefused(f"the history of {peer} is not signed by it")
    try:
        given: Any = json.loads(blob.data)
        rows = [parsed_row(each) for each in given["rows"][: PAGE_ROWS + 1]]
        of_run, asked, more = given["run"], given["after"], bool(given["more"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CallRefused(f"the history of {peer} makes no sense: {error}"[:300]) from error
    numbers = [after, *(row.round for row in rows)]
    rising = all(early < late for early, late in pairwise(numbers))
    if (of_run, asked) != (run, after) or len(rows) > PAGE_ROWS or not rising:
        raise CallRefused(f"the history of {peer} is no answer to what was asked")
    return rows, more
