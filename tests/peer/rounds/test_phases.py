"""An exchange of two phases: what happens between them, and to one phase alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox.dht.identity import Identity
from dilocox.dht.manifest_sections import DeadlineSpec
from dilocox.peer.rounds.group import AttemptSetup, Mean
from dilocox.peer.rounds.record import RoundRecord
from dilocox.peer.rounds.vote_count import Verdict
from tests.peer.averaged import own_contribution
from tests.peer.members import (
    EXCHANGE_S,
    SILENCE_S,
    VOTE_S,
    Group,
    blamed,
    everything,
    record_of,
    seconds,
    spoil,
    verdicts,
)

pytestmark = pytest.mark.usefixtures("no_fault_of_ours")

BOTH = pytest.mark.parametrize("scheme", ["dense", "low_rank"])


def two_phases(
    identities: list[Identity],
    folder: Path,
    *,
    passes: Callable[[str, str, str], bool] = everything,
    exchange_s: float = EXCHANGE_S,
) -> Group:
    return Group(
        identities[:3],
        folder,
        passes=passes,
        scheme="low_rank",
        bits=8,
        exchange_s=exchange_s,
        silence_s=SILENCE_S,
    )


def before_means(
    group: Group, peer: str, phase: int, what: Callable[[], Awaitable[object]]
) -> None:
    """Do something before each of a phase's means is given to a member."""
    attempt = group.attempts[peer]
    honest = attempt.on_mean

    async def receive(sender: str, mean: Mean) -> None:
        if group.shares[mean.part].phase == phase:
            await what()
        await honest(sender, mean)

    attempt.on_mean = receive  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the group has a time limit
        await asyncio.sleep(0.002)


def contributors(record: RoundRecord, phase: int) -> list[tuple[str, ...]]:
    return [part.contributors for part in record.parts if part.phase == phase]


# ---- members that are gone -----------------------------------------------------------------------
@pytest.mark.parametrize("victim", range(3))
def test_a_member_killed_between_the_phases_voids_the_attempt_and_is_blamed(
    identities: list[Identity], tmp_path: Path, victim: int
) -> None:
    began: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if kind == "part1":
            began.append(sender)
        return not (began and group.peers[victim] in (sender, receiver))

    group = two_phases(identities, tmp_path, passes=passes)
    results = asyncio.run(group.run())
    survivors = [result for index, result in enumerate(results) if index != victim]
    assert began
    assert verdicts(survivors) == {Verdict.VOID}
    assert seconds(survivors) < 2 * (SILENCE_S + VOTE_S)
    assert blamed(survivors) == [group.peers[victim]]


@pytest.mark.parametrize("phase", [0, 1])
def test_a_member_that_freezes_while_it_decodes_a_part_voids_the_attempt_and_is_blamed(
    identities: list[Identity], tmp_path: Path, phase: int
) -> None:
    group = two_phases(identities, tmp_path)
    victim = group.peers[1]
    attempt = group.attempts[victim]
    honest = attempt.on_part

    async def receive(peer: str, part: int, payload: bytes) -> None:
        if group.shares[part].phase == phase:
            group.frozen.add(victim)
            await asyncio.Event().wait()
        await honest(peer, part, payload)

    attempt.on_part = receive  # type: ignore[method-assign]
    results = asyncio.run(group.run())
    survivors = [results[0], results[2]]
    assert group.frozen
    assert verdicts(survivors) == {Verdict.VOID}
    assert seconds(survivors) < 2 * (SILENCE_S + VOTE_S)
    assert blamed(survivors) == [victim]


