"""The commands `dilocox export` and `dilocox generate`: the trained model as a Hugging Face folder,
and how such a folder is used with plain transformers.

What: `write_checkpoint` makes the folder from the stages, one shard each; `evaluate_checkpoint` and
`continue_text` load it as any stranger would.
Why: what a run leaves behind must load in one line, `AutoModelForCausalLM.from_pretrained(folder)`,
without this package.
How: shards are written one after the other, so that one stage is in memory at a time, into a hidden
folder beside the target, which is renamed when all is complete. `dilocox.json` says which run and
round the weights come from, and marks the folder as one that a later export may replace.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    TextStreamer,
)
from transformers.utils import logging as transformers_logging

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.options import ExportOptions, GenerateOptions
from dilocox.peer.os_process import STOPPED, StopSignal
from dilocox.pipeline.checkpoint import split_commit
from dilocox.pipeline.partition import build_skeleton
from dilocox.pipeline.stage import constant_buffers, parameter_shapes

if TYPE_CHECKING:  # hivemind comes with both, and a text is continued without it
    from dilocox.dht.join import Joined
    from dilocox.peer.chain.download import StageAnchor


def run_export_command(options: ExportOptions) -> int:
    """Download the newest anchors of a run and write a Hugging Face folder; the exit code."""
    from dilocox.dht.join import visiting
    from dilocox.peer.chain.download import download_anchors

    with StopSignal():
        with visiting(options.invite, options.host) as place:
            anchors = download_anchors(place, timeout_s=options.timeout_s)
            write_anchors(options.folder, place, anchors)
        rounds = shown_rounds([each.round for each in anchors])
        typer.echo(f"wrote {options.folder}: {rounds}, {anchors[0].chain_tokens:,} tokens")
        return 0
    return STOPPED


def run_generate_command(options: GenerateOptions) -> int:
    """Continue a text on the terminal with the newest anchors of a run; the exit code."""
    from dilocox.dht.join import visiting
    from dilocox.peer.chain.download import download_anchors

    with StopSignal(), tempfile.TemporaryDirectory() as temporary:
        folder, tell = Path(temporary) / "model", partial(typer.echo, nl=False)
        with visiting(options.invite, options.host) as place:
            write_anchors(folder, place, download_anchors(place, timeout_s=options.timeout_s))
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
    """The rounds of the anchors of all stages."""
    *others, last = map(str, rounds)
    return f"rounds {', '.join(others)} and {last} of its stages" if others else f"round {last}"


def write_anchors(folder: Path, place: Joined, anchors: Sequence[StageAnchor]) -> None:
    """Write a Hugging Face folder from the anchors of all stages; raises as `write_checkpoint`."""
    manifest = place.manifest
    info = {
        "run": place.run,
        "name": manifest.name,
        "tokens": anchors[0].chain_tokens,
        "stages": [{"round": each.round, "digest": each.digest} for each in anchors],
    }
    write_checkpoint(
        folder,
        manifest.model,
        [(e.stage, manifest.stages, e.layout.view(e.anchor)) for e in anchors],
        manifest.data.tokenizer,
        info,
    )


INFO_FILE = "dilocox.json"
DEFAULT_TOKENS = 200  # that a text is continued by

# The byte tokenizer also counts 125 sentinels, which text never becomes.
_BYTE_IDS_END = 259


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    stage_tensors: Iterable[tuple[int, int, Mapping[str, Tensor]]],
    tokenizer_spec: str,
    info: Mapping[str, Any],
) -> None:
    """Write a Hugging Face folder that `from_pretrained` loads with bit-equal weights.

    Args:
        folder: made, or replaced if it is an earlier export or empty.
        config: the manifest's `model` field.
        stage_tensors: (stage, number of stages, its parameters by name, fp32) for every stage, in
            any order; consumed one by one.
        tokenizer_spec: "byt5", or a hub name or folder.
        info: JSON values for dilocox.json (run, round, digest, tokens).

    Raises InvalidInput (something else is at `folder`, bad configuration), EnvironmentFault (disk
    trouble, no tokenizer) and ValueError (tensors that are not those of the stages).
    """
    folder = folder.resolve()
    _refuse_foreign(folder)
    tokenizer = _load_tokenizer(tokenizer_spec)
    first_unused = _BYTE_IDS_END if tokenizer_spec == "byt5" else len(tokenizer)
    draft = _sibling(folder, "partial")
    try:
        with _disk_faults(folder.parent):
            draft.mkdir(parents=True)
        _write_shards(draft, config, stage_tensors)
        with _disk_faults(folder.parent):
            _write_configs(draft, config, tokenizer, first_unused)
            tokenizer.save_pretrained(str(draft))
            _write_json(draft / INFO_FILE, info)
            _put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def evaluate_checkpoint(
    folder: Path, windows: Tensor, batch: int, device: str | torch.device = "cpu"
) -> float:
    """Mean loss in nats per token over `windows` [n, t + 1] int64, each token after the first.

    Raises InvalidInput if the folder holds no complete checkpoint.
    """
    model = _load_model(folder).to(device).eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(windows), batch):
            rows = windows[start : start + batch].to(device)  # [b, t + 1]
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()  # [b, t, v]
            targets = rows[:, 1:].flatten()
            total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total / windows[:, 1:].numel()


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
    model: Any = _load_model(folder).eval()
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(str(folder), local_files_only=True)
    # Split: a "</s>" in the prompt is text, not the end of it.
    inputs = tokenizer(
        prompt, add_special_tokens=False, split_special_tokens=True, return_tensors="pt"
    )
    length = inputs["input_ids"].shape[1]
    max_new_tokens = _room(model, length, max_new_tokens)
    settings = model.generation_config
    if temperature == 0:
        settings.do_sample, settings.temperature, settings.top_k = False, None, None
    elif temperature is not None:
        settings.temperature = temperature
    streamer = None if tell is None else _Teller(tokenizer, tell)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(seed)
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, streamer=streamer
        )  # [1, length + new]
    return tokenizer.decode(output[0, length:], skip_special_tokens=True)


def _room(model: Any, prompt_tokens: int, wanted: int | None) -> int:
    """How many tokens are made; InvalidInput if the model has no room for those wanted."""
    positions = getattr(model.config, "max_position_embeddings", None)
    room = DEFAULT_TOKENS if positions is None else int(positions) - prompt_tokens
    if positions is not None and (room < 1 or (wanted or 0) > room):
        raise InvalidInput(
            f"a text of {prompt_tokens} tokens and --tokens {wanted or 1} are more than the "
            f"{positions} tokens that the model takes; give fewer"
        )
    return min(DEFAULT_TOKENS, room) if wanted is None else wanted


class _Teller(TextStreamer):
    """Tells a text word by word as it comes, without the prompt."""

    def __init__(self, tokenizer: Any, tell: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._tell = tell

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._tell(text)


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
        reason = " ".join(str(error).split())
        raise EnvironmentFault(
            f"tokenizer {spec!r} could not be loaded ({reason}); check the network, or download it "
            "and name its folder"
        ) from error


def _write_shards(
    draft: Path,
    config: Mapping[str, Any],
    stage_tensors: Iterable[tuple[int, int, Mapping[str, Tensor]]],
) -> None:
    """One safetensors file per stage, and the index over all of them."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    written: list[tuple[int, int]] = []
    for stage, num_stages, tensors in stage_tensors:
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = dict(parameter_shapes(config, num_stages, stage))
        if found != expected:
            differ = sorted(found.items() ^ expected.items())[:3]
            raise ValueError(f"stage {stage} of {num_stages} has other tensors: {differ}")
        plain = {name: tensor.detach().float() for name, tensor in tensors.items()}
        plain.update(constant_buffers(config, num_stages, stage))
        plain = {name: tensor.cpu().contiguous() for name, tensor in plain.items()}
        shard = f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors"
        with _disk_faults(draft.parent):
            (draft / shard).touch()  # as the umask says; save_file writes another for us alone
            mode = (draft / shard).stat().st_mode
            save_file(plain, draft / shard, metadata={"format": "pt"})
            (draft / shard).chmod(mode)
        weight_map.update(dict.fromkeys(plain, shard))
        total_bytes += sum(tensor.nbytes for tensor in plain.values())
        written.append((stage, num_stages))
    if sorted(written) != [(stage, len(written)) for stage in range(len(written))] or not written:
        raise ValueError(f"each stage is needed once, got (stage, number of stages): {written}")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    with _disk_faults(draft.parent):
        _write_json(draft / "model.safetensors.index.json", index)


