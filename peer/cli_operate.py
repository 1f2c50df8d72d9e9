"""The commands `dilocox operate ...` of a run's operator."""

# no `from __future__ import annotations`: typer reads these as they are

from pathlib import Path
from typing import Annotated

import typer

from dilocox.peer.cli_options import LogLevel, env
from dilocox.peer.logs import set_up_logging

app = typer.Typer(
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
FOLDER = Path("dilocox-bootstrap")


@app.command()
def pause(state: OperatorState = FOLDER, log_level: LogLevel = "warning") -> None:
    """Let all peers stop training; they stay, and keep and serve what they have."""
    set_up_logging(log_level)
    from dilocox.peer.operator import set_state

    raise typer.Exit(set_state(state, "paused"))


@app.command()
def resume(state: OperatorState = FOLDER, log_level: LogLevel = "warning") -> None:
    """Let the peers of a paused run train again."""
    set_up_logging(log_level)
    from dilocox.peer.operator import set_state

    raise typer.Exit(set_state(state, "running"))


@app.command()
def end(state: OperatorState = FOLDER, log_level: LogLevel = "warning") -> None:
    """End the run for good: its peers commit what they have learnt, and leave."""
    set_up_logging(log_level)
    from dilocox.peer.operator import set_state

    raise typer.Exit(set_state(state, "ended"))


@app.command()
def revise(
    manifest: Annotated[
        Path, typer.Argument(help="The run.yaml with its new values.", envvar=env("manifest"))
    ],
    state: OperatorState = FOLDER,
    log_level: LogLevel = "warning",
) -> None:
    """Give the run other learning rates, deadlines or another end."""
    set_up_logging(log_level)
    from dilocox.peer.operator import revise as revise_run

    raise typer.Exit(revise_run(state, manifest))


@app.command()
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
    state: OperatorState = FOLDER,
    log_level: LogLevel = "warning",
) -> None:
    """Go back to an earlier round; later rounds are kept aside and count no more."""
    set_up_logging(log_level)
    from dilocox.peer.operator import roll_back

    raise typer.Exit(roll_back(state, round_number))
