"""Training data: documents in, microbatches of token ids out, at a position that can be saved.

A corpus reads one data part at a time for as long as it is asked: at the part's end the next epoch
begins, in another order. The order depends on the run's seed, the part and the epoch alone.

Documents are tokenized, joined with the end-of-text id and gathered in a **buffer** of a quarter of
a million tokens; the buffer is cut into windows and these are shuffled. So a microbatch mixes
documents, and yet a position is exact and small: where in the files the buffer began and how many
of its windows were used. (A shuffle buffer of `datasets` forgets its contents on resume.)
Neighbouring windows share one token, so that every token of a buffer is predicted once; tokens
after the last whole window are not. A thread of its own makes the next buffers while one is used,
so that no step waits for a disk, the hub or a tokenizer.

Short documents are tokenized many at a time, and long ones in slices: each call waits anew for
Python's lock, which other threads have, and one for 50 MB of text would take gigabytes.

A tokenizer makes token ids of a document's bytes. No text becomes a special token, whatever it
spells: a document that contains `</s>` must not end there.

The validation loss is that of the anchor, on the run's fixed held-out windows.
"""

# torch leaves `split` and `tolist` unannotated.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.dht.names import cut
from dilocox.peer.averaging.data_lease import place_of, position_of
from dilocox.peer.training.data_mixture import MixedSource, MixedStream, open_mixture
from dilocox.peer.training.data_sources import (
    DocumentStream,
    HubAway,
    json_sha256,
    require_hub,
)
from dilocox.peer.training.read_ahead import ReadAhead, TokenBuffer
from dilocox.pipeline.pretrained import split_commit
from dilocox.pipeline.stage_worker import summed_loss

logger = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.int32]


class ByteTokenizer:
    """The ids of `ByT5Tokenizer` (byte + 3), made from the bytes themselves: no files, no loops."""

    eos_id = 1
    vocab_size = 384  # ByT5's extra ids lie above the 3 + 256 that occur

    def encode(self, document: bytes) -> TokenIds:
        return np.frombuffer(document, dtype=np.uint8).astype(np.int32) + 3

    def encode_all(self, documents: Sequence[bytes]) -> list[TokenIds]:
        return [self.encode(document) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each - 3 for each in ids if 3 <= each < 259).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {}  # the ids follow from the bytes


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
        return self.encode_all([document])[0]

    def encode_all(self, documents: Sequence[bytes]) -> list[TokenIds]:
        """`encode` of each, in one call, which gives up Python's lock once: beside a busy thread
        short documents one by one wait for it many times as long as they compute.
        """
        if not documents:
            return []
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        """Write its files, from which it can be opened again."""
        self._tokenizer.save_pretrained(str(folder))


Tokenizer: TypeAlias = ByteTokenizer | PretrainedTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """Open `byt5`, or a Hugging Face tokenizer by its folder or its name on the hub.

    Raises:
        InvalidInput: there is no such tokenizer, or it cannot be used.
        EnvironmentFault: it is not on this machine and the hub does not answer.
    """
    return ByteTokenizer() if name == "byt5" else PretrainedTokenizer(name)


_PROBE = "The 3 naïve foxes\n\tjump(over) == 1_024.5\r\n ☃漢字 \x00".encode()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the sha256 (hex) of a tokenizer's vocabulary, its end of text and what it makes of
    that vocabulary and of a line of text: equal where two machines make the same ids, whatever
    their files look like.
    """
    vocabulary = tokenizer.vocabulary()
    text = _PROBE + "\n".join(sorted(vocabulary)).encode(errors="replace")
    ids = tokenizer.encode(text).tolist()
    return json_sha256(sorted(vocabulary.items()), tokenizer.eos_id, ids)


def check_tokenizer(data: DataSpec, tokenizer: Tokenizer, model: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` where a model has no row for some of the tokenizer's ids, or where it is
    not the tokenizer that the run began with.
    """
    rows = int(model["vocab_size"])
    if tokenizer.vocab_size > rows:
        raise InvalidInput(
            f"data.tokenizer {data.tokenizer!r} has {tokenizer.vocab_size} ids, and "
            f"model.vocab_size is {rows}: set model.vocab_size to {tokenizer.vocab_size} or more, "
            "or choose a smaller tokenizer"
        )
    if data.end_of_text not in (None, tokenizer.eos_id):
        raise InvalidInput(
            f"data.end_of_text is {data.end_of_text}, and data.tokenizer {data.tokenizer!r} ends "
            f"documents with {tokenizer.eos_id}: leave it out, `dilocox bootstrap` fills it in"
        )
    found = tokenizer_digest(tokenizer)
    if data.tokenizer_digest not in ("", found):
        raise InvalidInput(
            f"data.tokenizer {data.tokenizer!r} here ({found[:12]}...) makes other ids than the "
            f"run's ({data.tokenizer_digest[:12]}...): its files were changed since the run began; "
            "get those that the operator has, or leave data.tokenizer_digest out of a new run"
        )


