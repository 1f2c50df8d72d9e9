"""What a peer's averaging process answers to other peers: parts, means, votes, records, states.
Apart from averager.py, which asks others.

Nothing here trusts what comes in: lengths are checked before bytes are taken, what is malformed
is refused with a word about why, and no handler writes bulk data without being asked for it, so
that a frozen peer can hang nobody but itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035 - hivemind knows this one only

import torch
from hivemind.p2p import P2PContext
from hivemind.proto import runtime_pb2

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.dht.rpc import (
    MAX_METADATA_BYTES,
    CallRefused,
    Counts,
    RequestLimit,
    StageServicer,
    answer_of,
    byte_kind,
    chunk_of,
    facts_of,
)
from dilocox.dht.streams import accept
from dilocox.dht.upload_limit import UploadLimit
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.matchmaking import LATE_GROUP_S
from dilocox.peer.chain.fork_choice import Credit
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.chain.uploads import Source, Uploads, find_in_log, is_urgent, open_state
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.group import ShareRefused
from dilocox.peer.rounds.group_calls import about, mean_from
from dilocox.peer.rounds.record import RecordRefused
from dilocox.peer.rounds.vote_count import MAX_MEMBERS

# A message may come before its receiver has heard that the group stands, also LATE_GROUP_S.
GROUP_WAIT_S = 5.0
ATTEMPTS_KEPT = 4  # so that members can fetch votes after the end
MEANS_KEPT = 2  # attempts, until they are over, of which they can fetch averaged parts, too
CREDIT_EVERY_S = 10.0  # the last records are looked at
DISCARD_LIMIT_S = 5.0
HEARTBEAT_S = 0.5
FIRST_PAUSE_S, PAUSE_GROWTH = 0.02, 1.5  # between two looks whether a group stands
MAX_VOTES = 2 * MAX_MEMBERS  # in one message; a member may be seen to vote for two things
VOTE_MARGIN_BYTES = 16  # around a vote, and around all of them, in an answer

T = TypeVar("T")


class NoSuchGroup(CallRefused):
    """What came is for a group that this peer is not, or not any more, in."""


class PeerService(StageServicer):
    """The rpc_ methods of the averaging process, which gives them the attributes below."""

    local: LocalPeer
    attempts: dict[bytes, Attempt]
    sent: Counts
    received: Counts
    refused: Counts

    @cached_property
    def log(self) -> RoundLog:
        return self.local.open_log()

    @cached_property
    def limit(self) -> UploadLimit:
        return UploadLimit(self.local.options.max_upload_mb_s * 1e6 or None)

    @cached_property
    def uploads(self) -> Uploads:
        return Uploads(knows=self.credit.knows)

    @cached_property
    def credit(self) -> Credit:
        return Credit(self.local.dht.bootstraps | {self.local.witness})

    @cached_property
    def requests(self) -> RequestLimit:
        """Of all but `rpc_get`: a peer that walks a chain asks for one header after the other, as
        fast as they come, each a read of the disk; what is long has its places.
        """
        return RequestLimit()

    @cached_property
    def _takes(self) -> dict[tuple[object, ...], asyncio.Task[Any]]:
        """The tasks in which something of an attempt comes, by attempt, sender, part and kind."""
        return {}

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """One thread for codecs and arithmetic; made here, for a fork would lose its thread."""
        return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def exchanging(self) -> bool:
        """Whether an exchange is under way, which needs the line."""
        return any(attempt.running for attempt in self.attempts.values())

    # ---- what other peers call -------------------------------------------------------------------
    async def rpc_put(
        self, request: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """A part, a row's mean or an averaged share of a running attempt."""
        peer = str(context.remote_id)
        limit_s = self.local.manifest.deadlines.longest_exchange_s
        try:
            return await asyncio.wait_for(self._take(peer, request), limit_s)
        except (ValueError, TypeError, ConnectionError, asyncio.TimeoutError) as error:
            self.refused.add(refusal(error))
            if self.is_involved(peer):  # else it is no loss that the answer may be
                accept()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_discard(request), DISCARD_LIMIT_S)
            return answer_of({"refused": f"{type(error).__name__}: {error}"[:200]})

    async def _take(
        self, peer: str, request: AsyncIterator[runtime_pb2.ExpertRequest]
    ) -> runtime_pb2.ExpertResponse:
        self.requests.check(peer)
        first = await anext(aiter(request), None)
        if first is None:
            raise CallRefused("nothing was sent")
        header = facts_of(first)
        attempt = await self.find_attempt(header.get("group"), LATE_GROUP_S)
        part, size = header.get("part"), header.get("bytes")
        kind = str(header.get("kind"))
        if not isinstance(part, int) or not attempt.has_part(part, kind):
            raise CallRefused("no such part")
        if not isinstance(size, int) or not 0 <= size <= attempt.max_bytes(part, kind):
            raise CallRefused(f"{size} bytes for part {part}")
        attempt.check_sender(peer, part, kind)
        with self._taking_only(attempt, peer, part, kind):
            accept()  # before that nothing of it is held
            came = partial(attempt.bytes_came, peer, part, kind)
            came(0, size)
            payload = await self._payload(request, part, size, came)
        if kind == "part":
            await attempt.on_part(peer, part, payload)
        else:
            mean = mean_from(attempt.members, part, header, payload)
            await (attempt.on_row if kind == "row" else attempt.on_mean)(peer, mean)
        return answer_of({})

    async def _payload(
        self,
        request: AsyncIterator[runtime_pb2.ExpertRequest],
        part: int,
        size: int,
        came: Callable[[int, int], None],
    ) -> bytes:
        """came: is called with how many bytes are here, and of how many."""
        payload = bytearray()
        async for frame in request:
            chunk = chunk_of(frame)
            payload += chunk
            came(len(payload), size)
            self.received.add("averaging", len(chunk))
            if len(payload) > size:
                raise CallRefused(f"more than the {size} bytes of part {part}")
        if len(payload) != size:
            raise CallRefused(f"{len(payload)} of {size} bytes of part {part}")
        return bytes(payload)

    @contextmanager
    def _taking_only(self, *what: object) -> Generator[None]:
        """What is sent once more, since its sender's first stream broke, is taken in the place of
        the first: else one member could have this process hold it in all its streams at once.
        """
        task = asyncio.current_task()
        if (before := self._takes.get(what)) is not None:
            before.cancel()
        assert task is not None
        self._takes[what] = task
        try:
            yield
        finally:
            if self._takes.get(what) is task:
                del self._takes[what]

    async def rpc_vote(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """Signed votes of a running attempt, or the words of the means that a member holds."""
        self.check_requests(context)
        try:
            header = facts_of(request)
            attempt = await self.find_attempt(header.get("group"))
            if "words" in header:
                attempt.on_words(str(context.remote_id), header["words"])
            attempt.on_votes([tensor.buffer for tensor in request.tensors[:MAX_VOTES]])
        except ValueError as error:
            self.refused.add("group" if isinstance(error, NoSuchGroup) else "vote")
            return answer_of({"refused": str(error)[:200]})
        return answer_of({})

    async def rpc_ask(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        """How this peer, and those it heard, voted in an attempt."""
        self.check_requests(context)
        try:
            question = facts_of(request)
            number, tried = question["round"], question["attempt"]
            if type(number) is not int or type(tried) is not int:
                raise CallRefused("no such attempt")
            attempt = self.attempts.get(question["group"])
            own = self.log.own_vote(number, tried)
        except (ValueError, KeyError, TypeError) as error:
            self.refused.add("question")
            return answer_of({"refused": repr(error)[:200]})
        votes = [] if attempt is None else attempt.ballots.all_bytes()
        if own is not None and own not in votes:  # cast before this peer was restarted
            votes.append(own)
        # the caller takes no larger answer; votes for a record are short, and they decide the most
        votes.sort(key=len)
        ends = accumulate(len(vote) + VOTE_MARGIN_BYTES for vote in votes)
        fitting = sum(end <= MAX_METADATA_BYTES - VOTE_MARGIN_BYTES for end in ends)
        return answer_of({"votes": votes[:fitting]})

    async def rpc_watch(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """To a member of an attempt: a heartbeat every half second, for as long as it can take."""
        self.check_requests(context)
        with self.counting_refusals():
            group = facts_of(request).get("group")
        peer = str(context.remote_id)
        end = time.monotonic() + self.local.manifest.deadlines.attempts_s
        forms_until, is_member = time.monotonic() + LATE_GROUP_S, False
        while time.monotonic() < end:
            attempt = self.attempts.get(group) if isinstance(group, bytes) else None
            is_member = is_member or (attempt is not None and peer in attempt.members)
            if not is_member and time.monotonic() > forms_until:
                self.refused.add("group")
                return
            yield answer_of({})
            await asyncio.sleep(HEARTBEAT_S)

    async def rpc_get(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Serve an averaged part, a record, a certificate or the newest state, in chunks; what is
        long only to peers that are admitted to the run.
        """
        peer = str(context.remote_id)

        async def find(want: dict[str, Any]) -> Source | None:
            short = want["what"] == "certificate" or want.get("header")
            if short or self.local.swarm.admits(peer):
                return await self.find(want)
            self.refused.add("admission")
            return None

        def refuse(reason: str) -> None:
            if reason == "question":
                self.refused.add("question")

        def pace(want: dict[str, Any], found: Source) -> Callable[[int], Awaitable[None]]:
            first = is_urgent(want, found)
            if want["what"] == "record":
                first = first or self._made_with(peer, str(want.get("digest")))

            async def before_chunk(count: int) -> None:
                await self.limit.spend(count, first=first)
                self.sent.add(byte_kind(want["what"]), count)

            return before_chunk

        answer = self.uploads.answer(request, peer, find, refuse=refuse, pace=pace)
        async with aclosing(answer) as frames:
            async for frame in frames:
                yield frame

    def _made_with(self, peer: str, digest: str) -> bool:
        """Whether this is the record of an exchange that this peer was in: it may lack parts."""
        return any(
            attempt.digest == digest and peer in attempt.members
            for attempt in self.attempts.values()
        )

    async def find(self, want: dict[str, Any]) -> Source | None:
        """What a caller that may have it asks for; None if it is not here."""
        match want["what"]:
            case "mean":
                attempt = self.attempts.get(want["group"])
                mean = None if attempt is None else await attempt.checked_mean(int(want["part"]))
                if attempt is None or mean is None:
                    return None
                return Source.of(mean.payload, **about(attempt.members, mean))
            case "record" | "certificate":
                digest, header = str(want["digest"]), bool(want.get("header"))
                whole = want["what"] == "record" and not header
                for attempt in self.attempts.values():
                    if whole and attempt.digest == digest and attempt.record:
                        return Source.of(attempt.record)
                return await asyncio.to_thread(
                    find_in_log, self.log, want["what"], digest, header=header
                )
            case "state":
                return await asyncio.to_thread(open_state, self.local.snapshots, want)
            case _:
                return None

    # ---- helpers ---------------------------------------------------------------------------------
    def is_involved(self, peer: str) -> bool:
        """Whether it is known, or a member of one of the last attempts."""
        attempts = self.attempts.values()
        return self.credit.knows(peer) or any(peer in each.members for each in attempts)

    async def keep_credit(self) -> None:
        """Look at the last records now and then, beside the event loop: that reads the disk."""
        while True:
            with suppress(RecordRefused, OSError):
                await asyncio.to_thread(lambda: self.credit.look(self.log, self.log.head()))
            await asyncio.sleep(CREDIT_EVERY_S)

    @contextmanager
    def counting_refusals(self) -> Generator[None]:
        try:
            yield
        except (CallRefused, RecordRefused) as error:
            self.refused.add(refusal(error))
            raise

    def check_requests(self, context: P2PContext) -> None:
        """Raise CallRefused for a peer that is not admitted to the run, and for one request of a
        peer too many, which is counted.
        """
        peer = str(context.remote_id)
        with self.counting_refusals():
            if not self.local.swarm.admits(peer):
                raise CallRefused("this run takes only peers that are admitted", "admission")
            self.requests.check(peer)

    async def find_attempt(self, group: object, wait_s: float = GROUP_WAIT_S) -> Attempt:
        """The running attempt of a group, waiting a little for one that is about to start."""
        if not isinstance(group, bytes):
            raise NoSuchGroup("no group is named")
        deadline, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
        while (attempt := self.attempts.get(group)) is None:
            if time.monotonic() > deadline:
                raise NoSuchGroup("no such group")
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_GROWTH * pause_s, HEARTBEAT_S)  # a crowd may ask for what is none
        return attempt

    def begin_attempt(self, group: bytes, attempt: Attempt) -> None:
        """What comes for this group is the attempt's from now on; old ones are forgotten."""
        self.attempts[group] = attempt
        while len(self.attempts) > ATTEMPTS_KEPT:
            del self.attempts[next(iter(self.attempts))]
        *before, _ = self.attempts.values()
        for place, each in enumerate(before):
            if each.over or place < len(before) + 1 - MEANS_KEPT:
                each.forget()

    async def in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run something slow beside the event loop, so that heartbeats go on."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)


def refusal(error: Exception) -> str:
    """What a refusal is counted as; of `REFUSALS` (dht/rpc.py)."""
    match error:
        case NoSuchGroup():
            return "group"
        case ShareRefused():
            return "share"
        case PayloadRefused():
            return "payload"
        case RecordRefused():
            return "record"
        case asyncio.TimeoutError() | ConnectionError():
            return "late"
        case CallRefused(kind="often" | "admission" as kind):
            return kind
        case _:
            return "frame"


async def _discard(request: AsyncIterator[runtime_pb2.ExpertRequest]) -> None:
    """Read what a refused sender still sends: p2pd resets a stream whose reader leaves earlier, the
    answer with it.
    """
    async for _ in request:
        pass
