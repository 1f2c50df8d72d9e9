"""What is dealt out to data parts: files, or pieces of long ones, and how pieces are read.

A piece of text is a document. Pieces of JSON lines are ranges of bytes, in which every line counts
that begins there, however long it is. Pieces of Parquet are row groups. Compressed files, JSON that
is no list of lines, and data sets of the hub have no pieces but their files.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

TEXT_BYTES = (1 << 12, 1 << 18)  # a long text is cut into pieces between these sizes
LINES_BYTES = (1 << 16, 1 << 24)  # and a file of lines between these
PIECES_PER_PART = 8  # so that there is something to shuffle

_ROWS_AT_ONCE = 256


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
        return cut_bytes(files, parts, LINES_BYTES), _opener(_lines, text_field)
    if format == "parquet":
        return [group for file in files for group in _row_groups(file)], _opener(
            _rows_of_group, text_field
        )
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


def _lines(piece: Piece, text_field: str) -> Iterator[dict[str, Any]]:
    with Path(piece.path).open("rb") as lines:
        if piece.start:
            lines.seek(piece.start - 1)
            lines.readline()  # of the piece before; nothing but its end where one begins here
        while lines.tell() < piece.stop and (line := lines.readline()):
            if line.strip():
                row: Any = json.loads(line.decode("utf-8", "replace"))
                if not isinstance(row, dict):
                    raise ValueError(f"{piece.path}: a line is no JSON object")
                fields = cast("dict[str, Any]", row)
                yield {text_field: fields[text_field]} if text_field in fields else fields


def _row_groups(file: Piece) -> list[Piece]:
    """Of one Parquet file, by the bytes of their values."""
    metadata: Any = importlib.import_module("pyarrow.parquet").read_metadata(file.path)
    sizes = [metadata.row_group(each).total_byte_size for each in range(metadata.num_row_groups)]
    ends = [*accumulate(sizes)]
    return [
        Piece(file.name, file.path, end - size, end) for size, end in zip(sizes, ends, strict=True)
    ]


def _rows_of_group(piece: Piece, text_field: str) -> Iterator[dict[str, Any]]:
    whole = Piece(piece.name, piece.path, 0, 0)
    number = [group.start for group in _row_groups(whole)].index(piece.start)
    with importlib.import_module("pyarrow.parquet").ParquetFile(piece.path) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[number], columns=[text_field]):
            yield from batch.to_pylist()
