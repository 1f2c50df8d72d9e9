"""Peers with a real p2pd each, and networks on them, for the tests of streams and links."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from hivemind.p2p import P2P, PeerID

from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.node import RunDHT, daemon_address, open_dht
from dilocox.dht.validator import RunRecordValidator
from dilocox.pipeline.activation_codec import encode
from dilocox.pipeline.frames import Frame, FrameLimits, encode_prefix_and_header, window_bytes
from dilocox.pipeline.link import LinkKey, LinkLimits, Message, Opened
from dilocox.pipeline.network import Network
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.requests import StrangerLimits
from tests.dht.processes import wait_until

RUN = "0" * 32
REPLICA = "head"
PING = Frame(kind="ping", replica=REPLICA)
LIMITS = FrameLimits(  # fp32 payloads of 8 MiB
    microbatch_size=4, sequence_length=512, hidden_size=1024, evaluate_windows=4
)
SHAPE = (4, 512, 1024)
PATIENCE_S = 10.0  # of a test; what is tested against a limit states its own

# why a peer was not reached, for the report of a test that fails by it
logging.getLogger("dilocox.pipeline.requests").setLevel(logging.DEBUG)

M = TypeVar("M", bound=Message)


@dataclass
class Node:
    """A DHT node with its p2pd."""

    dht: RunDHT
    identity: Identity
    clock: RunClock

    @classmethod
    def open(
        cls, folder: Path, bootstraps: Sequence[str] = (), *, client_mode: bool = False
    ) -> Node:
        identity = Identity.load_or_create(folder / f"{time.monotonic_ns()}.key")
        clock = RunClock()
        dht = open_dht(
            identity=identity,
            bootstraps=bootstraps,
            listen=() if client_mode else ("/ip4/127.0.0.1/tcp/0",),
            announce=(),
            client_mode=client_mode,
            validator=RunRecordValidator(RUN, identity),
            clock=clock,
        )
        return cls(dht, identity, clock)

    @property
    def peer(self) -> str:
        return self.identity.peer_id


@dataclass
class Peer:
    """A network that says yes to every request and admits the links that it has asked for."""

    node: Node
    silence_s: float = 5.0
    max_queued: int = 4096
    room: Callable[[], float] = lambda: 1 << 30
    inbox_bytes: int = 64 * 2**20
    strangers: StrangerLimits = field(default_factory=StrangerLimits)
    relays: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    known: Collection[str] = ()
    asked: list[tuple[str, Frame]] = field(default_factory=list[tuple[str, Frame]])
    relayed: RelayedRequests = field(init=False)
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        self.relayed = RelayedRequests(self.node.identity, RUN, self.node.clock.time)
        self.network = Network(
            self.node.dht,
            run=RUN,
            limits=LinkLimits(
                frames=LIMITS,
                silence_s=self.silence_s,
                opening_s=self.silence_s,
                max_queued=self.max_queued,
                room=self.room,
                inbox_bytes=self.inbox_bytes,
            ),
            relayed=self.relayed,
            relays=lambda peer: self.relays.get(peer, ()),
            knows=lambda peer: peer in self.known,
            answer=self.answer,
            admits=self.admits,
            strangers=self.strangers,
        )

    @property
    def id(self) -> str:
        return self.node.peer

    def answer(self, peer: str, frame: Frame) -> Frame:
        self.asked.append((peer, frame))
        if "fail" in frame.facts:
            raise RuntimeError("an answer failed")
        if frame.facts.get("blocks_s"):  # the whole network thread, as a frozen process would
            time.sleep(float(str(frame.facts["blocks_s"])))
        return Frame(kind="yes", replica=frame.replica, facts={"me": self.id})

    def admits(self, peer: str, hello: Frame) -> LinkKey | None:
        if "stage" not in hello.facts:
            return None
        side: Any = hello.facts.get("side")
        return LinkKey(hello.replica, hello.epoch, 0, side)

    # ---- links -----------------------------------------------------------------------------------
    def dial(self, other: str, side: Literal["upper", "lower"], epoch: int = 1) -> LinkKey:
        key = LinkKey(REPLICA, epoch, 0, side)
        self.network.open_link(key, other, hello(side, epoch))
        return key

    def expect(self, other: str, side: Literal["upper", "lower"], epoch: int = 1) -> LinkKey:
        key = LinkKey(REPLICA, epoch, 0, side)
        self.network.open_link(key, other, None)
        return key

    def next(self, kind: type[M], timeout_s: float = PATIENCE_S) -> M:
        """The next message, which must be of this kind."""
        message = self.network.inbox.get(timeout_s)
        assert isinstance(message, kind), message
        return message

    def hears_nothing(self, for_s: float) -> bool:
        message = self.network.inbox.get(for_s)
        assert message is None, message
        return True

    def ask(self, other: str, frame: Frame = PING, timeout_s: float = 5.0) -> Frame | None:
        """The answer of another peer, None if there is none."""
        answer = self.network.request_all({other: frame}, timeout_s)[other]
        return answer and answer.frame


def hello(side: Literal["upper", "lower"], epoch: int = 1) -> Frame:
    """The hello of a peer whose own link has this side."""
    others = "lower" if side == "upper" else "upper"
    return Frame(kind="hello", replica=REPLICA, epoch=epoch, facts={"stage": 0, "side": others})


def small(step: int, epoch: int = 1, kind: str = "sum") -> Frame:
    return Frame(kind=kind, replica=REPLICA, epoch=epoch, step=step)


def large(microbatch: int, kind: str = "forward") -> Frame:
    """A frame of 8 MiB, each with a content of its own."""
    payload = encode("fp32", torch.full(SHAPE, float(microbatch)))
    if kind == "forward":
        payload += bytes(window_bytes(SHAPE[0], SHAPE[1]))
    return Frame(
        kind=kind,
        replica=REPLICA,
        epoch=1,
        microbatch=microbatch,
        codec="fp32",
        shape=SHAPE,
        dtype="float32",
        payload=payload,
    )


@contextmanager
def running(*peers: Peer) -> Iterator[None]:
    """Networks that are up, and closed at the end however it went."""
    try:
        for peer in peers:
            peer.network.start()
        yield
    finally:
        for peer in peers:
            peer.network.close()


def raw_stream(node: Node, other: str, *pieces: bytes | Frame, wait_s: float = 5.0) -> bytes:
    """What comes back when these are written into a fresh stream to another peer's network."""

    async def talk() -> bytes:
        p2p = await P2P.replicate(daemon_address(node.dht, PATIENCE_S))
        try:
            name = f"dilocox.{RUN}.replica"
            opened = await p2p.call_binary_stream_handler(PeerID.from_base58(other), name)
            _, reader, writer = opened
            try:
                for piece in pieces:
                    data = encode_prefix_and_header(piece) if isinstance(piece, Frame) else piece
                    writer.write(data)
                    await asyncio.sleep(0.1)
                return await asyncio.wait_for(reader.read(-1), wait_s)
            except OSError:  # it closes while this writes
                return b""
            finally:
                writer.close()
        finally:
            await p2p.shutdown()

    return asyncio.run(talk())


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> float:
    """Wait for a condition; how long it took."""
    return wait_until(condition, timeout_s)


