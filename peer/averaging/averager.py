"""A background process that averages a stage's pseudo-gradients with its other peers.

hivemind brings the process, the averaging group (matchmaking) and the step control; the exchange
itself is ours (peer/rounds/exchange.py). The process also serves what other peers ask for
(service.py) and does the outer arithmetic, while the training loop computes inner steps.

The trainer and this process share the vectors of `StageBuffers`. They belong to the trainer, which
writes `message` before it starts an exchange; this process only reads it then. To apply a record,
or to take a state, it leases them for a while (`events.AnchorLease`): then it moves the anchor,
and leaves of a message that the record holds what is still unsent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import (  # noqa: UP035 - hivemind knows this AsyncIterator only
    Any,
    AsyncIterator,
    Concatenate,
    ParamSpec,
    TypeVar,
    cast,
)

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging import control as hivemind_control
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from torch import Tensor

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.compression.stage_codec import StageCodec, StageEncoder
from dilocox.compression.workers import Workers
from dilocox.dht.addresses import Reachability
from dilocox.dht.errors import EnvironmentFault, InvalidInput, reason_of
from dilocox.dht.node_process import (
    BlockingPipe,
    freeze_for_fork,
    leave_the_terminal,
    shared_zeros,
    watch_parent,
)
from dilocox.dht.reachability import PROBE_REFUSALS, Probe, find_reach
from dilocox.dht.reconnect import Redialler, Targets
from dilocox.dht.records import averaging_prefix
from dilocox.dht.rpc import BYTE_KINDS, REFUSALS, CallRefused, Client, Counts
from dilocox.dht.streams import open_streams
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.matchmaking import (
    LATE_GROUP_S,
    LATER_S,
    SLOW_LINE,
    PlanKeys,
    aim,
    as_leader,
    expect,
    give_up,
    own_time,
)
from dilocox.peer.averaging.service import PeerService
from dilocox.peer.chain.chain_client import (
    STATE_LIMIT_S,
    AnchorDiffers,
    AnchorLost,
    AnchorWrong,
    ChainClient,
    ChainEnd,
    Reached,
    StateFile,
    TakenState,
    WantedState,
)
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.store import forget_records, log_limits
from dilocox.peer.memory_and_disk import return_free_memory
from dilocox.peer.rounds.ballots import Ballot, Ballots
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.group import (
    AttemptResult,
    ExchangeOrder,
    GroupRefused,
    LeftOut,
    Plan,
    Ticket,
    attempt_setup,
)
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.outer_step import anchor_sha256, move_anchor
from dilocox.peer.rounds.record import RecordRefused, RoundRecord, digest_of
from dilocox.peer.rounds.vote_count import Verdict
from dilocox.peer.state_folder import LOG_FOLDER
from dilocox.pipeline.stage import chosen_device

logger = logging.getLogger(__name__)


class AveragerStuck(RuntimeError):
    """The averaging process did not answer within all its deadlines."""


@dataclass(frozen=True)
class StageBuffers:
    """Flat fp32 vectors in shared memory."""

    message: Tensor  # else the residual
    anchor: Tensor
    momentum: Tensor
    # counted since this peer started, by the averaging process:
    sent: Counts  # payload bytes by kind
    received: Counts  # payload bytes by kind
    refused: Counts  # what other peers sent, by reason
    probe_refused: Counts  # what they asked of `Probe`, by reason

    @classmethod
    def allocate(cls, numel: int) -> StageBuffers:
        message, anchor, momentum = (shared_zeros(numel, torch.float32) for _ in range(3))
        return cls(
            message=message,
            anchor=anchor,
            momentum=momentum,
            sent=Counts(BYTE_KINDS, shared=True),
            received=Counts(BYTE_KINDS, shared=True),
            refused=Counts(REFUSALS, shared=True),
            probe_refused=Counts(PROBE_REFUSALS, shared=True),
        )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The outer step of one record was made."""

    digest: str
    anchor_sha256: str
    payload_bytes: int  # of the record's means


