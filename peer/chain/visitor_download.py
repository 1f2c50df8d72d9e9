"""A stage's chain for the commands of a visitor, which is no peer: its newest records' headers for
a listing, all of it, with certificates and states, to be replayed, or the anchor it leads to.

The chain is walked back from the record that the longest claim names. A record is named by its
digest, so any claimer that has it may give it.

`download_anchors` brings the newest anchors of all stages, one after the other: the state of a
peer, and the records after it. Stages commit their rounds by themselves, and rounds pass while
anchors come, so the newest ones are of different rounds. Each stage is first asked for the round of
the one before it, which who has an older state can give. What still differs is asked for again
until all are of one round: only those were ever evaluated together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, reason_of
from dilocox.dht.files import make_folder
from dilocox.dht.join import Joined
from dilocox.dht.names import shown_peer
from dilocox.dht.records import ClaimRecord, averaging_prefix, claim_key
from dilocox.dht.rpc import REFUSED, Client
from dilocox.dht.swarm_view import believed_first, nobody_holds, that_count
from dilocox.peer.chain.chain_client import ChainClient, Limits, StateOffer
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import state_after
from dilocox.peer.chain.store import KeptChain, KeptState, RoundLog, Store
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.rounds.record import RecordRefused
from dilocox.peer.state_folder import LOG_FOLDER
from dilocox.pipeline.stage import stage_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClaimedChain:
    """A stage's chain, and the claims of its records by peer, those to be believed first.

    peers: how many of the stage are in view; some may have no record yet. witness: the archive's
    peer id. trusted: it, and the bootstraps of the invite. deadline: of all waits (monotonic).
    """

    chain: ChainClient
    claims: Mapping[str, ClaimRecord]
    peers: int
    deadline: float = math.inf
    witness: str = ""
    trusted: frozenset[str] = frozenset()

    @property
    def vouched(self) -> ClaimRecord | None:
        """What the archive claims, if anything."""
        return self.claims.get(self.witness)

    async def of_donors(self) -> Mapping[str, ClaimRecord]:
        """The claims of those whose newest state is taken: of all where the archive says nothing,
        else only of the contributors to what it vouches for (see ChainClient), and of bootstraps.
        """
        if self.vouched is None:
            return self.claims
        known = await self.chain.contributors(self.vouched.digest, self.witness) | self.trusted
        return {peer: claim for peer, claim in self.claims.items() if peer in known}

    @property
    def digests(self) -> list[str]:
        return list(dict.fromkeys(claim.digest for claim in self.claims.values()))

    def ends(self, digest: str) -> bool:
        """Whether the chain begins after this digest: it is the manifest's."""
        return digest == self.chain.check.root


NO_LIMITS = Limits(headers_s=math.inf, all_headers_s=math.inf, records_s=math.inf, stall_s=math.inf)


def counted_claims(joined: Joined, stage: int) -> dict[str, ClaimRecord]:
    """The claims of a stage's peers that count, also of peers that have no record yet; those to be
    believed first.
    """
    found = joined.swarm.read(claim_key(joined.run, stage), ClaimRecord) or {}
    return believed_first(that_count(found, joined.manifest), joined.witness)


def run_claims(joined: Joined) -> list[dict[str, ClaimRecord]]:
    """As `counted_claims`, of each stage, asked for at once."""
    keys = [claim_key(joined.run, stage) for stage in range(joined.manifest.stages)]
    found = joined.swarm.read_many(dict.fromkeys(keys, ClaimRecord))
    counted = [that_count(found[key] or {}, joined.manifest) for key in keys]
    return [believed_first(each, joined.witness) for each in counted]