def _load_pretrained(name: str) -> Any:
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    # a batch would else be spread over all cores, beside the training that it is to keep supplied
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options: dict[str, Any] = {"trust_remote_code": False}
    if not Path(name).is_dir():
        name, options["revision"] = split_commit(name)
    # of files that are not what they should be, or need a library, it raises anything
    try:
        return auto.from_pretrained(name, local_files_only=True, **options)
    except Exception as error:
        if Path(name).is_dir():
            raise InvalidInput(f"data.tokenizer: {name} holds no tokenizer: {error!r}") from error
    require_hub("model", name, "data.tokenizer")
    try:
        return auto.from_pretrained(name, **options)
    except Exception as error:
        raise InvalidInput(f"data.tokenizer {name!r} cannot be loaded: {error!r}") from error


BUFFER_TOKENS = 1 << 18
ENCODED_BYTES = 1 << 20  # that are tokenized at once: meanwhile each takes a hundred times as much
_MIN_BUFFER_WINDOWS = 32  # for very long windows
ROWS_AT_ONCE = 1 << 12  # that are passed over
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0  # where the hub gives no answer


@dataclass(frozen=True)
class _Coming:
    """A part that was opened: of its first buffer so many windows were used before."""

    part: int
    ahead: ReadAhead
    used: int


@dataclass(frozen=True, kw_only=True)
class _PartReader:
    """Makes buffers of one part's documents; knows nothing of its caller, which may be gone."""

    source: MixedSource
    tokenizer: Tokenizer
    part: int
    sequence_length: int
    seed: int

    def open(self, epoch: int) -> DocumentStream | MixedStream:
        return self.source.part(self.part, f"{self.seed}/{epoch}")

    def patient_buffers(
        self, epoch: int, rows: int = 0, start: dict[str, Any] | None = None
    ) -> Iterator[TokenBuffer | None]:
        """`buffers`; while the hub cannot be read they pause, and go on where they were."""
        pause_s, made = FIRST_PAUSE_S, self.buffers(epoch, rows, start)
        newest, again = None, False
        while True:
            try:
                buffer = next(made)
            except HubAway as error:
                logger.warning("%s; trying again in %.0f s", error, pause_s)
                end = time.monotonic() + pause_s
                while time.monotonic() < end:
                    time.sleep(min(1.0, pause_s))
                    yield None
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                again = newest is not None
                if newest is None:
                    made = self.buffers(epoch, rows, start)
                else:
                    made = self.buffers(newest.epoch, start=newest.start)
                continue
            if buffer is not None and again:  # it was given before
                again = False
                continue
            if buffer is not None:
                newest, pause_s = buffer, FIRST_PAUSE_S
            yield buffer

    def buffers(
        self, epoch: int, rows: int = 0, start: dict[str, Any] | None = None
    ) -> Iterator[TokenBuffer | None]:
        """The buffers from a place in an epoch on, without end: the next epoch's follow those of
        this one. start: what a stream's `state_dict` said there; else so many rows are passed over,
        which are read for that.
        """
        stream = self.open(epoch)
        if start is not None:
            stream.load_state_dict(start)
        else:
            for done in range(0, rows, ROWS_AT_ONCE):
                stream.skip(min(ROWS_AT_ONCE, rows - done))
                yield None
        while True:
            start = stream.state_dict()
            if len(windows := self._windows(stream)):
                key = f"{self.seed}/{self.part}/{epoch}/{start['rows']}"
                seed = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
                # numpy promises that RandomState's sequences never change: a resume may meet a
                # newer numpy.
                order = np.random.RandomState(seed).permutation(len(windows))
                yield TokenBuffer(windows[order], epoch, start)
            elif start["rows"] == 0:
                raise InvalidInput(
                    f"data part {self.part} of {self.source.spec.source!r} holds less than one "
                    f"window of {self.sequence_length + 1} tokens; lower data.parts (now "
                    f"{self.source.spec.parts}) or batch.sequence_length, or give more text"
                )
            else:
                epoch += 1
                stream = self.open(epoch)

    def _windows(self, stream: DocumentStream | MixedStream) -> TokenIds:
        """The next documents, joined and cut into windows that share their last and first token."""
        length = self.sequence_length
        wanted = max(BUFFER_TOKENS, _MIN_BUFFER_WINDOWS * length)
        made: list[TokenIds] = []
        while wanted > 0 and (documents := _next_documents(stream, wanted)):
            encoded = _encoded(self.tokenizer, documents)
            wanted -= sum(map(len, encoded))
            made += encoded
        tokens = _joined(made)
        if len(tokens) <= length:
            return np.empty((0, length + 1), dtype=np.int32)
        return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


