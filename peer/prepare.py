"""What a peer sets up before it trains: device, stage with weights, text, held-out windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import DataSpec, Manifest
from dilocox.dht.manifest_defaults import ENDINGS
from dilocox.peer.averaging import StageBuffers
from dilocox.peer.data import Corpus, held_out_digest, held_out_windows
from dilocox.peer.inner import InnerOptimizer
from dilocox.peer.journal import JournaledSend
from dilocox.peer.learner import LocalModel
from dilocox.peer.merge import Merge, MergeConfig
from dilocox.peer.snapshots import Snapshots
from dilocox.peer.tokens import check_vocabulary
from dilocox.pipeline.stage import build_stage, flatten_parameters

logger = logging.getLogger(__name__)


def local_model(
    manifest: Manifest,
    stage: int,
    layout: FlatLayout,
    buffers: StageBuffers,
    snapshots: Snapshots,
    device: torch.device,
) -> LocalModel:
    """The stage with its weights: those of the snapshot, or those of the manifest's seed.

    Anchor and momentum lie in the first of the shared buffers.
    """
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed, device)
    live = flatten_parameters(module, layout)
    optimizer = InnerOptimizer(module.named_parameters(), manifest.inner)
    rule = MergeConfig.of(
        manifest.outer.merge,
        rebase_weight=manifest.outer.rebase_weight,
        decay=manifest.codec.residual_decay,
        max_age=manifest.rounds.max_age,
    )
    if snapshots.found is not None:
        tensors, facts = snapshots.merge_state()
        buffers.anchors[0].copy_(tensors["anchor"])
        buffers.momenta[0].copy_(tensors["momentum"])
        tensors |= {"anchor": buffers.anchors[0], "momentum": buffers.momenta[0]}
        merge = Merge.from_state(rule, live, tensors, facts)
        optimizer.load_state_dict(snapshots.inner_state())
        logger.info("going on from the snapshot of round %d", merge.round)
    else:
        buffers.anchors[0].copy_(live)
        merge = Merge(
            rule,
            live,
            buffers.anchors[0],
            buffers.momenta[0],
            round_number=-1,
            digest=manifest.root,
        )
    if snapshots.sent_since:
        _start_over(merge, snapshots.sent_since)
    for send in merge.fly.values():
        buffers.message.copy_(send.message)
    snapshots.close()
    return LocalModel(
        layout=layout, stage=module, optimizer=optimizer, merge=merge, buffers=buffers
    )


def _start_over(merge: Merge, sent: Sequence[JournaledSend]) -> None:
    """Go on from the anchor: what was sent since the state was written is not to be sent again."""
    known = {send.round: send.tokens for send in sent if send.round >= 0}
    merge.start_over(known, max(send.trained for send in sent))
    logger.warning(
        "this peer was killed between a send (round %s) and the writing of its state: it goes on "
        "from the anchor of round %d; that send counts if its record holds it, and what was learnt "
        "besides is lost",
        max(known, default="unknown"),
        merge.round,
    )


@dataclass(frozen=True, kw_only=True)
class OwnData(DataSpec):
    """What `--data` names."""

    SOURCE = "--data"
    FORMAT = "their ending"


def own_data(data: DataSpec, option: str) -> DataSpec:
    """What `--data` names in place of the run's data: files, in the format of their ending, else of
    the run's, else text. All of it is this peer's: one part.
    """
    if not option:
        return data
    local = data.format if data.format in ("text", "json", "parquet") else "text"
    chosen = ENDINGS.get(Path(option).suffix, local)
    return replace(OwnData(**asdict(data)), source=option, format=chosen, parts=1)


def open_corpus(manifest: Manifest, option: str) -> Corpus:
    """The text to train on: the run's, or what `--data` names.

    Raises InvalidInput: there is none, or its tokenizer has more ids than the model has rows.
    """
    batch = manifest.batch
    corpus = Corpus(
        own_data(manifest.data, option),
        sequence_length=batch.sequence_length,
        microbatch_size=batch.microbatch_size,
        seed=manifest.seed,
    )
    check_vocabulary(manifest.data.tokenizer, corpus.tokenizer, manifest.model)
    return corpus


def held_out(manifest: Manifest) -> torch.Tensor:
    """The windows of the validation loss, of the run's data whatever this peer trains on."""
    found = held_out_digest(manifest.data)
    if manifest.data.held_out and found != manifest.data.held_out:
        logger.warning(
            "the held-out part here (%s) is not the run's (%s): validation losses of this peer "
            "do not compare with those of others; for the data `stdlib` use the operator's "
            "version of Python",
            found[:12],
            manifest.data.held_out[:12],
        )
    return held_out_windows(
        manifest.data, manifest.batch.sequence_length, manifest.data.held_out_windows
    )
