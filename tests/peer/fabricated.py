"""A swarm that is only told: looks, walks and records as a monitor would get them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dilocox.dht.identity import peer_id_of
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, ReplicaRecord, StageRecord
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.monitor.chains import Walk
from dilocox.peer.monitor.health import Health, health_of
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.look import SwarmLook
from dilocox.peer.monitor.status import Seen, status_of
from tests.pipeline import swarms

NOW = 1_763_640_000.0  # 12:00:00 UTC of some day
RUN = "0123456789abcdef" * 2
PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
INVITE = f"dilocox:{RUN}@/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
NOBODYS_INVITE = INVITE.replace("203.0.113.7/tcp/31337", "127.0.0.1/tcp/1")  # nothing listens


def manifest_of(stages: int = 3, **sections: Any) -> Manifest:
    layers = {"model_type": "llama", "vocab_size": 384, "num_hidden_layers": stages}
    facts = {"name": "told", "model": layers, "stages": stages, "end_tokens": 10_000_000}
    return Manifest.from_dict(facts | sections)


def peer_id(number: int) -> str:
    """One that nobody has the key of."""
    return peer_id_of(hashlib.sha256(str(number).encode()).digest())


def digest(stage: int, number: int, branch: str = "") -> str:
    return hashlib.sha256(f"{stage}.{number}.{branch}".encode()).hexdigest()


# of peers that train, and so of what a page shows
stage_record = partial(
    swarms.stage_record,
    state="training",
    round=4,
    inner_steps=20,
    tokens=100,
    tokens_per_s=500.0,
    version="0.5.0",
    addresses=("/ip4/192.0.2.9/tcp/4001",),
    compression_error=0.25,
)
replica_record = partial(
    swarms.replica_record,
    epoch=1,
    round=4,
    inner_step=7,
    step_s=0.5,
    tokens_per_s=1000.0,
    train_loss=2.5,
    val_loss=2.4,
    val_round=3,
    waiting_share=0.02,
    codec="int8",
)


def claim_record(round_number: int, name: str, chain_tokens: int = 0) -> ClaimRecord:
    return ClaimRecord(
        round=round_number, digest=name, chain_tokens=chain_tokens, record_bytes=1000
    )


def chain_round(
    stage: int,
    number: int,
    members: dict[str, int],
    *,
    previous: str | None = None,
    root: str = "",
    branch: str = "",
    chain_tokens: int = 0,
    sits_out: Sequence[str] = (),
) -> ChainRound:
    before = previous or (digest(stage, number - 1) if number else root)
    return ChainRound(
        round=number,
        tokens=sum(members.values()),
        members=len(members),
        ranks=(4, 8, 16),
        next_inner_steps=20,
        record_bytes=1000 + number,
        digest=digest(stage, number, branch),
        previous=before,
        chain_tokens=chain_tokens,
        contributors=tuple(sorted(members.items())),
        sits_out=tuple(sits_out),
        token_seconds=10_000_000,
    )


def walk_of(rounds: Sequence[ChainRound], *, connected: bool = True, stage: int = 0) -> Walk:
    """The newest round first, as a walk goes."""
    return Walk(
        stage=stage,
        start=rounds[0].digest,
        rounds=tuple(rounds),
        end=rounds[-1].previous,
        connected=connected,
        folded=Counter(),
    )


class ToldSwarm:
    """Replicas 0 to n-1, each with a peer of every stage, and spares; `look` tells them."""

    def __init__(self, *, stages: int = 3, replicas: int = 2, spares: int = 1, **sections: Any):
        self.manifest = manifest_of(stages, **sections)
        self.at = NOW
        self.stages: dict[int, dict[str, StageRecord]] = {n: {} for n in range(stages)}
        self.replicas: dict[str, ReplicaRecord] = {}
        self.claims: dict[int, dict[str, ClaimRecord]] = {n: {} for n in range(stages)}
        self.bootstraps = {"boot0": True}
        self.answered = True
        self.history = SwarmHistory.begun(stages, self.manifest.digest, NOW)
        for number in range(replicas):
            members = [peer_id(100 * stage + number) for stage in range(stages)]
            for stage, peer in enumerate(members):
                self.stages[stage][peer] = stage_record(replica=members[0])
            self.replicas[members[0]] = replica_record(members=tuple(members))
        for stage in range(stages):
            for number in range(spares):
                spare = peer_id(100 * stage + max(50, replicas) + number)
                self.stages[stage][spare] = stage_record(state="spare")

    def peer(self, stage: int, replica: int) -> str:
        return peer_id(100 * stage + replica)

    def look(self, after_s: float = 5.0) -> SwarmLook:
        """What is told some seconds later; the history has heard it, too."""
        self.at += after_s
        look = SwarmLook(
            at=self.at,
            manifest=self.manifest,
            stages={stage: dict(peers) for stage, peers in self.stages.items()},
            claims={stage: dict(claims) for stage, claims in self.claims.items()},
            replicas=dict(self.replicas),
            bootstraps=dict(self.bootstraps),
            answered=self.answered,
        )
        self.history.look(look)
        return look

    def commit(
        self,
        number: int,
        tokens: int | Mapping[str, int] = 1000,
        after_s: float = 5.0,
        *,
        branch: str = "",
        before: int | None = None,
        sits_out: Sequence[str] = (),
        **facts: Any,
    ) -> None:
        """A round of every stage, by all peers that train there.

        tokens: of each peer, or by peer. branch: other bytes of the same number. before: the round
        that it follows, and of branch "". facts: what else its records say.
        """
        self.at += after_s
        for stage, peers in self.stages.items():
            training = [peer for peer, told in peers.items() if told.state == "training"]
            each = dict.fromkeys(training, tokens) if isinstance(tokens, int) else tokens
            members = {peer: each[peer] for peer in training}
            chain = self.history.stages[stage]
            made = chain_round(
                stage,
                number,
                members,
                previous=digest(stage, before) if before is not None else None,
                root="" if number else self.manifest.root,
                branch=branch,
                chain_tokens=chain.chain_tokens + sum(members.values()),
                sits_out=sits_out,
            )
            made = replace(made, **facts)
            self.history.walked(walk_of([made], stage=stage), self.at)
            claim = claim_record(number, made.digest, made.chain_tokens)
            self.claims[stage] = dict.fromkeys(peers, claim)

    def health(self, look: SwarmLook) -> Health:
        return health_of(look, self.history)

    def seen(self, look: SwarmLook) -> Seen:
        return Seen(RUN, INVITE, look, self.history, self.health(look))

    def status(self, look: SwarmLook) -> dict[str, Any]:
        return status_of(self.seen(look))


def trained(**options: int) -> ToldSwarm:
    """A swarm after four rounds."""
    swarm = ToldSwarm(**options)
    swarm.look()
    for number in range(4):
        swarm.commit(number)
        swarm.look()
    return swarm


def losses_of(status: Mapping[str, Any]) -> list[list[Any]]:
    """Round, train and validation loss of the curve in status.json, where it has one of them."""
    rows = ([row[0], row[3], row[4]] for row in status["curve"])
    return [row for row in rows if row[1:] != [None, None]]
