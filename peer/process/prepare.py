"""What a peer sets up before it trains: stage with weights, text, held-out windows; and what its
stage takes (`StageNeeds`): a peer that starts looks whether its machine has the room.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import bytes_below
from dilocox.dht.manifest import DataSpec, Manifest
from dilocox.dht.manifest_sections import LONGEST, format_of
from dilocox.peer.averaging.averager import StageBuffers
from dilocox.peer.chain.snapshot_files import DAMAGED, earlier_than_newest
from dilocox.peer.chain.store import log_limits
from dilocox.peer.memory_and_disk import (
    Check,
    DiskNeeds,
    MemoryNeeds,
    check_memory,
    disk_check,
    disk_free,
    size,
)
from dilocox.peer.options import PeerOptions
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.state_folder import ASIDE, SNAPSHOT_FOLDER
from dilocox.peer.training.activations import activation_bytes
from dilocox.peer.training.data import Corpus, check_tokenizer, held_out_digest, held_out_windows
from dilocox.peer.training.data_mixture import each_source
from dilocox.peer.training.data_sources import find_files
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.peer.training.loop import LocalModel
from dilocox.peer.training.merge import Merge, MergeConfig
from dilocox.peer.training.offload import OffloadedOptimizer
from dilocox.peer.training.snapshot_taking import JournaledSend, Snapshots
from dilocox.pipeline.frames import encoded_bytes
from dilocox.pipeline.partition import hidden_size, plan_stages
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout
from dilocox.pipeline.stage_worker import GPU_LOGITS_AT_ONCE

logger = logging.getLogger(__name__)


def local_model(
    manifest: Manifest,
    stage: int,
    layout: FlatLayout,
    buffers: StageBuffers,
    snapshots: Snapshots,
    device: torch.device,
    *,
    offload: bool = False,
    start: Callable[[torch.Tensor, torch.Tensor], tuple[int, str]] | None = None,
) -> LocalModel:
    """The stage with its weights: those of the snapshot, or those of the manifest's seed. Anchor,
    momentum and what is sent lie in the shared buffers.

    offload: weights and optimizer stay on the CPU, whatever the device. start: where the run starts
    from a checkpoint. Without a snapshot it puts anchor and momentum into these two vectors, and
    says which round and record they stand on.
    """
    built_on = "cpu" if offload else device
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed, built_on)
    live = flatten_parameters(module, layout)
    if offload:
        optimizer = OffloadedOptimizer(module, manifest.inner, device)
    else:
        optimizer = InnerOptimizer(module.named_parameters(), manifest.inner)
    rule = MergeConfig.of(manifest.outer, manifest.codec, manifest.rounds)
    if snapshots.found:
        tensors, facts = snapshots.merge_state()
        buffers.anchor.copy_(tensors["anchor"])
        buffers.momentum.copy_(tensors["momentum"])
        tensors |= {"anchor": buffers.anchor, "momentum": buffers.momentum}
        merge = Merge.from_state(rule, live, tensors, facts, buffers.message)
        optimizer.load_state_dict(snapshots.inner_state())
        logger.info("continuing from the snapshot of round %d", merge.round)
    else:
        number, digest = -1, manifest.root
        if start is not None:
            number, digest = start(buffers.anchor, buffers.momentum)
            live.copy_(buffers.anchor)
            snapshots.soon()  # or a kill costs the download again
        else:
            buffers.anchor.copy_(live)
        merge = Merge(
            rule,
            live,
            buffers.anchor,
            buffers.momentum,
            round_number=number,
            digest=digest,
            message=buffers.message,
        )
    if snapshots.sent_since:
        _start_over(merge, snapshots.sent_since)
    snapshots.close()
    return LocalModel(
        layout=layout, stage=module, optimizer=optimizer, merge=merge, buffers=buffers
    )


def _start_over(merge: Merge, sent: Sequence[JournaledSend]) -> None:
    """Go on from the anchor: what was sent since the state was written is not to be sent again."""
    known = {send.round: send.tokens for send in sent if send.round >= 0}
    merge.start_over(known, max(send.trained for send in sent))
    logger.warning(
        "this peer was killed after a send (round %s) that its snapshot does not know: it goes on "
        "from the anchor of round %d; that send counts if its record holds it, and what was learnt "
        "since is lost",
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
    chosen = format_of(option) or local
    return replace(OwnData(**asdict(data)), source=option, format=chosen, parts=1, more=())


def open_corpus(manifest: Manifest, option: str) -> Corpus:
    """The text to train on: the run's, or what `--data` names.

    Raises InvalidInput: there is none, or the tokenizer is not the run's or does not fit the model.
    """
    batch = manifest.batch
    corpus = Corpus(
        own_data(manifest.data, option),
        sequence_length=batch.sequence_length,
        microbatch_size=batch.microbatch_size,
        seed=manifest.seed,
    )
    check_tokenizer(manifest.data, corpus.tokenizer, manifest.model)
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


SNAPSHOT_VECTORS = 8  # anchor, momentum, weights, start, two moments; a send's two, or residual
FAST_LINK = 12.5e6  # bytes a second, of a volunteer's link that is better than most
SNAPSHOTS_AT_ONCE = 2  # the old one goes when the new one is whole
HELD_ENCODED = 4  # times the bytes of a record: own parts, those of others, means, the record
EXPERTS_SHARE = 0.25  # of the vectors on the device: activations of a family with experts, roughly


@dataclass(frozen=True)
class StageNeeds:
    """What the plan of a run asks of a peer of one stage. recompute: see `StagePasses`. offload:
    see `OffloadedOptimizer`.
    """

    manifest: Manifest
    stage: int
    recompute: bool = False
    offload: bool = False

    @cached_property
    def values(self) -> int:
        """Length of the stage's flat vector."""
        return self._layout.numel

    @cached_property
    def record_bytes(self) -> int:
        """Of a round record under the first ranks."""
        codec = stage_codec(self.manifest, self._layout)
        phases = codec.phases(codec.first_ranks)
        return sum(phase.codec.encoded_bytes(phase.numel) for phase in phases)

    @cached_property
    def memory(self) -> MemoryNeeds:
        """Takes seconds for a large stage, and touches CUDA: see `chosen_device`."""
        roughly = round(EXPERTS_SHARE * 4 * 4 * self.values)
        manifest, stage, recompute = self.manifest, self.stage, self.recompute
        on_cpu = activation_bytes(manifest, stage, recompute=recompute)
        on_gpu = on_cpu and activation_bytes(
            manifest,
            stage,
            recompute=recompute,
            precision=manifest.inner.precision,
            logits_at_once=GPU_LOGITS_AT_ONCE,
        )
        return MemoryNeeds(
            values=self.values,
            activations=roughly if on_cpu is None else on_cpu.peak,
            gpu_activations=roughly if on_gpu is None else on_gpu.peak,
            encoded=HELD_ENCODED * self.record_bytes,
            kept=roughly if on_cpu is None else on_cpu.kept,
            gpu_kept=roughly if on_gpu is None else on_gpu.kept,
            offload=self.offload,
        )

    @property
    def snapshot_bytes(self) -> int:
        return SNAPSHOT_VECTORS * 4 * self.values

    @property
    def disk_bytes(self) -> int:
        """Snapshots and log."""
        count, log_bytes = log_limits(self.manifest.rounds, self.record_bytes)
        kept_bytes = min(count * self.record_bytes, log_bytes)
        return SNAPSHOTS_AT_ONCE * self.snapshot_bytes + kept_bytes

    @cached_property
    def codec_s(self) -> float:
        """What a modest core computes for one exchange under the first ranks."""
        codec = stage_codec(self.manifest, self._layout)
        factors = codec.low_rank(codec.first_ranks)
        return 0.0 if factors is None else sum(factors.core_seconds())

    def exchange_bytes(self, members: int) -> int:
        """What a member moves each way: its parts to the others, and the mean of its own."""
        return 2 * self.record_bytes * (members - 1) // members

    def least_exchange_s(self, bytes_per_s: float) -> float:
        """The shortest `deadlines.exchange_s` with which a large group's exchange could end over
        such links.
        """
        moved = self.exchange_bytes(self.manifest.rounds.group_size)
        # members' codecs have their own time, up to the longest exchange
        return max(moved / bytes_per_s, self.codec_s / (LONGEST - 1))

    def link_bytes_per_token(self) -> float:
        """What it sends its neighbours at least for each token; what it gets is as much."""
        batch, stages = self.manifest.batch, self.manifest.stages
        neighbours = (self.stage > 0) + (self.stage < stages - 1)
        codec = self.manifest.pipeline.codec
        shape = batch.microbatch_size, batch.sequence_length, hidden_size(self.manifest.model)
        payload = encoded_bytes("int4" if codec == "auto" else codec, shape)
        return neighbours * payload / (shape[0] * shape[1])

    @cached_property
    def _layout(self) -> FlatLayout:
        return stage_layout(self.manifest, self.stage)


