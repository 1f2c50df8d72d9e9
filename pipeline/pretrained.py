"""A checkpoint of transformers that a run starts from: its configuration, and its weights stage by
stage.

What: `described_by` completes a run.yaml that says `model: {from: ...}`; `Checkpoint.stage` reads
the weights of one stage as the flat fp32 vector of an anchor.
Why: nobody holds more than a stage, so each reads by name only the tensors that it needs, and of a
checkpoint on the hub only the files with these. All must have the same bytes, so a value is taken
only where fp32 holds it exactly, and from safetensors only: nothing is unpickled.
How: the names are those of the model's parameters in transformers. A file of the decoder alone
leaves out their prefix, and one with tied embeddings the head, which then begins as the embedding.
"""

# What JSON and YAML hold is of no type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput, in_one_line
from dilocox.pipeline.partition import build_skeleton, checkpoint_config
from dilocox.pipeline.stage import constant_buffers, parameter_shapes

EXACT = ("F32", "BF16", "F16")  # what fp32 holds without rounding
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")

_COMMIT = re.compile("[0-9a-f]{40}")


def described_by(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run.yaml, with what the checkpoint says that its `model.from` names: the
    configuration, and the tokenizer unless `data.tokenizer` names one.

    Raises InvalidInput: there is no such checkpoint, or it cannot be started from.
    EnvironmentFault: the hub does not answer.
    """
    model, data, stages = given.get("model"), given.get("data") or {}, given.get("stages", 1)
    if not isinstance(model, Mapping) or "from" not in model:
        return given
    if len(model) > 1:
        raise InvalidInput(
            "model.from stands alone, as the checkpoint has the configuration; remove "
            f"{', '.join(sorted(set(map(str, model)) - {'from'}))}"
        )
    checkpoint = Checkpoint(str(model["from"]))
    completed = given | {"initial": {"source": checkpoint.source}}
    completed["model"] = checkpoint.model(stages if isinstance(stages, int) else 1)
    if isinstance(data, Mapping) and "tokenizer" not in data:
        completed["data"] = {**data, "tokenizer": checkpoint.tokenizer}
    return completed


def split_commit(name: str) -> tuple[str, str | None]:
    """A name on the hub and the commit that it is pinned to, if any."""
    name, _, commit = name.partition("@")
    return name, commit or None


class Checkpoint:
    """A folder that `save_pretrained` or `dilocox export` wrote, here or on the hub."""

    def __init__(self, source: str, cache: Path | None = None):
        """source: the folder, or NAME@COMMIT. cache: of files of the hub, instead of the usual one.

        Raises InvalidInput: there is no such folder, or a name is not pinned to a commit.
        """
        self.source = source
        self._cache = cache
        self._folder = Path(source).expanduser()
        self._name, self._commit = split_commit(source)
        if self._folder.is_dir():
            self._commit, self.source = None, str(self._folder)  # others know no ~
        elif self._commit is None:
            raise InvalidInput(
                f"model.from {source!r}: there is no such folder here; check the path, or name a "
                f"commit of the hub, which never changes: {source}@ and its 40 hex digits"
            )
        elif not _COMMIT.fullmatch(self._commit):
            raise InvalidInput(
                f"model.from {source!r}: {self._commit!r} is no commit, and what it names may "
                f"change; pin it: {self._name}@ and the 40 hex digits of the commit"
            )

    def model(self, num_stages: int) -> dict[str, Any]:
        """The `model` field of a run in so many stages. Raises InvalidInput: see `load_config`."""
        return checkpoint_config(self._config, num_stages)[0]

    @property
    def tokenizer(self) -> str:
        """What `data.tokenizer` is to say; InvalidInput where the checkpoint holds none."""
        if not any(self._file(name) for name in TOKENIZER_FILES):
            raise InvalidInput(
                f"model.from {self.source!r} holds no tokenizer; name the one that the model was "
                "trained with in data.tokenizer (byt5 for bytes)"
            )
        found = self._json("tokenizer_config.json") or {}
        return "byt5" if found.get("tokenizer_class") == "ByT5Tokenizer" else self.source

    def stage(self, config: Mapping[str, Any], num_stages: int, stage: int) -> Tensor:
        """The weights of a stage of the run's model: its flat vector, fp32, zero between them.

        Raises:
            InvalidInput: a tensor is missing, of another shape or not finite, fp32 does not hold
                it, or it is a constant here and was trained there.
            EnvironmentFault: a file cannot be read, or the hub does not answer.
        """
        skeleton = build_skeleton(config)
        head, embedding = skeleton.head_and_embedding
        tied = checkpoint_config(self._config, num_stages)[1]
        layout = FlatLayout.of(parameter_shapes(config, num_stages, stage))
        flat = torch.zeros(layout.numel, dtype=torch.float32)
        for name, view in layout.view(flat).items():
            stored = self._stored(name, skeleton.base)
            if stored is None and tied and name == head:
                stored = self._stored(embedding, skeleton.base)
            if stored is None:
                raise InvalidInput(
                    f"{self.source}: the tensor {name} is missing; load the checkpoint with "
                    "transformers, which knows older names, and save it with "
                    "save_pretrained(OTHER_FOLDER, save_original_format=False)"
                )
            view.copy_(self._tensor(stored, view.shape))
            if not bool(view.isfinite().all()):
                raise InvalidInput(
                    f"{self.source}: {stored} holds values that are not finite; choose an earlier "
                    "checkpoint"
                )
        for name, constant in constant_buffers(config, num_stages, stage).items():
            stored = self._stored(name, skeleton.base)
            if stored and not torch.equal(self._tensor(stored, constant.shape), constant.float()):
                raise InvalidInput(
                    f"{self.source}: {name} is no parameter, but was trained; dilocox keeps it "
                    "constant, so choose another checkpoint"
                )
        return flat

    # ---- files -----------------------------------------------------------------------------------
    @cached_property
    def _config(self) -> dict[str, Any]:
        config = self._json("config.json")
        if config is None:
            raise InvalidInput(
                f"model.from {self.source!r} has no config.json; name a folder that transformers' "
                "save_pretrained or `dilocox export` wrote"
            )
        return config

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self._json(INDEX)
        if index is not None:
            found = index.get("weight_map")
            if not isinstance(found, dict) or any(f != Path(str(f)).name for f in found.values()):
                raise InvalidInput(f"{self.source}: {INDEX} is damaged; fetch it again")
            return found
        if self._file(WEIGHTS) is None:
            raise InvalidInput(
                f"{self.source} has no {WEIGHTS}, and pickled weights are not read: convert it "
                "with AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)"
            )
        return dict.fromkeys(self._opened(WEIGHTS).keys(), WEIGHTS)

    def _stored(self, name: str, base: str) -> str | None:
        """What a tensor of the model is called in the files; None where they have none of it."""
        names = (name, name.removeprefix(f"{base}."))
        return next((each for each in names if each in self._files), None)

    def _tensor(self, name: str, shape: torch.Size) -> Tensor:
        try:
            file = self._opened(self._files[name])
            piece = file.get_slice(name)
            found, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if found != tuple(shape):
                raise InvalidInput(
                    f"{self.source}: {name} has the shape {found}, the model's is {tuple(shape)}; "
                    "its config.json is of another model"
                )
            if dtype not in EXACT:
                raise InvalidInput(
                    f"{self.source}: {name} is of {dtype}, which fp32 does not hold as it is; save "
                    "the checkpoint in fp32, bf16 or fp16"
                )
            return file.get_tensor(name).float()
        except SafetensorError as error:
            raise InvalidInput(
                f"{self.source}: {name}: damaged ({error}); fetch it again"
            ) from error

    def _opened(self, name: str) -> Any:
        path = self._file(name)
        if path is None:
            raise InvalidInput(f"{self.source}: the file {name} is missing; fetch it again")
        try:
            return cast(Any, safe_open)(path, framework="pt")
        except SafetensorError as error:
            raise InvalidInput(f"{path}: damaged ({error}); fetch it again") from error
        except OSError as error:
            raise EnvironmentFault(f"{path}: cannot be read ({error}); check who may") from error

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self._file(name)
        try:
            found = None if path is None else json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EnvironmentFault(f"{path}: cannot be read ({error}); check who may") from error
        except ValueError as error:
            raise InvalidInput(f"{path}: is no valid JSON ({error}); fetch it again") from error
        if found is not None and not isinstance(found, dict):
            raise InvalidInput(f"{path}: holds no fields; fetch it again")
        return found

    def _file(self, name: str) -> Path | None:
        """A file of the checkpoint on this machine; of the hub it is fetched where it is not."""
        if self._commit is None:
            path = self._folder / name
            return path if path.is_file() else None
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
        said = f"model.from {self.source!r}: {name}"
        options = {"revision": self._commit, "cache_dir": self._cache}
        try:
            return Path(hub.hf_hub_download(self._name, name, **options))
        except errors.LocalEntryNotFoundError as error:
            raise EnvironmentFault(
                f"{said}: the Hugging Face hub does not answer; check the network, or download the "
                "checkpoint and name its folder"
            ) from error
        except errors.EntryNotFoundError:
            return None
        except (OSError, ValueError, errors.HTTPError) as error:
            reason = in_one_line(error)
            raise EnvironmentFault(
                f"{said}: cannot be fetched from the hub ({reason}); check name and commit (a "
                "private one needs the environment variable HF_TOKEN)"
            ) from error
