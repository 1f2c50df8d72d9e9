"""The round record: one stage's averaged, encoded pseudo-gradient of one round, and who took part.

A record is a safetensors file: the encoded mean of every part as bytes, everything else as
canonical JSON in the header (PROTOCOL of the round log: fixed key and tensor order, no time
stamp, no voter, no leader), so that all members of a group write the same bytes and its sha256,
the *digest*, names it. Each record names the digest of the one before and the sha256 of the
anchor it applies to; the first one names the manifest. Anchor and outer momentum are a pure
function of the chain, and so is the plan of the next exchange: its ranks, H of the round that it
arrives in, the basis (the factors of the means), and the window that the next plan looks back on.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from dilocox.compression.codec import Codec
from dilocox.compression.stage_codec import StageCodec, StageMeans
from dilocox.peer.adaptation import WINDOW, RoundFacts

MAX_HEADER_BYTES = 1 << 20


class RecordRefused(ValueError):
    """A record from a peer or from disk that is not exactly as a record must be."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A member of the group that made a record, and the tokens that were its weight."""

    peer: str
    tokens: int
    exchange_s: float  # from its previous send to its record, as it said; 0 if it had none
    step_s: float  # of one inner step of its replica, as it said; 0 if it made none


@dataclass(frozen=True, kw_only=True)
class Part:
    """A slice [start, stop) of a phase's vector, who averaged it, whose values are in it."""

    phase: int
    reducer: str
    start: int
    stop: int
    contributors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One committed round of one stage.

    rules: of the manifest that it was made under; they say how it is applied.
    ranks: per tensor of the layout, as this exchange had them; empty unless the scheme is low_rank.
    window: what the last rounds, this one last, say of the ranks and the times that they needed.
    next_ranks: of the exchange after this one. next_inner_steps: H of the round that it arrives in.
    means: `means[i]` is the encoded mean of `parts[i]`.
    """

    run: str
    stage: int
    round: int
    previous: str
    anchor_before: str
    rules: int = 0
    layout: str
    ranks: tuple[int, ...]
    members: tuple[Contribution, ...]
    chain_tokens: int
    parts: tuple[Part, ...]
    window: tuple[RoundFacts, ...]
    next_ranks: tuple[int, ...]
    next_inner_steps: int
    means: tuple[bytes, ...] = field(repr=False)

    def to_bytes(self) -> bytes:
        """The canonical bytes of this record."""
        header = asdict(self)
        del header["means"]
        tensors = {
            _tensor_name(index): torch.frombuffer(bytearray(mean), dtype=torch.uint8)
            for index, mean in enumerate(self.means)
            if mean
        }
        # one metadata entry only: safetensors keeps them in a hash map, whose order is random
        text = json.dumps(header, sort_keys=True, separators=(",", ":"))
        return save(tensors, metadata={"record": text})

    @property
    def tokens(self) -> int:
        """The tokens behind this record."""
        return sum(member.tokens for member in self.members)

    def member(self, peer: str) -> Contribution | None:
        """What this peer put in, or None if it was not in the group."""
        return next((member for member in self.members if member.peer == peer), None)

    @property
    def last_parts(self) -> tuple[Part, ...]:
        """Those of the last phase: whose values are in them is in the average."""
        return tuple(part for part in self.parts if part.phase == self.parts[-1].phase)

    def counted(self, peer: str) -> list[slice]:
        """The slices of the last phase's vector whose mean holds this member's values."""
        return [
            slice(part.start, part.stop)
            for part in self.last_parts
            if part.stop > part.start and peer in part.contributors
        ]

    def left_out(self, peer: str, codec: StageCodec) -> list[slice]:
        """The slices of the stage's vector that lack this member's values, at least in part."""
        missing = [
            slice(part.start, part.stop)
            for part in self.last_parts
            if peer not in part.contributors
        ]
        return codec.undecayed(self.ranks, missing)

    def decoded(self, codec: StageCodec) -> StageMeans:
        """Its means; PayloadRefused if a part is malformed."""
        phases = codec.phases(self.ranks)
        vectors = [torch.empty(phase.numel, dtype=torch.float32) for phase in phases]
        for part, mean in zip(self.parts, self.means, strict=True):
            if part.stop > part.start:
                payload = torch.frombuffer(bytearray(mean), dtype=torch.uint8)
                out = vectors[part.phase][part.start : part.stop]
                phases[part.phase].mean.decode(payload, out.numel(), out=out)
        return codec.means(self.ranks, vectors)

    def average(self, codec: StageCodec) -> Tensor:
        """The averaged message of the stage, flat fp32; PayloadRefused if a part is malformed."""
        return self.decoded(codec).average()


def own_contribution(record: RoundRecord, peer: str, message: Tensor, codec: StageCodec) -> Tensor:
    """What the average holds of a member: its message as the codec carried it, 0 where left out."""
    return record.decoded(codec).own(message, record.counted(peer))


def digest_of(data: bytes) -> str:
    """The name of a record: the sha256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def parse_record(data: bytes, codec: StageCodec) -> RoundRecord:
    """Read a record that nobody vouches for yet.

    Raises:
        RecordRefused: wrong types, parts that do not tile the vectors, lengths that do not fit the
            codec, contributors who are no members, or bytes that are not canonical.
    """
    try:
        header = parse_header(data)
        tensors = load(data)
        means = tuple(
            tensors[_tensor_name(index)].numpy().tobytes() if part.stop > part.start else b""
            for index, part in enumerate(header.parts)
        )
        record = replace(header, means=means)
        _check(record, codec)
        canonical = record.to_bytes() == data
    except RecordRefused:
        raise
    except Exception as error:
        raise RecordRefused(f"not a round record: {type(error).__name__}: {error}") from error
    if not canonical:
        raise RecordRefused("its bytes are not canonical")
    return record


