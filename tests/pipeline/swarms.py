"""Records as they might stand in the DHT, for the tests of what peers make of them.

They are partials, no functions of any names: pyright finds a field that is no more, also in tests
that are run seldom.
"""

from __future__ import annotations

from functools import partial

from dilocox.dht.records import BellRecord, ReplicaRecord, StageRecord

stage_record = partial(
    StageRecord,
    state="spare",
    round=1,
    replica="",
    inner_steps=100,
    tokens=0,
    tokens_per_s=1.0,
    client_mode=False,
    voids=0,
    version="1",
    addresses=(),
    blocked="",
)
replica_record = partial(
    ReplicaRecord,
    members=("me",),
    epoch=0,
    round=0,
    inner_step=3,
    step_s=1.0,
    tokens_per_s=100.0,
    train_loss=None,
    val_loss=None,
    val_round=-1,
    codec="bf16",
    last_fault="",
)


def in_replica(head: str) -> StageRecord:
    return stage_record(state="training", replica=head)


def bell_record(
    finished_at: float,
    times: tuple[float, float] | None = None,
    *,
    number: int = 0,
    round_s: float = 40.0,
) -> BellRecord:
    """times: when the grace ends and when the group meets, if they are known."""
    send_after, scheduled_at = times or (None, None)
    return BellRecord(
        round=number,
        finished_at=finished_at,
        round_s=round_s,
        send_after=send_after,
        scheduled_at=scheduled_at,
    )
