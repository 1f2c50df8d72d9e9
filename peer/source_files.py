"""The files behind a source: found on this machine, or named by the Hugging Face hub.

JSON lines, Parquet and hub data sets are read by the builders of `datasets`. A builder is made
once, in a cache folder that goes away at once (streaming needs none, and a home that cannot be
written is no obstacle to local data); after that it streams whatever list of files it is given.
"""

import glob
import importlib
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.stdlib_corpus import SourceFile

_ENDINGS = {
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
    "parquet": (".parquet",),
}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_HUB_ANSWER_S = 10.0


def find_files(spec: DataSpec) -> list[SourceFile]:
    """List the files of a local source, sorted by name; empty ones are passed over.

    The source is a file, a glob pattern, or a folder: of a folder every file below it counts that
    is not hidden and, for JSON lines and Parquet, has such an ending. Names are relative to the
    folder that all files share, so that they do not depend on where the data lies.

    Raises:
        InvalidInput: nothing is found, or a text file is compressed.
    """
    source = Path(spec.source).expanduser()
    endings = _ENDINGS.get(spec.format, ("",))
    if source.is_dir():
        paths = [
            path
            for path in source.rglob("*")
            if path.name.endswith(endings)
            and not any(word.startswith(".") for word in path.relative_to(source).parts)
        ]
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
        SourceFile(path.absolute().relative_to(shared).as_posix(), str(path), path.stat().st_size)
        for path in paths
    )


@dataclass(frozen=True)
class Table:
    """A source of rows: its files (of size 0 where that is unknown), and a builder for them."""

    files: tuple[SourceFile, ...]
    builder: Any

    def stream(self, paths: Sequence[str]) -> Any:
        """Stream the rows of some of the files, in the order given, as an `IterableDataset`."""
        data_files: Any = importlib.import_module("datasets.data_files")
        files = data_files.DataFilesList(list(paths), [])
        self.builder.config.data_files = data_files.DataFilesDict({"train": files})
        return self.builder.as_streaming_dataset(split="train")


def open_table(spec: DataSpec) -> Table:
    """Open JSON lines, Parquet or a hub data set; of the last only the list of files is fetched.

    Raises:
        InvalidInput: no such files, data set, subset, split or field.
        EnvironmentFault: the hub does not answer, or the files cannot be read.
    """
    if spec.format == "hub":
        builder = _hub_builder(spec)
        splits: dict[Any, list[str]] = builder.config.data_files or {}
        if "train" not in splits:
            raise InvalidInput(
                f"{spec.SOURCE} {spec.source!r} has no split 'train', only "
                f"{', '.join(map(str, splits)) or 'files that cannot be streamed'}; choose another"
            )
        table = Table(tuple(SourceFile(url, url, _size(url)) for url in splits["train"]), builder)
    else:
        files = find_files(spec)
        with reading(spec), tempfile.TemporaryDirectory() as cache:
            datasets: Any = importlib.import_module("datasets")
            builder = datasets.load_dataset_builder(
                spec.format, data_files=glob.escape(files[0].path), cache_dir=cache
            )
        table = Table(tuple(files), builder)
    _configure(table, spec)
    return table


def _size(url: str) -> int:
    # Not known on the hub; there the address names the revision, which tells changed files apart.
    return 0 if "://" in url else Path(url).stat().st_size


def _configure(table: Table, spec: DataSpec) -> None:
    config = table.builder.config
    if table.builder.name == "json":
        # Any spelling but "utf-8" makes the reader decode, and so replace what is not UTF-8.
        config.encoding, config.encoding_errors = "UTF-8", "replace"
    elif table.builder.name == "text":
        config.sample_by, config.encoding_errors = "document", "replace"
    with reading(spec):
        columns = table.stream([table.files[0].path]).column_names
    if columns is not None and spec.text_field not in columns:
        raise InvalidInput(
            f"data.text_field: {spec.source!r} has no field {spec.text_field!r}; "
            f"it has {', '.join(map(repr, columns))}"
        )
    if hasattr(config, "columns"):
        config.columns = [spec.text_field]  # the others are not even downloaded


def _hub_builder(spec: DataSpec) -> Any:
    if not Path(spec.source).is_dir():  # a data set that was downloaded is as good
        require_hub("dataset", spec.source, spec.SOURCE)
    datasets: Any = importlib.import_module("datasets")
    with reading(spec), tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset_builder(spec.source, spec.subset, cache_dir=cache)
        except ValueError as error:
            if "BuilderConfig" not in str(error) and "Config name" not in str(error):
                raise
            raise InvalidInput(f"data.subset of {spec.source!r}: {error}") from error


def require_hub(kind: Literal["dataset", "model"], name: str, field: str) -> None:
    """Ask the hub once, with a short deadline, whether a repository is there.

    What follows would otherwise retry for half a minute before it says that there is no network.

    Raises:
        InvalidInput: the hub answers that there is no such repository, or none for this account.
        EnvironmentFault: it does not answer.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        getattr(hub.HfApi(), f"{kind}_info")(name, timeout=_HUB_ANSWER_S)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InvalidInput(
            f"{field} {name!r} is neither here nor on the Hugging Face hub; check the name "
            "(a private or gated one needs the environment variable HF_TOKEN)"
        ) from error
    except (OSError, errors.HTTPError) as error:
        raise EnvironmentFault(
            f"the Hugging Face hub does not answer for {field} {name!r} ({_reason(error)}); "
            f"check the network, or set {field} to something on this machine"
        ) from error


@contextmanager
def reading(spec: DataSpec) -> Generator[None, None, None]:
    """Turn what reading files or the hub raises into an EnvironmentFault that names the source."""
    dataset_errors: Any = importlib.import_module("datasets.exceptions")
    hub_errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except (OSError, ValueError, dataset_errors.DatasetsError, hub_errors.HTTPError) as error:
        mend = f"check that its files are whole and of the format that {spec.FORMAT} names"
        if spec.format == "hub":
            mend = "check the network, and that HF_HOME names a folder that can be written"
        raise EnvironmentFault(
            f"{spec.SOURCE} {spec.source!r} cannot be read ({_reason(error)}); {mend}"
        ) from error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
