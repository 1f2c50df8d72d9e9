"""The round record: canonical bytes, and every way to be refused."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dilocox.compression.group_quantization import GROUP_SIZE, GroupCodec
from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import StageCodec
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.record import (
    Contribution,
    RecordRefused,
    ReducedShare,
    RoundFacts,
    RoundRecord,
    digest_of,
    largest_group,
    max_record_bytes,
    parse_record,
)
from dilocox.peer.rounds.standing import Standing
from dilocox.peer.rounds.vote_count import MAX_MEMBERS
from tests.peer.averaged import own_contribution
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, template
from tests.peer.told_records import remembering

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
            ReducedShare(phase=0, reducer="a", start=0, stop=CUT, contributors=("a",)),
            ReducedShare(phase=0, reducer="b", start=CUT, stop=NUMEL, contributors=("a", "b")),
        ),
        "means": (coded(VALUES[:CUT]), coded(VALUES[CUT:])),
    }
    return template(**(facts | changes))


FACTS = RoundFacts(ranks=(), needed=(), exchange_s=1.0, step_s=0.5)
A, B = made().members
AWAY = Standing(peer="c", round=1, credited=3, unheard=5, times=2, left_out=1)
FIRST, SECOND = made().parts


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
    empty = ReducedShare(phase=0, reducer="b", start=NUMEL, stop=NUMEL, contributors=("a",))
    whole = ReducedShare(phase=0, reducer="a", start=0, stop=NUMEL, contributors=("a",))
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
    torch.testing.assert_close(own_of_b[CUT:], carried)
    assert record.left_out("a", CODEC) == []
    assert (own_contribution(record, "a", message, CODEC) - message).abs().max() < 0.5
    assert not own_contribution(record, "stranger", message, CODEC).any()


def test_only_members_whose_values_are_in_the_average_count_their_tokens() -> None:
    """Who is in some parts counts in full, who is in none, or in an empty part only, not at all."""
    members = (A, B, replace(A, peer="c"), replace(A, peer="d"))
    empty = ReducedShare(
        phase=0, reducer="a", start=NUMEL, stop=NUMEL, contributors=("a", "b", "c", "d")
    )
    record = made(members=members, parts=(FIRST, SECOND, empty), means=(*made().means, b""))
    assert record.tokens == A.tokens + B.tokens == 150
    assert [each.peer for each in record.contributions] == ["a", "b"]
    assert parse_record(record.to_bytes(), CODEC) == record
    for member in record.members:
        in_it = member in record.contributions
        assert in_it == bool(record.counted(member.peer)), "the merge decides otherwise"


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"members": (B, A)}, "sorted"),
        ({"members": (A, A, B)}, "sorted"),
        ({"members": (replace(A, tokens=0), B)}, "no tokens"),
        ({"members": (replace(A, tokens=1.0), B)}, "valid integer"),
        ({"members": (replace(A, exchange_s=float("nan")), B)}, "time"),
        ({"members": (replace(A, exchange_s=float("inf")), B)}, "time"),
        ({"members": (replace(A, exchange_s=-1.0), B)}, "time"),
        ({"members": (replace(A, exchange_s=1), B)}, "canonical"),
        ({"parts": (), "means": ()}, "end at"),
        ({"parts": (replace(FIRST, start=64), SECOND)}, "does not follow"),
        ({"parts": (FIRST, replace(SECOND, start=CUT + 64))}, "does not follow"),
        (
            {"parts": (replace(FIRST, stop=CUT + 1), replace(SECOND, start=CUT + 1))},
            "within a group",
        ),
        ({"parts": (FIRST, replace(SECOND, stop=CUT - 64))}, "refused|follow|mean"),
        ({"parts": (replace(FIRST, contributors=()), SECOND)}, "nobody"),
        ({"means": (coded(VALUES[:CUT], 8), coded(VALUES[CUT:], 8))}, "bytes"),
        ({"ranks": (4,)}, "ranks"),
        ({"next_ranks": (4,)}, "ranks"),
        ({"standings": (AWAY, replace(AWAY, peer="b"))}, "sorted"),
        ({"standings": (replace(AWAY, peer="x" * 65),)}, "nobody can"),
        ({"standings": (replace(AWAY, times=8),)}, "nobody can"),
        ({"standings": (replace(AWAY, credited=11),)}, "nobody can"),
        ({"standings": (replace(AWAY, unheard=1024),)}, "nobody can"),
        ({"standings": (replace(AWAY, left_out=2),)}, "nobody can"),
        ({"standings": (replace(AWAY, round=2**53),)}, "nobody can"),
        ({"standings": (replace(AWAY, times=True),)}, "valid integer"),
        ({"standings": (replace(AWAY, credited=-1),)}, "greater than or equal"),
        ({"window": ()}, "window"),
        ({"window": (FACTS,) * 6}, "window"),
        ({"window": (replace(FACTS, step_s=0),)}, "canonical"),
        ({"window": (replace(FACTS, stall_s=-1.0),)}, "window"),
        ({"members": (replace(A, stall_s=float("inf")), B)}, "time"),
        ({"window": (replace(FACTS, needed=(-1,)),)}, "window"),
        ({"window": (replace(FACTS, needed=(1,)),)}, "window"),
        ({"window": (replace(FACTS, ranks=(4,), needed=(1,)),)}, "ranks"),
        ({"window": (replace(FACTS, exchange_s=float("nan")),)}, "window"),
        ({"window": (replace(FACTS, step_s=-1.0),)}, "window"),
        ({"parts": (replace(FIRST, phase=1), SECOND)}, "phase"),
        ({"parts": (FIRST,), "means": (coded(VALUES[:CUT]),)}, "end at"),
        ({"members": (replace(A, step_s=float("nan")), B)}, "time"),
        ({"next_inner_steps": 0}, "inner steps"),
        ({"next_inner_steps": "10"}, "valid integer"),
        ({"round": -1}, "greater than or equal"),
        ({"round": True}, "valid integer"),
        ({"chain_tokens": 150.0}, "valid integer"),
        ({"previous": None}, "valid string"),
        ({"run": 7}, "valid string"),
    ],
)
def test_a_record_that_is_not_as_it_must_be_is_refused(changes: Any, word: str) -> None:
    message = refused(made(**changes).to_bytes())
    assert any(each in message for each in word.split("|")), message


def with_header(data: bytes, header: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def header_and_tensors() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `made()` consists of."""
    data = made().to_bytes()
    size = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + size])
    tensors = {
        f"mean.{index:05d}": torch.frombuffer(bytearray(mean), dtype=torch.uint8)
        for index, mean in enumerate(made().means)
    }
    return json.loads(outer["__metadata__"]["record"]), tensors


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ([0, 2, 0, CUT, "01"], "member 2 of 2"),
        ([0, -1, 0, CUT, "01"], "greater than or equal"),
        ([0, True, 0, CUT, "01"], "valid integer"),
        ([0, "a", 0, CUT, "01"], "valid integer"),
        ([0, 0, 0, CUT, "05"], "contributors"),  # a third member
        ([0, 0, 0, CUT, "0100"], "contributors"),
        ([0, 0, 0, CUT, ""], "contributors"),
        ([0, 0, 0, CUT, "0x"], "contributors"),
        ([0, 0, 0, CUT, " 01"], "canonical"),
        ([0, 0, 0, CUT, 1], "valid string"),
        ([0, 0, 0, CUT], "Field required"),
        ([0, 0, 0, CUT, "01", 0], "at most 5 items"),
    ],
)
def test_a_part_of_members_that_are_none_is_refused(part: list[Any], word: str) -> None:
    header, tensors = header_and_tensors()
    header["parts"][0] = part
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert word in refused(save(tensors, metadata={"record": text}))


