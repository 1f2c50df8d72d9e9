"""The options that several commands of `dilocox` share, with their help texts and variables."""

# no `from __future__ import annotations`: typer reads these as they are

from pathlib import Path
from typing import Annotated

import typer

from dilocox.peer.subprocesses import PREFIX


def env(option: str) -> str:
    """The environment variable of an option."""
    return PREFIX + option.upper().replace("-", "_")


InviteText = Annotated[
    str,
    typer.Argument(
        help="The one string that the operator gave you: dilocox:RUN@ADDRESS,...",
        envvar=env("invite"),
    ),
]
State = Annotated[
    Path,
    typer.Option(
        help="Folder for identity, snapshots and log; it belongs to one peer at a time.",
        envvar=env("state"),
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="TCP port to listen on; 0 takes a free one.", envvar=env("port")
    ),
]
Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; 0.0.0.0 for all, 127.0.0.1 for this machine only.",
        envvar=env("host"),
    ),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        help="Multiaddress at which others reach this peer, if it is not the one it listens on "
        "(say /ip4/203.0.113.7/tcp/31337); may be given several times.",
        envvar=env("announce"),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to train: auto (a GPU if there is one), cpu, cuda or cuda:N.",
        envvar=env("device"),
    ),
]
Threads = Annotated[
    int,
    typer.Option(min=0, help="CPU threads for training; 0 takes all cores.", envvar=env("threads")),
]
LogLevel = Annotated[
    str,
    typer.Option(help="debug, info, warning or error.", envvar=env("log-level")),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        help="Address to show figures and health at; 127.0.0.1 for this machine only, 0.0.0.0 for "
        "all networks.",
        envvar=env("metrics-host"),
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        show_default="9400 if that is free",
        help="TCP port of /metrics, /healthz and /readyz; 0 for none.",
        envvar=env("metrics-port"),
    ),
]
ChainSource = Annotated[
    str,
    typer.Argument(
        help="The state folder of a peer or bootstrap, or an invite to ask the swarm.",
        envvar=env("source"),
    ),
]
ChainStage = Annotated[
    str,
    typer.Option(
        help="Slice of the model whose chain is meant, a number from 0, or all.",
        envvar=env("stage"),
    ),
]
ChainTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        help="Give up asking the swarm after this many seconds.",
        envvar=env("timeout"),
    ),
]
