"""`ChainClient`: takes a stage's chain from its holders: headers, records and states.

A chain is walked back from the digest that somebody claims, by its headers, each a few kB. Nobody
vouches for a header: what it says of its record counts once the record is here, too, and has the
digest that it was asked for by. A bootstrap's archive keeps more of the chain than peers do, and
gives that to callers that ask for `older` records.

Records: where the headers meet our own chain (`catch_up`), the records after it are appended, the
oldest first, each with its certificate. State: anchor and outer momentum as of a peer's last
snapshot, with the record it stands on. It is named by the sha256 of its chunks' digests and comes
to the disk chunk by chunk, each checked as it comes, so it can go on after a break, from any peer
that has the same one.

No record names that digest: the first one after a state names the sha256 of the anchor alone, which
a peer compares before it applies that record. A keeper of a state for others has it proved by two
records (replay.py: `anchors_around`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import make_folder
from dilocox.dht.rpc import REFUSED, STALL_S, Blob, CallRefused, Client
from dilocox.peer.chain.header_client import CountedRounds, HeaderClient, OtherRecord
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import initial_anchor
from dilocox.peer.chain.snapshot_files import (
    STATE_CHUNK_BYTES,
    check_values,
    is_initial,
    keep_right_chunks,
    load_state,
    on_disk,
)
from dilocox.peer.chain.store import FROM_START, KeptState, RoundLog, Store, forget_records
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.rounds.ballots import MAX_CERTIFICATE_BYTES
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import SHA256, RoundRecord, digest_of

logger = logging.getLogger(__name__)

HURRY_S = 3600.0  # a state that would take longer is looked for elsewhere
RECORD_BYTES_PER_S = 250e3
HEADERS_LIMIT_S = RECORDS_LIMIT_S = 600.0  # of all that are taken at once
STATES_ASKED = 8  # peers that are asked which state they have
STATE_LIMIT_S = 6 * 3600.0  # of a whole model; a transfer that stalls fails much sooner

Compute = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread, so that the event loop goes on."""


class NoState(ConnectionError):
    """The peer has no state that would help: none yet, or one that is not newer than ours."""


class WrongChunk(ConnectionError):
    """The peer sent something of a state that does not have the digest that it must have."""


class AnchorDiffers(RuntimeError):
    """This anchor is not the one that a certified record applies to: a state must be taken."""


class AnchorWrong(AnchorDiffers):
    """The record is sound: the state that the anchor comes from was not."""


class AnchorLost(AnchorDiffers):
    """And it is half moved."""


# ---- what is taken -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fetched:
    """A sound record."""

    record: RoundRecord
    data: bytes
    certificate: bytes


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a walk along another peer's chain found."""

    fork_round: int | None  # our newest round on their chain, if that is not our head
    fork_digest: str = ""  # of their first record after it
    chain_tokens: int = 0  # of their chain, as its newest record says
    too_far: bool  # their log does not reach back to ours: a state is needed
    costly: bool = False  # it may, but at the cost of more bytes or time than were allowed
    told: CountedRounds | None = None  # by the headers, where the records were not taken

    @property
    def arrived(self) -> bool:
        """Whether the records were taken."""
        return self.fork_round is None and not self.too_far and not self.costly


@dataclass(frozen=True, kw_only=True)
class TakenState:
    """A downloaded anchor and momentum that were put in place."""

    round: int
    digest: str
    anchor_sha256: str
    chain_tokens: int


@dataclass(frozen=True, kw_only=True)
class StateOffer:
    """A state that a peer has: its file, and the record (checked, without means) it stands on; None
    for the initial weights.
    """

    peer: str
    sha256: str
    size: int  # bytes
    digest: str  # of that record, or of the manifest
    record: RoundRecord | None = None
    record_bytes: bytes = b""
    certificate: bytes = b""

    @property
    def round(self) -> int:
        return -1 if self.record is None else self.record.round


