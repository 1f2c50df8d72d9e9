"""The console command `dilocox`: options, environment, exit codes.

Every option is also an environment variable `DILOCOX_<OPTION>`; a flag wins over the environment,
the environment over the default. What a command does is imported when it runs, so that `--help`
is quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dilocox import __version__
from dilocox.dht.errors import DilocoxError, EnvironmentFault
from dilocox.dht.invite import SCHEME, Invite
from dilocox.peer.cli_options import (
    Announce,
    ChainSource,
    ChainStage,
    ChainTimeout,
    Device,
    Host,
    InviteText,
    LogLevel,
    MetricsHost,
    MetricsPort,
    Port,
    State,
    Threads,
    env,
)
from dilocox.peer.files import DISK_FULL, disk_fault
from dilocox.peer.logs import set_up_logging
from dilocox.peer.signals import leave_at_once
from dilocox.peer.subprocesses import PREFIX

app = typer.Typer(
    name="dilocox",
    help="Volunteers train one language model together over ordinary internet links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dilocox {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _common(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command()
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
        typer.Option(min=1, help="Stop after this many committed rounds.", envvar=env("rounds")),
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


@app.command()
def bootstrap(
    manifest: Annotated[
        Path,
        typer.Argument(help="The run's description, run.yaml.", envvar=env("manifest")),
    ],
    state: State = Path("dilocox-bootstrap"),
    port: Port = 31337,
    host: Host = "0.0.0.0",
    announce: Announce = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="Multiaddress of another bootstrap of this run; may be given several times.",
            envvar=env("join"),
        ),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Boot a run: the first DHT peer, which publishes the manifest and prints the invite."""
    set_up_logging(log_level)
    from dilocox.peer.operate import BootstrapOptions, run_bootstrap_command

    options = BootstrapOptions(
        manifest=manifest,
        state=state,
        host=host,
        port=port,
        announce=tuple(announce or ()),
        join=tuple(join or ()),
    )
    raise typer.Exit(run_bootstrap_command(options))


@app.command()
def peer(
    invite: InviteText,
    state: State = Path("dilocox-peer"),
    stage: Annotated[
        str,
        typer.Option(
            help="Slice of the model to host, a number from 0; auto takes the one that lacks peers "
            "most, and another one when that changes.",
            envvar=env("stage"),
        ),
    ] = "auto",
    port: Port = 0,
    host: Host = "0.0.0.0",
    announce: Announce = None,
    device: Device = "auto",
    threads: Threads = 0,
    max_upload: Annotated[
        float,
        typer.Option(
            min=0,
            help="Upload limit in MB/s for averaging and for serving joiners; 0 for none.",
            envvar=env("max-upload"),
        ),
    ] = 0,
    memory_limit: Annotated[
        float,
        typer.Option(
            min=0,
            help="Memory limit in GB for all processes of this peer; 0 for none.",
            envvar=env("memory-limit"),
        ),
    ] = 0,
    data: Annotated[
        str,
        typer.Option(
            help="Train on these files instead of the run's data: a folder, file or glob; .txt, "
            ".jsonl and .parquet say their format, others have the run's, or are text.",
            envvar=env("data"),
        ),
    ] = "",
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Take part in a run: all it needs is the invite."""
    set_up_logging(log_level)
    parsed = Invite.parse(invite)  # before the imports that take seconds
    from dilocox.peer.volunteer import PeerOptions, run_peer

    options = PeerOptions(
        invite=parsed,
        state=state,
        stage=stage,
        host=host,
        port=port,
        announce=tuple(announce or ()),
        device=device,
        threads=threads,
        max_upload_mb_s=max_upload,
        memory_limit_gb=memory_limit,
        data=data,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run_peer(options))


@app.command()
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


def _chain_source(text: str) -> Path | Invite:
    return Invite.parse(text) if text.strip().startswith(SCHEME) else Path(text)


@app.command("log")
def log_(
    source: ChainSource,
    stage: ChainStage = "all",
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
    """List a run's rounds: tokens, members, ranks, the H that follows, bytes, digest."""
    set_up_logging(log_level)
    parsed = _chain_source(source)
    from dilocox.peer.log_commands import ChainOptions, run_log_command

    options = ChainOptions(
        source=parsed, stage=stage, host=host, timeout_s=timeout, json_file=json_file
    )
    raise typer.Exit(run_log_command(options))


@app.command()
def verify(
    source: ChainSource,
    stage: ChainStage = "all",
    host: Host = "0.0.0.0",
    timeout: ChainTimeout = 600,
    log_level: LogLevel = "warning",
) -> None:
    """Replay a run's rounds and check that they make its anchors; exit code 1 on a flaw."""
    set_up_logging(log_level)
    parsed = _chain_source(source)
    from dilocox.peer.log_commands import ChainOptions, run_verify_command

    options = ChainOptions(source=parsed, stage=stage, host=host, timeout_s=timeout)
    raise typer.Exit(run_verify_command(options))


@app.command()
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


def known_variables() -> set[str]:
    """Every environment variable that some option or argument reads."""
    group = typer.main.get_command(app)
    commands = getattr(group, "commands", {}).values()
    variables = {param.envvar for command in commands for param in command.params}
    return {variable for variable in variables if isinstance(variable, str)}


def main() -> NoReturn:
    """Run the command line; a person's mistake or a machine's trouble is one line, no traceback."""
    leave_at_once()
    unknown = sorted(
        name for name in os.environ if name.startswith(PREFIX) and name not in known_variables()
    )
    for name in unknown:
        typer.echo(f"warning: {name} is set, but no option has that name", err=True)
    try:
        app()
    except DilocoxError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        typer.echo(f"error: {disk_fault(Path(error.filename or '.'), error)}", err=True)
        sys.exit(EnvironmentFault.exit_code)
    sys.exit(0)