async def claimed_chain(
    joined: Joined,
    stage: int,
    deadline: float = math.inf,
    *,
    older: bool = True,
    limits: Limits = NO_LIMITS,
) -> ClaimedChain:
    """What a stage's peers claim, over the network. All waits end at `deadline` (monotonic); by
    default no holder has less time than that, so that --timeout helps on a slow line. `older` and
    `limits` as for ChainClient.
    """
    manifest = joined.manifest
    check = RecordCheck(joined.run, stage, manifest, stage_layout(manifest, stage))
    client = Client(
        p2p=await joined.dht.replicate_p2p(),
        namespace=averaging_prefix(joined.run, stage),
        record_bytes=check.record_bytes,
    )
    counting = counted_claims(joined, stage)
    claims = {peer: claim for peer, claim in counting.items() if claim.round >= 0}
    chain = ChainClient(client, check, list(claims), older=older, deadline=deadline, limits=limits)
    return ClaimedChain(
        chain=chain,
        claims=claims,
        peers=len(counting),
        deadline=deadline,
        witness=joined.witness,
        trusted=joined.dht.bootstraps | {joined.witness} if joined.witness else frozenset(),
    )


async def list_chain(claimed: ClaimedChain) -> list[ChainRound]:
    """What there is of the chain, in its order, or came in time; nothing is checked.

    Raises:
        EnvironmentFault: nobody gives the records that are claimed, or the time is over before one.
    """
    found: list[ChainRound] = []
    for digest in claimed.digests:
        late = False
        try:
            async for told in claimed.chain.headers(digest, claimed.ends):
                found.append(told)
        except REFUSED as error:
            logger.info("the listing ends: %s", reason_of(error))
            late = time.monotonic() >= claimed.deadline
        except EnvironmentFault:
            if not found:
                raise
            late = True
        if found and late:
            logger.warning(
                "stage %d: the time is over: rounds before %d are not in the list; allow more with "
                "--timeout",
                claimed.chain.check.stage,
                found[-1].round,
            )
        if found:
            return found[::-1]
    raise _nobody(claimed)


async def download_chain(claimed: ClaimedChain, folder: Path) -> tuple[KeptChain, list[str]]:
    """All there is of the chain, in a folder, and what is wrong with the record before it, if
    any: one that is not sound is not walked past.

    With it come the oldest of the states that stand on it, unless it reaches back to the initial
    weights, and the newest.

    Raises:
        EnvironmentFault: nobody gives the records that are claimed, or the time is over.
    """
    log = Store(folder / LOG_FOLDER)
    make_folder(folder / LOG_FOLDER)
    flaws: list[str] = []
    previous = ""
    for digest in claimed.digests:
        try:
            async for fetched in claimed.chain.records(digest, claimed.ends):
                record, data = fetched.record, fetched.data
                await asyncio.to_thread(log.write, record.round, data, fetched.certificate)
                previous = record.previous
        except REFUSED as error:
            if type(error) is RecordRefused:
                flaws.append(str(error))
            else:
                logger.info("the download ends: %s", error)
        if log.rounds() or flaws:
            break
    if not log.rounds() and not flaws:
        raise _nobody(claimed)
    known = {entry.digest for entry in log.entries()}
    offers: list[StateOffer] = []
    for peer in claimed.claims:
        with suppress(*REFUSED):
            offers.append(await claimed.chain.offer(peer, known.__contains__))
    offers.sort(key=lambda offer: offer.round)
    oldest = [] if claimed.ends(previous) else offers[:1]
    states = [] if oldest else await _pinned(claimed.chain, claimed.claims, folder / "initial")
    for index, offer in enumerate([*oldest, *offers[len(oldest) :][-1:]]):
        try:
            states.append(await claimed.chain.download(offer, folder / f"state{index}"))
        except REFUSED as error:
            logger.warning("%s gave no state: %s", shown_peer(offer.peer), reason_of(error))
    stage = claimed.chain.check.stage
    return KeptChain(stage=stage, records=tuple(log.entries()), states=tuple(states)), flaws


async def _pinned(chain: ChainClient, holders: Iterable[str], folder: Path) -> list[KeptState]:
    """The initial weights of a run that starts from a checkpoint; a seed's need nobody."""
    for peer in holders if chain.check.manifest.initial.anchors else ():
        try:
            return [await chain.initial(peer, folder)]
        except REFUSED as error:
            logger.info("%s gave no initial weights: %s", shown_peer(peer), error)
    return []


def _nobody(claimed: ClaimedChain) -> EnvironmentFault:
    return EnvironmentFault(
        f"{len(claimed.claims)} peers claim records of this stage, none could be reached for one; "
        "try again, and see more with --log-level info"
    )


