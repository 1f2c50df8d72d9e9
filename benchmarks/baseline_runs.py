"""One run of one contestant on one kind of link, for benchmarks/baselines.py.

`RIVALS` are processes of baseline_peer.py, `OURS` are swarms of real `dilocox peer` processes with
nothing changed but the sections of the manifest that are named there; all have the same model,
batch, inner optimizer, source of data and held-out windows, and one torch thread a peer. Inner
steps are seen as they happen, bytes are read from the links' counters of IP packets.

What is measured begins when all train and is cut at ends of rounds, so that exchanges are whole.
Losses are of kept weights, afterwards: rivals keep a file of them every few seconds, of ours the
anchors are made again from the round log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.baseline_peer import Settings
from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import DataSpec
from dilocox.peer.os_process import Child, start_process
from dilocox.peer.rounds.outer_step import move_anchor
from dilocox.peer.training.data import held_out_windows, validation_loss
from dilocox.pipeline.stage import build_stage, flatten_parameters
from tests.swarm.exchange_costs import WIDE_MODEL
from tests.swarm.harness import ProcessSwarm, memory_folder
from tests.swarm.links import Links
from tests.swarm.processes import TAG, family, send_signal, shared_memory
from tests.swarm.relay import DEVICE
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps, run_manifest
from tests.swarm.spans import stepping_share

PARTS, WINDOWS = 8, 64
BATCH = {"sequence_length": 128, "microbatch_size": 4}
STEP_TOKENS = BATCH["sequence_length"] * BATCH["microbatch_size"]
INNER = {"learning_rate": 1e-3, "schedule": "constant"}
ROUND_STEPS = 150  # H of ours: rounds of about 25 s on the machine of the results
SHORT_STEPS = 20  # H of OpenDiLoCo's optimizer
NEVER = 100_000

PLAIN, ALL_REDUCE, OPEN_DILOCO, AVERAGER = (
    "plain loop",
    "AllReduce",
    "OpenDiLoCo",
    "hivemind averager",
)
SYNCHRONOUS, PUBLISHED, OURS, ALONE = "DiLoCo", "DiLoCoX", "ours", "ours, averaging off"
RIVALS = {
    PLAIN: "plain",
    ALL_REDUCE: "allreduce",
    OPEN_DILOCO: "opendiloco",
    AVERAGER: "averager",
}
PRODUCT: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {
        "outer": {"merge": "none", "learning_rate": 0.7, "momentum": 0.9},
        "codec": {"bits": 16},
    },
    PUBLISHED: {"outer": {"merge": "reset"}, "codec": {"scheme": "low_rank", "bits": 4}},
    OURS: {},
    ALONE: {"rounds": fixed_steps(NEVER)},
}
CONTESTANTS = (*RIVALS, *PRODUCT)

START_LIMIT_S = 120.0
POLL_S, SWARM_POLL_S = 0.25, 1.0  # to look at a swarm costs milliseconds
MODEL_S = 6.0
SKIP_S = 4.0  # of loops without rounds, at the start
LEAVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A kind of link, the same for every peer; no rate: loopback, nothing is shaped or counted."""

    name: str
    mbit: float | None
    delay_ms: float = 0.0
    loss: float = 0.0

    def links(self, hosts: int) -> Links | None:
        """So many of them."""
        if self.mbit is None:
            return None
        return Links(hosts, mbit=self.mbit, delay_ms=self.delay_ms, loss=self.loss)


