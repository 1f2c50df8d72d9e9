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

from dilocox.dht.errors import InvalidInput
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

Count = Annotated[int, Field(ge=0, le=2**53)]
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]
Number = Annotated[float, Field(ge=0, le=MAX_NUMBER)]


class HistoryRow(NamedTuple):
    """A committed round; None is what this bootstrap has not seen.

    round: -1 for the initial weights. rules: as in the record. digest: how that of stage 0's record
    begins. at: when it came, run time in seconds. tokens: of the whole chain of stage 0. train,
    validation: medians of what heads stated, nats a token. tokens_per_s: the round's tokens over
    the time since the one before. peers, replicas: in view when it came. record_bytes: of the
    records of all stages. voids: void rounds that peers told since the row before.
    """

    round: Annotated[int, Field(ge=-1, le=2**53)]
    rules: Count
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
    at: Number | None
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


def _line(row: HistoryRow) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode()


class RoundHistory:
    """The file of one bootstrap, and what is given of it. Any thread may call."""

    def __init__(self, path: Path, identity: Identity, run: str, manifest: Manifest):
        self._path = path
        self._identity = identity
        self._run = run
        self._manifest = manifest
        self._lock = threading.RLock()
        self._rows: dict[tuple[int, int], bytes] = {}  # by rules and round: lines take least memory
        self._counting: list[tuple[int, bytes]] | None = None
        self._lines = 0  # in the file
        self._damaged = False
        self._load()

    def revise(self, manifest: Manifest) -> None:
        """Go on under a newer revision, which may have set rounds aside."""
        with self._lock:
            self._manifest, self._counting = manifest, None

    def counts(self, number: int, rules: int) -> bool:
        """Whether no rollback has set a round aside that was made under these rules."""
        return not self._manifest.rolled_back(number, rules)

    def newest(self, count: int) -> list[HistoryRow]:
        """The last rows that count, oldest first."""
        with self._lock:
            return [parsed_row(json.loads(line)) for _, line in self._that_count()[-count:]]

    def add(self, row: HistoryRow) -> None:
        """Put in a row, or another one of the same round; EnvironmentFault if the disk is full."""
        with self._lock:
            line = _line(row)
            self._put(row, line)
            if self._damaged or self._lines > 4 * len(self._rows) + SPARE_LINES:
                self._write_anew()
                return
            self._damaged = True  # half a line may be there
            make_folder(self._path.parent)
            try:
                with self._path.open("ab") as file:
                    file.write(line + b"\n")
            except OSError as error:
                raise disk_fault(self._path, error) from error
            self._damaged = False
            self._lines += 1

    def page(self, after: int) -> Source:
        """The rows that count after a round, as many as go into one answer, signed."""
        with self._lock:
            rows = self._that_count()
            start = bisect_right(rows, after, key=lambda row: row[0])
            lines = [line for _, line in rows[start : start + PAGE_ROWS]]
            more = start + PAGE_ROWS < len(rows)
        facts = {"run": self._run, "after": after, "more": more}
        data = json.dumps(facts).encode()[:-1] + b', "rows": [' + b",".join(lines) + b"]}"
        return Source.of(data, signature=self._identity.sign(PURPOSE + data))

    def _that_count(self) -> list[tuple[int, bytes]]:
        if self._counting is None:
            rows = sorted(self._rows.items())  # of two with one number the later rules' counts
            found = {key[1]: line for key, line in rows if self.counts(key[1], key[0])}
            self._counting = sorted(found.items())
        return self._counting

    def _put(self, row: HistoryRow, line: bytes) -> None:
        key = (row.rules, row.round)
        before, self._rows[key] = self._rows.get(key), line
        gone: list[tuple[int, int]] = []
        if before is not None and json.loads(before)[2] != row.digest:
            # the archive has changed to another chain: what followed there is of no chain any more
            gone = [each for each in self._rows if each[0] == row.rules and each > key]
        if len(self._rows) > MAX_ROWS:
            gone = sorted(self._rows)[1 : MAX_ROWS // 2 : 2]
        for each in gone:
            del self._rows[each]
        last = self._counting[-1][0] if self._counting else FIRST
        if (
            gone
            or self._counting is None
            or row.round < last
            or not self.counts(row.round, row.rules)
        ):
            self._counting = None
        elif row.round > last:
            self._counting.append((row.round, line))
        else:
            self._counting[-1] = (row.round, line)

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_fault(self._path, error) from error
        damaged = 0
        for line in data.splitlines():
            self._lines += 1
            try:
                self._put(parsed_row(json.loads(line)), line)
            except ValueError:
                damaged += 1
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self._path, damaged)
        self._damaged = bool(damaged) or not data.endswith(b"\n")

    def _write_anew(self) -> None:
        lines = [line for _, line in sorted(self._rows.items())]
        write_atomically(self._path, b"\n".join([*lines, b""]))
        self._lines, self._damaged = len(lines), False


def kept_rows(folder: Path, manifest: Manifest) -> list[HistoryRow]:
    """What a bootstrap's archive folder has of it, as far as it counts; the file stays as it is."""
    rows: dict[int, HistoryRow] = {}
    try:
        data = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidInput(f"{folder / FILE}: cannot be read ({error.strerror})") from error
    for line in data.splitlines():
        try:
            row = parsed_row(json.loads(line))
        except ValueError:  # its owner may be writing it
            continue
        if not manifest.rolled_back(row.round, row.rules):
            rows[row.round] = row
    return [rows[number] for number in sorted(rows)]


# ---- asking --------------------------------------------------------------------------------------
async def ask_history(
    client: Client, bootstraps: Sequence[str], run: str, manifest: Manifest, after: int = FIRST
) -> list[HistoryRow]:
    """What bootstraps have after a round, merged; the first one, the witness, is believed.

    Empty where none answers or all are of an older version. client: with stage 0's namespace.
    """
    found: dict[int, HistoryRow] = {}
    for peer in bootstraps:
        merge(found, await _told_by(client, peer, run, after), manifest)
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


async def _told_by(client: Client, peer: str, run: str, after: int) -> list[HistoryRow]:
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
        logger.info("no history from %s: %s", peer[-6:], error or type(error).__name__)
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
