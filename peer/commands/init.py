"""The command `dilocox init`: five answers become a run.yaml with a word on each choice.

What: name, model, data, machines and tokens are asked for on a terminal, or given as options. The
stages, the microbatches, the warmup and the deadline of an exchange follow from them; the rest is
the preset's, or a default.
Why: who boots a first run knows these five, and not what follows. What is written passes `dilocox
bootstrap --check` on a machine that reaches data and tokenizer.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import typer
import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest, preset_names
from dilocox.dht.manifest_sections import MAX_TOKENS
from dilocox.peer.commands.operate import completed
from dilocox.peer.memory_and_disk import SPARE_SHARE, MemoryNeeds, size
from dilocox.peer.operator_options import InitOptions
from dilocox.peer.options import GB

T = TypeVar("T")

TOKENS_A_PARAMETER = 20  # Chinchilla's (arXiv 2203.15556)
WARMUP_SHARE = 0.05  # of the run, at most; 0.01 where a preset says nothing
LINK_ROOM = 2  # times the bytes of an exchange that its deadline leaves room for
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_MACHINES = re.compile(
    rf"(\d{{1,5}}) *x *{_NUMBER} *(?:GB)? *@ *{_NUMBER} *(?:Mbit(?:/s)?)?", re.IGNORECASE
)
_TOKENS = re.compile(r"(\d{1,16}(?:\.\d{1,9})?(?:e\d{1,2})?) *([MBT]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")

TEMPLATE = """\
# A run, as `dilocox init` wrote it for {machines}: `dilocox bootstrap` boots it, and with --check
# only looks at it. docs/run.yaml has all other fields with their defaults.

name: {name}  # another name is another run
model: {model}  # {parameters} million parameters
stages: {stages}  # slices of the model: {why_stages}
end_tokens: {end_tokens}  # the run ends then: {each:.0f} a parameter; 20 are usual

data:
  source: {source}  # {where}
  format: {format}
  tokenizer: {tokenizer}  # byt5 are bytes; else a name on the hub or a folder

batch:  # an inner step of a replica: {step_tokens:,} tokens
  sequence_length: {batch.sequence_length}  # tokens that the model sees at once
  microbatch_size: {batch.microbatch_size}  # windows at a time; fewer take less memory
  microbatches: {batch.microbatches}  # at least as many as stages, so that none waits

inner:  # AdamW on each peer
  learning_rate: {learning_rate}
  warmup_tokens: {warmup}  # over which the rate rises to that

rounds:
  inner_steps: {inner_steps}  # between the first averages; later rounds follow their time

codec:  # averages travel as factors of 4 bits a value
  rank: {rank}  # of the first; later ones follow the training

deadlines:
  exchange_s: {exchange_s}  # an average that takes longer is given up; {moved} over {link:g} Mbit/s
