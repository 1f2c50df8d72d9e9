"""Sends nonsense to everybody of a run: each call that peers and bootstraps answer, with messages
of the right form and odd values, of the wrong form, or of no form.

    python -m tests.attacks.flood INVITE FOLDER COUNT SEED

It prints a line of JSON now and then, and one when all are sent: how many, and what came of them.
"""

# typings/hivemind leaves out how hivemind registers calls.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from google.protobuf.descriptor import FieldDescriptor
from hivemind.p2p import P2P, PeerID, ServicerBase
from hivemind.proto import dht_pb2

from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined, join_run
from dilocox.dht.protocol import RunProtocol
from dilocox.dht.reachability import Probe
from dilocox.dht.records import (
    MAX_RECORD_BYTES,
    ClaimRecord,
    PartRecord,
    Record,
    StageRecord,
    averaging_prefix,
    bell_key,
    claim_key,
    key_id,
    part_key,
    replica_key,
    stage_key,
)
from dilocox.dht.wire import seal
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.chain.archive_keeper import ArchiveService
from tests.pipeline.swarms import bell_record, replica_record, stage_record

AT_ONCE = 256
LIMIT_S = 3.0  # for one of them
TOLD_EVERY_S = 5.0
MAX_FRAMES = 4  # that are read of an answer
MAX_BYTES = 1 << 16
ENDLESS = 0.01  # of the streams
SIGNED, SIGNERS = 0.5, 40  # of what is to be stored; the keys that sign it

ASKED = ("group", "part", "bytes", "kind", "what", "digest", "header", "offset", "sha256")
NAMES = (*ASKED, "round", "attempt", "votes", "contributors", "addresses", "seen", "seconds")
WORDS = (
    "part",
    "row",
    "mean",
    "record",
    "certificate",
    "state",
    "digests",
    "history",
    "tokenizer",
    "",
    "/ip4/1.2.3.4/tcp/1",
)
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 2**64 - 1, math.inf, -math.inf, math.nan, 0.5)


