"""The console command `dilocox`: its commands, environment, exit codes.

`command` makes a command of a function that takes one of the dataclasses of peer/options.py. Every
option is also an environment variable `DILOCOX_<OPTION>`; a flag wins over the environment, the
environment over the default. What a command does is imported when it runs, so that `--help` is
quick.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from dilocox import __version__
from dilocox.dht.errors import DilocoxError
from dilocox.dht.files import system_fault
from dilocox.peer.options import (
    BootstrapOptions,
    DemoOptions,
    DoctorOptions,
    ExportOptions,
    GenerateOptions,
    LogOptions,
    MonitorOptions,
    OperateOptions,
    PeerOptions,
    ReadFrom,
    RestOptions,
    ReviseOptions,
    RollbackOptions,
    VerifyOptions,
)
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


# ---- from a dataclass to a command line ----------------------------------------------------------
T = TypeVar("T")
Command = Callable[[T], int]


def command(group: typer.Typer, options: type[T], name: str = "") -> Callable[[Command[T]], None]:
    """Make a command of a function: its arguments and options are the fields of `options`, the
    function gets them all in one, and returns the exit code.
    """

    def add(function: Command[T]) -> None:
        def called(**given: Any) -> None:
            set_up_logging(given.get("log_level", "warning"))  # the first that may find a fault
            read = {field: readers[field](value) for field, value in given.items()}
            raise typer.Exit(function(options(**read)))

        parameters, readers = _command_line(options)
        called.__doc__ = function.__doc__
        cast("Any", called).__signature__ = inspect.Signature(parameters)
        group.command(name or function.__name__)(called)

    return add


def _command_line(
    options: Any,
) -> tuple[list[inspect.Parameter], dict[str, Callable[[Any], Any]]]:
    """The parameters that typer is to see, and what makes a field's value of what typer gives."""
    parameters: list[inspect.Parameter] = []
    readers: dict[str, Callable[[Any], Any]] = {}
    hints = get_type_hints(options, include_extras=True)
    # those of a base class come first: `--help` lists what is required before, the log level last
    order = sorted(fields(options), key=lambda f: (f.name == "log_level", f.default is not MISSING))
    for field in order:
        kind, *notes = get_args(hints[field.name])
        shown = copy.copy(next(note for note in notes if isinstance(note, ParameterInfo)))
        (form,) = [note for note in notes if isinstance(note, ReadFrom)] or [ReadFrom(kind, _same)]
        flag = shown.default if isinstance(shown.default, str) else field.name
        shown.envvar = PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        readers[field.name] = form.read
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=[] if form.given == list[str] else default,
                annotation=Annotated[form.given, shown],
            )
        )
    return parameters, readers


def _same(value: Any) -> Any:
    return value


# ---- what boots a run, changes it and watches it -------------------------------------------------
# commands stand in the order in which `--help` lists them


@command(app, DemoOptions)
def demo(options: DemoOptions) -> int:
    """Start a whole swarm on this machine, watch it learn, and get a checkpoint."""
    from dilocox.peer.commands.demo import run_demo

    return run_demo(options)


@command(app, BootstrapOptions)
def bootstrap(options: BootstrapOptions) -> int:
    """Boot a run and print its invite; or, with an invite, run a second bootstrap for it."""
    from dilocox.peer.commands.bootstrap import run_bootstrap_command

    return run_bootstrap_command(options)


operate = typer.Typer(
    name="operate",
    help="Change, pause, end or turn back a run that you operate.",
    no_args_is_help=True,
)


@command(operate, OperateOptions, "pause")
def pause_run(options: OperateOptions) -> int:
    """Let all peers stop training; they stay, and keep and serve what they have."""
    from dilocox.peer.commands.operate import set_state

    return set_state(options.state, "paused")


@command(operate, OperateOptions, "resume")
def resume_run(options: OperateOptions) -> int:
    """Let the peers of a paused run train again."""
    from dilocox.peer.commands.operate import set_state

    return set_state(options.state, "running")


@command(operate, OperateOptions)
def end(options: OperateOptions) -> int:
    """End the run for good: its peers commit what they have learnt, and leave."""
    from dilocox.peer.commands.operate import set_state

    return set_state(options.state, "ended")


@command(operate, ReviseOptions, "revise")
def revise_run(options: ReviseOptions) -> int:
    """Give the run other learning rates, deadlines or another end."""
    from dilocox.peer.commands.operate import revise

    return revise(options.state, options.manifest)


@command(operate, RollbackOptions)
def rollback(options: RollbackOptions) -> int:
    """Go back to an earlier round; later rounds are kept aside and count no more."""
    from dilocox.peer.commands.operate import roll_back

    return roll_back(options.state, options.round_number)


app.add_typer(operate)


@command(app, MonitorOptions)
def monitor(options: MonitorOptions) -> int:
    """Watch a whole run: a status page for people, figures for Prometheus."""
    from dilocox.peer.monitor.monitor import run_monitor_command

    return run_monitor_command(options)


# ---- a volunteer's peer --------------------------------------------------------------------------
@command(app, PeerOptions)
def peer(options: PeerOptions) -> int:
    """Take part in a run: all it needs is the invite."""
    from dilocox.peer.process.resting import wait_until_allowed

    if not wait_until_allowed(options):
        return 0
    from dilocox.peer.process.peer import run_peer  # not while it rests: it takes its memory

    return run_peer(options)


@command(app, DoctorOptions)
def doctor(options: DoctorOptions) -> int:
    """Check whether a peer with these options could take part; exit code 1 if it could not."""
    from dilocox.peer.commands.doctor import run_doctor

    return run_doctor(options)


@command(app, RestOptions, "pause")
def pause_peer(options: RestOptions) -> int:
    """Let a peer leave the swarm and stay away until `resume`, also after a restart."""
    from dilocox.peer.process.resting import pause

    typer.echo(pause(options.state))
    return 0


@command(app, RestOptions, "resume")
def resume_peer(options: RestOptions) -> int:
    """Let a paused peer take part again."""
    from dilocox.peer.process.resting import resume

    typer.echo(resume(options.state))
    return 0


# ---- what reads a run: its models and its rounds -------------------------------------------------
@command(app, ExportOptions)
def export(options: ExportOptions) -> int:
    """Write the newest anchors of a run as a Hugging Face folder."""
    from dilocox.peer.commands.export import run_export_command

    return run_export_command(options)


@command(app, GenerateOptions)
def generate(options: GenerateOptions) -> int:
    """Continue a text with the newest anchors of a run."""
    from dilocox.peer.commands.export import run_generate_command

    return run_generate_command(options)


@command(app, LogOptions)
def log(options: LogOptions) -> int:
    """List a run's rounds (tokens, members, ranks, H, bytes, digest), or what each peer gave."""
    from dilocox.peer.commands.history import run_log_command

    return run_log_command(options)


@command(app, VerifyOptions)
def verify(options: VerifyOptions) -> int:
    """Replay a run's rounds and check that they make its anchors; exit code 1 on a flaw."""
    from dilocox.peer.commands.history import run_verify_command

    return run_verify_command(options)


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
