"""The invariant of the merge with contributions as real codecs carry them.

A peer and two others exchange messages: encoded part by part, averaged by the reducers' own
arithmetic, decoded from a record. Parts of the peer are lost in either phase, ranks change while
its send is in flight, sends are void, undone, and named after all. Nothing may be lost or counted
twice, and what a member takes for its own in a record must be what the average holds of it: else
the account would only agree with itself.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.peer.rounds.record import RoundRecord
from dilocox.peer.training.merge import MergeConfig, RecordFacts, Remainder
from tests.peer.averaged import averaged, own_contribution
from tests.peer.codecs import codec_of
from tests.peer.training.schedules import (
    EVENT,
    FOREVER,
    Draw,
    Schedule,
    ToldRecord,
    World,
)
from tests.sweeps import sweep

LAYOUT = FlatLayout.of([("up", (48, 64)), ("bias", (40,)), ("down", (64, 96))])
ME = "b"
TOKENS = {"a": 3, ME: 5, "c": 2}
UNIT = 0.01
SCHEMES: dict[str, dict[str, Any]] = {
    "dense": {},
    "low_rank": {"rank": 4, "min_rank": 1, "max_rank": 16},
}
FP32 = 1e-6  # of the values in a sum, with room for the few sums of an event
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


def noise(*seed: object) -> Tensor:
    """Matrices that are of about rank two, with something of every other rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    flat = 0.1 * torch.randn(LAYOUT.numel, generator=generator)
    for tensor in LAYOUT.view(flat).values():
        if tensor.dim() == 2:
            left, right = (torch.randn(size, 2, generator=generator) for size in tensor.shape)
            tensor.add_(left @ right.T)
    return flat


@dataclass(kw_only=True)
class CodecWorld(World):
    """The invariant's world whose records are made of encoded messages.

    codec: of all members. events of its own: `lost`, by phase, counts this peer's parts that were
    lost, `surprised` its messages that went out under other ranks than when they were taken.
    """

    codec: StageCodec

    def __post_init__(self) -> None:
        self.ranks = self.codec.first_ranks  # of the next record
        self.last: RoundRecord | None = None
        self.ranks_at_send: dict[int, tuple[int, ...]] = {}
        self.lost = [0, 0]
        self.surprised = 0
        super().__post_init__()
        # the account must not round as what it checks does
        self.stepped, self.counted = self.stepped.double(), self.counted.double()
        self.save()

    def vector(self, *integers: int) -> Tensor:
        if not any(integers):
            return torch.zeros(LAYOUT.numel, dtype=self.dtype)
        size = sum(abs(number) + 1 for number in integers)
        return (size * self.unit * noise(integers)).to(self.dtype)

    def send(self) -> None:
        super().send()
        self.ranks_at_send[self.newest_round] = self.ranks

    def record(self, number: int, draw: Draw, *, mine: bool, left_out: bool = False) -> None:
        """A record of the two others, and of this peer where it is `mine`."""
        self.newest_round = max(self.newest_round, number)
        messages = {peer: 8 * self.unit * noise(peer, draw) for peer in ("a", "c")}
        send = self.merge.in_flight.get(number) if mine else None
        if send is not None:
            messages[ME] = send.message.clone()
            self.surprised += self.ranks_at_send[number] != self.ranks

        def lost(peer: str, phase: int, index: int) -> bool:
            gone = left_out and peer == ME and (draw[1] + phase + index) % 3 == 0
            self.lost[phase] += gone
            return gone

        found = averaged(
            self.codec,
            messages,
            TOKENS,
            ranks=self.ranks,
            basis=self.basis(number),
            round_number=number,
            lost=lost,
        )
        record = found.record
        if number % 3 == 0:  # it takes as long as all else
            self.check_contributions(record, messages, found.lossless)
        facts = RecordFacts(
            round=number,
            digest=f"{len(self.told)}: {number}",
            previous=self.merge.digest,
            contributor=bool(record.counted(ME)),
        )
        told = ToldRecord(facts, self.vector(*draw), None)
        if facts.contributor:
            told.own = own_contribution(record, ME, messages[ME], self.codec)
            told.left_out = record.left_out(ME, self.codec)
        self.last, self.ranks = record, self.next_ranks(draw)
        self.tell(told)

    def basis(self, number: int) -> Tensor | None:
        seed = f"run/0/{number}"
        if self.last is None:
            return self.codec.first_basis(seed)
        return self.last.decoded(self.codec).next_basis(self.codec.low_rank(self.ranks), seed)

    def next_ranks(self, draw: Draw) -> tuple[int, ...]:
        """Other ranks for the exchange that follows, whatever is in flight."""
        moves = zip(self.ranks, self.codec.limits, (draw[0], 0, draw[2]), strict=False)
        return tuple(min(max(1, rank + move), limit) if limit else 0 for rank, limit, move in moves)

    def check_contributions(
        self, record: RoundRecord, messages: dict[str, Tensor], lossless: Tensor
    ) -> None:
        """The average is what its members take for their own, weighted, part by part."""
        means = record.decoded(self.codec)
        whole = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        for part in record.last_parts:
            if part.stop > part.start:
                total = sum(TOKENS[peer] for peer in part.contributors)
                for peer in part.contributors:
                    left = messages[peer].clone()
                    means.take_out(left, [slice(part.start, part.stop)])
                    own = messages[peer].double() - left.double()
                    whole += own * (TOKENS[peer] / total)
        error = (lossless.double() - whole).abs().max()
        # the lossless mean rounds to fp32, and its product once more
        assert error <= 20 * FP32 * whole.abs().max(), self.happened


