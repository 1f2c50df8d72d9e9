"""The exchange: members in one event loop, on links that lose, freeze and lie."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.dht.identity import Identity
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.group import Mean, ShareRefused
from dilocox.peer.rounds.shares import decode, encode
from dilocox.peer.rounds.vote_count import Verdict
from tests.peer.averaged import own_contribution
from tests.peer.members import (
    PATIENT_S,
    SILENCE_S,
    THIN_S,
    VOTE_S,
    Group,
    Link,
    assert_two_faced_is_named,
    blamed,
    digests,
    everything,
    record_of,
    seconds,
    spoil,
    verdicts,
)
from tests.sweeps import sweep

BOTH = pytest.mark.parametrize("scheme", ["dense", "low_rank"])
FORMS = [("dense", bits) for bits in (2, 4, 8, 32)] + [("low_rank", bits) for bits in (4, 8)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("scheme", "bits"), FORMS)
def test_all_members_make_the_same_record_of_the_weighted_mean(
    identities: list[Identity], tmp_path: Path, count: int, scheme: str, bits: int
) -> None:
    group = Group(identities[:count], tmp_path, passes=everything, scheme=scheme, bits=bits)
    record = record_of(group, asyncio.run(group.run()))
    assert record.chain_tokens == sum(group.tokens)
    assert [part.phase for part in record.parts] == [share.phase for share in group.shares]
    assert all(part.contributors == tuple(group.peers) for part in record.parts)
    average, expected = record.average(group.codec), group.weighted_mean()
    match scheme:
        case "dense":
            step = 0.0 if bits == 32 else expected.abs().max() / (2 ** (bits - 1) - 1)
            # each value was coded twice, on the way in and on the way out
            assert (average - expected).abs().max() <= 4.0 * step + 1e-6
        case "low_rank":
            assert (average - expected).norm() <= {4: 0.35, 8: 0.02}[bits] * expected.norm()


def test_one_member_alone_with_raw_fp32_gets_its_own_values_bit_for_bit(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(identities[:1], tmp_path, passes=everything, bits=32)
    record = record_of(group, asyncio.run(group.run()))
    assert torch.equal(record.average(group.codec), group.messages[0])


@pytest.mark.parametrize("victim", [None, 1])
def test_an_attempt_that_is_over_is_freed_with_its_last_reference(
    identities: list[Identity], tmp_path: Path, victim: int | None
) -> None:
    """It holds a whole record. The collector of circles comes by the number of objects, not by
    their size: in a process with torch not in a hundred rounds."""

    async def over() -> list[weakref.ref[Attempt]]:
        group = Group(identities[:3], tmp_path, passes=everything, exchange_s=1.5, silence_s=0.3)
        if victim is not None:
            group.frozen = {group.peers[victim]}
        await group.run(frozenset() if victim is None else frozenset({victim}))
        await asyncio.sleep(VOTE_S + 0.5)  # what it sends may outlive it
        known = [weakref.ref(attempt) for attempt in group.attempts.values()]
        group.attempts.clear()
        return known

    gc.collect()
    gc.disable()
    try:
        left = [attempt() for attempt in asyncio.run(over())]
        assert left == [None] * 3, [gc.get_referrers(each) for each in left if each]
    finally:
        gc.enable()


@BOTH
@pytest.mark.parametrize("victim", range(3))
def test_a_member_dead_from_the_start_voids_the_attempt_within_its_deadlines(
    identities: list[Identity], tmp_path: Path, victim: int, scheme: str
) -> None:
    dead: set[str] = set()
    group = Group(
        identities[:3], tmp_path, passes=lambda a, b, kind: not {a, b} & dead, scheme=scheme
    )
    dead.add(group.peers[victim])
    results = asyncio.run(group.run(frozenset({victim})))
    assert verdicts(results) == {Verdict.VOID}
    # silence and vote; the exchange's own deadline is not needed
    assert seconds(results) < 2 * (SILENCE_S + VOTE_S)
    assert blamed(results) == [group.peers[victim]], "the repeat leaves out a sound member"


@BOTH
@pytest.mark.parametrize(("decoding_s", "fetching_s"), sweep([(0.0, 0.0), (0.05, 0.0), (0.0, 2.5)]))
def test_a_reducer_that_dies_after_serving_one_member_still_commits_on_all_others(
    identities: list[Identity], tmp_path: Path, scheme: str, decoding_s: float, fetching_s: float
) -> None:
    served: list[str] = []
    last = "mean1" if scheme == "low_rank" else "mean0"

    def passes(sender: str, receiver: str, kind: str) -> bool:
        victim = group.peers[0]
        if sender == victim and kind == last:
            served.append(receiver)
            return len(served) == 1
        # after that it is gone for everybody
        return not (served and victim in (sender, receiver))

    group = Group(
        identities[:3],
        tmp_path,
        passes=passes,
        scheme=scheme,
        silence_s=2.0,
        exchange_s=6.0,
        decoding_s=decoding_s,
        fetching_s=fetching_s,
    )
    results = asyncio.run(group.run())
    record_of(group, results[1:])
    assert served


def test_members_that_give_a_mean_by_drops_do_not_keep_it_from_the_others(
    identities: list[Identity], tmp_path: Path
) -> None:
    killed: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if (sender, kind) == (victim, "mean0"):
            killed.append(receiver)
            return receiver == keeper
        return not (killed and victim in (sender, receiver))

    group = Group(identities[:4], tmp_path, passes=passes, exchange_s=PATIENT_S)
    victim, *dripping, keeper = group.grid.rows[0]  # the others ask each other before the keeper
    group.dripping.update(dripping)
    results = asyncio.run(group.run())
    record_of(
        group, [each for peer, each in zip(group.peers, results, strict=True) if peer != victim]
    )
    assert killed and seconds(results) < PATIENT_S / 2


@pytest.mark.parametrize(("drops", "row"), [(False, 4), (True, 4), (False, 2)])
@BOTH
def test_who_gives_its_mean_to_one_member_alone_is_missed_by_the_others_and_not_waited_for(
    identities: list[Identity], tmp_path: Path, scheme: str, drops: bool, row: int
) -> None:
    """row: members of one; where there are two, some get a mean through others, and name nobody."""

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if drops and sender == keeper and kind.startswith("mean"):
            part = group.part(int(kind.removeprefix("mean")), keeper)
            group.attempts[receiver].bytes_came(keeper, part, "mean", 1, 1000)
        if kind == "fetch" and receiver == keeper:
            return False  # it has it, and gives it nobody
        return sender != keeper or (
            (not kind.startswith("mean") or receiver == served) and kind != "words"
        )

    group = Group(
        identities[:4],
        tmp_path,
        passes=passes,
        scheme=scheme,
        silence_s=SILENCE_S,
        exchange_s=PATIENT_S,
        group_size=row,
    )
    keeper, served = group.grid.rows[0][:2]
    results = asyncio.run(group.run())
    record_of(group, results)
    assert seconds(results) < PATIENT_S / 2
    kept = group.part(0, keeper)
    passed_by = {peer for peer in group.peers if group.setups[peer].sender(kept) == keeper}
    # of one who has begun nobody knows that its line is not as thin as that
    naming = set[str]() if drops else passed_by - {keeper, served}
    assert len(naming) == (0 if drops else row // 2)
    for peer, result in zip(group.peers, results, strict=True):
        assert result and result.missed == ((keeper,) if peer in naming else ())


def test_a_mean_that_is_on_its_way_through_a_thin_link_is_asked_of_nobody(
    identities: list[Identity], tmp_path: Path
) -> None:
    asked: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if kind == "fetch":
            asked.append(sender)
        return True

    group = Group(
        identities[:4], tmp_path, passes=passes, silence_s=SILENCE_S, exchange_s=PATIENT_S
    )
    group.thin.add(group.peers[1])
    results = asyncio.run(group.run())
    record_of(group, results)
    assert THIN_S > SILENCE_S and not asked
    assert not any(each.missed for each in results if each)


def test_who_says_that_it_holds_what_nobody_has_made_is_asked_once_and_turns_nobody_against_another(
    identities: list[Identity], tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if kind == "fetch":
            asked.append((sender, receiver))
        return True

    group = Group(
        identities[:4],
        tmp_path,
        passes=passes,
        silence_s=SILENCE_S,
        exchange_s=PATIENT_S,
        computing_s=SILENCE_S,
    )
    liar, *others = group.peers
    for peer in others:
        group.attempts[peer].on_words(liar, b"x" * 8 * len(group.shares))
    results = asyncio.run(group.run())
    record_of(group, results)
    assert seconds(results) < PATIENT_S / 2
    assert {receiver for _, receiver in asked} == {liar}
    assert len(asked) <= 2 * len(others) * len(group.shares), "again and again"
    assert not any(each.missed for each in results if each)


def test_who_says_that_it_holds_what_nobody_has_made_and_is_gone_then_is_not_waited_for(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(
        identities[:4],
        tmp_path,
        passes=lambda sender, receiver, kind: True,
        silence_s=SILENCE_S,
        exchange_s=PATIENT_S,
    )
    liar, *others = group.peers
    for peer in others:
        group.attempts[peer].on_words(liar, b"x" * 8 * len(group.shares))
    group.frozen.add(liar)
    results = asyncio.run(group.run(frozenset({0})))
    assert verdicts(results) == {Verdict.VOID}
    assert seconds(results) < PATIENT_S / 2
    assert blamed(results) == [liar]


def test_a_voter_that_gives_the_record_by_drops_does_not_keep_it_from_who_lacks_it(
    identities: list[Identity], tmp_path: Path
) -> None:
    def passes(sender: str, receiver: str, kind: str) -> bool:
        return (receiver, kind) != (late, "mean0") and (sender, kind) != (late, "fetch")

    group = Group(identities[:3], tmp_path, passes=passes, fetching_s=0.3)
    dripping, _, late = group.grid.rows[0]  # who lacks it asks that one first
    group.dripping.add(dripping)
    record_of(group, asyncio.run(group.run()))


def test_a_member_that_answers_with_nonsense_does_not_keep_others_from_hearing_a_decision(
    identities: list[Identity], tmp_path: Path
) -> None:
    """What it said of its votes failed the whole question, of every member and each time."""

    async def go() -> None:
        group = Group(identities[:3], tmp_path, passes=passes)
        deaf, liar = group.peers[0], group.peers[1]
        group.lying.add(liar)
        cut.add(deaf)
        results = await group.run()
        assert results[0] and results[0].verdict is Verdict.UNDECIDED
        cut.clear()
        settled = await group.attempts[deaf].settle()
        assert settled.verdict is Verdict.COMMITTED and settled.record

    def passes(sender: str, receiver: str, kind: str) -> bool:
        return kind not in ("vote", "ask") or not {sender, receiver} & cut

    cut = set[str]()
    asyncio.run(go())


def test_a_voter_that_changes_its_mind_takes_no_committed_record_back(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another member fetched the record, which it could not prove any more."""

    def passes(sender: str, receiver: str, kind: str) -> bool:
        return (receiver, kind) != (lacking, "mean0") and (sender, kind) != (lacking, "fetch")

    group = Group(identities[:3], tmp_path, passes=passes)
    lacking, liar = group.peers[0], group.attempts[group.peers[2]]
    fetch, fetched = Link.fetch_record, list[str]()

    async def then_abort(link: Link, peer: str, digest: str) -> bytes | None:
        record = await fetch(link, peer, digest)
        fetched.append(peer)
        group.attempts[lacking].on_votes([liar.ballots.sign(None, (group.peers[1],))])
        return record

    monkeypatch.setattr(Link, "fetch_record", then_abort)
    result = asyncio.run(group.run())[0]
    assert result is not None and result.verdict is Verdict.COMMITTED
    assert fetched and result.record is not None and result.certificate is not None


