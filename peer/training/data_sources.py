"""Where documents come from, which of them are held out, and how the rest is split into data parts.

`datasets` streams them. The rules give the same answer on every machine that sees the same files:

- `stdlib` and local text are lists of pieces: whole files, or cuts of long ones. A piece is one
  document, read as bytes, so newlines and invalid UTF-8 stay what they are. A `stdlib` file
  belongs to the part its name hashes to, so that Pythons whose libraries differ in a few files
  agree on all others; its held-out files are named. The pieces of local text are dealt out in the
  order of a hash of their names.
- JSON lines, Parquet and hub data sets hold one document a row. Their files are dealt out like
  pieces where there is one for every part; with fewer files, their pieces are: ranges of bytes of
  JSON lines, row groups of Parquet (data_pieces.py). Where those are too few, too, or there are
  none (compressed files, the hub), rows are dealt out: row i goes to part i modulo `parts`, in
  file order, and every peer reads all files for its share; so prefer at least as many files as
  parts.
- What is dealt out first is held out: pieces, files or rows up to 1 MiB, or a twentieth of a
  smaller source, and always at least one. No part contains any of it.

The files behind a source are found on this machine, or named by the Hugging Face hub.

JSON lines, Parquet and hub data sets are read by the builders of `datasets`. A builder is made
once, in a cache folder that goes away at once (streaming needs none, and a home that cannot be
written is no obstacle to local data); after that it streams whatever list of files it is given.

The default text, `stdlib`, is the source of the running Python's own standard library. Every
machine that can run a peer has it, so a first run needs no network, no account and no files. It is
a few megabytes of real text with structure worth learning. What is left out: tests, generated
tables (encodings, pydoc topics, build settings), programs beside the library, and the largest
files, each of which would be a noticeable share of one data part.

The held-out part is a list of module names that every supported Python has. The library differs
between Python versions, so its digest belongs beside every validation loss: losses compare only
at equal digests.
"""

import errno
import glob
import hashlib
import importlib
import json
import os
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from dilocox.dht.errors import EnvironmentFault, InvalidInput, reason_of
from dilocox.dht.manifest import DataSpec
from dilocox.dht.manifest_sections import ENDINGS, format_of
from dilocox.peer.training.data_pieces import (
    TEXT_BYTES,
    Opener,
    Piece,
    cut_bytes,
    cut_rows,
    open_bytes,
)

HELD_OUT_MODULES = (
    "argparse",
    "bisect",
    "calendar",
    "csv",
    "email/message",
    "fractions",
    "heapq",
    "html/parser",
    "json/decoder",
    "logging/handlers",
    "queue",
    "shlex",
    "statistics",
    "textwrap",
    "unittest/case",
)
"""Modules whose files are never trained on: about 5 % of the text, from many corners of the
library.
"""

MAX_FILE_BYTES = 150_000