START_LIMIT_S = 30.0  # until the process has taken an order
STATE_TRY_S = STATE_LIMIT_S - 600.0  # before its caller takes this process for stuck
CLOSE_GRACE_S = 3.0

P = ParamSpec("P")
T = TypeVar("T")


def in_process(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Future[T]]:
    """A method that the trainer's process calls and the averaging process carries out.

    Its future never resolves if that process dies: the caller keeps a deadline of its own.
    """

    @wraps(method)
    def ask(averager: Any, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        future: Any = MPFuture()
        request = {"method": method.__name__, "future": future}
        averager._outer_pipe.send(("_serve", [arguments, named], request))
        return future

    return ask


class StageAverager(PeerService, DecentralizedAverager):
    """Averages one stage; the methods `in_process`, `exchange` and `close` are for the trainer's
    process."""

    def __init__(self, local: LocalPeer, buffers: StageBuffers):
        self.local = local
        self.attempts: dict[bytes, Attempt] = {}
        self.sent, self.received = buffers.sent, buffers.received
        self.refused = buffers.refused
        self._buffers = buffers
        self._main_pid = os.getpid()
        self._order: ExchangeOrder | None = None
        self._encoders: dict[object, StageEncoder] = {}
        self._asked_at = 0.0  # for the group that forms, or formed last
        self._committed: Plan | None = None  # the last one
        self._found_state: StateFile | None = None  # with its record
        self._lacking = False  # whether its group was without somebody
        matchmaking_s = local.manifest.deadlines.matchmaking_s
        super().__init__(
            (torch.zeros(1),),  # for its own reduction, which is not used
            local.dht,
            start=False,
            prefix=averaging_prefix(local.run, local.stage),
            min_matchmaking_time=matchmaking_s,
            request_timeout=0.6 * matchmaking_s,  # must be smaller, or matchmaking may deadlock
            allow_state_sharing=False,
        )

    # ---- in the trainer's process ----------------------------------------------------------------
    def exchange(self, order: ExchangeOrder) -> Future[AttemptResult]:
        """Find the attempt's group and exchange `buffers.message`.

        The future fails where no group may start, and else is as those of `in_process`.
        """
        order = replace(order, codec_s=self._prepare(order).result(timeout=START_LIMIT_S))
        if order.alone:
            return self._exchange_alone()
        # as hivemind's `step` does, which would wait for its process without a deadline
        mode, last = self.mode.value, order.recent_voters
        ticket = self.serializer.dumps(order.ticket().signed(last, mode, self.local.identity))
        now = hivemind_control.get_dht_time()
        step = StepControl(
            scheduled_time=own_time(
                order.scheduled_at,
                now,
                may_lead=self.mode != AveragingMode.CLIENT and order.may_lead(self.local.me),
            ),
            deadline=now + order.matchmaking_limit_s,
            allow_retries=False,
            weight=1.0,
            data_for_gather=self.serializer.dumps([None, mode, ticket]),
        )
        started: Any = MPFuture()
        self._outer_pipe.send(("_step", [], {"step": step, "future_for_init": started}))
        step.attach(*started.result(timeout=START_LIMIT_S))
        step.allow_allreduce()
        return step

    def close(self) -> None:
        if self.is_alive():
            with contextlib.suppress(OSError):
                self._outer_pipe.send(("_shutdown", [CLOSE_GRACE_S], {}))
            with contextlib.suppress(OSError):
                self._inner_pipe.send(("_SHUTDOWN", None))  # hivemind's thread in this process
            self.join(CLOSE_GRACE_S)
        if self.is_alive():
            self.kill()
            self.join(1.0)

    shutdown = close  # what hivemind calls the same thing

    def begin(self) -> None:
        """Start the process and wait until it serves; EnvironmentFault: it does not. Without
        hivemind's SIGINT handling: Ctrl-C belongs to the trainer's process."""
        freeze_for_fork()
        self.start()
        try:
            self._ready.result(START_LIMIT_S)
        except Exception as error:
            reason = reason_of(error)
            raise EnvironmentFault(f"the averaging process did not start: {reason}") from error
        self._open()

    # ---- in the averaging process: life ----------------------------------------------------------
    def run(self) -> None:
        """Serve until the trainer's process ends."""
        leave_the_terminal()
        threading.Thread(
            target=watch_parent, args=(self._main_pid, partial(os._exit, 1)), daemon=True
        ).start()
        self._inner_pipe: Any = BlockingPipe(self._inner_pipe)
        super().run()

    async def _shutdown(self, timeout: float | None) -> None:
        """As hivemind's, but quiet where p2pd died before: then there is nothing to take back."""
        with contextlib.suppress(OSError):
            await super()._shutdown(timeout)

    @cached_property
    def _client(self) -> Client:
        return Client(
            p2p=self._p2p,
            namespace=self.prefix,
            limit=self.limit,
            record_bytes=self._check.record_bytes,
            sent=self.sent,
            received=self.received,
        )

    def _chain(self, holders: Sequence[str], *, older: bool = False) -> ChainClient:
        return ChainClient(self._client, self._check, holders, compute=self.in_pool, older=older)

    @cached_property
    def _check(self) -> RecordCheck:
        local = self.local
        training = local.options.threads or len(os.sched_getaffinity(0))
        workers = Workers(max(1, training // 4))  # training has its cores meanwhile
        return RecordCheck(local.run, local.stage, local.manifest, local.layout, workers)

    async def _serve(
        self, arguments: tuple[Any, ...], named: dict[str, Any], *, method: str, future: Any
    ) -> None:
        try:
            carry_out = getattr(type(self), method).__wrapped__
            future.set_result(await carry_out(self, *arguments, **named))
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            future.set_exception(error)

    @in_process
    async def _open(self) -> None:
        open_streams.refuse, open_streams.knows = self.refused.add, self.is_involved
        self._keeping_credit = asyncio.create_task(self.keep_credit())
        probe = Probe(
            self._p2p,
            now=hivemind_control.get_dht_time,
            refuse=self._buffers.probe_refused.add,
            busy=self.exchanging,
            admits=self.local.swarm.admits,
            bootstraps=self.local.dht.bootstraps,
            local_network=self.local.dht.local_network,
        )
        await probe.add_p2p_handlers(self._p2p)
        if self.client_mode:  # hivemind's answer nobody; means and votes are sent to all members
            await self.add_p2p_handlers(self._p2p, namespace=self.prefix)
        # now and beside the event loop: CUDA takes seconds to start, in which a group would wait
        await self.in_pool(self._choose_device, self._check.codec)

    def _choose_device(self, codec: StageCodec) -> None:
        try:
            codec.choose_device(chosen_device(self.local.options.device))
        except (RuntimeError, InvalidInput) as error:  # torch's own, also for a lack of memory
            logger.warning("the codec's matrix products run on the CPU: %s", error)

    # ---- in the averaging process: connections ---------------------------------------------------
    @in_process
    async def redial(self, targets: Targets) -> None:
        """Keep connections to these peers open, as a peer must that only dials out."""
        self._redialler.aim(targets)

    @in_process
    async def check_reach(self, again: bool) -> Reachability:
        """Ask the bootstraps whether others reach this peer now, as they did before (`again`) or as
        at its start.
        """
        found = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        own = [address.rpartition("/p2p/")[0] for address in found]
        asked = [PeerID.from_base58(peer) for peer in self.local.dht.bootstraps]
        return await find_reach(self._p2p, asked, own, again=again, busy=self.exchanging)

    @cached_property
    def _redialler(self) -> Redialler:
        return Redialler(self._p2p, local_network=self.local.dht.local_network)

    # ---- in the averaging process: the exchange --------------------------------------------------
    @in_process
    async def _prepare(self, order: ExchangeOrder) -> float:
        self._order = replace(order, codec_s=self._encoder(order.plan, order.last).codec_s)
        return self._order.codec_s

    @in_process
    async def encode(self, plan: Plan, last: RoundRecord | None) -> float:
        """Make what a send moves first of all, before its group meets; the seconds it took."""
        encoder = self._encoder(plan, last)
        await self.in_pool(encoder.vector, 0, ())
        return encoder.seconds or 0.0

    def _encoder(self, plan: Plan, last: RoundRecord | None) -> StageEncoder:
        """The newest send's, whichever attempt it is for."""
        key = plan.round, plan.ranks, plan.previous
        if key not in self._encoders:
            codec, message = self._check.codec, self._buffers.message
            self._free_encoders()  # of sends that were void
            encoder = codec.encoder(message, plan.ranks, lambda: self._basis(plan, last))
            self._encoders = {key: encoder}
        return self._encoders[key]

    def _free_encoders(self) -> None:
        for encoder in self._encoders.values():
            encoder.free()
        self._encoders = {}

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        """Give the attempt's plan its own group key before hivemind looks for a group."""
        self._asked_at = time.monotonic()
        order = self.current_order()
        key, expected = order.plan.key, order.whole_with
        told_s = order.told_bytes(len(step.data_for_gather)) / SLOW_LINE

        def may_lead(peer: str) -> bool:
            return self._admits(peer) and order.may_lead(peer)

        keys = aim(
            self._matchmaking,
            key,
            scheduled_at=order.scheduled_at,
            expected=expected,
            may_lead=may_lead,
            leaders=len(order.leaders) or max(2, len(order.counted)),
            told_s=min(told_s, LATE_GROUP_S, self.local.manifest.deadlines.exchange_s),
        )
        step.scheduled_time += LATER_S * keys.is_later(self.local.me)
        with contextlib.suppress(Exception):  # `step` has it already, and the caller gets it there
            await super()._step(step=step, future_for_init=future_for_init)
        keys.ended(committed=self._committed == order.plan, lacking=self._lacking)

    @in_process
    async def give_up_group(self) -> None:
        """Look no further for the group of the exchange under way, unless it stands; where another
        peer has let this one in, as soon as that lets it go."""
        give_up(self._matchmaking)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """hivemind's, for peers that are admitted to the run and not blamed for the attempt before.
        The group is whole when it is for all known peers that join it; where another peer joins, it
        waits for its time.
        """
        if not self._admits(str(context.remote_id)):
            self.refused.add("admission")
            code = averaging_pb2.MessageCode.PROTOCOL_VIOLATION
            yield averaging_pb2.MessageFromLeader(code=code)
            return
        if request.schema_hash == self._matchmaking.schema_hash:
            try:
                peer = str(context.remote_id)
                ticket = self._asked_with(request.gather, peer)
                # a peer that is not known fills no group: it waits for its time
                known = self.current_order().knows(peer)
                expect(self._matchmaking, ticket.expected if known else None)
            except GroupRefused as error:  # or all members would have it, each from this peer
                self.refused.add("ticket")
                logger.debug("%s may not join: %s", context.remote_id, error)
                code = averaging_pb2.MessageCode.PROTOCOL_VIOLATION
                yield averaging_pb2.MessageFromLeader(code=code)
                return
        told = super().rpc_join_group(request, context)
        async for message in as_leader(self._matchmaking, context.remote_id, told):
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """hivemind's reduction is not used; it would wait for a group that the caller names."""
        yield averaging_pb2.AveragingData(code=averaging_pb2.MessageCode.BAD_GROUP_ID)

    def _admits(self, peer: str) -> bool:
        blamed = () if self._order is None else self._order.blamed
        return peer not in blamed and self.local.swarm.admits(peer)

    def _asked_with(self, gathered: bytes, peer: str) -> Ticket:
        """The ticket of one that asks to join; GroupRefused if it is none, or too long."""
        followers: Any = self._matchmaking.current_followers
        asked = {str(each): request.gather for each, request in followers.items()}
        self.current_order().check_length(peer, gathered, asked)
        return self._ticket(gathered, peer)

    def _ticket(self, gathered: bytes, peer: str) -> Ticket:
        try:
            _, mode, ticket = cast("list[Any]", self.serializer.loads(gathered))
            stated = self.serializer.loads(ticket)
        except Exception as error:
            raise GroupRefused(f"a ticket cannot be read: {error!r}") from error
        last = self.current_order().recent_voters
        client_mode = mode == AveragingMode.CLIENT.value
        return Ticket.of_peer(peer, stated, last, mode=mode, client_mode=client_mode)

    @in_process
    async def _exchange_alone(self) -> AttemptResult:
        order = self.current_order()
        return await self._attempt(order, os.urandom(20), {str(self.peer_id): order.ticket()})

    async def _aggregate_with_group(
        self, group_info: GroupInfo, *_: Any, **__: Any
    ) -> AttemptResult:
        """hivemind's hook: the group stands, exchange."""
        order, matchmaking_s = self.current_order(), time.monotonic() - self._asked_at
        tickets = dict[str, Ticket]()
        for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
            try:
                tickets[str(peer)] = self._ticket(gathered, str(peer))
            except GroupRefused as error:  # all leave its sender out, unless the leader altered it
                self.refused.add("ticket")
                logger.debug("round %d: %s: %s", order.plan.round, peer, error)
        keys: PlanKeys = self._matchmaking.group_key_manager
        keys.stands(tickets)
        logger.debug("round %d: a group of %d stands", order.plan.round, len(tickets))
        self._running_groups.pop(group_info.group_id, None)  # or hivemind misses its own all-reduce
        try:
            result = await self._attempt(order, group_info.group_id, tickets)
        except LeftOut:
            keys.excuse()
            raise
        if result.verdict is Verdict.COMMITTED:
            self._committed = order.plan
        return replace(result, matchmaking_s=matchmaking_s)

    async def _attempt(
        self, order: ExchangeOrder, group: bytes, tickets: dict[str, Ticket]
    ) -> AttemptResult:
        local, plan, codec = self.local, order.plan, self._check.codec
        for peer in tickets:  # a leader may have let in any peer
            if not local.swarm.admits(peer):
                raise GroupRefused(f"{peer} is not admitted to the run")
        setup = attempt_setup(order, local.manifest, codec, local.me, tickets, group=group)
        self._lacking = bool(setup.lacking)
        ballot = Ballot(
            run=plan.run,
            stage=plan.stage,
            round=plan.round,
            attempt=plan.attempt,
            group=group,
            members=tuple(member.peer for member in setup.members),
            voters=setup.voters,
        )
        attempt = Attempt(
            setup,
            encoder=self._encoder(plan, order.last),
            transport=GroupCalls(self._client, group, ballot.members),
            ballots=Ballots(identity=local.identity, ballot=ballot, save_vote=self.log.save_vote),
            pool=self.pool,
        )
        self.begin_attempt(group, attempt)
        with self.limit.exchange():
            result = await attempt.run()
        if result.verdict is Verdict.COMMITTED:
            self.limit.measured(result.seconds, limit_s=setup.deadlines.exchange_s)
        result = await self._log_if_committed(result)
        if result.logged:
            attempt.record = None  # the log gives it from now on
        return result

    def _basis(self, plan: Plan, header: RoundRecord | None) -> Tensor | None:
        """The agreed basis of an exchange: the factors of the last record's means."""
        codec = self._check.codec
        last = None if header is None else self.log.read(header.round)
        if (last is None) != (header is None):
            raise GroupRefused("the record before this round is not in the log any more")
        seed = f"{plan.run}/{plan.stage}/{-1 if last is None else last.round}"
        if last is None:
            return codec.first_basis(seed)
        return last.decoded(codec).next_basis(codec.low_rank(plan.ranks), seed)

    @in_process
    async def settle(self, round_number: int, attempt: int) -> AttemptResult | None:
        """Ask the members of an undecided attempt; None for one that this process has not seen."""
        for known in self.attempts.values():
            ballot = known.ballots.ballot
            if (ballot.round, ballot.attempt) == (round_number, attempt):
                return await self._log_if_committed(await known.settle())
        return None

    async def _log_if_committed(self, result: AttemptResult) -> AttemptResult:
        if result.record is None or result.certificate is None:
            return result
        await self.in_pool(self.log.append, result.record, result.certificate)
        return replace(result, record=None, certificate=None, logged=True)

    # ---- in the averaging process: records and states --------------------------------------------
    @in_process
    async def apply(self, round_number: int, *, with_own: bool) -> Applied:
        """Make a logged record's outer step; `with_own`: and leave of the message what the record
        did not take."""
        return await self.in_pool(self._apply, round_number, with_own)

    def _apply(self, round_number: int, with_own: bool) -> Applied:
        buffers, codec = self._buffers, self._check.codec
        try:
            record, data = self.log.read(round_number), self.log.read_bytes(round_number)
        except RecordRefused as error:
            raise AnchorDiffers(f"record {round_number} is damaged: {error}") from error
        if record is None or data is None:
            raise AnchorDiffers(f"record {round_number} is not in the log any more")
        if record.anchor_before != anchor_sha256(buffers.anchor):
            raise AnchorWrong(f"record {round_number} applies to another anchor")
        try:
            move_anchor(self.local.manifest, record, codec, buffers.anchor, buffers.momentum)
        except PayloadRefused as error:
            raise AnchorLost(f"record {round_number} is damaged: {error}") from error
        if with_own:  # no attempt of this round starts any more
            self._free_encoders()
            record.take_out(self.local.me, buffers.message, codec)
        # of what size its records are, it looks itself
        self.log.prune(*log_limits(self.local.manifest.rounds, 0), applied=round_number)
        forget_records(self.local.folder / LOG_FOLDER)
        return_free_memory()
        return Applied(
            digest=digest_of(data),
            anchor_sha256=anchor_sha256(buffers.anchor),
            payload_bytes=sum(len(mean) for mean in record.means),
        )

    @in_process
    async def catch_up(
        self, peers: Sequence[str], digest: str, *, limit_bytes: int | None, back_to: int | None
    ) -> Reached:
        """Append the records up to `digest` from the first peer's log; others are asked, too."""
        # where the records are worth more bytes, a bootstrap's older ones are, too
        chain = self._chain(peers[:1], older=limit_bytes is not None)
        with self.counting_refusals():
            return await chain.catch_up(
                self.log,
                digest,
                limit_bytes=limit_bytes,
                me=self.local.me,
                back_to=back_to,
                second=peers[1:],
            )

    @in_process
    async def fetch_state(self, peers: Sequence[str], wanted: WantedState) -> StateFile:
        """Download the first peer's anchor and momentum to the disk, what is missing in the end
        from others."""
        state = self._chain(peers).state(peers[0], self.local.folder / LOG_FOLDER, self.log, wanted)
        with self.counting_refusals():
            # what has come by then stays, and the next try goes on with it
            found = await asyncio.wait_for(state, STATE_TRY_S)
        self._found_state = found
        # its record, as large as an update, stays here
        return replace(found, offer=replace(found.offer, record_bytes=b""))

    @in_process
    async def contributors(self, end: ChainEnd) -> frozenset[str]:
        """Of the newest record of the chain to be on: see ChainClient."""
        return await self._chain([]).contributors(end.digest, end.teller)

    @in_process
    async def take_state(self, found: StateFile) -> TakenState:
        """Put a downloaded state into the buffers; the log goes on from it."""
        return await self.in_pool(self._take_state, found)

    def _take_state(self, found: StateFile) -> TakenState:
        whole, self._found_state = self._found_state, None
        if whole is None or whole.file != found.file:
            raise CallRefused(f"{found.file} is not the state that was downloaded last")
        buffers = self._buffers
        state = whole.load(buffers.anchor, buffers.momentum, self.log, self._check)
        return_free_memory()
        return state

    def current_order(self) -> ExchangeOrder:
        """What the exchange under way was prepared with; GroupRefused if none was."""
        if self._order is None:
            raise GroupRefused("no exchange was prepared")
        return self._order