class Odd:
    """What nobody honest sends, drawn from a seed."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)

    def one_of(self, choices: Any) -> Any:
        return self._draw.choice(choices)

    def chance(self, of: float) -> bool:
        return self._draw.random() < of

    def some(self, names: list[Any]) -> list[Any]:
        """None, one or few of them."""
        return self._draw.sample(names, self._draw.randrange(3))

    def blob(self) -> bytes:
        """Bytes of a length between nothing and `MAX_BYTES`, most of them few."""
        most = self.one_of((0, 1, 20, 64, 200, 2000, MAX_BYTES if self.chance(0.02) else 200))
        return self._draw.randbytes(self._draw.randint(0, most))

    def value(self, depth: int = 0) -> object:
        """What msgpack can say."""
        match self._draw.randrange(8 if depth < 3 else 6):
            case 0 | 1:
                return self.one_of(NUMBERS)
            case 2:
                return self.one_of(WORDS)
            case 3:
                return self.blob()
            case 4:
                return self.one_of((None, True, False))
            case 5:
                return "f" * self.one_of((1, 64, 65, 5000))
            case 6:
                return [self.value(depth + 1) for _ in range(self._draw.randrange(20))]
            case _:
                return self.facts(depth + 1)

    def facts(self, depth: int = 0) -> dict[object, object]:
        names: list[object] = [*self._draw.sample(NAMES, self._draw.randrange(8))]
        names += [7] if self.chance(0.02) else []
        return {name: self.value(depth) for name in names}

    def packed(self) -> bytes:
        """A map as msgpack, or what is nearly one."""
        data = bytes(msgpack.packb(self.facts()) or b"")
        if self.chance(0.2):
            data = data[: self._draw.randint(0, len(data))] + self.blob()
        return data

    def fill(self, message: Any, depth: int = 0) -> Any:
        """Put something into some fields of a protobuf message; returns it."""
        for field in message.DESCRIPTOR.fields:
            if self.chance(0.2):
                continue
            repeated = field.is_repeated
            count = self._draw.randrange(5) if repeated else 1
            for _ in range(count):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    inner = getattr(message, field.name)
                    if depth < 3:
                        self.fill(inner.add() if repeated else inner, depth + 1)
                    continue
                value = self._scalar(field)
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    if repeated:
                        getattr(message, field.name).append(value)
                    else:
                        setattr(message, field.name, value)
        return message

    def _scalar(self, field: FieldDescriptor) -> object:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.one_of((self.packed, self.blob, lambda: bytes(20), lambda: b"\xc0"))()
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.one_of(WORDS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.chance(0.5)
        return self.one_of(NUMBERS)


class SignedRecords:
    """Records of fresh keys with odd values in some fields: their form and signatures are right, so
    that what comes through a node's checks is read by peers.
    """

    def __init__(self, place: Joined, folder: Path, odd: Odd):
        self._run, self._clock, self._odd = place.run, place.clock, odd
        self._keys = [Identity.load_or_create(folder / f"signer-{n}.key") for n in range(SIGNERS)]
        # as peers count, later than what was signed with these keys in an earlier flood
        self._sequence = int(place.clock.time() * 1000)

    def store(self) -> dht_pb2.StoreRequest:
        """What stores one of them."""
        odd, signer = self._odd, self._odd.one_of(self._keys)
        key, record = self._record(signer.peer_id)
        facts = dataclasses.asdict(record)
        for name in odd.some(list(facts)):
            facts[name] = odd.value()
        self._sequence += 1
        expires_at = self._clock.time() + odd.one_of((5.0, 30.0, 120.0))
        sealed = seal(
            signer,
            key=key,
            sequence=self._sequence,
            expires_at=expires_at,
            payload=bytes(msgpack.packb(facts) or b"")[: 16 * MAX_RECORD_BYTES],
        )
        return dht_pb2.StoreRequest(
            keys=[key_id(key)],
            subkeys=[bytes(msgpack.packb(peer_id_bytes_of(signer.public_key)) or b"")],
            values=[bytes(msgpack.packb(sealed) or b"")],
            expiration_time=[expires_at],
            in_cache=[False],
        )

    def _record(self, me: str) -> tuple[str, Record]:
        now, number = self._clock.time(), self._odd.one_of(range(100))
        return self._odd.one_of(
            (
                (stage_key(self._run, 0), stage_record(state="training", round=number, replica=me)),
                (replica_key(self._run), replica_record(members=(me,), round=number)),
                (bell_key(self._run, number), bell_record(now, number=number)),
                (part_key(self._run, number), PartRecord(part=number, position=0)),
                (
                    claim_key(self._run, 0),
                    ClaimRecord(round=number, digest="ab" * 32, chain_tokens=1, record_bytes=9),
                ),
            )
        )


@dataclass(frozen=True)
class Raw:
    """Bytes in the place of a protobuf message."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return self.data


@dataclass(frozen=True)
class Target:
    """A call that one peer answers; `handler`: hivemind's description of it, None for a stream of
    bytes.
    """

    peer: PeerID
    name: str
    handler: Any = None

    @property
    def short(self) -> str:
        return "stream" if self.handler is None else self.handler.method_name


def targets_of(place: Joined) -> list[Target]:
    """All calls of all peers and bootstraps that are in view."""
    found: list[Target] = []

    def calls(peer: str, servicer: type[ServicerBase], namespace: str | None = None) -> None:
        servicer._collect_rpc_handlers()
        for handler in servicer._rpc_handlers or ():
            name = servicer._get_handle_name(namespace, handler.method_name)
            found.append(Target(PeerID.from_base58(peer), name, handler))

    for stage in range(place.manifest.stages):
        prefix = averaging_prefix(place.run, stage)
        for peer in place.swarm.read(stage_key(place.run, stage), StageRecord) or {}:
            calls(peer, StageAverager, prefix)
            found.append(Target(PeerID.from_base58(peer), f"dilocox.{place.run}.replica"))
        for peer in place.dht.bootstraps:
            calls(peer, ArchiveService, prefix)
    for peer in {str(target.peer) for target in found}:
        calls(peer, RunProtocol)
        calls(peer, Probe)
    return found