_LEFT_OUT_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "idlelib",
        "distutils",
        "turtledemo",
    }
)
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def library_files(library: Path | None = None) -> tuple[list[Piece], list[Piece]]:
    """List the training files and the held-out files, each sorted by name.

    Args:
        library: the library's folder; the running Python's when None.

    Raises:
        EnvironmentFault: this Python carries no sources (zipped, or stripped for a small image).
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    held_out_names = {f"{module}.py" for module in HELD_OUT_MODULES}
    training: list[Piece] = []
    held_out: list[Piece] = []
    for path in _source_paths(library):
        name, size = path.relative_to(library).as_posix(), path.stat().st_size
        if 0 < size <= MAX_FILE_BYTES:
            files = held_out if name in held_out_names else training
            files.append(Piece(name, str(path), 0, size))
    if not training or not held_out:
        raise EnvironmentFault(
            f"the standard library of this Python, {library}, has no sources (zipped or stripped): "
            "give text of your own with --data, or data.source in run.yaml, or use a full Python"
        )
    return sorted(training), sorted(held_out)


def _source_paths(library: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(library):
        # Pruned in place, so that a site-packages of a hundred thousand files is never walked.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and not name.startswith(_LEFT_OUT_PREFIXES) and path.is_file():
                yield path


_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
HUB_ANSWER_S = 10.0


def find_files(spec: DataSpec) -> list[Piece]:
    """List the files of a local source, sorted by name; empty ones are passed over.

    The source is a file, a glob pattern, or a folder: of a folder every file below it counts that
    is not hidden and, for JSON lines and Parquet, has such an ending. Names are relative to the
    folder that all files share, so that they do not depend on where the data lies.

    Raises:
        InvalidInput: nothing is found, or a text file is compressed.
    """
    source = Path(spec.source).expanduser()
    if source.is_dir():
        endings = ("",) if spec.format == "text" else ENDINGS[spec.format]
        paths = [path for path in _shown_below(source) if path.name.endswith(endings)]
    elif source.is_file():
        paths = [source]
    else:
        paths = [Path(path) for path in glob.glob(str(source), recursive=True)]  # noqa: PTH207
    paths = [path for path in paths if path.is_file() and path.stat().st_size]
    if not paths:
        raise InvalidInput(
            f"{spec.SOURCE} {spec.source!r}: no {spec.format} file is there with anything in it; "
            "give a file, a folder or a quoted pattern"
        )
    packed = [path for path in paths if spec.format == "text" and path.name.endswith(_PACKED)]
    if packed:
        raise InvalidInput(f"{spec.SOURCE}: {packed[0]} is compressed; unpack text files first")
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return sorted(
        Piece(path.absolute().relative_to(shared).as_posix(), str(path), 0, path.stat().st_size)
        for path in paths
    )


def _shown_below(folder: Path) -> Iterator[Path]:
    """All in a folder that is not hidden."""
    for path in folder.rglob("*"):
        if not any(word.startswith(".") for word in path.relative_to(folder).parts):
            yield path


def with_formats(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run.yaml, with the format of each folder that a source names, by the endings
    of the files in it. Quick: it reads none of them.

    Raises InvalidInput: a path is not there, or the files in a folder say no one format.
    """
    match given.get("data"):
        case {**data}:
            more = data.get("more")
            if isinstance(more, list):
                each = enumerate(cast("list[Any]", more))
                data["more"] = [_with_format(one, f"data.more[{n}]") for n, one in each]
            return given | {"data": _with_format(data, "data")}
        case _:
            return given


def _with_format(given: Any, where: str) -> Any:
    match given:
        case {"source": "stdlib"} | {"format": "hub" | "stdlib"}:
            return given
        case {"source": str(source), **rest}:
            path = Path(source).expanduser()
            if not (path.exists() or glob.glob(str(path), recursive=True)):  # noqa: PTH207
                hub = (
                    ""
                    if "format" in rest
                    else f", or for a name on the hub add {where}.format: hub"
                )
                raise InvalidInput(
                    f"{where}.source {source!r} is not on this machine; check the path{hub}"
                )
            return (
                given | {"format": _format_in(path, where)}
                if (path.is_dir() and "format" not in rest)
                else given
            )
        case _:  # for the checks
            return given


def _format_in(folder: Path, where: str) -> str:
    """What all files of a folder are. Other files beside JSON lines or Parquet, which `find_files`
    passes over, do not count; text would be read of all.
    """
    files = [path.name for path in _shown_below(folder) if path.is_file()]
    formats = {format_of(name) for name in files} - {None}
    if len(formats) == 1 and ("text" not in formats or all(map(format_of, files))):
        return str(formats.pop())
    kinds = Counter(Path(name).suffix or "without an ending" for name in files)
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:5]
    found = ", ".join(f"{count} {kind}" for kind, count in most) or "no files"
    ending = next((kind for kind, _ in most if kind.startswith(".")), ".txt")
    raise InvalidInput(
        f"{where}.format is missing, and {str(folder)!r} does not say it (found: {found}); set it "
        "to text (reads every file as it is), json or parquet; a pattern such as "
        f"{folder}/**/*{ending} chooses some of the files"
    )


def _open_table(spec: DataSpec) -> tuple[list[Piece], Opener]:
    """The files of JSON lines, Parquet or a hub data set, and what streams their rows; of the last
    only the list of files is fetched.

    Raises:
        InvalidInput: no such files, data set, subset, split or field.
        EnvironmentFault: the hub does not answer, or the files cannot be read.
    """
    if spec.format == "hub":
        builder = _hub_builder(spec)
        splits: dict[Any, list[str]] = builder.config.data_files or {}
        if spec.split not in splits:
            raise InvalidInput(
                f"data.split: {spec.source!r} has no split {spec.split!r}, only "
                f"{', '.join(map(str, splits)) or 'files that cannot be streamed'}; choose another"
            )
        files = [Piece(url, url, 0, _size(url)) for url in splits[spec.split]]
    else:
        files = find_files(spec)
        with reading(spec), tempfile.TemporaryDirectory() as cache:
            builder = importlib.import_module("datasets").load_dataset_builder(
                spec.format, data_files=glob.escape(files[0].path), cache_dir=cache
            )
    config, alone = builder.config, threading.Lock()

    def open_rows(pieces: Sequence[Piece]) -> Any:
        data_files = importlib.import_module("datasets.data_files")
        listed = data_files.DataFilesList([piece.path for piece in pieces], [])
        with alone:  # a reader that was told to stop may open its next epoch just now
            config.data_files = data_files.DataFilesDict({"train": listed})
            return builder.as_streaming_dataset(split="train")

    if builder.name == "json":
        # Any spelling but "utf-8" makes the reader decode, and so replace what is not UTF-8.
        config.encoding, config.encoding_errors = "UTF-8", "replace"
    elif builder.name == "text":
        config.sample_by, config.encoding_errors = "document", "replace"
    with reading(spec):
        columns = open_rows(files[:1]).column_names
    if columns is not None and spec.text_field not in columns:
        raise _no_field(spec, columns)
    if hasattr(config, "columns"):
        config.columns = [spec.text_field]  # the others are not even downloaded
    return files, open_rows