def memory_of_stages(
    manifest: Manifest, *, recompute: bool = False, offload: bool = False
) -> list[MemoryNeeds]:
    """Of a peer of each stage; of those in the middle, the equally large are taken as alike."""
    found: dict[tuple[bool, bool, int], MemoryNeeds] = {}
    needed: list[MemoryNeeds] = []
    for stage, plan in enumerate(plan_stages(manifest.model, manifest.stages)):
        kind = plan.is_first, plan.is_last, plan.num_parameters
        if kind not in found:
            needs = StageNeeds(manifest, stage, recompute=recompute, offload=offload)
            found[kind] = needs.memory
        needed.append(found[kind])
    return needed


def fewest_stages(
    cut: Callable[[int], Manifest], most: int, fit: Callable[[Sequence[MemoryNeeds]], bool]
) -> int | None:
    """The least number of stages, up to `most`, that fit the machines; None where none does. cut:
    the run in so many."""
    for stages in range(1, most + 1):
        manifest = cut(stages)
        try:
            plans = plan_stages(manifest.model, stages)
        except InvalidInput:  # it has no more layers
            return None
        vectors = MemoryNeeds(values=max(each.num_parameters for each in plans))
        if fit([vectors]) and fit(memory_of_stages(manifest)):  # the latter is seconds of work
            return stages
    return None


