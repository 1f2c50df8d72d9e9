"""A stage's chain from those who hold it: its newest records' headers for a listing, or all of it,
with certificates and states, to be replayed.

The chain is walked back from the record that the longest claim names. A record is named by its
digest, so it does not matter who gives it: whoever of the claimers has it. A bootstrap's archive
keeps more of it than peers do, and gives that to those who ask for `older` records.

`download_anchors` brings the newest anchors of all stages to somebody who is no peer: the state of
one, and the records after it. Stages commit their rounds by themselves, so the newest anchors are
of different rounds for a moment. They are asked for again until all are of one round: only those
were ever evaluated together.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import make_folder
from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, averaging_prefix, claim_key
from dilocox.dht.rpc import REFUSED, Blob, Client, UploadLimit
from dilocox.dht.swarm_view import nobody_holds, that_count
from dilocox.peer.chain import catchup
from dilocox.peer.chain.catchup import StateOffer, ask_for_state, download_state, fetch_header
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.store import KeptChain, KeptState, RecordFolder, RoundLog
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.rounds.adaptation import outer_step, stage_codec
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import (
    RecordRefused,
    RoundRecord,
    digest_of,
    max_record_bytes,
)
from dilocox.peer.rounds.vote import MAX_CERTIFICATE_BYTES
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout

logger = logging.getLogger(__name__)


# what is wrong with a holder, or with the way to it


@dataclass(frozen=True)
class Fetched:
    """A sound record."""

    record: RoundRecord
    data: bytes
    certificate: bytes


class ChainHolders:
    """Those who claim a stage's chain, the longest claim first. All waits end at `deadline`.

    deadline: on the monotonic clock.
    """

    def __init__(self, place: Joined, stage: int, client: Client, deadline: float):
        self._client = client
        self._deadline = deadline
        self._record_bytes = stage_record_bytes(place.manifest, stage)
        self.root = place.manifest.root
        found = place.swarm.read(claim_key(place.run, stage), ClaimRecord) or {}
        self._claims = sorted(
            (
                (peer, claim)
                for peer, claim in that_count(found, place.manifest).items()
                if claim.round >= 0
            ),
            key=lambda item: (-item[1].chain_tokens, -item[1].round, item[0]),
        )

    @classmethod
    async def of(cls, place: Joined, stage: int, deadline: float) -> ChainHolders:
        """Those of a stage, over the network."""
        client = Client(
            p2p=await place.dht.replicate_p2p(),
            namespace=averaging_prefix(place.run, stage),
            limit=UploadLimit(None),
            record_bytes=stage_record_bytes(place.manifest, stage),
        )
        return cls(place, stage, client, deadline)

    @property
    def peers(self) -> list[str]:
        """Who they are."""
        return [peer for peer, _ in self._claims]

    @property
    def digests(self) -> list[str]:
        """What they claim, the longest chain first."""
        return list(dict.fromkeys(claim.digest for _, claim in self._claims))

    async def record(self, digest: str, check: RecordCheck) -> Fetched | None:
        """A record and its certificate, from the first holder that has both.

        Raises:
            RecordRefused: what there is of it is not sound.
        """
        refused: RecordRefused | None = None
        for peer in self.peers:
            try:
                want = {"what": "record", "digest": digest, "older": True}
                data = await self._fetch(peer, want, limit_bytes=self._record_bytes)
                if data is None or digest_of(data.data) != digest:
                    continue
                want = want | {"what": "certificate"}
                proof = await self._fetch(peer, want, limit_bytes=MAX_CERTIFICATE_BYTES)
                if proof is not None:
                    header = await asyncio.to_thread(check.record, data.data, proof.data)
                    self._prefer(peer)
                    return Fetched(header, data.data, proof.data)
            except RecordRefused as error:
                refused = error
            except REFUSED as error:
                logger.info("%s: no record %s: %s", peer[-6:], digest[:12], error)
        if refused is not None:
            raise refused
        return None

    async def header(self, digest: str) -> ChainRound | None:
        """What a record's header says, from the first holder that has it; the rest stays there."""
        for peer in self.peers:
            try:
                told = await fetch_header(
                    partial(self._fetch, peer), digest, limit_bytes=self._record_bytes, older=True
                )
                if told is not None:
                    listed = ChainRound.of(told.header, digest, told.record_bytes)
                    self._prefer(peer)
                    return listed
            except REFUSED as error:
                logger.info("%s: no record %s: %s", peer[-6:], digest[:12], error)
        return None

    async def offers(self, check: RecordCheck, digests: Sequence[str]) -> list[StateOffer]:
        """The states that they have on these records, the oldest first."""
        wanted = set(digests)
        offers: list[StateOffer] = []
        for peer in self.peers:
            left_s = self._left_s()
            with suppress(*REFUSED):
                asked = ask_for_state(
                    self._client,
                    peer,
                    check=check,
                    compute=asyncio.to_thread,
                    helps=wanted.__contains__,
                )
                offers.append(await asyncio.wait_for(asked, left_s))
        return sorted(offers, key=lambda offer: offer.record.round)

    async def state(self, offer: StateOffer, folder: Path, numel: int) -> KeptState:
        """Download a state; raises what `download_state` raises."""
        left_s = self._left_s()
        taking = download_state(self._client, offer, folder, numel=numel, compute=asyncio.to_thread)
        file = await asyncio.wait_for(taking, left_s)
        return KeptState(
            round=offer.record.round, digest=offer.digest, sha256=offer.sha256, file=file
        )

    async def _fetch(
        self, peer: str, want: dict[str, Any], *, limit_bytes: int, sink: Any = None
    ) -> Blob | None:
        left_s = self._left_s()
        asked = self._client.fetch(peer, want, limit_bytes=limit_bytes, sink=sink)
        return await asyncio.wait_for(asked, left_s)

    def _prefer(self, peer: str) -> None:
        """Ask this one first from now on: it has the rest of the chain, too, as far as it can."""
        self._claims.sort(key=lambda item: item[0] != peer)

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EnvironmentFault("the time is over; give more with --timeout")
        return left


