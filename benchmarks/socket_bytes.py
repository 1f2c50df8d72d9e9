"""Members on loopback, each with DHT process, p2pd and averaging process of its own, that exchange
given messages. What the TCP sockets of their p2pd send meanwhile is counted by the kernel.

Why: a codec's size is arithmetic, but a volunteer pays for frames, encryption, heartbeats and
votes, too. The kernel counts a socket's bytes without the headers of TCP and IP. All is among the
members, so what one sends another one receives.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator
from dilocox.peer.averaging.averager import StageAverager, StageBuffers
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.options import PeerOptions
from dilocox.peer.rounds.group import AttemptResult, ExchangeOrder, Plan, tokens_cap
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import RoundRecord, digest_of, parse_record, stage_codec

RUN = "c0dec" * 6 + "00"  # 32 hex digits, as a run id has
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
GROUP_S = 2.0  # from an order to its group
EXCHANGE_LIMIT_S = 60.0
ATTEMPTS = 3

_SENT = re.compile(r"\bbytes_sent:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One exchange: its record, and bytes that all members sent together.

    payload_bytes: what their transports counted: parts and means. sent_bytes: by their sockets,
    from the moment that the group stood to the committed record. search_bytes: before that.
    """

    record: RoundRecord
    payload_bytes: int
    sent_bytes: int
    search_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sought:
    """One round's search of the members for each other.

    seconds: of each, from its call to its group. left_s: to the group's time when the last was in
    its group. sent_bytes: by all p2pd from the first call until then. together: how many are in
    the largest group.
    """

    seconds: tuple[float, ...]
    left_s: float
    sent_bytes: int
    together: int


class _CountedAverager(StageAverager):
    """Notes what its peer had sent when the group stood, before it sends anything to it."""

    def __init__(
        self,
        *,
        sent_before: Tensor,
        stood_at: Tensor,
        local: LocalPeer,
        buffers: StageBuffers,
    ):
        """Shared scalars: `sent_before` int64, `stood_at` float64, monotonic time of the group."""
        self._sent_before, self._stood_at = sent_before, stood_at
        self._daemon = local.dht.p2pd_pid
        super().__init__(local, buffers)

    async def _aggregate_with_group(self, *arguments: Any, **more: Any) -> AttemptResult:
        self._stood_at.fill_(time.monotonic())
        self._sent_before.fill_(sent_by([self._daemon]))
        return await super()._aggregate_with_group(*arguments, **more)


def available() -> str:
    """Why sockets cannot be counted on this machine; empty if they can."""
    return "" if shutil.which("ss") else "the command ss (iproute2) is missing"