def stage_kinds(manifest: Manifest) -> list[int]:
    """A stage of each kind: the first, the last, and one between, where all are nearly alike."""
    return sorted({0, min(1, manifest.stages - 1), manifest.stages - 1})


def check_deadlines(manifest: Manifest) -> None:
    """Raise InvalidInput if an exchange could not end in time, even on a link of 100 Mbit/s."""
    given_s = manifest.deadlines.exchange_s
    for stage in stage_kinds(manifest):
        needs = StageNeeds(manifest, stage)
        if (least_s := needs.least_exchange_s(FAST_LINK)) > given_s:
            moved = needs.exchange_bytes(manifest.rounds.group_size)
            raise InvalidInput(
                f"deadlines.exchange_s is {given_s:g}; in an exchange of stage {stage} a peer "
                f"moves {size(moved)} each way and computes for {needs.codec_s:.0f} s: set it to "
                f"{math.ceil(least_s)} at least, which takes links of 100 Mbit/s, or to more for "
                "slower ones; or cut the model into more stages"
            )


def disk_room(folder: Path, needs: StageNeeds) -> Check:
    """Whether the disk of a peer's folder of this stage has room for what is to come there."""
    # what a rollback put aside, or a damaged snapshot, stays beside all that the stage takes
    kept_aside = (*folder.glob(f"{ASIDE}*"), *folder.glob(f"{SNAPSHOT_FOLDER}/*{DAMAGED}"))
    aside = sum(bytes_below(each) for each in kept_aside)
    # half a snapshot, and one that a newer one was to replace, go at the start
    going = (
        *folder.glob(f"{SNAPSHOT_FOLDER}/*.partial"),
        *earlier_than_newest(folder / SNAPSHOT_FOLDER),
    )
    held = bytes_below(folder) - aside
    check = disk_check(
        str(folder),
        disk_free(folder),
        DiskNeeds(
            more_bytes=max(0, needs.disk_bytes - held),
            snapshot_bytes=max(0, needs.snapshot_bytes - sum(map(bytes_below, going))),
        ),
    )
    if not aside or check.status == "ok":
        return check
    names = " and ".join(str(each.relative_to(folder)) for each in kept_aside)
    return replace(check, remedy=f"{check.remedy}; {names} there may be deleted: {size(aside)}")


def check_text(data: DataSpec, option: str) -> None:
    """Raise InvalidInput where a head would not find its text: the run's, for the validation, and
    what `--data` names.
    """
    for spec in (*each_source(data), *each_source(own_data(data, option))):
        if spec.format not in ("stdlib", "hub"):
            find_files(spec)


def unfit(
    options: PeerOptions, manifest: Manifest, folder: Path, stage: int, device: torch.device
) -> str:
    """Why this machine cannot host a stage, whose folder that would be; empty if it can, as far as
    can be told before.
    """
    needs = StageNeeds(manifest, stage, recompute=options.recompute, offload=options.offload)
    # with room for one snapshot alone it would move, and not be let in at its next start
    if (room := disk_room(folder, needs)).status != "ok":
        return room.text
    try:  # what is free now counts this peer's own, which it gives back
        check_memory(needs.memory, options.memory_limit_bytes, device)
        if stage == 0:
            check_text(manifest.data, options.data)
    except (InvalidInput, RuntimeError) as error:  # CUDA's faults are the second
        return str(error)
    return ""


def check_disk(folder: Path, needs: StageNeeds) -> None:
    """Warn where the disk of a peer's folder has no room for what is to come; EnvironmentFault if
    not even one more snapshot fits.
    """
    check = disk_room(folder, needs)
    if check.status == "failed":
        raise EnvironmentFault(f"{check.text}: {check.remedy}")
    if check.status == "warning":
        logger.warning("%s: %s", check.text, check.remedy)
