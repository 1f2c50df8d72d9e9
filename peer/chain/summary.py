"""The rounds of a stage's chain as plain values, and what its peers contributed. All of it stands
in the records' headers.

A peer's contribution are the tokens of its inner steps that are in committed rounds, as the records
count them. A member whose values came into no mean, because it was cut off during the exchange, has
none in that round: it sends them again with a later one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from dilocox.peer.rounds.record import RoundRecord
from dilocox.peer.rounds.standing import sitting_out

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ChainRound:
    """What a record's header says of its round and of the chain.

    members: how many were in the group. ranks: smallest, median and largest of the factored
    tensors; None without any. next_inner_steps: H that the record names, of the round in whose
    middle it arrives. previous: digest of the record before it, or of the manifest. chain_tokens:
    of all records up to this one. contributors: tokens by peer id, of those whose values are in the
    round's average. sits_out: peer ids of those that take no part in the next round.
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

    @classmethod
    def of(cls, header: RoundRecord, digest: str, record_bytes: int) -> ChainRound:
        """From a record's header, which may be anybody's; ValueError if it makes no sense."""
        try:
            ranks = sorted(int(rank) for rank in header.ranks if rank > 0)
            made = cls(
                round=int(header.round),
                tokens=int(header.tokens),
                members=len(header.members),
                ranks=(ranks[0], median_low(ranks), ranks[-1]) if ranks else None,
                next_inner_steps=int(header.next_inner_steps),
                record_bytes=record_bytes,
                digest=digest,
                previous=header.previous,
                chain_tokens=int(header.chain_tokens),
                contributors=tuple((str(c.peer), int(c.tokens)) for c in header.contributions),
                sits_out=tuple(sorted(sitting_out(header.standings, header.round + 1))),
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
