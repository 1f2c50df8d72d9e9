"""Tells the swarm about this peer, and looks at what the others tell: records in and out of the
DHT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from dilocox import __version__
from dilocox.dht.keys import bell_key, claim_key, replica_key, stage_key
from dilocox.dht.records import BellRecord, ClaimRecord, ReplicaRecord, StageRecord
from dilocox.dht.swarm import Swarm
from dilocox.peer.chain import ChainFollower
from dilocox.peer.place import LoopProgress, Place
from dilocox.peer.view import SwarmView

READ_LIMIT_S = 3.0  # of each read; a slow one must not keep an exchange from its time


class Herald:
    """Publishes records that live for three heartbeats. `view` is what the last look showed."""

    def __init__(self, place: Place, swarm: Swarm):
        self._place = place
        self._swarm = swarm
        self._lifetime_s = place.manifest.deadlines.record_lifetime_s
        self.view = SwarmView(me=place.me)

    def look(self, bell_rounds: Iterable[int]) -> bool:
        """Read what the others say; what gives no answer stays as it was. Whether all answered."""
        place, view = self._place, self.view
        read = partial(self._swarm.read, timeout_s=READ_LIMIT_S)
        bells: dict[int, Mapping[str, BellRecord]] = {}
        for number in bell_rounds:
            bells[number] = read(bell_key(place.run, number), BellRecord) or {}
        stage = read(stage_key(place.run, place.stage), StageRecord)
        replicas = read(replica_key(place.run), ReplicaRecord)
        claims = read(claim_key(place.run, place.stage), ClaimRecord)
        self.view = SwarmView(
            me=place.me,
            stage=view.stage if stage is None else stage,
            replicas=view.replicas if replicas is None else replicas,
            bells=bells,
            claims=view.claims if claims is None else claims,
        )
        return stage is not None and claims is not None

    def tell_stage(
        self, state: str, *, round_number: int, chain: ChainFollower, voids: int, own: LoopProgress
    ) -> None:
        """That this peer hosts its stage, and the last record it holds."""
        place, head, last = self._place, chain.head, chain.last_record
        hosting = StageRecord(
            state=state,  # pyright: ignore[reportArgumentType] - checked when it is encoded
            round=round_number,
            digest=head.digest,
            replica=place.me,
            tokens=0 if state == "left" else own.unsent_tokens,
            tokens_per_s=own.tokens_per_s,
            client_mode=place.client_mode,
            voids=voids,
            version=__version__,
            addresses=place.addresses,
        )
        claim = ClaimRecord(
            round=head.round,
            digest=head.digest,
            tokens=0 if last is None else last.tokens,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
        )
        self._swarm.publish(stage_key(place.run, place.stage), hosting, self._lifetime_s)
        self._swarm.publish(claim_key(place.run, place.stage), claim, self._lifetime_s)

    def tell_replica(self, record: ReplicaRecord) -> None:
        """That this head leads a replica."""
        self._swarm.publish(replica_key(self._place.run), record, self._lifetime_s)

    def ring(self, bell: BellRecord | None) -> None:
        """That this head finished a round; None is nothing to tell."""
        if bell is not None:
            self._swarm.publish(bell_key(self._place.run, bell.round), bell, self._lifetime_s)

    def bootstrap_answers(self, timeout_s: float) -> bool:
        """Whether one of the bootstraps answers a ping."""
        return self._swarm.bootstrap_answers(timeout_s)


def replica_record(place: Place, round_number: int, own: LoopProgress) -> ReplicaRecord:
    """The record of a replica of one stage: this peer alone."""
    return ReplicaRecord(
        members=(place.me,),
        epoch=0,
        round=round_number,
        inner_step=own.inner_step,
        step_s=own.step_s,
        tokens_per_s=own.tokens_per_s,
        train_loss=own.train_loss,
        val_loss=own.val_loss,
        val_round=own.val_round,
        codec="",
        last_fault="",
    )
