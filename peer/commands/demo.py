"""The command `dilocox demo`: a whole swarm as real processes on this machine.

It does what an operator and volunteers do, with the same commands: `dilocox bootstrap`, several
`dilocox peer`, `dilocox export`. It reads their status files for the table, and at the end loads
the checkpoint with plain transformers to see that the reported loss is true.

`WatchedPeer` is a peer as seen through the files that it writes (peer/training/report.py), and
`SwarmTable` one live table of them on a terminal; plain lines, one a round, elsewhere. `DemoResult`
has their figures. Every stage has a chain of its own: rounds and tokens are those of stage 0, where
a replica's tokens count once; digests are compared among the peers of one stage.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import make_folder, write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.peer.options import DemoOptions
from dilocox.peer.os_process import Child, StopSignal, counted, start_command, write_json
from dilocox.peer.state_folder import EVENTS_FILE, STATUS_FILE, StateFolder
from dilocox.peer.training.report import shown_loss
from dilocox.pipeline.partition import plan_stages

logger = logging.getLogger(__name__)


@dataclass
class WatchedPeer:
    """What one peer has said so far; `look` reads what is new.

    stage, number: the stage that it was told to host, and which of the stage's peers it is.
    """

    name: str
    state: Path
    child: Child
    stage: int = 0
    number: int = 0
    status: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    voids: int = 0
    training_s: float = 0.0
    _read: dict[Path, int] = field(default_factory=dict[Path, int])  # bytes, by events file
    _began: float | None = None

    @property
    def head(self) -> str:
        """Peer id of the head of the replica that it is in, empty for none."""
        return str(self.status.get("head", ""))

    @property
    def waiting_share(self) -> float:
        """Share of its time that the training loop waited."""
        return float(self.status.get("waiting_share", 0.0))

    def look(self) -> None:
        """Read the newest status and the events since the last look."""
        folder = StateFolder(self.state)
        for path in folder.of_stages(STATUS_FILE):
            self.status = json.loads(path.read_text())
        for path in folder.of_stages(EVENTS_FILE):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._read[path] = file.tell()
                    self.take(json.loads(line))

    def take(self, event: dict[str, Any]) -> None:
        """Count one of its events."""
        match event["event"]:
            case "training":
                self._began = self._began or event["time"]
            case "round":
                self.rounds.append(event)
                self.training_s = event["time"] - (self._began or event["time"])
            case "validated":
                self.losses[event["round"]] = event["loss"]
            case "void":
                self.voids += 1
            case _:
                pass


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The figures of a demo; losses in nats a byte, bytes of one peer and round at the mean.

    bytes_sent_per_round: for averages; bytes_fp16_per_round: what fp16 would have taken.
    bytes_uploaded_per_round: with the records and states that others, the bootstrap among them,
        fetched from peers.
    """

    stages: int
    replicas: int
    rounds_committed: int
    rounds_void: int
    val_loss_first: float | None
    val_loss_last: float | None
    val_loss_export: float | None
    tokens: int
    tokens_per_s: float
    waiting_share: float
    bytes_sent_per_round: float
    bytes_fp16_per_round: float
    bytes_uploaded_per_round: float
    digests_equal: bool
    seconds: float
    export: str


def demo_result(
    peers: Sequence[WatchedPeer], export: Path | None, export_loss: float | None, seconds: float
) -> DemoResult:
    """What these peers did; `export_loss` is that of the checkpoint in the folder `export`."""
    first = [peer for peer in peers if peer.stage == 0]
    of_run = [line for peer in first for line in peer.rounds]
    lines = [line for peer in peers for line in peer.rounds]
    losses = losses_of(peers)
    training_s = _mean([peer.training_s for peer in first])
    tokens = max((line["chain_tokens"] for line in of_run), default=0)
    last = None if export is None else exported_round(export)
    return DemoResult(
        stages=len({peer.stage for peer in peers}),
        replicas=len(first),
        rounds_committed=len({line["round"] for line in of_run}),
        rounds_void=max((peer.voids for peer in peers), default=0),
        val_loss_first=losses.get(-1),
        val_loss_last=None if last is None else losses.get(last),
        val_loss_export=export_loss,
        tokens=tokens,
        tokens_per_s=tokens / training_s if training_s else 0.0,
        waiting_share=_mean([peer.waiting_share for peer in peers]),
        bytes_sent_per_round=_mean(_sent_for_averages(peers)),
        bytes_fp16_per_round=_mean([line["fp16_bytes"] for line in lines]),
        bytes_uploaded_per_round=_mean([line["sent_bytes"] for line in lines]),
        digests_equal=_digests_equal(peers),
        seconds=seconds,
        export="" if export is None else str(export),
    )


