"""Members of an averaging group in one event loop, on links that a test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dilocox.compression.codec import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.dht.identity import Identity
from dilocox.peer.ballots import Ballots
from dilocox.peer.certificate import Ballot
from dilocox.peer.exchange import Attempt
from dilocox.peer.members import AttemptResult, AttemptSetup, Mean, Member
from dilocox.peer.record import RoundRecord
from dilocox.peer.roundlog import RoundLog

CODECS = {bits: GroupCodec(bits) for bits in (4, 8, 16, 32)}
LAYOUT = FlatLayout.of([("weight", (40, 30)), ("bias", (30,))])
MANIFEST_DIGEST = "0" * 64

Passes = Callable[[str, str, str], bool]
"""(sender, receiver, kind) -> whether a message gets through."""


class Link:
    """One member's transport: direct calls into the others' attempts."""

    def __init__(self, me: str, attempts: dict[str, Attempt], passes: Passes):
        self._me = me
        self._attempts = attempts
        self._passes = passes

    async def push_part(self, peer: str, part: int, payload: bytes) -> None:
        await self._to(peer, "part").on_part(self._me, part, payload)

    async def push_mean(self, peer: str, mean: Mean) -> None:
        await self._to(peer, "mean").on_mean(self._me, mean)

    async def fetch_mean(self, peer: str, part: int) -> Mean | None:
        return self._to(peer, "fetch").mean(part)

    async def fetch_record(self, peer: str, digest: str) -> bytes | None:
        attempt = self._to(peer, "fetch")
        return attempt.record if attempt.digest == digest else None

    async def send_vote(self, peer: str, vote: bytes) -> None:
        self._to(peer, "vote").on_vote(vote)

    async def ask_votes(self, peer: str, round_number: int, attempt: int) -> list[bytes]:
        return self._to(peer, "ask").ballots.all_bytes()

    async def heartbeats(self, peer: str) -> AsyncIterator[None]:
        while True:
            self._to(peer, "beat")
            yield
            await asyncio.sleep(0.02)

    def _to(self, peer: str, kind: str) -> Attempt:
        if not self._passes(self._me, peer, kind):
            raise ConnectionError(f"{kind} from {self._me} to {peer} is lost")
        return self._attempts[peer]


def template(**changes: object) -> RoundRecord:
    """A record to be made, of round 3 unless changed."""
    facts = {
        "run": "run",
        "stage": 0,
        "round": 3,
        "previous": MANIFEST_DIGEST,
        "anchor_before": "a" * 64,
        "layout": LAYOUT.digest,
        "bits": 4,
        "members": (),
        "chain_tokens": 0,
        "parts": (),
        "next_bits": 4,
        "next_inner_steps": 100,
        "means": (),
    }
    return RoundRecord(**(facts | changes))  # type: ignore[arg-type]


class Group:
    """N members with keys, logs and messages of their own."""

    def __init__(self, identities: list[Identity], folder: Path, *, passes: Passes, bits: int = 4):
        self.identities = sorted(identities, key=lambda identity: identity.peer_id)
        self.peers = [identity.peer_id for identity in self.identities]
        self.messages = [
            torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(index))
            for index in range(len(self.peers))
        ]
        self.tokens = [100 * (index + 1) for index in range(len(self.peers))]
        self.attempts: dict[str, Attempt] = {}
        self.pool = ThreadPoolExecutor(1)
        members = tuple(
            Member(peer=peer, tokens=tokens, exchange_s=0.0, client_mode=False)
            for peer, tokens in zip(self.peers, self.tokens, strict=True)
        )
        ballot = Ballot(
            run="run", stage=0, round=3, attempt=0, group=b"group", members=tuple(self.peers)
        )
        for identity, message in zip(self.identities, self.messages, strict=True):
            setup = AttemptSetup(
                me=identity.peer_id,
                members=members,
                template=template(bits=bits),
                codec=CODECS[bits],
                parts=tuple(LAYOUT.parts(len(members))),
                exchange_s=1.0,
                vote_s=0.6,
                silence_s=0.3,
            )
            log = RoundLog(
                folder / identity.peer_id, manifest_digest=MANIFEST_DIGEST, codecs=CODECS
            )
            self.attempts[identity.peer_id] = Attempt(
                setup,
                message=message,
                transport=Link(identity.peer_id, self.attempts, passes),
                ballots=Ballots(identity=identity, ballot=ballot, log=log),
                pool=self.pool,
            )

    async def run(self, dead: frozenset[int] = frozenset()) -> list[AttemptResult | None]:
        """Let all members but the dead ones run to their end."""

        async def one(index: int) -> AttemptResult | None:
            return None if index in dead else await self.attempts[self.peers[index]].run()

        limit_s = 5.0
        return await asyncio.wait_for(
            asyncio.gather(*(one(index) for index in range(len(self.peers)))), limit_s
        )

    def weighted_mean(self) -> Tensor:
        """What the group should have averaged."""
        total = sum(self.tokens)
        return torch.stack(
            [message * (t / total) for message, t in zip(self.messages, self.tokens, strict=True)]
        ).sum(0)
