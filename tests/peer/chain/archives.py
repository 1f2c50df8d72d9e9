"""A bootstrap's archive of one stage, with donors in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain.archive import StageArchive
from dilocox.peer.chain.chain_client import ChainClient, NoState, WantedState
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import keep_right_chunks
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout
from tests.peer.kept_chains import MODEL, RUN, ChainMaker
from tests.peer.memory_swarm import MemorySwarm

MANIFEST = Manifest.from_dict(
    {
        "name": "test",
        "model": MODEL | {"vocab_size": 8192},  # so that a state has five chunks
        "end_tokens": 1000,
        "codec": {"scheme": "dense"},
    }
)
ME = "QmArchive"
OUTER = OuterStep(MANIFEST.outer.learning_rate, MANIFEST.outer.momentum)
CHECK = RecordCheck(RUN, 0, MANIFEST, stage_layout(MANIFEST, 0))


class Kept:
    """An archive and the donors that it can reach, by peer."""

    def __init__(
        self,
        folder: Path,
        *donors: ChainMaker,
        record_lifetime_s: float = 60.0,
        keep_bytes: int = 1 << 30,
        now: Callable[[], float] = time.monotonic,
        records_after_state: tuple[int, int] = (2, 2),
        witness: str = "",
        copies: frozenset[str] = frozenset(),
        replaying: asyncio.Lock | None = None,
    ):
        self.folder = folder
        self.swarm = MemorySwarm(**{donor.peer: donor.find for donor in donors})
        self.disk_full = False
        self.archive = StageArchive(
            folder,
            me=ME,
            witness=witness,
            copies=copies,
            replaying=replaying,
            check=CHECK,
            record_lifetime_s=record_lifetime_s,
            keep_bytes=keep_bytes,
            client=self.swarm.client(),
            compute=self._compute,
            records_after_state=records_after_state,
            pause_s=0.0,
            now=now,
        )

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.disk_full and function is keep_right_chunks:
            raise OSError(28, "No space left on device")
        return await asyncio.to_thread(function, *arguments)

    def look(
        self, *donors: ChainMaker, times: int = 1, trains: bool = True, **more: ClaimRecord
    ) -> ClaimRecord | None:
        """Let it see what these claim; what it claims then."""
        claims = {donor.peer: donor.claim() for donor in donors} | more

        async def tend() -> None:
            for _ in range(times):
                await self.archive.tend(claims, trains=trains)
                if beside := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(beside, timeout=20)
                await self.archive.tend(claims, trains=trains)
            await self.archive.close()  # the next look has another event loop

        asyncio.run(tend())
        return self.archive.claim

    def asked(self, what: str) -> list[str]:
        """Who was asked for this, in order."""
        return [peer for peer, want in self.swarm.asked if want["what"] == what]

    @property
    def generations(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())

    @property
    def state_round(self) -> int:
        """Of the state that is given, -1 without one."""
        found = self.archive.find({"what": "state", "offset": 0})
        return -1 if found is None else found.facts["round"]

    def joiner_gets(self, folder: Path, claim: ClaimRecord) -> Tensor:
        """The anchor that a peer has which takes all from the archive, by its own code."""
        chain = ChainClient(MemorySwarm(QmArchive=self.archive.find).client(), CHECK, [ME])
        log = RoundLog(folder / "joined", manifest_digest=MANIFEST.root, codec=CHECK.codec)
        module = build_stage(MANIFEST.model, 0, 1, MANIFEST.seed)
        anchor = flatten_parameters(module, CHECK.layout).detach().clone()
        momentum = torch.zeros_like(anchor)

        async def take() -> tuple[int, ...]:
            with contextlib.suppress(NoState):
                found = await chain.state(ME, folder, log, WantedState())
                found.load(anchor, momentum, log, CHECK)
            before = log.head().round
            await chain.catch_up(log, claim.digest)
            return tuple(number for number in log.rounds() if number > before)

        for number in asyncio.run(take()):
            record = log.read(number)
            assert record is not None
            OUTER.apply(anchor, momentum, record.average(CHECK.codec), anchor, momentum)
        assert log.head().digest == claim.digest
        return anchor


def donor_of(identity: Identity, folder: Path) -> ChainMaker:
    return ChainMaker(identity, folder, MANIFEST)
