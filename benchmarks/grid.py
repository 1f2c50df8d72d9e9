"""What an exchange costs in one flat group and in rows and columns, as the groups grow.

    python benchmarks/grid.py [--parameters N] [--seconds-alive S] [--quick] [--out DIR]

A stage of N parameters, dense with 4 bits, every member a reducer. The members are arranged by the
product's own code and the payloads are as long as its codecs make them; nothing is sent. Columns:

    sent      MB that the member that sends most pushes: parts, means of its row, means
    reached   others to which it opens streams for them
    seconds   of an exchange in which nobody fails: these bytes at 10 Mbit/s, and 100 ms a way for
              each of the steps that wait for each other
    header    kB of the record's header; tickets: kB of those that every member gets
    void      share of attempts in which a reducer dies before its mean is out; void again: of
              rounds whose repeated attempt is void, too. Members die by chance after S seconds on
              average
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hivemind.utils import MSGPackSerializer  # pyright: ignore[reportMissingTypeStubs]

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Column, Report, parser
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Phase
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.grid import Grid, Share
from dilocox.peer.rounds.group import Ticket
from dilocox.peer.rounds.record import (
    Contribution,
    ReducedShare,
    RoundFacts,
    RoundRecord,
    stage_codec,
)

GROUPS = [(12, 12), (12, 4), (32, 32), (32, 8), (128, 128), (128, 32), (128, 16)]
BYTES_PER_S, WAY_S = 10e6 / 8, 0.1
RUN = "0" * 32
COLUMNS = (
    Column("members"),
    Column("row"),
    Column("sent", ".2f"),
    Column("reached"),
    *(Column(name, ".1f") for name in ("seconds", "header", "tickets")),
    *(Column(name, ".1%") for name in ("void", "void again")),
)


def sent_by(grid: Grid, shares: tuple[Share, ...], phase: Phase, peer: str) -> tuple[int, set[str]]:
    """The bytes that a member pushes in an exchange, and to whom."""
    rows, own = len(grid.rows), grid.row_of[peer]
    total, reached = 0, set[str]()

    def push(to: set[str], count: int) -> None:
        nonlocal total
        total += len(to - {peer}) * count
        reached.update(to - {peer})

    for first in range(0, len(shares), rows):
        column = shares[first : first + rows]
        collector = column[own].reducer
        push({collector}, phase.codec.encoded_bytes(column[-1].stop - column[0].start))
        if collector != peer:
            continue
        for share in column:
            if share.numel and share.reducer != peer:
                push({share.reducer}, phase.row_codec.encoded_bytes(share.numel))
            made = share.reducer == peer
            to = set(grid.row(peer)) | (set(grid.column(peer)) if made else set[str]())
            if share.numel:
                push(to - {share.reducer}, phase.codec.encoded_bytes(share.numel))
    return total, reached


def header_bytes(names: tuple[str, ...], shares: tuple[Share, ...]) -> int:
    """Of the record that such a group makes, but for what safetensors says of each mean."""
    times = {"exchange_s": 12.345, "step_s": 0.1234, "stall_s": 0.1234}
    record = RoundRecord(
        run=RUN,
        stage=0,
        round=1000,
        previous="0" * 64,
        anchor_before="0" * 64,
        layout="0" * 64,
        ranks=(),
        members=tuple(Contribution(peer=name, tokens=10**6, **times) for name in names),
        chain_tokens=10**9,
        parts=tuple(ReducedShare(**vars(share), contributors=names) for share in shares),
        window=(RoundFacts(ranks=(), needed=(), **times),) * 5,
        next_ranks=(),
        next_inner_steps=100,
        means=tuple(b"\0" if share.numel else b"" for share in shares),
    )
    return int.from_bytes(record.to_bytes()[:8], "little")


def ticket_bytes(names: tuple[str, ...]) -> int:
    """Of the tickets of all members of such a group."""
    ticket = Ticket(
        plan="0" * 64,
        tokens=10**6,
        exchange_s=12.345,
        step_s=0.1234,
        stall_s=0.1234,
        counted=names,
        expected=len(names),
        abort=b"",
    )
    signer: Any = SimpleNamespace(sign=lambda data: bytes(64))  # as long as Ed25519's
    return len(names) * len(MSGPackSerializer.dumps(ticket.signed(names, 0, signer)))


def main() -> None:
    """Print the table."""
    made = parser(__doc__)
    made.add_argument("--parameters", type=int, default=3_400_000)
    made.add_argument("--seconds-alive", type=float, default=7200.0)
    report, arguments = Report.parse(made, "grid")
    codec = {"scheme": "dense", "bits": 4}
    manifest = Manifest.from_dict(
        {"name": "grid", "model": "tiny", "end_tokens": 1000, "codec": codec}
    )
    layout = FlatLayout.of([("weight", (arguments.parameters,))])
    (phase,) = stage_codec(manifest, layout).phases(())
    rows: list[tuple[float, ...]] = []
    for count, row_size in GROUPS[:2] if arguments.quick else GROUPS:
        names = tuple(f"12D3Koo{place:045d}" for place in range(count))
        grid = Grid.of(b"group", names, names, row_size)
        shares = grid.shares([phase])
        found = [sent_by(grid, shares, phase, name) for name in names]
        most, reached = max(sent for sent, _ in found), max(len(peers) for _, peers in found)
        steps = 2 if len(grid.rows) == 1 else 4
        seconds = most / BYTES_PER_S + steps * WAY_S
        void = 1 - math.exp(-count * seconds / arguments.seconds_alive)
        header, tickets = header_bytes(names, shares) / 1e3, ticket_bytes(names) / 1e3
        row = max(map(len, grid.rows))
        rows.append((count, row, most / 1e6, reached, seconds, header, tickets, void, void * void))
    report.table(COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
