"""Peers of one stage in one event loop: the real client asks the real server over streams in
memory, and what each of them has lies in a real folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.dht.rpc import Client, facts_of
from dilocox.peer.chain.archive_keeper import ArchiveService
from dilocox.peer.chain.uploads import Source
from tests.peer.kept_chains import RUN

Find = Callable[[dict[str, Any]], "Source | None"]


class MemorySwarm:
    """The peers by name, each with what it gives to whoever asks; others are gone.

    asked: who was asked for what, in order. sent: bytes that each gave away. before: runs before
    each answer, and may fail.
    """

    def __init__(self, **finds: Find):
        self.finds: dict[str, Find] = finds
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sent: dict[str, Counter[str]] = {}
        self.before: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None

    def client(self, record_bytes: int = 1 << 31) -> Client:
        """What a peer calls the others with."""
        return Client(p2p=cast("Any", self), namespace="", record_bytes=record_bytes)

    async def iterate_protobuf_handler(
        self, peer: Any, _name: str, request: Any, _answer: Any
    ) -> AsyncIterator[Any]:
        """As a handle to p2pd does it."""
        name, want = str(peer), facts_of(request)
        self.asked.append((name, want))
        if self.before is not None:
            await self.before(name, want)
        if name not in self.finds:
            raise ConnectionError(f"{name} is gone")

        async def find(want: dict[str, Any]) -> Source | None:
            return self.finds[name](want)

        service = ArchiveService(find, self.sent.setdefault(name, Counter()), Counter())
        return service.rpc_get(request, cast("Any", SimpleNamespace(remote_id="QmAsker")))

    def asked_for(self, what: str, *, header: bool = False) -> list[str]:
        """The digests that somebody was asked for, in order."""
        return [
            want["digest"]
            for _, want in self.asked
            if want["what"] == what and want.get("header", False) is header
        ]

    def place(
        self, manifest: Manifest, claims: Callable[[int], Mapping[str, ClaimRecord]]
    ) -> Joined:
        """A place in the run's DHT, in which the peers of a stage claim this."""
        stages = {claim_key(RUN, stage): stage for stage in range(manifest.stages)}

        async def replicate_p2p() -> Any:
            return self

        place = SimpleNamespace(
            run=RUN,
            witness="",
            manifest=manifest,
            swarm=SimpleNamespace(read=lambda key, _: claims(stages[key])),
            dht=SimpleNamespace(replicate_p2p=replicate_p2p, bootstraps=frozenset()),
        )
        return cast("Joined", place)