def _no_field(spec: DataSpec, fields: Iterable[str]) -> InvalidInput:
    return InvalidInput(
        f"data.text_field: {spec.source!r} has no field {spec.text_field!r}; "
        f"it has {', '.join(map(repr, fields))}"
    )


def _size(url: str) -> int:
    # Not known on the hub; there the address names the revision, which tells changed files apart.
    return 0 if "://" in url else Path(url).stat().st_size


def _hub_builder(spec: DataSpec) -> Any:
    if not Path(spec.source).is_dir():  # a data set that was downloaded is as good
        require_hub("dataset", spec.source, spec.SOURCE, revision=spec.revision)
    datasets: Any = importlib.import_module("datasets")
    with reading(spec), tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset_builder(
                spec.source, spec.subset, revision=spec.revision, cache_dir=cache
            )
        except ValueError as error:
            if "BuilderConfig" not in str(error) and "Config name" not in str(error):
                raise
            raise InvalidInput(f"data.subset of {spec.source!r}: {error}") from error


def require_hub(
    kind: Literal["dataset", "model"], name: str, field: str, *, revision: str | None = None
) -> None:
    """Ask the hub once, with a short deadline, whether a repository is there, in that revision.

    What follows would otherwise retry for half a minute before it says that there is no network.

    Raises:
        InvalidInput: the hub answers that there is no such repository, or none for this account.
        HubAway: it does not answer now, or asks for fewer questions.
        EnvironmentFault: it answers something else, or this machine is told not to ask.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        getattr(hub.HfApi(), f"{kind}_info")(name, revision=revision, timeout=HUB_ANSWER_S)
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(
            f"{field} {name!r} has no revision {revision!r} on the Hugging Face hub; name a commit "
            "or tag that it has"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InvalidInput(
            f"{field} {name!r} is neither here nor on the Hugging Face hub; check the name "
            "(a private or gated one needs the environment variable HF_TOKEN)"
        ) from error
    except (OSError, errors.HTTPError) as error:
        fault = HubAway if _passes(error) else EnvironmentFault
        raise fault(
            f"the Hugging Face hub does not answer for {field} {name!r} ({reason_of(error)}); "
            f"check the network, or set {field} to something on this machine"
        ) from error


class HubAway(EnvironmentFault):
    """The hub cannot be read now; it may be later."""


def _passes(error: Exception) -> bool:
    """Whether the hub may be read later, though nothing is changed here."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    if (answer := getattr(error, "response", None)) is not None:
        return answer.status_code in (408, 429) or answer.status_code >= 500
    if isinstance(error, errors.LocalEntryNotFoundError):  # not here, and the hub was not reached
        return True
    read_only = getattr(error, "errno", None) == errno.EROFS
    return not read_only and not isinstance(error, FileNotFoundError | PermissionError)


@contextmanager
def reading(spec: DataSpec) -> Generator[None, None, None]:
    """Turn what reading files or the hub raises into an EnvironmentFault that names the source."""
    dataset_errors: Any = importlib.import_module("datasets.exceptions")
    hub_errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except (OSError, ValueError, dataset_errors.DatasetsError, hub_errors.HTTPError) as error:
        remedy = f"check that its files are whole and of the format that {spec.FORMAT} names"
        kind = EnvironmentFault
        if spec.format == "hub":
            remedy = "check the network, and that HF_HOME names a folder that can be written"
            network = isinstance(error, OSError | hub_errors.HTTPError)
            if network and _passes(error):
                kind = HubAway
        raise kind(
            f"{spec.SOURCE} {spec.source!r} cannot be read ({reason_of(error)}); {remedy}"
        ) from error


