"""Fewer files than parts: byte ranges of lines, row groups; each part reads its own alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import DataSpec
from dilocox.peer.training import data_pieces as pieces_module
from dilocox.peer.training.data_sources import DataSource, DocumentStream, find_files, open_source

PARTS, ROWS, ROWS_OF_A_GROUP = 4, 600, 10
LEAST_BYTES = 256


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "LINES_BYTES", (LEAST_BYTES, 1 << 24))


def texts() -> list[str]:
    """Rows that differ, with borders of pieces at any place in them; one spans several pieces."""
    made = [f"{row} " + '\N{SNOWMAN}é\\n"x' * (row % 7) for row in range(ROWS)]
    made[ROWS // 2] += "y" * 5 * LEAST_BYTES
    return made


def lines(folder: Path, rows: list[str]) -> DataSpec:
    path = folder / "all.jsonl"
    made = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in rows]
    path.write_text("\n".join(made) + "\n\n")
    return DataSpec(source=str(path), format="json", parts=PARTS)


def groups(folder: Path, rows: list[str]) -> DataSpec:
    path = folder / "all.parquet"
    table = pa.table({"text": rows, "id": range(len(rows))})
    pq.write_table(table, path, row_group_size=ROWS_OF_A_GROUP)
    return DataSpec(source=str(path), format="parquet", parts=PARTS)


def read(stream: DocumentStream) -> list[bytes]:
    documents: list[bytes] = []
    while (document := stream.read()) is not None:
        documents.append(document)
    return documents


def everything(source: DataSource) -> list[str]:
    parts = [read(source.part(part, "order")) for part in range(PARTS)]
    assert all(parts)
    held_out = [*source.held_out_documents()]
    return sorted(text.decode() for documents in [held_out, *parts] for text in documents)


Writer = Callable[[Path, list[str]], DataSpec]
both = pytest.mark.parametrize("write", [lines, groups])


@both
def test_each_row_is_in_one_part_or_held_out(tmp_path: Path, write: Writer) -> None:
    source = open_source(write(tmp_path, texts()))
    assert source.held_out_rows == 0  # or every part would read the whole file
    assert everything(source) == sorted(texts())
    taken = Counter((piece.name, piece.start) for part in source.parts for piece in part)
    assert max(taken.values()) == 1 and len(taken) >= PARTS


@both
def test_pieces_come_in_another_order_each_epoch(tmp_path: Path, write: Writer) -> None:
    source = open_source(write(tmp_path, texts()))
    first, second = (read(source.part(1, order)) for order in ("7/0", "7/1"))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_part_reads_no_piece_of_another_one(tmp_path: Path) -> None:
    spec = lines(tmp_path, [f"{row:0200}" for row in range(ROWS)])
    source, path = open_source(spec), Path(spec.source)
    whole = path.read_bytes()
    wanted = read(source.part(2, "order"))
    mine = [(piece.start, piece.stop) for piece in source.parts[2]]
    spoilt = bytearray(whole)
    for at, byte in enumerate(whole):
        # a line counts where it begins, and may end in the next piece
        near = any(start <= at < stop + LEAST_BYTES for start, stop in mine)
        if byte != ord("\n") and not near:
            spoilt[at] = ord("x")
    assert bytes(spoilt).count(b"x") > len(whole) // 4
    path.write_bytes(spoilt)
    assert read(source.part(2, "order")) == wanted


@both
@pytest.mark.parametrize("count", [0, 3, 71])
def test_a_position_is_exact(tmp_path: Path, write: Writer, count: int) -> None:
    source = open_source(write(tmp_path, texts()))
    whole = read(source.part(0, "order"))
    stream = source.part(0, "order")
    for _ in range(count):
        stream.read()
    state = json.loads(json.dumps(stream.state_dict()))
    again, skipped = source.part(0, "order"), source.part(0, "order")
    again.load_state_dict(state)
    skipped.skip(state["rows"])
    assert read(again) == read(skipped) == whole[count:]


@both
def test_empty_rows_are_passed_over(tmp_path: Path, write: Writer) -> None:
    rows = [text if number % 3 else "" for number, text in enumerate(texts())]
    assert everything(open_source(write(tmp_path, rows))) == sorted(filter(None, rows))


@pytest.mark.parametrize("count", range(PARTS + 1, 5 * PARTS, 3))
def test_no_part_is_empty_where_lines_are_longer_than_pieces(tmp_path: Path, count: int) -> None:
    """Most pieces lie within a line, and whoever got only such had nothing to train on."""
    rows = [f"{number} {'z' * 9 * LEAST_BYTES * PARTS}" for number in range(count)]
    source = open_source(lines(tmp_path, rows))
    assert everything(source) == sorted(rows)
    assert source.held_out_rows == 0


@pytest.mark.parametrize("use_dictionary", [False, True])  # empty groups have 0 bytes, or a few
def test_groups_without_rows_are_nobodys(tmp_path: Path, use_dictionary: bool) -> None:
    path = tmp_path / "all.parquet"
    table = pa.table({"text": texts()})
    with pq.ParquetWriter(path, table.schema, use_dictionary=use_dictionary) as writer:
        for start in range(0, ROWS, ROWS_OF_A_GROUP):
            writer.write_table(table.slice(start, 0))
            writer.write_table(table.slice(start, ROWS_OF_A_GROUP))
    source = open_source(DataSpec(source=str(path), format="parquet", parts=PARTS))
    assert source.held_out_rows == 0
    assert everything(source) == sorted(texts())


@pytest.mark.parametrize("full", range(PARTS, 2 * PARTS))
def test_no_part_is_one_tiny_group(tmp_path: Path, full: int) -> None:
    """A writer's last group may hold a single row."""
    rows = [f"{row} " + "w" * 999 for row in range(full * ROWS_OF_A_GROUP + 1)]
    source = open_source(groups(tmp_path, rows))
    assert everything(source) == sorted(rows)
    sizes = [sum(piece.size for piece in part) for part in source.parts]
    assert min(sizes) * PARTS >= sum(sizes) / 4