async def list_chain(holders: ChainHolders) -> list[ChainRound]:
    """What there is of the chain, in its order; nothing is checked.

    Raises:
        EnvironmentFault: nobody gives the records that are claimed, or the time is over.
    """
    found: list[ChainRound] = []
    for claimed in holders.digests:
        wanted = claimed
        while wanted != holders.root and (here := await holders.header(wanted)) is not None:
            if found and here.listed.round >= found[-1].listed.round:
                break  # a lie: it would never end
            found.append(here)
            wanted = here.listed.previous
        if found:
            return found[::-1]
    raise _nobody(holders)


async def download_chain(
    holders: ChainHolders, stage: int, check: RecordCheck, folder: Path
) -> tuple[KeptChain, list[str]]:
    """All there is of the chain, in a folder, and what is wrong with the record before it, if
    any: one that is not sound is not walked past.

    With it come the oldest of the states that stand on it, unless it reaches back to the initial
    weights, and the newest.

    Raises:
        EnvironmentFault: nobody gives the records that are claimed, or the time is over.
    """
    log = RecordFolder(folder / "log")
    make_folder(folder / "log")
    flaws: list[str] = []
    whole = False
    for claimed in holders.digests:
        try:
            whole = await _walked(holders, claimed, check, log)
        except RecordRefused as error:
            flaws.append(str(error))
        if log.rounds() or flaws:
            break
    if not log.rounds() and not flaws:
        raise _nobody(holders)
    offers = await holders.offers(check, [entry.digest for entry in log.entries()])
    oldest = [] if whole else offers[:1]
    states = await _states(holders, oldest + offers[len(oldest) :][-1:], check, folder)
    return KeptChain(stage=stage, records=tuple(log.entries()), states=tuple(states)), flaws


