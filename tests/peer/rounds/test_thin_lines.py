"""An exchange over lines on which bytes take long: who is slow is not taken for dead."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.rounds.group import Mean
from tests.peer.members import (
    EXCHANGE_S,
    PATIENT_S,
    SILENCE_S,
    Group,
    Link,
    assert_two_faced_is_named,
    everything,
    record_of,
)

pytestmark = pytest.mark.usefixtures("no_fault_of_ours")


def test_means_that_take_longer_than_a_silence_may_and_hold_up_all_heartbeats_are_waited_for(
    identities: list[Identity], tmp_path: Path
) -> None:
    """They are on their way in the last part of the phase, too, and are then asked of nobody: the
    lines would have to bear them twice."""
    asked: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        asked.extend([receiver] * (kind == "fetch"))
        return True

    group = Group(identities[:4], tmp_path, passes=passes, silence_s=1.5, exchange_s=7.5)
    group.thin, group.thin_s = set(group.peers), 6.2
    results = asyncio.run(group.run())
    record_of(group, results)
    assert not asked
    assert not any(result.missed for result in results if result)


def test_a_member_that_is_only_silent_still_gets_the_means(
    identities: list[Identity], tmp_path: Path
) -> None:
    silent = sorted(identities[:4], key=lambda each: each.peer_id)[0].peer_id

    def passes(sender: str, receiver: str, kind: str) -> bool:
        return sender != silent or kind not in ("fetch", "record")

    group = Group(
        identities[:4],
        tmp_path,
        passes=passes,
        scheme="low_rank",
        clients=frozenset({0}),  # it averages nothing that the others would lack
        silence_s=SILENCE_S,
        exchange_s=PATIENT_S,
        computing_s=0.5,  # each in turn: by then it looks dead to the others
    )
    for peer in group.peers[1:]:
        group.queue[silent, peer] = 1  # its heartbeats come no sooner than the end
    record_of(group, asyncio.run(group.run()))


def test_means_that_nobody_holds_but_their_reducers_are_asked_for_before_the_time_is_over(
    identities: list[Identity], tmp_path: Path
) -> None:
    """Nobody could tell that it has them all."""

    def passes(sender: str, receiver: str, kind: str) -> bool:
        return kind != "mean0" or sender not in keepers

    group = Group(identities[:4], tmp_path, passes=passes, exchange_s=2 * EXCHANGE_S)
    keepers = set(group.grid.rows[0][:2])
    record_of(group, asyncio.run(group.run()))


@pytest.mark.parametrize("times", [1, 2])
def test_a_reducer_that_is_heard_again_is_not_lost_and_asked_for_its_mean(
    identities: list[Identity], tmp_path: Path, times: int
) -> None:
    """Others were asked in vain while it was silent, once each time."""
    reducer, me = sorted(each.peer_id for each in identities[:4])[:2]
    lost = {(reducer, "mean0"), (reducer, "words"), (me, "record")}
    asked = Counter[str]()

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if (sender, kind) != (me, "fetch"):
            return (sender, kind) not in lost
        asked[receiver] += 1
        if receiver != reducer and group.queue[reducer, me]:
            group.queue[reducer, me] = 0
            if asked[receiver] < times:
                asyncio.get_running_loop().call_later(0.2, group.queue.update, [(reducer, me)])
        return receiver == reducer

    group = Group(identities[:4], tmp_path, passes=passes, silence_s=1.0, exchange_s=5.0)
    group.queue[reducer, me] = 1  # its heartbeats come no sooner than it is asked for
    record_of(group, asyncio.run(group.run()))
    assert asked == Counter({reducer: 1} | dict.fromkeys(group.peers[2:], times))


def test_who_compares_means_over_a_slow_line_votes_as_those_who_found_two_of_one_reducer(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those have aborted by then. If the others now voted for their own means, all would wait for
    the liar's vote until the end of the exchange."""
    group = Group(identities[:4], tmp_path, passes=everything)
    liar = next(share.reducer for share in group.shares if share.numel)
    group.make_two_faced(liar)
    slow = set([peer for peer in group.peers if peer != liar][::2])
    fetch = Link.fetch_mean

    async def later(link: Link, peer: str, part: int, came: Callable[[], None]) -> Mean | None:
        if link.me in slow:
            await asyncio.sleep(1.0)
        return await fetch(link, peer, part, came)

    monkeypatch.setattr(Link, "fetch_mean", later)
    assert_two_faced_is_named(group, liar)


def test_who_heard_of_no_decision_asks_all_again(
    identities: list[Identity], tmp_path: Path
) -> None:
    """Whom it asked may not have heard of it either."""
    asked = Counter[str]()

    def passes(sender: str, receiver: str, kind: str) -> bool:
        if (sender, kind) == (deaf, "ask"):
            asked[receiver] += 1
            return asked[receiver] > 1 and receiver == knows
        return (receiver, kind) != (deaf, "vote")

    group = Group(identities[:3], tmp_path, passes=passes)
    deaf, knows = group.peers[0], group.peers[2]
    record_of(group, asyncio.run(group.run()))
    assert asked[knows] == 2
