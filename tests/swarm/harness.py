"""A swarm of real processes on this machine, for tests: start it, watch it, hurt it, end it.

Peers are started by the commands that people type and are seen through the files that they write.
Whatever a test waits for has a deadline, and `close` ends every process by its id and then looks
whether anything is left: a process, shared memory, a socket.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dilocox.dht.manifest import Manifest
from dilocox.peer.subprocesses import Child, start_command
from dilocox.peer.watched import WatchedPeer
from tests.swarm.processes import TAG, Process, family, send_signal, shared_memory

START_LIMIT_S = 90.0
LEAVE_LIMIT_S = 40.0
GONE_LIMIT_S = 5.0  # nothing survives a killed main process longer
POLL_S = 0.05
PACED = Path(__file__).with_name("paced.py")

T = TypeVar("T")


@dataclass
class Peer(WatchedPeer):
    """A peer of the swarm; `expected` while it should be running."""

    tag: str = ""
    expected: bool = True
    options: tuple[str, ...] = ()
    step_s: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, oldest first."""
        return [event for event in self.events if event["event"] == kind]

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

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        super()._take(event)


class LocalSwarm:
    """A bootstrap and its peers."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.peers: list[Peer] = []
        self.tag = uuid.uuid4().hex
        # sockets lie in the folder for temporary files, whose path must be short
        self._temporary = Path(tempfile.mkdtemp(prefix="swarm-"))
        self._pids: set[int] = set()
        self._starts = 0
        self._ended = False
        run_file = folder / "run.yaml"
        run_file.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.manifest = Manifest.load(run_file)
        arguments = ["bootstrap", str(run_file), "--state", str(folder / "bootstrap")]
        arguments += ["--host", "127.0.0.1", "--port", "0"]
        self._bootstrap = start_command(
            arguments, folder / "bootstrap.log", env=self._environment("bootstrap")
        )
        invite = folder / "bootstrap" / "invite"
        self.wait(invite.exists, START_LIMIT_S, "the bootstrap is up")
        self.invite = invite.read_text().strip()

    # ---- starting --------------------------------------------------------------------------------
    def add_peer(self, *options: str, step_s: float = 0.0) -> Peer:
        """Start `dilocox peer`; with `step_s` one whose inner steps take at least so long."""
        name = f"peer-{len(self.peers)}"
        peer = Peer(
            name=name,
            state=self.folder / name,
            child=self._start_peer(name, options, step_s),
            tag=f"{self.tag}.{name}",
            options=options,
            step_s=step_s,
        )
        self.peers.append(peer)
        return peer

    def restart(self, peer: Peer) -> None:
        """Start a peer that has ended again, with the same state folder."""
        peer.child = self._start_peer(peer.name, peer.options, peer.step_s)
        peer.expected = True

    def run_command(self, *arguments: str, limit_s: float) -> Child:
        """Run another command of the program to its end."""
        log = self.folder / f"{arguments[0]}.log"
        child = start_command(list(arguments), log, env=self._environment(arguments[0]))
        child.wait(limit_s)
        return child

    def _start_peer(self, name: str, options: tuple[str, ...], step_s: float) -> Child:
        self._starts += 1
        log = self.folder / f"{name}-{self._starts}.log"
        arguments = ["peer", self.invite, "--state", str(self.folder / name)]
        arguments += ["--host", "127.0.0.1", "--threads", "1", "--device", "cpu", *options]
        environment = self._environment(name)
        if not step_s:
            return start_command(arguments, log, env=environment)
        return start_paced(step_s, arguments, log, env=environment)

    def _environment(self, name: str) -> dict[str, str]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}  # stays, as caches do
        return {TAG: f"{self.tag}.{name}", "TMPDIR": str(self._temporary), **caches}

    # ---- watching --------------------------------------------------------------------------------
    def look(self) -> None:
        """Read what the peers have written; fail if one that should run has ended."""
        self._pids |= {process.pid for process in family(self.tag)}
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

    def chain(self) -> dict[int, set[tuple[str, str]]]:
        """By round: the (digest, sha256 of the anchor) that peers reported; one on all is right."""
        seen: dict[int, set[tuple[str, str]]] = {}
        for peer in self.peers:
            for line in peer.rounds:
                seen.setdefault(line["round"], set()).add((line["digest"], line["anchor_sha256"]))
        return seen

    def assert_equal_chains(self) -> None:
        """Every round has one digest and one anchor on all peers that reported it."""
        for number, seen in sorted(self.chain().items()):
            assert len(seen) == 1, f"round {number} differs: {seen}"

    def _summary(self) -> str:
        told = [
            f"{peer.name}: rounds {[line['round'] for line in peer.rounds]}, voids "
            f"{[event['round'] for event in peer.of_kind('void')]}, status {peer.status}"
            for peer in self.peers
        ]
        return "; ".join(told)

    # ---- ending ----------------------------------------------------------------------------------
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
        self.wait(lambda: peer.child.returncode is not None, LEAVE_LIMIT_S, f"{peer.name} has left")
        code = peer.child.returncode
        assert code is not None
        return code

    def close(self) -> None:
        """End everything and check that nothing is left; twice does no harm."""
        if self._ended:
            return
        self._ended = True
        self._pids |= {process.pid for process in family(self.tag)}
        for children in ([peer.child for peer in self.peers], [self._bootstrap]):
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
        assert not any(codes.values()), f"exit codes {codes}"

    def _left(self) -> list[str]:
        processes = [f"{process.name} ({process.pid})" for process in family(self.tag)]
        files = [str(path) for path in self._temporary.iterdir()]
        return processes + files + shared_memory(self._pids)

    def tails(self, lines: int = 25) -> str:
        """The ends of all logs, for a test that failed."""
        told: list[str] = []
        for log in sorted(self.folder.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()
            told += [f"---- {log.name}", *text[-lines:]]
        return "\n".join(told)


def start_paced(step_s: float, arguments: list[str], log: Path, *, env: dict[str, str]) -> Child:
    """Start `dilocox` with inner steps that take at least `step_s`, asleep for the rest."""
    command = [sys.executable, str(PACED), str(step_s), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **env},
        )
    return Child(process, log)