@dataclass(frozen=True, kw_only=True)
class ChainEnd:
    """A record that is to be believed, and the peer that is asked what leads to it."""

    digest: str
    round: int
    teller: str


@dataclass(frozen=True, kw_only=True)
class WantedState:
    """What will do.

    after_round: of no use are states of this round or an older one. end: of the chain that a state
    must be on which stands on no record here; None: any will do. or_initial: the initial weights
    will, too. An archive whose chain is young has no state yet, and who vouches for that chain may
    be the only one that is on it. hurry: as for `ChainClient.download`.
    """

    after_round: int = -1
    end: ChainEnd | None = None
    or_initial: bool = False
    hurry: bool = False


@dataclass(frozen=True)
class StateFile:
    """A state that was downloaded, and checked.

    file: None for the weights of the manifest's seed. after: of the initial weights, the folder
    with all records of their chain.
    """

    offer: StateOffer
    file: Path | None
    after: Path | None = None

    def load(
        self, anchor: Tensor, momentum: Tensor, log: RoundLog, check: RecordCheck
    ) -> TakenState:
        """Put it into these vectors, [numel] fp32 each, and its record or those after it into the
        log, in place of all others; the files go.
        """
        offer = self.offer
        if self.file is None:
            initial_anchor(check, anchor)
            momentum.zero_()
        else:
            load_state(self.file, anchor, momentum)
            self.file.unlink()
        if self.after is None:
            log.start_from(offer.record_bytes, offer.certificate)
        else:
            log.drop_from(0)
            following = Store(self.after)
            log.share(following, following.rounds())
            forget_records(self.after.parent)
        return TakenState(
            round=offer.round,
            digest=offer.digest,
            anchor_sha256=anchor_sha256(anchor),
            chain_tokens=0 if offer.record is None else offer.record.chain_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long holders may take, in seconds."""

    headers_s: float = 60.0  # one header, and all of them where a state would do as well
    all_headers_s: float = HEADERS_LIMIT_S
    records_s: float = RECORDS_LIMIT_S
    stall_s: float = STALL_S  # a certificate, and a record if exchanges take less


class ChainClient(HeaderClient):
    """The chain of one stage, from its holders; what it gives has passed all checks."""

    def __init__(
        self,
        client: Client,
        check: RecordCheck,
        holders: Sequence[str],
        *,
        compute: Compute = asyncio.to_thread,
        older: bool = False,
        deadline: float = math.inf,
        limits: Limits = Limits(),
        now: Callable[[], float] = time.monotonic,
    ):
        """check: what each record and state must pass. compute: for what is slow. The rest is as
        for HeaderClient.
        """
        super().__init__(
            client,
            check.run,
            check.stage,
            holders,
            older=older,
            header_limit_s=limits.headers_s,
            deadline=deadline,
            now=now,
        )
        self.check = check
        self._compute = compute
        self._limits = limits

    # ---- records ---------------------------------------------------------------------------------
    async def record(self, digest: str) -> Fetched | None:
        """A record and its certificate, from the first holder that has both.

        Raises:
            RecordRefused: what there is of it is not sound.
            ConnectionError, CallRefused, TimeoutError: what the last holder that failed did.
            EnvironmentFault: the deadline is over.
        """
        return await self._first(lambda peer: self._record(peer, digest))

    def records(self, start: str, ends: Callable[[str], bool]) -> AsyncGenerator[Fetched, None]:
        """As `headers`, the records."""
        return self._back(
            start, ends, self.record, lambda found: (found.record.round, found.record.previous)
        )

    async def catch_up(
        self,
        log: RoundLog,
        digest: str,
        *,
        limit_bytes: int | None = None,
        me: str = "",
        back_to: int | None = None,
        second: Sequence[str] = (),
    ) -> Reached:
        """Fetch the records from our chain up to `digest`, check them, and append them to the log.

        Their headers come first, the newest first: until they meet our chain, no record is worth
        its bytes. Then come the records, the oldest first, each appended before the next one is
        asked for: what is cut off goes on later where it was.

        limit_bytes: of all of them, if they are to cost no more than something else would, nor
        more time: of a chain of hundreds each header is a round trip or two. back_to:
        a round of which `me` wants to know whether it is in its record, even where the records cost
        too much. second: has the last word where the headers do not lead to our chain, since no
        header proves itself.

        Raises:
            ConnectionError: no holder can be reached. PeerBusy: it cannot serve now.
            TimeoutError: the headers, a record, or all of them took too long.
            CallRefused, RecordRefused: a header, record or certificate of it is not sound.
        """
        reached = await self._caught_up(log, digest, limit_bytes, me, back_to)
        if second and not reached.arrived:
            asking = copy(self)
            asking.holders = second
            with suppress(*REFUSED):
                return await asking._caught_up(log, digest, limit_bytes, me, back_to)
        return reached

    async def _caught_up(
        self, log: RoundLog, digest: str, limit_bytes: int | None, me: str, back_to: int | None
    ) -> Reached:
        walk = self._missing(log, digest, limit_bytes, back_to)
        headers, known, enough = await asyncio.wait_for(walk, self._limits.all_headers_s)
        told = CountedRounds.told(headers, known, me)
        if known is None:
            return Reached(fork_round=None, too_far=True, told=told)
        size = sum(each.record_bytes for each in headers)
        if enough or (headers and limit_bytes is not None and size > limit_bytes):
            return Reached(fork_round=None, too_far=False, costly=True, told=told)
        end = self._now() + self._limits.records_s
        if known != log.head().round:
            tokens = 0
            if headers:  # what the newest header says of the chain's tokens is to be proved
                tokens = (await self._held(digest)).record.chain_tokens
            return Reached(
                fork_round=known,
                fork_digest=headers[-1].digest if headers else digest,
                chain_tokens=tokens,
                too_far=False,
                told=told,
            )
        for taken, each in enumerate(reversed(headers)):
            if self._now() > end:
                raise asyncio.TimeoutError(f"{taken} records came in the time for all")
            fetched = await self._held(each.digest)
            await self._compute(log.append, fetched.data, fetched.certificate)
        return Reached(fork_round=None, too_far=False)

    async def _missing(
        self, log: RoundLog, digest: str, limit_bytes: int | None, back_to: int | None
    ) -> tuple[list[ChainRound], int | None, bool]:
        """The headers of what leads from our chain to `digest`, the newest first, and the round of
        ours that they follow, None if nobody has all of them; and whether they are given up.

        They are where the records are more than `limit_bytes`, and the headers reach `back_to` or
        take long; or where they take twice as long, and there is such a limit.
        """
        missing: list[ChainRound] = []
        total, began, limit_s = 0, self._now(), self._limits.headers_s
        async for told in self.headers(digest, lambda wanted: log.find(wanted) is not None):
            missing.append(told)
            total += told.record_bytes
            if limit_bytes is not None:
                took_s = self._now() - began
                far = back_to is None or told.round <= back_to or took_s > limit_s / 2
                late = took_s > limit_s and log.find(told.previous) is None
                if late or (total > limit_bytes and far):
                    return missing, told.round, True
        known = log.find(missing[-1].previous if missing else digest)
        if known is None and not missing:
            raise ConnectionError(f"nobody asked has the record {digest[:12]} that is claimed")
        return missing, known, False

    async def _held(self, digest: str) -> Fetched:
        found = await self.record(digest)
        if found is None:
            raise ConnectionError(f"nobody asked has the record {digest[:12]} any more")
        return found

    async def _record(self, peer: str, digest: str) -> Fetched | None:
        limits = self._limits
        # members of an exchange move as much in its time
        limit_s = max(limits.stall_s, self.check.manifest.deadlines.exchange_s)
        limit_s = min(limit_s, limits.records_s)
        # but whoever gives it may have a thin line, and give others some, too
        limit_s = max(limit_s, self.check.record_bytes / RECORD_BYTES_PER_S)
        blob = await self._get(peer, "record", digest, self.check.record_bytes, limit_s)
        if blob is None:
            return None
        if digest_of(blob.data) != digest:
            raise OtherRecord(f"{peer} sent another record than {digest[:12]}")
        proof = await self._get(peer, "certificate", digest, MAX_CERTIFICATE_BYTES, limits.stall_s)
        if proof is None:
            raise OtherRecord(f"{peer} has no certificate of {digest[:12]}")
        record = await self._compute(self.check.record, blob.data, proof.data)
        return Fetched(record, blob.data, proof.data)

    async def _get(
        self, peer: str, what: str, digest: str, limit_bytes: int, limit_s: float
    ) -> Blob | None:
        want = {"what": what, "digest": digest, "older": self._older}
        return await self._within(self._client.fetch(peer, want, limit_bytes=limit_bytes), limit_s)

    # ---- states ----------------------------------------------------------------------------------
    async def offer(
        self, peer: str, helps: Callable[[str], bool] = lambda digest: True
    ) -> StateOffer:
        """What state a peer has. `helps`: whether one that stands on this record is wanted at all.

        Raises:
            NoState: it has none, or one that does not help.
            ConnectionError: the peer cannot be reached. TimeoutError: it gives its record by drops.
            RecordRefused, CallRefused: what it says is not sound.
        """
        digest, sha256, size = await self._offered(peer)
        if digest == self.check.root:
            raise NoState(f"{peer} has written no state since the first round")
        if not helps(digest):
            raise NoState(f"the state of {peer} is not newer, or not on this chain")
        found = await self._record(peer, digest)
        if found is None:
            raise CallRefused(f"{peer} has no record for its state")
        return StateOffer(
            peer=peer,
            sha256=sha256,
            size=size,
            digest=digest,
            record=replace(found.record, means=()),
            record_bytes=found.data,
            certificate=found.certificate,
        )

    async def initial(self, peer: str, folder: Path) -> KeptState:
        """Download the initial weights that the manifest pins, where a run starts from a
        checkpoint, as a state of round -1; raises as `offer` and `download`.
        """
        digest, sha256, size = await self._offered(peer, initial=True)
        if digest != self.check.root:
            raise NoState(f"{peer} has not the initial weights any more")
        kept = await self.download(
            StateOffer(peer=peer, sha256=sha256, size=size, digest=digest), folder
        )
        pinned = self.check.manifest.initial.anchors[self.check.stage]
        if not await self._compute(is_initial, kept.file, pinned):
            kept.file.unlink()
            raise CallRefused(f"{peer} sent other initial weights than the manifest pins")
        return kept

    async def _offered(self, peer: str, **more: bool) -> tuple[str, str, int]:
        """What a peer says of its state: the record it stands on, its sha256 and its bytes."""
        limit = self.check.state_bytes
        want = {"what": "state", "offset": limit, **more}
        blob = await self._within(self._client.fetch(peer, want, limit_bytes=0))
        if blob is None:
            raise NoState(f"{peer} has no state")
        digest, sha256 = str(blob.facts.get("digest")), str(blob.facts.get("sha256"))
        size = blob.facts.get("size")
        if not isinstance(size, int) or not 0 < size <= limit:
            raise CallRefused(f"{peer} has a state of {size} bytes, at most {limit} are due")
        if not SHA256.fullmatch(sha256):
            raise CallRefused(f"{peer} names its state, but not by a sha256")
        return digest, sha256, size

    async def download(self, offer: StateOffer, folder: Path, *, hurry: bool = False) -> KeptState:
        """Fetch the file into a folder, going on with what an earlier, broken download of it left.

        The digests of its chunks come first, then the chunks, from the peer that offered it. Where
        that breaks off, or sends a chunk that is not what its digest says, the other holders are
        asked for the rest: any holder of the state of the same round has the same bytes. Only what
        is right is written.

        hurry: give a peer up with which it would take over an hour, as others may be faster.

        Raises:
            TooSlow: in a hurry only.
            ConnectionError: the last peer asked is gone, has another state by now, or sent a chunk
                that is not its own.
            CallRefused: the file is no state of this stage; then nothing is left of it.
            EnvironmentFault: no space on the disk; then nothing is left of it, either.
        """
        path = folder / f"{offer.sha256}.state"
        try:
            make_folder(folder)
            with on_disk(path):
                for older in set(folder.glob("*.state")) - {path}:
                    older.unlink()
            failure: Exception | None = None
            for peer in (offer.peer, *(each for each in self.holders if each != offer.peer)):
                try:
                    await self._within(self._rest(peer, offer, path, hurry))
                    break
                except REFUSED as error:
                    level = logging.WARNING if isinstance(error, WrongChunk) else logging.INFO
                    logger.log(level, "the state of round %d: %s", offer.round, error)
                    failure = error
            else:
                raise failure or NoState("nobody is there to give it")
            await self._compute(check_values, path, self.check.layout.numel)
        except (CallRefused, EnvironmentFault):
            path.unlink(missing_ok=True)
            raise
        return KeptState(round=offer.round, digest=offer.digest, sha256=offer.sha256, file=path)

    async def _rest(self, peer: str, offer: StateOffer, path: Path, hurry: bool) -> None:
        """What is missing of the file, from one peer."""
        want = {"what": "state", "sha256": offer.sha256}
        count = -(-offer.size // STATE_CHUNK_BYTES)
        digests = await self._client.fetch(peer, want | {"digests": True}, limit_bytes=32 * count)
        if digests is None:
            raise ConnectionError(f"{peer} has another state by now")
        if digest_of(digests.data) != offer.sha256:
            raise WrongChunk(f"{peer} sent digests of chunks that are not those of the state")
        with on_disk(path):
            have = await self._compute(keep_right_chunks, path, digests.data)
            file = path.open("ab")
        left = offer.size - have
        chunk = bytearray()

        def write(data: bytes) -> None:
            nonlocal have
            chunk.extend(data)
            while len(chunk) >= min(STATE_CHUNK_BYTES, offer.size - have) > 0:
                whole = bytes(chunk[:STATE_CHUNK_BYTES])
                number = have // STATE_CHUNK_BYTES
                if hashlib.sha256(whole).digest() != digests.data[32 * number : 32 * number + 32]:
                    raise WrongChunk(f"{peer} sent chunk {number} of it changed")
                with on_disk(path):  # else the transport would take it for the network's
                    file.write(whole)
                have += len(whole)
                del chunk[: len(whole)]

        with file:
            if left:
                found = await self._client.fetch(
                    peer,
                    want | {"offset": have},
                    limit_bytes=left,
                    sink=write,
                    least_bytes_per_s=left / HURRY_S if hurry else 0.0,
                )
                if found is None:
                    raise ConnectionError(f"{peer} has another state by now")
            with on_disk(path):
                file.flush()
        if have != offer.size:
            raise ConnectionError(f"{peer} has {have} bytes of a state of {offer.size}")

    async def state(self, peer: str, folder: Path, log: RoundLog, wanted: WantedState) -> StateFile:
        """Download a peer's state into the folder. Where a part of one is there, rather from a
        holder that has the same one. log: of the records here.

        Raises:
            NoState: it has none, or an older one.
            TooSlow: in a hurry only.
            ConnectionError: the peer cannot be reached.
            CallRefused, RecordRefused: what it sent is not sound.
            EnvironmentFault: no space on the disk.
        """
        end = wanted.end

        async def taken(offer: StateOffer, *, hurry: bool) -> StateFile:
            number, least = offer.round, wanted.after_round
            if number <= least:
                raise NoState(f"{offer.peer} has a state of round {number}, not after {least}")
            if end is not None and log.find(offer.digest) is None:
                await self.check_leads_to(end, offer)
            kept = await self.download(offer, folder, hurry=hurry)
            forget_records(folder)
            return StateFile(offer, kept.file)

        rest = await self._with_the_rest(folder)
        if rest:
            with suppress(*REFUSED):  # it may be too old by now: then this peer's will do
                return await taken(await self.offer(rest), hurry=False)
        try:
            offer = await self.offer(peer)
        except NoState:  # and not where it has one that will not do now
            if not wanted.or_initial or end is None or peer != end.teller:
                raise
            return await self._first_state(end, folder)
        return await taken(offer, hurry=wanted.hurry)

    async def _first_state(self, end: ChainEnd, folder: Path) -> StateFile:
        """The initial weights, with all records from there to the end: of a chain that cannot be
        followed nothing of one's own is to be given up.
        """
        after = folder / FROM_START
        log = RoundLog(after, manifest_digest=self.check.root, codec=self.check.codec)
        asking = copy(self)
        asking.holders, asking._older = [end.teller], True
        try:
            reached = await asking._caught_up(log, end.digest, None, "", None)
        except EnvironmentFault:
            forget_records(folder)
            raise
        if not reached.arrived:
            forget_records(folder)
            raise NoState(f"the records of {end.teller} do not lead from the initial weights on")
        first = StateOffer(peer=end.teller, sha256="", size=0, digest=self.check.root)
        pinned = self.check.manifest.initial.anchors
        file = (await asking.initial(end.teller, folder)).file if pinned else None
        return StateFile(first, file, after)

    async def _with_the_rest(self, folder: Path) -> str:
        """A holder whose state is the one of which the folder has a part, empty if there is none:
        states are of other rounds, and one may be gigabytes.
        """
        begun = {path.stem for path in folder.glob("*.state")}
        if not begun:
            return ""
        asked = self.holders[:STATES_ASKED]
        told = await asyncio.gather(*map(self._offered, asked), return_exceptions=True)
        for peer, found in zip(asked, told, strict=True):
            if not isinstance(found, BaseException) and found[1] in begun:
                return peer
        return ""

    async def contributors(self, digest: str, teller: str) -> frozenset[str]:
        """The peers whose values are in a record, as the teller says; none if it does not answer.

        No record names the anchor that it makes, only the one that it applies to. So nobody can
        check the newest state, and anybody can claim a record that others made: a peer without a
        chain asks its contributors, and bootstraps, for a state.
        """
        asking = copy(self)
        asking.holders, asking._older = [teller], True
        told: ChainRound | None = None
        with suppress(*REFUSED):
            told = await asyncio.wait_for(asking.header(digest), STALL_S)
        return frozenset(peer for peer, _ in told.contributors) if told else frozenset()

    async def check_leads_to(self, end: ChainEnd, offer: StateOffer) -> None:
        """Raise where the record of a state does not lead to the end of the chain to be on.

        Raises:
            NoState: it is newer than that.
            CallRefused: it is on another chain.
            ConnectionError: the peers asked for the headers between the two do not give them.
        """
        if offer.digest == end.digest:
            return
        if offer.round >= end.round:
            raise NoState(
                f"nobody vouches yet for round {offer.round}, which the state of {offer.peer} is of"
            )
        walk = self._walk(end, offer)
        before, number = await asyncio.wait_for(walk, self._limits.all_headers_s)
        if before == offer.digest:
            return
        if number <= offer.round or before == self.check.root:
            raise CallRefused(
                f"the state of {offer.peer} is of a chain that nobody vouches for "
                f"(round {offer.round}, {offer.digest[:12]})"
            )
        raise NoState(f"what leads from the state of {offer.peer} to round {end.round} is unknown")

    async def _walk(self, end: ChainEnd, offer: StateOffer) -> tuple[str, int]:
        """Where the teller's headers end, from the chain's: the record before, and their round."""
        before, number = end.digest, end.round
        asking = copy(self)
        asking.holders, asking._older = [end.teller], True
        async for told in asking.headers(end.digest, lambda wanted: wanted == offer.digest):
            before, number = told.previous, told.round
            if number <= offer.round:
                break
        return before, number
