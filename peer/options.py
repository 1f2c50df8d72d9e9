"""The options of every command. A field of a dataclass here is an option, and all that it takes;
the dataclass's docstring is what `--help` says of the command.

A field states its type, its default, its limits (`Ge`, `Le`) and, as the last string, its help
text; cli.py makes the flag and the environment variable from its name, or from a string before the
help text. Where that does not do, it has typer's `Argument` or `Option`. A type that typer does not
know takes a `ReadFrom`, which may check what was given. Types that several commands share have a
name above the dataclasses. This file imports nothing heavy: `--help` needs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
from annotated_types import Ge, Le

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import SCHEME, Invite, listen_address, peer_id
from dilocox.dht.names import MAX_NAME, MAX_NAME_BYTES
from dilocox.peer.hours import Hours

GB = 1e9


# ---- what a field is read from ------------------------------------------------------------------
@dataclass(frozen=True)
class ReadFrom:
    """How a field is read: the type that the command line gives, and the function that makes the
    field's value of it; the function raises InvalidInput for a wrong one.

    A list that nobody gives is empty.
    """

    given: Any
    read: Callable[[Any], Any]


def announced(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses of `--announce`, checked before the imports that take seconds."""
    for address in addresses:
        try:
            listen_address(address)
        except InvalidInput as error:
            raise InvalidInput(f"--announce: {error}") from error
    return tuple(addresses)


def peer_ids(texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise InvalidInput("name at least one peer: `dilocox peer` prints its id when it starts")
    return tuple(map(peer_id, texts))


def text_to_continue(text: str) -> str:
    """The argument TEXT, which a model cannot continue if it is empty."""
    if not text:
        raise InvalidInput("TEXT is empty: give at least one character to continue")
    return text


def path_or_invite(text: str) -> Path | Invite:
    """What an argument names that may be either."""
    return Invite.parse(text) if text.strip().startswith(SCHEME) else Path(text)


def rates(text: str) -> tuple[float, ...]:
    """Numbers above 0 between commas."""
    try:
        found = tuple(float(each) for each in text.split(",") if each.strip())
    except ValueError:
        found = (0.0,)
    if not found or not all(0 < each < float("inf") for each in found):
        raise InvalidInput(f"--tokens-per-s {text}: give a number, or one for each stage: 120,95")
    return found


def name_of(option: str, text: str) -> str:
    """What `--name` or `--team` gives: it is shown on pages and terminals of others."""
    # what is not printable may have no UTF-8
    if not text.isprintable() or len(text) > MAX_NAME or len(text.encode()) > MAX_NAME_BYTES:
        raise InvalidInput(
            f"{option} {text!r}: give at most {MAX_NAME} printable characters, of at most "
            f"{MAX_NAME_BYTES} bytes in UTF-8"
        )
    return text


InviteText = Annotated[
    Invite,
    typer.Argument(help="The one string that the operator gave you: dilocox:RUN@ADDRESS,..."),
    ReadFrom(str, Invite.parse),
]
State = Annotated[Path, "Folder for identity, snapshots and log; it belongs to one peer at a time."]
PeerIds = Annotated[
    tuple[str, ...],
    typer.Argument(help="Ids of the peers, as `dilocox peer` prints them.", metavar="PEER_ID..."),
    ReadFrom(list[str], peer_ids),
]
Port = Annotated[int, Ge(0), Le(65535), "TCP port to listen on; 0 takes a free one."]
Host = Annotated[str, "Address to listen on; 0.0.0.0 for all, 127.0.0.1 for this machine only."]
Announce = Annotated[
    tuple[str, ...],
    "Multiaddress at which others reach this peer, if it is not the one it listens on (say "
    "/ip4/203.0.113.7/tcp/31337); may be given several times.",
    ReadFrom(list[str], announced),
]
Device = Annotated[str, "Where to train: auto (a GPU if there is one), cpu, cuda or cuda:N."]
MetricsHost = Annotated[
    str,
    "Address to show figures and health at; 127.0.0.1 for this machine only, 0.0.0.0 for all "
    "networks.",
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        show_default="9400 if that is free",
        help="TCP port of /metrics, /healthz and /readyz; 0 for none.",
    ),
]
JsonFile = Annotated[
    Path | None, "--json", "Write what was found to this file instead, - for the terminal."
]
Timeout = Annotated[float, Ge(1), "--timeout", "Give up asking the swarm after this many seconds."]
Dtype = Annotated[
    Literal["fp32", "bf16"], "bf16 is half as large; fp32 is what the run holds, to the bit."
]
DtypeInMemory = Annotated[
    Literal["fp32", "bf16"], "bf16 takes half the memory, and is slower on most processors."
]
Contributors = Annotated[bool, "List the contributors in the model card."]
LogLevel = Annotated[str, "debug, info, warning or error."]