# ---- anchors -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Patience:
    """How download_anchors waits, in seconds.

    look_s: between two looks at the claims. told_s: before a person is told what is waited for.
    common_s: how long anchors of one round are looked for, once every stage has one, before those
        will do.
    """

    look_s: float = 1.0
    told_s: float = 20.0
    common_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class AnchorPlace:
    """Where in the chain of its stage an anchor stands: after the record of this digest."""

    stage: int
    round: int
    digest: str
    chain_tokens: int


@dataclass(frozen=True, kw_only=True)
class StageAnchor:
    """The anchor of one stage."""

    place: AnchorPlace
    layout: FlatLayout
    anchor: Tensor  # [layout.numel] fp32


class OtherRound(ConnectionError):
    """The peer cannot give the anchor of that round."""


class NotInTime(EnvironmentFault):
    """Nobody gave a stage's anchor within the time; a full disk is another fault."""


def download_anchors(
    joined: Joined,
    take: Callable[[StageAnchor], None],
    *,
    folder: Path,
    timeout_s: float,
    have: Iterable[AnchorPlace] = (),
    archive_first: bool = False,
    patience: Patience | None = None,
) -> list[AnchorPlace]:
    """Give the newest anchor of every stage to `take`, of one round if such are to be had.

    One anchor is in memory at a time. A stage comes again where the others have only an anchor of
    another round: its last one counts.

    Args:
        folder: for the states while they are downloaded, twice the size of an anchor.
        have: anchors that were taken already; they do if the others are to be had of their round.
        archive_first: ask the operator's archive before all others.

    Returns where the anchors stand, by stage.

    Raises:
        EnvironmentFault: nobody gave a sound one within the time.
    """
    download = _Download(
        joined=joined,
        take=take,
        folder=folder,
        deadline=time.monotonic() + timeout_s,
        archive_first=archive_first,
        patience=patience or Patience(),
    )
    return asyncio.run(download.run({place.stage: place for place in have}))


