"""A swarm of real processes on this machine, for tests: start it, watch it, hurt it, end it.

Peers are started by the commands that people type and are seen through the files that they write.
Whatever a test waits for has a deadline, and `close` ends every process by its id and then looks
whether anything is left: a process, shared memory, a socket.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import yaml

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.identity import PUBLIC_KEY_BYTES, SEED_BYTES, Identity
from dilocox.dht.manifest import Manifest
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.commands.demo import WatchedPeer
from dilocox.peer.os_process import Child, start_process
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.rounds.vote_count import Vote
from dilocox.peer.state_folder import StateFolder
from dilocox.pipeline.pretrained import described_by
from dilocox.pipeline.stage import parameter_shapes
from tests.swarm.altered import LEFT, Halt, Shown
from tests.swarm.links import Links
from tests.swarm.nat import Homes
from tests.swarm.processes import TAG, Process, family, send_signal, shared_memory

START_LIMIT_S = 90.0
LEAVE_LIMIT_S = 40.0
OPERATE_LIMIT_S = 60.0
GONE_LIMIT_S = 5.0  # nothing survives a killed main process longer
POLL_S = 0.05
FRESH_S = 3.0  # a peer whose last inner step is older does not train
ALTERED = Path(__file__).with_name("altered.py")

T = TypeVar("T")


@contextmanager
def memory_folder() -> Generator[Path]:
    """A folder in memory: snapshots go to a disk of each peer's own, not all to this machine's."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@dataclass
class Peer(WatchedPeer):
    """A peer of the swarm; `expected` while it should be running."""

    tag: str = ""
    expected: bool = True
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # what python runs, if not `-m dilocox`
    shown: Shown | None = None
    halt: Halt | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, oldest first."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def peer_id(self) -> str:
        """Its id in the swarm; it must have started."""
        return Identity.load_or_create(StateFolder(self.state).identity).peer_id

    @property
    def doing(self) -> str:
        """joining, spare, training or leaving; empty before its first status."""
        return self.status.get("state", "")

    def record(self, round_number: int) -> dict[str, Any] | None:
        """What it reported of a committed round."""
        return next((line for line in self.rounds if line["round"] == round_number), None)

    @property
    def in_flight(self) -> int | None:
        """The round whose exchange is under way."""
        return self.status.get("in_flight")

    def processes(self) -> list[Process]:
        """All its processes that run."""
        return family(self.tag)

    def p2pd(self) -> Process:
        """Its libp2p daemon."""
        return next(process for process in self.processes() if process.name == "p2pd")

    def averager(self) -> Process:
        """Its averaging process: the main process forks it last."""
        children = [each for each in self.processes() if each.parent == self.child.pid]
        python = [each for each in children if "shm_manag" not in each.name]
        return max(python, key=lambda each: each.pid)

    def decided(self, round_number: int) -> dict[str, Any] | None:
        """How a round that it was in ended for it: its record, or a void."""
        ends = (event for event in self.events if event["event"] in ("round", "void"))
        return next((event for event in ends if event["round"] == round_number), None)

    def log_text(self) -> str:
        """The log of its newest start."""
        return self.child.log.read_text(errors="replace")

    def voted(self, round_number: int, attempt: int = 0) -> bool:
        """Whether its vote of this attempt is on disk."""
        return any(self.state.glob(f"*-stage*/log/{round_number:08d}-{attempt}.vote"))

    def votes(self, round_number: int) -> list[Vote]:
        """Its votes of all attempts that are on disk; for a peer that does not run."""
        files = sorted(self.state.glob(f"*-stage*/log/{round_number:08d}-*.vote"))
        votes = [msgpack.unpackb(file.read_bytes()) for file in files]
        return [
            Vote(voter=voter, digest=digest, missed=tuple(missed))
            for voter, digest, missed, *_ in votes
        ]

    def look(self) -> None:
        """Read what it has said since the last look."""
        super().look()
        if self.shown is not None:
            self.shown.look()

    def take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        super().take(event)


@dataclass(frozen=True)
class Replica:
    """Its members by stage; the first one is the head."""

    members: tuple[Peer, ...]

    @property
    def steps(self) -> bool:
        """Whether all members (all of them shown) have taken an inner step just now."""
        since = time.time() - FRESH_S
        shown = [peer.shown for peer in self.members]
        return all(each and each.steps and each.steps[-1] > since for each in shown)


