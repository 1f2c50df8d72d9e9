"""What the plan of a run asks of a peer of one stage: disk and traffic. The doctor shows it; a peer
that starts looks whether its disk has the room.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.peer.branch import ASIDE
from dilocox.peer.doctor_checks import Check, DiskNeeds, disk_check
from dilocox.peer.doctor_machine import disk_free
from dilocox.peer.files import bytes_below
from dilocox.peer.layouts import stage_layout
from dilocox.peer.plan import stage_codec
from dilocox.peer.snapshot import DAMAGED
from dilocox.pipeline.codecs import encoded_bytes
from dilocox.pipeline.partition import hidden_size

logger = logging.getLogger(__name__)

SNAPSHOT_VECTORS = 9  # anchor, momentum, weights, start, residual, a send's two, two moments
SNAPSHOTS_AT_ONCE = 2  # the old one goes when the new one is whole


@dataclass(frozen=True)
class StageNeeds:
    """What the plan of a run asks of a peer of one stage."""

    manifest: Manifest
    stage: int

    @cached_property
    def values(self) -> int:
        """Length of the stage's flat vector."""
        return self._layout.numel

    @cached_property
    def record_bytes(self) -> int:
        """Of a round record under the first ranks."""
        return sum(phase.mean.max_bytes(phase.numel) for phase in self._phases)

    @property
    def snapshot_bytes(self) -> int:
        """Of a whole one."""
        return SNAPSHOT_VECTORS * 4 * self.values

    @property
    def disk_bytes(self) -> int:
        """Snapshots and log."""
        rounds = self.manifest.rounds
        log_bytes = max(rounds.log_bytes, 4 * self.record_bytes)
        kept_bytes = min(rounds.records_kept * self.record_bytes, log_bytes)
        return SNAPSHOTS_AT_ONCE * self.snapshot_bytes + kept_bytes

    def exchange_bytes(self, members: int) -> int:
        """What a member moves each way: its parts to the others, and the mean of its own."""
        sent = sum(phase.send.max_bytes(phase.numel) for phase in self._phases)
        return (sent + self.record_bytes) * (members - 1) // members

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

    @cached_property
    def _phases(self) -> Any:
        codec = stage_codec(self.manifest, self._layout)
        return codec.phases(codec.first_ranks)


def disk_room(folder: Path, needs: StageNeeds) -> Check:
    """Whether the disk of a peer's folder of this stage has room for what is to come there."""
    # what a rollback put aside, or a damaged snapshot, stays beside all that the stage takes
    kept_aside = (*folder.glob(f"{ASIDE}*"), *folder.glob(f"snapshots/*{DAMAGED}"))
    aside = sum(bytes_below(each) for each in kept_aside)
    # what a snapshot that was cut off left goes when the next one is written
    cut_off = sum(bytes_below(each) for each in folder.glob("snapshots/*.partial"))
    held = bytes_below(folder) - aside
    return disk_check(
        str(folder),
        disk_free(folder),
        DiskNeeds(
            more_bytes=max(0, needs.disk_bytes - held),
            snapshot_bytes=max(0, needs.snapshot_bytes - cut_off),
        ),
    )


def check_disk(folder: Path, needs: StageNeeds) -> None:
    """Warn where the disk of a peer's folder has no room for what is to come; EnvironmentFault if
    not even one more snapshot fits.
    """
    check = disk_room(folder, needs)
    if check.status == "failed":
        raise EnvironmentFault(f"{check.text}: {check.mend}")
    if check.status == "warning":
        logger.warning("%s: %s", check.text, check.mend)
