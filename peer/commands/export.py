"""The commands `dilocox export` and `dilocox generate`: the trained model as a Hugging Face folder,
and how such a folder is used with plain transformers.

What: `CheckpointDraft` makes the folder from the anchors of the stages, one shard each;
`evaluate_checkpoint` and `continue_text` load it as any stranger would.
Why: what a run leaves behind must load in one line, `AutoModelForCausalLM.from_pretrained(folder)`,
without this package.
How: stage after stage is downloaded and written, so that one stage is in memory at a time, into a
hidden folder beside the target, which is renamed when all is complete. After a fault or a kill it
stays, and the next export of the same run and dtype goes on with the shards that it has.
`dilocox.json` says which run and round the weights come from, and marks the folder as one that a
later export may replace.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging
from typing_extensions import Self

from dilocox import __version__
from dilocox.dht.errors import EnvironmentFault, InvalidInput, in_one_line
from dilocox.dht.files import sync, write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands.model_memory import DTYPES, check_model_memory, writing_bytes
from dilocox.peer.options import AnchorOptions, ExportOptions, GenerateOptions
from dilocox.peer.os_process import STOPPED, StopSignal
from dilocox.peer.state_folder import StateFolder
from dilocox.pipeline.partition import build_skeleton
from dilocox.pipeline.pretrained import split_commit
from dilocox.pipeline.stage import constant_buffers, parameter_shapes

if TYPE_CHECKING:  # hivemind comes with both, and a text is continued without it
    from dilocox.dht.join import Joined
    from dilocox.peer.chain.visitor_download import AnchorPlace


def run_export_command(options: ExportOptions) -> int:
    """Download the newest anchors of a run and write a Hugging Face folder; the exit code."""
    from dilocox.dht.join import visiting

    with StopSignal():
        with visiting(options.invite, options.host) as joined:
            places = export_run(joined, options.folder, options, contributors=options.contributors)
        rounds = shown_rounds([each.round for each in places])
        typer.echo(f"wrote {options.folder}: {rounds}, {places[0].chain_tokens:,} tokens")
        return 0
    return STOPPED


def run_generate_command(options: GenerateOptions) -> int:
    """Continue a text on the terminal with the newest anchors of a run; the exit code."""
    from dilocox.dht.join import visiting

    with StopSignal(), tempfile.TemporaryDirectory() as temporary:
        folder, tell = Path(temporary) / "model", partial(typer.echo, nl=False)
        with visiting(options.invite, options.host) as joined:
            needed = writing_bytes(joined.manifest, options.dtype)
            check_model_memory("to write with", needed, "take --dtype bf16,")
            export_run(joined, folder, options)
        tell(options.text)
        seed = random.getrandbits(32) if options.seed is None else options.seed
        temperature = options.temperature
        continue_text(
            folder, options.text, options.tokens, seed, temperature=temperature, tell=tell
        )
        typer.echo()
        return 0
    return STOPPED


def shown_rounds(rounds: Sequence[int]) -> str:
    if len(set(rounds)) == 1:
        return f"round {rounds[0]}"
    *others, last = map(str, rounds)
    return f"rounds {', '.join(others)} and {last} of its stages"


def export_run(
    joined: Joined, folder: Path, options: AnchorOptions, *, contributors: bool = False
) -> list[AnchorPlace]:
    """Write the newest anchors of a run as a Hugging Face folder; where they stand, by stage.

    options: the bootstraps of their invite give the tokenizer where it is out of reach.

    Raises:
        InvalidInput: something else is at `folder`.
        EnvironmentFault: nobody gives the anchors, disk trouble, or no tokenizer.
    """
    from dilocox.peer.chain.visitor_download import AnchorPlace, download_anchors
    from dilocox.peer.process.run_tokenizer import reachable_tokenizer

    manifest = joined.manifest
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = reachable_tokenizer(joined, options.invite.bootstraps, Path(temporary))
        config, dtype = manifest.model, DTYPES[options.dtype]
        draft = CheckpointDraft(folder, config, manifest.stages, tokenizer, joined.run, dtype)
    with draft as checkpoint:
        places = download_anchors(
            joined,
            lambda found: checkpoint.add(asdict(found.place), found.layout.view(found.anchor)),
            folder=checkpoint.draft,
            timeout_s=options.timeout_s,
            have=[AnchorPlace(**place) for place in checkpoint.stages.values()],
            archive_first=options.archive_first,
        )
        info = {
            "run": joined.run,
            "name": manifest.name,
            "tokens": places[0].chain_tokens,
            "stages": [{"round": each.round, "digest": each.digest} for each in places],
        }
        given = _tokens_by_peer(joined, options.timeout_s) if contributors else {}
        checkpoint.finish(info, model_card(manifest, info, given))
        return places


def _tokens_by_peer(joined: Joined, timeout_s: float) -> Counter[str]:
    """The tokens of each peer in the records of all stages that can be had, over their number."""
    from dilocox.peer.chain.summary import tokens_by_peer
    from dilocox.peer.chain.visitor_download import claimed_chain, list_chain

    async def listed(stage: int) -> Counter[str]:
        chain = await claimed_chain(joined, stage, time.monotonic() + timeout_s)
        return Counter(tokens_by_peer(await list_chain(chain)))

    stages = joined.manifest.stages
    total = sum((asyncio.run(listed(stage)) for stage in range(stages)), Counter[str]())
    return Counter({peer: tokens // stages for peer, tokens in total.items()})


def model_card(manifest: Manifest, info: Mapping[str, Any], given: Mapping[str, int]) -> str:
    """README.md of a checkpoint: what it is, what it was trained on, and how it is loaded.

    given: the tokens of each contributor, to name them.
    """
    data, inner, codec = manifest.data, manifest.inner, manifest.codec
    licence = manifest.licence
    texts = ", ".join(f"`{source.source}`" for source in (data, *data.more))
    parameters = sum(
        math.prod(shape)
        for stage in range(manifest.stages)
        for _, shape in parameter_shapes(manifest.model, manifest.stages, stage)
    )
    rounds = shown_rounds([stage["round"] for stage in info["stages"]])
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [dilocox, distributed-training]",
        *([f"license: {licence if licence in LICENCES else 'other'}"] if licence else []),
        "---",
        f"# {manifest.name}",
        "",
        *([manifest.about, ""] if manifest.about else []),
        "Trained by volunteers over the internet with dilocox, and exported with version "
        f"{__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| model | {manifest.model['model_type']}, {parameters:,} parameters |",
        *([f"| started from | `{manifest.initial.source}` |"] if manifest.initial.source else []),
        f"| text | {texts}; tokenizer `{data.tokenizer}` |",
        f"| trained | {info['tokens']:,} of {manifest.end_tokens:,} tokens, {rounds} |",
        f"| inner optimizer | {inner.optimizer}, learning rate {inner.learning_rate:g}, "
        f"{inner.schedule} |",
        f"| averaging | {manifest.outer.merge}, {codec.scheme} at {codec.bits} bits |",
        f"| run | `{info['run']}` |",
        *([f"| licence | {licence} |"] if licence else []),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
    ]
    if given:
        lines += ["", "| contributor | tokens |", "|---|---|"]
        ranked = sorted(given.items(), key=lambda item: (-item[1], item[0]))
        lines += [f"| {peer} | {tokens:,} |" for peer, tokens in ranked]
    return "\n".join(lines) + "\n"


# of those that the hub knows by name, which refuses any other word but this one: other
LICENCES = {
    *("apache-2.0", "mit", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "openrail"),
}
INFO_FILE = "dilocox.json"
PROGRESS_FILE, LOCK_FILE = "export.json", "lock"  # of a folder in the making
BYTES_OF = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
DEFAULT_TOKENS = 200  # that a text is continued by

# The byte tokenizer also counts 125 sentinels, which text never becomes.
_BYTE_IDS_END = 259


class CheckpointDraft:
    """A Hugging Face folder in the making, which `from_pretrained` loads with bit-equal weights
    where the dtype is fp32. A context manager: while it is open no other export writes there.

    Attributes:
        draft: the hidden folder in which it grows.
        stages: what `add` was told of the stages whose shards are in it, by an earlier export or
            by this one.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        num_stages: int,
        tokenizer: str,
        run: str,
        dtype: torch.dtype = torch.float32,
    ):
        """
        Args:
            folder: made, or replaced if it is an earlier export or empty.
            config: the manifest's `model` field.
            tokenizer: "byt5", or a hub name or folder.

        Raises InvalidInput (something else is at `folder`) and EnvironmentFault (disk trouble, no
        tokenizer).
        """
        self._folder = folder.resolve()
        _refuse_foreign(self._folder)
        self._config, self._num_stages, self._dtype = config, num_stages, dtype
        self._tokenizer = _load_tokenizer(tokenizer)
        self._first_unused = _BYTE_IDS_END if tokenizer == "byt5" else len(self._tokenizer)
        self.draft = self._folder.with_name(f".{self._folder.name}.partial")
        self._key = {"run": run, "dtype": str(dtype), "stages": num_stages}
        self.stages: dict[int, dict[str, Any]] = {}
        self._lock = StateFolder(self.draft).locked(
            "another export writes there; wait for its end", "choose another folder"
        )

    def __enter__(self) -> Self:
        self._lock.__enter__()
        with self._disk_faults():
            self.stages = _shards_of(self.draft, self._key)
            for left in self.draft.iterdir():
                if left.is_dir():  # of a download that was ended
                    shutil.rmtree(left)
                elif not self.stages and left.name != LOCK_FILE:
                    left.unlink()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.__exit__(None, None, None)

    def add(self, place: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the shard of a stage, in place of the one that it has.

        Args:
            place: JSON values; its "stage" says which one it is.
            tensors: the parameters of the stage by name, fp32.

        Raises ValueError (tensors that are not those of the stage) and EnvironmentFault.
        """
        stage: int = place["stage"]
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = dict(parameter_shapes(self._config, self._num_stages, stage))
        if found != expected:
            differ = sorted(found.items() ^ expected.items())[:3]
            raise ValueError(f"stage {stage} of {self._num_stages} has other tensors: {differ}")
        plain = {name: tensor.detach().to(self._dtype) for name, tensor in tensors.items()}
        plain.update(constant_buffers(self._config, self._num_stages, stage))
        plain = {name: tensor.cpu().contiguous() for name, tensor in plain.items()}
        shard = self.draft / self._shard(stage)
        with self._disk_faults():
            self.stages.pop(stage, None)
            self._note()
            shard.touch()  # as the umask says; save_file writes another for us alone
            mode = shard.stat().st_mode
            save_file(plain, shard, metadata={"format": "pt"})
            shard.chmod(mode)
            sync(shard)
            self.stages[stage] = dict(place)
            self._note()

    def finish(self, info: Mapping[str, Any], card: str) -> None:
        """Write what belongs to the shards, and put the folder in its place.

        Args:
            info: JSON values for dilocox.json (run, round, digest, tokens).
            card: for README.md.

        Raises InvalidInput (bad configuration), EnvironmentFault (disk trouble) and ValueError (a
        stage is missing).
        """
        if missing := sorted(set(range(self._num_stages)) - set(self.stages)):
            raise ValueError(f"each stage is needed once, missing are {missing}")
        with self._disk_faults():
            self._write_index()
            _write_configs(
                self.draft, self._config, self._tokenizer, self._first_unused, self._dtype
            )
            self._tokenizer.save_pretrained(str(self.draft))
            _write_json(self.draft / INFO_FILE, info)
            (self.draft / "README.md").write_text(card, encoding="utf-8")
            _put_in_place(self.draft, self._folder)
            for name in (PROGRESS_FILE, LOCK_FILE):
                (self._folder / name).unlink()

    def _shard(self, stage: int) -> str:
        return f"model-{stage + 1:05d}-of-{self._num_stages:05d}.safetensors"

    def _note(self) -> None:
        done = {str(stage): place for stage, place in self.stages.items()}
        text = json.dumps(self._key | {"done": done})
        write_atomically(self.draft / PROGRESS_FILE, text.encode())

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for stage in range(self._num_stages):
            with safe_open(self.draft / self._shard(stage), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    weight_map[name] = self._shard(stage)
                    total += math.prod(part.get_shape()) * BYTES_OF[part.get_dtype()]
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(self.draft / "model.safetensors.index.json", index)

    @contextmanager
    def _disk_faults(self) -> Generator[None, None, None]:
        """Turn trouble with the disk below into a message for people."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(
                f"cannot write the export into {self._folder.parent}: {error}; free space there, "
                "check that you may write, or choose another folder; the same command goes on with "
                f"what is in {self.draft}"
            ) from error