class Members:
    """A context manager: the members' DHT nodes, in a folder of their own."""

    def __init__(self, folder: Path, identities: Sequence[Identity], layout: FlatLayout):
        self._folder = folder
        self._identities = identities
        self._layout = layout
        self._clock = RunClock()
        self._nodes: list[RunDHT] = []

    def __enter__(self) -> Members:
        try:
            for identity in self._identities:
                first = self._nodes[0].visible_addresses() if self._nodes else ()
                node = open_dht(
                    identity=identity,
                    bootstraps=first,
                    listen=[LOOPBACK],
                    announce=(),
                    client_mode=False,
                    validator=RunRecordValidator(RUN, identity),
                    clock=self._clock,
                )
                self._nodes.append(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            node.close()

    def exchanges(
        self, manifest: Manifest, orders: Sequence[tuple[RoundRecord, Sequence[Tensor]]]
    ) -> list[Carried]:
        """Exchanges under one manifest, one after the other.

        orders: for each the record before it, with its means, and the members' messages [n] in the
        order of the identities.

        Raises:
            RuntimeError: a round came to nothing, or not all members are in its record.
        """
        members: list[_Member] = []
        try:
            for node, identity in zip(self._nodes, self._identities, strict=True):
                members.append(self._member(manifest, node, identity))
            return [self._exchange(members, last, messages) for last, messages in orders]
        finally:
            for member in members:
                member.averager.close()

    def searches(
        self, manifest: Manifest, *, rounds: int, ahead_s: float, spread_s: float
    ) -> list[Sought]:
        """Rounds in which the members only look for each other and exchange zeros.

        The first calls `ahead_s` before the group's time, the last `spread_s` later.
        """
        members: list[_Member] = []
        try:
            for node, identity in zip(self._nodes, self._identities, strict=True):
                members.append(self._member(manifest, node, identity))
            found: list[Sought] = []
            last: RoundRecord | None = None
            for _ in range(rounds):
                sought, last = self._search(members, last, ahead_s=ahead_s, spread_s=spread_s)
                found.append(sought)
            return found
        finally:
            for member in members:
                member.averager.close()

    def _search(
        self,
        members: Sequence[_Member],
        last: RoundRecord | None,
        *,
        ahead_s: float,
        spread_s: float,
    ) -> tuple[Sought, RoundRecord]:
        daemons = [node.p2pd_pid for node in self._nodes]
        for member in members:
            member.buffers.message.fill_(0.01)
        manifest = members[0].local.manifest
        began, at_first = self._clock.time(), sent_by(daemons)
        previous = manifest.digest if last is None else digest_of(last.to_bytes())
        number = 0 if last is None else last.round + 1
        order = self._order(manifest, last, previous, number, began + ahead_s)
        steps: list[Any] = []
        for index, member in enumerate(members):
            due = began + spread_s * index / max(1, len(members) - 1)
            time.sleep(max(0.0, due - self._clock.time()))
            steps.append(member.averager.exchange(order))
        results: list[AttemptResult] = [step.result(timeout=EXCHANGE_LIMIT_S) for step in steps]
        before = sum(int(member.sent_before) for member in members)
        stood = [float(member.stood_at) for member in members]
        pairs = zip(members, results, strict=True)
        logged = [member for member, result in pairs if result.logged]
        found = logged[0].local.open_log().read_bytes(number) if logged else None
        if found is None:
            raise RuntimeError("a round was not committed: is this machine overloaded?")
        sought = Sought(
            seconds=tuple(result.matchmaking_s or 0.0 for result in results),
            left_s=order.scheduled_at - (self._clock.time() - (time.monotonic() - max(stood))),
            sent_bytes=before - at_first,
            together=max(len(result.members) for result in results),
        )
        return sought, parse_record(found, stage_codec(manifest, self._layout))

    def _member(self, manifest: Manifest, node: RunDHT, identity: Identity) -> _Member:
        folder = self._folder / identity.peer_id / manifest.digest
        addresses = tuple(node.visible_addresses())
        local = LocalPeer(
            identity=identity,
            run=RUN,
            manifest=manifest,
            clock=self._clock,
            dht=node,
            swarm=Swarm(node, RUN, identity, self._clock),
            stage=0,
            layout=self._layout,
            addresses=addresses,
            options=PeerOptions(invite=Invite(RUN, addresses[:1]), device="cpu"),
            folder=folder,
        )
        buffers = StageBuffers.allocate(self._layout.numel)
        sent_before = torch.zeros((), dtype=torch.int64).share_memory_()
        stood_at = torch.zeros((), dtype=torch.float64).share_memory_()
        averager = _CountedAverager(
            sent_before=sent_before, stood_at=stood_at, local=local, buffers=buffers
        )
        averager.begin()
        return _Member(local, buffers, sent_before, stood_at, averager)

    def _exchange(
        self, members: Sequence[_Member], last: RoundRecord, messages: Sequence[Tensor]
    ) -> Carried:
        data, manifest = last.to_bytes(), members[0].local.manifest
        daemons = [node.p2pd_pid for node in self._nodes]
        for member, message in zip(members, messages, strict=True):
            member.buffers.message.copy_(message)
        for number in range(last.round + 1, last.round + 1 + ATTEMPTS):
            for member in members:
                member.local.open_log().start_from(data, b"")
            at_first, payload = sent_by(daemons), _payload_of(members)
            scheduled_at = self._clock.time() + GROUP_S
            order = self._order(manifest, last, digest_of(data), number, scheduled_at)
            steps = [member.averager.exchange(order) for member in members]
            results = [step.result(timeout=EXCHANGE_LIMIT_S) for step in steps]
            records = {
                member.local.open_log().read_bytes(number) if result.logged else None
                for member, result in zip(members, results, strict=True)
            }
            at_last, before = sent_by(daemons), sum(int(m.sent_before) for m in members)
            found = records.pop()
            if records or not found:
                continue
            record = parse_record(found, stage_codec(manifest, self._layout))
            if len(record.members) == len(members):
                return Carried(
                    record=record,
                    payload_bytes=_payload_of(members) - payload,
                    sent_bytes=at_last - before,
                    search_bytes=before - at_first,
                )
        raise RuntimeError(f"no record of all in {ATTEMPTS} rounds: is this machine overloaded?")

    def _order(
        self,
        manifest: Manifest,
        last: RoundRecord | None,
        previous: str,
        round_number: int,
        scheduled_at: float,
    ) -> ExchangeOrder:
        codec = stage_codec(manifest, self._layout)
        plan = Plan(
            run=RUN,
            stage=0,
            round=round_number,
            attempt=0,
            ranks=RoundPlan(manifest, codec).ranks_after(last),
            layout=self._layout.digest,
            previous=previous,
        )
        peers = tuple(sorted(identity.peer_id for identity in self._identities))
        return ExchangeOrder(
            plan=plan,
            scheduled_at=scheduled_at,
            matchmaking_limit_s=scheduled_at - self._clock.time() + 5.0,
            tokens=1 if last is None else last.members[0].tokens,
            tokens_cap=tokens_cap(manifest),
            counted=peers,
            recent_voters=peers,
            expected=len(peers),
            exchange_s=0.0,
            step_s=0.0,
            anchor_before="" if last is None else last.anchor_before,
            last=None if last is None else replace(last, means=()),
        )


@dataclass(frozen=True)
class _Member:
    local: LocalPeer
    buffers: StageBuffers
    sent_before: Tensor
    stood_at: Tensor
    averager: _CountedAverager


def _payload_of(members: Sequence[_Member]) -> int:
    return sum(member.buffers.sent.total for member in members)


def sent_by(pids: Collection[int]) -> int:
    """Bytes that the TCP sockets of these processes have sent, as the kernel counts them."""
    shown = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True)
    total = 0
    for line, facts in pairwise(shown.stdout.splitlines()):
        if any(f",pid={pid}," in line for pid in pids) and (match := _SENT.search(facts)):
            total += int(match[1])
    return total
