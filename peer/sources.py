"""Where documents come from, which of them are held out, and how the rest is split into data parts.

`datasets` streams them. The rules give the same answer on every machine that sees the same files:

- `stdlib` and local text are lists of pieces: whole files, or cuts of long ones. A piece is one
  document, read as bytes, so newlines and invalid UTF-8 stay what they are. A `stdlib` file
  belongs to the part its name hashes to, so that Pythons whose libraries differ in a few files
  agree on all others; its held-out files are named. The pieces of local text are dealt out in the
  order of a hash of their names.
- JSON lines, Parquet and hub data sets hold one document a row. Their files are dealt out like
  pieces where there is one for every part. With fewer files rows are: row i goes to part i modulo
  `parts`, in file order, and every peer reads all files for its share, so prefer at least as many
  files as parts.
- What is dealt out first is held out: pieces, files or rows up to 1 MiB, or a twentieth of a
  smaller source, and always at least one. No part contains any of it.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.source_files import find_files, open_table, reading
from dilocox.peer.stdlib_corpus import SourceFile, library_files

HELD_OUT_BYTES = 1 << 20
_HELD_OUT_SHARE = 20  # at most one byte in so many of a source
_PIECE_BYTES = (1 << 12, 1 << 18)  # a long text is cut into pieces between these sizes
_PIECES_PER_PART = 8  # so that there is something to shuffle


class Piece(NamedTuple):
    """What is dealt out: a range of a text's bytes, or a whole file of rows (maybe at a URL)."""

    name: str
    path: str
    start: int
    stop: int


Opener = Callable[[Sequence[Piece]], Any]
"""Opens pieces, in the order given, as a streaming `datasets.IterableDataset`."""


