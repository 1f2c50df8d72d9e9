"""How a member lies to its group: each lie alters the product of this process.

altered.py starts `dilocox` with one of `LIES`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from dilocox.compression.group_quantization import GroupCodec
from dilocox.dht.admission import Admission
from dilocox.dht.identity import Identity
from dilocox.dht.parent_death import dying_with_parent
from dilocox.dht.rpc import REFUSED
from dilocox.dht.wire import pack as packed
from dilocox.peer.averaging import averager
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.averaging.matchmaking import PlanKeys
from dilocox.peer.rounds import exchange, shares, signed_means
from dilocox.peer.rounds.group import TICKET_DOMAIN, Mean, Ticket
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.record import bitmap_of
from tests.swarm.altered import LEFT

logger = logging.getLogger(__name__)

GHOSTS, SHORT_BYTES = 20, 8  # as a ticket names peers that it does not know
HEAVY = 100
CROWD = 6  # fresh keys, more than a group of the others has members
AGAIN_S = 0.3

_own_time = averager.own_time
_exchange_parts = exchange.Attempt.exchange_parts
_join = StageAverager.rpc_join_group
_pack = Ticket.pack
_push, _sign = GroupCalls.push_mean, signed_means.MeanSeal.sign
_combine, _encode = shares.combine, shares.encode


# ---- with what it sends and reduces --------------------------------------------------------------
def sends() -> None:
    """Ten times the opposite of what was learnt."""

    def send(codec: GroupCodec, values: Any) -> bytes:
        return _encode(codec, -10.0 * values)

    exchange.encode = send


def weighs() -> None:
    """The opposite of what was learnt, with a hundred times the tokens behind it."""

    def send(codec: GroupCodec, values: Any) -> bytes:
        return _encode(codec, -values)

    def pack(self: Ticket, last: Collection[str]) -> list[object]:
        facts = _pack(self, last)
        facts[1] = HEAVY * self.tokens
        return facts

    exchange.encode = send
    Ticket.pack = pack


def reduces() -> None:
    """Likewise, of what the others sent, the same to all."""

    def reduce(part: int, rows: Any, *how: Any, **rule: Any) -> Mean | None:
        for row in rows:
            row.values.mul_(-10.0)
        return _combine(part, rows, *how, **rule)

    shares.combine = reduce


def splits() -> None:
    """Gives half of the others another mean than the other half, and does not vote."""
    given = dict[int, list[str]]()
    seals = dict[int, signed_means.MeanSeal]()

    def sign(self: signed_means.MeanSeal, mean: Mean) -> Mean:
        seals[mean.part] = self
        return _sign(self, mean)

    async def push(self: GroupCalls, peer: str, mean: Mean) -> None:
        to = given.setdefault(id(mean), [])
        to.append(peer)
        if len(to) % 2 and mean.part in seals:
            payload = mean.payload[:-1] + bytes([mean.payload[-1] ^ 1])
            mean = _sign(seals[mean.part], replace(mean, payload=payload))
        await _push(self, peer, mean)

    signed_means.MeanSeal.sign = sign
    GroupCalls.push_mean = push
    _say_nothing()


def withholds() -> None:
    """Gives its mean to one of the others alone, whoever asks, and does not vote."""
    first = dict[int, str]()

    async def nothing(self: exchange.Attempt, part: int) -> Mean | None:
        return None

    async def push(self: GroupCalls, peer: str, mean: Mean) -> None:
        if first.setdefault(id(mean), peer) == peer:
            await _push(self, peer, mean)

    GroupCalls.push_mean, exchange.Attempt.checked_mean = push, nothing
    _say_nothing()


def _say_nothing() -> None:
    async def tell_nobody(*_: Any, **__: Any) -> None:
        pass

    GroupCalls.send_votes = GroupCalls.send_words = tell_nobody


# ---- by its silence ------------------------------------------------------------------------------
def leaves(*, attempt: int | None = None) -> None:
    """Goes away in the middle of every exchange, and comes to the next; attempt: of these alone."""

    async def leave(self: exchange.Attempt) -> bytes | None:
        if attempt not in (None, self.ballots.ballot.attempt):
            return await _exchange_parts(self)
        return await asyncio.sleep(3600.0)

    exchange.Attempt.exchange_parts = leave


# ---- as it joins and gathers ---------------------------------------------------------------------
def states() -> None:
    """To each group what no ticket is."""

    def nonsense(self: Ticket, last: Collection[str]) -> list[object]:
        return ["what", "no", "ticket", "is"]

    Ticket.pack = nonsense


def counts() -> None:
    """States that all of the last record still train, and a crowd of peers that nobody has seen."""

    def ghosts(self: Ticket, last: Collection[str]) -> list[object]:
        facts = _pack(self, last)
        facts[-5] = bitmap_of(sorted(set(last)), last)
        facts[-4] = [random.randbytes(SHORT_BYTES) for _ in range(GHOSTS)]
        return facts

    Ticket.pack = ghosts


def leads() -> None:
    """Gathers every group as the earliest, and gives each member another ticket of its own."""

    @functools.wraps(_join)  # hivemind reads what it takes and gives off its annotations
    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        loads, dumps = self.serializer.loads, self.serializer.dumps
        async for message in _join(self, request, context):
            for place, peer in enumerate(message.ordered_peer_ids):
                if peer == self.peer_id.to_bytes():
                    nothing, mode, _ = loads(message.gathered[place])
                    order = self.current_order()
                    told = replace(order.ticket(), tokens=random.randrange(1, 1000))
                    sent = told.signed(order.recent_voters, mode, self.local.identity)
                    message.gathered[place] = dumps([nothing, mode, dumps(sent)])
            yield message

    _gather_with(lead)


def forges() -> None:
    """Gathers every group, and tells each member that the others said something else."""

    @functools.wraps(_join)
    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        loads, dumps = self.serializer.loads, self.serializer.dumps
        order = self.current_order()
        async for message in _join(self, request, context):
            for place, peer in enumerate(message.ordered_peer_ids):
                if peer not in (self.peer_id.to_bytes(), context.remote_id.to_bytes()):
                    nothing, mode, _ = loads(message.gathered[place])
                    told = replace(order.ticket(), counted=(), tokens=random.randrange(1, 1000))
                    sent = told.signed(order.recent_voters, mode, self.local.identity)
                    message.gathered[place] = dumps([nothing, mode, dumps(sent)])
            yield message

    _gather_with(lead)


def gathers() -> None:
    """Gathers every group, and never begins."""

    @functools.wraps(_join)
    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        yield _message("ACCEPTED")
        await asyncio.sleep(3600.0)

    _gather_with(lead)


def sends_on() -> None:
    """Gathers every group, and sends whom it has on: to itself, who leads again."""

    @functools.wraps(_join)
    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        yield _message("ACCEPTED")
        yield _message("GROUP_DISBANDED", suggested_leader=self.peer_id.to_bytes())

    _gather_with(lead)


def chooses() -> None:
    """Gathers every group, of as few of the last record's members as may begin and always the same
    ones, and comes to no group of others."""

    search = PlanKeys.get_averagers

    @functools.wraps(_join)
    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        me, last = str(self.peer_id), self.current_order().recent_voters
        others = sorted({*last} - {me})
        if str(context.remote_id) not in others[: len(last) // 2]:
            yield _message("GROUP_DISBANDED")
            return
        async for message in _join(self, request, context):
            yield message

    async def nobody(self: PlanKeys, group_key: str, only_active: bool) -> list[Any]:
        if self.may_lead(str(self.peer_id)):
            return []
        return await search(self, group_key, only_active)

    _gather_with(lead)
    PlanKeys.get_averagers = nobody


def _message(code: str, **facts: Any) -> Any:
    messages: Any = averaging_pb2  # hivemind types it without its codes
    return messages.MessageFromLeader(code=messages.MessageCode.Value(code), **facts)


def _gather_with(lead: Any) -> None:
    def first(scheduled_at: float, now: float, *, may_lead: bool) -> float:
        if may_lead:
            return scheduled_at - 0.5
        return _own_time(scheduled_at, now, may_lead=False)  # it joins others until it may

    averager.own_time = first
    StageAverager.rpc_join_group = lead


def fills() -> None:
    """Comes to every group before the others with a crowd of fresh keys, which then say nothing."""
    aim, crowd = averager.aim, list[tuple[P2P, Identity]]()

    def aiming(matchmaking: Any, key: str, **options: Any) -> Any:
        keys = aim(matchmaking, key, **options)
        matchmaking.crowding = asyncio.create_task(fill(matchmaking, key))
        return keys

    async def fill(matchmaking: Any, key: str) -> None:
        if not crowd:
            asyncio.subprocess.create_subprocess_exec = functools.partial(
                asyncio.subprocess.create_subprocess_exec,
                preexec_fn=dying_with_parent(signal.SIGKILL),
            )
            own = await matchmaking._p2p.list_peers()
            known = [f"{address}/p2p/{each.peer_id}" for each in own for address in each.addrs]
            tempfile.tempdir = folder = tempfile.mkdtemp(prefix=LEFT)  # and of the nodes' sockets
            for number in range(CROWD):
                fresh = Identity.load_or_create(Path(folder) / f"{number}.key")
                node = await P2P.create(
                    identity_path=str(fresh.path),
                    initial_peers=known,
                    nat_port_map=False,
                    dht_mode="client",
                    startup_timeout=60,
                    check_if_identity_free=False,
                )
                crowd.append((node, fresh))
        keys = matchmaking.group_key_manager
        while matchmaking.schema_hash.hex() == key:
            leaders = [each for each, _ in await keys.get_averagers(keys.current_key, True)]
            await asyncio.gather(*(join(matchmaking, *one, to) for one in crowd for to in leaders))
            await asyncio.sleep(AGAIN_S)

    async def join(matchmaking: Any, node: P2P, fresh: Identity, leader: PeerID) -> None:
        loads, dumps = MSGPackSerializer.loads, MSGPackSerializer.dumps
        if not matchmaking.is_looking_for_group:
            return
        nothing, mode, ticket = loads(matchmaking.step_control.data_for_gather)
        data, _ = loads(ticket)
        signature = fresh.sign(packed([TICKET_DOMAIN, mode, data]))
        request = averaging_pb2.JoinRequest(
            schema_hash=matchmaking.schema_hash,
            group_key=matchmaking.group_key_manager.current_key,
            expiration=matchmaking.step_control.scheduled_time + 1.0,  # later than any leader's
            gather=dumps([nothing, mode, dumps([data, signature])]),
        )
        stub: Any = StageAverager.get_stub(node, leader, namespace=matchmaking._prefix)
        with suppress(P2PDaemonError, P2PHandlerError, StopAsyncIteration, *REFUSED):
            async for message in await stub.rpc_join_group(request):
                if message.ordered_peer_ids:
                    logger.warning("one of the crowd is in a group")

    averager.aim = aiming


def intrudes() -> None:
    """Takes part without being admitted, and takes anybody for admitted."""

    def admit(self: Admission, peer: str) -> bool:
        return True

    Admission.admits = admit


LIES: dict[str, Callable[[], None]] = {
    "sends": sends,
    "weighs": weighs,
    "reduces": reduces,
    "splits": splits,
    "withholds": withholds,
    "leaves": leaves,
    "leaves 0": functools.partial(leaves, attempt=0),  # of first attempts alone
    "leaves 1": functools.partial(leaves, attempt=1),
    "states": states,
    "counts": counts,
    "leads": leads,
    "forges": forges,
    "gathers": gathers,
    "sends on": sends_on,
    "chooses": chooses,
    "fills": fills,
    "intrudes": intrudes,
}
