"""A swarm of peers that are only told: signed records in a real DHT, and chains from one node.

    python -m tests.swarm.told_peers INVITE FOLDER PEERS STAGES ROUNDS

Each told peer has a key of its own and signs what a peer signs. They share one node, which hosts
one peer of every stage and answers for the chains; to the others nobody gets through, as is so with
peers that only dial out. It writes a line to standard output when all is told, and goes on telling
it, with a new round each time, until standard input ends.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined, join_run
from dilocox.dht.records import averaging_prefix, claim_key, replica_key, stage_key
from dilocox.dht.swarm import Swarm
from dilocox.peer.chain.archive_keeper import ArchiveService
from dilocox.peer.chain.uploads import Source
from tests.peer.fabricated import claim_record, replica_record, stage_record
from tests.peer.told_records import ToldRecord, told_chain

PERIOD_S = 15.0
TOKENS = 8192
SPARE_SHARE = 5  # one peer of so many is a spare


class ToldPeers:
    """Who they are, and their chains."""

    def __init__(self, place: Joined, folder: Path, peers: int, stages: int, rounds: int):
        self._place = place
        self._identities = [
            place.identity,
            *(Identity.load_or_create(folder / f"{n}.key") for n in range(1, peers)),
        ]
        self._swarms = [Swarm(place.dht, place.run, each, place.clock) for each in self._identities]
        self._stages = stages
        self._length = rounds // 2
        draw = random.Random(0)
        self.chains = [
            told_chain(
                place.run,
                stage,
                place.manifest.digest,
                [
                    {self._identities[n].peer_id: draw.randint(1, TOKENS) for n in self._of(stage)}
                    for _ in range(rounds)
                ],
                mean_bytes=4096,
            )
            for stage in range(stages)
        ]

    def _of(self, stage: int) -> list[int]:
        """The peers of a stage; the node's own is of all of them."""
        own = [n for n in range(len(self._identities)) if n % self._stages == stage]
        return own if 0 in own else [0, *own]

    def find(self, stage: int) -> Callable[[dict[str, Any]], Any]:
        """Answers for the chain of a stage."""
        records = {each.digest: each for each in self.chains[stage]}

        async def found(want: dict[str, Any]) -> Source | None:
            told = records.get(want.get("digest", "")) if want.get("what") == "record" else None
            return None if told is None else Source.of(told.data)

        return found

    def tell(self) -> None:
        """Publish everything once, one round further."""
        self._length = min(self._length + 1, len(self.chains[0]))
        for stage, chain in enumerate(self.chains):
            for number in self._of(stage):
                spare = number // self._stages % SPARE_SHARE == SPARE_SHARE - 1
                self._tell_peer(stage, number, chain[self._length - 1], spare=spare)

    def _tell_peer(self, stage: int, number: int, last: ToldRecord, *, spare: bool) -> None:
        run, swarm = self._place.run, self._swarms[number]
        lifetime_s = self._place.manifest.deadlines.record_lifetime_s
        head = self._identities[number - stage if number >= stage else 0].peer_id
        hosting = stage_record(
            state="spare" if spare else "training",
            round=last.record.round + 1,
            replica="" if spare else head,
            tokens=TOKENS,
            client_mode=number > 0,
            addresses=tuple(f"/ip4/203.0.113.{number % 256}/tcp/{4000 + n}" for n in range(3)),
        )
        claim = claim_record(last.record.round, last.digest, last.record.chain_tokens)
        swarm.publish(stage_key(run, stage), hosting, lifetime_s)
        swarm.publish(claim_key(run, stage), claim, lifetime_s)
        if stage == 0 and not spare:
            self._tell_head(number, last)

    def _tell_head(self, number: int, last: ToldRecord) -> None:
        run, swarm, round_number = self._place.run, self._swarms[number], last.record.round + 1
        lifetime_s = self._place.manifest.deadlines.record_lifetime_s
        members = [self._identities[number + stage].peer_id for stage in range(self._stages)]
        replica = replica_record(
            members=tuple(members),
            round=round_number,
            train_loss=2.0 + 1 / (round_number + 1),
            val_loss=2.1 + 1 / (round_number + 1),
            val_round=round_number - 1,
        )
        swarm.publish(replica_key(run), replica, lifetime_s)


def main() -> None:
    """Tell until standard input ends."""
    invite, folder = Invite.parse(sys.argv[1]), Path(sys.argv[2])
    peers, stages, rounds = (int(text) for text in sys.argv[3:6])
    folder.mkdir(exist_ok=True)
    identity = Identity.load_or_create(folder / "0.key")
    ended = threading.Event()
    with join_run(invite, identity, listen=["/ip4/127.0.0.1/tcp/0"]) as place:
        told = ToldPeers(place, folder, peers, stages, rounds)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(_serve(place, told, stages), loop).result(30)
        told.tell()
        print("told", flush=True)

        def wait_for_end() -> None:
            sys.stdin.read()
            ended.set()

        threading.Thread(target=wait_for_end, daemon=True).start()
        while not ended.wait(PERIOD_S):
            told.tell()


async def _serve(place: Joined, told: ToldPeers, stages: int) -> None:
    p2p = await place.dht.replicate_p2p()
    for stage in range(stages):
        service = ArchiveService(told.find(stage), Counter(), Counter())
        await service.add_p2p_handlers(p2p, namespace=averaging_prefix(place.run, stage))


if __name__ == "__main__":
    main()
