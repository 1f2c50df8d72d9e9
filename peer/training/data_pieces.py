"""What is dealt out to data parts: files, or pieces of long ones, and how pieces are read. Apart
from data_sources.py: a source says where documents are, this says which part each belongs to.

A piece of text is a document. Pieces of JSON lines are ranges of bytes that begin with a
line, and pieces of Parquet row groups. Compressed files, JSON that
is no list of lines, and data sets of the hub have no pieces but their files.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

TEXT_BYTES = (1 << 12, 1 << 18)  # a long text is cut into pieces between these sizes
LINES_BYTES = (1 << 16, 1 << 24)  # and a file of lines between these
PIECES_PER_PART = 8  # so that there is something to shuffle

_ROWS_AT_ONCE = 256  # of a row group at most,
_BYTES_AT_ONCE = 1 << 24  # and so many bytes of rows that are as long as they are on average


class Piece(NamedTuple):
    """What is dealt out: a range of a file's bytes, or a whole file, maybe of rows or at a URL.

    name: the file's, the same on every machine. stop: 0 of a file whose size is not known. Of a row
    group the bytes are those of its values, as they lie one group after the other.
    """

    name: str
    path: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Opener = Callable[[Sequence[Piece]], Any]
"""Opens pieces, in the order given, as a streaming `datasets.IterableDataset`."""


def cut_bytes(files: Sequence[Piece], parts: int, bounds: tuple[int, int]) -> list[Piece]:
    """Files in pieces of one size, between these bounds, some of them for each part."""
    least, most = bounds
    total = sum(file.size for file in files)
    size = max(least, min(most, total // (PIECES_PER_PART * parts)))
    return [
        Piece(file.name, file.path, start, min(start + size, file.size))
        for file in files
        for start in range(0, file.size, size)
    ]


def open_bytes(pieces: Sequence[Piece]) -> Any:
    """Each piece is one row."""

    def read(row: dict[str, Any]) -> dict[str, bytes]:
        with Path(row["path"]).open("rb") as file:
            file.seek(row["start"])
            return {"text": file.read(row["stop"] - row["start"])}

    datasets: Any = importlib.import_module("datasets")
    columns = {key: [getattr(piece, key) for piece in pieces] for key in ("path", "start", "stop")}
    rows = datasets.Dataset.from_dict(columns).to_iterable_dataset()
    return rows.map(read, remove_columns=list(columns))


def cut_rows(
    format: str,
    files: Sequence[Piece],
    parts: int,
    text_field: str,
) -> tuple[list[Piece], Opener] | None:
    """Local files of rows in pieces, and what streams their rows; None where they cannot be cut.

    Raises OSError and ValueError for files that are not what they are said to be.
    """
    if format == "json" and all(map(_is_lines, files)):
        return _cut_lines(files, parts), _opener(_rows_of_lines, text_field)
    if format == "parquet":
        groups = [group for file in files for group in _row_groups(file)]
        return groups, _opener(_rows_of_group, text_field)
    return None


def _opener(read: Callable[[Piece, str], Iterator[dict[str, Any]]], text_field: str) -> Opener:
    def rows(pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            yield from read(Piece(*piece), text_field)

    def open_pieces(pieces: Sequence[Piece]) -> Any:
        generator: Any = importlib.import_module("datasets.packaged_modules.generator.generator")
        # its folder is not used, but would be made in a home that may not be writable
        with tempfile.TemporaryDirectory() as cache:
            builder = generator.Generator(
                cache_dir=cache, generator=rows, gen_kwargs={"pieces": list(pieces)}
            )
        return builder.as_streaming_dataset(split="train")

    return open_pieces


def _is_lines(file: Piece) -> bool:
    """Whether each line of a file is an object: its first one is."""
    with Path(file.path).open("rb") as lines:
        try:
            return isinstance(json.loads(lines.readline(LINES_BYTES[1])), dict)
        except ValueError:  # it is compressed, too, or one array over many lines
            return False


def _cut_lines(files: Sequence[Piece], parts: int) -> list[Piece]:
    """Files of lines in pieces that begin with one: cut in its middle, a long line would leave
    pieces without any, and a part of only such pieces nothing to train on.
    """
    ends = {file.path: file.stop for file in files}
    pieces: list[Piece] = []
    for piece in reversed(cut_bytes(files, parts, LINES_BYTES)):
        if (start := _first_line(piece)) is not None:
            pieces.append(piece._replace(start=start, stop=ends[piece.path]))
            ends[piece.path] = start
    return pieces


def _first_line(piece: Piece) -> int | None:
    """Where the first line begins that begins in it, but for blank ones."""
    with Path(piece.path).open("rb") as lines:
        if piece.start:
            lines.seek(piece.start - 1)
            if not lines.readline(piece.size).endswith(b"\n"):
                return None  # it lies within a line
        while (start := lines.tell()) < piece.stop:
            if lines.readline().strip():
                return start
    return None


def _rows_of_lines(piece: Piece, text_field: str) -> Iterator[dict[str, Any]]:
    with Path(piece.path).open("rb") as lines:
        lines.seek(piece.start)
        while (start := lines.tell()) < piece.stop and (line := lines.readline()):
            try:
                row = _row_of(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{piece.path}, the line at byte {start}: {error}") from error
            # as for the other readers a row without the field is one without text
            yield {text_field: row.get(text_field)}


def _row_of(line: bytes) -> dict[str, Any]:
    """The object in a line; an empty one for a line without anything."""
    text = line.removeprefix(BOM_UTF8).decode("utf-8", "replace").strip()
    # NaN is how some programs write that there is nothing
    row: Any = json.loads(text or "{}", parse_constant=lambda _: None)
    if row is not None and not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    return cast("dict[str, Any]", row or {})


def _row_groups(file: Piece) -> dict[Piece, int]:
    """The row groups of a Parquet file that have rows, by number."""
    metadata: Any = importlib.import_module("pyarrow.parquet").read_metadata(file.path)
    groups: dict[Piece, int] = {}
    start = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stop = start + max(1, group.total_byte_size)
        if group.num_rows:
            groups[Piece(file.name, file.path, start, stop)] = number
        start = stop
    return groups


def _rows_of_group(piece: Piece, text_field: str) -> Iterator[dict[str, Any]]:
    number = _row_groups(piece)[piece]
    with importlib.import_module("pyarrow.parquet").ParquetFile(piece.path) as file:
        of_bytes = _BYTES_AT_ONCE * file.metadata.row_group(number).num_rows // piece.size
        at_once = max(1, min(_ROWS_AT_ONCE, of_bytes))
        for batch in file.iter_batches(at_once, row_groups=[number], columns=[text_field]):
            yield from batch.to_pylist()