LINES = {
    line.name: line
    for line in (
        Line(name="none", mbit=None),
        Line(name="100", mbit=100.0),
        Line(name="10", mbit=10.0),
        Line(name="1", mbit=1.0),
        Line(name="lossy", mbit=10.0, delay_ms=50.0, loss=0.01),
        Line(name="far", mbit=10.0, delay_ms=250.0),
    )
}


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is. seconds: measured, at least. rounds: the same. limit_s: then it hangs.
    tokens: of all peers that are in kept weights, at least. first: whether the first round of
    rivals is measured, too, in which they may still look for each other. windows: held out, for
    the losses.
    """

    seconds: float
    rounds: int
    limit_s: float
    tokens: float = 0.0
    first: bool = False
    windows: int = WINDOWS


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to.

    turn: of the call of the script that it is from. seed: of the initial weights and the order of
    the data. outcome: "ok", "hung", or why it ended.
    steps: H of the measured rounds, [least, most]. seconds: measured. computing: share of time.
    bytes_per_token: of IP packets that peers' links sent. models: [seconds since all trained,
    tokens of all peers, loss] of the weights that were kept. cores: of ours, how many each kind of
    process kept busy, all peers together.
    """

    turn: str
    contestant: str
    line: str
    peers: int
    seed: int = 0
    outcome: str = "ok"
    steps: tuple[int, int] | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    computing: float | None = None
    bytes_per_token: float | None = None
    models: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )

    cores: dict[str, float] = field(default_factory=dict[str, float])

    def text(self) -> str:
        """A line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> list[Result]:
        """All that a file holds."""
        lines = path.read_text().splitlines() if path.exists() else []
        found = [cls(**json.loads(line)) for line in lines]
        return [replace(each, steps=each.steps and tuple(each.steps)) for each in found]  # pyright: ignore[reportArgumentType]


class Counted:
    """Bytes that peers' links have sent, read again and again."""

    def __init__(self, links: Links | None, hosts: Sequence[int]):
        self._links, self._hosts = links, hosts
        self._times: list[float] = []
        self._bytes: list[int] = []

    def sample(self) -> None:
        """Note what has passed by now."""
        if self._links is not None:
            sent = sum(self._links.counters(host).sent_bytes for host in self._hosts)
            self._bytes.append(sent)
            self._times.append(time.time())

    def between(self, start: float, stop: float) -> int | None:
        """Bytes sent between two times."""
        if self._links is None:
            return None
        first, last = (max(bisect_right(self._times, at) - 1, 0) for at in (start, stop))
        return self._bytes[last] - self._bytes[first]


class Processors:
    """Processor seconds of a swarm by kind of process, read again and again.

    On a machine whose cores all train, what does not train takes from what does: this says what.
    """

    def __init__(self, swarm: ProcessSwarm, links: Links | None):
        """When all train: no process is started after that."""
        self._links = links
        self._pids: dict[int, str] = {os.getpid(): "this script"}
        for process in family(f"{swarm.tag}.bootstrap"):
            self._pids[process.pid] = "bootstrap"
        for peer in swarm.peers:
            averager = peer.averager().pid
            for process in peer.processes():
                kind = "p2pd" if process.name == "p2pd" else "DHT"
                kind = "averaging" if process.pid == averager else kind
                self._pids[process.pid] = "training" if process.pid == peer.child.pid else kind
        self._times: list[float] = []
        self._spent: list[dict[str, float]] = []

    def sample(self) -> None:
        """Note what they have taken by now."""
        spent = dict.fromkeys(self._pids.values(), 0.0)
        for pid, kind in self._pids.items():
            spent[kind] += processor_s(pid)
        if self._links is not None:
            spent["links"] = processor_s(self._links.relay)
        self._times.append(time.time())
        self._spent.append(spent)

    def cores(self, start: float, stop: float) -> dict[str, float]:
        """How many each kind kept busy between two times."""
        first, last = (max(bisect_right(self._times, at) - 1, 0) for at in (start, stop))
        seconds = self._times[last] - self._times[first]
        before, after = self._spent[first], self._spent[last]
        return {kind: (after[kind] - before[kind]) / seconds for kind in after}


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the loss ------------------------------------------------------------------------------------
class Judge:
    """The loss on the same held-out windows for all."""

    def __init__(self, windows: int, seed: int):
        self._module: nn.Module = build_stage(WIDE_MODEL, 0, 1, seed)
        shapes = [(name, tuple(p.shape)) for name, p in self._module.named_parameters()]
        self.layout = FlatLayout.of(shapes)
        self.weights = flatten_parameters(self._module, self.layout).detach()
        self.initial = self.weights.clone()
        sequence_length = BATCH["sequence_length"]
        self._windows = held_out_windows(DataSpec(parts=PARTS), sequence_length, windows)

    def loss(self, weights: Tensor | Path) -> float:
        """In nats a token, of flat weights [n] or of a file of them."""
        if isinstance(weights, Path):
            views = self.layout.view(self.weights)
            for name, value in load_file(weights).items():
                views[name].copy_(value)
        else:
            self.weights.copy_(weights)
        return validation_loss(self._module, self._windows)


