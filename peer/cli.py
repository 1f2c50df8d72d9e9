"""The console command `dilocox`: its commands, environment, exit codes.

`command` makes a command of one of the dataclasses of peer/options.py and of the function that
takes it. Every option is also an environment variable `DILOCOX_<OPTION>`; a flag wins over the
environment, the environment over the default. What a command does is imported when it runs, so that
`--help` is quick.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, NoReturn, cast, get_args, get_type_hints

import typer
from annotated_types import Ge, Le
from typer.models import ParameterInfo

from dilocox import __version__
from dilocox.dht.errors import DilocoxError
from dilocox.dht.files import system_fault
from dilocox.peer import options
from dilocox.peer.options import ReadFrom
from dilocox.peer.os_process import (
    PREFIX,
    allow_open_files,
    end_process,
    leave_at_once,
    line_start,
    set_up_logging,
)

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


# ---- from a dataclass to a command line ----------------------------------------------------------
def command(group: typer.Typer, name: str, kind: Any, function: str) -> None:
    """Make a command of a dataclass: its fields are the command's arguments and options, its
    docstring is the command's help.

    function: `module:name` below dilocox.peer; it is imported when the command runs, gets the
    options and returns the exit code.
    """

    def called(**given: Any) -> None:
        set_up_logging(given.get("log_level", "warning"))  # the first that may find a fault
        read = {
            field: readers[field](value) if value is not None and field in readers else value
            for field, value in given.items()
        }
        module, _, attribute = function.partition(":")
        run = getattr(importlib.import_module(f"dilocox.peer.{module}"), attribute)
        raise typer.Exit(run(kind(**read)))

    parameters, readers = _command_line(kind)
    cast("Any", called).__signature__ = inspect.Signature(parameters)
    group.command(name, help=kind.__doc__)(called)


def _command_line(
    kind: Any,
) -> tuple[list[inspect.Parameter], dict[str, Callable[[Any], Any]]]:
    """The parameters that typer is to see, and what makes a field's value of what typer gives."""
    parameters: list[inspect.Parameter] = []
    readers: dict[str, Callable[[Any], Any]] = {}
    hints, own = get_type_hints(kind, include_extras=True), inspect.get_annotations(kind)

    def place(field: Field[Any]) -> tuple[bool, ...]:
        """`--help` lists what is required, then a command's own options, the log level last."""
        optional = field.default is not MISSING
        return field.name == "log_level", optional, optional and field.name not in own

    for field in sorted(fields(kind), key=place):
        given, *notes = get_args(hints[field.name])
        shown = _shown(field.name, notes)
        default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
        for form in (note for note in notes if isinstance(note, ReadFrom)):
            given, readers[field.name] = form.given, form.read
            default = [] if given == list[str] else default
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[given, shown],
            )
        )
    return parameters, readers


def _shown(name: str, notes: Sequence[Any]) -> ParameterInfo:
    """What typer is to show of a field: its own `Argument` or `Option`, or words and limits."""
    flag = f"--{name}".replace("_", "-")
    shown = next((copy.copy(note) for note in notes if isinstance(note, ParameterInfo)), None)
    if shown is None:
        *other, text = [note for note in notes if isinstance(note, str)]
        flag = other[0] if other else flag
        low: Any = next((note.ge for note in notes if isinstance(note, Ge)), None)
        high: Any = next((note.le for note in notes if isinstance(note, Le)), None)
        shown = typer.Option(flag, help=text, min=low, max=high)
    shown.envvar = shown.envvar or PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    return shown


def run_peer_when_allowed(peer: options.PeerOptions) -> int:
    """Take part, but rest first while the volunteer says so; the exit code."""
    from dilocox.peer.process.resting import wait_until_allowed

    if not wait_until_allowed(peer):
        return 0
    from dilocox.peer.process.peer import run_peer  # not while it rests: it takes its memory

    return run_peer(peer)


# `--help` lists them in this order: for operators, for volunteers, for those who look at a run
operate = typer.Typer(
    name="operate",
    help="Change, pause, end or turn back a run that you operate.",
    no_args_is_help=True,
)
command(app, "demo", options.DemoOptions, "commands.demo:run_demo")
command(app, "init", options.InitOptions, "commands.init:run_init_command")
command(app, "plan", options.PlanOptions, "commands.plan:run_plan_command")
command(app, "bootstrap", options.BootstrapOptions, "commands.bootstrap:run_bootstrap_command")
command(operate, "pause", options.PauseRunOptions, "commands.operate:set_state")
command(operate, "resume", options.ResumeRunOptions, "commands.operate:set_state")
command(operate, "end", options.EndRunOptions, "commands.operate:set_state")
command(operate, "revise", options.ReviseOptions, "commands.operate:revise")
command(operate, "rollback", options.RollbackOptions, "commands.operate:roll_back")
command(operate, "admit", options.AdmitOptions, "commands.operate:admit")
command(operate, "revoke", options.RevokeOptions, "commands.operate:revoke")
command(operate, "admitted", options.AdmittedOptions, "commands.operate:show_admitted")
command(operate, "rotate", options.RotateOptions, "commands.operate:rotate")
app.add_typer(operate)
command(app, "monitor", options.MonitorOptions, "monitor.monitor:run_monitor_command")
command(app, "peer", options.PeerOptions, "cli:run_peer_when_allowed")
command(app, "doctor", options.DoctorOptions, "commands.doctor:run_doctor")
command(app, "pause", options.PauseOptions, "process.resting:pause")
command(app, "resume", options.ResumeOptions, "process.resting:resume")
command(app, "export", options.ExportOptions, "commands.export:run_export_command")
command(app, "push", options.PushOptions, "commands.push:run_push_command")
command(app, "generate", options.GenerateOptions, "commands.export:run_generate_command")
command(app, "serve", options.ServeOptions, "commands.serve:run_serve_command")
command(app, "log", options.LogOptions, "commands.history:run_log_command")
command(app, "verify", options.VerifyOptions, "commands.history:run_verify_command")


# ---- the program ---------------------------------------------------------------------------------


def known_variables() -> set[str]:
    """Every environment variable that some option or argument reads."""
    groups = [typer.main.get_command(each) for each in (app, operate)]
    commands = [each for group in groups for each in getattr(group, "commands", {}).values()]
    variables = {param.envvar for command in commands for param in command.params}
    return {variable for variable in variables if isinstance(variable, str)}


def main() -> NoReturn:
    end_process(run())


def run() -> int:
    """Run the command line; a person's mistake or a machine's trouble is one line, no traceback.

    Returns the exit code.
    """
    leave_at_once()
    allow_open_files()
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