class Corpus(Iterator[torch.Tensor]):
    """The training text of a run, one data part at a time; an endless iterator of microbatches.

    Each microbatch is int64 [microbatch_size, sequence_length + 1], on the CPU. `open_part` or
    `load_state_dict` comes before the first. For one thread.

    Raises:
        InvalidInput, EnvironmentFault: as `open_mixture` and `open_tokenizer` do.
    """

    def __init__(self, spec: DataSpec, *, sequence_length: int, microbatch_size: int, seed: int):
        self._spec = spec
        self._source = open_mixture(spec)
        self.tokenizer = open_tokenizer(spec.tokenizer)
        self._sequence_length = sequence_length
        self._microbatch_size = microbatch_size
        self._seed = seed
        self.part = -1  # none is open
        self._ahead: ReadAhead | None = None
        self._coming: _Coming | None = None
        self._buffer: TokenBuffer
        self._used = 0  # windows of the buffer
        self._epochs = dict[int, int]()  # by part that was read to its end: the one that is next

    def open_part(self, part: int, position: int = 0, *, wait: bool = True) -> None:
        """Read from this part from now on: from a `position` of any peer, or from where this corpus
        was at the end of it. With `wait` False only from when `arrived` says so: to pass over what
        was read before takes minutes of a large part.

        Raises:
            InvalidInput: the run has no such part, or (`arrived` does that without `wait`) it is
                too small for one window.
        """
        if not 0 <= part < self._spec.parts:
            raise InvalidInput(f"data part {part} is not one of 0 to {self._spec.parts - 1}")
        epoch, rows = place_of(max(position, position_of(self._epochs.get(part, 0))))
        self._read_from(part, self._reader(part).patient_buffers(epoch, rows), wait=wait)

    def arrived(self, *, wait: bool = False) -> bool:
        """Whether the part that was opened last is read by now; raises what kept it from that."""
        coming = self._coming
        if coming is not None:
            if not (wait or coming.ahead.ready):
                return False
            self._buffer = coming.ahead.next()
            if self._ahead is not None:
                self._ahead.stop()
            self._ahead, self._coming = coming.ahead, None
            self.part, self._used = coming.part, coming.used
        return self.part >= 0

    @property
    def ready(self) -> bool:
        """Whether a part is read, and the next microbatch is here."""
        if self._ahead is None:
            return False
        here = len(self._buffer.windows) - self._used
        return here >= self._microbatch_size or self._ahead.has(self._microbatch_size - here)

    @property
    def epoch(self) -> int:
        """How often the part was read to its end."""
        return self._buffer.epoch

    @property
    def position(self) -> int:
        """Where the current buffer began: one integer, for a peer that takes the part over."""
        return position_of(self.epoch, int(self._buffer.start["rows"]))

    def __next__(self) -> torch.Tensor:
        """Return the next microbatch."""
        if self.part < 0:
            raise RuntimeError("no data part is open: call open_part first")
        taken: list[TokenIds] = []
        count = self._microbatch_size
        while count:
            if self._used >= len(self._buffer.windows):
                self._next_buffer()
            windows = self._buffer.windows[self._used : self._used + count]
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
            "shelf_start": deepcopy(self._buffer.start),
            "used": self._used,
            "epochs": {str(part): epoch for part, epoch in self._epochs.items()},
        }

    def load_state_dict(
        self, state: dict[str, Any], part: int | None = None, *, wait: bool = True
    ) -> bool:
        """Go on exactly where `state_dict` was called; return whether that is possible. `wait` as
        for `open_part`.

        It is not where that was in another part than `part`, though what was read to its end is
        known then; nor, and nothing changes but for a warning, when the state is of other files,
        another tokenizer, sequence length or seed. The caller then opens a part from its start.
        """
        if state.get("identity") != self._identity():
            logger.warning(
                "the saved data position is not of the files, tokenizer, sequence length and seed "
                "that %s %r has now; the data part starts from its beginning",
                self._spec.SOURCE,
                self._spec.source,
            )
            return False
        self._epochs = {int(read): epoch for read, epoch in state.get("epochs", {}).items()}
        if part not in (None, state["part"]):
            return False
        reader = self._reader(state["part"])
        buffers = reader.patient_buffers(state["epoch"], start=state["shelf_start"])
        self._read_from(state["part"], buffers, used=state["used"], wait=wait)
        return True

    def _identity(self) -> str:
        source = self._source.fingerprint
        return json_sha256(source, self._spec.tokenizer, self._sequence_length, self._seed)

    def _reader(self, part: int) -> _PartReader:
        return _PartReader(
            source=self._source,
            tokenizer=self.tokenizer,
            part=part,
            sequence_length=self._sequence_length,
            seed=self._seed,
        )

    def _read_from(
        self, part: int, buffers: Iterator[TokenBuffer | None], *, used: int = 0, wait: bool
    ) -> None:
        if self._coming is not None:
            self._coming.ahead.stop()
        self._coming = _Coming(part, ReadAhead(buffers), used)
        weakref.finalize(self, self._coming.ahead.stop)
        if wait:
            self.arrived(wait=True)

    def _next_buffer(self) -> None:
        assert self._ahead is not None
        before, self._buffer, self._used = self._buffer.epoch, self._ahead.next(), 0
        if self._buffer.epoch > before:
            self._epochs[self.part] = self._buffer.epoch