# ---- what boots a run, changes it and watches it -------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Start a whole swarm on this machine, watch it learn, and get a checkpoint."""

    replicas: Annotated[int, Ge(1), Le(16), "Replicas to start, a peer a stage each."] = 2
    stages: Annotated[
        int, Ge(1), Le(16), "Stages to cut the model into; a peer of a replica trains one."
    ] = 2
    rounds: Annotated[int, Ge(1), "Stop when every peer has so many rounds."] = 10
    folder: Annotated[Path, "Folder for logs, states and the export."] = Path("demo-run")
    json_file: Annotated[Path | None, "--json", "Write the figures to this file."] = None
    device: Device = "auto"
    seed: Annotated[int, "Seed of the run."] = 0


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Describe a run: asks five questions, writes its run.yaml and says what it takes."""

    file: Annotated[Path, typer.Argument(help="The file to write; none is overwritten.")] = Path(
        "run.yaml"
    )
    # DILOCOX_NAME is how a volunteer is called
    name: Annotated[
        str | None, typer.Option(envvar="DILOCOX_RUN_NAME", help="Name of the run.")
    ] = None
    model: Annotated[
        str | None,
        "A preset (a wrong name lists them) or a checkpoint to go on from: a folder or "
        "NAME@COMMIT of the hub.",
    ] = None
    data: Annotated[
        str | None, "Text: a folder, file or pattern, a name on the hub, or stdlib."
    ] = None
    machines: Annotated[
        str | None,
        "How many there will be, memory (GB) of the smallest, or of its GPU if that has less, and "
        "upload (Mbit/s) of the slowest: 6x16GB@20.",
    ] = None
    tokens: Annotated[str | None, "After how many tokens it ends: 2_000_000_000, 2e9 or 2B."] = None
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="as few as fit the memory",
            help="Stages to cut the model into; never asked for.",
        ),
    ] = None
    yes: Annotated[bool, "Ask nothing: use the default where no option is given."] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Say what a run will do on given machines: whether it fits, its speed, bytes and days."""

    file: Annotated[Path, typer.Argument(help="The run.yaml; not read with --from.")] = Path(
        "run.yaml"
    )
    peers: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, show_default="4", help="Peers of all stages together."),
    ] = None
    mbit: Annotated[
        float | None,
        Ge(0.001),
        "Download of the slowest peer in Mbit/s, and its upload if --up-mbit is not given.",
    ] = None
    up_mbit: Annotated[float | None, Ge(0.001), "Upload of the slowest peer in Mbit/s."] = None
    rtt_ms: Annotated[float, Ge(0), Le(60_000), "Round trip between two peers."] = 50.0
    tflops: Annotated[
        float | None,
        Ge(1e-6),
        "What a peer achieves in training, in 10^12 operations a second: measured, or 30 to 40 % "
        "of what its vendor says.",
    ] = None
    tokens_per_s: Annotated[
        tuple[float, ...] | None,
        "In the place of --tflops: tokens/s of a stage as `dilocox doctor` measures them, of the "
        "slowest or of each: 120,95.",
        ReadFrom(str, rates),
    ] = None
    memory_gb: Annotated[float | None, Ge(0.001), "Memory of the smallest peer."] = None
    gpu_memory_gb: Annotated[float | None, Ge(0.001), "Memory of its GPU, if it trains on one."] = (
        None
    )
    threads: Annotated[
        int, Ge(0), "Cores that train, if one of them encodes, too; 0: another core does that."
    ] = 0
    invite: Annotated[
        Invite | None,
        "--from",
        "Invite of a live run, which tells its run.yaml, peers and speed; the link is measured to "
        "one of them. Options override it.",
        ReadFrom(str, Invite.parse),
    ] = None
    json_file: JsonFile = None
    host: Host = "0.0.0.0"
    log_level: LogLevel = "warning"


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """Boot a run and print its invite; or, with an invite, run a second bootstrap for it."""

    manifest: Annotated[
        Path | Invite,
        typer.Argument(
            help="The run's description, run.yaml; or its invite, to run a copy of its bootstrap."
        ),
        ReadFrom(str, path_or_invite),
    ]
    state: State = Path("dilocox-bootstrap")
    port: Port = 31337
    host: Host = "0.0.0.0"
    announce: Announce = ()
    join: Annotated[
        tuple[str, ...],
        "Another bootstrap of this run, for the invite to name it, too: its invite or "
        "multiaddress; may be given several times.",
        ReadFrom(list[str], tuple),
    ] = ()
    check: Annotated[
        bool,
        "Only see whether it would start, and what the run takes of a peer; publishes and writes "
        "nothing.",
    ] = False
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = None
    log_level: LogLevel = "info"

    @property
    def listen(self) -> str:
        return f"/ip4/{self.host}/tcp/{self.port}"