def losses_of(peers: Sequence[WatchedPeer]) -> dict[int, float]:
    """The validation loss of each round's anchors, as heads reported it; -1 is the start."""
    return {number: loss for peer in peers for number, loss in peer.losses.items()}


def exported_round(folder: Path) -> int | None:
    """The round that all stages of an export stand on, None if they stand on several."""
    stages = json.loads((folder / "dilocox.json").read_text())["stages"]
    rounds = {int(stage["round"]) for stage in stages}
    return rounds.pop() if len(rounds) == 1 else None


def _digests_equal(peers: Sequence[WatchedPeer]) -> bool:
    """Whether peers of one stage never had different records or anchors of a round."""
    seen: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for peer in peers:
        for line in peer.rounds:
            key = (peer.stage, line["round"])
            seen.setdefault(key, set()).add((line["digest"], line["anchor_sha256"]))
    return all(len(found) == 1 for found in seen.values())


def _sent_for_averages(peers: Sequence[WatchedPeer]) -> list[int]:
    """By stage and round what a peer sent that took part, and served nobody meanwhile: the least.

    All members of a group send as much, up to a rounding.
    """
    least: dict[tuple[int, int], int] = {}
    for peer in peers:
        for line in peer.rounds:
            if line["outcome"] == "counted":
                key = (peer.stage, line["round"])
                least[key] = min(least.get(key, line["sent_bytes"]), line["sent_bytes"])
    return list(least.values())


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


class SwarmTable:
    """A context; `update` shows the peers as they are."""

    def __init__(self, *, rounds: int):
        self._rounds = rounds
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._printed: set[int] = set()

    def __enter__(self) -> SwarmTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, peers: Sequence[WatchedPeer]) -> None:
        if self._console.is_terminal:
            self._live.update(swarm_table(peers, self._rounds), refresh=True)
            return
        losses = losses_of(peers)
        newest_loss = max(losses, default=-1)  # of rounds before it none will be told any more
        lines = {line["round"]: line for peer in peers if peer.stage == 0 for line in peer.rounds}
        for number, line in sorted(lines.items()):
            if number <= newest_loss and number not in self._printed:
                self._printed.add(number)
                self._console.print(
                    f"round {number}: {line['members']} replicas, "
                    f"{line['chain_tokens']:,} tokens so far, train loss "
                    f"{shown_loss(line['train_loss'])}, validation loss "
                    f"{shown_loss(losses.get(number))}, digest of stage 0 {line['digest'][:12]}",
                    highlight=False,
                    soft_wrap=True,  # one line, however long
                )


def swarm_table(peers: Sequence[WatchedPeer], rounds: int) -> Table:
    table = Table(title=f"dilocox demo: {rounds} rounds", title_justify="left")
    for name in ("stage", "peer", "state", "replica"):
        table.add_column(name)
    figures = ("round", "step", "train loss", "validation", "tokens/s", "waiting", "committed")
    for name in (*figures, "digest"):
        table.add_column(name, justify="right")
    heads = {peer.head: peer.number for peer in peers if peer.stage == 0 and peer.head}
    for peer in peers:
        status = peer.status
        table.add_row(
            str(peer.stage),
            peer.name,
            status.get("state", "starting"),
            _replica(peer, heads),
            str(status.get("round", "-")),
            f"{status.get('inner_step', '-')}/{status.get('inner_steps', '-')}",
            shown_loss(status.get("train_loss")),
            shown_loss(status.get("val_loss")),
            f"{status.get('tokens_per_s', 0.0):,.0f}",
            f"{peer.waiting_share:.1%}",
            str(len(peer.rounds)),
            peer.rounds[-1]["digest"][:12] if peer.rounds else "-",
        )
    return table


def _replica(peer: WatchedPeer, heads: dict[str, int]) -> str:
    """Of the replica that a peer is in: the number of its head; a dash for none."""
    if not peer.head:
        return "-"
    number = heads.get(peer.head)
    role = " (head)" if peer.stage == 0 else ""
    return f"{peer.head[-6:] if number is None else number}{role}"


START_LIMIT_S = 120.0
ROUND_LIMIT_S = 300.0  # without a committed round for so long, something is wrong
EXPORT_LIMIT_S = 120.0
EXPORT_START_S = 60.0  # on top, until the command has begun to look for anchors
LEAVE_LIMIT_S = 30.0
LOOK_S = 0.5
MARK = ".dilocox-demo"  # a file in the folder of a demo, which the next one may remove
PROMPT = "def "