@dataclass(frozen=True, kw_only=True)
class _Download:
    joined: Joined
    take: Callable[[StageAnchor], None]
    folder: Path
    deadline: float
    archive_first: bool
    patience: Patience
    lacking: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Rounds, with their stage before them, that its chain does not have."""

    async def run(self, found: dict[int, AnchorPlace]) -> list[AnchorPlace]:
        stages = range(self.joined.manifest.stages)
        give_up, last = math.inf, dict[int, AnchorPlace]()  # of each stage, as it was taken
        if len(found) == len(stages):  # somebody must be asked whether they are the newest
            del found[0]
        while True:
            try:
                for stage in stages:
                    if stage not in found:
                        found[stage] = await self._next(stage, [*found.values()])
            except NotInTime:
                if len(last) < len(stages):
                    raise
                return self._different(last | found)
            give_up = min(give_up, self.deadline, time.monotonic() + self.patience.common_s)
            oldest = min(place.round for place in found.values())
            for stage in stages:
                if found[stage].round == oldest:
                    continue
                if (stage, oldest) not in self.lacking:
                    place, _ = await self._ask(stage, oldest)
                    found[stage] = place or found[stage]
                if found[stage].round != oldest:
                    break
            else:
                return [found[stage] for stage in stages]
            if time.monotonic() > give_up:
                return self._different(found)
            await asyncio.sleep(self.patience.look_s)
            last = found
            found = {stage: place for stage, place in found.items() if place.round > oldest}

    def _different(self, found: Mapping[int, AnchorPlace]) -> list[AnchorPlace]:
        places = [found[stage] for stage in sorted(found)]
        rounds = ", ".join(str(place.round) for place in places)
        logger.warning("the anchors of the stages are of different rounds: %s", rounds)
        return places

    async def _next(self, stage: int, before: Sequence[AnchorPlace]) -> AnchorPlace:
        """The anchor of the round of the one that came last, if it is to be had; else the newest.

        Of those before, the last one's: where it is another round than the others', theirs was not
        to be had any more, or not yet.
        """
        if before:
            place, _ = await self._ask(stage, before[-1].round)
            if place is not None:
                return place
        return await self._newest(stage)

    async def _newest(self, stage: int) -> AnchorPlace:
        last, told = "the time was over before anybody was asked for it", ""
        tell_at = time.monotonic() + self.patience.told_s
        while (now := time.monotonic()) < self.deadline:
            place, last = await self._ask(stage, None)
            if place is not None:
                return place
            if now >= tell_at and last != told:
                told = last
                left_s = self.deadline - now
                logger.warning("stage %d: %s; waiting for %.0f s at most", stage, last, left_s)
            await asyncio.sleep(self.patience.look_s)
        raise NotInTime(
            f"stage {stage}: no anchor to be had: {last}; try again later, or give more time with "
            "--timeout"
        )

    async def _ask(self, stage: int, round_number: int | None) -> tuple[AnchorPlace | None, str]:
        """Ask the peers of a stage in turn, the longest chain first, and give the anchor away, that
        of the round if the chain has one; the last reason if all fail.
        """
        # one holder among several: what an archive keeps besides, and more time, is not worth
        # the wait
        claimed = await claimed_chain(self.joined, stage, older=False, limits=Limits())
        last = nobody_holds(claimed.peers)
        donors = list((await claimed.of_donors()).items())
        if self.archive_first:
            donors.sort(key=lambda donor: donor[0] != claimed.witness)
        for peer, claim in donors:
            if claimed.vouched is not None and claim.digest != claimed.vouched.digest:
                continue
            try:
                if round_number is not None and claim.round < round_number:
                    raise OtherRound("it is not there yet")
                limit_s = max(1.0, self.deadline - time.monotonic())
                claimed.chain.holders = [peer]
                asked = self._from_peer(claimed, peer, claim, round_number)
                found = await asyncio.wait_for(asked, limit_s)
            except REFUSED as error:
                last = reason_of(error)
                # another may give it; what is not sound is worth a look all the same
                level = logging.WARNING if isinstance(error, ValueError) else logging.INFO
                logger.log(level, "stage %d: %s gave no anchor: %s", stage, shown_peer(peer), error)
                continue
            if round_number is not None and found.place.round != round_number:
                self.lacking.add((stage, round_number))
            await asyncio.to_thread(self.take, found)
            return found.place, ""
        return None, last

    async def _from_peer(
        self, claimed: ClaimedChain, peer: str, claim: ClaimRecord, round_number: int | None
    ) -> StageAnchor:
        """The anchor of the chain that a peer claims, after the round named or, where that is none
        or the chain lacks it, its last one.

        Raises ConnectionError, and ValueError (of several kinds) where what came is not sound.
        """
        chain, check = claimed.chain, claimed.chain.check
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            log = RoundLog(folder / LOG_FOLDER, manifest_digest=check.root, codec=check.codec)
            digest, states, newer, later = claim.digest, list[KeptState](), False, False
            with suppress(ConnectionError):  # no state: its log reaches back to the initial weights
                offer = await chain.offer(peer)
                newer = offer.round > claim.round  # it went on after it wrote the claim
                later = round_number is not None and offer.round > round_number
                if not later and (not newer or claimed.vouched is None):
                    states.append(await chain.download(offer, folder))
                    log.start_from(offer.record_bytes, offer.certificate)
                    digest = offer.digest if newer else digest
            if newer and claimed.vouched is not None:
                raise OtherRound("its state is newer than what the operator's archive vouches for")
            if later:
                raise OtherRound("its state is of a later round")
            states = states or await _pinned(chain, [peer], folder)
            await chain.catch_up(log, digest)
            if log.head().digest != digest:
                raise RecordRefused("its log does not lead to the record that it claims")
            entries = log.entries()
            if round_number in [each.round for each in entries]:
                entries = [each for each in entries if each.round <= round_number]
            if not entries or (last := entries[-1].header()) is None:
                raise OtherRound("its records are gone")
            flaws, vectors = await asyncio.to_thread(
                state_after, self.joined.manifest, self.joined.run, check.stage, entries, states
            )
            if flaws or vectors is None:
                raise RecordRefused(flaws[0] if flaws else "its state is not of its records")
        place = AnchorPlace(
            stage=check.stage,
            round=last.round,
            digest=entries[-1].digest,
            chain_tokens=last.chain_tokens,
        )
        return StageAnchor(place=place, layout=check.layout, anchor=vectors[0])
