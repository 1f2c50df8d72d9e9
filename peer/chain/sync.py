"""`ChainClient`: takes a stage's chain from those who hold it, headers, records and states.

A chain is walked back from the digest that somebody claims, by its headers, each a few kB. Nobody
vouches for a header: what it says of its record counts once the record is here, too, and has the
digest that it was asked for by. A bootstrap's archive keeps more of the chain than peers do, and
gives that to those who ask for `older` records.

Records: where the headers meet our own chain (`catch_up`), the records after it are appended, the
oldest first, each with its certificate. State: anchor and outer momentum as of a peer's last
snapshot, downloaded to disk (resumable), checked by size and sha256 before a byte of it is loaded,
with the record it stands on.

A peer loads a state into its buffers (`state`); who only keeps it for others has no room for two
vectors of every stage, so each check reads the file a piece at a time. Who keeps a state for others
also has it proved by two records: the first one after it names the sha256 of the anchor before it,
and the outer step of that record must lead to the anchor that the second one names, which it does
from the right momentum only.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, make_folder
from dilocox.dht.rpc import STALL_S, Blob, CallRefused, Client
from dilocox.peer.chain.headers import HeaderClient, OtherRecord, ToldHeader
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import sha256_of_file
from dilocox.peer.chain.store import KeptState, RoundLog
from dilocox.peer.chain.summary import SHA256
from dilocox.peer.rounds.ballots import MAX_CERTIFICATE_BYTES
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from dilocox.peer.rounds.record import RecordRefused, RoundRecord, digest_of

PIECE_VALUES = 1 << 20
HURRY_S = 3600.0  # a state that would take longer is looked for elsewhere
RECORDS_LIMIT_S = 600.0  # of all that is taken at once

Compute = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread, so that the event loop goes on."""


class NoState(ConnectionError):
    """The peer has no state that would help: none yet, or one that is not newer than ours."""


class AnchorDiffers(RuntimeError):
    """This anchor is not the one that a certified record applies to: a state must be taken."""


# ---- what is taken -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fetched:
    """A sound record."""

    record: RoundRecord
    data: bytes
    certificate: bytes


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the headers of another peer's chain say of this peer.

    after: of all records of later rounds, up to the newest. named: rounds of those that count this
    peer. rounds: of those records, by digest.
    """

    after: int
    named: frozenset[int]
    rounds: Mapping[str, int]

    def up_to(self, digest: str) -> Told | None:
        """Likewise, up to the record of this digest; None where it is another chain's."""
        newest = self.rounds.get(digest)
        if newest is None:
            return None
        return replace(self, named=frozenset(n for n in self.named if n <= newest))


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a walk along another peer's chain found."""

    appended: tuple[int, ...]  # rounds now in our log, in order
    fork_round: int | None  # our newest round on their chain, if that is not our head
    fork_digest: str = ""  # of their first record after it
    chain_tokens: int = 0  # of their chain, as its newest record says
    too_far: bool  # their log does not reach back to ours: a state is needed
    costly: bool = False  # it may, but the records are more bytes than they may be
    told: Told | None = None  # by the headers, where the records were not taken


@dataclass(frozen=True, kw_only=True)
class State:
    """A downloaded anchor and momentum, ready in the buffers that are not current."""

    round: int
    digest: str
    anchor_sha256: str
    chain_tokens: int
    record: bytes
    certificate: bytes


@dataclass(frozen=True, kw_only=True)
class StateOffer:
    """A state that a peer has: its file, and the record (checked, without means) it stands on."""

    peer: str
    sha256: str
    size: int  # bytes
    digest: str
    record: RoundRecord
    record_bytes: bytes
    certificate: bytes

    @property
    def round(self) -> int:
        return self.record.round