def _nobody(holders: ChainHolders) -> EnvironmentFault:
    return EnvironmentFault(
        f"{len(holders.peers)} peers claim records of this stage, none could be reached for one; "
        "try again, and see more with --log-level info"
    )


async def _walked(
    holders: ChainHolders, claimed: str, check: RecordCheck, log: RecordFolder
) -> bool:
    """Fetch all there is from the claimed record back; whether that is the whole chain.

    Raises RecordRefused.
    """
    wanted, number = claimed, -1
    while wanted != holders.root:
        found = await holders.record(wanted, check)
        if found is None:
            return False
        if wanted != claimed and found.record.round >= number:
            raise RecordRefused(f"round {found.record.round} comes before round {number}")
        number = found.record.round
        await asyncio.to_thread(log.write, number, found.data, found.certificate)
        wanted = found.record.previous
    return True


async def _states(
    holders: ChainHolders, offers: Sequence[StateOffer], check: RecordCheck, folder: Path
) -> list[KeptState]:
    states: list[KeptState] = []
    for index, offer in enumerate(offers):
        try:
            place = folder / f"state{index}"
            states.append(await holders.state(offer, place, check.layout.numel))
        except REFUSED as error:
            logger.warning("%s gave no state: %s", offer.peer[-6:], error)
    return states


LOOK_PAUSE_S = 1.0
PATIENCE_S = 20.0  # before a person is told what is waited for
COMMON_LIMIT_S = 60.0  # how long anchors of one round are looked for before the newest will do


@dataclass(frozen=True, kw_only=True)
class StageAnchor:
    """The anchor of one stage and the record it stands on."""

    stage: int
    round: int
    digest: str
    chain_tokens: int
    layout: FlatLayout
    anchor: Tensor  # [layout.numel] fp32


class OtherRound(ConnectionError):
    """The peer cannot give the anchor of that round."""


def download_anchors(place: Joined, *, timeout_s: float) -> list[StageAnchor]:
    """The newest anchor of every stage, of one round if such are to be had.

    Raises:
        EnvironmentFault: nobody gave a sound one within the time.
    """
    return asyncio.run(_download_all(place, time.monotonic() + timeout_s))


async def _download_all(place: Joined, deadline: float) -> list[StageAnchor]:
    give_up = min(deadline, time.monotonic() + COMMON_LIMIT_S)
    while True:
        newest = [await _newest(place, stage, deadline) for stage in range(place.manifest.stages)]
        oldest = min(each.round for each in newest)
        same = [
            each if each.round == oldest else await _at_round(place, each.stage, oldest, give_up)
            for each in newest
        ]
        found = [each for each in same if each is not None]
        if len(found) == len(newest):
            return found
        if time.monotonic() > give_up:
            rounds = ", ".join(str(each.round) for each in newest)
            logger.warning("the anchors of the stages are of different rounds: %s", rounds)
            return newest
        await asyncio.sleep(LOOK_PAUSE_S)


async def _newest(place: Joined, stage: int, deadline: float) -> StageAnchor:
    last, told = "the time was over before anybody was asked for it", ""
    tell_at = time.monotonic() + PATIENCE_S
    while (now := time.monotonic()) < deadline:
        anchor, last = await _ask(place, stage, None, deadline)
        if anchor is not None:
            return anchor
        if now >= tell_at and last != told:
            told = last
            left_s = deadline - now
            logger.warning("stage %d: %s; waiting for %.0f s at most", stage, last, left_s)
        await asyncio.sleep(LOOK_PAUSE_S)
    raise EnvironmentFault(
        f"stage {stage}: no anchor to be had: {last}; try again later, or give more time with "
        "--timeout"
    )


async def _at_round(
    place: Joined, stage: int, round_number: int, deadline: float
) -> StageAnchor | None:
    """The anchor that stands on this round, None if nobody has it any more."""
    anchor, reason = await _ask(place, stage, round_number, deadline)
    if anchor is None:
        logger.info("stage %d: no anchor of round %d: %s", stage, round_number, reason)
    return anchor


