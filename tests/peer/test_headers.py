"""The header of a record as a stranger sends it: whatever it says, it ends nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from dilocox.dht.rpc import Blob, FrameRefused
from dilocox.peer.chain.catchup import fetch_header

MEMBER = {"peer": "a", "tokens": 1, "exchange_s": 0.0, "step_s": 0.0, "stall_s": 0.0}
HEADER: dict[str, Any] = {
    "run": "r",
    "stage": 0,
    "round": 3,
    "previous": "p",
    "anchor_before": "",
    "rules": 0,
    "layout": "",
    "ranks": [],
    "members": [MEMBER],
    "chain_tokens": 10**9,
    "parts": [[0, 0, 0, 1, "01"]],
    "window": [],
    "next_ranks": [],
    "next_inner_steps": 1,
}


def told(header: dict[str, Any], end: object = 1) -> Any:
    mean = {"dtype": "U8", "shape": [1], "data_offsets": [0, end]}
    text = {"__metadata__": {"record": json.dumps(header)}, "mean.00000": mean}
    data = json.dumps(text).encode()

    async def fetch(
        want: dict[str, Any], *, limit_bytes: int, sink: Callable[[bytes], None]
    ) -> Blob | None:
        sink(len(data).to_bytes(8, "little") + data)
        return Blob(facts={}, data=b"")

    return asyncio.run(fetch_header(fetch, "d", limit_bytes=1 << 20))


def test_a_sound_header_is_read() -> None:
    found = told(HEADER)
    assert found.header.round == 3
    assert found.header.counted("a") == [slice(0, 1)]


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([[0, 0, "a", 1, "01"]], 1),
        ([[0, 0, 0, 1, "01"]], float("inf")),
        ([[0, 0, None, 1, "01"]], 1),
    ],
)
def test_a_header_whose_numbers_are_none_is_refused_and_ends_nobody(parts: Any, end: Any) -> None:
    with pytest.raises(FrameRefused, match="no header of a record"):
        told(HEADER | {"parts": parts}, end)
