"""The figures of a demo, from what its peers wrote.

Every stage has a chain of its own: rounds and tokens are those of stage 0, where a replica's tokens
count once; digests are compared among the peers of one stage.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.peer.watched import WatchedPeer


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The figures of a demo; losses in nats a byte, bytes of one peer and round at the mean.

    bytes_sent_per_round: for averages; bytes_fp16_per_round: what fp16 would have taken.
    bytes_uploaded_per_round: with the records and states that others, the bootstrap among them,
        fetched from peers.
    """

    stages: int
    replicas: int
    rounds_committed: int
    rounds_void: int
    val_loss_first: float | None
    val_loss_last: float | None
    val_loss_export: float | None
    tokens: int
    tokens_per_s: float
    waiting_share: float
    bytes_sent_per_round: float
    bytes_fp16_per_round: float
    bytes_uploaded_per_round: float
    digests_equal: bool
    seconds: float
    export: str


def demo_result(
    peers: Sequence[WatchedPeer], export: Path | None, export_loss: float | None, seconds: float
) -> DemoResult:
    """What these peers did; `export_loss` is that of the checkpoint in the folder `export`."""
    first = [peer for peer in peers if peer.stage == 0]
    of_run = [line for peer in first for line in peer.rounds]
    lines = [line for peer in peers for line in peer.rounds]
    losses = losses_of(peers)
    training_s = _mean([peer.training_s for peer in first])
    tokens = max((line["chain_tokens"] for line in of_run), default=0)
    last = None if export is None else exported_round(export)
    return DemoResult(
        stages=len({peer.stage for peer in peers}),
        replicas=len(first),
        rounds_committed=len({line["round"] for line in of_run}),
        rounds_void=max((peer.voids for peer in peers), default=0),
        val_loss_first=losses.get(-1),
        val_loss_last=None if last is None else losses.get(last),
        val_loss_export=export_loss,
        tokens=tokens,
        tokens_per_s=tokens / training_s if training_s else 0.0,
        waiting_share=_mean([peer.waiting_share for peer in peers]),
        bytes_sent_per_round=_mean(_sent_for_averages(peers)),
        bytes_fp16_per_round=_mean([line["fp16_bytes"] for line in lines]),
        bytes_uploaded_per_round=_mean([line["sent_bytes"] for line in lines]),
        digests_equal=_digests_equal(peers),
        seconds=seconds,
        export="" if export is None else str(export),
    )


def losses_of(peers: Sequence[WatchedPeer]) -> dict[int, float]:
    """The validation loss of each round's anchors, as heads reported it; -1 is the start."""
    return {number: loss for peer in peers for number, loss in peer.losses.items()}


def exported_round(folder: Path) -> int | None:
    """The round that all stages of an export stand on, None if they stand on several."""
    stages = json.loads((folder / "dilocox.json").read_text())["stages"]
    rounds = {int(stage["round"]) for stage in stages}
    return rounds.pop() if len(rounds) == 1 else None


def _digests_equal(peers: Sequence[WatchedPeer]) -> bool:
    """Whether peers of one stage never had different records or anchors of a round."""
    seen: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for peer in peers:
        for line in peer.rounds:
            key = (peer.stage, line["round"])
            seen.setdefault(key, set()).add((line["digest"], line["anchor_sha256"]))
    return all(len(found) == 1 for found in seen.values())


def _sent_for_averages(peers: Sequence[WatchedPeer]) -> list[int]:
    """By stage and round what a peer sent that took part, and served nobody meanwhile: the least.

    All members of a group send as much, up to a rounding.
    """
    least: dict[tuple[int, int], int] = {}
    for peer in peers:
        for line in peer.rounds:
            if line["outcome"] == "counted":
                key = (peer.stage, line["round"])
                least[key] = min(least.get(key, line["sent_bytes"]), line["sent_bytes"])
    return list(least.values())


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
