"""The console command `dilocox`: options, environment, exit codes.

Every option is also an environment variable `DILOCOX_<OPTION>`; a flag wins over the environment,
the environment over the default. What a command does is imported when it runs, so that `--help`
is quick.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dilocox import __version__
from dilocox.dht.errors import DilocoxError
from dilocox.dht.files import system_fault
from dilocox.dht.invite import Invite
from dilocox.peer.cli_options import (
    Announce,
    Cache,
    ChainSource,
    ChainStage,
    ChainTimeout,
    Contributions,
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
    NewTokens,
    OnlyHours,
    Port,
    State,
    Temperature,
    Text,
    TextSeed,
    Threads,
    announced,
    env,
    path_or_invite,
)
from dilocox.peer.options import Hours
from dilocox.peer.os_process import PREFIX, end_process, leave_at_once, line_start, set_up_logging

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


# ---- what boots a run, changes it and watches it -------------------------------------------------
# commands stand in the order in which `--help` lists them


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
    from dilocox.peer.commands.demo import DemoOptions, run_demo

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
    from dilocox.peer.commands.bootstrap import BootstrapOptions, run_bootstrap_command

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


operate = typer.Typer(
    name="operate",
    help="Change, pause, end or turn back a run that you operate.",
    no_args_is_help=True,
)

OperatorState = Annotated[
    Path,
    typer.Option(
        help="The state folder of the `dilocox bootstrap` that was given run.yaml; it may be "
        "running.",
        envvar=env("state"),
    ),
]
OPERATOR_FOLDER = Path("dilocox-bootstrap")


@operate.command("pause")
def pause_run(state: OperatorState = OPERATOR_FOLDER, log_level: LogLevel = "warning") -> None:
    """Let all peers stop training; they stay, and keep and serve what they have."""
    set_up_logging(log_level)
    from dilocox.peer.commands.operate import set_state

    raise typer.Exit(set_state(state, "paused"))


@operate.command("resume")
def resume_run(state: OperatorState = OPERATOR_FOLDER, log_level: LogLevel = "warning") -> None:
    """Let the peers of a paused run train again."""
    set_up_logging(log_level)
    from dilocox.peer.commands.operate import set_state

    raise typer.Exit(set_state(state, "running"))


@operate.command()
def end(state: OperatorState = OPERATOR_FOLDER, log_level: LogLevel = "warning") -> None:
    """End the run for good: its peers commit what they have learnt, and leave."""
    set_up_logging(log_level)
    from dilocox.peer.commands.operate import set_state

    raise typer.Exit(set_state(state, "ended"))


@operate.command()
def revise(
    manifest: Annotated[
        Path, typer.Argument(help="The run.yaml with its new values.", envvar=env("manifest"))
    ],
    state: OperatorState = OPERATOR_FOLDER,
    log_level: LogLevel = "warning",
) -> None:
    """Give the run other learning rates, deadlines or another end."""
    set_up_logging(log_level)
    from dilocox.peer.commands.operate import revise as revise_run

    raise typer.Exit(revise_run(state, manifest))


@operate.command()
def rollback(
    round_number: Annotated[
        int,
        typer.Option(
            "--round",
            min=-1,
            help="Go on from the models after this round; -1 for the initial weights.",
            envvar=env("round"),
        ),
    ],
    state: OperatorState = OPERATOR_FOLDER,
    log_level: LogLevel = "warning",
) -> None:
    """Go back to an earlier round; later rounds are kept aside and count no more."""
    set_up_logging(log_level)
    from dilocox.peer.commands.operate import roll_back

    raise typer.Exit(roll_back(state, round_number))


app.add_typer(operate)


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
    from dilocox.peer.monitor.monitor import MonitorOptions, run_monitor_command

    options = MonitorOptions(invite=parsed, state=state, host=host, port=port)
    raise typer.Exit(run_monitor_command(options))


# ---- a volunteer's peer --------------------------------------------------------------------------


@app.command()
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
    from dilocox.peer.process.resting import wait_until_allowed

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
    from dilocox.peer.process.peer import run_peer  # not while it rests: it takes its memory

    raise typer.Exit(run_peer(options))


@app.command()
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
    from dilocox.peer.commands.doctor import DoctorOptions, run_doctor

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


@app.command()
def pause(state: State = Path("dilocox-peer")) -> None:
    """Let a peer leave the swarm and stay away until `resume`, also after a restart."""
    from dilocox.peer.process import resting

    typer.echo(resting.pause(state))


@app.command()
def resume(state: State = Path("dilocox-peer")) -> None:
    """Let a paused peer take part again."""
    from dilocox.peer.process import resting

    typer.echo(resting.resume(state))


# ---- what reads a run: its models and its rounds -------------------------------------------------


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
    from dilocox.peer.commands.export import ExportOptions, run_export_command

    options = ExportOptions(invite=parsed, folder=folder, host=host, timeout_s=timeout)
    raise typer.Exit(run_export_command(options))


@app.command()
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
    from dilocox.peer.commands.generate import GenerateOptions, run_generate_command

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


@app.command("log")
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
    from dilocox.peer.commands.history import ChainOptions, run_log_command

    options = ChainOptions(
        source=parsed,
        stage=stage,
        host=host,
        timeout_s=timeout,
        json_file=json_file,
        contributions=contributions,
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
    parsed = path_or_invite(source)
    from dilocox.peer.commands.history import ChainOptions, run_verify_command

    options = ChainOptions(source=parsed, stage=stage, host=host, timeout_s=timeout)
    raise typer.Exit(run_verify_command(options))


# ---- the program ---------------------------------------------------------------------------------


def known_variables() -> set[str]:
    """Every environment variable that some option or argument reads."""
    groups = [typer.main.get_command(each) for each in (app, operate)]
    commands = [each for group in groups for each in getattr(group, "commands", {}).values()]
    variables = {param.envvar for command in commands for param in command.params}
    return {variable for variable in variables if isinstance(variable, str)}


def main() -> NoReturn:
    """Run the command line and end this process."""
    end_process(run())


def run() -> int:
    """Run the command line; a person's mistake or a machine's trouble is one line, no traceback.

    Returns the exit code.
    """
    leave_at_once()
    unknown = sorted(
        name for name in os.environ if name.startswith(PREFIX) and name not in known_variables()
    )
    for name in unknown:
        typer.echo(f"warning: {name} is set, but no option has that name", err=True)
    try:
        app()
    except DilocoxError as error:
        typer.echo(f"{line_start()}error: {error}", err=True)
        return error.exit_code
    except OSError as error:
        fault = system_fault(error)
        if fault is None:
            raise
        typer.echo(f"{line_start()}error: {fault}", err=True)
        return fault.exit_code
    except SystemExit as ended:  # how click ends every command
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
