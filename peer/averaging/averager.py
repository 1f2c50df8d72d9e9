"""A background process that averages a stage's pseudo-gradients with its other peers.

hivemind brings the process, the averaging group (matchmaking) and the step control; the exchange
itself is ours (peer/rounds/exchange.py). The process also serves what other peers ask for
(service.py) and does the outer arithmetic, so that the training loop never waits for any of it.

The trainer and this process share the vectors of `StageBuffers`. The trainer writes `message`
before it starts an exchange; this process writes only `own` and the vectors that are not current,
and the trainer switches to them between two inner steps.

What both processes share stands first: buffers, configuration, results. Then how the members of an
attempt find each other: hivemind's matchmaking, made cheap and prompt.

hivemind takes one group key and one schema for all of an averager's life, lets a group wait until
its time even if everybody is in it, and its leader asks the DHT for others without a pause: seen
with four members on loopback, 6.7 MB in the three seconds before an exchange of 0.3 MB. Here

- each plan has its own key, so that peers with another one are never found;
- a group closes as soon as it has as many members as any of them expects. A member that expects
  too many lets it wait until its time, as does one that does not know, for somebody is new
  (driver.py); one that expects too few is overruled by the others, and by the last contributors
  that are counted;
- who asks first leads: later callers find the leader with one search and join it, and it need not
  look for others. Only where two ask at once, or clocks differ, do leaders meet by searching;
- searches have growing pauses between them and ask few nodes, and nobody takes a declaration back:
  its key is of this attempt alone.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, AsyncIterator, cast  # noqa: UP035 - hivemind knows this one only

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging import control as hivemind_control
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.node_process import BlockingPipe, leave_the_terminal, shared_zeros, watch_parent
from dilocox.dht.reconnect import Targets
from dilocox.dht.records import averaging_prefix
from dilocox.dht.rpc import BYTE_KINDS, REFUSALS, Client, Counts, UploadLimit, handler_name
from dilocox.peer.averaging.connectivity import ConnectivityService
from dilocox.peer.averaging.service import PeerService
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.store import RECORDS_NEEDED, RoundLog
from dilocox.peer.chain.sync import AnchorDiffers, ChainClient, Reached, State
from dilocox.peer.rounds.adaptation import outer_step, stage_codec
from dilocox.peer.rounds.ballots import Ballots
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.group import (
    AttemptResult,
    ExchangeOrder,
    GroupRefused,
    Ticket,
    attempt_setup,
)
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import RecordRefused, digest_of
from dilocox.peer.rounds.vote import Ballot, Verdict
from dilocox.pipeline.stage import chosen_device

logger = logging.getLogger(__name__)


class AveragerStuck(RuntimeError):
    """The averaging process did not answer within all its deadlines."""


@dataclass(frozen=True)
class StageBuffers:
    """Flat fp32 vectors in shared memory; of each pair one is current."""

    message: Tensor
    own: Tensor  # this peer's decoded contribution to the record that was applied last
    anchors: tuple[Tensor, Tensor]
    momenta: tuple[Tensor, Tensor]
    # counted since this peer started, by the averaging process:
    sent: Counts  # payload bytes by kind
    received: Counts  # likewise
    refused: Counts  # what other peers sent, by reason

    @classmethod
    def allocate(cls, numel: int) -> StageBuffers:
        """Six vectors of a stage's size."""
        vectors = [shared_zeros(numel, torch.float32) for _ in range(6)]
        return cls(
            message=vectors[0],
            own=vectors[1],
            anchors=(vectors[2], vectors[3]),
            momenta=(vectors[4], vectors[5]),
            sent=Counts(BYTE_KINDS, shared=True),
            received=Counts(BYTE_KINDS, shared=True),
            refused=Counts(REFUSALS, shared=True),
        )

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this peer sent since it started."""
        return self.sent.total


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """What the averaging process needs to know."""

    run: str
    stage: int
    manifest: Manifest
    layout: FlatLayout
    identity: Identity
    log_folder: Path
    snapshot_folder: Path  # its newest snapshot is served to joiners
    max_upload_bytes_per_s: float | None
    device: str  # as --device names it; this process may use it too
    bootstraps: tuple[str, ...] = ()  # peer ids; on their word strangers are dialled back


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The outer step of one record, ready in the buffers that are not current."""

    round: int
    digest: str
    anchor_sha256: str
    payload_bytes: int  # of the record's means
    seconds: float


