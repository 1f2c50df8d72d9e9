"""What an exchange computes, by itself: the constants of a plan (peer/process/run_plan.py).

    python benchmarks/plan_costs.py [--values 3400000]

First table: nanoseconds of one core for each value of a stage that a member encodes, reduces as far
as it believes others, and decodes, by the number of members (of four and more with the gate).
Second: milliseconds of a call that brings a part, through two p2pd on the loopback, with both ends
in one Python: what it costs a member to send one and to take one where the line costs nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import runtime_pb2

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from dilocox.compression.group_quantization import GroupCodec
from dilocox.dht.rpc import Client, answer_of, chunk_of, handler_name
from dilocox.peer.rounds.robust import LEAST_GATED, likeness
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode

SPACE = "costs"
REPEATS = 9


def coding_s(bits: int, members: int, values: int) -> float:
    """Seconds of a core of one member's exchange of so many values, the smallest of a few."""
    codec, part = GroupCodec(bits, 1e4), values // members
    common = torch.randn(values)
    own = common + 0.5 * torch.randn(values)
    weight = {str(number): 1 for number in range(members)}
    parts = [encode(codec, (common + 0.5 * torch.randn(values))[:part]) for _ in weight]
    taken: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        for number in range(members):
            encode(codec, own[number * part : (number + 1) * part])
        reduction = Reduction(codec, weight, part, "gate")
        for peer, payload in zip(weight, parts, strict=True):
            reduction.add(peer, payload)
        row = reduction.finish()
        assert row is not None
        mean = combine(0, [row], codec, weight)
        assert mean is not None
        for _ in range(members - 1):
            decoded = decode(codec, mean.payload, part)
            if members >= LEAST_GATED:
                likeness(decoded, own[:part], 1 / members, members)
        taken.append(time.process_time() - began)
    return min(taken)


async def moving_s(payload: bytes) -> list[float]:
    """Seconds of one payload from one p2pd to another, a few times."""
    receiver = await P2P.create()
    sender = await P2P.create(initial_peers=await receiver.get_visible_maddrs())

    async def take(
        frames: AsyncIterator[runtime_pb2.ExpertRequest], _: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        held = bytearray()
        async for frame in frames:
            held += chunk_of(frame)
        return answer_of({})

    name = handler_name(SPACE, "rpc_put")
    await receiver.add_protobuf_handler(name, take, runtime_pb2.ExpertRequest, stream_input=True)
    client = Client(p2p=sender, namespace=SPACE, record_bytes=len(payload))
    facts: dict[str, Any] = {"kind": "part", "part": 0}
    taken: list[float] = []
    for _ in range(REPEATS):
        began = time.monotonic()
        await client.push(str(receiver.peer_id), facts, payload)
        taken.append(time.monotonic() - began)
    await sender.shutdown()
    await receiver.shutdown()
    return taken


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--values", type=int, default=3_400_000)
    report, arguments = Report.parse(options, "plan-costs")
    torch.set_num_threads(1)
    values = 500_000 if arguments.quick else arguments.values
    rows = [
        (members, *(coding_s(bits, members, values) / values * 1e9 for bits in (2, 4, 8)))
        for members in (2, 3, 4, 8)
    ]
    columns = [Column("members"), *(Column(f"{bits} bit", ".1f") for bits in (2, 4, 8))]
    report.table(columns, rows, title="ns a value")
    sizes = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    moved = [(size, asyncio.run(moving_s(bytes(size)))) for size in sizes]
    rows = [(size >> 10, statistics.median(each) * 1e3, min(each) * 1e3) for size, each in moved]
    columns = [Column("kB", ",.0f"), Column("median ms", ".1f"), Column("least", ".1f")]
    report.table(columns, rows, title="a call that brings so many", part="calls")
    report.close()


if __name__ == "__main__":
    main()
