"""The round record: one stage's averaged, encoded pseudo-gradient of one round, and its members.

A record is a safetensors file: the encoded mean of every part as bytes, everything else as
canonical JSON in the header (fixed key and tensor order, no time stamp, no voter, no leader), so
that all members of a group write the same bytes and its sha256, the *digest*, names it. The header
names each member once; a part's reducer is a place in that list and its contributors are a bitmap
over it, so that hundreds of members fit. Each record names the digest of the one before and the
sha256 of the anchor it applies to; the first one names the manifest. Anchor and outer momentum are
a pure function of the chain, and so is the plan of the next exchange: its ranks, H of the round
that it arrives in, the basis (the factors of the means), and the window that the next plan looks
back on.

`bitmap_of` says which of a sorted list of names are meant, one bit each: records and tickets name
members once. A list of the names themselves, one for each part and each member, grows with the
square of the group: of 104 members a record had 1.2 MB of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from statistics import median_low
from typing import Annotated, Final

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Compression, StageCodec, StageMeans
from dilocox.compression.workers import ALONE, Workers
from dilocox.dht.invite import MAX_PEER_ID
from dilocox.dht.manifest import CodecSpec, Manifest
from dilocox.dht.wire import Many, first_flaw
from dilocox.peer.rounds.grid import Share
from dilocox.peer.rounds.standing import (
    HISTORY,
    MAX_STANDINGS,
    MOST_CREDITED,
    MOST_EXCLUSIONS,
    Standing,
    voters_before,
)
from dilocox.peer.rounds.vote_count import MAX_MEMBERS

WINDOW: Final = 5


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one round, 0 where there is none to tell.

    exchange_s: of the exchange, from its group to the committed record, codec included.
    step_s: of an inner step of the replica.
    stall_s: that training stood still.
    """

    exchange_s: float = 0.0
    step_s: float = 0.0
    stall_s: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        return {"exchange_s": self.exchange_s, "step_s": self.step_s, "stall_s": self.stall_s}


@dataclass(frozen=True, kw_only=True)
class RoundFacts(Times):
    """One round of one stage, as its record tells it: times are medians of what members state.

    ranks: of the exchange, one a tensor of the layout, 0 where it went dense; empty without ranks.
    needed: columns that hold the energy asked for, measured at these ranks; as many as `ranks`.
    """

    ranks: Many[int]
    needed: Many[int]


@dataclass(frozen=True, kw_only=True)
class SendFacts(Times):
    """What a peer states of one send, from its training loop to the record.

    tokens: that it learnt from and no record holds yet, which is the send's weight. The exchange is
    that of its previous send; it stood still for its last round.
    """

    tokens: int


