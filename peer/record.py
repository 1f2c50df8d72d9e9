"""The round record: one stage's averaged, encoded pseudo-gradient of one round, and who took part.

A record is a safetensors file: the encoded mean of every part as bytes, everything else as
canonical JSON in the header (PROTOCOL of the round log: fixed key and tensor order, no time
stamp, no voter, no leader), so that all members of a group write the same bytes and its sha256,
the *digest*, names it. Each record names the digest of the one before and the sha256 of the
anchor it applies to; the first one names the manifest. Anchor and outer momentum are a pure
function of the chain.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from dilocox.compression.codec import GROUP_SIZE, GroupCodec

MAX_HEADER_BYTES = 1 << 20


class RecordRefused(ValueError):
    """A record from a peer or from disk that is not exactly as a record must be."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A member of the group that made a record, and the tokens that were its weight."""

    peer: str
    tokens: int
    exchange_s: float  # how long its previous exchange took, as it said; 0 if it had none


@dataclass(frozen=True, kw_only=True)
class Part:
    """A slice [start, stop) of the flat vector, who averaged it, whose values are in it."""

    reducer: str
    start: int
    stop: int
    contributors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One committed round of one stage. `means[i]` is the group-coded mean of `parts[i]`."""

    run: str
    stage: int
    round: int
    previous: str
    anchor_before: str
    layout: str
    bits: int
    members: tuple[Contribution, ...]
    chain_tokens: int
    parts: tuple[Part, ...]
    next_bits: int
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

    def left_out(self, peer: str) -> list[slice]:
        """The slices of the flat vector whose mean does not hold this member's values."""
        return [
            slice(part.start, part.stop) for part in self.parts if peer not in part.contributors
        ]

    def average(self, codec: GroupCodec) -> Tensor:
        """The decoded mean, a flat fp32 vector; PayloadRefused if a part is malformed."""
        out = torch.empty(self.parts[-1].stop, dtype=torch.float32)
        for part, mean in zip(self.parts, self.means, strict=True):
            payload = torch.frombuffer(bytearray(mean), dtype=torch.uint8)
            codec.decode(payload, part.stop - part.start, out=out[part.start : part.stop])
        return out


def own_contribution(record: RoundRecord, peer: str, message: Tensor, codec: GroupCodec) -> Tensor:
    """What the mean holds of a member: its message as the codec carried it, 0 where left out."""
    own = torch.zeros_like(message)
    for part in record.parts:
        if peer in part.contributors:
            values = message[part.start : part.stop]
            codec.decode(codec.encode(values), values.numel(), out=own[part.start : part.stop])
    return own


def digest_of(data: bytes) -> str:
    """The name of a record: the sha256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def parse_record(data: bytes, *, codec_for: Mapping[int, GroupCodec]) -> RoundRecord:
    """Read a record that nobody vouches for yet.

    Raises:
        RecordRefused: wrong types, parts that do not tile the vector, lengths that do not fit the
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
        _check(record, codec_for)
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
    return RoundRecord(members=members, parts=parts, means=(), **header)


def _part(facts: dict[str, Any]) -> Part:
    contributors = tuple(facts.pop("contributors"))
    return Part(contributors=contributors, **facts)


def _check(record: RoundRecord, codec_for: Mapping[int, GroupCodec]) -> None:
    _check_types(record)
    if record.bits not in codec_for or record.next_bits not in codec_for:
        raise RecordRefused(f"unknown codec bits {record.bits}, {record.next_bits}")
    if record.next_inner_steps < 1:
        raise RecordRefused("its next round has no inner steps")
    names = [member.peer for member in record.members]
    if not names or names != sorted(set(names)):
        raise RecordRefused("its members are not a sorted list of different peers")
    for member in record.members:
        if member.tokens < 1 or not 0 <= member.exchange_s < math.inf:
            raise RecordRefused(f"{member.peer} has no tokens, or a time that is none")
    if not record.parts:
        raise RecordRefused("it has no parts")
    _check_parts(record, names, codec_for[record.bits])


def _check_parts(record: RoundRecord, names: list[str], codec: GroupCodec) -> None:
    position = 0
    for part, mean in zip(record.parts, record.means, strict=True):
        if part.start != position or part.stop < part.start or part.start % GROUP_SIZE:
            raise RecordRefused(f"part {part.start}:{part.stop} does not follow {position}")
        if not part.contributors or not {part.reducer, *part.contributors} <= set(names):
            raise RecordRefused("a part was made by nobody or by peers who are no members")
        size = part.stop - part.start
        if len(mean) != record_bytes(codec, size):
            raise RecordRefused(f"a mean of {size} values has {len(mean)} bytes")
        position = part.stop


def _check_types(record: RoundRecord) -> None:
    """What JSON gave must be of the declared types exactly: true is no number, 1.0 is not 1."""
    texts: list[object] = [record.run, record.previous, record.anchor_before, record.layout]
    texts += [member.peer for member in record.members]
    for part in record.parts:
        texts += [part.reducer, *part.contributors]
    if any(type(text) is not str for text in texts):
        raise RecordRefused("a text in its header is none")
    numbers: list[object] = [record.stage, record.round, record.bits, record.chain_tokens]
    numbers += [record.next_bits, record.next_inner_steps]
    numbers += [member.tokens for member in record.members]
    for part in record.parts:
        numbers += [part.start, part.stop]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise RecordRefused("a number in its header is not a whole number of at least zero")
    if any(type(member.exchange_s) is not float for member in record.members):
        raise RecordRefused("a time in its header is no number")


def record_bytes(codec: GroupCodec, numel: int) -> int:
    """Bytes of an encoded part; an empty part has none."""
    return codec.encoded_bytes(numel) if numel else 0


def _tensor_name(index: int) -> str:
    return f"mean.{index:05d}"
