"""Records as they might stand in the DHT, for the tests of what peers make of them."""

from __future__ import annotations

from typing import Any

from dilocox.dht.records import BellRecord, ReplicaRecord, StageRecord


def stage_record(state: Any = "spare", **fields: Any) -> StageRecord:
    plain: dict[str, Any] = {
        "round": 1,
        "replica": "",
        "inner_steps": 100,
        "tokens": 0,
        "tokens_per_s": 1.0,
        "client_mode": False,
        "voids": 0,
        "version": "1",
        "addresses": (),
        "blocked": "",
    }
    return StageRecord(state=state, **plain | fields)


def in_replica(head: str, **fields: Any) -> StageRecord:
    return stage_record("training", replica=head, **fields)


def replica_record(*members: str, **fields: Any) -> ReplicaRecord:
    plain: dict[str, Any] = {
        "epoch": 0,
        "round": 0,
        "inner_step": 3,
        "step_s": 1.0,
        "tokens_per_s": 100.0,
        "train_loss": None,
        "val_loss": None,
        "val_round": -1,
        "codec": "bf16",
        "last_fault": "",
    }
    return ReplicaRecord(members=members or ("me",), **plain | fields)


def bell_record(
    finished_at: float, times: tuple[float, float] | None = None, **fields: Any
) -> BellRecord:
    """times: when the grace ends and when the group meets, if they are known."""
    send_after, scheduled_at = times or (None, None)
    plain: dict[str, Any] = {"round": 0, "round_s": 40.0}
    return BellRecord(
        finished_at=finished_at, send_after=send_after, scheduled_at=scheduled_at, **plain | fields
    )