Yes = Annotated[bool, "Do not ask first; required in scripts."]


@dataclass(frozen=True, kw_only=True)
class OperateOptions:
    """What all of `dilocox operate` take."""

    state: Annotated[
        Path,
        "The state folder of the `dilocox bootstrap` that was given run.yaml; it may be running.",
    ] = Path("dilocox-bootstrap")
    key: Annotated[Path | None, "The operator's key, if it is not kept in the state folder."] = None
    log_level: LogLevel = "warning"


@dataclass(frozen=True, kw_only=True)
class StateOptions(OperateOptions):
    """What sets the state of a run."""

    wanted: ClassVar[Literal["running", "paused", "ended"]]


class PauseRunOptions(StateOptions):
    """Let all peers stop training; they stay, and keep and serve what they have."""

    wanted = "paused"


class ResumeRunOptions(StateOptions):
    """Let the peers of a paused run train again."""

    wanted = "running"


@dataclass(frozen=True, kw_only=True)
class EndRunOptions(StateOptions):
    """End the run for good: its peers commit what they have learnt, and leave."""

    wanted = "ended"
    yes: Yes = False


@dataclass(frozen=True, kw_only=True)
class ReviseOptions(OperateOptions):
    """Give the run other learning rates, deadlines or another end."""

    manifest: Annotated[Path, typer.Argument(help="The run.yaml with its new values.")]


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(OperateOptions):
    """Go back to an earlier round; later rounds are kept aside and count no more."""

    round_number: Annotated[
        int,
        Ge(-1),
        "--round",
        "Go on from the models after this round; -1 for the initial weights.",
    ]
    yes: Yes = False


@dataclass(frozen=True, kw_only=True)
class AdmitOptions(OperateOptions):
    """Let peers take part in a run whose run.yaml says `admission: listed`."""

    peers: PeerIds
    days: Annotated[int, Ge(1), Le(3650), "Days until it lapses; admit again to prolong."] = 30


@dataclass(frozen=True, kw_only=True)
class RevokeOptions(OperateOptions):
    """Withdraw peers' admission: all others refuse them within a minute."""

    peers: PeerIds


@dataclass(frozen=True, kw_only=True)
class AdmittedOptions(OperateOptions):
    """List who is admitted, and until when."""


