"""The commands that boot a run and watch it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilocox.dht.invite import Invite
from dilocox.peer.cli_options import (
    Announce,
    Device,
    Host,
    InviteText,
    LogLevel,
    MetricsHost,
    MetricsPort,
    Port,
    State,
    announced,
    env,
    path_or_invite,
)
from dilocox.peer.logs import set_up_logging


def demo(
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=16, help="Replicas to start, a peer a stage each.", envvar=env("replicas")
        ),
    ] = 2,
    stages: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Stages to cut the model into; a peer of a replica trains one.",
            envvar=env("stages"),
        ),
    ] = 2,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Stop when every peer has so many rounds.", envvar=env("rounds")),
    ] = 10,
    folder: Annotated[
        Path,
        typer.Option(help="Folder for logs, states and the export.", envvar=env("folder")),
    ] = Path("demo-run"),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures to this file.", envvar=env("json")),
    ] = None,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the run.", envvar=env("seed"))] = 0,
) -> None:
    """Start a whole swarm on this machine, watch it learn, and get a checkpoint."""
    set_up_logging("warning")
    from dilocox.peer.demo import DemoOptions, run_demo

    options = DemoOptions(
        replicas=replicas,
        stages=stages,
        rounds=rounds,
        folder=folder,
        json_file=json_file,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_demo(options))


def bootstrap(
    manifest: Annotated[
        str,
        typer.Argument(
            help="The run's description, run.yaml; or its invite, to run a copy of its bootstrap.",
            envvar=env("manifest"),
        ),
    ],
    state: State = Path("dilocox-bootstrap"),
    port: Port = 31337,
    host: Host = "0.0.0.0",
    announce: Announce = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="Another bootstrap of this run, for the invite to name it, too: its invite or "
            "multiaddress; may be given several times.",
            envvar=env("join"),
        ),
    ] = None,
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Boot a run and print its invite; or, with an invite, run a second bootstrap for it."""
    set_up_logging(log_level)
    parsed = path_or_invite(manifest)
    from dilocox.peer.bootstrap import BootstrapOptions, run_bootstrap_command

    options = BootstrapOptions(
        manifest=parsed,
        state=state,
        host=host,
        port=port,
        announce=announced(announce),
        join=tuple(join or ()),
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run_bootstrap_command(options))


def monitor(
    invite: InviteText,
    state: Annotated[
        Path,
        typer.Option(
            help="Folder for what the monitor has learnt, so that its curves outlive it.",
            envvar=env("state"),
        ),
    ] = Path("dilocox-monitor"),
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="TCP port of the status page and the figures; 0 takes a free one.",
            envvar=env("port"),
        ),
    ] = 9470,
    host: Host = "127.0.0.1",
    log_level: LogLevel = "info",
) -> None:
    """Watch a whole run: a status page for people, figures for Prometheus."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)
    from dilocox.peer.monitor import MonitorOptions, run_monitor_command

    options = MonitorOptions(invite=parsed, state=state, host=host, port=port)
    raise typer.Exit(run_monitor_command(options))
