"""A stage's chain from those who hold it: its newest records' headers for a listing, or all of it,
with certificates and states, to be replayed.

The chain is walked back from the record that the longest claim names. A record is named by its
digest, so it does not matter who gives it: whoever of the claimers has it. A bootstrap's archive
keeps more of it than peers do, and gives that to those who ask for `older` records.
"""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.keys import averaging_prefix, claim_key
from dilocox.dht.records import ClaimRecord
from dilocox.peer.certificate import MAX_CERTIFICATE_BYTES
from dilocox.peer.chain_list import ChainRound
from dilocox.peer.files import make_folder
from dilocox.peer.headers import fetch_header
from dilocox.peer.join import Joined
from dilocox.peer.kept_chain import KeptChain, KeptState
from dilocox.peer.layouts import stage_record_bytes
from dilocox.peer.record import RecordRefused, RoundRecord, digest_of
from dilocox.peer.record_check import RecordCheck
from dilocox.peer.record_folder import RecordFolder
from dilocox.peer.state_file import StateOffer, ask_for_state, download_state
from dilocox.peer.transport import Blob, Client, UploadLimit
from dilocox.peer.view import that_count

logger = logging.getLogger(__name__)

# what is wrong with a holder, or with the way to it
REFUSED = (ConnectionError, ValueError, asyncio.TimeoutError)


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
