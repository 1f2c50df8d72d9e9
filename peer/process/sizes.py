"""What a run asks of a peer's machine, by stage, and of the bootstrap: before anything is started.

It reckons as `dilocox doctor` and `--memory-limit` do and measures nothing; a row is one stage, or
several that are alike. docs/operator.md says what the columns are.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import wrap
from typing import Any

from rich.table import Table

from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import CodecSpec
from dilocox.peer.chain.archive import RECORDS_AFTER_STATE
from dilocox.peer.chain.archive_keeper import STAGES_AT_ONCE
from dilocox.peer.chain.record_check import STATE_BYTES
from dilocox.peer.chain.replay import replay_bytes
from dilocox.peer.chain.store import log_limits
from dilocox.peer.memory_and_disk import PROCESSES_BYTES, size
from dilocox.peer.os_process import wide_console
from dilocox.peer.process.prepare import StageNeeds, stage_kinds
from dilocox.peer.process.run_plan import DENSE_BITS

MEMBERS = 4
CHECKED_RECORDS = 4  # copies of a record while it is checked, measured
STATES = 3  # on a bootstrap's disk: the last two of a stage, and the next while it is made
GB, MB = 1e9, 1e6
HEADS = (
    "stage",
    "params (M)",
    "memory (GB)",
    "machine + GPU (GB)",
    "disk (GB)",
    "exchange (MB)",
    "token (kB, 4 bits / bf16)",
)
HEAD_WIDTH = 8  # the table is whole at 80 columns


def row(manifest: Manifest, stage: int) -> list[str]:
    """The cells of one stage."""
    needs = StageNeeds(manifest, stage)
    tokens = [_with_codec(needs, codec).link_bytes_per_token() / 1e3 for codec in ("int4", "bf16")]
    return [
        f"{stage} of {manifest.stages}",
        f"{needs.values / MB:.1f}",
        f"{needs.memory.on_cpu / GB:.1f}",
        f"{needs.memory.beside_gpu / GB:.1f} + {needs.memory.on_gpu / GB:.1f}",
        f"{needs.disk_bytes / GB:.2f}",
        f"{needs.exchange_bytes(MEMBERS) / MB:.2f}",
        f"{tokens[0]:.2f} / {tokens[1]:.2f}",
    ]


def _with_codec(needs: StageNeeds, codec: Any) -> StageNeeds:
    pipeline = replace(needs.manifest.pipeline, codec=codec)
    return StageNeeds(replace(needs.manifest, pipeline=pipeline), needs.stage)


WHEN_DENSE = "sent in half a round (dilocox plan says so), it is for inner.optimizer muon"


def dense_exchanges(manifest: Manifest) -> str:
    """What an exchange would take with the codecs that Muon learns under, in words."""
    told = list[str]()
    for bits in DENSE_BITS:
        dense = replace(manifest, codec=CodecSpec(scheme="dense", bits=bits))
        needed = max(
            StageNeeds(dense, stage).exchange_bytes(MEMBERS) for stage in stage_kinds(dense)
        )
        told.append(f"{needed / MB:.1f} MB of {bits} bits")
    return f"an exchange with a dense codec: {' or '.join(told)}"


def bootstrap_needs(manifest: Manifest) -> tuple[int, int]:
    """Bytes of memory and of disk that the bootstrap of a run takes at most, with records under the
    first ranks.
    """
    kinds = [StageNeeds(manifest, stage) for stage in stage_kinds(manifest)]
    from_seed = not manifest.initial.source
    states = STATES if from_seed else STATES + 1
    least, most = RECORDS_AFTER_STATE
    memory, disk = 0, 0
    for stage in range(manifest.stages):
        needs = kinds[0 if stage == 0 else -1 if stage == manifest.stages - 1 else 1]
        record, state = needs.record_bytes, STATE_BYTES * needs.values
        since = min(most * record, max(least * record, state)) + record
        _, older = log_limits(manifest.rounds, record)
        disk += states * state + 2 * since + older
        checked = STAGES_AT_ONCE * CHECKED_RECORDS * record
        replayed = replay_bytes(needs.values, record, from_seed=from_seed)
        memory = max(memory, PROCESSES_BYTES + checked + replayed)
    return memory, disk


def print_sizes(manifest: Manifest) -> None:
    """Print the table on the terminal; whole where there is none."""
    title = f"{manifest.name}: what a peer takes; an exchange is once a round"
    table = Table(title=title, show_edge=False)
    for name in HEADS:
        table.add_column("\n".join(wrap(name, HEAD_WIDTH)), justify="right")
    for stage in stage_kinds(manifest):
        table.add_row(*row(manifest, stage))
    console = wide_console()
    console.print(table)
    memory, disk = bootstrap_needs(manifest)
    console.print(f"the bootstrap: {size(memory)} of memory, at most {size(disk)} of disk")
    console.print(dense_exchanges(manifest))
    console.print(WHEN_DENSE)
