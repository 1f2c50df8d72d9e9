"""Small sources of every format, and what is in them."""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dilocox.dht.manifest import DataSpec
from dilocox.peer.training.data import Corpus
from dilocox.peer.training.data_sources import open_source

LENGTH = 16
EOS = 1

Writer = Callable[[Path, list[list[str]]], DataSpec]


def write_text(folder: Path, files: list[list[str]]) -> DataSpec:
    for index, documents in enumerate(files):
        (folder / f"{index}.txt").write_text("\n".join(documents))
    return DataSpec(source=str(folder), format="text", parts=3)


def write_json(folder: Path, files: list[list[str]]) -> DataSpec:
    for index, documents in enumerate(files):
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents)]
        (folder / f"{index}.jsonl").write_text("\n".join(lines))
    return DataSpec(source=str(folder), format="json", parts=3)


def write_parquet(folder: Path, files: list[list[str]]) -> DataSpec:
    for index, documents in enumerate(files):
        table = pa.table({"text": documents, "id": range(len(documents))})
        pq.write_table(table, folder / f"{index}.parquet")
    return DataSpec(source=str(folder), format="parquet", parts=3)


def write_hub(folder: Path, files: list[list[str]]) -> DataSpec:
    """A data set as the hub lays it out, on disk: read by the same code as one on the hub."""
    (folder / "data").mkdir()
    for index, documents in enumerate(files):
        pq.write_table(pa.table({"text": documents}), folder / "data" / f"train-{index}.parquet")
    pq.write_table(pa.table({"text": ["never"]}), folder / "data" / "test-0.parquet")
    return DataSpec(source=str(folder), format="hub", parts=3)


WRITERS: dict[str, Writer] = {
    "text": write_text,
    "json": write_json,
    "parquet": write_parquet,
    "hub": write_hub,
}


def documents(count: int, file: int = 0) -> list[str]:
    """Documents of 40 to 120 characters, no two windows of which are alike."""
    digests = [hashlib.sha512(f"{file} {index}".encode()).hexdigest() for index in range(count)]
    return [digest[: 40 + index % 81] for index, digest in enumerate(digests)]


FORMATS = [*WRITERS, "rows"]


def write_source(name: str, folder: Path) -> DataSpec:
    """A local source of three parts in any format; "rows": with fewer files than parts."""
    if name == "rows":
        return write_json(folder, [documents(120, file) for file in range(2)])
    return WRITERS[name](folder, [documents(30, file) for file in range(9)])


def corpus(spec: DataSpec, *, part: int = 0, seed: int = 0, length: int = LENGTH) -> Corpus:
    opened = Corpus(spec, sequence_length=length, microbatch_size=2, seed=seed)
    opened.open_part(part)
    return opened


def take(source: Corpus, count: int) -> torch.Tensor:
    return torch.stack([next(source) for _ in range(count)])


def epoch_documents(spec: DataSpec, part: int, order: str = "0/0") -> list[bytes]:
    stream = open_source(spec).part(part, order)
    read: list[bytes] = []
    while (document := stream.read()) is not None:
        read.append(document)
    return read


def decoded(windows: Iterable[torch.Tensor]) -> list[bytes]:
    return [bytes(int(i) - 3 for i in window.flatten() if i >= 3) for window in windows]


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 300 ids at most, trained here."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(documents(20), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    fast.save_pretrained(folder)
