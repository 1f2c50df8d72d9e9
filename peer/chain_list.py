"""The rounds of a stage's chain, one line each: a table on a terminal, plain lines elsewhere, JSON.

All of it stands in the records' headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table

from dilocox.peer.record import RoundRecord

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class LoggedRound:
    """What a record says of its round.

    ranks: smallest, median and largest of the factored tensors; None without any.
    next_inner_steps: H that the record names, of the round in whose middle it arrives.
    previous: digest of the record before it, or of the manifest.
    """

    round: int
    tokens: int
    members: int
    ranks: tuple[int, int, int] | None
    next_inner_steps: int
    record_bytes: int
    digest: str
    previous: str

    @classmethod
    def of(cls, header: RoundRecord, digest: str, record_bytes: int) -> LoggedRound:
        """From a record's header, which may be anybody's; ValueError if it makes no sense."""
        try:
            ranks = sorted(int(rank) for rank in header.ranks if rank > 0)
            facts = (header.round, header.tokens, header.next_inner_steps, record_bytes)
            number, tokens, next_inner_steps, size = (int(fact) for fact in facts)
            sound = all(_SHA256.fullmatch(text) for text in (digest, header.previous))
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no header of a record: {error}") from error
        if not sound:
            raise ValueError(f"the record before round {number} is named by what is no sha256")
        return cls(
            round=number,
            tokens=tokens,
            members=len(header.members),
            ranks=(ranks[0], median_low(ranks), ranks[-1]) if ranks else None,
            next_inner_steps=next_inner_steps,
            record_bytes=size,
            digest=digest,
            previous=header.previous,
        )


def as_json(run: str, stages: Mapping[int, Sequence[LoggedRound]]) -> dict[str, Any]:
    """Everything, with totals, by stage."""
    return {
        "run": run,
        "stages": [
            {
                "stage": stage,
                "rounds": [asdict(each) for each in rounds],
                "tokens": sum(each.tokens for each in rounds),
                "record_bytes": sum(each.record_bytes for each in rounds),
            }
            for stage, rounds in sorted(stages.items())
        ],
    }


def show(stages: Mapping[int, Sequence[LoggedRound]], console: Console) -> None:
    """Print all stages."""
    for stage, rounds in sorted(stages.items()):
        if console.is_terminal:
            console.print(_table(stage, rounds))
            continue
        for line in _lines(stage, rounds):
            console.print(line, highlight=False, soft_wrap=True)  # one line, however long


def _table(stage: int, rounds: Sequence[LoggedRound]) -> Table:
    table = Table(title=f"stage {stage}", title_justify="left", show_footer=bool(rounds))
    footers = {
        "round": f"{len(rounds)} rounds",
        "tokens": f"{sum(each.tokens for each in rounds):,}",
        "bytes": f"{sum(each.record_bytes for each in rounds):,}",
    }
    for name in ("round", "tokens", "members", "ranks", "H", "bytes"):
        table.add_column(name, justify="right", footer=footers.get(name, ""))
    table.add_column("digest")
    for each in rounds:
        table.add_row(
            str(each.round),
            f"{each.tokens:,}",
            str(each.members),
            _ranks(each),
            str(each.next_inner_steps),
            f"{each.record_bytes:,}",
            each.digest[:12],
        )
    return table


def _lines(stage: int, rounds: Sequence[LoggedRound]) -> list[str]:
    lines = [
        f"stage {stage} round {each.round}: {each.tokens:,} tokens, {each.members} members, "
        f"ranks {_ranks(each)}, H {each.next_inner_steps}, {each.record_bytes:,} bytes, "
        f"digest {each.digest[:12]}"
        for each in rounds
    ]
    tokens, size = (
        sum(getattr(each, name) for each in rounds) for name in ("tokens", "record_bytes")
    )
    return [*lines, f"stage {stage}: {len(rounds)} rounds, {tokens:,} tokens, {size:,} bytes"]


def _ranks(each: LoggedRound) -> str:
    return "-" if each.ranks is None else "/".join(map(str, each.ranks))
