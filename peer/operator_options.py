"""Options of the commands that begin a run, and that publish what comes of it; see options.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import Invite
from dilocox.peer.options import (
    Contributors,
    Dtype,
    Host,
    InviteText,
    JsonFile,
    LogLevel,
    ReadFrom,
    Timeout,
)


def invite_or_none(text: str | None) -> Invite | None:
    """What an option gives that may be left out."""
    return None if text is None else Invite.parse(text)


def rates(text: str | None) -> tuple[float, ...] | None:
    """Numbers above 0 between commas, where they are given."""
    if text is None:
        return None
    try:
        found = tuple(float(each) for each in text.split(",") if each.strip())
    except ValueError:
        found = (0.0,)
    if not found or not all(0 < each < float("inf") for each in found):
        raise InvalidInput(f"--tokens-per-s {text}: give a number, or one for each stage: 120,95")
    return found


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Describe a run: asks five questions, writes its run.yaml and says what it takes."""

    file: Annotated[Path, typer.Argument(help="The file to write; none is overwritten.")] = Path(
        "run.yaml"
    )
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset, which a wrong name lists, or a checkpoint to go on from: a folder or "
            "NAME@COMMIT of the hub."
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(help="Text: a folder, file or pattern, a name on the hub, or stdlib."),
    ] = None
    machines: Annotated[
        str | None,
        typer.Option(
            help="How many there will be, memory (GB) of the smallest, or of its GPU if that has "
            "less, and upload (Mbit/s) of the slowest: 6x16GB@20."
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(help="After how many tokens it ends: 2_000_000_000, 2e9 or 2B."),
    ] = None
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="as few as fit the memory",
            help="Slices to cut the model into; not asked for.",
        ),
    ] = None
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: what no option says has its default.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Put the newest anchors of a run into a repository on the Hugging Face hub."""

    invite: InviteText
    repository: Annotated[
        str, typer.Argument(help="OWNER/NAME on the hub; it is made if it is not there.")
    ]
    every: Annotated[
        int,
        typer.Option(
            min=0, help="Push again after so many rounds each, until the run's end; 0 pushes once."
        ),
    ] = 0
    folder: Annotated[
        Path, typer.Option(help="Folder for the checkpoint, which is uploaded from there.")
    ] = Path("dilocox-push")
    private: Annotated[
        bool, typer.Option("--private", help="Make a repository that others do not see.")
    ] = False
    dtype: Dtype = "fp32"
    contributors: Contributors = False
    host: Host = "0.0.0.0"
    timeout_s: Timeout = 600
    log_level: LogLevel = "warning"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Say what a run will do on given machines: whether it fits, its speed, bytes and days."""

    file: Annotated[Path, typer.Argument(help="The run.yaml; with --from none is read.")] = Path(
        "run.yaml"
    )
    peers: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, show_default="4", help="Peers of all stages together."),
    ] = None
    mbit: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Download of the slowest peer in Mbit/s, and its upload if --up-mbit "
            "is not given.",
        ),
    ] = None
    up_mbit: Annotated[
        float | None, typer.Option(min=0.001, help="Upload of the slowest peer in Mbit/s.")
    ] = None
    rtt_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="Round trip between two peers.")
    ] = 50.0
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="What a peer achieves in training, in 10^12 operations a second: measured, or 30 "
            "to 40 % of what its vendor says.",
        ),
    ] = None
    tokens_per_s: Annotated[
        tuple[float, ...] | None,
        typer.Option(
            help="In the place of --tflops: tokens/s of a stage as `dilocox doctor` measures "
            "them, of the slowest or of each: 120,95."
        ),
        ReadFrom(str | None, rates),
    ] = None
    memory_gb: Annotated[
        float | None, typer.Option(min=0.001, help="Memory of the smallest peer.")
    ] = None
    gpu_memory_gb: Annotated[
        float | None, typer.Option(min=0.001, help="Memory of its GPU, if it trains on one.")
    ] = None
    threads: Annotated[
        int,
        typer.Option(
            min=0,
            help="Cores that train, of which the codec takes one for a while; 0: it has its own.",
        ),
    ] = 0
    invite: Annotated[
        Invite | None,
        typer.Option(
            "--from",
            help="Invite of a live run, which tells its run.yaml, peers and speed; the link is "
            "measured to one of them. What options say goes before.",
        ),
        ReadFrom(str | None, invite_or_none),
    ] = None
    json_file: JsonFile = None
    host: Host = "0.0.0.0"
    log_level: LogLevel = "warning"
