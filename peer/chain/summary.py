"""The rounds of a stage's chain, one line each, or what its peers contributed: a table on a
terminal, plain lines elsewhere, JSON. All of it stands in the records' headers.

A peer's contribution are the tokens of its inner steps that are in committed rounds, as the records
count them. A member whose values came into no mean, because it was cut off during the exchange, has
none in that round: it sends them again with a later one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from rich.table import Table

from dilocox.peer.os_process import counted
from dilocox.peer.rounds.record import RoundRecord

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


@dataclass(frozen=True, kw_only=True)
class ChainRound:
    """What a record's header says of the chain, too.

    chain_tokens: of all records up to this one. members: tokens by peer id, of those whose values
    are in the round's average.
    """

    listed: LoggedRound
    chain_tokens: int
    members: tuple[tuple[str, int], ...] = field(repr=False)

    @classmethod
    def of(cls, header: RoundRecord, digest: str, record_bytes: int) -> ChainRound:
        """From a record's header, which may be anybody's; ValueError if it makes no sense."""
        listed = LoggedRound.of(header, digest, record_bytes)
        try:
            return cls(
                listed=listed,
                chain_tokens=int(header.chain_tokens),
                members=tuple((str(each.peer), int(each.tokens)) for each in header.contributions),
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no header of a record: {error!r}") from error


def tokens_by_peer(rounds: Iterable[ChainRound]) -> Counter[str]:
    """What each peer contributed to these rounds of one stage."""
    tokens = Counter[str]()
    for each in rounds:
        for peer, count in each.members:
            tokens[peer] += count
    return tokens


def _contributions(rounds: Sequence[ChainRound]) -> list[dict[str, Any]]:
    taken_part = Counter(peer for each in rounds for peer, _ in each.members)
    tokens = tokens_by_peer(rounds)
    return [
        {"peer": peer, "tokens": tokens[peer], "rounds": taken_part[peer]}
        for peer in sorted(tokens, key=lambda peer: (-tokens[peer], peer))
    ]


def _tokens_before(rounds: Sequence[ChainRound]) -> int:
    """Tokens behind the part of the chain that is not here."""
    return rounds[0].chain_tokens - rounds[0].listed.tokens if rounds else 0


def _table(stage: int, rounds: Sequence[LoggedRound]) -> Table:
    table = Table(title=f"stage {stage}", title_justify="left", show_footer=bool(rounds))
    footers = {
        "round": counted(len(rounds), "round"),
        "tokens": f"{sum(each.tokens for each in rounds):,}",
        "bytes": f"{sum(each.record_bytes for each in rounds):,}",
    }
    for name in ("round", "tokens", "members", "ranks", "next H", "bytes"):
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
        f"stage {stage} round {each.round}: {each.tokens:,} tokens, "
        f"{counted(each.members, 'member')}, ranks {_ranks(each)}, "
        f"next H {each.next_inner_steps}, {each.record_bytes:,} bytes, digest {each.digest[:12]}"
        for each in rounds
    ]
    tokens, size = (
        sum(getattr(each, name) for each in rounds) for name in ("tokens", "record_bytes")
    )
    return [
        *lines,
        f"stage {stage}: {counted(len(rounds), 'round')}, {tokens:,} tokens, {size:,} bytes",
    ]


def _ranks(each: LoggedRound) -> str:
    return "-" if each.ranks is None else "/".join(map(str, each.ranks))