def open_log(config: AveragerConfig) -> RoundLog:
    """The log of this peer's stage."""
    return RoundLog(
        config.log_folder,
        manifest_digest=config.manifest.root,
        codec=stage_codec(config.manifest, config.layout),
    )


FIRST_PAUSE_S = 0.2  # between two searches
PAUSE_GROWTH = 1.6
LONGEST_PAUSE_S = 2.0
BEAM = 5  # nodes that a search or a declaration minds: a declaration lies on so many
EARLY_S = 60.0  # before a group's time, and more, all are equally early
LEAD_S = 0.2  # by so much the group's time of who asks at the last moment is later


def own_time(scheduled_at: float, now: float, *, may_lead: bool = True) -> float:
    """The group's time (run time) for who asks for it now: who asks earlier has the earlier one,
    and hivemind lets the earliest lead. Who may not (it only dials out) joins everybody.
    """
    early_s = min(max(scheduled_at - now, 0.0), EARLY_S) if may_lead else 0.0
    return scheduled_at + LEAD_S * (1.0 - early_s / EARLY_S)


def aim(matchmaking: Any, key: str, *, expected: int | None) -> None:
    """Look for the group of a plan (`key`, in hex); peers with another one are not found.

    expected: members with which the group closes before its time; None: it waits for its time.
    """
    if not isinstance(matchmaking.group_key_manager, PlanKeys):
        matchmaking.group_key_manager = PlanKeys(matchmaking.group_key_manager)
    matchmaking.schema_hash = bytes.fromhex(key)
    matchmaking.group_key_manager.aim(key)
    matchmaking.target_group_size = None if expected is None else max(2, expected)


def expect(matchmaking: Any, expected: int | None) -> None:
    """One that asks to join the group expects so many members, or does not know."""
    target: int | None = matchmaking.target_group_size
    if target is not None:
        matchmaking.target_group_size = None if expected is None else max(target, expected)