def test_a_member_that_freezes_once_its_work_is_done_is_in_a_record_that_the_others_commit(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = two_phases(identities, tmp_path)
    victim, *others = group.peers
    last = group.part(1, victim)

    async def freeze() -> None:
        await until(lambda: all(group.attempts[peer].mean(last) for peer in others))
        group.frozen.add(victim)
        await asyncio.Event().wait()

    before_means(group, victim, 1, freeze)
    results = asyncio.run(group.run())
    record = record_of(group, results[1:])
    assert group.frozen
    assert contributors(record, 1) == [tuple(group.peers)] * 3
    assert seconds(results[1:]) < SILENCE_S + 2 * VOTE_S


def test_a_mean_of_the_first_phase_that_one_member_has_is_had_by_all_though_the_attempt_is_void(
    identities: list[Identity], tmp_path: Path
) -> None:
    served: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        victim = group.peers[0]
        if sender == victim and kind == "mean0":
            served.append(receiver)
            return len(served) == 1
        return not (served and victim in (sender, receiver))

    group = two_phases(identities, tmp_path, passes=passes)
    victim, *others = group.peers
    results = asyncio.run(group.run())
    held = [group.attempts[peer].mean(group.part(0, victim)) for peer in others]
    assert served and held[0] is not None and held[0] == held[1]
    # nobody else has what the second phase needs of the victim
    assert verdicts(results[1:]) == {Verdict.VOID}
    assert blamed(results[1:]) == [victim]


# ---- one phase alone -----------------------------------------------------------------------------
def test_a_malformed_part_of_the_first_phase_leaves_its_sender_out_of_that_phase_only(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = two_phases(identities, tmp_path, exchange_s=12.0)
    liar, spoilt = group.peers[2], group.part(0, group.peers[0])
    spoil(group, group.peers[0], liar, spoilt)
    results = asyncio.run(group.run())
    assert seconds(results) < 4.0, "its part was waited for after it was refused"
    record = record_of(group, results)
    all_three = tuple(group.peers)
    expected = [all_three] * 3
    expected[spoilt] = all_three[:2]
    assert contributors(record, 0) == expected
    assert contributors(record, 1) == [all_three] * 3
    # the first phase chooses the basis only: what is averaged is still each member's own
    assert record.left_out(liar, group.codec) == []
    own = sum(
        own_contribution(record, peer, message, group.codec) * (tokens / sum(group.tokens))
        for peer, message, tokens in zip(group.peers, group.messages, group.tokens, strict=True)
    )
    assert isinstance(own, torch.Tensor)
    assert (record.average(group.codec) - own).norm() < 0.01 * own.norm()


def test_a_malformed_part_of_the_second_phase_leaves_its_senders_tensors_undecayed(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = two_phases(identities, tmp_path)
    reducer = group.shares[3].reducer  # of the first part of the second phase: the matrix is in it
    liar, *sound = sorted(group.peers, key=lambda peer: peer == reducer)
    spoil(group, reducer, liar, group.part(1, reducer))
    record = record_of(group, asyncio.run(group.run()))
    assert contributors(record, 0) == [tuple(group.peers)] * 3
    assert contributors(record, 1)[0] == tuple(sorted(sound))
    weight = group.codec.layout.slices[0]
    assert slice(weight.start, weight.start + weight.numel) in record.left_out(liar, group.codec)
    assert record.left_out(reducer, group.codec) == []


@BOTH
def test_a_member_whose_message_is_no_number_leaves_itself_out_and_follows_the_others(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    group = Group(identities[:3], tmp_path, passes=everything, exchange_s=EXCHANGE_S, scheme=scheme)
    group.messages[2].fill_(float("nan"))
    record = record_of(group, asyncio.run(group.run()))
    assert {part.contributors for part in record.parts} == {tuple(group.peers[:2])}
    assert record.average(group.codec).isfinite().all()


@BOTH
def test_a_member_that_can_only_dial_out_averages_nothing_but_is_in_every_mean(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    clients = frozenset({1})
    group = Group(identities[:3], tmp_path, passes=everything, scheme=scheme, clients=clients)
    record = record_of(group, asyncio.run(group.run()))
    assert {part.reducer for part in record.parts} == {group.peers[0], group.peers[2]}
    assert {part.contributors for part in record.parts} == {tuple(group.peers)}


@BOTH
@pytest.mark.parametrize("clients", [{1, 2}, {0, 1, 3}])
def test_members_that_do_not_hear_each_other_commit_as_soon_as_all_others(
    identities: list[Identity], tmp_path: Path, scheme: str, clients: set[int]
) -> None:
    asked: list[tuple[str, str]] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        deaf = {group.peers[at] for at in clients}
        asked.extend([(sender, receiver)] if {sender, receiver} <= deaf else [])
        return not {sender, receiver} <= deaf

    group = Group(
        identities[:4], tmp_path, passes=passes, scheme=scheme, clients=frozenset(clients)
    )
    results = asyncio.run(group.run())
    assert verdicts(results) == {Verdict.COMMITTED} and not asked
    record = record_of(group, results)
    assert {part.contributors for part in record.parts} == {tuple(group.peers)}
    for result in results:  # of three that only dial out each needs the votes of two others
        assert (
            result is not None
            and result.seconds < group.setups[group.peers[0]].deadlines.exchange_s
        )


# ---- members that are slow -----------------------------------------------------------------------
def test_parts_of_the_second_phase_are_taken_by_a_member_that_is_still_in_the_first(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = two_phases(identities, tmp_path)
    slow = group.peers[1]
    attempt, early = group.attempts[slow], list[str]()
    honest = attempt.on_part

    async def receive(peer: str, part: int, payload: bytes) -> None:
        await honest(peer, part, payload)
        if group.shares[part].phase == 1:
            early.append(peer)

    attempt.on_part = receive  # type: ignore[method-assign]
    others = {group.peers[0], group.peers[2]}
    before_means(group, slow, 0, lambda: until(lambda: others <= set(early)))
    record = record_of(group, asyncio.run(group.run()))
    assert contributors(record, 1) == [tuple(group.peers)] * 3


@pytest.mark.parametrize(("told", "least_s", "most_s"), [(False, 1.0, 3.0), (True, 0.0, 5.0)])
def test_a_mean_that_is_lost_on_its_way_is_asked_for_once_others_tell_of_it_or_its_phase_is_over(
    identities: list[Identity], tmp_path: Path, told: bool, least_s: float, most_s: float
) -> None:
    def passes(sender: str, receiver: str, kind: str) -> bool:
        lost = (sender, receiver, kind) == (group.peers[0], group.peers[1], "mean0")
        return not lost and (told or (receiver, kind) != (group.peers[1], "words"))

    group = two_phases(identities, tmp_path, passes=passes, exchange_s=20.0 if told else 2.0)
    results = asyncio.run(group.run())
    record = record_of(group, results)
    assert contributors(record, 1) == [tuple(group.peers)] * 3
    assert least_s <= seconds(results) < most_s


def test_a_member_too_late_for_the_second_phase_still_averages_its_part_and_votes(
    identities: list[Identity], tmp_path: Path
) -> None:
    def passes(sender: str, receiver: str, kind: str) -> bool:
        return not (sender == late and kind == "fetch")

    exchange_s = 6.0  # the late one has a fifth of it, also on a busy machine
    group = two_phases(identities, tmp_path, passes=passes, exchange_s=exchange_s)
    late = group.peers[1]

    def closed() -> bool:
        return all(group.attempts[peer].mean(group.part(1, peer)) for peer in group.peers)

    before_means(group, late, 0, lambda: until(closed))
    results = asyncio.run(group.run())
    record = record_of(group, results)
    assert contributors(record, 0) == [tuple(group.peers)] * 3
    assert contributors(record, 1) == [(group.peers[0], group.peers[2])] * 3
    assert seconds(results) < exchange_s + VOTE_S


def test_a_reducer_whose_means_of_the_first_phase_never_come_is_blamed_alone_at_the_deadline(
    identities: list[Identity], tmp_path: Path
) -> None:
    def passes(sender: str, receiver: str, kind: str) -> bool:
        # without its part of the second phase the others have nothing to average there
        lost = sender == silent and kind in ("mean0", "part1")
        return not lost and kind != "fetch"

    group = two_phases(identities, tmp_path, passes=passes)
    silent = group.peers[1]
    results = asyncio.run(group.run())
    assert verdicts(results) == {Verdict.VOID}
    assert EXCHANGE_S <= seconds(results) < EXCHANGE_S + VOTE_S + SILENCE_S
    assert blamed(results) == [silent]


# ---- the time of each phase ----------------------------------------------------------------------
def ends(setup: AttemptSetup, numel: int, codec_s: float = 0.0) -> tuple[float, ...]:
    """When phases of `numel` and of 6400 values should be over."""
    first, second = (next(share for share in setup.shares if share.phase == n) for n in (0, 1))
    shares = replace(first, start=0, stop=numel), replace(second, start=0, stop=6400)
    deadlines = DeadlineSpec(exchange_s=100.0)
    changed = replace(setup, shares=shares, deadlines=deadlines, codec_s=codec_s)
    return tuple(end for _, end in changed.phase_spans_s())


def test_each_phase_has_a_quarter_of_the_exchanges_time_and_more_by_its_bytes(
    identities: list[Identity], tmp_path: Path
) -> None:
    setup = two_phases(identities, tmp_path / "two").setups[identities[0].peer_id]
    assert ends(setup, 0) == (25.0, 100.0)
    assert ends(setup, 6400) == (50.0, 100.0)
    assert ends(setup, 6400, codec_s=40.0) == (90.0, 180.0)
    first, last = ends(setup, 64000)
    assert 70 < first < 75 and last == 100.0
    dense = Group(identities[:1], tmp_path / "one", passes=everything, exchange_s=EXCHANGE_S)
    assert dense.setups[identities[0].peer_id].phase_spans_s() == [(0.0, EXCHANGE_S)]


def test_what_members_compute_may_take_longer_than_the_bytes(
    identities: list[Identity], tmp_path: Path
) -> None:
    group = Group(
        identities[:3],
        tmp_path,
        passes=everything,
        scheme="low_rank",
        bits=8,
        exchange_s=2.0,
        codec_s=8.0,
        computing_s=1.5,  # the last one is ready after 4.5 s
    )
    results = asyncio.run(group.run())
    assert contributors(record_of(group, results), 0) == [tuple(group.peers)] * 3
    for result in results:
        assert result is not None and result.limit_s == 2.0 + 2 * 8.0
        assert result.codec_s >= 1.5