def _shards_of(draft: Path, key: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The stages that an earlier export of the same kind has written; none if it is of another."""
    try:
        found = json.loads((draft / PROGRESS_FILE).read_text())
        done = {int(stage): dict(place) for stage, place in found.pop("done").items()}
        return done if found == key else {}
    except (OSError, ValueError, AttributeError, KeyError):
        return {}


def evaluate_checkpoint(folder: Path, windows: Tensor) -> float:
    """Mean loss in nats per token over `windows` [n, t + 1] int64, each token after the first.

    Raises InvalidInput if the folder holds no complete checkpoint.
    """
    from dilocox.peer.training.data import validation_loss

    model = load_model(folder).eval()
    return validation_loss(lambda ids: model(input_ids=ids, use_cache=False).logits, windows)


def continue_text(
    folder: Path,
    prompt: str,
    max_new_tokens: int | None,
    seed: int,
    *,
    temperature: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> str:
    """What the model writes after `prompt` (not empty), sampled as the folder's settings say.

    Args:
        max_new_tokens: at most so many; None for DEFAULT_TOKENS, or as many as there is room for.
        temperature: instead of the folder's; 0 takes the likeliest token each time.
        tell: gets the text word by word as it comes.

    The caller's random state stays as it is. Raises InvalidInput if the folder holds no complete
    checkpoint, or the model has no room for so many tokens.
    """
    model, pieces = TextModel(folder), list[str]()
    ids = model.encode(prompt)
    max_new_tokens = _room(model, ids.shape[1], max_new_tokens)

    def take(piece: str) -> None:
        pieces.append(piece)
        if tell is not None:
            tell(piece)

    model.write(ids, max_new_tokens, seed, take, temperature=temperature)
    return "".join(pieces)


class TextModel:
    """The model of a checkpoint folder with its tokenizer (of transformers), to write text with,
    one at a time. positions: tokens that it takes, None if it does not say.
    """

    def __init__(self, folder: Path):
        """Raises InvalidInput if the folder holds no complete checkpoint."""
        self._model: Any = load_model(folder).eval()
        load = cast(Any, AutoTokenizer).from_pretrained
        self.tokenizer: Any = load(str(folder), local_files_only=True)
        self.positions: int | None = getattr(self._model.config, "max_position_embeddings", None)

    def encode(self, text: str, *, split: bool = True) -> Tensor:
        """Its token ids [1, length]; split: a "</s>" in it is text, not the end of it."""
        return self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split, return_tensors="pt"
        )["input_ids"]

    def write(
        self,
        ids: Tensor,
        max_new_tokens: int,
        seed: int,
        tell: Callable[[str], object],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> int:
        """Continue `ids` [1, length]; the number of tokens made. Settings that are None are the
        folder's; temperature 0 takes the likeliest token each time.

        tell: gets what each token adds to the text, perhaps nothing; where it returns something
        true, or raises, the text ends.
        """
        settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        settings = {name: value for name, value in settings.items() if value is not None}
        if temperature == 0:
            settings = {"do_sample": False, "temperature": None, "top_k": None}
        text = _TextOfTokens(self.tokenizer, tell)
        fork: Any = torch.random.fork_rng
        with fork(devices=[]), suppress(_Enough):
            torch.default_generator.manual_seed(seed)
            mask = torch.ones_like(ids)
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                streamer=text,
                **settings,
            )
        return text.tokens


class _Enough(Exception):
    """Nobody wants more of this text."""


class _TextOfTokens:
    """A streamer of transformers that tells what each token adds to the text, never a part of a
    character; not the prompt, which comes first.
    """

    def __init__(self, tokenizer: Any, tell: Callable[[str], object]):
        self.tokens = -1
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._tell = tell
        self._told: list[int] = []  # last: what a token adds may depend on those before it
        self._new: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += 1
        if self.tokens:
            self._new += value.flatten().tolist()
            if self._tell(self._added(whole=False)):
                raise _Enough

    def end(self) -> None:
        if rest := self._added(whole=True):
            self._tell(rest)

    def _added(self, *, whole: bool) -> str:
        before, text = self._decode(self._told), self._decode(self._told + self._new)
        # half a character is U+FFFD, or nothing with the byte tokenizer
        if not whole and (text.endswith("\ufffd") or len(text) <= len(before)):
            return ""
        self._told, self._new = self._new, []
        return text[len(before) :]


def _room(model: TextModel, prompt_tokens: int, wanted: int | None) -> int:
    """How many tokens are made; InvalidInput if the model has no room for those wanted."""
    positions = model.positions
    room = DEFAULT_TOKENS if positions is None else positions - prompt_tokens
    if positions is not None and (room < 1 or (wanted or 0) > room):
        raise InvalidInput(
            f"a text of {prompt_tokens} tokens and --tokens {wanted or 1} are more than the "
            f"{positions} tokens that the model takes; give fewer"
        )
    return min(DEFAULT_TOKENS, room) if wanted is None else wanted


def _refuse_foreign(folder: Path) -> None:
    """Let nobody lose a folder that is not an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / INFO_FILE).is_file()):
        raise InvalidInput(
            f"export folder {folder}: there is something that is not an earlier export (it has no "
            f"{INFO_FILE}); choose a new or empty folder, or remove it yourself"
        )


