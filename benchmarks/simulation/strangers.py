"""Strangers who have the invite, keys of their own, and a node of the DHT: they say what they like,
in every stage, and come to no group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.simulation.clock import Timeline
from benchmarks.simulation.dht import SimulatedDHT
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import (
    BellRecord,
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    bell_key,
    claim_key,
    replica_key,
    stage_key,
)
from dilocox.peer.rounds.round_end import MAX_AHEAD

FAR_ROUNDS = MAX_AHEAD // 2
ALL_TOKENS = 2**52


class Strangers:
    """So many keys, who tell anew with every heartbeat that they train, lead replicas of the round
    that the run is in, and hold the chain of a run that is over. One of them rings, in this round
    and far on.
    """

    def __init__(
        self,
        count: int,
        timeline: Timeline,
        dht: SimulatedDHT,
        manifest: Manifest,
        run: str,
        round_now: Callable[[], int],
    ):
        self._names = [f"stranger{number:03d}" for number in range(count)]
        self._timeline = timeline
        self._dht = dht
        self._manifest = manifest
        self._run = run
        self._round_now = round_now

    def tell(self) -> None:
        """Tell all of it, and again in a heartbeat."""
        deadlines, now = self._manifest.deadlines, self._timeline.now
        self._timeline.after(deadlines.heartbeat_s, self.tell)
        for name in self._names:
            for key, record in self._lies(name, self._round_now(), now).items():
                self._dht.store(name, key, record, now, now + deadlines.record_lifetime_s, 0)

    def _lies(self, name: str, number: int, now: float) -> dict[str, Record]:
        bell = BellRecord(
            round=number,
            finished_at=now,
            round_s=1.0,
            send_after=now,
            scheduled_at=now,
        )
        claim = ClaimRecord(
            round=number + 1,
            digest="f" * 64,
            chain_tokens=ALL_TOKENS,
            record_bytes=1,
        )
        leading = ReplicaRecord(
            members=(name,),
            epoch=1,
            round=number,
            inner_step=0,
            step_s=1e4,
            tokens_per_s=1.0,
            train_loss=None,
            val_loss=0.0,
            val_round=number,
            codec="",
            last_fault="",
            hear_s=1e4,
        )
        told: dict[str, Record] = {replica_key(self._run): leading}
        if name == self._names[0]:
            for each in (bell, replace(bell, round=number + FAR_ROUNDS)):
                told[bell_key(self._run, each.round)] = each
        for stage in range(self._manifest.stages):
            told[claim_key(self._run, stage)] = claim
            told[stage_key(self._run, stage)] = StageRecord(
                state="training",
                round=number,
                inner_steps=1,
                replica=name,
                tokens=1,
                tokens_per_s=1.0,
                client_mode=False,
                voids=0,
                version="",
                addresses=(),
                blocked="",
            )
        return told