def _write_configs(
    draft: Path, config: Mapping[str, Any], tokenizer: Any, first_unused: int
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
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(draft))
    unused = set(range(first_unused, size)) | {ids["pad_token_id"], tokenizer.unk_token_id}
    suppressed = sorted(cast("set[int]", unused - {None, ids["eos_token_id"]}))
    settings: Any = GenerationConfig(
        do_sample=True, temperature=0.8, top_k=50, suppress_tokens=suppressed or None, **ids
    )
    settings.save_pretrained(str(draft))


def _load_model(folder: Path) -> Any:
    """The model of a checkpoint folder by plain transformers, checked to be complete."""
    remedy = "export the run again"
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, faults = cast(Any, AutoModelForCausalLM).from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
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
    replaced = _sibling(folder, "replaced")
    folder.rename(replaced)
    try:
        draft.rename(folder)
    except OSError:
        replaced.rename(folder)
        raise
    shutil.rmtree(replaced)


def _sibling(folder: Path, kind: str) -> Path:
    """A hidden name beside `folder`, for this process; what an earlier one left there goes."""
    sibling = folder.with_name(f".{folder.name}.{kind}-{os.getpid()}")
    shutil.rmtree(sibling, ignore_errors=True)
    return sibling


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _disk_faults(folder: Path) -> Generator[None, None, None]:
    """Turn trouble with the disk below into a message for people."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EnvironmentFault(
            f"cannot write the export into {folder}: {error}; free space there, check that you may "
            "write, or choose another folder"
        ) from error
