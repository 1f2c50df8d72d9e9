"""Stage records as they might stand in the DHT, for the tests of what heads and spares decide."""

from __future__ import annotations

from typing import Any

from dilocox.dht.records import StageRecord


def stage_record(state: Any = "spare", **fields: Any) -> StageRecord:
    plain: dict[str, Any] = {
        "round": 1,
        "digest": "d",
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