@contextmanager
def opened_nodes(folder: Path, reachable: int, dialling: int = 0) -> Iterator[list[Node]]:
    """Nodes that know the first one, then some that only dial out and know all of those; their keys
    go into the folder.
    """
    opened = [Node.open(folder)]
    try:
        first = opened[0].dht.visible_addresses()
        opened.extend(Node.open(folder, first) for _ in range(reachable - 1))
        known = [address for node in opened for address in node.dht.visible_addresses()]
        opened.extend(Node.open(folder, known, client_mode=True) for _ in range(dialling))
        yield opened
    finally:
        for node in opened:
            node.dht.close()


@contextmanager
def frozen(node: Node) -> Iterator[None]:
    """The node's p2pd does nothing within."""
    os.kill(node.dht.p2pd_pid, signal.SIGSTOP)
    try:
        until(lambda: all_stopped(node.dht.p2pd_pid))
        yield
    finally:
        os.kill(node.dht.p2pd_pid, signal.SIGCONT)


def all_stopped(pid: int) -> bool:
    """Whether no thread of a process runs; on a busy machine some do for a while after SIGSTOP."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)


def link(upper: Peer, lower: Peer) -> tuple[LinkKey, LinkKey]:
    """A link that stands, by the keys it has on both sides."""
    keys = upper.dial(lower.id, "lower"), lower.expect(upper.id, "upper")
    assert upper.next(Opened).key == keys[0]
    assert lower.next(Opened).key == keys[1]
    return keys