async def _ask(
    place: Joined, stage: int, round_number: int | None, deadline: float
) -> tuple[StageAnchor | None, str]:
    """Ask the peers of a stage in turn, the longest chain first; the last reason if all fail."""
    client = Client(
        p2p=await place.dht.replicate_p2p(),
        namespace=averaging_prefix(place.run, stage),
        limit=UploadLimit(None),
        record_bytes=stage_record_bytes(place.manifest, stage),
    )
    found = place.swarm.read(claim_key(place.run, stage), ClaimRecord) or {}
    counting = that_count(found, place.manifest)
    claims = sorted(
        ((peer, claim) for peer, claim in counting.items() if claim.round >= 0),
        key=lambda item: (-item[1].round, -item[1].chain_tokens, item[0]),
    )
    last = nobody_holds(len(counting))
    for peer, claim in claims:
        try:
            limit_s = max(1.0, deadline - time.monotonic())
            asked = _from_peer(place, stage, client, peer, claim, round_number)
            return await asyncio.wait_for(asked, limit_s), ""
        except (ConnectionError, ValueError, asyncio.TimeoutError) as error:
            last = str(error) or type(error).__name__
            # another may give it; what is not sound is worth a look all the same
            level = logging.WARNING if isinstance(error, ValueError) else logging.INFO
            logger.log(level, "stage %d: %s gave no anchor: %s", stage, peer[-6:], error)
    return None, last


async def _from_peer(
    place: Joined,
    stage: int,
    client: Client,
    peer: str,
    claim: ClaimRecord,
    round_number: int | None,
) -> StageAnchor:
    """The anchor of the chain that a peer claims, after its last round or the one named.

    Raises ConnectionError, and ValueError (of several kinds) where what came is not sound.
    """
    manifest = place.manifest
    layout = stage_layout(manifest, stage)
    check = RecordCheck.of(place.run, stage, manifest, layout)
    anchor, momentum = torch.zeros(layout.numel), torch.zeros(layout.numel)
    with tempfile.TemporaryDirectory() as folder:
        log = RoundLog(Path(folder), manifest_digest=manifest.root, codec=check.codec)
        record: RoundRecord | None = None
        digest = claim.digest
        try:
            state = await catchup.fetch_state(
                client,
                peer,
                check=check,
                compute=asyncio.to_thread,
                after_round=-1,
                folder=Path(folder),
                anchor=anchor,
                momentum=momentum,
            )
            record = log.start_from(state.record, state.certificate)
            if state.round > claim.round:  # it went on after it wrote the claim
                digest = state.digest
        except ConnectionError:  # no state, so its log still reaches back to the initial weights
            module = build_stage(manifest.model, stage, manifest.stages, manifest.seed)
            anchor.copy_(flatten_parameters(module, layout))
        reach = await catchup.catch_up(
            client, log, peer, digest, check=check, compute=asyncio.to_thread
        )
        head = log.head()
        if head.digest != digest:
            raise RecordRefused("its log does not lead to the record that it claims")
        for number in reach.appended:
            following = log.read(number)
            if following is None:
                raise RecordRefused(f"round {number} vanished from the log")
            if round_number is not None and number > round_number:
                digest = following.previous
                break
            if following.anchor_before != anchor_sha256(anchor):
                raise RecordRefused(f"round {number} applies to another anchor")
            record = following
            average = record.average(check.codec)
            outer = outer_step(manifest, record.rules)
            outer.apply(anchor, momentum, average, anchor, momentum)
    if record is None or round_number not in (None, record.round):
        raise OtherRound("it has no anchor of that round")
    return StageAnchor(
        stage=stage,
        round=record.round,
        digest=digest,
        chain_tokens=record.chain_tokens,
        layout=layout,
        anchor=anchor,
    )


def stage_record_bytes(manifest: Manifest, stage: int) -> int:
    """The most bytes of a record of a stage, for who is no peer of it."""
    return max_record_bytes(stage_codec(manifest, stage_layout(manifest, stage)))