ODD: list[Any] = [0, -1, 2**31, 2**53, 2**63, 2**200, 1.5, float("inf"), float("-inf")]
ODD += [float("nan"), "", "x" * (1 << 16), "\0", None, True, [], [[]], {}, {"a": 1}]


def places(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a header, and of lists to the first two items."""
    if way:
        yield way
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:2]) if isinstance(value, list) else items
    for key, each in cast("Iterable[tuple[Any, Any]]", items):
        yield from places(each, *way, key)


def test_a_record_with_any_odd_value_in_any_place_is_refused_or_reads_as_it_is() -> None:
    header, tensors = header_and_tensors()
    header["standings"] = [["c", 1, 3, 5, 2, 1]]
    tried = read = 0
    for way in places(header):
        for odd in ODD:
            changed = copy.deepcopy(header)
            place: Any = changed
            for step in way[:-1]:
                place = place[step]
            place[way[-1]] = odd
            text = json.dumps(changed, sort_keys=True, separators=(",", ":"))
            data = save(tensors, metadata={"record": text})
            tried += 1
            with suppress(RecordRefused):
                assert parse_record(data, CODEC).to_bytes() == data
                read += 1
    assert tried > 500 and 0 < read < tried / 5


def test_a_record_without_members_or_with_more_than_a_group_has_is_refused() -> None:
    header, tensors = header_and_tensors()
    for members in ([], header["members"] * 200):
        text = json.dumps(header | {"members": members}, sort_keys=True, separators=(",", ":"))
        assert "member" in refused(save(tensors, metadata={"record": text}))


def test_other_bytes_that_mean_the_same_are_refused() -> None:
    data = made().to_bytes()
    size = int.from_bytes(data[:8], "little")
    header, tensors = header_and_tensors()
    assert "canonical" in refused(with_header(data, data[8 : 8 + size] + b" " * 8))
    spaced = json.dumps(header, sort_keys=True)
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert save(tensors, metadata={"record": canonical}) == data
    assert "canonical" in refused(save(tensors, metadata={"record": spaced}))
    stray = tensors | {"stray": torch.zeros(1, dtype=torch.uint8)}
    assert "canonical" in refused(save(stray, metadata={"record": canonical}))
    more = json.dumps(header | {"mood": "good"}, sort_keys=True, separators=(",", ":"))
    assert "canonical" in refused(save(tensors, metadata={"record": more}))
    del header["run"]
    less = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert "its header: run" in refused(save(tensors, metadata={"record": less}))


@pytest.mark.parametrize("field", ["parts", "standings", "members", "ranks"])
def test_a_header_full_of_nonsense_takes_little_memory(field: str) -> None:
    """With an error for each item, 100,000 took half a gigabyte."""
    header, tensors = header_and_tensors()
    header[field] = [[]] * 100_000
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    data = save(tensors, metadata={"record": text})
    tracemalloc.start()
    try:
        assert f"its header: {field}.0" in refused(data)
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


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
def of_members(count: int, codec: StageCodec, ranks: tuple[int, ...]) -> RoundRecord:
    """A record in which each of so many members reduced a part of each phase."""
    names = [f"12D3Koo{place:045d}" for place in range(count)]
    parts: list[ReducedShare] = []
    means: list[bytes] = []
    for number, phase in enumerate(codec.phases(ranks)):
        for name, part in zip(names, split(phase.numel, count), strict=True):
            size = part.stop - part.start
            where = {"start": part.start, "stop": part.stop}
            parts.append(
                ReducedShare(phase=number, reducer=name, contributors=tuple(names), **where)
            )
            means.append(phase.codec.encode(torch.zeros(size)).numpy().tobytes() if size else b"")
    members = tuple(
        Contribution(peer=name, tokens=2**40, exchange_s=12.345, step_s=0.1234, stall_s=0.5)
        for name in names
    )
    facts = replace(FACTS, ranks=ranks, needed=ranks)
    return made(
        members=members,
        parts=tuple(parts),
        means=tuple(means),
        ranks=ranks,
        window=(facts,) * 5,
        next_ranks=ranks,
        chain_tokens=count * 2**40,
    )


@pytest.mark.parametrize("count", [104, 128, 200, MAX_MEMBERS])
def test_a_record_of_hundreds_of_members_is_taken_by_the_log(tmp_path: Path, count: int) -> None:
    """With a list of names for each part that of 104 members had a header of 1.16 MB."""
    codec = codec_of(LAYOUT, "low_rank")
    record = remembering(of_members(count, codec, codec.first_ranks), None)
    data = record.to_bytes()
    assert parse_record(data, codec) == record
    assert int.from_bytes(data[:8], "little") < {104: 100_000, 128: 128_000}.get(count, 320_000)
    log = RoundLog(tmp_path, manifest_digest=record.previous, codec=codec)
    log.append(data, b"votes")
    assert log.read(record.round) == record
    header = log.header(record.round)
    assert header is not None and header.members == record.members
    assert header.parts == record.parts


def test_no_header_of_a_group_that_is_let_in_is_longer_than_a_log_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [(f"layers.{place}.experts.weight", (64, 64)) for place in range(300)]
    codec = codec_of(FlatLayout.of(tensors), "low_rank")
    known = largest_group.cache_info().hits
    assert largest_group(codec) == largest_group(codec) == MAX_MEMBERS
    assert largest_group.cache_info().hits > known  # each attempt asks, in an event loop
    monkeypatch.setattr("dilocox.peer.rounds.record.MAX_HEADER_BYTES", 100_000)
    most = largest_group(codec_of(FlatLayout.of(tensors), "low_rank"))
    assert 20 < most < MAX_MEMBERS
    data = of_members(most, codec, codec.limits).to_bytes()
    assert 40_000 < int.from_bytes(data[:8], "little") <= 100_000
    longer = of_members(2 * most, codec, codec.limits).to_bytes()
    assert "claims" in refused(longer), "it would have been made, and then refused"


@pytest.mark.parametrize(
    ("scheme", "bits"), [("dense", 2), ("dense", 4), ("dense", 32), ("low_rank", 8)]
)
def test_no_record_of_a_stage_is_larger_than_its_limit(scheme: str, bits: int) -> None:
    """Not under the largest ranks either, nor in as many parts as its vectors can have."""
    codec = codec_of(LAYOUT, scheme, bits=bits)
    parts: list[ReducedShare] = []
    means: list[bytes] = []
    for index, phase in enumerate(codec.phases(codec.limits)):
        for start in range(0, phase.numel, GROUP_SIZE):
            stop = min(start + GROUP_SIZE, phase.numel)
            means.append(b"m" * phase.codec.encoded_bytes(stop - start))
            parts.append(
                ReducedShare(phase=index, reducer="a", start=start, stop=stop, contributors=("a",))
            )
    record = made(ranks=codec.limits, parts=tuple(parts), means=tuple(means))
    size = len(record.to_bytes())
    assert size <= max_record_bytes(codec) < size + (4 << 20)


def test_the_limit_grows_with_the_stage() -> None:
    large = FlatLayout.of([("weight", (1 << 15, 1 << 15)), ("more", (1 << 26,))])
    assert max_record_bytes(codec_of(large, bits=16)) > 2 * large.numel > 1 << 31
    assert max_record_bytes(codec_of(LAYOUT)) < 4 << 20
