"""The round record: canonical bytes, and every way to be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dilocox.compression.codec import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.peer.adaptation import RoundFacts
from dilocox.peer.record import (
    Contribution,
    Part,
    RecordRefused,
    RoundRecord,
    digest_of,
    max_record_bytes,
    own_contribution,
    parse_record,
)
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, template

NUMEL = LAYOUT.numel
CUT = 640
CODEC = codec_of(LAYOUT)
GROUPS = GroupCodec(4)


def coded(values: torch.Tensor, bits: int = 4) -> bytes:
    return GroupCodec(bits).encode(values).numpy().tobytes()


VALUES = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))


def made(**changes: Any) -> RoundRecord:
    """A record of two members and two parts; b's values are not in the first one."""
    facts: dict[str, Any] = {
        "members": (
            Contribution(peer="a", tokens=100, exchange_s=0.5, step_s=0.1),
            Contribution(peer="b", tokens=50, exchange_s=0.0, step_s=0.0),
        ),
        "chain_tokens": 150,
        "parts": (
            Part(phase=0, reducer="a", start=0, stop=CUT, contributors=("a",)),
            Part(phase=0, reducer="b", start=CUT, stop=NUMEL, contributors=("a", "b")),
        ),
        "means": (coded(VALUES[:CUT]), coded(VALUES[CUT:])),
    }
    return template(**(facts | changes))


def refused(data: bytes) -> str:
    with pytest.raises(RecordRefused) as caught:
        parse_record(data, CODEC)
    return str(caught.value)


def test_a_record_comes_back_as_it_was_written_with_the_same_bytes() -> None:
    record = made()
    data = record.to_bytes()
    parsed = parse_record(data, CODEC)
    assert parsed == record
    assert parsed.to_bytes() == data
    assert digest_of(data) == digest_of(parsed.to_bytes())
    assert (parsed.tokens, parsed.member("b")) == (150, record.members[1])
    assert parsed.member("c") is None


def test_an_empty_part_needs_no_bytes() -> None:
    empty = Part(phase=0, reducer="b", start=NUMEL, stop=NUMEL, contributors=("a",))
    whole = Part(phase=0, reducer="a", start=0, stop=NUMEL, contributors=("a",))
    record = made(parts=(whole, empty), means=(coded(VALUES), b""))
    assert parse_record(record.to_bytes(), CODEC) == record


def test_the_average_is_the_decoded_means_in_their_places() -> None:
    average = made().average(CODEC)
    expected = [GROUPS.decode(GROUPS.encode(part), part.numel()) for part in VALUES.split(CUT)[:1]]
    expected.append(GROUPS.decode(GROUPS.encode(VALUES[CUT:]), NUMEL - CUT))
    assert torch.equal(average, torch.cat(expected))


def test_own_contribution_is_what_the_codec_carried_and_zero_where_left_out() -> None:
    record = made()
    message = VALUES.flip(0)
    own_of_b = own_contribution(record, "b", message, CODEC)
    assert (record.left_out("b", CODEC), record.counted("b")) == (
        [slice(0, CUT)],
        [slice(CUT, NUMEL)],
    )
    assert not own_of_b[:CUT].any()
    carried = GROUPS.decode(GROUPS.encode(message[CUT:].contiguous()), NUMEL - CUT)
    assert torch.equal(own_of_b[CUT:], carried)
    assert record.left_out("a", CODEC) == []
    assert (own_contribution(record, "a", message, CODEC) - message).abs().max() < 0.5
    assert not own_contribution(record, "stranger", message, CODEC).any()


