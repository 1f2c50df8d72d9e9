"""The newest anchors of all stages, for somebody who is no peer: state from one, records after it.

Stages commit their rounds by themselves, so the newest anchors are of different rounds for a
moment. They are asked for again until all are of one round: only those were ever evaluated
together.
"""

# hivemind carries no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.keys import averaging_prefix, claim_key
from dilocox.dht.records import ClaimRecord
from dilocox.peer import catchup
from dilocox.peer.join import Joined
from dilocox.peer.layouts import stage_layout, stage_record_bytes
from dilocox.peer.outer import anchor_sha256
from dilocox.peer.plan import outer_step
from dilocox.peer.record import RecordRefused, RoundRecord
from dilocox.peer.roundlog import RoundLog
from dilocox.peer.transport import Client, UploadLimit
from dilocox.peer.view import nobody_holds, that_count
from dilocox.pipeline.stage import build_stage, flatten_parameters

logger = logging.getLogger(__name__)

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
    check = catchup.RecordCheck.of(place.run, stage, manifest, layout)
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
