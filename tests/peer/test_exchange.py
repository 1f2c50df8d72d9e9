"""The exchange: members in one event loop, on links that lose, freeze and lie."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from dilocox.compression.codec import PayloadRefused
from dilocox.dht.identity import Identity
from dilocox.peer.ballots import excluded_by
from dilocox.peer.members import AttemptResult, Mean, ShareRefused
from dilocox.peer.record import digest_of, own_contribution, parse_record
from dilocox.peer.vote import Verdict
from tests.peer.members import CODECS, LAYOUT, Group


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]


def everything(sender: str, receiver: str, kind: str) -> bool:
    return True


def verdicts(results: list[AttemptResult | None]) -> set[Verdict]:
    return {result.verdict for result in results if result is not None}


def digests(results: list[AttemptResult | None]) -> set[str]:
    return {digest_of(result.record) for result in results if result and result.record}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [4, 8, 32])
def test_all_members_make_the_same_record_of_the_weighted_mean(
    identities: list[Identity], tmp_path: Path, count: int, bits: int
) -> None:
    group = Group(identities[:count], tmp_path, passes=everything, bits=bits)
    results = asyncio.run(group.run())
    assert verdicts(results) == {Verdict.COMMITTED}
    assert len(digests(results)) == 1
    assert results[0] is not None and results[0].record is not None
    record = parse_record(results[0].record, codec_for=CODECS)
    average = record.average(CODECS[bits])
    step = 0.0 if bits == 32 else group.weighted_mean().abs().max() / (2 ** (bits - 1) - 1)
    # each value was coded twice, on the way in and on the way out
    assert (average - group.weighted_mean()).abs().max() <= 4.0 * step + 1e-6
    assert record.chain_tokens == sum(group.tokens)


def test_one_member_alone_with_raw_fp32_gets_its_own_values_bit_for_bit(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(identities[:1], tmp_path, passes=everything, bits=32)
    (result,) = asyncio.run(group.run())
    assert result is not None and result.record is not None
    record = parse_record(result.record, codec_for=CODECS)
    assert torch.equal(record.average(CODECS[32]), group.messages[0])


@pytest.mark.parametrize("victim", range(3))
def test_a_member_dead_from_the_start_voids_the_attempt_within_its_deadlines(
    identities: list[Identity], tmp_path: Path, victim: int
) -> None:
    dead: set[str] = set()
    group = Group(identities[:3], tmp_path, passes=lambda a, b, kind: not {a, b} & dead)
    dead.add(group.peers[victim])
    results = asyncio.run(group.run(frozenset({victim})))
    assert verdicts(results) == {Verdict.VOID}
    seconds = max(result.seconds for result in results if result)
    assert seconds < 2 * (0.3 + 0.6)  # silence and vote; the exchange's own deadline is not needed
    aborts = [result.aborts for result in results if result]
    blamed = excluded_by(aborts, run="run", stage=0, round_number=3)
    assert blamed == [group.peers[victim]], "the repeated attempt leaves out a sound member"


def test_a_reducer_that_dies_after_serving_one_member_still_commits_on_all_others(
    identities: list[Identity], tmp_path: Path
) -> None:
    served: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        victim = group.peers[0]
        if sender == victim and kind == "mean":
            served.append(receiver)
            return len(served) == 1
        # after that it is gone for everybody
        return not (served and victim in (sender, receiver))

    group = Group(identities[:3], tmp_path, passes=passes)
    results = asyncio.run(group.run())
    survivors = [result for result in results[1:] if result is not None]
    assert {result.verdict for result in survivors} == {Verdict.COMMITTED}
    assert len(digests(list(survivors))) == 1


def test_a_malformed_part_leaves_its_sender_out_and_is_named_in_the_record(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(identities[:3], tmp_path, passes=everything)
    liar, victim = group.peers[2], group.attempts[group.peers[0]]
    honest = victim.on_part

    async def receive(peer: str, part: int, payload: bytes) -> None:
        if peer == liar:
            payload = b"\xff" * len(payload)
        await honest(peer, part, payload)

    victim.on_part = receive  # type: ignore[method-assign]
    results = asyncio.run(group.run())
    assert verdicts(results) == {Verdict.COMMITTED}
    assert results[0] is not None and results[0].record is not None
    record = parse_record(results[0].record, codec_for=CODECS)
    assert record.parts[0].contributors == tuple(group.peers[:2])
    assert record.left_out(liar) == [slice(0, record.parts[0].stop)]
    own = own_contribution(record, liar, group.messages[2], CODECS[4])
    assert not own[: record.parts[0].stop].any()
    assert own[record.parts[0].stop :].any()
    # the mean of the two that are in it, weighted among themselves
    expected = (group.messages[0] * 100 + group.messages[1] * 200)[: record.parts[0].stop] / 300
    average = record.average(CODECS[4])[: record.parts[0].stop]
    assert (average - expected).abs().max() < 1.0


def test_a_mean_is_taken_from_its_reducer_only(identities: list[Identity], tmp_path: Path) -> None:
    async def go() -> None:
        group = Group(identities[:3], tmp_path, passes=everything)
        attempt = group.attempts[group.peers[0]]
        payload = CODECS[4].encode(torch.zeros(LAYOUT.parts(3)[1].stop - LAYOUT.parts(3)[1].start))
        mean = Mean(part=1, contributors=tuple(group.peers), payload=payload.numpy().tobytes())
        with pytest.raises(ShareRefused):
            await attempt.on_mean(group.peers[2], mean)
        with pytest.raises(PayloadRefused):
            await attempt.on_mean(
                group.peers[1], Mean(part=1, contributors=mean.contributors, payload=b"short")
            )
        await attempt.on_mean(group.peers[1], mean)
        assert attempt.mean(1) == mean

    asyncio.run(go())


def test_a_stranger_or_a_second_part_of_a_member_is_refused(
    identities: list[Identity], tmp_path: Path
) -> None:
    async def go() -> None:
        group = Group(identities[:2], tmp_path, passes=everything)
        attempt = group.attempts[group.peers[0]]
        size = LAYOUT.parts(2)[0].stop
        payload = CODECS[4].encode(torch.ones(size)).numpy().tobytes()
        with pytest.raises(ShareRefused):
            await attempt.on_part("stranger", 0, payload)
        await attempt.on_part(group.peers[1], 0, payload)
        with pytest.raises(ShareRefused):
            await attempt.on_part(group.peers[1], 0, payload)

    asyncio.run(go())


CUTS = [
    frozenset(cut)
    for size in range(4)
    for cut in itertools.combinations(itertools.permutations(range(3), 2), size)
]


@pytest.mark.parametrize(
    "kinds", [("vote", "ask"), ("mean", "fetch"), ("part", "mean", "vote", "beat")]
)
def test_no_pattern_of_cut_links_commits_here_and_voids_there(
    identities: list[Identity], tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    async def one(cut: frozenset[tuple[int, int]], number: int) -> set[Verdict]:
        def passes(sender: str, receiver: str, kind: str) -> bool:
            pair = group.peers.index(sender), group.peers.index(receiver)
            return kind not in kinds or pair not in cut

        group = Group(identities[:3], tmp_path / str(number), passes=passes)
        results = await group.run()
        assert len(digests(results)) <= 1
        return verdicts(results)

    async def all_cuts() -> list[set[Verdict]]:
        return await asyncio.gather(*(one(cut, number) for number, cut in enumerate(CUTS)))

    for cut, seen in zip(CUTS, asyncio.run(all_cuts()), strict=True):
        assert not {Verdict.COMMITTED, Verdict.VOID} <= seen, f"split by {set(cut)}"