class Flood:
    """Sends, and counts what comes back by call."""

    def __init__(self, p2p: P2P, targets: list[Target], odd: Odd, signed: SignedRecords):
        self._p2p = p2p
        self._targets = targets
        self._odd, self._signed = odd, signed
        self.sent = 0
        self.results = Counter[str]()

    async def send(self, count: int, tell: Callable[[Flood], None]) -> None:
        running = set[asyncio.Task[None]]()
        told = time.monotonic()
        while self.sent < count:
            if len(running) >= AT_ONCE:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.add(asyncio.ensure_future(self._one(self._odd.one_of(self._targets))))
            self.sent += 1
            if time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                tell(self)
        await asyncio.wait(running)

    async def _one(self, target: Target) -> None:
        try:
            result = await asyncio.wait_for(self._asked(target), LIMIT_S)
        except asyncio.TimeoutError:
            result = "no answer"
        except Exception as error:  # noqa: BLE001 - whatever is said to nonsense
            result = "failed" if not isinstance(error, ConnectionError) else "closed"
        self.results[f"{target.short}: {result}"] += 1

    async def _asked(self, target: Target) -> str:
        if target.handler is None:
            return await self._written(target)
        handler, odd = target.handler, self._odd
        if (handler.stream_input or handler.stream_output) and odd.chance(ENDLESS):
            return await self._endless(target)

        def message() -> Any:
            if handler.method_name == "rpc_store" and odd.chance(SIGNED):
                return self._signed.store()
            if odd.chance(0.2):
                return Raw(odd.blob())
            return odd.fill(handler.request_type())

        async def messages() -> AsyncIterator[Any]:
            for _ in range(odd.one_of((0, 1, 2, 5))):
                yield message()

        request = messages() if handler.stream_input else message()
        if not handler.stream_output:
            call = self._p2p.call_protobuf_handler
            answer = await call(target.peer, target.name, request, handler.response_type)
            return _said(answer)
        stream: Any = await self._p2p.iterate_protobuf_handler(
            target.peer, target.name, request, handler.response_type
        )
        said = "ended"
        async with contextlib.aclosing(stream) as frames:
            for _ in range(MAX_FRAMES):
                if (frame := await anext(frames, None)) is None:
                    break
                said = _said(frame)
        return said

    async def _endless(self, target: Target) -> str:
        """One message that says it has a terabyte, and goes on for as long as it is taken."""
        _, _, writer = await self._p2p.call_binary_stream_handler(target.peer, target.name)
        try:
            writer.write(P2P.MESSAGE_MARKER + (1 << 40).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
            while True:
                writer.write(bytes(MAX_BYTES))
                await writer.drain()
        finally:
            writer.transport.abort()

    async def _written(self, target: Target) -> str:
        _, reader, writer = await self._p2p.call_binary_stream_handler(target.peer, target.name)
        try:
            length, head = self._odd.one_of((0, 4, 200, 2**31, 2**32 - 1)), self._odd.packed()
            writer.write(
                self._odd.one_of((head, length.to_bytes(4, "big") + head, self._odd.blob()))
            )
            await writer.drain()
            return "answer" if await reader.read(1 << 16) else "ended"
        finally:
            writer.transport.abort()


def _said(answer: Any) -> str:
    metadata = getattr(answer, "metadata", b"")
    with contextlib.suppress(ValueError, msgpack.UnpackException):
        facts = msgpack.unpackb(metadata) if metadata else {}
        if isinstance(facts, dict) and ("refused" in facts or "busy" in facts):
            return "refused"
    return "answer"


async def flood(place: Joined, folder: Path, count: int, seed: int) -> None:
    """Send so many; a line now and then, the last one says that it is done."""

    def tell(flood: Flood, *, done: bool = False) -> None:
        line = {"sent": flood.sent, "done": done, "results": dict(flood.results.most_common())}
        print(json.dumps(line), flush=True)

    targets = await asyncio.to_thread(targets_of, place)
    p2p = await place.dht.replicate_p2p()
    odd = Odd(seed)
    flood = Flood(p2p, targets, odd, SignedRecords(place, folder, odd))
    await flood.send(count, tell)
    tell(flood, done=True)


def main() -> None:
    invite, folder = Invite.parse(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    identity = Identity.load_or_create(folder / "0.key")
    with join_run(invite, identity, listen=["/ip4/127.0.0.1/tcp/0"]) as place:
        asyncio.run(flood(place, folder, int(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