"""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Whom a run is planned for: so many machines; of the smallest its memory, of the slowest its
    upload; `shown` as the operator gave them.
    """

    count: int
    memory_bytes: float
    upload_bytes_s: float
    shown: str

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Of COUNTxGB@MBIT, say 6x16@20; raises InvalidInput."""
        match = _MACHINES.fullmatch(text.strip())
        count, memory, upload = (float(match[n]) for n in (1, 2, 3)) if match else (0.0, 0.0, 0.0)
        if not (count and memory and upload):
            raise InvalidInput(
                f"--machines {text}: give how many there are, the memory of the smallest in GB and "
                "the upload of the slowest in Mbit/s, say 6x16GB@20 for 6 of 16 GB and 20 Mbit/s"
            )
        return cls(
            count=int(count), memory_bytes=memory * GB, upload_bytes_s=upload * 1e6 / 8, shown=text
        )


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
    ask = _Questions(options)
    name = ask("name", "Name of the run", "my-run", _name)
    presets = ", ".join(preset_names())
    model = ask("model", f"Model: a preset ({presets}) or a checkpoint", "small", _model)
    data = ask("data", "Text: a path, a name on the hub, or stdlib", "stdlib", _data)
    machines = ask(
        "machines",
        "Machines: how many x memory of the smallest @ upload of the slowest in Mbit/s",
        "4x8GB@20",
        Machines.parse,
    )
    given = {"name": name, "model": model, "data": data, "end_tokens": 10**12}
    from dilocox.pipeline.partition import plan_stages  # torch, which the questions need not

    described = _described(given, 1)
    parameters = sum(plan.num_parameters for plan in plan_stages(described.model, 1))
    good = f"{float(f'{TOKENS_A_PARAMETER * parameters:.1e}'):_.0f}"
    tokens = ask("tokens", "Tokens to train on", good, token_count)
    typer.echo("reckoning what it takes ...", err=True)
    fixed = options.stages
    manifest = _described(given, fixed) if fixed else _with_fewest_stages(given, machines)
    manifest = _fitted(manifest, machines, tokens)
    text = _text(manifest, model, machines, parameters, fixed is not None)
    with options.file.open("x", encoding="utf-8") as file:
        file.write(text)
    from dilocox.peer.process.sizes import print_sizes

    print_sizes(manifest)
    typer.echo(
        f"wrote {options.file}: {manifest.stages} stages, so {machines.count} machines make "
        f"{machines.count // manifest.stages} replicas and {machines.count % manifest.stages} "
        f"spares. Next: dilocox bootstrap {options.file} --check"
    )
    return 0


class _Questions:
    """Answers of the options; of a person at a terminal; or the defaults."""

    def __init__(self, options: InitOptions):
        self._options = options

    def __call__(self, option: str, question: str, default: str, read: Callable[[str], T]) -> T:
        """The answer to one question, read. Raises InvalidInput where nobody can be asked."""
        if (told := getattr(self._options, option)) is not None:
            return read(told)
        if self._options.yes:
            return read(default)
        if not sys.stdin.isatty():
            raise InvalidInput(
                f"there is no terminal to ask at: give --{option}, or --yes for the default "
                f"({default})"
            )

        def checked(text: str) -> T:
            try:
                return read(text)
            except InvalidInput as error:
                raise typer.BadParameter(str(error)) from error

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
    local = Path(text).expanduser().exists() or not HUB_NAME.fullmatch(text)
    given = {"source": text} if local else {"source": text, "format": "hub"}
    return completed({"data": given})["data"]


def _described(given: dict[str, Any], stages: int) -> Manifest:
    return Manifest.from_dict(completed(given | {"stages": stages}))


def _with_fewest_stages(given: dict[str, Any], machines: Machines) -> Manifest:
    """Cut so that each slice fits the smallest machine; raises InvalidInput where none would."""
    from dilocox.peer.process.prepare import memory_of_stages
    from dilocox.pipeline.partition import plan_stages

    room, least = SPARE_SHARE * machines.memory_bytes, math.inf
    for stages in range(1, machines.count + 1):
        manifest = _described(given, stages)
        try:
            largest = max(each.num_parameters for each in plan_stages(manifest.model, stages))
        except InvalidInput:  # it has no more layers
            if stages == 1:
                raise
            break
        least = MemoryNeeds(values=largest, activations=0, gpu_activations=0, encoded=0).on_cpu
        if least <= room:  # else the whole plan, which takes seconds, is above it, too
            least = max(needs.on_cpu for needs in memory_of_stages(manifest))
            if least <= room:
                return manifest
    raise InvalidInput(
        f"--machines {machines.shown}: a stage takes {size(least)} of memory even in the smallest "
        "slices that so many machines hold; choose a smaller model, or more or larger machines"
    )


def _fitted(manifest: Manifest, machines: Machines, tokens: int) -> Manifest:
    """With what follows from stages, links and tokens."""
    from dilocox.peer.process.prepare import StageNeeds, least_exchange_s

    batch, inner, stages = manifest.batch, manifest.inner, manifest.stages
    microbatches = max(batch.microbatches, stages)
    warmup = min(inner.warmup_tokens or tokens // 100, int(WARMUP_SHARE * tokens))
    needs = (StageNeeds(manifest, stage) for stage in {0, stages // 2, stages - 1})
    slowest_s = max(least_exchange_s(each, machines.upload_bytes_s) for each in needs)
    deadlines = manifest.deadlines
    exchange_s = max(deadlines.exchange_s, math.ceil(LINK_ROOM * slowest_s))
    return replace(
        manifest,
        end_tokens=tokens,
        batch=replace(batch, microbatches=microbatches),
        inner=replace(inner, warmup_tokens=warmup),
        deadlines=replace(deadlines, exchange_s=exchange_s),
    )


def _text(
    manifest: Manifest, model: object, machines: Machines, parameters: int, fixed: bool
) -> str:
    from dilocox.peer.process.prepare import StageNeeds

    source, stages = manifest.data.source, manifest.stages
    fewest = f"as few as fit {size(machines.memory_bytes)} of memory"
    return TEMPLATE.format(
        machines=machines.shown,
        name=_yaml(manifest.name),
        model=_yaml(model),
        parameters=f"{parameters / 1e6:,.1f}",
        stages=stages,
        why_stages="as you asked" if fixed else fewest,
        end_tokens=f"{manifest.end_tokens:_}",
        each=manifest.end_tokens / parameters,
        source=_yaml(source),
        where={
            "stdlib": "the source of Python's standard library, a few MB: for a try",
            "hub": "name a revision: without it peers that start later may read other files",
        }.get(manifest.data.format, "must be there on every volunteer's machine"),
        format=manifest.data.format,
        tokenizer=_yaml(manifest.data.tokenizer),
        batch=manifest.batch,
        step_tokens=manifest.batch.tokens_per_step,
        learning_rate=f"{manifest.inner.learning_rate:.1e}",
        warmup=f"{manifest.inner.warmup_tokens:_}",
        inner_steps=manifest.rounds.inner_steps,
        rank=manifest.codec.rank,
        exchange_s=f"{manifest.deadlines.exchange_s:g}",
        moved=size(StageNeeds(manifest, 0).exchange_bytes(manifest.rounds.group_size)),
        link=machines.upload_bytes_s * 8 / 1e6,
    )


def _yaml(value: object) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()