@dataclass(frozen=True, kw_only=True)
class InitialOffer:
    """Likewise, the initial weights that the manifest pins, which stand on no record."""

    peer: str
    sha256: str
    size: int
    digest: str
    round: int = -1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long holders may take, in seconds."""

    headers_s: float = 60.0  # all headers of `catch_up`, before the first record
    records_s: float = RECORDS_LIMIT_S
    stall_s: float = STALL_S  # a certificate, and a record if exchanges take less


class ChainClient(HeaderClient):
    """The chain of one stage, from those who hold it; what it gives has passed all checks."""

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
            client, check.run, check.stage, holders, older=older, deadline=deadline, now=now
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
    ) -> Reached:
        """Fetch the records from our chain up to `digest`, check them, and append them to the log.

        Their headers come first, the newest first: until they meet our chain, no record is worth
        its bytes. Then come the records, the oldest first, each appended before the next one is
        asked for: what is cut off goes on later where it was.

        limit_bytes: of all of them, if they are to cost no more than something else would. back_to:
        a round of which `me` wants to know whether it is in its record, even where the records cost
        too much.

        Raises:
            ConnectionError: no holder can be reached. PeerBusy: it cannot serve now.
            TimeoutError: the headers, a record, or all of them took too long.
            CallRefused, RecordRefused: a header, record or certificate of it is not sound.
        """
        walk = self._missing(log, digest, limit_bytes, back_to)
        headers, known = await asyncio.wait_for(walk, self._limits.headers_s)
        told = _told(headers, known, me)
        if known is None:
            return Reached(appended=(), fork_round=None, too_far=True, told=told)
        size = sum(each.says.listed.record_bytes for each in headers)
        if headers and limit_bytes is not None and size > limit_bytes:
            return Reached(appended=(), fork_round=None, too_far=False, costly=True, told=told)
        end = self._now() + self._limits.records_s
        if known != log.head().round:
            tokens = 0
            if headers:  # what the newest header says of the chain's tokens is to be proved
                tokens = (await self._held(digest)).record.chain_tokens
            return Reached(
                appended=(),
                fork_round=known,
                fork_digest=headers[-1].digest if headers else digest,
                chain_tokens=tokens,
                too_far=False,
                told=told,
            )
        appended: list[int] = []
        for each in reversed(headers):
            if self._now() > end:
                raise asyncio.TimeoutError(f"{len(appended)} records came in the time for all")
            fetched = await self._held(each.digest)
            added = await self._compute(log.append, fetched.data, fetched.certificate)
            appended.append(added.round)
        return Reached(appended=tuple(appended), fork_round=None, too_far=False)

    async def _missing(
        self, log: RoundLog, digest: str, limit_bytes: int | None, back_to: int | None
    ) -> tuple[list[ToldHeader], int | None]:
        """The headers of what leads from our chain to `digest`, the newest first, and the round of
        ours that they follow, None if nobody has all of them.

        It ends early where the records are more than `limit_bytes`, and the headers reach `back_to`
        or take long.
        """
        missing: list[ToldHeader] = []
        total, enough_at = 0, self._now() + self._limits.headers_s / 2
        async for told in self.headers(digest, lambda wanted: log.find(wanted) is not None):
            missing.append(told)
            total += told.says.listed.record_bytes
            far = back_to is None or told.round <= back_to or self._now() > enough_at
            if limit_bytes is not None and total > limit_bytes and far:
                return missing, told.round
        known = log.find(missing[-1].previous if missing else digest)
        if known is None and not missing:
            raise ConnectionError(f"nobody asked has the record {digest[:12]} that is claimed")
        return missing, known

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
            InitialOffer(peer=peer, sha256=sha256, size=size, digest=digest), folder
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
        blob = await self._within(self._client.fetch(peer, want, limit_bytes=limit))
        if blob is None:
            raise NoState(f"{peer} has no state")
        digest, sha256 = str(blob.facts.get("digest")), str(blob.facts.get("sha256"))
        size = blob.facts.get("size")
        if not isinstance(size, int) or not 0 < size <= limit:
            raise CallRefused(f"{peer} has a state of {size} bytes, at most {limit} are due")
        if not SHA256.fullmatch(sha256):
            raise CallRefused(f"{peer} names its state by what is no sha256")
        return digest, sha256, size

    async def download(
        self, offer: StateOffer | InitialOffer, folder: Path, *, hurry: bool = False
    ) -> KeptState:
        """Fetch the file into a folder, going on with what an earlier, broken download of it left.

        hurry: give it up where it would take over an hour, as others may be faster.

        Raises:
            TooSlow: in a hurry only.
            ConnectionError: the peer is gone, or has another state by now.
            CallRefused: the file is not what the offer says, or no state of this stage.
            EnvironmentFault: no space on the disk; then nothing is left of it.
        """
        path = folder / f"{offer.sha256}.state"
        try:
            make_folder(folder)
            with _disk(path):
                for older in set(folder.glob("*.state")) - {path}:
                    older.unlink()
            await self._within(self._fetch_rest(offer, path, hurry))
            with _disk(path):
                found = await self._compute(sha256_of_file, path)
            if found != offer.sha256:
                raise CallRefused(f"the state of {offer.peer} does not have the sha256 it stated")
            await self._compute(check_values, path, self.check.layout.numel)
        except (CallRefused, EnvironmentFault):
            path.unlink(missing_ok=True)
            raise
        return KeptState(round=offer.round, digest=offer.digest, sha256=offer.sha256, file=path)

    async def _fetch_rest(self, offer: StateOffer | InitialOffer, path: Path, hurry: bool) -> None:
        with _disk(path):
            file = path.open("ab")
        with file:
            offset = file.tell()
            if offset >= offer.size:
                return

            def write(chunk: bytes) -> None:
                with _disk(path):  # else the transport would take it for the network's
                    file.write(chunk)

            want = {"what": "state", "offset": offset, "sha256": offer.sha256}
            limit = offer.size - offset
            least = limit / HURRY_S if hurry else 0.0
            fetching = self._client.fetch(
                offer.peer, want, limit_bytes=limit, sink=write, least_bytes_per_s=least
            )
            if await fetching is None:
                raise ConnectionError(f"{offer.peer} has another state by now")
            with _disk(path):
                file.flush()

    async def state(
        self,
        peer: str,
        folder: Path,
        anchor: Tensor,
        momentum: Tensor,
        *,
        after_round: int,
        hurry: bool = False,
    ) -> State:
        """Download a peer's state, newer than `after_round`, into the given vectors ([numel] fp32
        each); `hurry` as for `download`.

        Raises:
            NoState: it has none, or an older one.
            TooSlow: in a hurry only.
            ConnectionError: the peer cannot be reached.
            CallRefused, RecordRefused: what it sent is not sound; nothing was loaded.
            EnvironmentFault: no space on the disk.
        """
        offer = await self.offer(peer)
        number = offer.record.round
        if number <= after_round:
            raise NoState(f"{peer} has a state of round {number}, not after {after_round}")
        kept = await self.download(offer, folder, hurry=hurry)
        await self._compute(load_state, kept.file, anchor, momentum)
        kept.file.unlink()
        return State(
            round=number,
            digest=offer.digest,
            anchor_sha256=await self._compute(anchor_sha256, anchor),
            chain_tokens=offer.record.chain_tokens,
            record=offer.record_bytes,
            certificate=offer.certificate,
        )


def _told(headers: Sequence[ToldHeader], known: int | None, me: str) -> Told | None:
    """What headers, the newest first, say of this peer; `known`: the round that they follow."""
    if not headers:
        return None
    oldest = headers[-1].round
    return Told(
        after=known if known is not None and known < oldest else oldest - 1,
        named=frozenset(told.round for told in headers if told.header.counted(me)),
        rounds={told.digest: told.round for told in headers},
    )


# ---- files of states -----------------------------------------------------------------------------
def check_values(path: Path, numel: int) -> None:
    """Refuse (CallRefused) a file that is not an anchor and a momentum of finite fp32 values."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in ("anchor", "momentum")]
            for piece in slices:
                if piece.get_shape() != [numel] or piece.get_dtype() != "F32":
                    raise CallRefused(f"a state has {piece.get_shape()} values, not [{numel}]")
            for piece in slices:
                for low in range(0, numel, PIECE_VALUES):
                    if not bool(piece[low : low + PIECE_VALUES].isfinite().all()):
                        raise CallRefused("the state holds values that are not finite")
    except SafetensorError as error:
        raise CallRefused(f"the state is no safetensors file: {error}") from error