# Rounds of ten seconds and more where four peers share two cores.
INNER_STEPS = 40
BATCH = {"sequence_length": 256, "microbatch_size": 2, "microbatches": 2}
SPARE_ROUNDS = 10  # the schedule ends later than the demo, which stops by itself


def run_demo(options: DemoOptions) -> int:
    """Run it to its end or to Ctrl-C; the exit code is 0 if a checkpoint came out."""
    began = time.monotonic()
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise InvalidInput(f"--json {options.json_file}: its folder does not exist; make it first")
    facts = demo_manifest(options)
    manifest = Manifest.from_dict(facts)
    plan_stages(manifest.model, options.stages)  # before anything is started
    clear(options.folder)
    text = yaml.safe_dump(facts, sort_keys=False)
    write_atomically(options.folder / "run.yaml", text.encode())
    demo, export = Demo(options), None
    with StopSignal() as stop:
        try:
            invite = demo.start_bootstrap()
            typer.echo(f"bootstrap is up; a volunteer would type: dilocox peer {invite}")
            demo.start_peers(invite)
            swarm = _swarm(options.replicas, options.stages)
            logs = f"{options.folder}/peer-*.log"
            typer.echo(f"{len(demo.peers)} peers are starting: {swarm}; their logs are {logs}")
            stop.defer()
            demo.watch(stop)
            export = demo.export(invite)
        finally:
            stop.defer()
            demo.close()
    loss = None if export is None else _evaluate(manifest, export)
    result = demo_result(demo.peers, export, loss, time.monotonic() - began)
    if options.json_file is not None:
        write_json(options.json_file, asdict(result))
    _show(result, options.seed)
    return 0 if result.val_loss_export is not None else 1


def demo_manifest(options: DemoOptions) -> dict[str, Any]:
    tokens_per_step = BATCH["sequence_length"] * BATCH["microbatch_size"] * BATCH["microbatches"]
    tokens_per_round = options.replicas * INNER_STEPS * tokens_per_step
    return {
        "name": "demo",
        "model": "tiny",
        "stages": options.stages,
        "seed": options.seed,
        "end_tokens": (options.rounds + SPARE_ROUNDS) * 2 * tokens_per_round,
        "data": {"source": "stdlib", "parts": 16, "validation_share": 1.0},
        "batch": BATCH,
        "inner": {"learning_rate": 3e-3, "warmup_tokens": tokens_per_round},
        # short enough to watch: a real run would make them longer, and train more of the time
        "rounds": {"inner_steps": INNER_STEPS, "max_inner_steps": INNER_STEPS},
        "deadlines": {"heartbeat_s": 4.0, "matchmaking_s": 2.0, "exchange_s": 10.0, "vote_s": 5.0},
    }