# ---- refusals ------------------------------------------------------------------------------------
FACTS = RoundFacts(ranks=(), needed=(), exchange_s=1.0, step_s=0.5)
A, B = made().members
FIRST, SECOND = made().parts


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"members": ()}, "members"),
        ({"members": (B, A)}, "sorted"),
        ({"members": (A, A, B)}, "sorted"),
        ({"members": (A,)}, "no members"),  # b reduces and contributes, yet is none
        ({"members": (replace(A, tokens=0), B)}, "no tokens"),
        ({"members": (replace(A, tokens=1.0), B)}, "whole number"),
        ({"members": (replace(A, exchange_s=float("nan")), B)}, "time"),
        ({"members": (replace(A, exchange_s=float("inf")), B)}, "time"),
        ({"members": (replace(A, exchange_s=-1.0), B)}, "time"),
        ({"members": (replace(A, exchange_s=1), B)}, "time"),
        ({"parts": (), "means": ()}, "end at"),
        ({"parts": (replace(FIRST, start=64), SECOND)}, "does not follow"),
        ({"parts": (FIRST, replace(SECOND, start=CUT + 64))}, "does not follow"),
        ({"parts": (replace(FIRST, stop=CUT + 1), replace(SECOND, start=CUT + 1))}, "unit"),
        ({"parts": (FIRST, replace(SECOND, stop=CUT - 64))}, "refused|follow|mean"),
        ({"parts": (replace(FIRST, contributors=()), SECOND)}, "nobody"),
        ({"parts": (replace(FIRST, contributors=("a", "c")), SECOND)}, "no members"),
        ({"parts": (replace(FIRST, reducer="c"), SECOND)}, "no members"),
        ({"means": (coded(VALUES[:CUT], 8), coded(VALUES[CUT:], 8))}, "bytes"),
        ({"ranks": (4,)}, "ranks"),
        ({"next_ranks": (4,)}, "ranks"),
        ({"window": ()}, "window"),
        ({"window": (FACTS,) * 6}, "window"),
        ({"window": (replace(FACTS, step_s=0),)}, "time"),
        ({"window": (replace(FACTS, needed=(-1,)),)}, "whole number"),
        ({"window": (replace(FACTS, needed=(1,)),)}, "window"),
        ({"window": (replace(FACTS, ranks=(4,), needed=(1,)),)}, "ranks"),
        ({"window": (replace(FACTS, exchange_s=float("nan")),)}, "window"),
        ({"window": (replace(FACTS, step_s=-1.0),)}, "window"),
        ({"parts": (replace(FIRST, phase=1), SECOND)}, "phase"),
        ({"parts": (FIRST,), "means": (coded(VALUES[:CUT]),)}, "end at"),
        ({"members": (replace(A, step_s=float("nan")), B)}, "time"),
        ({"next_inner_steps": 0}, "inner steps"),
        ({"next_inner_steps": "10"}, "whole number"),
        ({"round": -1}, "whole number"),
        ({"round": True}, "whole number"),
        ({"chain_tokens": 150.0}, "whole number"),
        ({"previous": None}, "text"),
        ({"run": 7}, "text"),
    ],
)
def test_a_record_that_is_not_as_it_must_be_is_refused(changes: Any, word: str) -> None:
    message = refused(made(**changes).to_bytes())
    assert any(each in message for each in word.split("|")), message


def with_header(data: bytes, header: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def test_other_bytes_that_mean_the_same_are_refused() -> None:
    data = made().to_bytes()
    size = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + size])
    header = json.loads(outer["__metadata__"]["record"])
    assert "canonical" in refused(with_header(data, data[8 : 8 + size] + b" " * 8))
    spaced = json.dumps(header, sort_keys=True)
    tensors = {
        f"mean.{index:05d}": torch.frombuffer(bytearray(mean), dtype=torch.uint8)
        for index, mean in enumerate(made().means)
    }
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert save(tensors, metadata={"record": canonical}) == data
    assert "canonical" in refused(save(tensors, metadata={"record": spaced}))
    stray = tensors | {"stray": torch.zeros(1, dtype=torch.uint8)}
    assert "canonical" in refused(save(stray, metadata={"record": canonical}))
    more = json.dumps(header | {"mood": "good"}, sort_keys=True, separators=(",", ":"))
    assert "not a round record" in refused(save(tensors, metadata={"record": more}))
    del header["run"]
    less = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert "not a round record" in refused(save(tensors, metadata={"record": less}))


def test_a_header_that_claims_more_than_there_is_is_refused_before_it_is_read() -> None:
    assert "claims" in refused((1 << 60).to_bytes(8, "little") + b"{}")
    assert "claims" in refused((1000).to_bytes(8, "little") + b"{}")


def test_every_truncation_and_an_appended_byte_are_refused() -> None:
    data = made().to_bytes()
    for size in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 1):
        refused(data[:size])
    refused(data + b"\0")


@given(position=st.integers(0, len(made().to_bytes()) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_gives_another_digest(position: int, flip: int) -> None:
    data = bytearray(made().to_bytes())
    data[position] ^= flip
    try:
        parsed = parse_record(bytes(data), CODEC)
    except RecordRefused:
        return
    assert parsed.to_bytes() == bytes(data)  # canonical all the same: just another record
    assert digest_of(bytes(data)) != digest_of(made().to_bytes())


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(with_header(made().to_bytes(), data))


# ---- size ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "bits"), [("dense", 4), ("dense", 32), ("low_rank", 8), ("top_k", 4)]
)
def test_no_record_of_a_stage_is_larger_than_its_limit(scheme: str, bits: int) -> None:
    """Not under the largest ranks either, nor in as many parts as its vectors can have."""
    codec = codec_of(LAYOUT, scheme, bits=bits)
    parts: list[Part] = []
    means: list[bytes] = []
    for index, phase in enumerate(codec.phases(codec.limits)):
        for start in range(0, phase.numel, phase.unit):
            stop = min(start + phase.unit, phase.numel)
            means.append(b"m" * phase.mean.max_bytes(stop - start))
            parts.append(
                Part(phase=index, reducer="a", start=start, stop=stop, contributors=("a",))
            )
    record = made(ranks=codec.limits, parts=tuple(parts), means=tuple(means))
    size = len(record.to_bytes())
    assert size <= max_record_bytes(codec) < size + (4 << 20)


def test_the_limit_grows_with_the_stage() -> None:
    large = FlatLayout.of([("weight", (1 << 15, 1 << 15)), ("more", (1 << 26,))])
    assert max_record_bytes(codec_of(large, bits=16)) > 2 * large.numel > 1 << 31
    assert max_record_bytes(codec_of(LAYOUT)) < 4 << 20
