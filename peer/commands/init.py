"""The command `dilocox init`: five answers become a run.yaml with a word on each choice.

What: name, model, data, machines and tokens are asked for on a terminal, or given as options. The
stages, the microbatches, the warmup and the deadline of an exchange follow from them; the rest is
the preset's, or a default.
Why: the operator of a first run knows these five, and not what follows. What is written passes
`dilocox bootstrap --check` on a machine that reaches data and tokenizer.
"""

from __future__ import annotations

import glob
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer
import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import disk_fault
from dilocox.dht.manifest import Manifest, preset_names
from dilocox.dht.manifest_sections import MAX_TOKENS, format_of
from dilocox.peer.commands.operate import completed
from dilocox.peer.memory_and_disk import MemoryNeeds, memory_status, size
from dilocox.peer.options import GB, InitOptions
from dilocox.peer.os_process import counted

T = TypeVar("T")

TOKENS_A_PARAMETER = 20  # Chinchilla's (arXiv 2203.15556)
# Of the run, at most; 0.01 where a preset says nothing. Presets name the tokens of one replica.
WARMUP_SHARE = 0.05
LINK_ROOM = 2  # times the bytes of an exchange that its deadline leaves room for
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_MACHINES = re.compile(
    rf"(\d{{1,5}}) *x *{_NUMBER} *(?:GB)? *@ *{_NUMBER} *(?:Mbit(?:/s)?)?", re.IGNORECASE
)
_TOKENS = re.compile(r"(\d{1,16}(?:\.\d{1,9})?(?:e\d{1,2})?) *([MBT]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
PROMPTS = {"stdlib": "def "}  # by format; else words that most texts go on from
PROMPT = "It was "
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
WHERE = {  # the text is, by its format
    "stdlib": "the source of Python's standard library, a few MB: for a try",
    "hub": "name a revision: without it peers that start later may read other files",
}


class Hardware(NamedTuple):
    """So many; of the smallest the memory, of the slowest the upload; `shown` as given."""

    number: int
    memory_bytes: float
    upload_bytes_s: float
    shown: str


def machines_of(text: str) -> Hardware:
    """Of COUNTxGB@MBIT, say 6x16@20; raises InvalidInput."""
    match = _MACHINES.fullmatch(text.strip())
    count, memory, upload = (float(match[n]) for n in (1, 2, 3)) if match else (0.0, 0.0, 0.0)
    if not (count and memory and upload):
        raise InvalidInput(
            f"--machines {text}: give how many there are, the memory of the smallest in GB and "
            "the upload of the slowest in Mbit/s, say 6x16GB@20 for 6 of 16 GB and 20 Mbit/s"
        )
    return Hardware(int(count), memory * GB, upload * 1e6 / 8, text)


def token_count(text: str) -> int:
    """A number of tokens, as 1_000_000_000, 1e9 or 1B; raises InvalidInput."""
    match = _TOKENS.fullmatch(text.strip().replace("_", "").replace(",", ""))
    count = float(match[1]) * _FACTORS[match[2].upper()] if match else 0.0
    if not 1 <= count <= MAX_TOKENS:
        raise InvalidInput(f"--tokens {text}: give a number, say 2_000_000_000, 2e9 or 2B")
    return int(count)


def run_init_command(options: InitOptions) -> int:
    """Ask, reckon, and write the file; the exit code."""
    if options.file.exists():
        raise InvalidInput(f"{options.file} is there already: name another file, or remove it")
    if not os.access(options.file.absolute().parent, os.W_OK):
        raise InvalidInput(f"{options.file}: nothing can be written there; name another file")
    ask = partial(_answer, options)
    name = ask("name", "Name of the run", "my-run", _name)
    presets = ", ".join(preset_names())
    model = ask("model", f"Model: a preset ({presets}) or a checkpoint", "small", _model)
    data = ask("data", "Text: a path, a name on the hub, or stdlib", "stdlib", _data)
    question = "Machines: how many x memory of the smallest @ upload of the slowest in Mbit/s"
    machines = ask("machines", question, "4x8GB@20", machines_of)
    from dilocox.peer.process.sizes import print_sizes  # torch, which the questions need not
    from dilocox.pipeline.partition import plan_stages

    given = {"name": name, "model": model, "data": data, "end_tokens": MAX_TOKENS}
    whole = _described(given, 1)
    parameters = sum(plan.num_parameters for plan in plan_stages(whole.model, 1))
    usual = f"{float(f'{TOKENS_A_PARAMETER * parameters:.1e}'):_.0f}"
    tokens = ask("tokens", "Tokens to train on", usual, token_count)
    typer.echo("computing memory and disk needs ...", err=True)
    stages = options.stages
    run = _described(given, stages) if stages else _with_fewest_stages(given, machines)
    run = _fitted(run, machines, tokens)
    text = (resources.files("dilocox.peer.commands") / "run_template.yaml").read_text("utf-8")
    fewest = f"as few as fit {size(machines.memory_bytes)} of memory"
    text = text.format(
        run=run,
        machines=machines,
        **{"name": _yaml(name), "model": _yaml(model), "source": _yaml(run.data.source)},
        tokenizer=_yaml(run.data.tokenizer),
        parameters=parameters / 1e6,
        why_stages="as you asked" if stages else fewest,
        each=tokens / parameters,
        prompt=_yaml(PROMPTS.get(run.data.format, PROMPT)),
        weights=size(4 * parameters),
        where=WHERE.get(run.data.format, "must be there on every volunteer's machine"),
    )
    try:
        with options.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise disk_fault(options.file, error) from error
    print_sizes(run)
    replicas, spares = divmod(machines.number, run.stages)
    typer.echo(
        f"wrote {options.file}: {counted(run.stages, 'stage')}, so "
        f"{counted(machines.number, 'machine')} make {counted(replicas, 'replica')} and "
        f"{counted(spares, 'spare')}. Next: dilocox bootstrap {options.file} --check"
    )
    return 0


def _answer(
    options: InitOptions, option: str, question: str, default: str, read: Callable[[str], T]
) -> T:
    """What an option says; or a person at a terminal; or the default. Raises InvalidInput where
    nobody can be asked.
    """
    told: str | None = getattr(options, option)
    if told is not None or options.yes:
        return read(default if told is None else told)
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"there is no terminal to ask at: give --{option}, or --yes for the default ({default})"
        )

    def checked(text: str) -> T:
        try:
            return read(text)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from error  # it is asked again

    return typer.prompt(question, default=default, value_proc=checked)


