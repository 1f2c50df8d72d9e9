"""What every record from outside must pass: it is sound, of this chain, a majority made it, and it
follows from the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.compression.workers import ALONE, Workers
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.ballots import check_certificate
from dilocox.peer.rounds.group import tokens_cap
from dilocox.peer.rounds.record import (
    RecordRefused,
    RoundRecord,
    digest_of,
    max_record_bytes,
    parse_record,
    stage_codec,
)
from dilocox.peer.rounds.standing import follows, most_tokens

STATE_BYTES = 2 * 4  # of a state for each value: anchor and momentum
MAX_STATE_HEADER_BYTES = 1 << 16
MOST_VOID = 1_000_000  # rounds in a row: of ten seconds each, what four months have


@dataclass(frozen=True)
class RecordCheck:
    """What every record from outside must pass."""

    run: str
    stage: int
    manifest: Manifest
    layout: FlatLayout
    workers: Workers = ALONE

    @property
    def root(self) -> str:
        """Digest of the manifest, which stands before the first record."""
        return self.manifest.root

    @cached_property
    def codec(self) -> StageCodec:
        return stage_codec(self.manifest, self.layout, self.workers)

    @cached_property
    def record_bytes(self) -> int:
        return max_record_bytes(self.codec)

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES * self.layout.numel + MAX_STATE_HEADER_BYTES

    def record(self, data: bytes, certificate: bytes) -> RoundRecord:
        """The record, if it is sound, of this run, stage and model, and committed by a majority."""
        record = parse_record(data, self.codec)
        if (record.run, record.stage) != (self.run, self.stage):
            raise RecordRefused(f"it is of run {record.run}, stage {record.stage}")
        if record.layout != self.layout.digest:
            raise RecordRefused("it is of another model")
        if record.rules > self.manifest.rules:
            raise RecordRefused(
                f"it was made under revision {record.rules} of the manifest, which is not known "
                "here yet"
            )
        if self.manifest.rolled_back(record.round, record.rules):
            raise RecordRefused(f"the operator went back behind round {record.round}")
        rounds = self.manifest.rounds
        tokens = {member.peer: member.tokens for member in record.members}
        most = most_tokens(tokens, record.voters, tokens_cap(self.manifest))
        if not rounds.min_inner_steps <= record.next_inner_steps <= rounds.max_inner_steps:
            raise RecordRefused(f"its next round has {record.next_inner_steps} inner steps")
        for peer, count in tokens.items():
            if count > most[peer]:
                raise RecordRefused(f"{peer} has {count} tokens, more than {most[peer]}")
        check_certificate(record, digest_of(data), certificate)
        try:
            record.check_means(self.codec)
        except PayloadRefused as error:
            raise RecordRefused(f"a mean cannot be decoded: {error}") from error
        return record


def flaws_after(
    record: RoundRecord, last: RoundRecord | None, first_ranks: tuple[int, ...]
) -> list[str]:
    """What of a record does not follow from the one before it, for "round 7: ...".

    last: that record, or its header; None: the manifest, whose codec begins with `first_ranks`.
    """
    found = list[str]()
    if record.round - (-1 if last is None else last.round) > MOST_VOID:
        # a few such jumps would lead to where no later round has a number
        found.append(f"comes more than {MOST_VOID} rounds after the record before it")
    tokens = record.tokens + (0 if last is None else last.chain_tokens)
    if record.chain_tokens != tokens:
        found.append(f"counts {record.chain_tokens} tokens of the chain, they are {tokens}")
    if last is not None and record.rules < last.rules:
        found.append("is under older rules than the record before it")
    standings = () if last is None else last.standings
    if not follows(record.standings, standings, record.round, record.heard()):
        found.append("remembers of peers what does not follow from the record before it")
    if record.ranks != (first_ranks if last is None else last.next_ranks):
        found.append("has other ranks than the record before it names")
    return found