def test_invalid_utf_8_is_replaced(tmp_path: Path) -> None:
    spec = lines(tmp_path, ["caf\N{REPLACEMENT CHARACTER}" for _ in range(ROWS)])
    path = Path(spec.source)
    path.write_bytes(path.read_bytes().replace("\N{REPLACEMENT CHARACTER}".encode(), b"\xff\xff"))
    assert set(everything(open_source(spec))) == {"caf" + 2 * "\N{REPLACEMENT CHARACTER}"}


def whole_array(folder: Path) -> DataSpec:
    path = folder / "all.json"
    path.write_text(json.dumps([{"text": text} for text in texts()], indent=1))
    return DataSpec(source=str(path), format="json", parts=PARTS)


def packed(folder: Path) -> DataSpec:
    spec = lines(folder, texts())
    path = Path(spec.source)
    small = path.with_suffix(".jsonl.gz")
    small.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return DataSpec(source=str(small), format="json", parts=PARTS)


def one_group(folder: Path) -> DataSpec:
    path = folder / "all.parquet"
    pq.write_table(pa.table({"text": texts()}), path)
    return DataSpec(source=str(path), format="parquet", parts=PARTS)


@pytest.mark.parametrize("write", [whole_array, packed, one_group])
def test_what_cannot_be_cut_is_dealt_out_by_rows(
    tmp_path: Path, write: Callable[[Path], DataSpec]
) -> None:
    source = open_source(write(tmp_path))
    assert source.held_out_rows > 0
    assert everything(source) == sorted(texts())


def test_what_is_wrong_in_a_piece_is_named(tmp_path: Path) -> None:
    spec = lines(tmp_path, texts())
    with Path(spec.source).open("a") as file:
        file.write('{"text": "cut o')
    with pytest.raises(EnvironmentFault, match=r"all\.jsonl, the line at byte \d{4,}: Untermin"):
        everything(open_source(spec))


def test_strange_lines_in_the_middle_of_a_file_end_no_run(tmp_path: Path) -> None:
    """Whatever is met after days of training; the other reader sees the first MB alone."""
    path = tmp_path / "all.jsonl"
    strange = [
        b'{"body": 1}\n',
        b'{"text": null}\n',
        b'{"text": NaN}\n',
        b"null\n",
        b"  \r\n",
        b'{"text": "line feed", "score": NaN}\r\n',
        b'{"text": "half \\ud800 of a pair"}\n',
        '{"text": "\N{LINE SEPARATOR}"}\n'.encode(),
    ]
    sound = [json.dumps({"text": text}).encode() + b"\n" for text in texts()]
    path.write_bytes(b"\xef\xbb\xbf" + b"".join([*sound[:300], *strange, *sound[300:]]))
    spec = DataSpec(source=str(path), format="json", parts=PARTS)
    cut = pieces_module.cut_rows("json", find_files(spec), PARTS, "text")
    assert cut is not None
    pieces, open_pieces = cut
    more = ["line feed", "half ? of a pair", "\N{LINE SEPARATOR}"]
    found = read(DocumentStream(open_pieces(pieces), spec, lambda row: True))
    assert sorted(text.decode() for text in found) == sorted([*texts(), *more])


def test_long_rows_of_a_group_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """256 at once, as long as they may be, were more than a machine has memory for."""
    path = tmp_path / "all.parquet"
    table = pa.table({"text": [f"{row} " + "x" * (1 << 20) for row in range(64)]})
    pq.write_table(table, path, write_batch_size=1, use_dictionary=False)  # a page for each
    del table
    spec = DataSpec(source=str(path), format="parquet", parts=1)
    cut = pieces_module.cut_rows("parquet", find_files(spec), 1, "text")
    assert cut is not None
    pieces, open_pieces = cut
    before = pa.total_allocated_bytes()
    rows = iter(open_pieces(pieces))
    assert next(rows)["text"].startswith("0 ")
    assert pa.total_allocated_bytes() - before < 40 << 20
    assert [row["text"].split(" ")[0] for row in rows] == [str(row) for row in range(1, 64)]
