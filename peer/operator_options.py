"""Options of the commands that begin a run, and that publish what comes of it; see options.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dilocox.peer.options import Contributors, Dtype, Host, InviteText, LogLevel, Timeout


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
