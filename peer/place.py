"""Which peer this is, and where its training loop stands: what the coordinator's parts share."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import Manifest
from dilocox.dht.reach import Reachability


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which peer this is, in which run."""

    me: str
    run: str
    stage: int
    manifest: Manifest
    layout: FlatLayout
    addresses: tuple[str, ...]
    client_mode: bool
    memory_limit_bytes: float | None
    reachability: Reachability = "unknown"
    reached_by_others: bool = False  # not only by a bootstrap


@dataclass(frozen=True, kw_only=True)
class LoopProgress:
    """Where the training loop is, as it says after every inner step.

    head: of the replica that this peer is in, empty where it is in none.
    members: by stage, of the replica that this peer leads; empty where it leads none.
    blocked: why this peer does not train, or empty.
    started_over: it gave up all that it had learnt, and has taken no inner step since.
    """

    inner_step: int = 0
    unsent_tokens: int = 0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    val_round: int = -1
    waiting_share: float = 0.0  # of its last round
    compression_error: float | None = None  # of its newest message in a round
    position: int = 0  # in the data part
    head: str = ""
    members: tuple[str, ...] = ()
    epoch: int = 0
    codec: str = ""
    last_fault: str = ""
    blocked: str = ""
    started_over: bool = False