def test_a_disk_that_is_slow_to_take_a_vote_silences_nobody(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write a snapshot; the others took this member for dead."""
    save, gaps = RoundLog.save_vote, [0.0]

    def slow(log: RoundLog, *vote: Any) -> None:
        time.sleep(3.0)
        save(log, *vote)

    async def go() -> None:
        async def watch() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last += gaps[-1]

        watching = asyncio.create_task(watch())
        record_of(group, await group.run())
        watching.cancel()

    monkeypatch.setattr(RoundLog, "save_vote", slow)
    group = Group(identities[:2], tmp_path, passes=everything)
    asyncio.run(go())
    assert max(gaps) < 2.0, "heartbeats wait for the disk"


def test_a_malformed_part_leaves_its_sender_out_and_is_named_in_the_record(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(identities[:3], tmp_path, passes=everything)
    liar = group.peers[2]
    part = group.part(0, group.peers[0])
    spoil(group, group.peers[0], liar, part)
    record = record_of(group, asyncio.run(group.run()))
    assert record.parts[part].contributors == tuple(group.peers[:2])
    cut = slice(record.parts[part].start, record.parts[part].stop)
    assert record.left_out(liar, group.codec) == [cut]
    own = own_contribution(record, liar, group.messages[2], group.codec)
    assert not own[cut].any()
    assert own[: cut.start].any() or own[cut.stop :].any()
    # the mean of the two that are in it, weighted among themselves
    expected = (group.messages[0] * 100 + group.messages[1] * 200)[cut] / 300
    assert (record.average(group.codec)[cut] - expected).abs().max() < 1.0


@BOTH
@pytest.mark.parametrize("lie", ["opposite", "longer", "its own"])
def test_a_reducer_that_gives_all_a_false_mean_is_left_out_of_the_repeated_attempt(
    identities: list[Identity], tmp_path: Path, scheme: str, lie: str
) -> None:
    group = Group(identities[:5], tmp_path, passes=everything, scheme=scheme, robust="gate")
    one_way(group)
    liar = next(share.reducer for share in group.shares if share.numel)

    def falsify(sender: str, receiver: str, mean: Mean) -> Mean:
        share = group.shares[mean.part]
        if share.reducer != liar:
            return mean
        codec = group.setups[liar].phases[share.phase].codec
        values = decode(codec, mean.payload, share.numel)
        match lie:
            case "opposite":
                return replace(mean, payload=encode(codec, -values))
            case "longer":
                return replace(mean, payload=encode(codec, 20 * values))
            case _:
                return replace(mean, contributors=(liar,))

    group.falsify = falsify
    results = asyncio.run(group.run())
    assert verdicts(results) == {Verdict.VOID}
    assert blamed(results) == [liar]


@BOTH
@pytest.mark.parametrize("count", [3, 4])
def test_a_reducer_that_gives_others_another_mean_is_left_out_of_the_repeated_attempt(
    identities: list[Identity], tmp_path: Path, scheme: str, count: int
) -> None:
    """Each half alone would have a record, and without the liar's vote none could be decided."""
    group = Group(
        identities[:count],
        tmp_path,
        passes=everything,
        scheme=scheme,
        exchange_s=PATIENT_S,
        silence_s=PATIENT_S,
    )
    liar = next(share.reducer for share in group.shares if share.numel)
    group.make_two_faced(liar)
    assert_two_faced_is_named(group, liar)


@BOTH
def test_words_of_means_that_nobody_made_hold_nobody_up(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    group = Group(identities[:4], tmp_path, passes=everything, scheme=scheme)
    group.lying.add(group.peers[2])
    started = time.monotonic()
    record_of(group, asyncio.run(group.run()))
    assert time.monotonic() - started < PATIENT_S / 2
    attempt, words = group.attempts[group.peers[0]], bytes(8 * len(group.shares))
    for peer, wrong in [("stranger", words), (group.peers[1], words[1:]), (group.peers[1], None)]:
        with pytest.raises(ValueError, match="no words"):
            attempt.on_words(peer, wrong)


def one_way(group: Group, *against: int) -> Tensor:
    """Let all members go one way, each with its own noise, and these ten times against it."""
    way = torch.randn(group.messages[0].shape, generator=torch.Generator().manual_seed(0))
    way *= group.messages[0] != 0  # as far as its padding, which is 0
    for index, message in enumerate(group.messages):
        message.mul_(0.2).add_(way, alpha=-10.0 if index in against else 1.0)
    return way


@BOTH
def test_who_sends_ten_times_the_opposite_is_in_no_mean_that_the_gate_makes(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    group = Group(identities[:4], tmp_path, passes=everything, scheme=scheme, robust="gate")
    way = one_way(group, 1)
    record = record_of(group, asyncio.run(group.run()))
    liar, honest = group.peers[1], {*group.peers} - {group.peers[1]}
    assert all({*part.contributors} == honest for part in record.parts if part.numel)
    assert record.member(liar) and record.chain_tokens == sum(group.tokens) - group.tokens[1]
    assert {each.peer for each in record.standings if each.credited == 1} == honest
    assert {each.peer for each in record.standings if each.unheard} == {liar}
    average, truth = record.average(group.codec), way
    # four columns hold a part of what goes every way
    assert torch.cosine_similarity(average, truth, dim=0) > (0.4 if scheme == "low_rank" else 0.9)


@BOTH
def test_the_tokens_of_a_member_that_is_in_no_mean_are_not_in_the_chain(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    """It takes its send back and counts these tokens again with a later record."""

    def passes(sender: str, receiver: str, kind: str) -> bool:
        return not (sender == group.peers[2] and kind.startswith("part"))

    group = Group(identities[:3], tmp_path, passes=passes, scheme=scheme, clients=frozenset({2}))
    record = record_of(group, asyncio.run(group.run()))
    assert [member.peer for member in record.members] == group.peers
    assert record.counted(group.peers[2]) == []
    assert record.chain_tokens == record.tokens == sum(group.tokens[:2])


@BOTH
def test_a_mean_is_taken_from_its_reducer_only(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    async def go() -> None:
        group = Group(identities[:3], tmp_path, passes=everything, scheme=scheme)
        attempt, names = group.attempts[group.peers[0]], tuple(group.peers)
        for phase in range(len(group.codec.phases(group.codec.first_ranks))):
            part = group.part(phase, group.peers[1])
            codec = group.codec.phases(group.codec.first_ranks)[phase].codec
            payload = codec.encode(torch.zeros(group.shares[part].numel)).numpy().tobytes()
            mean = Mean(part=part, contributors=names, payload=payload)
            made = partial(group.signed, group.peers[1])
            mean = made(mean)
            with pytest.raises(ShareRefused):
                await attempt.on_mean(group.peers[2], mean)
            with pytest.raises(ShareRefused, match="did not sign"):
                await attempt.on_mean(group.peers[1], replace(mean, payload=payload[::-1]))
            with pytest.raises(ShareRefused, match="did not sign"):
                await attempt.on_mean(group.peers[1], replace(mean, contributors=names[:1]))
            for wrong in (b"", b"short", payload[:-1], payload + b"0"):
                with pytest.raises(PayloadRefused):
                    await attempt.on_mean(
                        group.peers[1],
                        made(Mean(part=part, contributors=names, payload=wrong)),
                    )
            for contributors in ((), ("stranger",), names[::-1], names[:1] * 2):
                with pytest.raises(ShareRefused):
                    await attempt.on_mean(
                        group.peers[1], Mean(part=part, contributors=contributors, payload=payload)
                    )
            await attempt.on_mean(group.peers[1], mean)
            assert attempt.mean(part) == mean
            for kind in ("part", "row", "mean"):
                assert attempt.has_part(part, kind)
                assert not attempt.has_part(-1, kind)
                assert not attempt.has_part(len(group.shares), kind)
            assert not attempt.has_part(part, "gift")

    asyncio.run(go())


@BOTH
def test_a_stranger_or_a_second_part_of_a_member_is_refused(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    async def go() -> None:
        group = Group(identities[:2], tmp_path, passes=everything, scheme=scheme)
        attempt = group.attempts[group.peers[0]]
        for phase, form in enumerate(group.codec.phases(group.codec.first_ranks)):
            part = group.part(phase, group.peers[0])
            payload = form.codec.encode(torch.ones(group.shares[part].numel)).numpy().tobytes()
            assert len(payload) <= attempt.max_bytes(part, "part")
            with pytest.raises(ShareRefused):
                await attempt.on_part("stranger", part, payload)
            with pytest.raises(ShareRefused):
                await attempt.on_part(group.peers[1], group.part(phase, group.peers[1]), payload)
            await attempt.on_part(group.peers[1], part, payload)
            with pytest.raises(ShareRefused):
                await attempt.on_part(group.peers[1], part, payload)

    asyncio.run(go())


def test_a_part_that_comes_after_its_mean_was_made_is_refused_but_no_fault(
    identities: list[Identity], tmp_path: Path
) -> None:
    async def go() -> None:
        group = Group(
            identities[:2],
            tmp_path,
            passes=lambda a, b, kind: (kind, b) != ("part0", group.peers[0]),
        )
        attempt = group.attempts[group.peers[0]]
        record = record_of(group, await group.run())
        part = group.part(0, group.peers[0])
        assert record.parts[part].contributors == (group.peers[0],)
        payload = group.codec.phases(())[0].codec.encode(torch.ones(group.shares[part].numel))
        with pytest.raises(ShareRefused):
            await attempt.on_part(group.peers[1], part, payload.numpy().tobytes())

    asyncio.run(go())


CUTS = [
    frozenset(cut)
    for size in range(4)
    for cut in itertools.combinations(itertools.permutations(range(3), 2), size)
]


@pytest.mark.parametrize(
    ("scheme", "kinds"),
    sweep(
        [
            ("dense", ("part0", "mean0", "vote", "beat")),
            ("dense", ("vote", "ask")),
            ("dense", ("mean0", "fetch")),
            ("low_rank", ("mean0", "fetch")),
            ("low_rank", ("mean1", "fetch")),
            ("low_rank", ("part1", "mean1", "vote", "beat")),
        ]
    ),
)
def test_no_pattern_of_cut_links_commits_here_and_voids_there(
    identities: list[Identity], tmp_path: Path, scheme: str, kinds: tuple[str, ...]
) -> None:
    async def one(cut: frozenset[tuple[int, int]], number: int) -> set[Verdict]:
        def passes(sender: str, receiver: str, kind: str) -> bool:
            pair = group.peers.index(sender), group.peers.index(receiver)
            return kind not in kinds or pair not in cut

        group = Group(identities[:3], tmp_path / str(number), passes=passes, scheme=scheme)
        results = await group.run()
        assert len(digests(results)) <= 1
        return verdicts(results)

    async def all_cuts() -> list[set[Verdict]]:
        return await asyncio.gather(*(one(cut, number) for number, cut in enumerate(CUTS)))

    for cut, seen in zip(CUTS, asyncio.run(all_cuts()), strict=True):
        assert not {Verdict.COMMITTED, Verdict.VOID} <= seen, f"split by {set(cut)}"


def test_it_is_known_who_may_send_a_part_before_it_comes(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(identities[:3], tmp_path, passes=everything)
    me, other, third = group.peers
    mine, theirs = group.part(0, me), group.part(0, other)
    attempt = group.attempts[me]
    attempt.check_sender(other, mine, "part")
    attempt.check_sender(other, theirs, "mean")
    for peer, part, kind in [
        ("QmStranger", mine, "part"),
        ("QmStranger", theirs, "mean"),
        (other, theirs, "part"),  # which it averages itself
        (third, theirs, "mean"),
    ]:
        with pytest.raises(ShareRefused):
            attempt.check_sender(peer, part, kind)
