"""The options that several commands of `dilocox` share, with their help texts and variables."""

from pathlib import Path
from typing import Annotated

import typer

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import SCHEME, Invite, listen_address
from dilocox.peer.os_process import PREFIX


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
HostedStage = Annotated[
    str,
    typer.Option(
        help="Slice of the model to host, a number from 0; auto takes the one that lacks peers "
        "most, and another one when that changes.",
        envvar=env("stage"),
    ),
]
MaxUpload = Annotated[
    float,
    typer.Option(
        min=0,
        help="Upload limit in MB/s for averaging and for serving joiners; 0 for none.",
        envvar=env("max-upload"),
    ),
]
MemoryLimit = Annotated[
    float,
    typer.Option(
        min=0,
        help="Memory limit in GB for all processes of this peer; 0 for none.",
        envvar=env("memory-limit"),
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="Train on these files instead of the run's data: a folder, file or glob; .txt, "
        ".jsonl and .parquet say their format, others have the run's, or are text.",
        envvar=env("data"),
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
OnlyHours = Annotated[
    list[str] | None,
    typer.Option(
        help="Take part only in these hours of the local day, FIRST-LAST, say 22-6 for 22:00 to "
        "06:00; may be given several times.",
        envvar=env("hours"),
    ),
]
MonthlyTraffic = Annotated[
    float,
    typer.Option(
        min=0,
        help="Limit in GB of what is sent and received in a calendar month (UTC); over it the peer "
        "rests until the next month; 0 for none.",
        envvar=env("monthly-traffic"),
    ),
]
Contributions = Annotated[
    bool,
    typer.Option(
        "--contributions",
        help="List the peers instead, with the tokens of theirs that are in committed rounds of "
        "each stage.",
        envvar=env("contributions"),
    ),
]
Text = Annotated[str, typer.Argument(help="What is to be continued.", envvar=env("text"))]
NewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="200, or what the model has room for",
        help="Write at most so many tokens.",
        envvar=env("tokens"),
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0,
        help="How daring it is; 0 takes the likeliest token each time.",
        envvar=env("temperature"),
    ),
]
TextSeed = Annotated[
    int | None,
    typer.Option(
        min=0, show_default="random", help="The same seed, the same text.", envvar=env("seed")
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        show_default="~/.cache/dilocox",
        help="Folder for the weights; those of the newest round are not fetched twice.",
        envvar=env("cache"),
    ),
]


def announced(addresses: list[str] | None) -> tuple[str, ...]:
    """What `--announce` names, checked before the imports that take seconds."""
    for address in addresses or ():
        try:
            listen_address(address)
        except InvalidInput as error:
            raise InvalidInput(f"--announce: {error}") from error
    return tuple(addresses or ())


def path_or_invite(text: str) -> Path | Invite:
    """What an argument names that may be either."""
    return Invite.parse(text) if text.strip().startswith(SCHEME) else Path(text)