class PlanKeys(GroupKeyManager):
    """Who looks for the group of a plan, of one after the other, in the DHT."""

    def __init__(self, of: GroupKeyManager):
        """`of`: the averager's own one, in whose place this comes."""
        super().__init__(of.dht, of.prefix, "", None)
        self._dht: Any = of.dht  # with futures, as it is asked here, hivemind types it wrongly
        self._plain_prefix = of.prefix
        self._pause_s = 0.0

    def aim(self, key: str) -> None:
        """From now on it is the plan with this key; the first search waits for nothing."""
        self.prefix = f"{self._plain_prefix}-{key[:24]}"
        self._pause_s = 0.0

    async def get_averagers(self, group_key: str, only_active: bool) -> list[Any]:
        """Peer ids and expirations (run time) of those that have declared themselves under the key.

        The pauses between searches grow.
        """
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, PAUSE_GROWTH * self._pause_s), LONGEST_PAUSE_S)
        found = await self._dht.get(group_key, latest=True, return_future=True, beam_size=BEAM)
        if found is None or not isinstance(found.value, dict):
            return []
        return [
            (PeerID(peer), declared.expiration_time)
            for peer, declared in found.value.items()
            if declared.value or not only_active
        ]

    async def declare_averager(
        self, group_key: str, peer_id: Any, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Say that this peer looks for the group; the end of that is not worth a message."""
        if not looking_for_group:
            return True
        return await self._dht.store(
            key=group_key,
            subkey=peer_id.to_bytes(),
            value=True,
            expiration_time=expiration_time,
            return_future=True,
            beam_size=BEAM,
        )


START_LIMIT_S = 30.0  # until the process has taken an order
CLOSE_GRACE_S = 3.0
ATTEMPTS_KEPT = 4  # so that members can fetch averaged parts and votes after the end


class StageAverager(PeerService, ConnectivityService, DecentralizedAverager):
    """Averages one stage; the first methods are for the trainer's process."""

    def __init__(self, *, dht: Any, config: AveragerConfig, buffers: StageBuffers):
        self.config = config
        self.attempts: dict[bytes, Attempt] = {}
        self.sent, self.received = buffers.sent, buffers.received
        self.refused = buffers.refused
        self._buffers = buffers
        self._main_pid = os.getpid()
        self._order: ExchangeOrder | None = None
        self._asked_at = 0.0  # for the group that forms, or formed last
        matchmaking_s = config.manifest.deadlines.matchmaking_s
        super().__init__(
            (torch.zeros(1),),  # for its own reduction, which is not used
            dht,
            start=True,
            prefix=averaging_prefix(config.run, config.stage),
            min_matchmaking_time=matchmaking_s,
            request_timeout=0.6 * matchmaking_s,  # must be smaller, or matchmaking may deadlock
            allow_state_sharing=False,
        )
        self._call("open")

    # ---- in the trainer's process ----------------------------------------------------------------
    def exchange(self, order: ExchangeOrder) -> Any:
        """Find the attempt's group and exchange `buffers.message`; a future of AttemptResult.

        The future fails where no group may start, and never resolves if this process dies:
        the caller keeps a deadline of its own.
        """
        self._call("prepare", order=order).result(timeout=START_LIMIT_S)
        if order.alone:
            return self._call("exchange_alone")
        # as hivemind's `step` does, which would wait for its process without a deadline
        ticket = self.serializer.dumps(order.ticket().pack(order.last_contributors))
        now = hivemind_control.get_dht_time()
        step = StepControl(
            scheduled_time=own_time(
                order.scheduled_at, now, may_lead=self.mode != AveragingMode.CLIENT
            ),
            deadline=now + order.matchmaking_limit_s,
            allow_retries=False,
            weight=1.0,
            data_for_gather=self.serializer.dumps([None, self.mode.value, ticket]),
        )
        started: Any = MPFuture()
        self._outer_pipe.send(("_step", [], {"step": step, "future_for_init": started}))
        step.attach(*started.result(timeout=START_LIMIT_S))
        step.allow_allreduce()
        return step

    def apply(self, round_number: int, *, current: int, with_own: bool) -> Any:
        """Compute a logged record's outer step from the current buffers; a future of Applied."""
        return self._call("apply", round_number=round_number, current=current, with_own=with_own)

    def catch_up(
        self, peer: str, digest: str, *, limit_bytes: int | None, back_to: int | None
    ) -> Any:
        """Append the records up to `digest` from a peer's log; a future of Reached."""
        return self._call(
            "catch_up", peer=peer, digest=digest, limit_bytes=limit_bytes, back_to=back_to
        )

    def fetch_state(self, peer: str, *, current: int, after_round: int, hurry: bool) -> Any:
        """Download anchor and momentum into the other buffers; a future of State."""
        return self._call(
            "fetch_state", peer=peer, current=current, after_round=after_round, hurry=hurry
        )

    def settle(self, round_number: int, attempt: int) -> Any:
        """Ask the members of an undecided attempt; a future of AttemptResult or None."""
        return self._call("settle", round_number=round_number, attempt=attempt)

    def redial(self, targets: Targets) -> None:
        """Keep connections to these peers open, as a peer must that only dials out."""
        self._call("redial", targets=targets)

    def check_reach(self, again: bool) -> Any:
        """Ask the bootstraps whether others reach this peer now, as they did before or as at its
        start; a future of Reachability.
        """
        return self._call("check_reach", again=again)

    def close(self) -> None:
        """End the process, in good order if it still answers."""
        if self.is_alive():
            with contextlib.suppress(OSError):
                self._outer_pipe.send(("_shutdown", [CLOSE_GRACE_S], {}))
            with contextlib.suppress(OSError):
                self._inner_pipe.send(("_SHUTDOWN", None))  # hivemind's thread in this process
            self.join(CLOSE_GRACE_S)
        if self.is_alive():
            self.kill()
            self.join(1.0)

    def shutdown(self) -> None:
        """What hivemind calls the same thing."""
        self.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        future: Any = MPFuture()
        request = {"name": name, "future": future, "arguments": arguments}
        self._outer_pipe.send(("_serve", [], request))
        return future

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start without hivemind's SIGINT handling: Ctrl-C belongs to the trainer's process."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return handler_name(namespace or "", method_name)

    # ---- in the averaging process: life ----------------------------------------------------------
    def run(self) -> None:
        """Serve until the trainer's process ends."""
        leave_the_terminal()
        threading.Thread(
            target=watch_parent, args=(self._main_pid, _end_without_parent), daemon=True
        ).start()
        self._inner_pipe: Any = BlockingPipe(self._inner_pipe)
        super().run()

    async def _shutdown(self, timeout: float | None) -> None:
        """As hivemind's, but quiet where p2pd died before: then there is nothing to take back."""
        with contextlib.suppress(OSError):
            await super()._shutdown(timeout)

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """One thread for codecs and arithmetic; made here, for a fork would lose its thread."""
        return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    @cached_property
    def log(self) -> RoundLog:
        """The round log; this process appends to it."""
        return open_log(self.config)

    @cached_property
    def _average(self) -> Tensor:
        """Room for an average: of a large stage, new memory takes longer than the arithmetic."""
        return torch.zeros(self.config.layout.numel)

    @cached_property
    def limit(self) -> UploadLimit:
        """The volunteer's upload limit."""
        return UploadLimit(self.config.max_upload_bytes_per_s)

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

    def _chain(self, holders: list[str], *, older: bool = False) -> ChainClient:
        return ChainClient(self._client, self._check, holders, compute=self.in_pool, older=older)

    @cached_property
    def _check(self) -> RecordCheck:
        config = self.config
        return RecordCheck(config.run, config.stage, config.manifest, config.layout)

    async def _serve_open(self) -> None:
        await self.answer_others()
        # now and beside the event loop: CUDA takes seconds to start, in which a group would wait
        await self.in_pool(self._choose_device, self._check.codec)

    def _choose_device(self, codec: StageCodec) -> None:
        try:
            codec.choose_device(chosen_device(self.config.device))
        except RuntimeError as error:  # torch's own kinds, also for a lack of memory
            logger.warning("the codec's matrix products run on the CPU: %s", error)

    async def _serve(self, *, name: str, future: Any, arguments: dict[str, Any]) -> None:
        try:
            future.set_result(await getattr(self, f"_serve_{name}")(**arguments))
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            future.set_exception(error)

    # ---- in the averaging process: the exchange --------------------------------------------------
    async def _serve_prepare(self, order: ExchangeOrder) -> None:
        self._order = order

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        """Give the attempt's plan its own group key before hivemind looks for a group."""
        self._asked_at = time.monotonic()
        order = self._current_order()
        aim(self._matchmaking, order.plan.key, expected=order.whole_with)
        with contextlib.suppress(Exception):  # `step` has it already, and the caller gets it there
            await super()._step(step=step, future_for_init=future_for_init)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """hivemind's, with a group that is whole when it is for all who join it."""
        if request.schema_hash == self._matchmaking.schema_hash:
            with contextlib.suppress(GroupRefused):  # refused where the group's tickets are read
                expect(self._matchmaking, self._ticket(request.gather).expected)
        async for message in super().rpc_join_group(request, context):
            yield message

    def _ticket(self, gathered: bytes) -> Ticket:
        try:
            _, mode, ticket = cast("list[Any]", self.serializer.loads(gathered))
            stated = self.serializer.loads(ticket)
        except Exception as error:
            raise GroupRefused(f"a ticket cannot be read: {error!r}") from error
        last = self._current_order().last_contributors
        return Ticket.unpack(stated, last, client_mode=mode == AveragingMode.CLIENT.value)

    async def _serve_exchange_alone(self) -> AttemptResult:
        order = self._current_order()
        return await self._attempt(order, os.urandom(20), {str(self.peer_id): order.ticket()})

    async def _aggregate_with_group(
        self, group_info: GroupInfo, *_: Any, **__: Any
    ) -> AttemptResult:
        """hivemind's hook: the group stands, exchange."""
        order, matchmaking_s = self._current_order(), time.monotonic() - self._asked_at
        tickets = {
            str(peer): self._ticket(gathered)
            for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True)
        }
        logger.debug("round %d: a group of %d stands", order.plan.round, len(tickets))
        self._running_groups.pop(group_info.group_id, None)  # or hivemind misses its own all-reduce
        result = await self._attempt(order, group_info.group_id, tickets)
        return replace(result, matchmaking_s=matchmaking_s)

    async def _attempt(
        self, order: ExchangeOrder, group: bytes, tickets: dict[str, Ticket]
    ) -> AttemptResult:
        config, plan = self.config, order.plan
        codec = self._check.codec
        me = str(self.peer_id)
        setup = attempt_setup(order, config.manifest, codec, me, tickets, group=group)
        ballot = Ballot(
            run=plan.run,
            stage=plan.stage,
            round=plan.round,
            attempt=plan.attempt,
            group=group,
            members=tuple(member.peer for member in setup.members),
        )
        attempt = Attempt(
            setup,
            encoder=codec.encoder(self._buffers.message, plan.ranks, lambda: self._basis(order)),
            transport=GroupCalls(self._client, group, ballot.members),
            ballots=Ballots(identity=config.identity, ballot=ballot, save_vote=self.log.save_vote),
            pool=self.pool,
        )
        self.attempts[group] = attempt
        while len(self.attempts) > ATTEMPTS_KEPT:
            del self.attempts[next(iter(self.attempts))]
        before = self.sent.read()["averaging"]
        with self.limit.exchange():
            result = await attempt.run()
        if result.verdict is Verdict.COMMITTED:
            sent_bytes = self.sent.read()["averaging"] - before
            self.limit.measured(sent_bytes, result.seconds, limit_s=setup.exchange_s)
        return await self._log_if_committed(result)

    def _basis(self, order: ExchangeOrder) -> Tensor | None:
        """The agreed basis of an exchange: the factors of the last record's means."""
        codec, plan = self._check.codec, order.plan
        last = None if order.last is None else self.log.read(order.last.round)
        if (last is None) != (order.last is None):
            raise GroupRefused("the record before this round is not in the log any more")
        seed = f"{plan.run}/{plan.stage}/{-1 if last is None else last.round}"
        if last is None:
            return codec.first_basis(seed)
        return last.decoded(codec).next_basis(codec.low_rank(plan.ranks), seed)

    async def _serve_settle(self, round_number: int, attempt: int) -> AttemptResult | None:
        for known in self.attempts.values():
            ballot = known.ballots.ballot
            if (ballot.round, ballot.attempt) == (round_number, attempt):
                return await self._log_if_committed(await known.settle())
        return None

    async def _log_if_committed(self, result: AttemptResult) -> AttemptResult:
        if result.record is not None and result.certificate is not None:
            await self.in_pool(self.log.append, result.record, result.certificate)
        return result

    # ---- in the averaging process: records and states --------------------------------------------
    async def _serve_apply(self, round_number: int, current: int, with_own: bool) -> Applied:
        return await self.in_pool(self._apply, round_number, current, with_own)

    def _apply(self, round_number: int, current: int, with_own: bool) -> Applied:
        started = time.monotonic()
        buffers = self._buffers
        try:
            record, data = self.log.read(round_number), self.log.read_bytes(round_number)
        except RecordRefused as error:
            raise AnchorDiffers(f"record {round_number} is damaged: {error}") from error
        if record is None or data is None:
            raise AnchorDiffers(f"record {round_number} is not in the log any more")
        if record.anchor_before != anchor_sha256(buffers.anchors[current]):
            raise AnchorDiffers(f"record {round_number} applies to another anchor")
        means = record.decoded(self._check.codec)
        if with_own:
            me = str(self.peer_id)
            own = means.own(buffers.message, record.counted(me), out=buffers.own)
            if own is not buffers.own:
                buffers.own.copy_(own)
        outer_step(self.config.manifest, record.rules).apply(
            buffers.anchors[current],
            buffers.momenta[current],
            means.average(out=self._average),
            buffers.anchors[1 - current],
            buffers.momenta[1 - current],
        )
        rounds = self.config.manifest.rounds
        kept = max(rounds.records_kept, RECORDS_NEEDED)
        self.log.prune(kept, rounds.log_bytes, applied=round_number)
        return Applied(
            round=round_number,
            digest=digest_of(data),
            anchor_sha256=anchor_sha256(buffers.anchors[1 - current]),
            payload_bytes=sum(len(mean) for mean in record.means),
            seconds=time.monotonic() - started,
        )

    async def _serve_catch_up(
        self, peer: str, digest: str, limit_bytes: int | None, back_to: int | None
    ) -> Reached:
        # where the records are worth more bytes, a bootstrap's older ones are, too
        chain = self._chain([peer], older=limit_bytes is not None)
        with self.counting_refusals():
            return await chain.catch_up(
                self.log, digest, limit_bytes=limit_bytes, me=str(self.peer_id), back_to=back_to
            )

    async def _serve_fetch_state(
        self, peer: str, current: int, after_round: int, hurry: bool
    ) -> State:
        buffers = self._buffers
        with self.counting_refusals():
            state = await self._chain([peer]).state(
                peer,
                self.config.log_folder,
                buffers.anchors[1 - current],
                buffers.momenta[1 - current],
                after_round=after_round,
                hurry=hurry,
            )
        await self.in_pool(self.log.start_from, state.record, state.certificate)
        return state

    def _current_order(self) -> ExchangeOrder:
        if self._order is None:
            raise GroupRefused("no exchange was prepared")
        return self._order


def _end_without_parent() -> None:
    os._exit(1)
