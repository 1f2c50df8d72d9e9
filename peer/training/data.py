"""Training data: documents in, microbatches of token ids out, at a position that can be saved.

A corpus reads one data part at a time for as long as it is asked: at the part's end the next epoch
begins, in another order. The order depends on the run's seed, the part and the epoch alone.

Documents are tokenized, joined with the end-of-text id and gathered on a **shelf** of a quarter
of a million tokens; the shelf is cut into windows and these are shuffled. So a microbatch mixes
documents, and yet a position is exact and small: where in the files the shelf began and how many
of its windows were used. (A shuffle buffer of `datasets` forgets its contents on resume.)
Neighbouring windows share one token, so that every token of a shelf is predicted once; tokens
after the last whole window are not.

A tokenizer makes token ids of a document's bytes. No text becomes a special token, whatever it
spells: a document that contains `</s>` must not end there.

The validation loss is that of the anchor, on the run's fixed held-out windows.
"""

# torch leaves `split` and `flatten` unannotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.averaging.data_lease import place_of, position_of
from dilocox.peer.training.data_sources import DocumentStream, open_source, require_hub
from dilocox.pipeline.checkpoint import split_commit
from dilocox.pipeline.stage_worker import next_token_loss

logger = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.int32]


class ByteTokenizer:
    """The ids of `ByT5Tokenizer` (byte + 3), made from the bytes themselves: no files, no loops."""

    eos_id = 1
    vocab_size = 384  # ByT5's extra ids lie above the 3 + 256 that occur

    def encode(self, document: bytes) -> TokenIds:
        return np.frombuffer(document, dtype=np.uint8).astype(np.int32) + 3


class PretrainedTokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, name: str):
        self._tokenizer = _load_pretrained(name)
        if self._tokenizer.eos_token_id is None:
            raise InvalidInput(
                f"data.tokenizer {name!r} has no end-of-text token to join documents with; "
                "choose another, or set its eos_token"
            )
        self.eos_id = int(self._tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)

    def encode(self, document: bytes) -> TokenIds:
        """Return the ids of the document read as UTF-8; what is not UTF-8 is replaced."""
        text = document.decode("utf-8", errors="replace")
        encoded = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return np.asarray(encoded["input_ids"], dtype=np.int32)


Tokenizer: TypeAlias = ByteTokenizer | PretrainedTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """Open `byt5`, or a Hugging Face tokenizer by its folder or its name on the hub.

    Raises:
        InvalidInput: there is no such tokenizer, or it cannot be used.
        EnvironmentFault: it is not on this machine and the hub does not answer.
    """
    return ByteTokenizer() if name == "byt5" else PretrainedTokenizer(name)


