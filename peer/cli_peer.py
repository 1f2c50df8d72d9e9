"""The commands of a volunteer's peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilocox.dht.invite import Invite
from dilocox.peer.allowance import Hours
from dilocox.peer.cli_options import (
    Announce,
    Data,
    Device,
    Host,
    HostedStage,
    InviteText,
    LogLevel,
    MaxUpload,
    MemoryLimit,
    MetricsHost,
    MetricsPort,
    MonthlyTraffic,
    OnlyHours,
    Port,
    State,
    Threads,
    announced,
    env,
)
from dilocox.peer.logs import set_up_logging


def peer(
    invite: InviteText,
    state: State = Path("dilocox-peer"),
    stage: HostedStage = "auto",
    port: Port = 0,
    host: Host = "0.0.0.0",
    announce: Announce = None,
    device: Device = "auto",
    threads: Threads = 0,
    max_upload: MaxUpload = 0,
    memory_limit: MemoryLimit = 0,
    data: Data = "",
    hours: OnlyHours = None,
    monthly_traffic: MonthlyTraffic = 0,
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Take part in a run: all it needs is the invite."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)  # before the imports that take seconds
    from dilocox.peer.options import PeerOptions
    from dilocox.peer.resting import wait_until_allowed

    options = PeerOptions(
        invite=parsed,
        state=state,
        stage=stage,
        host=host,
        port=port,
        announce=announced(announce),
        device=device,
        threads=threads,
        max_upload_mb_s=max_upload,
        memory_limit_gb=memory_limit,
        data=data,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        hours=Hours.parse(hours or ()),
        monthly_traffic_gb=monthly_traffic,
    )
    if not wait_until_allowed(options):
        raise typer.Exit
    from dilocox.peer.volunteer import run_peer  # not while it rests: it takes its memory

    raise typer.Exit(run_peer(options))


def pause(state: State = Path("dilocox-peer")) -> None:
    """Let a peer leave the swarm and stay away until `resume`, also after a restart."""
    from dilocox.peer import resting

    typer.echo(resting.pause(state))


def resume(state: State = Path("dilocox-peer")) -> None:
    """Let a paused peer take part again."""
    from dilocox.peer import resting

    typer.echo(resting.resume(state))


def doctor(
    invite: InviteText,
    state: State = Path("dilocox-peer"),
    stage: HostedStage = "auto",
    port: Port = 0,
    host: Host = "0.0.0.0",
    announce: Announce = None,
    device: Device = "auto",
    threads: Threads = 0,
    max_upload: MaxUpload = 0,
    memory_limit: MemoryLimit = 0,
    data: Data = "",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write what was found to this file instead, - for the terminal.",
            envvar=env("json"),
        ),
    ] = None,
    log_level: LogLevel = "error",
) -> None:
    """Check whether a peer with these options could take part; exit code 1 if it could not."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)
    from dilocox.peer.doctor import DoctorOptions, run_doctor

    options = DoctorOptions(
        invite=parsed,
        state=state,
        stage=stage,
        host=host,
        port=port,
        announce=announced(announce),
        device=device,
        threads=threads,
        max_upload_mb_s=max_upload,
        memory_limit_gb=memory_limit,
        data=data,
        json_file=json_file,
    )
    raise typer.Exit(run_doctor(options))
