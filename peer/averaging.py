"""What the trainer's process and the averaging process share: buffers, configuration, results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.peer.counts import BYTE_KINDS, REFUSALS, Counts
from dilocox.peer.memory import shared_zeros
from dilocox.peer.plan import stage_codec
from dilocox.peer.roundlog import RoundLog


class AveragerStuck(RuntimeError):
    """The averaging process did not answer within all its deadlines."""


@dataclass(frozen=True)
class StageBuffers:
    """Flat fp32 vectors in shared memory; of each pair one is current."""

    message: Tensor
    own: Tensor  # this peer's decoded contribution to the record that was applied last
    anchors: tuple[Tensor, Tensor]
    momenta: tuple[Tensor, Tensor]
    # counted since this peer started, by the averaging process:
    sent: Counts  # payload bytes by kind
    received: Counts  # likewise
    refused: Counts  # what other peers sent, by reason

    @classmethod
    def allocate(cls, numel: int) -> StageBuffers:
        """Six vectors of a stage's size."""
        vectors = [shared_zeros(numel, torch.float32) for _ in range(6)]
        return cls(
            message=vectors[0],
            own=vectors[1],
            anchors=(vectors[2], vectors[3]),
            momenta=(vectors[4], vectors[5]),
            sent=Counts(BYTE_KINDS, shared=True),
            received=Counts(BYTE_KINDS, shared=True),
            refused=Counts(REFUSALS, shared=True),
        )

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this peer sent since it started."""
        return self.sent.total


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """What the averaging process needs to know."""

    run: str
    stage: int
    manifest: Manifest
    layout: FlatLayout
    identity: Identity
    log_folder: Path
    snapshot_folder: Path  # its newest snapshot is served to joiners
    max_upload_bytes_per_s: float | None
    device: str  # as --device names it; this process may use it too
    bootstraps: tuple[str, ...] = ()  # peer ids; on their word strangers are dialled back


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The outer step of one record, ready in the buffers that are not current."""

    round: int
    digest: str
    anchor_sha256: str
    payload_bytes: int  # of the record's means
    seconds: float


def open_log(config: AveragerConfig) -> RoundLog:
    """The log of this peer's stage."""
    return RoundLog(
        config.log_folder,
        manifest_digest=config.manifest.root,
        codec=stage_codec(config.manifest, config.layout),
    )