def _load_tokenizer(spec: str) -> Any:
    if spec == "byt5":
        return ByT5Tokenizer()
    name, commit = (spec, None) if Path(spec).is_dir() else split_commit(spec)
    try:
        return cast(Any, AutoTokenizer).from_pretrained(
            name, revision=commit, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = in_one_line(error)
        raise EnvironmentFault(
            f"tokenizer {spec!r} could not be loaded ({reason}); check the network, or download it "
            "and name its folder"
        ) from error


def _write_configs(
    draft: Path,
    config: Mapping[str, Any],
    tokenizer: Any,
    first_unused: int,
    dtype: torch.dtype,
) -> None:
    """config.json and generation_config.json, with the special ids of the tokenizer.

    Ids from `first_unused` up never occur in text, so their logits were never trained.
    """
    model: Any = build_skeleton(config).model
    size: int = model.config.vocab_size
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    ids = {name: None if value is None or value >= size else value for name, value in ids.items()}
    for name, value in ids.items():
        # A few families insist on an id; then generation_config.json, which wins, still has none.
        with suppress(StrictDataclassError):
            setattr(model.config, name, value)
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(draft))
    unused = set(range(first_unused, size)) | {ids["pad_token_id"], tokenizer.unk_token_id}
    suppressed = sorted(cast("set[int]", unused - {None, ids["eos_token_id"]}))
    settings: Any = GenerationConfig(
        do_sample=True, temperature=0.8, top_k=50, suppress_tokens=suppressed or None, **ids
    )
    settings.save_pretrained(str(draft))


def load_model(folder: Path) -> Any:
    """The model of a checkpoint folder by plain transformers, checked to be complete."""
    remedy = "export the run again"
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, faults = cast(Any, AutoModelForCausalLM).from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = in_one_line(error)
        raise InvalidInput(f"{folder} is no complete checkpoint ({reason}); {remedy}") from error
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
    for kind, names in faults.items():
        if names:
            raise InvalidInput(f"{folder} is no complete checkpoint ({kind}: {names}); {remedy}")
    return model


def _put_in_place(draft: Path, folder: Path) -> None:
    """Rename `draft` to `folder`; what was there goes only once the new folder stands."""
    if not folder.exists():
        draft.rename(folder)
        return
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    folder.rename(replaced)
    try:
        draft.rename(folder)
    except OSError:
        replaced.rename(folder)
        raise
    shutil.rmtree(replaced)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