def parse_header(data: bytes) -> RoundRecord:
    """The record without its means, from its first bytes; for what was checked before."""
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes + 8 > len(data):
        raise RecordRefused(f"its header claims {header_bytes} bytes of {len(data)}")
    outer = json.loads(data[8 : 8 + header_bytes])
    header = cast("dict[str, Any]", json.loads(outer["__metadata__"]["record"]))
    members = tuple(Contribution(**member) for member in header.pop("members"))
    parts = tuple(_part(facts) for facts in header.pop("parts"))
    window = tuple(_facts(facts) for facts in header.pop("window"))
    ranks, next_ranks = (tuple(header.pop(name)) for name in ("ranks", "next_ranks"))
    return RoundRecord(
        members=members,
        parts=parts,
        window=window,
        ranks=ranks,
        next_ranks=next_ranks,
        means=(),
        **header,
    )


def _part(facts: dict[str, Any]) -> Part:
    contributors = tuple(facts.pop("contributors"))
    return Part(contributors=contributors, **facts)


def _facts(facts: dict[str, Any]) -> RoundFacts:
    ranks, needed = tuple(facts.pop("ranks")), tuple(facts.pop("needed"))
    return RoundFacts(ranks=ranks, needed=needed, **facts)


def _check(record: RoundRecord, codec: StageCodec) -> None:
    _check_types(record)
    try:
        for ranks in (record.ranks, record.next_ranks, *(facts.ranks for facts in record.window)):
            codec.check(ranks)
    except ValueError as error:
        raise RecordRefused(str(error)) from error
    if record.next_inner_steps < 1:
        raise RecordRefused("its next round has no inner steps")
    if not 1 <= len(record.window) <= WINDOW:
        raise RecordRefused(f"its window is of {len(record.window)} rounds")
    for facts in record.window:
        timed = 0 <= facts.exchange_s < math.inf and 0 <= facts.step_s < math.inf
        if len(facts.needed) != len(facts.ranks) or not timed:
            raise RecordRefused("its window says what no round can say")
    names = [member.peer for member in record.members]
    if not names or names != sorted(set(names)):
        raise RecordRefused("its members are not a sorted list of different peers")
    for member in record.members:
        times = (member.exchange_s, member.step_s)
        if member.tokens < 1 or not all(0 <= time < math.inf for time in times):
            raise RecordRefused(f"{member.peer} has no tokens, or a time that is none")
    _check_parts(record, names, codec)


def _check_parts(record: RoundRecord, names: list[str], codec: StageCodec) -> None:
    phases = codec.phases(record.ranks)
    positions = [0] * len(phases)
    previous = 0
    for part, mean in zip(record.parts, record.means, strict=True):
        if not previous <= part.phase < len(phases):
            raise RecordRefused(f"a part of phase {part.phase} follows one of phase {previous}")
        previous, phase, position = part.phase, phases[part.phase], positions[part.phase]
        if part.start != position or part.stop < part.start:
            raise RecordRefused(f"part {part.start}:{part.stop} does not follow {position}")
        if part.stop % phase.unit and part.stop != phase.numel:
            raise RecordRefused(f"part {part.start}:{part.stop} ends within a unit")
        if not part.contributors or not {part.reducer, *part.contributors} <= set(names):
            raise RecordRefused("a part was made by nobody or by peers who are no members")
        size = part.stop - part.start
        if len(mean) > part_bytes(phase.mean, size) or bool(mean) != bool(size):
            raise RecordRefused(f"a mean of {size} values has {len(mean)} bytes")
        positions[part.phase] = part.stop
    if positions != [phase.numel for phase in phases]:
        raise RecordRefused(f"its parts end at {positions}")


def _check_types(record: RoundRecord) -> None:
    """What JSON gave must be of the declared types exactly: true is no number, 1.0 is not 1."""
    texts: list[object] = [record.run, record.previous, record.anchor_before, record.layout]
    texts += [member.peer for member in record.members]
    for part in record.parts:
        texts += [part.reducer, *part.contributors]
    if any(type(text) is not str for text in texts):
        raise RecordRefused("a text in its header is none")
    numbers: list[object] = [record.stage, record.round, record.rules, record.chain_tokens]
    numbers += [record.next_inner_steps, *record.ranks, *record.next_ranks]
    numbers += [number for facts in record.window for number in (*facts.ranks, *facts.needed)]
    numbers += [member.tokens for member in record.members]
    for part in record.parts:
        numbers += [part.phase, part.start, part.stop]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise RecordRefused("a number in its header is not a whole number of at least zero")
    timed = (*record.members, *record.window)
    times: list[object] = [time for each in timed for time in (each.exchange_s, each.step_s)]
    if any(type(time) is not float for time in times):
        raise RecordRefused("a time in its header is no number")


def max_record_bytes(codec: StageCodec) -> int:
    """The most bytes of a record of this stage: means under the largest ranks, and the header.

    The header counts twice: each part has more bytes there than its mean has beside its values.
    """
    means = sum(phase.mean.max_bytes(phase.numel) for phase in codec.phases(codec.limits))
    return 8 + 2 * MAX_HEADER_BYTES + means


def part_bytes(codec: Codec, numel: int) -> int:
    """The most bytes of an encoded part; an empty part has none."""
    return codec.max_bytes(numel) if numel else 0


def _tensor_name(index: int) -> str:
    return f"mean.{index:05d}"