def _name(text: str) -> str:
    return Manifest.from_dict({"name": text, "model": "tiny", "end_tokens": 1}).name


def _model(text: str) -> str | dict[str, str]:
    """The `model` field: a preset or a checkpoint, which is read later."""
    if text in preset_names():
        return text
    if not (Path(text).expanduser().is_dir() or "@" in text):
        raise InvalidInput(
            f"--model {text}: presets are {', '.join(preset_names())}; a checkpoint is a folder "
            "here, or NAME@COMMIT of the hub"
        )
    return {"from": text}


def _data(text: str) -> dict[str, str]:
    """The `data` section: what is not here and has the form of a name is on the hub."""
    path = Path(text).expanduser()
    local = text == "stdlib" or path.exists() or glob.glob(str(path), recursive=True)  # noqa: PTH207
    if not (local or HUB_NAME.fullmatch(text)):
        raise InvalidInput(
            f"--data {text}: it is not on this machine; give a folder, a file or a pattern that "
            "is, OWNER/NAME of the hub, or stdlib"
        )
    given = {"source": text} if local else {"source": text, "format": "hub"}
    # a file or pattern whose ending says nothing is read as it is; a folder says it, or is refused
    unsaid = local and text != "stdlib" and format_of(text) is None
    usual = {"format": "text"} if unsaid else {}
    return usual | completed({"data": given})["data"]


def _described(given: dict[str, Any], stages: int) -> Manifest:
    return Manifest.from_dict(completed(given | {"stages": stages}))


def _with_fewest_stages(given: dict[str, Any], machines: Hardware) -> Manifest:
    """Cut so that each slice fits the smallest machine; raises InvalidInput where none would."""
    from dilocox.peer.process.prepare import fewest_stages

    least = 0

    def fit(needed: Sequence[MemoryNeeds]) -> bool:
        nonlocal least
        least = max(each.on_cpu for each in needed)
        return memory_status(least, machines.memory_bytes) == "ok"

    cut = partial(_described, given)  # a checkpoint of several stages is another model
    if (stages := fewest_stages(cut, machines.number, fit)) is not None:
        return cut(stages)
    raise InvalidInput(
        f"--machines {machines.shown}: a stage takes {size(least)} of memory even in the smallest "
        "slices that so many machines hold; choose a smaller model, or more or larger machines"
    )


def _fitted(run: Manifest, machines: Hardware, tokens: int) -> Manifest:
    """With what follows from stages, links and tokens."""
    from dilocox.peer.process.prepare import StageNeeds, stage_kinds

    needed = (StageNeeds(run, stage) for stage in stage_kinds(run))
    least_s = max(needs.least_exchange_s(machines.upload_bytes_s) for needs in needed)
    wanted_s = math.ceil(LINK_ROOM * least_s)
    warmup = run.inner.warmup_tokens * max(1, machines.number // run.stages)
    warmup = min(warmup or tokens // 100, int(WARMUP_SHARE * tokens))
    return replace(
        run,
        end_tokens=tokens,
        batch=replace(run.batch, microbatches=max(run.batch.microbatches, run.stages)),
        inner=replace(run.inner, warmup_tokens=warmup),
        deadlines=replace(run.deadlines, exchange_s=max(run.deadlines.exchange_s, wanted_s)),
    )


def _yaml(value: object) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()