def is_initial(path: Path, pinned: str) -> bool:
    """Whether a state's anchor has this sha256, and nothing has moved it: its momentum is zero."""
    found, moved = hashlib.sha256(), False
    with safe_open(path, framework="pt") as file:
        anchors, momenta = file.get_slice("anchor"), file.get_slice("momentum")
        for low in range(0, anchors.get_shape()[0], PIECE_VALUES):
            found.update(_bytes(anchors[low : low + PIECE_VALUES]))
            moved |= bool(momenta[low : low + PIECE_VALUES].any())
    return found.hexdigest() == pinned and not moved


@torch.no_grad()
def anchors_around(path: Path, average: Tensor, outer: OuterStep) -> tuple[str, str]:
    """The sha256 of a state's anchor, and of the anchor after the outer step with this average.

    `average`: flat fp32, of the first record after the state. Raises RecordRefused for a damaged
    file.
    """
    before, after = hashlib.sha256(), hashlib.sha256()
    try:
        with safe_open(path, framework="pt") as file:
            anchors, momenta = file.get_slice("anchor"), file.get_slice("momentum")
            for low in range(0, average.numel(), PIECE_VALUES):
                part = slice(low, low + PIECE_VALUES)
                anchor, momentum = anchors[part], momenta[part]
                before.update(_bytes(anchor))
                outer.apply(anchor, momentum, average[part], anchor, momentum)
                after.update(_bytes(anchor))
    except (SafetensorError, ValueError, OSError) as error:
        raise RecordRefused(f"{path}: damaged ({error})") from error
    return before.hexdigest(), after.hexdigest()


def _bytes(values: Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy().data


@contextmanager
def _disk(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise disk_fault(path, error) from error


def load_state(path: Path, anchor: Tensor, momentum: Tensor) -> None:
    """Copy a state that was checked into these vectors, [numel] fp32 each."""
    try:
        with cast(Any, safe_open)(path, framework="pt") as file:
            for name, target in (("anchor", anchor), ("momentum", momentum)):
                target.copy_(file.get_tensor(name))
    except OSError as error:
        raise disk_fault(path, error) from error