def held_out_digest(spec: DataSpec) -> str:
    """Return the sha256 (hex) of the held-out documents, and of their names for `stdlib`.

    Validation losses compare only where it is equal.
    """
    source = open_mixture(spec)
    named = [each for each in source.sources if each.spec.format == "stdlib"]
    names = [piece.name for each in named for piece in each.held_out]
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
    documents = open_mixture(spec).held_out_documents()
    tokens = _joined([each for document in documents for each in _encoded(tokenizer, [document])])
    last = len(tokens) - (sequence_length + 1)
    if last < 0:
        raise InvalidInput(
            f"the held-out part of {spec.source!r} holds {len(tokens)} tokens, less than one "
            f"window of {sequence_length + 1}; lower batch.sequence_length or give more text"
        )
    starts = [last * index // max(1, count - 1) for index in range(count)]
    windows = np.stack([tokens[start : start + sequence_length + 1] for start in starts])
    return _tensor(windows)


def _next_documents(stream: DocumentStream | MixedStream, tokens: int) -> list[bytes]:
    """Documents of so many tokens at most, but for the last one, and none at the end: what is read
    belongs to one buffer, which ends with the document that it ended with if each were tokenized
    before the next is read. (Where a normalizer makes more characters of some the buffer is longer,
    each time that it is made.)
    """
    documents: list[bytes] = []
    left = min(tokens, ENCODED_BYTES)
    while left > 0 and (document := stream.read()) is not None:
        documents.append(document)
        left -= len(document) + 2  # a token a byte, one for a beginning, and the end of text
    return documents


def _encoded(tokenizer: Tokenizer, documents: Sequence[bytes]) -> list[TokenIds]:
    """The ids of each, with the end of text behind them. All of ENCODED_BYTES at most are tokenized
    in one call, longer ones in slices.
    """
    whole = iter(tokenizer.encode_all([each for each in documents if len(each) <= ENCODED_BYTES]))
    end = np.asarray([tokenizer.eos_id], dtype=np.int32)
    ids = [
        [next(whole)] if len(each) <= ENCODED_BYTES else map(tokenizer.encode, _slices(each))
        for each in documents
    ]
    return [np.concatenate([*parts, end]) for parts in ids]


def _slices(document: bytes) -> Iterator[bytes]:
    """A document in slices of ENCODED_BYTES at most, that end with a line, or a word, or between
    two characters."""
    start = 0
    while (end := start + ENCODED_BYTES) < len(document):
        stop = document.rfind(b"\n", start, end) + 1 or document.rfind(b" ", start, end) + 1
        if not stop:  # a character of UTF-8 has three bytes of 0b10...... at most behind its first
            stop = next((at for at in range(end, end - 4, -1) if document[at] >> 6 != 0b10), end)
        yield document[start:stop]
        start = stop
    yield document[start:]


def _joined(documents: list[TokenIds]) -> TokenIds:
    return np.concatenate(documents) if documents else np.empty(0, dtype=np.int32)


def _tensor(windows: TokenIds) -> torch.Tensor:
    return torch.from_numpy(windows.astype(np.int64))  # pyright: ignore[reportUnknownMemberType]


BATCH_WINDOWS = 8  # at most, fixed so that every peer sums in the same order
BATCH_BYTES = 1 << 25  # of activations at most, or of one window: they pass all links in fp32


def evaluated_at_once(shape: Sequence[int]) -> int:
    """How many held-out windows are a batch in a run whose microbatches have activations [b, t, d]:
    all peers take as many, no more than they compute in training.
    """
    b, t, d = shape
    return min(b, BATCH_WINDOWS, max(1, BATCH_BYTES // (4 * t * d)))


def batches_of(windows: Tensor, at_once: int = BATCH_WINDOWS) -> list[Tensor]:
    """Held-out windows int64 [n, t + 1] in the batches that every peer evaluates."""
    return list(windows.split(at_once))


@torch.no_grad()
def validation_loss(logits_of: Callable[[Tensor], Tensor], windows: Tensor) -> float:
    """Mean nats a token.

    Args:
        logits_of: token ids int64 [b, t] to logits [b, t, vocabulary].
        windows: int64 [n, t + 1], on the device of the model.
    """
    total = 0.0
    for batch in batches_of(windows):
        total += float(summed_loss(logits_of(batch[:, :-1]), batch[:, 1:].reshape(-1)))
    return total / (windows.shape[0] * (windows.shape[1] - 1))


PROMPT_TOKENS, WRITTEN_TOKENS, WRITING_LIMIT_S, TEMPERATURE = 24, 48, 3.0, 0.8


def written_text(
    next_logits: Callable[[Tensor], Tensor], tokenizer: Tokenizer, windows: Tensor
) -> str:
    """How a model goes on from the beginning of a held-out window: both in quotes, in one line.

    next_logits: token ids int64 [1, t] to the logits [v] of the next one, fp32 on the CPU.
    """
    window = min(windows.shape[1], PROMPT_TOKENS + WRITTEN_TOKENS)
    length, end = min(PROMPT_TOKENS, window // 2), time.monotonic() + WRITING_LIMIT_S
    ids = windows[:1, :length]  # [1, t]
    draws = torch.Generator().manual_seed(0)  # samples of two rounds can be compared
    while ids.shape[1] < window and time.monotonic() < end:
        logits = next_logits(ids)
        if not logits.isfinite().all():
            break
        chances = torch.softmax(logits / TEMPERATURE, dim=0)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=draws)[None]], dim=1)
    before, after = (cut(tokenizer.decode(half.tolist())) for half in ids[0].tensor_split([length]))
    return f'"{before}" with "{after}"'
