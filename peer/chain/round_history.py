"""The history of a run's rounds: when each was committed, after how many tokens, with what loss.

Records say which peer gave what, but neither when it did nor how well the model did. Each bootstrap
keeps that beside its archive in `history.jsonl`: for each round a line, a JSON array in the order
of `HistoryRow`, appended when the round is seen to come and once more when its losses are known; of
several lines of one round the last counts. A line that a crash cut is dropped at the next start. A
rollback removes nothing: a row names the rules it was made under, and the manifest says which of
them count. Between them are lines of `NamedPeer`: what members of records stated of themselves
last, under their signature, so that contributions have names when nobody is there any more. And of
`ModelSample`: what the model wrote, if the operator wants it asked (model_samples.py).

A bootstrap gives pages of it to any caller, each signed with the key behind its peer id, so that a
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
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, cast

from pydantic import AfterValidator, Field, TypeAdapter

from dilocox.dht.errors import reason_of
from dilocox.dht.files import disk_fault, make_folder, write_atomically
from dilocox.dht.identity import Identity, public_key_of, verify
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import MAX_NAME, cut, shown_peer
from dilocox.dht.records import StageRecord
from dilocox.dht.rpc import REFUSED, Blob, CallRefused, Client
from dilocox.dht.wire import MAX_INTEGER
from dilocox.peer.chain.stated_facts import MAX_LOSS, MAX_NUMBER
from dilocox.peer.chain.uploads import Source

logger = logging.getLogger(__name__)

FILE = "history.jsonl"
PURPOSE = b"dilocox history\0"
MAX_ROWS = 100_000
PAGE_ROWS = 8192
MAX_NAMED = 4096  # peers
MAX_PAGE_BYTES = 4 << 20
PAGE_LIMIT_S = 60.0
FIRST = -2  # less than any round
SHORT_DIGEST = 16  # hex digits
SPARE_LINES = 1000
MAX_TIME = 1e11  # which is still a date
MAX_SAMPLES = 64
MAX_LETTERS = 2048  # of a sample

Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]
Number = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Time = Annotated[float, Field(ge=0, le=MAX_TIME)]
Name = Annotated[str, AfterValidator(lambda text: cut(text, MAX_NAME))]


class HistoryRow(NamedTuple):
    """A committed round; None is what this bootstrap has not seen.

    round: -1 for the initial weights. rules: as in the record. digest: how that of stage 0's record
    begins. at: when it came, run time in seconds. tokens: of the whole chain of stage 0. train,
    validation: medians of what heads stated, nats a token. tokens_per_s: of the rounds that were
    found together with it, since those before. peers, replicas: in view when it came.
    record_bytes: of the records of all stages. voids: void rounds that peers told since the row
    before. train_low, train_high: of the train losses near that one; a round has one validation.
    """

    round: Annotated[int, Field(ge=-1, le=MAX_INTEGER)]
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
    train_low: Loss | None = None
    train_high: Loss | None = None

    def filled(self, other: HistoryRow) -> HistoryRow:
        """The same with what only the other one knows."""
        pairs = zip(self, other, strict=True)
        return HistoryRow._make(theirs if mine is None else mine for mine, theirs in pairs)


class NamedPeer(NamedTuple):
    """A peer that is in committed records, by its id, with what it states of itself or did last."""

    peer: Annotated[str, Field(pattern=r"^[1-9A-Za-z]{1,64}$")]
    name: Name = ""
    team: Name = ""

    @classmethod
    def of(cls, peer: str, record: StageRecord) -> NamedPeer:
        return cls(peer, cut(record.name, MAX_NAME), cut(record.team, MAX_NAME))


class ModelSample(NamedTuple):
    """What the model wrote with the weights of a round. at: seconds since the epoch. rules: as in
    `HistoryRow`."""

    round: Count
    rules: Count
    tokens: Count
    at: Time
    prompt: Annotated[str, Field(max_length=512)]
    text: Annotated[str, Field(max_length=MAX_LETTERS)] = ""


def thin_samples(samples: dict[int, ModelSample]) -> None:
    """Of too many, by round, every second one of the older half goes, but for the first."""
    if len(samples) > MAX_SAMPLES:
        for number in sorted(samples)[1 : len(samples) // 2 : 2]:
            del samples[number]


_ROW = TypeAdapter(HistoryRow)
_NAMED = TypeAdapter(NamedPeer)
_SAMPLE = TypeAdapter(ModelSample)
_PARAMETERS = TypeAdapter[int | None](Count | None)
_COLUMNS = len(HistoryRow._fields)


def parsed_row(given: object) -> HistoryRow:
    """A row of a file or an answer, checked; further columns, of newer versions, are passed over.

    Raises ValueError for what is none.
    """
    if not isinstance(given, list):
        raise ValueError("a row of the history is no list")
    row = _ROW.validate_python(cast("list[object]", given)[:_COLUMNS])
    known = [loss for loss in (row.train_low, row.train, row.train_high) if loss is not None]
    if known != sorted(known):
        raise ValueError("a row's train loss is not within its range")
    return row


def parsed_sample(given: object) -> ModelSample:
    """The same for a sample."""
    if not isinstance(given, list):
        raise ValueError("a sample is no list")
    return _SAMPLE.validate_python(cast("list[object]", given)[: len(ModelSample._fields)])


class RoundHistory:
    """The file; any thread may call. Nothing is written before the first `add`."""

    def __init__(self, path: Path, manifest: Manifest):
        """Raises EnvironmentFault where the file cannot be read."""
        self._path = path
        self._manifest = manifest
        self._lock = threading.RLock()
        self._rows: dict[tuple[int, int], HistoryRow] = {}  # by rules and round
        self._named: dict[str, NamedPeer] = {}  # by peer, at the end those in the newest records
        self._samples: dict[int, ModelSample] = {}  # by round
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
            self._write(row)

    def samples(self, after: int = FIRST) -> list[ModelSample]:
        """What the model wrote with the weights of rounds that count and are after this one, by
        round."""
        with self._lock:
            return [
                each
                for number, each in sorted(self._samples.items())
                if number > after and self.counts(each.rules, number)
            ]

    def newest_sample(self, prompt: str) -> ModelSample | None:
        """What the model wrote last after this prompt; None while it was not asked."""
        return next((each for each in reversed(self.samples()) if each.prompt == prompt), None)

    def keep_sample(self, sample: ModelSample) -> None:
        """Take in one; EnvironmentFault if the disk is full."""
        with self._lock:
            self._put_sample(sample)
            self._write(sample)

    def names(self) -> list[NamedPeer]:
        """Of all that stated one."""
        with self._lock:
            return [each for each in self._named.values() if each.name or each.team]

    def credit(self, peers: Iterable[str]) -> None:
        """Keep from now on what these peers, of a record that was committed, say of themselves. Of
        too many those go whose last record is the oldest.
        """
        with self._lock:
            for peer in peers:
                self._name(self._named.get(peer, NamedPeer(peer)))

    def hear(self, told: Mapping[str, StageRecord]) -> None:
        """What peers say of themselves; of those in no record nothing is kept."""
        with self._lock:
            for peer in told.keys() & self._named.keys():
                if (stated := NamedPeer.of(peer, told[peer])) != self._named[peer]:
                    self._named[peer] = stated
                    self._write(stated)

    def _write(self, new: HistoryRow | NamedPeer | ModelSample) -> None:
        if self._damaged or self._lines > 4 * (len(self._rows) + len(self._named)) + SPARE_LINES:
            rows = (each for _, each in sorted(self._rows.items()))
            kept = [*self.names(), *self._samples.values(), *rows]
            write_atomically(self._path, b"".join(map(_line, kept)))
            self._lines, self._damaged = len(kept), False
            return
        self._damaged = True  # half a line may be there
        make_folder(self._path.parent)
        try:
            with self._path.open("ab") as file:
                file.write(_line(new))
        except OSError as error:
            raise disk_fault(self._path, error) from error
        self._lines, self._damaged = self._lines + 1, False

    def _put(self, row: HistoryRow) -> None:
        key, gone = (row.rules, row.round), list[tuple[int, int]]()
        before, self._rows[key], self._counting = self._rows.get(key), row, None
        if before is not None and before.digest != row.digest:
            # the archive has changed to another chain: what followed there is of no chain any more
            gone = [each for each in self._rows if each[0] == row.rules and each > key]
            kept = self._samples.items()
            self._samples = {n: s for n, s in kept if s.rules != row.rules or n < row.round}
        if len(self._rows) > MAX_ROWS:
            gone = sorted(self._rows)[1 : MAX_ROWS // 2 : 2]
        for each in gone:
            del self._rows[each]

    def _put_sample(self, sample: ModelSample) -> None:
        self._samples = {each.round: each for each in (*self.samples(), sample)}
        thin_samples(self._samples)

    def _name(self, stated: NamedPeer) -> None:
        self._named.pop(stated.peer, None)
        self._named[stated.peer] = stated
        if len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]

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
                if line.startswith(b'["'):
                    self._name(_NAMED.validate_json(line))
                elif line.startswith(b"{"):
                    self._put_sample(parsed_sample(json.loads(line)["sample"]))
                else:
                    self._put(parsed_row(json.loads(line)))
            except (ValueError, LookupError):
                damaged += 1
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self._path, damaged)
        self._lines = len(lines)
        self._damaged = bool(damaged) or not data.endswith(b"\n")


def _line(kept: HistoryRow | NamedPeer | ModelSample) -> bytes:
    return _json({"sample": kept} if isinstance(kept, ModelSample) else kept) + b"\n"


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


# ---- giving and asking ---------------------------------------------------------------------------
def signed_page(
    history: RoundHistory, identity: Identity, run: str, after: int, parameters: int | None = None
) -> Source:
    """The rows after a round, as many as go into one answer, and samples of the model, the newest
    in any case; with the first ones all names.
    """
    rows = history.rows()
    start = bisect_right(rows, after, key=lambda row: row.round)
    page, more = rows[start : start + PAGE_ROWS], start + PAGE_ROWS < len(rows)
    answer: dict[str, object] = {"run": run, "after": after, "more": more, "rows": page}
    answer |= {
        "names": history.names() if after == FIRST else [],
        "samples": history.samples(after) or history.samples()[-1:],
        "parameters": parameters,
    }
    data = _json(answer)
    return Source.of(data, signature=identity.sign(PURPOSE + data))


class ToldHistory(NamedTuple):
    """Of a history: rows by round, names by peer, samples by round. parameters: of the model."""

    rows: list[HistoryRow]
    names: dict[str, NamedPeer]
    samples: Mapping[int, ModelSample] = MappingProxyType({})
    parameters: int | None = None

    def with_more(self, other: ToldHistory) -> ToldHistory:
        """With what only the other one says, and its rows after these."""
        return ToldHistory(
            self.rows + other.rows,
            other.names | self.names,
            {**other.samples, **self.samples},
            other.parameters if self.parameters is None else self.parameters,
        )


async def ask_history(
    client: Client,
    bootstraps: Sequence[str],
    run: str,
    manifest: Manifest,
    after: int = FIRST,
    silent: set[str] | None = None,
    witness: str = "",
) -> ToldHistory:
    """What bootstraps have after a round, merged; the witness is asked, and believed, first.

    Empty where none answers or all are of an older version; names come with pages that are asked
    for from FIRST on. client: with stage 0's namespace.
    silent: those that gave none before, for repeated calls: only news of that is said.
    witness: the operator's, which alone asks the model; samples of others are none.
    """
    found, all_told = dict[int, HistoryRow](), ToldHistory([], {})
    silent = set() if silent is None else silent
    for peer in sorted(bootstraps, key=lambda peer: peer != witness):
        told = await _told(client, peer, run, after, silent)
        merge(found, told.rows, manifest)
        all_told = all_told.with_more(told if peer == witness else told._replace(samples={}))
    return all_told._replace(rows=[found[number] for number in sorted(found)])


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


async def _told(client: Client, peer: str, run: str, after: int, silent: set[str]) -> ToldHistory:
    told = ToldHistory([], {})
    try:
        while len(told.rows) < MAX_ROWS:
            want = {"what": "history", "after": after}
            asked = client.fetch(peer, want, limit_bytes=MAX_PAGE_BYTES)
            blob = await asyncio.wait_for(asked, PAGE_LIMIT_S)
            if blob is None:  # of an older version, or there is no round yet
                break
            page, more = checked_page(blob, peer, run, after)
            told = told.with_more(page)
            if not more or not page.rows:
                break
            after = page.rows[-1].round
    except REFUSED as error:
        if peer not in silent:
            reason = reason_of(error).replace(peer, "it")
            logger.info("no history from bootstrap %s yet: %s", shown_peer(peer), reason)
        silent.add(peer)
    else:
        if peer in silent:
            logger.info("bootstrap %s gives its history now", shown_peer(peer))
        silent.discard(peer)
    return told


def checked_page(blob: Blob, peer: str, run: str, after: int) -> tuple[ToldHistory, bool]:
    """What an answer says, and whether there is more. CallRefused: it is not signed by this peer,
    not an answer to this question, or no history.
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
        named = [_NAMED.validate_python(each) for each in given.get("names", [])[:MAX_NAMED]]
        told = [parsed_sample(each) for each in given.get("samples", [])[:MAX_SAMPLES]]
        parameters = _PARAMETERS.validate_python(given.get("parameters"))
        of_run, asked, more = given["run"], given["after"], bool(given["more"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CallRefused(f"the history of {peer} makes no sense: {error}"[:300]) from error
    numbers = [after, *(row.round for row in rows)]
    rising = all(early < late for early, late in pairwise(numbers))
    if (of_run, asked) != (run, after) or len(rows) > PAGE_ROWS or not rising:
        raise CallRefused(f"the history of {peer} is no answer to what was asked")
    samples = {each.round: each for each in told}
    return ToldHistory(rows, {each.peer: each for each in named}, samples, parameters), more