# ---- rivals --------------------------------------------------------------------------------------
def run_rival(told: Result, line: Line, length: Length) -> Result:
    """Run a rival and measure it."""
    contestant, peers = told.contestant, told.peers
    with ExitStack() as stack:
        folder = stack.enter_context(memory_folder())
        links = None if contestant == PLAIN else line.links(peers)
        if links is not None:
            stack.enter_context(links)
        children = stack.enter_context(_rivals(told, links, folder))
        counted = Counted(links, range(peers))
        logs = [_Events(folder / f"peer-{rank}.jsonl") for rank in range(peers)]
        units = 0 if contestant == PLAIN else length.rounds
        began = time.time()
        while True:
            counted.sample()
            for log in logs:
                log.look()
            window = _window(logs, contestant, units, first=length.first)
            long = window is not None and window[1] - window[0] >= length.seconds
            if long and logs[0].joined_tokens() >= length.tokens:
                break
            if time.time() - began > length.limit_s:
                marks = min(len(log.times("mark")) for log in logs)
                return replace(told, outcome=f"hung after {marks} joins")
            try:
                for child in children:
                    child.check()
            except EnvironmentFault as error:
                return replace(told, outcome=str(error)[:200])
            time.sleep(POLL_S)
        assert window is not None
        result = _measured(told, [log.times("step") for log in logs], window, counted)
        computing = _rival_computing(logs, window) if contestant != PLAIN else 1.0
        steps = {PLAIN: None, ALL_REDUCE: (1, 1)}.get(contestant, (SHORT_STEPS, SHORT_STEPS))
        judge, start = Judge(length.windows, told.seed), logs[0].times("training")[0]
        kept = [event for event in logs[0].events if event["event"] == "model"]
        models = [(0.0, 0.0, judge.loss(judge.initial))]
        for event in kept[:: max(1, len(kept) // 12)]:  # an evaluation takes a second
            models.append((event["time"] - start, event["tokens"], judge.loss(Path(event["file"]))))
        return replace(result, computing=computing, steps=steps, models=models)


class _Events:
    """What a rival's peer has written."""

    def __init__(self, path: Path):
        self.events: list[dict[str, Any]] = []
        self._path, self._read = path, 0

    def look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._read)
            while (text := file.readline()).endswith("\n"):
                self._read = file.tell()
                self.events.append(json.loads(text))

    def joined_tokens(self) -> float:
        """Tokens in the newest weights that were kept."""
        return max(
            (event["tokens"] for event in self.events if event["event"] == "model"), default=0
        )

    def times(self, kind: str) -> list[float]:
        """When events of a kind were."""
        return [event["time"] for event in self.events if event["event"] == kind]


def _window(
    logs: Sequence[_Events], contestant: str, units: int, *, first: bool
) -> tuple[float, float] | None:
    """From when all train, or the join after it, to the newest join; None while it is too short."""
    trains = [log.times("training") for log in logs]
    if not all(trains):
        return None
    start = max(each[0] for each in trains)
    marks = logs[0].times("mark")
    if contestant == PLAIN:
        later = [mark for mark in marks if mark > start + SKIP_S]
        return (later[0], later[-1]) if len(later) > 1 else None
    later = [start, *(mark for mark in marks if mark > start)][0 if first else 1 :]
    return (later[0], later[-1]) if len(later) > units else None


def _rival_computing(logs: Sequence[_Events], window: tuple[float, float]) -> float:
    """Share of the time that its steps take where nothing is joined."""
    shares: list[float] = []
    for log in logs:
        alone_s = next(e["step_s"] for e in log.events if e["event"] == "training")
        steps = sum(window[0] < at <= window[1] for at in log.times("step"))
        shares.append(min(1.0, steps * alone_s / (window[1] - window[0])))
    return fmean(shares)


@contextmanager
def _rivals(told: Result, links: Links | None, folder: Path) -> Iterator[list[Child]]:
    """Their processes, of which nothing is left."""
    tag, children = uuid.uuid4().hex, list[Child]()
    root = Path(__file__).resolve().parents[1]
    environment = {
        TAG: tag,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if links is None else DEVICE,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    before = {str(path) for path in Path("/dev/shm").glob("torch_*")}
    try:
        for rank in range(told.peers):
            settings = Settings(
                kind=RIVALS[told.contestant],
                rank=rank,
                peers=told.peers,
                address="127.0.0.1" if links is None else links.address(rank),
                first_address="127.0.0.1" if links is None else links.address(0),
                folder=str(folder),
                model=WIDE_MODEL,
                inner=INNER,
                batch=BATCH,
                parts=PARTS,
                seed=told.seed,
                inner_steps=SHORT_STEPS,
                model_s=MODEL_S,
            )
            command = [
                sys.executable,
                "-m",
                "benchmarks.baseline_peer",
                json.dumps(asdict(settings)),
            ]
            prefix = [] if links is None else links.command(rank, [])
            log = folder / f"rival-{rank}.log"
            children.append(start_process([*prefix, *command], log, env=environment))
        yield children
    finally:
        pids = {process.pid for process in family(tag)}
        for child in children:
            child.terminate()
        for child in children:
            child.wait(LEAVE_S)
        send_signal(family(tag), signal.SIGKILL)
        for path in shared_memory(pids, before):
            Path(path).unlink(missing_ok=True)


# ---- the product ---------------------------------------------------------------------------------
def run_product(told: Result, line: Line, length: Length, inner_steps: int) -> Result:
    """Run a swarm of the product's peers and measure it."""
    contestant, peers = told.contestant, told.peers
    sections: dict[str, Any] = {"rounds": {"inner_steps": inner_steps}} | PRODUCT[contestant]
    manifest = run_manifest(
        model=WIDE_MODEL,
        data={"parts": PARTS, "held_out_windows": length.windows, "validation_share": 0.005},
        batch=BATCH,
        inner=INNER,
        deadlines=USUAL_DEADLINES,
        seed=told.seed,
        **sections,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(memory_folder())
        links = line.links(peers + 1)
        if links is not None:
            stack.enter_context(links)
        swarm = stack.enter_context(ProcessSwarm(folder, manifest, links=links))
        for _ in range(peers):
            swarm.add_peer(shown_s=0.0)
        counted = Counted(links, range(1, peers + 1))
        began = time.time()
        window: tuple[float, float] | None = None
        processors: Processors | None = None
        while True:
            counted.sample()
            swarm.look()
            if processors is None and all(peer.of_kind("training") for peer in swarm.peers):
                processors = Processors(swarm, links)
            if processors is not None:
                processors.sample()
            window = _swarm_window(swarm, contestant, length)
            if window:
                break
            if time.time() - began > length.limit_s:
                rounds = min(len(peer.rounds) for peer in swarm.peers)
                return replace(told, outcome=f"not done after {rounds} rounds")
            time.sleep(SWARM_POLL_S)
        assert processors is not None
        steps = [peer.shown.steps for peer in swarm.peers if peer.shown]
        result = _measured(told, steps, window, counted)
        computing = fmean(stepping_share(each, *window) for each in steps)
        lines = [event for event in swarm.peers[0].rounds if window[0] < event["time"]]
        taken = [event["inner_steps"] for event in lines]
        result = replace(
            result,
            computing=computing,
            steps=(min(taken), max(taken)) if taken else None,
            cores=processors.cores(*window),
        )
        if contestant != ALONE:
            swarm.assert_equal_chains()
            result = replace(result, models=_anchors(swarm, length.windows))
        return result


def _swarm_window(
    swarm: ProcessSwarm, contestant: str, length: Length
) -> tuple[float, float] | None:
    """From the first send when all train, so many rounds on, all of them decided; None before."""
    trains = [peer.of_kind("training") for peer in swarm.peers]
    if not all(trains):
        return None
    start = max(each[0]["time"] for each in trains)
    if contestant == ALONE:
        end = start + SKIP_S + length.seconds
        return (start + SKIP_S, end) if time.time() > end else None
    sends = [event for event in swarm.peers[0].of_kind("sent") if event["time"] > start]
    if len(sends) <= length.rounds or sends[-1]["time"] - sends[0]["time"] < length.seconds:
        return None
    inside = [event["round"] for event in sends[:-1]]
    known = all(peer.decided(number) for peer in swarm.peers for number in inside)
    return (sends[0]["time"], sends[-1]["time"]) if known else None


def _anchors(swarm: ProcessSwarm, windows: int) -> list[tuple[float, float, float]]:
    """Of every record: seconds from the first inner step to it, tokens of the chain, loss."""
    judge, codec, peer = Judge(windows, swarm.manifest.seed), swarm.stage_codec(0), swarm.peers[0]
    anchor = judge.initial.clone()
    momentum, log = torch.zeros_like(anchor), swarm.round_log(peer)
    start = min(each.shown.steps[0] for each in swarm.peers if each.shown)
    found = [(0.0, 0.0, judge.loss(anchor))]
    for event in peer.rounds:
        record = log.read(event["round"])
        if record is None:
            raise AssertionError(f"the record of round {event['round']} is not there")
        move_anchor(swarm.manifest, record, codec, anchor, momentum)
        found.append((event["time"] - start, event["chain_tokens"], judge.loss(anchor)))
    return found


def _measured(
    told: Result, steps: Sequence[Sequence[float]], window: tuple[float, float], counted: Counted
) -> Result:
    seconds = window[1] - window[0]
    taken = sum(window[0] < at <= window[1] for each in steps for at in each)
    tokens = taken * STEP_TOKENS
    sent = counted.between(*window)
    return replace(
        told,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        bytes_per_token=None if sent is None else sent / tokens,
    )


def run(told: Result, line: Line, length: Length, inner_steps: int) -> Result:
    """Run any contestant; one that fails is a result, too."""
    try:
        if told.contestant in RIVALS:
            return run_rival(told, line, length)
        return run_product(told, line, length, inner_steps)
    except (AssertionError, RuntimeError, OSError, EnvironmentFault) as error:
        text = f"failed: {error}"[:200]
        return replace(told, outcome=text)
