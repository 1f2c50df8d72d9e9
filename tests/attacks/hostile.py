"""A hostile client: it has the invite, keys of its own, and speaks the wire as peers do.

    python -m tests.attacks.hostile INVITE FOLDER ATTACK

It does one attack of `ATTACKS` again and again until it is ended, and prints a line of JSON for
each time: what honest peers must not take up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.runtime_pb2 import ExpertResponse

from dilocox.dht import protocol
from dilocox.dht.clock import RunClock
from dilocox.dht.errors import DilocoxError
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined, join_run
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.protocol import MAX_KEYS, NEAREST, RunProtocol, node_id_of
from dilocox.dht.records import (
    MAX_LIFETIME_S,
    BellRecord,
    ClaimRecord,
    ReplicaRecord,
    StageRecord,
    averaging_prefix,
    bell_key,
    claim_key,
    replica_key,
    stage_key,
)
from dilocox.dht.rpc import REFUSED, handler_name, request_of
from dilocox.dht.swarm import Swarm
from dilocox.dht.upload_limit import CHUNK_BYTES
from dilocox.dht.validator import RunRecordValidator
from dilocox.peer.chain.archive_keeper import ArchiveService
from dilocox.peer.chain.chain_client import Fetched, Limits
from dilocox.peer.chain.record_check import RecordCheck, flaws_after
from dilocox.peer.chain.snapshot_files import write_state
from dilocox.peer.chain.uploads import LEAST_BYTES_PER_S, OF_ONE_PEER, Source, open_state
from dilocox.peer.chain.visitor_download import StageAnchor, claimed_chain, download_anchors
from dilocox.peer.rounds.ballots import Ballot, certificate
from dilocox.peer.rounds.group import tokens_cap
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import Contribution, RoundRecord, digest_of, stage_codec
from dilocox.peer.rounds.round_end import MAX_AHEAD
from dilocox.peer.rounds.vote_count import Vote
from dilocox.pipeline.frames import NO_TENSORS, Frame, encode_prefix_and_header
from dilocox.pipeline.link import Stream, Traffic
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.reservation import Assignment
from dilocox.pipeline.stage import stage_layout
from tests.peer.fabricated import replica_record, stage_record
from tests.peer.kept_chains import reduced_alone
from tests.peer.told_records import remembering

KEYS, FRESH_KEYS = 12, 100
LATE_S = 1.5  # other nodes wait for an answer for half a second longer
PAUSE_S = 1.0
FAR_ROUNDS = (9_999_999_999, 2**53)
FIND = f"{RunProtocol.__name__}.rpc_find"
SAME_KEYS = 1504
NODES, STREAMS_OF_NODE = 8, 40  # one peer answers fewer of one


class Hostile:
    """The stranger, its keys, and what it serves."""

    def __init__(self, place: Joined, folder: Path):
        self.place = place
        self.keys = [
            place.identity,
            *(Identity.load_or_create(folder / f"{n}.key") for n in range(1, KEYS)),
        ]
        self.swarms = [Swarm(place.dht, place.run, each, place.clock) for each in self.keys]
        self._folder = folder
        self._served: dict[str, tuple[bytes, bytes]] = {}  # records and their certificates
        self._states = folder / "states"
        self._given = Counter[str]()  # bytes, by kind
        self._before: tuple[StageAnchor, RoundRecord] | None = None
        self._crowd = 0
        self._nodes: list[RunDHT] = []
        self._questions = multiprocessing.Value("i")  # of all of them
        self._places: list[asyncio.Task[None]] = []
        self._chunks = self._streams = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30)

    # ---- the attacks: what each returns is printed -----------------------------------------------
    def records(self) -> dict[str, Any]:
        """A1: a record after the newest one, of random values, certified by keys of its own; its
        tokens (A4) are as many as may be."""
        return self._claim_after(*self._newest())

    def forks(self) -> dict[str, Any]:
        """A1: the same after the record that was the newest one the last time, so that who takes it
        has to leave what came since.
        """
        newest = self._newest()
        before, self._before = self._before or newest, newest
        return self._claim_after(*before)

    def weights(self) -> dict[str, Any]:
        """A1: claims the newest record of the others and gives it as it is, with weights of its own
        for what it makes of those before.
        """
        newest = self._newest_claim()
        if newest.digest not in self._served:
            fetched = asyncio.run(self._fetched(newest.digest))
            anchor = torch.randn(stage_layout(self.place.manifest, 0).numel)
            written = self._states / "written"
            written.mkdir(parents=True)
            write_state(written, newest.round, newest.digest, anchor, torch.zeros_like(anchor))
            written.rename(self._states / f"{newest.round:08d}")
            self._served[newest.digest] = fetched.data, fetched.certificate
        self._tell(claim_key(self.place.run, 0), newest)
        return {"round": newest.round, "given": self._given["state"]}

    def claims(self) -> dict[str, Any]:
        """A8: a claim of what nobody has, another one each time. A4: of the end of the run, by half
        of the keys before its first record.
        """
        digest = digest_of(str(time.time()).encode())
        claim = ClaimRecord(round=1000, digest=digest, chain_tokens=2**52, record_bytes=1000)
        self._tell(claim_key(self.place.run, 0), claim)
        lifetime_s = self.place.manifest.deadlines.record_lifetime_s
        root = replace(claim, round=-1, digest=self.place.manifest.root, record_bytes=0)
        for swarm in self.swarms[::2]:
            swarm.publish(claim_key(self.place.run, 0), root, lifetime_s)
        return {"digest": digest}

    def echoes(self) -> dict[str, Any]:
        """A4, A8: what the others claim, with numbers of its own; it gives nothing of it."""
        newest = self._newest_claim()
        claim = replace(newest, round=2**53, chain_tokens=2**53, record_bytes=2**53)
        self._tell(claim_key(self.place.run, 0), claim)
        return {"digest": claim.digest}

    def rounds(self) -> dict[str, Any]:
        """A2: replicas and bells of rounds that nobody will ever see."""
        for key, swarm, number in zip(self.keys, self.swarms, FAR_ROUNDS, strict=False):
            self._lead(key, swarm, number)
            with suppress(ValueError):  # no key of so high a round
                self._ring(swarm, number, None)
        return {"rounds": FAR_ROUNDS}

    def heads(self) -> dict[str, Any]:
        """A8: more replicas than there are, in the round that the run is in, and they never ring in
        it; one rings far on."""
        own = {key.peer_id for key in self.keys}
        told = self.place.swarm.read(replica_key(self.place.run), ReplicaRecord) or {}
        number = max((each.round for head, each in told.items() if head not in own), default=0)
        for key, swarm in zip(self.keys, self.swarms, strict=True):
            self._lead(key, swarm, number)
        self._ring(self.swarms[0], number + MAX_AHEAD // 2, self.place.clock.time())
        return {"round": number}

    def hosts(self) -> dict[str, Any]:
        """A8: peers of stage 0 that train, if one believes them, and come to no group."""
        lifetime_s = self.place.manifest.deadlines.record_lifetime_s
        for key, swarm in zip(self.keys, self.swarms, strict=True):
            hosting = stage_record(round=0, replica=key.peer_id)
            swarm.publish(stage_key(self.place.run, 0), hosting, lifetime_s)
        return {"hosts": len(self.keys)}

    def crowds(self) -> dict[str, Any]:
        """A9: fresh keys that say that they train in stage 0 and lead a replica, a hundred more a
        time, for as long as a record may live.
        """
        run = self.place.run
        for number in range(self._crowd, self._crowd + FRESH_KEYS):
            key = Identity.load_or_create(self._folder / f"fresh-{number}.key")
            swarm = Swarm(self.place.dht, run, key, self.place.clock)
            told = {
                stage_key(run, 0): stage_record(round=0, replica=key.peer_id),
                replica_key(run): replica_record(members=(key.peer_id,), round=0),
            }
            swarm.publish_many(told, MAX_LIFETIME_S["stage"])
        self._crowd += FRESH_KEYS
        return {"in_view": len(self.place.swarm.read(stage_key(run, 0), StageRecord) or {})}

    def keepers(self) -> dict[str, Any]:
        """A9: nodes of keys that were drawn until they are all that is nearest to the key of stage
        0 take what they are given, and tell nobody of it; and that late.
        """
        key = stage_key(self.place.run, 0)
        if not self._nodes:
            hosts = self.place.swarm.read(key, StageRecord) or {}
            honest = min(map(partial(_distance, key), {*hosts, *self.place.dht.bootstraps}))
            self._keep_to_themselves()
            for number in itertools.count():
                drawn = Identity.load_or_create(self._folder / f"drawn-{number}.key")
                if _distance(key, drawn.peer_id) < honest:
                    self._nodes.append(self._node(drawn))
                    if len(self._nodes) == NEAREST:
                        break
        for node in self._nodes:  # whom they ask know them from then on
            node.find_news({key: ()}, thorough=True, timeout_s=2.0)
        return {"nodes": len(self._nodes), "asked": self._questions.value}

    def reserves(self) -> dict[str, Any]:
        """A9: every key leads a replica, says that all peers of stage 1 are in it, and does nothing
        with those that let it."""
        run = self.place.run
        spares = self.place.swarm.read(stage_key(run, 1), StageRecord) or {}
        held = 0
        for spare in spares:
            for key in self.keys:
                asked = asyncio.run_coroutine_threadsafe(self._held(key, spare), self._loop)
                with suppress(P2PDaemonError, EOFError, *REFUSED):  # it is gone, say
                    held += asked.result(30)
        return {"spares": len(spares), "held": held}

    def searches(self) -> dict[str, Any]:
        """A3: asks every node 1,504 times for one key in one call, and for as many as it may."""
        asked = asyncio.run_coroutine_threadsafe(self._searched(), self._loop)
        return asked.result(30)

    def places(self) -> dict[str, Any]:
        """A9: eight nodes of its own take the state from everybody, each as slowly as it may, and
        hold as many streams open as they can.
        """
        if not self._places:
            begun = asyncio.run_coroutine_threadsafe(self._took_places(), self._loop)
            begun.result(120)
        return {"streams": self._streams, "chunks": self._chunks}

    # ---- pieces ----------------------------------------------------------------------------------
    def _keep_to_themselves(self) -> None:
        """Have nodes that are made from now on tell nothing, and that late."""
        questions, bounded = self._questions, RunProtocol.bounded

        def late(self: RunProtocol, call: Any, limit: Any) -> Any:
            answer = bounded(self, call, limit)

            async def answer_late(request: Any, context: Any) -> Any:
                questions.value += 1
                await asyncio.sleep(LATE_S)
                return await answer(request, context)

            return answer_late

        RunProtocol.bounded = late
        protocol.entries_of = lambda stored: []

    def _node(self, identity: Identity) -> RunDHT:
        return open_dht(
            identity=identity,
            bootstraps=self.place.dht.visible_addresses(),
            listen=["/ip4/127.0.0.1/tcp/0"],
            announce=(),
            client_mode=False,
            validator=RunRecordValidator(self.place.run, identity),
            clock=RunClock(),
        )

    def _newest_claim(self) -> ClaimRecord:
        """The newest one of the others."""
        own = {key.peer_id for key in self.keys}
        told = self.place.swarm.read(claim_key(self.place.run, 0), ClaimRecord) or {}
        return max((each for peer, each in told.items() if peer not in own), key=_round)

    def _newest(self) -> tuple[StageAnchor, RoundRecord]:
        """The anchor of the newest record, and the record."""
        taken: list[StageAnchor] = []
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            download_anchors(self.place, taken.append, folder=Path(folder), timeout_s=30)
        return taken[-1], asyncio.run(self._fetched(taken[-1].place.digest)).record

    def _claim_after(self, anchor: StageAnchor, last: RoundRecord) -> dict[str, Any]:
        """Make a record after this one, serve it, and have all keys claim it."""
        data, proof = self._forged(anchor, last)
        digest = digest_of(data)
        self._served[digest] = data, proof
        claim = ClaimRecord(
            round=last.round + 1,
            digest=digest,
            chain_tokens=last.chain_tokens + KEYS * tokens_cap(self.place.manifest),
            record_bytes=len(data),
        )
        self._tell(claim_key(self.place.run, 0), claim)
        return {"round": claim.round, "digest": digest}

    async def _searched(self) -> dict[str, Any]:
        p2p = await self.place.dht.replicate_p2p()
        answered = Counter[str]()
        alike = [bytes(range(20))] * SAME_KEYS
        others = [number.to_bytes(20, "big") for number in range(MAX_KEYS)]
        for peer in self._everybody():
            for keys, times in ((alike, 2), (others, 50)):
                request = dht_pb2.FindRequest(keys=keys)
                for _ in range(times):
                    said = "answered"
                    try:
                        await p2p.call_protobuf_handler(
                            PeerID.from_base58(peer), FIND, request, dht_pb2.FindResponse
                        )
                    except P2PHandlerError:
                        said = "refused"
                    except (P2PDaemonError, *REFUSED):
                        said = "gone"
                    answered[said] += 1
        return dict(answered)

    async def _took_places(self) -> None:
        own = await self.place.dht.replicate_p2p()
        known = [f"{a}/p2p/{each.peer_id}" for each in await own.list_peers() for a in each.addrs]
        name = handler_name(averaging_prefix(self.place.run, 0), "rpc_get")
        for _ in range(NODES):
            p2p = await P2P.create(
                initial_peers=known, nat_port_map=False, dht_mode="client", startup_timeout=60
            )
            for peer in self._everybody():
                for number in range(STREAMS_OF_NODE):
                    holding = self._drips if number < OF_ONE_PEER else self._holds
                    self._places.append(asyncio.create_task(holding(p2p, peer, name)))

    async def _drips(self, p2p: P2P, peer: str, name: str) -> None:
        """Take the newest state a chunk at a time, again and again."""
        while True:
            with suppress(P2PDaemonError, *REFUSED):
                frames: Any = await p2p.iterate_protobuf_handler(
                    PeerID.from_base58(peer), name, request_of({"what": "state"}), ExpertResponse
                )
                async for _ in frames:
                    self._chunks += 1
                    await asyncio.sleep(CHUNK_BYTES / LEAST_BYTES_PER_S)
            await asyncio.sleep(PAUSE_S)

    async def _holds(self, p2p: P2P, peer: str, name: str) -> None:
        """Open a stream, and say nothing in it."""
        while True:
            with suppress(P2PDaemonError, *REFUSED):
                opened = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), name)
                self._streams += 1
                await opened[1].read()  # until the other side ends it
                opened[2].close()
            await asyncio.sleep(PAUSE_S)

    def _everybody(self) -> list[str]:
        """The peers of stage 0 and the bootstraps."""
        told = self.place.swarm.read(stage_key(self.place.run, 0), StageRecord) or {}
        return sorted({*told, *self.place.dht.bootstraps} - {self.place.identity.peer_id})

    def _lead(self, key: Identity, swarm: Swarm, number: int) -> None:
        run, lifetime_s = self.place.run, self.place.manifest.deadlines.record_lifetime_s
        me = key.peer_id
        leading = replica_record(members=(me,), round=number, val_round=number)
        swarm.publish(replica_key(run), leading, lifetime_s)
        hosting = stage_record(state="training", round=number, replica=me)
        swarm.publish(stage_key(run, 0), hosting, lifetime_s)

    def _ring(self, swarm: Swarm, number: int, scheduled_at: float | None) -> None:
        bell = BellRecord(
            round=number,
            finished_at=scheduled_at or 0.0,
            round_s=1.0,
            send_after=scheduled_at,
            scheduled_at=scheduled_at,
        )
        lifetime_s = self.place.manifest.deadlines.record_lifetime_s
        swarm.publish(bell_key(self.place.run, number), bell, lifetime_s)

    async def _held(self, key: Identity, spare: str) -> bool:
        """Whether this peer is a member of this key's replica now."""
        me = key.peer_id
        relayed = RelayedRequests(key, self.place.run, self.place.clock.time)
        assignment = Assignment(
            replica=me,
            epoch=int(time.time()),
            head=me,
            members=(me, spare),
            clients=(False, False),
            codecs=("int8",),
            step=0,
            done=None,
        )
        asked = ("reserve", {"stage": 1}), ("assign", assignment.to_facts())
        for kind, facts in asked:
            sealed, number = relayed.ask(spare, Frame(kind=kind, replica=me, facts=facts))
            reply = await self._asked(spare, Frame(kind="sealed", sealed=sealed))
            if reply.kind != "reply":
                return False
            if relayed.read_reply(reply.sealed, spare, number).kind != "yes":
                return False
        return True

    async def _asked(self, peer: str, frame: Frame) -> Frame:
        p2p = await self.place.dht.replicate_p2p()
        name = f"dilocox.{self.place.run}.replica"
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), name)
        stream = Stream(reader, writer, Traffic())
        try:
            await stream.write(encode_prefix_and_header(frame))
            return await stream.read(NO_TENSORS)
        finally:
            stream.abort()

    def _tell(self, key: str, claim: ClaimRecord) -> None:
        for swarm in self.swarms:
            swarm.publish(key, claim, self.place.manifest.deadlines.record_lifetime_s)

    async def _fetched(self, digest: str) -> Fetched:
        claimed = await claimed_chain(self.place, 0, limits=Limits())
        found = await claimed.chain.record(digest)
        if found is None:
            raise ConnectionError("the newest record is gone")
        return found

    def _forged(self, newest: StageAnchor, last: RoundRecord) -> tuple[bytes, bytes]:
        manifest = self.place.manifest
        codec = stage_codec(manifest, newest.layout)
        plan = RoundPlan(manifest, codec)
        ranks = plan.ranks_after(last)
        names = sorted(key.peer_id for key in self.keys)
        message = torch.randn(newest.layout.numel)
        parts, means = reduced_alone(codec, ranks, message, names, seed="x")
        most = tokens_cap(manifest)
        record = RoundRecord(
            run=self.place.run,
            stage=0,
            round=last.round + 1,
            previous=newest.place.digest,
            anchor_before=anchor_sha256(newest.anchor),
            rules=manifest.rules,
            layout=newest.layout.digest,
            ranks=ranks,
            members=tuple(
                Contribution(peer=name, tokens=most, exchange_s=1.0, step_s=1.0) for name in names
            ),
            chain_tokens=last.chain_tokens + KEYS * most,
            parts=parts,
            window=last.window,
            next_ranks=(),
            next_inner_steps=plan.inner_steps_after(last),
            means=means,
        )
        record = plan.finished(remembering(record, last))
        data = record.to_bytes()
        proof = self._certified(record, digest_of(data), names)
        # but for who voted it is sound, or its refusal would show nothing
        RecordCheck(self.place.run, 0, manifest, newest.layout).record(data, proof)
        if flaws := flaws_after(record, last, codec.first_ranks):
            raise AssertionError(f"what was forged {', '.join(flaws)}")
        return data, proof

    def _certified(self, record: RoundRecord, digest: str, names: list[str]) -> bytes:
        ballot = Ballot(
            run=record.run,
            stage=record.stage,
            round=record.round,
            attempt=0,
            group=b"g",
            members=tuple(names),
            voters=frozenset(names),
        )
        votes = [
            ballot.sign(Vote(voter=key.peer_id, digest=digest, missed=()), key) for key in self.keys
        ]
        return certificate(ballot, votes, digest)

    async def _serve(self) -> None:
        async def find(want: dict[str, Any]) -> Source | None:
            if want["what"] == "state":
                return open_state(self._states, want)
            data, proof = self._served[str(want["digest"])]  # a KeyError: it is not here
            if want["what"] == "certificate":
                return Source.of(proof)
            header_bytes = 8 + int.from_bytes(data[:8], "little")
            return Source.of(data[:header_bytes] if want.get("header") else data)

        service = ArchiveService(find, self._given, Counter())
        prefix = averaging_prefix(self.place.run, 0)
        await service.add_p2p_handlers(await self.place.dht.replicate_p2p(), namespace=prefix)