def bitmap_of(names: Sequence[str], chosen: Collection[str]) -> bytes:
    """The chosen ones among the names: the first name is the lowest bit of the first byte.

    ValueError where one is chosen that is not among them.
    """
    places = {name: place for place, name in enumerate(names)}
    bits = bytearray(-(-len(names) // 8))
    for name in chosen:
        if name not in places:
            raise ValueError(f"{name} is none of the {len(names)} names")
        place = places[name]
        bits[place // 8] |= 1 << place % 8
    return bytes(bits)


def chosen_in(names: Sequence[str], bits: bytes) -> tuple[str, ...]:
    """The names that a bitmap chooses, in their order; ValueError if it is not one of them."""
    beyond = len(names) % 8 and bits and bits[-1] >> len(names) % 8
    if len(bits) != -(-len(names) // 8) or beyond:
        raise ValueError(f"a bitmap of {len(bits)} bytes is none of {len(names)} names")
    return tuple(name for place, name in enumerate(names) if bits[place // 8] >> place % 8 & 1)


MAX_HEADER_BYTES = 1 << 20
_MAX_NUMBER = 2**63 - 1
_MAX_TIME_S = 123456.7891  # as long as any that a ticket may state, which has four decimals


class RecordRefused(ValueError):
    """A record from a peer or from disk that is not exactly as a record must be."""


@dataclass(frozen=True, kw_only=True)
class Contribution(SendFacts):
    """A member of the group that made a record, and what it stated of its send."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class ReducedShare(Share):
    """A share with the members whose values are in its mean."""

    contributors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One committed round of one stage.

    rules: of the manifest that it was made under; they say how it is applied.
    ranks: per tensor of the layout, as this exchange had them; empty unless the scheme is low_rank.
    standings: what the chain remembers of peers after it, sorted by peer.
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
    ranks: tuple[int, ...] = ()
    members: tuple[Contribution, ...] = ()
    chain_tokens: int
    parts: tuple[ReducedShare, ...] = ()
    standings: tuple[Standing, ...] = ()
    window: tuple[RoundFacts, ...] = ()
    next_ranks: tuple[int, ...] = ()
    next_inner_steps: int
    means: tuple[bytes, ...] = field(default=(), repr=False)

    def to_bytes(self) -> bytes:
        tensors = {
            _tensor_name(index): torch.frombuffer(bytearray(mean), dtype=torch.uint8)
            for index, mean in enumerate(self.means)
            if mean
        }
        # one metadata entry only: safetensors keeps them in a hash map, whose order is random
        return save(tensors, metadata={"record": self.header()})

    def header(self) -> str:
        """All but the means, as it stands in the header: canonical JSON."""
        names = [member.peer for member in self.members]
        places = {name: place for place, name in enumerate(names)}
        header = {name: getattr(self, name) for name in _HEADER_FIELDS}
        header["members"] = [asdict(member) for member in self.members]
        header["standings"] = [list(asdict(each).values()) for each in self.standings]
        header["window"] = [asdict(facts) for facts in self.window]
        contributors = [bitmap_of(names, each.contributors).hex() for each in self.parts]
        header["parts"] = [
            [each.phase, places[each.reducer], each.start, each.stop, bits]
            for each, bits in zip(self.parts, contributors, strict=True)
        ]
        return json.dumps(header, sort_keys=True, separators=(",", ":"))

    @property
    def tokens(self) -> int:
        """The tokens behind this record: of the members whose values are in its average.

        A member in no part of it takes its send back and counts it again with a later record. One
        in some parts counts in full: what the others lack stays in its residual.
        """
        return sum(member.tokens for member in self.contributions)

    @cached_property
    def contributions(self) -> tuple[Contribution, ...]:
        """The members whose values are in the average, at least in part."""
        counted = {peer for part in self.last_parts if part.numel for peer in part.contributors}
        return tuple(member for member in self.members if member.peer in counted)

    def member(self, peer: str) -> Contribution | None:
        """What this peer put in, or None if it was not in the group."""
        return next((member for member in self.members if member.peer == peer), None)

    @property
    def last_parts(self) -> tuple[ReducedShare, ...]:
        """Those of the last phase: a member whose values are in them is in the average."""
        return tuple(part for part in self.parts if part.phase == self.parts[-1].phase)

    def counted(self, peer: str) -> list[slice]:
        """The slices of the last phase's vector whose mean holds this member's values."""
        return [
            slice(part.start, part.stop)
            for part in self.last_parts
            if part.numel and peer in part.contributors
        ]

    def heard(self) -> dict[str, float]:
        """By member, which share of the average holds its values."""
        held = dict.fromkeys((member.peer for member in self.members), 0)
        for part in self.last_parts:
            for peer in part.contributors:
                held[peer] += part.numel
        total = max(1, sum(part.numel for part in self.last_parts))
        return {peer: numel / total for peer, numel in held.items()}

    @property
    def voters(self) -> frozenset[str]:
        """The members whose votes count for it: as `standing.voters` found them before it."""
        return voters_before(self.standings, self.heard())

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
        for part, payload in self._payloads():
            out = vectors[part.phase][part.start : part.stop]
            phases[part.phase].codec.decode(payload, part.numel, out=out)
        return codec.means(self.ranks, vectors)

    def check_means(self, codec: StageCodec) -> None:
        """Raise PayloadRefused if a part is malformed."""
        phases = codec.phases(self.ranks)
        for part, payload in self._payloads():
            phases[part.phase].codec.decode_pieces(payload, part.numel, lambda piece, values: None)

    def average(self, codec: StageCodec) -> Tensor:
        """The averaged message of the stage, flat fp32; PayloadRefused if a part is malformed."""
        return self.decoded(codec).average()

    def average_pieces(self, codec: StageCodec, work: Callable[[slice, Tensor], object]) -> None:
        """The averaged message a piece at a time, in the memory of a few: tells `work` of each
        where it lies in the stage's vector, and its values, in one of the codec's threads. What no
        piece holds is padding. PayloadRefused if a part is malformed, perhaps after some pieces.
        """
        if codec.limits:
            self.decoded(codec).average_pieces(work)
            return
        (phase,) = codec.phases(self.ranks)
        for part, payload in self._payloads():

            def place(piece: slice, values: Tensor, start: int = part.start) -> None:
                work(slice(start + piece.start, start + piece.stop), values)

            phase.codec.decode_pieces(payload, part.numel, place)

    def take_out(self, peer: str, message: Tensor, codec: StageCodec) -> None:
        """Take what the average holds of a member's message out of it: `StageMeans.take_out`."""
        means = self.decoded(codec) if codec.limits else codec.means((), ())
        means.take_out(message, self.counted(peer))

    def _payloads(self) -> Iterator[tuple[ReducedShare, Tensor]]:
        """The parts that hold any values, and their encoded means."""
        for part, mean in zip(self.parts, self.means, strict=True):
            if part.numel:
                yield part, torch.frombuffer(bytearray(mean), dtype=torch.uint8)


Whole = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


@dataclass(frozen=True, kw_only=True)
class _Header:
    """A record's header, as `RoundRecord.header` makes it."""

    run: str
    stage: Whole
    round: Whole
    previous: str
    anchor_before: str
    rules: Whole
    layout: str
    ranks: Many[Whole]
    members: Many[Contribution]
    chain_tokens: Whole
    parts: Many[tuple[Whole, Whole, Whole, Whole, str]]
    standings: Many[tuple[str, Whole, Whole, Whole, Whole, Whole]]
    window: Many[RoundFacts]
    next_ranks: Many[Whole]
    next_inner_steps: Whole


_HEADER = TypeAdapter(_Header)
_HEADER_FIELDS = tuple(each.name for each in fields(RoundRecord) if each.name != "means")

SHA256 = re.compile(r"[0-9a-f]{64}")  # in hex


def digest_of(data: bytes) -> str:
    """The name of a record: the sha256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def rank_span(ranks: Sequence[int]) -> tuple[int, int, int] | None:
    """Smallest, median and largest rank of the factored tensors; None without any."""
    factored = sorted(rank for rank in ranks if rank > 0)
    return (factored[0], median_low(factored), factored[-1]) if factored else None


def parse_record(data: bytes, codec: StageCodec) -> RoundRecord:
    """Read a record that nobody vouches for yet.

    Raises:
        RecordRefused: wrong types, parts that do not tile the vectors, lengths that do not fit the
            codec, contributors who are no members, or bytes that are not canonical.
    """
    try:
        header = parse_header(data)
        tensors = load(data)
        means = tuple(  # one by one, as all of them are as large as an update
            tensors.pop(_tensor_name(index)).numpy().tobytes() if part.numel else b""
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
    try:
        told = _HEADER.validate_json(outer["__metadata__"]["record"], strict=True)
    except ValidationError as error:
        raise RecordRefused(f"its header: {first_flaw(error)}") from None
    if len(told.members) > MAX_MEMBERS:
        raise RecordRefused(
            f"it has {len(told.members)} members; a group has at most {MAX_MEMBERS}"
        )
    names = [member.peer for member in told.members]
    facts = {name: getattr(told, name) for name in _HEADER_FIELDS}
    facts["parts"] = tuple(_part(names, *each) for each in told.parts)
    facts["standings"] = tuple(
        Standing(peer=peer, round=last, credited=c, unheard=u, times=t, left_out=out)
        for peer, last, c, u, t, out in told.standings
    )
    return RoundRecord(**facts)


def _part(
    names: list[str], phase: int, reducer: int, start: int, stop: int, bits: str
) -> ReducedShare:
    if reducer >= len(names):
        raise RecordRefused(f"a part is averaged by member {reducer} of {len(names)}")
    try:
        contributors = chosen_in(names, bytes.fromhex(bits))
    except ValueError as error:
        raise RecordRefused(f"a part's contributors are no members: {error}") from error
    return ReducedShare(
        phase=phase, reducer=names[reducer], start=start, stop=stop, contributors=contributors
    )


def _check(record: RoundRecord, codec: StageCodec) -> None:
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
        needed = len(facts.needed) == len(facts.ranks) and min(facts.needed, default=0) >= 0
        if not needed or not _timed(facts):
            raise RecordRefused("its window says what no round can say")
    names = [member.peer for member in record.members]
    if not names or names != sorted(set(names)):
        raise RecordRefused("its members are not a sorted list of different peers")
    for member in record.members:
        if member.tokens < 1 or not _timed(member):
            raise RecordRefused(f"{member.peer} has no tokens, or a time that is none")
    _check_standings(record)
    _check_parts(record, codec)


def _check_standings(record: RoundRecord) -> None:
    names = [each.peer for each in record.standings]
    if names != sorted(set(names)) or len(names) > MAX_STANDINGS:
        raise RecordRefused("its standings are not a sorted list of different peers")
    for each in record.standings:
        sound = len(each.peer) <= MAX_PEER_ID and each.left_out <= each.round <= record.round
        sound &= each.credited <= MOST_CREDITED and each.times <= MOST_EXCLUSIONS
        if not sound or each.unheard >= 2**HISTORY:
            raise RecordRefused(f"{each.peer[:MAX_PEER_ID]} stands as nobody can")


def _timed(each: Times) -> bool:
    return all(0 <= seconds < math.inf for seconds in each.times.values())


def _check_parts(record: RoundRecord, codec: StageCodec) -> None:
    phases = codec.phases(record.ranks)
    positions = [0] * len(phases)
    previous = 0
    for part, mean in zip(record.parts, record.means, strict=True):
        if not previous <= part.phase < len(phases):
            raise RecordRefused(f"a part of phase {part.phase} follows one of phase {previous}")
        previous, phase, position = part.phase, phases[part.phase], positions[part.phase]
        if part.start != position or part.stop < part.start:
            raise RecordRefused(f"part {part.start}:{part.stop} does not follow {position}")
        if part.stop % phase.codec.group_size and part.stop != phase.numel:
            raise RecordRefused(f"part {part.start}:{part.stop} ends within a group")
        if not part.contributors:
            raise RecordRefused("a part was made by nobody")
        size = part.numel
        if len(mean) > part_bytes(phase.codec, size) or bool(mean) != bool(size):
            raise RecordRefused(f"a mean of {size} values has {len(mean)} bytes")
        positions[part.phase] = part.stop
    if positions != [phase.numel for phase in phases]:
        raise RecordRefused(f"its parts end at {positions}")


def compression(spec: CodecSpec) -> Compression:
    """What a stage's codec must know of the manifest's section."""
    return Compression(**{each.name: getattr(spec, each.name) for each in fields(Compression)})


def stage_codec(manifest: Manifest, layout: FlatLayout, workers: Workers = ALONE) -> StageCodec:
    """How the records of a stage of this layout are coded."""
    return StageCodec(layout, compression(manifest.codec), workers)


@lru_cache(maxsize=16)
def largest_group(codec: StageCodec) -> int:
    """How many members a group of this stage may have at most, so that the header of its record
    is within MAX_HEADER_BYTES whatever they state; 0 where not even one fits.
    """
    low, high = 0, MAX_MEMBERS
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(_longest_header(codec, middle)) <= MAX_HEADER_BYTES
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _longest_header(codec: StageCodec, members: int) -> bytes:
    """The longest header that so many members can make, each reducing a part of each phase."""
    texts = "f" * MAX_PEER_ID
    longest = dict.fromkeys(Times().times, _MAX_TIME_S)
    facts = RoundFacts(ranks=codec.limits, needed=codec.limits, **longest)
    everybody = tuple(
        Contribution(peer=f"{place:0{MAX_PEER_ID}d}", tokens=_MAX_NUMBER, **longest)
        for place in range(members)
    )
    names = tuple(member.peer for member in everybody)
    parts = tuple(
        ReducedShare(phase=phase, reducer=names[-1], start=numel, stop=numel, contributors=names)
        for phase, numel in enumerate(each.numel for each in codec.phases(codec.limits))
        for _ in names
    )
    record = RoundRecord(
        run=texts,
        stage=_MAX_NUMBER,
        round=_MAX_NUMBER,
        previous=texts,
        anchor_before=texts,
        rules=_MAX_NUMBER,
        layout=texts,
        ranks=codec.limits,
        members=everybody,
        chain_tokens=_MAX_NUMBER,
        parts=parts,
        standings=tuple(
            Standing(
                peer=f"{place:0{MAX_PEER_ID}d}",
                round=_MAX_NUMBER,
                credited=MOST_CREDITED,
                unheard=2**HISTORY - 1,
                times=MOST_EXCLUSIONS,
                left_out=_MAX_NUMBER,
            )
            for place in range(MAX_STANDINGS)
        ),
        window=(facts,) * WINDOW,
        next_ranks=codec.limits,
        next_inner_steps=_MAX_NUMBER,
    )
    means = max_record_bytes(codec)
    tensors = {
        _tensor_name(index): {"dtype": "U8", "shape": [means], "data_offsets": [means, means]}
        for index in range(len(parts))
    }
    return json.dumps({"__metadata__": {"record": record.header()}} | tensors).encode()


def max_record_bytes(codec: StageCodec) -> int:
    """The most bytes of a record of this stage: means under the largest ranks, and the header.

    The header counts twice: each part has more bytes there than its mean has beside its values.
    """
    means = sum(phase.codec.encoded_bytes(phase.numel) for phase in codec.phases(codec.limits))
    return 8 + 2 * MAX_HEADER_BYTES + means


def part_bytes(codec: GroupCodec, numel: int) -> int:
    """The bytes of an encoded part; an empty part has none."""
    return codec.encoded_bytes(numel) if numel else 0


def _tensor_name(index: int) -> str:
    return f"mean.{index:05d}"