def world_of(scheme: Any, **fields: Any) -> CodecWorld:
    config = MergeConfig(weight=0.75, decay=1.0, max_age=FOREVER)
    codec = codec_of(LAYOUT, scheme, **SCHEMES[scheme] | fields)
    return CodecWorld(config, torch.float32, UNIT, codec=codec)


def assert_nothing_missing(world: CodecWorld) -> None:
    sums = [world.live, world.stepped, world.counted, world.merge.residual.values]
    most = max(1.0, *(values.abs().max().item() for values in sums))
    gap = world.gap().abs().max().item()
    assert gap <= FP32 * most * (1 + len(world.happened)), world.happened
    assert world.tokens_gap() == 0, world.happened


@EVERY_SCHEME
@settings(max_examples=20, deadline=None)
@given(schedule=st.lists(EVENT, min_size=20, max_size=40))
def test_nothing_is_lost_or_counted_twice_under_any_schedule(
    scheme: str, schedule: Schedule
) -> None:
    world = world_of(scheme)
    world.run(schedule, lambda: None)
    assert_nothing_missing(world)


@pytest.mark.parametrize(
    ("scheme", "bits", "seed"),
    sweep([("low_rank", 4, 34), ("low_rank", 8, 35), ("dense", 4, 34), ("dense", 8, 35)]),
)
def test_a_long_schedule_meets_every_event_and_conserves_progress(
    scheme: str, bits: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 5040, (600,), generator=generator).tolist()
    draws = torch.randint(-8, 9, (600, 3), generator=generator).tolist()
    world = world_of(scheme, bits=bits)
    schedule = [(n, (a, b, c)) for n, (a, b, c) in zip(numbers, draws, strict=True)]
    world.run(schedule, lambda: None)
    assert_nothing_missing(world)
    assert len(set(world.happened)) == 18
    assert world.lost[0] > 3, world.lost
    if scheme == "low_rank":
        assert world.lost[1] > 3, world.lost
        assert world.surprised > 0, "no rank changed while a send was in flight"


@EVERY_SCHEME
def test_where_a_part_was_left_out_the_residual_keeps_all_of_it_whatever_the_decay(
    scheme: str,
) -> None:
    """Nothing of a tensor is decayed that the average lacks, and nothing of it is kept twice."""
    codec = codec_of(LAYOUT, scheme, **SCHEMES[scheme])
    messages = {peer: noise(peer) for peer in TOKENS}
    found = averaged(
        codec,
        messages,
        TOKENS,
        ranks=codec.first_ranks,
        basis=codec.first_basis("run/0/0"),
        round_number=0,
        lost=lambda peer, phase, part: peer == ME and part == 0,
    )
    record = found.record
    unsent = messages[ME].clone()
    record.take_out(ME, unsent, codec)
    left_out = record.left_out(ME, codec)
    world = CodecWorld(
        MergeConfig(weight=0.75, decay=0.5, max_age=FOREVER), torch.float32, UNIT, codec=codec
    )
    world.live -= messages[ME]
    world.merge.trained(1)
    world.merge.send(0)
    facts = RecordFacts(round=0, digest="d", previous=world.merge.digest, contributor=True)
    zeros = torch.zeros(LAYOUT.numel)
    world.merge.commit(facts, zeros, zeros.clone(), Remainder(unsent.clone(), left_out))
    whole = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for part in left_out:
        whole[part] = True
    assert whole.any() and not whole.all()
    assert torch.equal(world.merge.residual.values[whole], unsent[whole])
    torch.testing.assert_close(world.merge.residual.values[~whole], 0.5 * unsent[~whole])
