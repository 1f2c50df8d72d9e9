"""The console command `dilocox`: options, environment, exit codes.

Every option is also an environment variable `DILOCOX_<OPTION>`; a flag wins over the environment,
the environment over the default. What a command does is imported when it runs, so that `--help`
is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from dilocox import __version__
from dilocox.dht.errors import DilocoxError
from dilocox.peer import cli_model, cli_operate, cli_peer, cli_run
from dilocox.peer.files import system_fault
from dilocox.peer.logs import line_start
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


# in the order in which `--help` lists them
app.command()(cli_run.demo)
app.command()(cli_run.bootstrap)
app.add_typer(cli_operate.app)
app.command()(cli_run.monitor)
for volunteers in (cli_peer.peer, cli_peer.doctor, cli_peer.pause, cli_peer.resume):
    app.command()(volunteers)
app.command()(cli_model.export)
app.command()(cli_model.generate)
app.command("log")(cli_model.log_)
app.command()(cli_model.verify)


def known_variables() -> set[str]:
    """Every environment variable that some option or argument reads."""
    groups = [typer.main.get_command(each) for each in (app, cli_operate.app)]
    commands = [each for group in groups for each in getattr(group, "commands", {}).values()]
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
        typer.echo(f"{line_start()}error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        fault = system_fault(error)
        if fault is None:
            raise
        typer.echo(f"{line_start()}error: {fault}", err=True)
        sys.exit(fault.exit_code)
    sys.exit(0)
