"""Tokenizers: documents, as bytes, to token ids.

No text becomes a special token, whatever it spells: a document that contains `</s>` must not end
there.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dilocox.dht.errors import InvalidInput
from dilocox.peer.source_files import require_hub

TokenIds = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """Turns documents into ids."""

    @property
    def eos_id(self) -> int:
        """The id that joins documents."""
        ...

    @property
    def vocab_size(self) -> int:
        """How many rows a model's embedding needs at least."""
        ...

    def encode(self, document: bytes) -> TokenIds:
        """Return the document's ids, without any special one."""
        ...


class ByteTokenizer:
    """The ids of `ByT5Tokenizer` (byte + 3), made from the bytes themselves: no files, no loops."""

    eos_id = 1
    vocab_size = 384  # ByT5's extra ids lie above the 3 + 256 that occur

    def encode(self, document: bytes) -> TokenIds:
        """Return one id for each byte."""
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