class ProcessSwarm:
    """A bootstrap and its peers; a context that prints their logs if it fails, and ends them.

    `links`: hosts to run on instead of this machine's loopback, host 0 for the bootstrap, the next
    ones for the peers in their order. `bootstrap`: more options of the bootstrap.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        *,
        links: Links | Homes | None = None,
        bootstrap: tuple[str, ...] = (),
    ):
        self.folder = folder
        self.links = links
        self.peers: list[Peer] = []
        self.tag = uuid.uuid4().hex
        # sockets lie in the folder for temporary files, whose path must be short
        self._temporary = Path(tempfile.mkdtemp(prefix="swarm-"))
        self._before = {str(path) for path in Path("/dev/shm").glob("torch_*")}
        self._pids: set[int] = set()
        self._commands: list[Child] = []
        self._starts = 0
        self._ended = False
        run_file = folder / "run.yaml"
        run_file.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.manifest = Manifest.load(run_file, described_by)
        self._bootstrap_expected = True
        self._bootstrap = self._start_bootstrap(0, *bootstrap)
        invite = folder / "bootstrap" / "invite"
        self.wait(invite.exists, START_LIMIT_S, "the bootstrap is up")
        self.invite = self._own_invite = invite.read_text().strip()

    # ---- starting --------------------------------------------------------------------------------
    def add_peer(
        self,
        *options: str,
        stage: int | None = None,
        step_s: float = 0.0,
        shown_s: float | None = None,
        halting: bool = False,
        older: bool = False,
        lies: str = "",
        skew_s: float = 0.0,
        disk_bytes_per_s: float = 0.0,
        program: tuple[str, ...] = (),
    ) -> Peer:
        """Start `dilocox peer`; see altered.py for what can be altered, one thing of these.

        step_s: the least that an inner step takes. shown_s: by how much longer its forwards and
        backwards take, which are seen from outside. halting: whether it can be made to halt at a
        point of an exchange. older: whether it reads no revision of the manifest but the first.
        lies: how it lies as a member (lies.py), if it does. skew_s: how far its machine's clock is
        ahead. disk_bytes_per_s: how slow its disk is. program: as `Peer` has it, in the place of
        all that.
        """
        name = peer_name(len(self.peers))
        # one after the other: those of real runs are half an hour apart
        options = ("--snapshot-minutes", "0", *options)
        if stage is not None:
            options = ("--stage", str(stage), *options)
        halt = Halt(self.folder / f"{name}-halt") if halting else None
        shown = Shown(self.folder / f"{name}-shown") if shown_s is not None else None
        altered: list[object] = []
        if halt is not None:
            altered = ["halting", step_s, str(halt.folder)]
        elif shown is not None:
            altered = ["shown", shown_s, str(shown.folder)]
        elif lies:
            altered = ["lying", step_s, lies]
        elif skew_s:
            altered = ["skewed", step_s, skew_s]
        elif older:
            altered = ["older"]
        elif disk_bytes_per_s:
            altered = ["slow_disk", disk_bytes_per_s, str(self.folder / f"{name}-syncs")]
        elif step_s:
            altered = ["paced", step_s]
        if altered:
            program = (str(ALTERED), json.dumps(altered))
        peer = Peer(
            name=name,
            state=self.folder / name,
            child=self._start_peer(name, options, program),
            stage=_stage_among(options),
            tag=f"{self.tag}.{name}",
            options=options,
            program=program,
            shown=shown,
            halt=halt,
        )
        self.peers.append(peer)
        return peer

    def restart(self, peer: Peer) -> None:
        """Start a peer that has ended again, with the same state folder."""
        peer.child = self._start_peer(peer.name, peer.options, peer.program)
        peer.expected = True

    def kill_bootstrap(self) -> None:
        """SIGKILL the main process of the bootstrap and wait for the end of the others."""
        self._bootstrap_expected = False
        os.kill(self._bootstrap.pid, signal.SIGKILL)
        self._bootstrap.wait(GONE_LIMIT_S)
        tag = f"{self.tag}.bootstrap"
        self.wait(lambda: not family(tag), GONE_LIMIT_S, "nothing runs of the bootstrap")

    def restart_bootstrap(self, *options: str, skew_s: float = 0.0) -> None:
        """Start a killed bootstrap again, with the same state folder and address. skew_s: how far
        its machine's clock is ahead now.
        """
        port = int(self._own_invite.partition("/tcp/")[2].partition("/")[0])
        self._bootstrap = self._start_bootstrap(port, *options, skew_s=skew_s)
        self._bootstrap_expected = True

    def wait_for_bootstrap(self) -> None:
        """Wait until it tells the invite."""
        log = self._bootstrap.log
        self.wait(
            lambda: "dilocox peer dilocox:" in log.read_text(errors="replace"),
            START_LIMIT_S,
            "the bootstrap is up",
        )

    def bootstrap_mb(self) -> float:
        """The memory of its processes, see `Process.anonymous_mb`."""
        return sum(process.anonymous_mb for process in family(f"{self.tag}.bootstrap"))

    def _start_bootstrap(self, port: int, *options: str, skew_s: float = 0.0) -> Child:
        run_file, self._starts = self.folder / "run.yaml", self._starts + 1
        arguments = ["bootstrap", str(run_file), "--port", str(port), *options]
        log = self.folder / f"bootstrap-{self._starts}.log"
        skewed = (str(ALTERED), json.dumps(["skewed", 0.0, skew_s]))
        return self._launch(arguments, "bootstrap", log, skewed if skew_s else ())

    def host(self, peer: Peer) -> int:
        """Which of the `links` leads to it."""
        return 1 + self.peers.index(peer)

    def start_command(self, *arguments: str, log: str = "", host: int | None = None) -> Child:
        """Start another command of the program, on one of the `links`' hosts if that is named."""
        name = log or arguments[0]
        prefix = list[str]()
        if host is not None:
            assert self.links is not None
            prefix = self.links.command(host, [])
        command = [*prefix, sys.executable, "-m", "dilocox", *arguments]
        log_file = self.folder / f"{name}.log"
        child = start_process(command, log_file, env=self.environment(name))
        self._commands.append(child)
        return child

    def run_command(
        self, *arguments: str, limit_s: float, log: str = "", host: int | None = None
    ) -> str:
        """The same for a command that must end well; what it printed."""
        child = self.start_command(*arguments, log=log, host=host)
        child.wait(limit_s)
        said = child.log.read_text(errors="replace")
        assert child.returncode == 0, said
        return said

    def operate(self, *arguments: str) -> str:
        """Run `dilocox operate` where the operator's key is; what it printed."""
        state = str(self.folder / "bootstrap")
        return self.run_command("operate", *arguments, "--state", state, limit_s=OPERATE_LIMIT_S)

    def _start_peer(self, name: str, options: tuple[str, ...], program: tuple[str, ...]) -> Child:
        self._starts += 1
        log = self.folder / f"{name}-{self._starts}.log"
        arguments = ["peer", self.invite, "--threads", "1", "--device", "cpu", *options]
        return self._launch(arguments, name, log, program)

    def _launch(
        self, arguments: list[str], name: str, log: Path, program: tuple[str, ...] = ()
    ) -> Child:
        address, prefix = "127.0.0.1", list[str]()
        if self.links is not None:
            host = 0 if name == "bootstrap" else 1 + int(name.removeprefix("peer-"))
            address, prefix = self.links.address(host), self.links.command(host, [])
        command = [*prefix, sys.executable, *(program or ("-m", "dilocox")), *arguments]
        command += ["--state", str(self.folder / name), "--host", address]
        return start_process(command, log, env=self.environment(name))

    def environment(self, name: str) -> dict[str, str]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}  # stays, as caches do
        own = {TAG: f"{self.tag}.{name}", "TMPDIR": str(self._temporary)}
        return {"PYTHONFAULTHANDLER": "1", **own, **caches}

    # ---- watching --------------------------------------------------------------------------------
    def look(self) -> None:
        """Read what the peers have written; fail if one that should run has ended."""
        self._pids |= {process.pid for process in family(self.tag)}
        if self._bootstrap_expected:
            self._bootstrap.check()
        for peer in self.peers:
            peer.look()
            if peer.expected:
                peer.child.check()

    def wait(self, condition: Callable[[], T | None], limit_s: float, what: str) -> T:
        """Wait for a condition and return what it said; fails when the limit is over."""
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            if said := condition():
                return said
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:.0f} s: {what}; {self._summary()}")
            time.sleep(POLL_S)

    def let_pass(self, seconds: float) -> None:
        """Watch the swarm for so long: what is asserted is that nothing happens."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, seconds + 5, "time passes")

    def wait_until_all_train(self, limit_s: float) -> int:
        """Wait until all peers train; the first round that begins after that."""
        peers = self.peers
        self.wait(lambda: all(p.of_kind("training") for p in peers), limit_s, "all train")
        return 1 + max(peer.status["round"] for peer in peers)

    def wait_for_rounds(self, count: int, limit_s: float, *, of: Iterable[Peer] = ()) -> None:
        """Wait until each of these peers (all of them if none is named) reported more rounds."""
        wanted = {peer.name: len(peer.rounds) + count for peer in of or self.peers}
        self.wait(
            lambda: all(
                len(peer.rounds) >= wanted[peer.name] for peer in self.peers if peer.name in wanted
            ),
            limit_s,
            f"{count} more rounds of {', '.join(wanted)}",
        )

    def wait_for_counted(
        self, peer: Peer, *, after_round: int = -1, limit_s: float
    ) -> dict[str, Any]:
        """Wait for a record after that round that holds this peer's progress; its report."""

        def found() -> dict[str, Any] | None:
            lines = (line for line in peer.rounds if line["outcome"] == "counted")
            return next((line for line in lines if line["round"] > after_round), None)

        return self.wait(
            lambda: found() or {}, limit_s, f"a contribution of {peer.name} after {after_round}"
        )

    def chain(self, stage: int = 0) -> dict[int, set[tuple[str, str]]]:
        """By round: the (digest, sha256 of the anchor) that peers reported; one on all is right."""
        seen: dict[int, set[tuple[str, str]]] = {}
        for peer in self.of_stage(stage):
            for line in peer.rounds:
                seen.setdefault(line["round"], set()).add((line["digest"], line["anchor_sha256"]))
        return seen

    def stage_codec(self, stage: int) -> StageCodec:
        """How the records of a stage are coded."""
        shapes = parameter_shapes(self.manifest.model, self.manifest.stages, stage)
        return stage_codec(self.manifest, FlatLayout.of(shapes))

    def round_log(self, peer: Peer) -> RoundLog:
        """The records that a peer keeps of its stage."""
        own = next(peer.state.glob(f"*-stage{peer.stage}"))
        codec = self.stage_codec(peer.stage)
        return RoundLog(own / "log", manifest_digest=self.manifest.digest, codec=codec)

    def archived(self, stage: int) -> list[int]:
        """The rounds whose records the bootstrap keeps of a stage, the oldest first."""
        records = self.folder.glob(f"bootstrap/*-archive-*/stage{stage}/[0-9]*[0-9]/log/*.record")
        return sorted({int(path.name.split("-")[0]) for path in records})

    def of_stage(self, stage: int) -> list[Peer]:
        """The peers that were started for this stage."""
        return [peer for peer in self.peers if peer.stage == stage]

    def assert_equal_chains(self) -> None:
        """Every round has one digest and one anchor on all of a stage's peers that reported it."""
        for stage in range(self.manifest.stages):
            for number, seen in sorted(self.chain(stage).items()):
                assert len(seen) == 1, f"stage {stage}, round {number} differs: {seen}"

    def replicas(self) -> list[Replica]:
        """Those whose members all run and agree on the head; as of their last status."""
        by_id = {peer.peer_id: peer for peer in self.peers if peer.expected and peer.status}
        found: list[Replica] = []
        for head in by_id.values():
            ids: list[str] = head.status["members"]
            if ids and all(each in by_id and by_id[each].head == head.peer_id for each in ids):
                found.append(Replica(tuple(by_id[each] for each in ids)))
        return found

    def wait_for_replicas(self, count: int, limit_s: float) -> list[Replica]:
        """Wait until there are so many."""

        def enough() -> list[Replica] | None:
            found = self.replicas()
            return found if len(found) >= count else None

        return self.wait(enough, limit_s, f"{count} replicas")

    def spares(self, stage: int) -> list[Peer]:
        """The peers of a stage that run, are in no replica, and wait for a head or for members.

        A spare head says that it is blocked: there are no members to be had while nothing is wrong.
        """
        return [
            peer
            for peer in self.of_stage(stage)
            if peer.expected
            and peer.doing == "spare"
            and (stage == 0 or not peer.status["blocked"])
        ]

    def _summary(self) -> str:
        told = [
            f"{peer.name}: rounds {[line['round'] for line in peer.rounds]}, voids "
            f"{[event['round'] for event in peer.of_kind('void')]}, status {peer.status}"
            for peer in self.peers
        ]
        return "; ".join(told)

    # ---- ending ----------------------------------------------------------------------------------
    def __enter__(self) -> ProcessSwarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except AssertionError:
            print(self.tails())
            raise
        if kind is not None:
            print(self.tails())

    def kill(self, peer: Peer) -> None:
        """SIGKILL a peer's main process."""
        peer.expected = False
        os.kill(peer.child.pid, signal.SIGKILL)

    def wait_until_gone(self, peer: Peer) -> float:
        """Wait until nothing runs of a peer that was killed just now; how long it took."""
        began = time.monotonic()
        peer.child.wait(GONE_LIMIT_S)
        self.wait(
            lambda: not peer.processes(),
            began + GONE_LIMIT_S - time.monotonic(),
            f"all processes of {peer.name} have ended",
        )
        return time.monotonic() - began

    def terminate(self, peer: Peer) -> int:
        """SIGTERM a peer and wait for its end; its exit code."""
        peer.expected = False
        peer.child.terminate()
        return self.wait_until_left(peer)

    def wait_until_left(self, peer: Peer) -> int:
        """Wait for the end of a peer that was told to leave; its exit code. Where it does not come,
        the stacks of its threads are in its log.
        """
        child = peer.child
        try:
            self.wait(lambda: child.returncode is not None, LEAVE_LIMIT_S, f"{peer.name} has left")
        except AssertionError:
            os.kill(child.pid, signal.SIGABRT)
            child.wait(GONE_LIMIT_S)
            raise
        code = child.returncode
        assert code is not None
        return code

    def close(self) -> None:
        """End everything and check that nothing is left; twice does no harm."""
        if self._ended:
            return
        self._ended = True
        self._pids |= {process.pid for process in family(self.tag)}
        everybody = [peer.child for peer in self.peers]
        for children in (self._commands, everybody, [self._bootstrap]):
            for child in children:
                child.terminate()
            for child in children:
                child.wait(LEAVE_LIMIT_S)
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        send_signal(family(self.tag), signal.SIGKILL)
        codes = {peer.name: peer.child.returncode for peer in self.peers if peer.expected}
        shutil.rmtree(self._temporary, ignore_errors=True)
        assert not left, f"left behind: {left}"
        told = self._logs_with_keys()
        assert not told, f"a secret key is in {told}"
        assert not any(codes.values()), f"exit codes {codes}"

    def _left(self) -> list[str]:
        processes = [f"{process.name} ({process.pid})" for process in family(self.tag)]
        # torch puts compiled headers there, whatever its cache's folder is
        others = {*self._temporary.glob("torchinductor_*"), *self._temporary.glob(f"{LEFT}*")}
        files = [str(path) for path in self._temporary.iterdir() if path not in others]
        return processes + files + shared_memory(self._pids, self._before)

    def _logs_with_keys(self) -> list[str]:
        keys = [path.read_bytes() for path in self.folder.glob("*/*.key")]
        seeds = [key[-SEED_BYTES - PUBLIC_KEY_BYTES : -PUBLIC_KEY_BYTES] for key in keys]
        forms = [form for seed in seeds for form in (seed.hex(), repr(seed)[2:-1])]
        logs = {log: log.read_text(errors="replace") for log in self.folder.glob("*.log")}
        return [log.name for log, text in logs.items() if any(form in text for form in forms)]

    def tails(self, lines: int = 100) -> str:
        """The ends of all logs, for a test that failed."""
        told: list[str] = []
        for log in sorted(self.folder.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()
            told += [f"---- {log.name}", *text[-lines:]]
        return "\n".join(told)


def peer_name(number: int) -> str:
    """Of a swarm's peers in their order; also of its state folder."""
    return f"peer-{number}"


def _stage_among(options: tuple[str, ...]) -> int:
    """The stage that these options name, 0 where they leave it open."""
    told = options[options.index("--stage") + 1] if "--stage" in options else ""
    return int(told) if told.isdecimal() else 0