def check_vocabulary(name: str, tokenizer: Tokenizer, model: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` where a model has no row for some of the tokenizer's ids."""
    rows = int(model["vocab_size"])
    if tokenizer.vocab_size > rows:
        raise InvalidInput(
            f"data.tokenizer {name!r} has {tokenizer.vocab_size} ids, and model.vocab_size is "
            f"{rows}: set model.vocab_size to {tokenizer.vocab_size} or more, or choose a smaller "
            "tokenizer"
        )


def _load_pretrained(name: str) -> Any:
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    options: dict[str, Any] = {"trust_remote_code": False}
    if not Path(name).is_dir():
        name, options["revision"] = split_commit(name)
    try:
        return auto.from_pretrained(name, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise InvalidInput(f"data.tokenizer: {name} holds no tokenizer: {error}") from error
    require_hub("model", name, "data.tokenizer")
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"data.tokenizer {name!r} cannot be loaded: {error}") from error


SHELF_TOKENS = 1 << 18
_MIN_SHELF_WINDOWS = 32  # for very long windows


class Corpus(Iterator[torch.Tensor]):
    """The training text of a run, one data part at a time; an endless iterator of microbatches.

    Each microbatch is int64 [microbatch_size, sequence_length + 1], on the CPU. `open_part` or
    `load_state_dict` comes before the first. For one thread.

    Raises:
        InvalidInput, EnvironmentFault: as `open_source` and `open_tokenizer` do.
    """

    def __init__(self, spec: DataSpec, *, sequence_length: int, microbatch_size: int, seed: int):
        self._spec = spec
        self._source = open_source(spec)
        self.tokenizer = open_tokenizer(spec.tokenizer)
        self._sequence_length = sequence_length
        self._microbatch_size = microbatch_size
        self._seed = seed
        self.part = -1  # none is open
        self.epoch = 0  # how often that part was read to its end
        self._stream: DocumentStream
        self._shelf: TokenIds  # [windows, sequence_length + 1]
        self._shelf_start: dict[str, Any] = {}
        self._used = 0  # windows of the shelf

    def open_part(self, part: int, position: int = 0) -> None:
        """Read from this part from now on, from its start or from a `position` of any peer.

        Raises:
            InvalidInput: the run has no such part, or it is too small for one window.
        """
        if not 0 <= part < self._spec.parts:
            raise InvalidInput(f"data part {part} is not one of 0 to {self._spec.parts - 1}")
        self.part = part
        epoch, rows = place_of(position)
        self._start_epoch(epoch)
        self._stream.skip(rows)
        self._fill_shelf()

    @property
    def position(self) -> int:
        """Where the current shelf began: one integer, for a peer that takes the part over."""
        return position_of(self.epoch, int(self._shelf_start["rows"]))

    def __next__(self) -> torch.Tensor:
        """Return the next microbatch."""
        if self.part < 0:
            raise RuntimeError("no data part is open: call open_part first")
        taken: list[TokenIds] = []
        count = self._microbatch_size
        while count:
            if self._used >= len(self._shelf):
                self._fill_shelf()
            windows = self._shelf[self._used : self._used + count]
            self._used += len(windows)
            count -= len(windows)
            taken.append(windows)
        return _tensor(np.concatenate(taken))

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position: plain JSON-able values."""
        return {
            "identity": self._identity(),
            "part": self.part,
            "epoch": self.epoch,
            "shelf_start": deepcopy(self._shelf_start),
            "used": self._used,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on exactly where `state_dict` was called; return whether that is possible.

        It is not, and nothing changes but for a warning, when the state is of other files, another
        tokenizer, sequence length or seed. The caller then opens a part from its start.
        """
        if state.get("identity") != self._identity():
            logger.warning(
                "the saved data position is not of the files, tokenizer, sequence length and seed "
                "that %s %r has now; the data part starts from its beginning",
                self._spec.SOURCE,
                self._spec.source,
            )
            return False
        self.part = state["part"]
        self._start_epoch(state["epoch"])
        self._stream.load_state_dict(state["shelf_start"])
        self._fill_shelf(state["used"])
        return True

    def _identity(self) -> str:
        words = [self._source.fingerprint, self._spec.tokenizer, self._sequence_length, self._seed]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._stream = self._source.part(self.part, f"{self._seed}/{epoch}")

    def _fill_shelf(self, used: int = 0) -> None:
        """Gather the next shelf, from the next epoch if this one is over."""
        while not len(shelf := self._next_shelf()):
            if self._shelf_start["rows"] == 0:
                raise InvalidInput(
                    f"data part {self.part} of {self._spec.source!r} holds less than one "
                    f"window of {self._sequence_length + 1} tokens; lower data.parts (now "
                    f"{self._spec.parts}) or batch.sequence_length, or give more text"
                )
            self._start_epoch(self.epoch + 1)
        key = f"{self._seed}/{self.part}/{self.epoch}/{self._shelf_start['rows']}"
        seed = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
        # numpy promises that RandomState's sequences never change: a resume may meet a newer numpy.
        self._shelf = shelf[np.random.RandomState(seed).permutation(len(shelf))]
        self._used = used

    def _next_shelf(self) -> TokenIds:
        """Documents, joined and cut into windows that share their last and first token."""
        self._shelf_start = self._stream.state_dict()
        length = self._sequence_length
        wanted = max(SHELF_TOKENS, _MIN_SHELF_WINDOWS * length)
        documents: list[TokenIds] = []
        while wanted > 0 and (document := self._stream.read()) is not None:
            documents.append(_with_eos(self.tokenizer, document))
            wanted -= len(documents[-1])
        tokens = _joined(documents)
        if len(tokens) <= length:
            return np.empty((0, length + 1), dtype=np.int32)
        return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def held_out_digest(spec: DataSpec) -> str:
    """Return the sha256 (hex) of the held-out documents, and of their names for `stdlib`.

    Validation losses compare only where it is equal.
    """
    source = open_source(spec)
    named = spec.format == "stdlib"
    names = [piece.name for piece in source.held_out] if named else []
    digest = hashlib.sha256(json.dumps(names).encode())
    for document in source.held_out_documents():
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return digest.hexdigest()


def held_out_windows(spec: DataSpec, sequence_length: int, count: int = 64) -> torch.Tensor:
    """Return the windows of the validation loss, int64 [count, sequence_length + 1].

    They are spread evenly over the held-out part, and overlap where it is short.

    Raises:
        InvalidInput: the held-out part is shorter than one window.
    """
    tokenizer = open_tokenizer(spec.tokenizer)
    documents = open_source(spec).held_out_documents()
    tokens = _joined([_with_eos(tokenizer, document) for document in documents])
    last = len(tokens) - (sequence_length + 1)
    if last < 0:
        raise InvalidInput(
            f"the held-out part of {spec.source!r} holds {len(tokens)} tokens, less than one "
            f"window of {sequence_length + 1}; lower batch.sequence_length or give more text"
        )
    starts = [last * index // max(1, count - 1) for index in range(count)]
    windows = np.stack([tokens[start : start + sequence_length + 1] for start in starts])
    return _tensor(windows)


def _with_eos(tokenizer: Tokenizer, document: bytes) -> TokenIds:
    return np.append(tokenizer.encode(document), np.int32(tokenizer.eos_id))


def _joined(documents: list[TokenIds]) -> TokenIds:
    return np.concatenate(documents) if documents else np.empty(0, dtype=np.int32)


def _tensor(windows: TokenIds) -> torch.Tensor:
    return torch.from_numpy(windows.astype(np.int64))  # pyright: ignore[reportUnknownMemberType]


BATCH_WINDOWS = 8  # fixed, so that every peer sums in the same order


def batches_of(windows: Tensor) -> list[Tensor]:
    """Held-out windows int64 [n, t + 1] in the batches that every peer evaluates."""
    return list(windows.split(BATCH_WINDOWS))


@torch.no_grad()
def validation_loss(logits_of: Callable[[Tensor], Tensor], windows: Tensor) -> float:
    """Mean nats a token.

    Args:
        logits_of: token ids int64 [b, t] to logits [b, t, vocabulary].
        windows: int64 [n, t + 1], on the device of the model.
    """
    total = 0.0
    for batch in batches_of(windows):
        total += float(next_token_loss(logits_of(batch[:, :-1]), batch, "sum"))
    return total / (windows.shape[0] * (windows.shape[1] - 1))


@contextmanager
def weights_replaced(live: Tensor, other: Tensor) -> Generator[None]:
    """For a while the model whose parameters are views of `live` [n] has the weights of `other`."""
    kept = live.clone()
    live.copy_(other)
    try:
        yield
    finally:
        live.copy_(kept)
