"""The rounds of a stage's chain as plain values, and what its peers contributed. All of it stands
in the records' headers.

A peer's contribution are the tokens of its inner steps that are in committed rounds, as the records
count them. A member whose values came into no mean, because it was cut off during the exchange, has
none in that round: it sends them again with a later one. All stages learn from a replica's tokens:
in `contributions` they count once, and each stage's peer has its part of them. Its hours are those
that the rounds took in which it has tokens, by its members' tokens and times of an inner step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal

from dilocox.peer.rounds.record import SHA256, RoundRecord, rank_span
from dilocox.peer.rounds.standing import sitting_out


@dataclass(frozen=True, kw_only=True)
class ChainRound:
    """What a record's header says of its round and of the chain.

    members: how many were in the group. ranks: smallest, median and largest of the factored
    tensors; None without any. next_inner_steps: H that the record names, of the round in whose
    middle it arrives. previous: digest of the record before it, or of the manifest. chain_tokens:
    of all records up to this one. contributors: tokens by peer id, of those whose values are in the
    round's average. sits_out: peer ids of those that take no part in the next round. token_seconds:
    tokens times seconds of an inner step, a median over the contributors as they state it, which no
    single one moves. rules: that it was made under (`operation.rules` of the manifest).
    """

    round: int
    tokens: int
    members: int
    ranks: tuple[int, int, int] | None
    next_inner_steps: int
    record_bytes: int
    digest: str
    previous: str
    chain_tokens: int
    contributors: tuple[tuple[str, int], ...] = field(repr=False)
    sits_out: tuple[str, ...] = ()
    token_seconds: int = 0
    rules: int = 0

    @classmethod
    def of(cls, header: RoundRecord, digest: str, record_bytes: int) -> ChainRound:
        """From a record's header, which may be anybody's; ValueError if it makes no sense."""
        try:
            steps = [round(c.tokens * c.step_s) for c in header.contributions]
            made = cls(
                round=int(header.round),
                tokens=int(header.tokens),
                members=len(header.members),
                ranks=rank_span(header.ranks),
                next_inner_steps=int(header.next_inner_steps),
                record_bytes=record_bytes,
                digest=digest,
                previous=header.previous,
                chain_tokens=int(header.chain_tokens),
                contributors=tuple((str(c.peer), int(c.tokens)) for c in header.contributions),
                sits_out=tuple(sorted(sitting_out(header.standings, header.round + 1))),
                token_seconds=median_low(steps) if steps else 0,
                rules=int(header.rules),
            )
            named = all(SHA256.fullmatch(name) for name in (digest, header.previous))
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no header of a record: {error!r}") from error
        if not named:
            raise ValueError(f"the record before round {made.round} is named by what is no sha256")
        return made


def tokens_by_peer(rounds: Iterable[ChainRound]) -> Counter[str]:
    """What each peer contributed to these rounds of one stage."""
    tokens = Counter[str]()
    for each in rounds:
        for peer, count in each.contributors:
            tokens[peer] += count
    return tokens


def token_seconds_by_peer(rounds: Iterable[ChainRound]) -> Counter[str]:
    """How long each peer was in these rounds of one stage: seconds times the tokens of an inner
    step. With the times at which rounds ended this would be the time between two of them.
    """
    spent = Counter[str]()
    for each in rounds:
        spent.update(dict.fromkeys(dict(each.contributors), each.token_seconds))
    return spent


Sums = tuple[Mapping[str, int], Mapping[str, int]]
"""What the two functions above give of a stage."""
Stated = tuple[str, str, float | None]
"""A peer's name and team, and when it was first seen, where that is known."""


def contributions(
    sums: Mapping[int, Sums], tokens_per_step: int, stated: Mapping[str, Stated]
) -> list[dict[str, Any]]:
    """What each peer gave to these stages together, the most first: rows of values for JSON."""
    tokens, spent = Counter[str](), Counter[str]()
    for given, took in sums.values():
        tokens.update(given)
        spent.update(took)
    ordered = sorted(tokens, key=lambda peer: (-tokens[peer], peer))
    return [
        {
            "id": peer,
            "rank": rank,
            "tokens": tokens[peer] // len(sums),
            "share": tokens[peer] / max(1, tokens.total()),
            "hours": round(spent[peer] / tokens_per_step / 3600, 4),
            "stages": [stage for stage, (given, _) in sorted(sums.items()) if peer in given],
            **dict(zip(("name", "team", "since"), stated.get(peer, ("", "", None)), strict=True)),
        }
        for rank, peer in enumerate(ordered, start=1)
    ]


def grouped(rows: Sequence[Mapping[str, Any]], by: Literal["name", "team"]) -> list[dict[str, Any]]:
    """The rows of peers that state the same name or team together; without peers that state none"""
    sums: dict[str, dict[str, Any]] = {}
    for row in (row for row in rows if row[by]):
        group = sums.setdefault(row[by], {by: row[by], "peers": 0})
        group["peers"] += 1
        for figure in ("tokens", "share", "hours"):
            group[figure] = group.get(figure, 0) + row[figure]
    return sorted(sums.values(), key=lambda group: (-group["tokens"], group[by]))