@dataclass(frozen=True, kw_only=True)
class RotateOptions(OperateOptions):
    """Replace the operator's key: from now on only the new one can sign."""

    new_key: Annotated[
        Path | None, "Where to write it; operator.key in the state folder if left out."
    ] = None


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Watch a whole run: a status page for people, figures for Prometheus."""

    invite: InviteText
    state: Annotated[
        Path, "Folder for what the monitor has learnt, so that its curves outlive it."
    ] = Path("dilocox-monitor")
    track: Annotated[
        Path | None,
        "Write each round into this folder for TensorBoard, too; needs `pip install "
        "'dilocox\\[tracking]'`.",
    ] = None
    track_wandb: Annotated[
        Path | None,
        "The same as offline runs of wandb, for `wandb sync`; needs `pip install "
        "'dilocox\\[tracking]'`.",
    ] = None
    port: Port = 9470
    host: Host = "127.0.0.1"
    log_level: LogLevel = "info"


# ---- a volunteer's peer --------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class HostingOptions:
    """What it takes to host a stage: the options that `dilocox peer` and its doctor share."""

    invite: InviteText
    state: State = Path("dilocox-peer")
    stage: Annotated[
        str,
        "Slice of the model to host, a number from 0; auto takes the one with the fewest peers, "
        "and moves when another one has fewer.",
    ] = "auto"
    port: Port = 0
    host: Host = "0.0.0.0"
    announce: Announce = ()
    device: Device = "auto"
    threads: Annotated[int, Ge(0), "CPU threads for training; 0 takes all cores."] = 0
    recompute: Annotated[
        bool,
        "Keep only what goes into each layer and compute the rest a second time: much less memory "
        "for activations, a third more computing.",
    ] = False
    offload: Annotated[
        bool,
        "Keep weights, gradients and optimizer in the machine's memory and only copies of the "
        "weights on the GPU: a quarter of its memory, slower steps.",
    ] = False
    compile_layers: Annotated[
        bool,
        "--compile",
        "Compile the layers (torch.compile) at the first step: minutes at the start, faster steps; "
        "needs a C++ compiler, on a GPU Triton.",
    ] = False
    max_upload_mb_s: Annotated[
        float,
        Ge(0),
        "--max-upload",
        "Upload limit in MB/s for averaging and for serving joiners; 0 for none.",
    ] = 0
    memory_limit_gb: Annotated[
        float,
        Ge(0),
        "--memory-limit",
        "Memory limit in GB for all processes of this peer; 0 for none.",
    ] = 0
    data: Annotated[
        str,
        "Train on these files instead of the run's data: a folder, file or glob; .txt, .jsonl and "
        ".parquet say their format, others have the run's, or are text.",
    ] = ""
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = None
    log_level: LogLevel = "info"

    @property
    def memory_limit_bytes(self) -> float | None:
        return self.memory_limit_gb * GB or None


@dataclass(frozen=True, kw_only=True)
class PeerOptions(HostingOptions):
    """Take part in a run: all it needs is the invite."""

    name: Annotated[
        str,
        "Name of this peer that others see, at most 24 characters and 48 bytes in UTF-8.",
        ReadFrom(str, partial(name_of, "--name")),
    ] = ""
    team: Annotated[
        str,
        "Name of its team, as long as a name; contributions are summed up by team.",
        ReadFrom(str, partial(name_of, "--team")),
    ] = ""
    hours: Annotated[
        Hours | None,
        "Take part only in these hours of the local day, FIRST-LAST, say 22-6 for 22:00 to 06:00; "
        "may be given several times.",
        ReadFrom(list[str], Hours.parse),
    ] = None
    idle_only: Annotated[
        bool, "Rest while other programs use the processor or the GPU, and on battery."
    ] = False
    idle_share: Annotated[
        float,
        Ge(1),
        Le(100),
        "With --idle-only: percent of all cores, or of the GPU, that others may take.",
    ] = 25
    monthly_traffic_gb: Annotated[
        float,
        Ge(0),
        "--monthly-traffic",
        "Limit in GB of what is sent and received in a calendar month (UTC); over it the peer "
        "rests until the next month; 0 for none.",
    ] = 0

    snapshot_minutes: Annotated[
        float,
        Ge(0),
        "Minutes between snapshots; a crash may lose what was learnt since the last. Each writes "
        "28 bytes a parameter to the disk.",
    ] = 25  # so 6 bytes a parameter in a round of five minutes

    @property
    def monthly_traffic_bytes(self) -> float | None:
        return self.monthly_traffic_gb * GB or None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(HostingOptions):
    """Check whether a peer with these options could take part; exit code 1 if it could not."""

    json_file: JsonFile = None
    log_level: LogLevel = "error"


@dataclass(frozen=True, kw_only=True)
class PauseOptions:
    """Let a peer leave the swarm and stay away until `resume`, also after a restart."""

    state: State = Path("dilocox-peer")


class ResumeOptions(PauseOptions):
    """Let a paused peer take part again."""


# ---- what reads a run: its models and its rounds -------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class AnchorOptions:
    """What all have in common that take the newest anchors of a run."""

    invite: InviteText
    dtype: Dtype = "fp32"
    host: Host = "0.0.0.0"
    timeout_s: Timeout = 600
    archive_first: Annotated[
        bool, "Ask the operator's bootstrap before volunteers, as on its own machine."
    ] = False
    log_level: LogLevel = "warning"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(AnchorOptions):
    """Write the newest weights of a run as a Hugging Face folder."""

    folder: Annotated[Path, typer.Argument(help="Folder to write the checkpoint to.")]
    contributors: Contributors = False


@dataclass(frozen=True, kw_only=True)
class PushOptions(AnchorOptions):
    """Put the newest weights of a run into a repository on the Hugging Face hub."""

    repository: Annotated[
        str, typer.Argument(help="OWNER/NAME on the hub; it is made if it is not there.")
    ]
    every: Annotated[
        int, Ge(0), "Push again every so many rounds, until the run ends; 0 pushes once."
    ] = 0
    folder: Annotated[Path, "Folder for the checkpoint, which is uploaded from there."] = Path(
        "dilocox-push"
    )
    private: Annotated[bool, "Create the repository as private."] = False
    contributors: Contributors = False


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnchorOptions):
    """Continue a text with the newest weights of a run."""

    text: Annotated[str, typer.Argument(help="Text to continue."), ReadFrom(str, text_to_continue)]
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="200, or what the model has room for",
            help="Write at most so many tokens.",
        ),
    ] = None
    temperature: Annotated[
        float, Ge(0), "Temperature of the sampling; 0 takes the likeliest token each time."
    ] = 0.8
    dtype: DtypeInMemory = "fp32"
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="random", help="The same seed, the same text.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AnchorOptions):
    """Answer on this machine with the newest weights of a run: a chat page, and OpenAI's API."""

    port: Port = 9480
    host: Host = "127.0.0.1"
    dtype: DtypeInMemory = "fp32"
    refresh_rounds: Annotated[
        int, Ge(0), "Load newer weights once there are so many newer rounds; 0 for never."
    ] = 1
    refresh_minutes: Annotated[
        float, Ge(0), "And at most once in so many minutes: peers upload the whole model for it."
    ] = 10
    memory_limit_gb: Annotated[
        float, Ge(0), "--memory-limit", "Memory limit in GB for all of it; 0 for none."
    ] = 0
    log_level: LogLevel = "info"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Replay a run's rounds and check that they make its weights; exit code 1 if not."""

    source: Annotated[
        Path | Invite,
        typer.Argument(
            help="The state folder of a peer or bootstrap, or an invite to ask the swarm."
        ),
        ReadFrom(str, path_or_invite),
    ]
    stage: Annotated[str, "Stage to look at, a number from 0, or all."] = "all"
    host: Host = "0.0.0.0"
    timeout_s: Timeout = 600
    log_level: LogLevel = "warning"


@dataclass(frozen=True, kw_only=True)
class LogOptions(VerifyOptions):
    """List a run's rounds (tokens, members, ranks, H, bytes, digest; time and losses where they are
    known), or what each peer gave.
    """

    contributions: Annotated[
        bool,
        "List the peers, names and teams instead, with their tokens and hours in committed rounds.",
    ] = False
    csv_file: Annotated[
        Path | None,
        "--csv",
        "Write the history of the whole run, a line a round, to this file instead, - for the "
        "terminal.",
    ] = None
    json_file: JsonFile = None