HELD_OUT_BYTES = 1 << 20
_HELD_OUT_SHARE = 20  # at most one byte in so many of a source
_LEAST_SHARE = 0.25  # of what parts have on average, where files are cut
_DEALING = 2  # rises where the same files are dealt out otherwise: then saved positions are void


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
            raise _no_field(self._spec, row)
        text = row[self._text_field]
        if isinstance(text, str):
            return text.encode(errors="replace")  # JSON may hold halves of pairs of surrogates
        if text is None or isinstance(text, bytes):
            return text or b""
        raise InvalidInput(
            f"data.text_field: {self._text_field!r} of {self._spec.source!r} holds "
            f"{type(text).__name__}; name a field that holds text"
        )


@dataclass(frozen=True, kw_only=True)
class DataSource:
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
        mine = self.parts[part]
        pieces = sorted(mine, key=lambda each: json_sha256(order, each.name, each.start))
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


def open_source(spec: DataSpec) -> DataSource:
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


def _open_stdlib(spec: DataSpec) -> DataSource:
    training, held_out = library_files()
    parts: list[list[Piece]] = [[] for _ in range(spec.parts)]
    for piece in training:
        parts[int(json_sha256(piece.name), 16) % spec.parts].append(piece)
    return DataSource(
        spec=spec,
        held_out=tuple(held_out),
        parts=tuple(map(tuple, parts)),
        open_pieces=open_bytes,
        fingerprint=_fingerprint(spec, training),
    )


def _open_text(spec: DataSpec) -> DataSource:
    files = find_files(spec)
    pieces = cut_bytes(files, spec.parts, TEXT_BYTES)
    return _deal(spec, pieces, open_bytes, _fingerprint(spec, files))


def _open_tables(spec: DataSpec) -> DataSource:
    pieces, open_rows = _open_table(spec)
    fingerprint = _fingerprint(spec, pieces)
    source = _deal(spec, pieces, open_rows, fingerprint)
    if all(source.parts):
        return source
    with reading(spec):
        cut = cut_rows(spec.format, pieces, spec.parts, spec.text_field)
    if cut is not None and _are_even(source := _deal(spec, *cut, fingerprint)):
        return source
    with reading(spec):
        rows = DocumentStream(open_rows(pieces), spec, lambda row: True)
    known = [piece.stop for piece in pieces if piece.stop]
    budget = _held_out_bytes(known) if known else HELD_OUT_BYTES
    while budget > 0 and (text := rows.read()) is not None:
        budget -= len(text)
    return DataSource(
        spec=spec,
        held_out=tuple(pieces),
        parts=(tuple(pieces),) * spec.parts,
        open_pieces=open_rows,
        fingerprint=fingerprint,
        held_out_rows=rows.rows,
    )


def _are_even(source: DataSource) -> bool:
    """Whether no part is tiny: a writer's last row group may hold a single row."""
    sizes = [sum(piece.size for piece in part) for part in source.parts]
    return all(source.parts) and min(sizes) * len(sizes) >= _LEAST_SHARE * sum(sizes)


def _deal(spec: DataSpec, pieces: list[Piece], open_pieces: Opener, fingerprint: str) -> DataSource:
    """Deal pieces out in the order of their hashes: to the held-out part, then round the parts."""
    pieces = sorted(pieces, key=lambda piece: json_sha256(piece.name, piece.start))
    budget = _held_out_bytes([piece.size for piece in pieces])
    count = 0
    while budget > 0:
        budget -= max(1, pieces[count].size)
        count += 1
    return DataSource(
        spec=spec,
        held_out=tuple(pieces[:count]),
        parts=tuple(tuple(pieces[count + part :: spec.parts]) for part in range(spec.parts)),
        open_pieces=open_pieces,
        fingerprint=fingerprint,
    )


def _held_out_bytes(sizes: Sequence[int]) -> int:
    """How many bytes to hold out of pieces of these sizes: at least 1, which means one piece."""
    return max(1, min(HELD_OUT_BYTES, sum(sizes) // _HELD_OUT_SHARE))


def _fingerprint(spec: DataSpec, files: Sequence[Piece]) -> str:
    listed = sorted((file.name, file.size) for file in files)
    chosen = (spec.subset, spec.revision, spec.split)
    return json_sha256(_DEALING, spec.format, chosen, spec.text_field, spec.parts, listed)


def json_sha256(*words: object) -> str:
    """The sha256 (hex) of a list of these as JSON."""
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()
