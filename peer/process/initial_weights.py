"""The initial weights of a run that starts from a checkpoint: pinned, kept for others, and taken.

The operator's bootstrap reads the checkpoint, a stage at a time: the manifest names the sha256 of
each stage's anchor, and the archive keeps it as a state of round -1, for as long as the run. A peer
that begins reads its stage's tensors itself where the checkpoint is within its reach and is the
pinned one. Otherwise it takes a state like any joiner: the newest of its stage, and of a stage that
has none yet the one of round -1, whose anchor must have the pinned sha256.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dilocox.dht.errors import DilocoxError, EnvironmentFault, InvalidInput, reason_of
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import shown_peer
from dilocox.dht.rpc import REFUSED, LoopThread, PeerBusy
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.chain.chain_client import STATE_LIMIT_S, ChainEnd, Limits, NoState
from dilocox.peer.chain.rollback import STATE_NAME, from_start
from dilocox.peer.chain.snapshot_files import (
    check_state,
    load_state,
    made_whole,
    write_state,
)
from dilocox.peer.chain.store import INITIAL_NAME, KeptState, archive_folder, kept_state
from dilocox.peer.chain.visitor_download import ClaimedChain, claimed_chain
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.pipeline.pretrained import Checkpoint

logger = logging.getLogger(__name__)

WAIT_S = 300.0  # until somebody gives them, or says that it has no time now
LOOK_S = 2.0


def pinned(manifest: Manifest) -> Manifest:
    """The manifest with the digests of its checkpoint's weights, if it starts from one; raises as
    `Checkpoint.stage`.
    """
    initial = manifest.initial
    if not initial.source:
        return manifest
    logger.info("reading the checkpoint %s: a large one takes minutes", initial.source)
    checkpoint, stages = Checkpoint(initial.source), manifest.stages
    vectors = (checkpoint.stage(manifest.model, stages, stage) for stage in range(stages))
    return replace(
        manifest, initial=replace(initial, anchors=tuple(anchor_sha256(each) for each in vectors))
    )


def archive_initial(state: Path, run: str, manifest: Manifest) -> None:
    """Put the initial weights of each stage where a bootstrap's archive gives them to others; what
    is there and whole stays. Raises as `Checkpoint.stage`, EnvironmentFault if the disk is full.
    """
    for stage in range(len(manifest.initial.anchors)):
        folder = archive_folder(state, run, manifest) / f"stage{stage}" / INITIAL_NAME
        try:
            logger.info("stage %d: looking at the initial weights that are kept", stage)
            whole = _is_whole(folder, manifest)
        except (ValueError, OSError, InvalidInput) as error:
            logger.warning("%s: damaged (%s), made anew of the checkpoint", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _write(folder, manifest, stage)
            except InvalidInput as unreadable:  # nobody needs them but to replay the whole chain
                logger.error("alarm: stage %d has no initial weights: %s", stage, unreadable)
        else:
            if not whole:
                _write(folder, manifest, stage)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the state is there; reads it. Raises ValueError where it is not what it was."""
    kept = kept_state(folder)
    if kept is None:
        return False
    check_state(kept.file.parent)
    if (kept.round, kept.digest) != (-1, manifest.root):
        raise ValueError(f"it is said to be of round {kept.round}, after {kept.digest[:12]}")
    return True


def _write(folder: Path, manifest: Manifest, stage: int) -> None:
    anchor = _read(manifest, stage)
    with made_whole(folder / STATE_NAME) as partial:
        write_state(partial, -1, manifest.root, anchor, torch.zeros_like(anchor))


def _read(manifest: Manifest, stage: int) -> Tensor:
    """From the checkpoint, [numel] fp32; InvalidInput also where it is not the pinned one."""
    source = manifest.initial.source
    anchor = Checkpoint(source).stage(manifest.model, manifest.stages, stage)
    found, wanted = anchor_sha256(anchor), manifest.initial.anchors[stage]
    if found != wanted:
        raise InvalidInput(
            f"{source}: the weights of stage {stage} have the digest {found[:12]}, the run began "
            f"with {wanted[:12]}; put the checkpoint there that the run began with"
        )
    return anchor


def load_initial(
    local: LocalPeer, anchor: Tensor, momentum: Tensor, *, wait_s: float = WAIT_S
) -> tuple[int, str]:
    """Fill these vectors, [numel] fp32, with what a peer begins with that has no snapshot; the
    round and the digest that they stand on.

    wait_s: for a peer that gives them. Raises EnvironmentFault if none does in time.
    """
    try:
        anchor.copy_(_read(local.manifest, local.stage))
        return -1, local.manifest.root
    except DilocoxError as error:
        logger.info("the initial weights cannot be made here (%s): taking those of others", error)
    thread = LoopThread("initial weights", p2p=local.dht.replicate_p2p)
    thread.start()
    try:
        kept = thread.ask(_taken(local, wait_s), STATE_LIMIT_S)
    except ConnectionError as error:
        raise EnvironmentFault(f"the initial weights did not come: {error}; try again") from error
    finally:
        thread.close()
    load_state(kept.file, anchor, momentum)
    kept.file.unlink()
    return kept.round, kept.digest


async def _taken(local: LocalPeer, wait_s: float) -> KeptState:
    """From the first peer that gives them."""
    bootstraps = local.options.invite.peer_ids
    give_up, last = time.monotonic() + wait_s, "nobody was asked"
    while time.monotonic() < give_up:
        claimed = await claimed_chain(local, local.stage, older=False, limits=Limits())
        donors = {*await claimed.of_donors(), *bootstraps}
        for peer in dict.fromkeys((*claimed.claims, *bootstraps)):
            try:
                return await _from(local, claimed, peer, newer=peer in donors)
            except REFUSED as error:
                if isinstance(error, PeerBusy):  # it has them, and others take them now
                    give_up = time.monotonic() + wait_s
                last = reason_of(error)
                logger.info("no initial weights from %s: %s", shown_peer(peer), last)
        await asyncio.sleep(LOOK_S)
    raise EnvironmentFault(
        f"nobody gives the initial weights of stage {local.stage} ({last}): the operator's "
        f"bootstrap must run; or put the checkpoint at {local.manifest.initial.source!r}"
    )


async def _from(local: LocalPeer, claimed: ClaimedChain, peer: str, *, newer: bool) -> KeptState:
    """A newer state that the witness vouches for saves the records before it, unless those from the
    first one on are here already. newer: whether one of this peer's would be believed.
    """
    log, folder = local.open_log(), local.folder / "incoming"
    chain, told = claimed.chain, claimed.vouched
    vouched = told is not None or not local.witness
    if newer and vouched and not from_start(log.entries(), local.manifest):
        with suppress(NoState):
            offer = await chain.offer(peer)
            if told is not None:
                end = ChainEnd(digest=told.digest, round=told.round, teller=local.witness)
                await chain.check_leads_to(end, offer)
            kept = await chain.download(offer, folder)
            if log.find(kept.digest) is None:  # else it goes on here, and nobody else may have that
                await asyncio.to_thread(log.start_from, offer.record_bytes, offer.certificate)
            return kept
    return await chain.initial(peer, folder)