def clear(folder: Path) -> None:
    """Make room for a new demo; only an earlier demo is removed, never a run that has keys."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        if not (folder / MARK).exists():
            raise InvalidInput(
                f"{folder} is not an earlier demo's (it has no file {MARK}), so it is not removed: "
                "choose another one with --folder"
            )
        typer.echo(f"removing the earlier demo in {folder}")
        shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    (folder / MARK).touch()


class Demo:
    """The commands of a demo, each with a state folder and a log in the demo's folder."""

    def __init__(self, options: DemoOptions):
        self.peers: list[WatchedPeer] = []
        self._options = options
        self._children: list[Child] = []

    def close(self) -> None:
        """Ask all that runs to leave, the bootstrap last, and wait for it."""
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            child.wait(LEAVE_LIMIT_S)

    def start_bootstrap(self) -> str:
        """Start it and wait for its invite."""
        folder = self._options.folder
        invite = StateFolder(folder / "bootstrap").invite
        child = self._start("bootstrap", "bootstrap", str(folder / "run.yaml"), "--port", "0")
        deadline = time.monotonic() + START_LIMIT_S
        while not invite.exists():
            child.check()
            if time.monotonic() > deadline:
                limit = f"{START_LIMIT_S:.0f} s"
                raise EnvironmentFault(f"the bootstrap did not start within {limit}: {child.log}")
            time.sleep(0.1)
        return invite.read_text().strip()

    def start_peers(self, invite: str) -> None:
        """Start a peer for each stage of each replica; they share the cores."""
        options = self._options
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // (options.stages * options.replicas))
        place = ("--device", options.device, "--threads", str(threads))
        for number, stage in product(range(options.replicas), range(options.stages)):
            name = f"peer-{stage}-{number}"
            child = self._start(name, "peer", invite, "--stage", str(stage), *place)
            peer = WatchedPeer(name, options.folder / name, child, stage=stage, number=number)
            self.peers.append(peer)

    def _start(self, name: str, *arguments: str) -> Child:
        folder = self._options.folder
        place = ["--state", str(folder / name), "--host", "127.0.0.1"]
        child = start_command([*arguments, *place], folder / f"{name}.log")
        self._children.append(child)
        return child

    def watch(self, stop: StopSignal) -> None:
        """Show the swarm until every peer has merged enough records, or Ctrl-C."""
        rounds = self._options.rounds
        progressed, seen = time.monotonic(), 0
        with SwarmTable(rounds=rounds) as table:
            while not stop.event.wait(LOOK_S):
                for peer in self.peers:
                    peer.look()
                    peer.child.check()
                table.update(self.peers)
                committed = sum(len(peer.rounds) for peer in self.peers)
                if committed > seen:
                    seen, progressed = committed, time.monotonic()
                if all(len(peer.rounds) >= rounds for peer in self.peers):
                    return
                if time.monotonic() - progressed > ROUND_LIMIT_S:
                    raise EnvironmentFault(
                        f"no round was committed for {ROUND_LIMIT_S:.0f} s; see "
                        f"{self._options.folder}/*.log"
                    )

    def export(self, invite: str) -> Path | None:
        """Export while the peers still train, until it is of a round whose loss a head reported.

        Nobody evaluates a round whose anchors the stages never held at the same time; then another
        one is exported.
        """
        options = self._options
        if len({peer.stage for peer in self.peers if peer.rounds}) < options.stages:
            return None
        folder = options.folder / "export"
        arguments = ["export", invite, str(folder), "--host", "127.0.0.1"]
        arguments += ["--timeout", str(EXPORT_LIMIT_S)]
        deadline = time.monotonic() + EXPORT_LIMIT_S
        while True:
            child = start_command(arguments, options.folder / "export.log")
            child.wait(EXPORT_LIMIT_S + EXPORT_START_S)
            if child.returncode != 0:
                raise EnvironmentFault(f"the export failed: {child.last_line()}")
            if loss_told(self.peers, exported_round(folder), deadline):
                return folder
            if time.monotonic() > deadline:
                logger.warning("no head told the loss of the exported round")
                return folder


def loss_told(peers: Sequence[WatchedPeer], number: int | None, deadline: float) -> bool:
    """Wait for the loss of a round; whether it was told before that of a later round."""
    while True:
        for peer in peers:
            peer.look()
        losses = losses_of(peers)
        if number in losses:
            return True
        if number is None or max(losses, default=-1) > number or time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)


def _evaluate(manifest: Manifest, export: Path) -> float:
    """The loss of the checkpoint by plain transformers, on the run's held-out windows."""
    from dilocox.peer.commands.export import evaluate_checkpoint
    from dilocox.peer.training.data import held_out_windows

    length, count = manifest.batch.sequence_length, manifest.data.held_out_windows
    windows = held_out_windows(manifest.data, length, count)
    return evaluate_checkpoint(export, windows)


def _show(result: DemoResult, seed: int) -> None:
    if result.val_loss_export is None:
        typer.echo("stopped before the first round was committed: nothing to export")
        return
    from dilocox.peer.commands.export import continue_text

    typer.echo(
        f"{_swarm(result.replicas, result.stages)}: {result.rounds_committed} rounds committed, "
        f"{result.rounds_void} void, {result.tokens:,} tokens at {result.tokens_per_s:,.0f} "
        f"tokens/s in {result.seconds:.0f} s\n"
        f"validation loss {shown_loss(result.val_loss_first)} -> "
        f"{shown_loss(result.val_loss_last)} nats a byte, of the export by transformers "
        f"{result.val_loss_export:.4f}\n"
        f"waiting for averages {result.waiting_share:.2%} of the time; "
        f"{result.bytes_sent_per_round / 1e3:,.0f} kB sent for them a peer and round "
        f"(fp16: {result.bytes_fp16_per_round / 1e3:,.0f} kB), "
        f"{result.bytes_uploaded_per_round / 1e3:,.0f} kB with what others fetched\n"
        f"digests and anchors equal on all peers of a stage: "
        f"{'yes' if result.digests_equal else 'NO'}\n"
        f"checkpoint: {result.export}; it continues {PROMPT!r} with\n"
    )
    typer.echo(continue_text(Path(result.export), PROMPT, 200, seed))


def _swarm(replicas: int, stages: int) -> str:
    return f"{counted(replicas, 'replica')} of {counted(stages, 'stage')}"