class DocumentStream:
    """The documents of one part in one order, as bytes, with a position that can be saved.

    `rows` counts the rows read so far, those of other parts included.
    """

    def __init__(self, dataset: Any, spec: DataSpec, mine: Callable[[int], bool]):
        self.rows = 0
        self._dataset = dataset
        self._spec = spec
        self._text_field = "text" if spec.format in ("stdlib", "text") else spec.text_field
        self._mine = mine
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._start: dict[str, Any] = dataset.state_dict()

    def read(self) -> bytes | None:
        """Return the next document, never an empty one, or None at the end."""
        while (row := self._next_row()) is not None:
            if self._mine(self.rows - 1) and (text := self._text_of(row)):
                return text
        return None

    def skip(self, rows: int) -> None:
        """Pass over so many rows, or to the end."""
        for _ in range(rows):
            if self._next_row() is None:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the position: JSON-able, of no use for other files or another order of them."""
        # Until its first row an IterableDataset does not tell that it was told where to start.
        state = self._start if self._iterator is None else self._dataset.state_dict()
        return {"rows": self.rows, "dataset": deepcopy(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` returned."""
        self.rows = int(state["rows"])
        self._start = deepcopy(state["dataset"])
        self._dataset.load_state_dict(deepcopy(self._start))
        self._iterator = None

    def _next_row(self) -> dict[str, Any] | None:
        with reading(self._spec):
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            row = next(self._iterator, None)
        self.rows += row is not None
        return row

    def _text_of(self, row: dict[str, Any]) -> bytes:
        if self._text_field not in row:
            raise InvalidInput(
                f"data.text_field: {self._spec.source!r} has no field {self._text_field!r}; "
                f"it has {', '.join(map(repr, row))}"
            )
        text = row[self._text_field]
        if isinstance(text, str):
            return text.encode()
        if text is None or isinstance(text, bytes):
            return text or b""
        raise InvalidInput(
            f"data.text_field: {self._text_field!r} of {self._spec.source!r} holds "
            f"{type(text).__name__}; name a field that holds text"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source that was opened: what is held out, what each part holds, and a digest of its files.

    Where rows are split, not pieces, the held-out part and every part list the same files, and
    the first `held_out_rows` rows are held out.
    """

    spec: DataSpec
    held_out: tuple[Piece, ...]
    parts: tuple[tuple[Piece, ...], ...]
    open_pieces: Opener
    fingerprint: str
    held_out_rows: int = 0

    def part(self, part: int, order: str) -> DocumentStream:
        """Open a part; `order` seeds the order of its pieces (rows that are split keep theirs).

        Raises:
            InvalidInput: there are fewer pieces than parts, and this one has none.
        """
        if not self.parts[part]:
            fewer = f"lower data.parts (now {self.spec.parts}) or " if self.spec.parts > 1 else ""
            raise InvalidInput(
                f"data part {part} of {self.spec.SOURCE} {self.spec.source!r} is empty; "
                f"{fewer}give more text"
            )
        first, parts = self.held_out_rows, self.spec.parts
        if first:
            return DocumentStream(
                self._open(self.parts[part]),
                self.spec,
                lambda row: row >= first and (row - first) % parts == part,
            )
        pieces = sorted(self.parts[part], key=lambda piece: _hash(order, piece.name, piece.start))
        return DocumentStream(self._open(pieces), self.spec, lambda row: True)

    def held_out_documents(self) -> Iterator[bytes]:
        """Yield the held-out documents; of a large held-out file of rows only the first MiB."""
        rows, bounded = self.held_out_rows, self.spec.format not in ("stdlib", "text")
        stream = DocumentStream(
            self._open(self.held_out), self.spec, lambda row: not rows or row < rows
        )
        total = 0
        while not (rows and stream.rows >= rows) and (text := stream.read()) is not None:
            yield text
            total += len(text)
            if bounded and total >= HELD_OUT_BYTES:
                return

    def _open(self, pieces: Sequence[Piece]) -> Any:
        with reading(self.spec):
            return self.open_pieces(pieces)


def open_source(spec: DataSpec) -> Source:
    """Find the files of a source and deal them out; reads no more of them than held-out rows.

    Raises:
        InvalidInput: nothing matches, or the files are not what the manifest says.
        EnvironmentFault: the files or the hub cannot be read, or this Python has no sources.
    """
    if spec.format == "stdlib":
        return _open_stdlib(spec)
    if spec.format == "text":
        return _open_text(spec)
    return _open_tables(spec)


def _open_stdlib(spec: DataSpec) -> Source:
    training, held_out = library_files()
    parts: list[list[Piece]] = [[] for _ in range(spec.parts)]
    for piece in map(_whole, training):
        parts[int(_hash(piece.name), 16) % spec.parts].append(piece)
    return Source(
        spec=spec,
        held_out=tuple(map(_whole, held_out)),
        parts=tuple(map(tuple, parts)),
        open_pieces=_open_bytes,
        fingerprint=_fingerprint(spec, training),
    )


def _open_text(spec: DataSpec) -> Source:
    files = find_files(spec)
    least, most = _PIECE_BYTES
    total = sum(file.size for file in files)
    size = max(least, min(most, total // (_PIECES_PER_PART * spec.parts)))
    pieces = [
        Piece(file.name, file.path, start, min(start + size, file.size))
        for file in files
        for start in range(0, file.size, size)
    ]
    return _dealt(spec, pieces, _open_bytes, _fingerprint(spec, files))


def _open_tables(spec: DataSpec) -> Source:
    table = open_table(spec)

    def open_rows(pieces: Sequence[Piece]) -> Any:
        return table.stream([piece.path for piece in pieces])

    pieces = list(map(_whole, table.files))
    fingerprint = _fingerprint(spec, table.files)
    source = _dealt(spec, pieces, open_rows, fingerprint)
    if all(source.parts):
        return source
    with reading(spec):
        rows = DocumentStream(open_rows(pieces), spec, lambda row: True)
    known = [piece.stop for piece in pieces if piece.stop]
    budget = _held_out_bytes(known) if known else HELD_OUT_BYTES
    while budget > 0 and (text := rows.read()) is not None:
        budget -= len(text)
    return Source(
        spec=spec,
        held_out=tuple(pieces),
        parts=(tuple(pieces),) * spec.parts,
        open_pieces=open_rows,
        fingerprint=fingerprint,
        held_out_rows=rows.rows,
    )


def _dealt(spec: DataSpec, pieces: list[Piece], open_pieces: Opener, fingerprint: str) -> Source:
    """Deal pieces out in the order of their hashes: to the held-out part, then round the parts."""
    pieces = sorted(pieces, key=lambda piece: _hash(piece.name, piece.start))
    budget = _held_out_bytes([piece.stop - piece.start for piece in pieces])
    count = 0
    while budget > 0:
        budget -= max(1, pieces[count].stop - pieces[count].start)
        count += 1
    return Source(
        spec=spec,
        held_out=tuple(pieces[:count]),
        parts=tuple(tuple(pieces[count + part :: spec.parts]) for part in range(spec.parts)),
        open_pieces=open_pieces,
        fingerprint=fingerprint,
    )


def _held_out_bytes(sizes: Sequence[int]) -> int:
    """How many bytes to hold out of pieces of these sizes: at least 1, which means one piece."""
    return max(1, min(HELD_OUT_BYTES, sum(sizes) // _HELD_OUT_SHARE))


def _open_bytes(pieces: Sequence[Piece]) -> Any:
    def read(row: dict[str, Any]) -> dict[str, bytes]:
        with Path(row["path"]).open("rb") as file:
            file.seek(row["start"])
            return {"text": file.read(row["stop"] - row["start"])}

    datasets: Any = importlib.import_module("datasets")
    columns = {key: [getattr(piece, key) for piece in pieces] for key in ("path", "start", "stop")}
    rows = datasets.Dataset.from_dict(columns).to_iterable_dataset()
    return rows.map(read, remove_columns=list(columns))


def _whole(file: SourceFile) -> Piece:
    return Piece(file.name, file.path, 0, file.size)


def _fingerprint(spec: DataSpec, files: Sequence[SourceFile]) -> str:
    listed = sorted((file.name, file.size) for file in files)
    return _hash(spec.format, spec.subset, spec.text_field, spec.parts, listed)


def _hash(*words: object) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()
