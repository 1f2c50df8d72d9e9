"""The commands that read a run: its models and its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilocox.dht.invite import Invite
from dilocox.peer.cli_options import (
    Cache,
    ChainSource,
    ChainStage,
    ChainTimeout,
    Contributions,
    Host,
    InviteText,
    LogLevel,
    NewTokens,
    Temperature,
    Text,
    TextSeed,
    env,
    path_or_invite,
)
from dilocox.peer.logs import set_up_logging


def export(
    invite: InviteText,
    folder: Annotated[
        Path, typer.Argument(help="Folder to write the checkpoint to.", envvar=env("folder"))
    ],
    host: Host = "0.0.0.0",
    timeout: Annotated[
        float,
        typer.Option(min=1, help="Give up after this many seconds.", envvar=env("timeout")),
    ] = 600,
    log_level: LogLevel = "warning",
) -> None:
    """Write the newest anchors of a run as a Hugging Face folder."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)
    from dilocox.peer.operate import ExportOptions, run_export_command

    options = ExportOptions(invite=parsed, folder=folder, host=host, timeout_s=timeout)
    raise typer.Exit(run_export_command(options))


def generate(
    invite: InviteText,
    text: Text,
    tokens: NewTokens = None,
    temperature: Temperature = 0.8,
    seed: TextSeed = None,
    cache: Cache = None,
    host: Host = "0.0.0.0",
    timeout: ChainTimeout = 600,
    log_level: LogLevel = "warning",
) -> None:
    """Continue a text with the newest anchors of a run."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)
    from dilocox.peer.generate import GenerateOptions, run_generate_command

    options = GenerateOptions(
        invite=parsed,
        text=text,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        cache=cache,
        host=host,
        timeout_s=timeout,
    )
    raise typer.Exit(run_generate_command(options))


def log_(
    source: ChainSource,
    stage: ChainStage = "all",
    contributions: Contributions = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the figures to this file instead, - for the terminal.",
            envvar=env("json"),
        ),
    ] = None,
    host: Host = "0.0.0.0",
    timeout: ChainTimeout = 600,
    log_level: LogLevel = "warning",
) -> None:
    """List a run's rounds (tokens, members, ranks, H, bytes, digest), or what each peer gave."""
    set_up_logging(log_level)
    parsed = path_or_invite(source)
    from dilocox.peer.log_commands import ChainOptions, run_log_command

    options = ChainOptions(
        source=parsed,
        stage=stage,
        host=host,
        timeout_s=timeout,
        json_file=json_file,
        contributions=contributions,
    )
    raise typer.Exit(run_log_command(options))


def verify(
    source: ChainSource,
    stage: ChainStage = "all",
    host: Host = "0.0.0.0",
    timeout: ChainTimeout = 600,
    log_level: LogLevel = "warning",
) -> None:
    """Replay a run's rounds and check that they make its anchors; exit code 1 on a flaw."""
    set_up_logging(log_level)
    parsed = path_or_invite(source)
    from dilocox.peer.log_commands import ChainOptions, run_verify_command

    options = ChainOptions(source=parsed, stage=stage, host=host, timeout_s=timeout)
    raise typer.Exit(run_verify_command(options))