def _round(claim: ClaimRecord) -> int:
    return claim.round


def _distance(key: str, peer: str) -> int:
    return DHTID.generate(key).xor_distance(node_id_of(PeerID.from_base58(peer).to_bytes()))


ATTACKS: dict[str, Callable[[Hostile], dict[str, Any]]] = {
    "records": Hostile.records,
    "forks": Hostile.forks,
    "weights": Hostile.weights,
    "claims": Hostile.claims,
    "echoes": Hostile.echoes,
    "rounds": Hostile.rounds,
    "heads": Hostile.heads,
    "hosts": Hostile.hosts,
    "crowds": Hostile.crowds,
    "keepers": Hostile.keepers,
    "reserves": Hostile.reserves,
    "searches": Hostile.searches,
    "places": Hostile.places,
}


def main() -> None:
    """Attack until somebody ends it."""
    invite, folder, attack = Invite.parse(sys.argv[1]), Path(sys.argv[2]), ATTACKS[sys.argv[3]]
    folder.mkdir(exist_ok=True)
    identity = Identity.load_or_create(folder / "0.key")
    with join_run(invite, identity, listen=["/ip4/127.0.0.1/tcp/0"]) as place:
        # it believes nobody: the newest of what is claimed is what it builds on
        hostile = Hostile(replace(place, witness=""), folder)
        while True:
            try:
                print(json.dumps(attack(hostile)), flush=True)
            except (*REFUSED, DilocoxError) as error:  # the swarm goes on meanwhile: the next time
                print(json.dumps({"failed": repr(error)}), flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
