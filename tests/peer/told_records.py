"""Round records that nobody trained: the bytes of a chain whose headers say what a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dilocox.peer.rounds.record import (
    Contribution,
    ReducedShare,
    RoundFacts,
    RoundRecord,
    digest_of,
)
from dilocox.peer.rounds.standing import following_standings


def remembering(record: RoundRecord, last: RoundRecord | None) -> RoundRecord:
    """The record, with what it has to remember of peers after the last one."""
    before = () if last is None else last.standings
    standings = following_standings(before, record.round, record.heard(), ())
    return replace(record, standings=standings)


@dataclass(frozen=True)
class ToldRecord:
    """A record's bytes and its name."""

    record: RoundRecord
    data: bytes
    digest: str


def told_chain(
    run: str,
    stage: int,
    root: str,
    rounds: Sequence[Mapping[str, int]],
    *,
    mean_bytes: int = 64,
) -> list[ToldRecord]:
    """A record a round, from the tokens of its members."""
    chain: list[ToldRecord] = []
    previous, tokens = root, 0
    for number, members in enumerate(rounds):
        tokens += sum(members.values())
        names = sorted(members)
        record = RoundRecord(
            run=run,
            stage=stage,
            round=number,
            previous=previous,
            anchor_before=f"{number:064x}",
            layout="0" * 64,
            ranks=(4, 0, 16),
            members=tuple(
                Contribution(peer=name, tokens=members[name], exchange_s=1.0, step_s=0.5)
                for name in names
            ),
            chain_tokens=tokens,
            parts=(
                ReducedShare(
                    phase=0, reducer=names[0], start=0, stop=mean_bytes, contributors=(*names,)
                ),
            ),
            window=(RoundFacts(ranks=(4, 0, 16), needed=(4, 0, 16), exchange_s=1.0, step_s=0.5),),
            next_ranks=(4, 0, 16),
            next_inner_steps=20,
            means=(bytes(mean_bytes),),
        )
        record = remembering(record, chain[-1].record if chain else None)
        data = record.to_bytes()
        chain.append(ToldRecord(record, data, digest_of(data)))
        previous = chain[-1].digest
    return chain
