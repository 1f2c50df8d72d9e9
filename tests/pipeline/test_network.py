"""Requests and links over real p2pd processes: what arrives, is noticed, refused and bounded."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dilocox.pipeline.frames import Frame, encode_prefix_and_header
from dilocox.pipeline.link import Arrived, Broken, LinkFacts, Opened, Wake
from dilocox.pipeline.requests import StrangerLimits
from tests.pipeline.neighbours import (
    LIMITS,
    PING,
    REPLICA,
    Node,
    Peer,
    frozen,
    hello,
    large,
    link,
    raw_stream,
    running,
    small,
    until,
)


# ---- requests ------------------------------------------------------------------------------------
def test_request_is_answered_by_a_peer_who_knows_who_asks(pair: tuple[Peer, Peer]) -> None:
    upper, lower = pair
    answer = upper.ask(lower.id)
    assert answer is not None
    assert (answer.kind, answer.facts) == ("yes", {"me": lower.id})
    assert lower.asked == [(upper.id, PING)]


def test_many_are_asked_at_once_and_those_that_are_gone_are_none(nodes: list[Node]) -> None:
    asking, answering, gone = Peer(nodes[0]), Peer(nodes[1]), nodes[2].peer
    with running(asking, answering):
        frames = dict.fromkeys((answering.id, gone, "no peer id"), PING)
        began = time.monotonic()
        answers = asking.network.request_all(frames, 5.0)
        assert time.monotonic() - began < 2.0
    answer = answers.pop(answering.id)
    assert answer is not None
    assert 0 < answer.round_trip_s < 1.0
    assert answers == {gone: None, "no peer id": None}


def test_frozen_peer_costs_a_request_its_limit_and_no_more(nodes: list[Node]) -> None:
    asking, other = Peer(nodes[0]), Peer(nodes[1])
    with running(asking, other), frozen(nodes[1]):
        began = time.monotonic()
        assert asking.ask(other.id, timeout_s=0.5) is None
        assert 0.4 < time.monotonic() - began < 1.0


def test_failing_answer_ends_that_request_only(pair: tuple[Peer, Peer]) -> None:
    upper, lower = pair
    assert upper.ask(lower.id, Frame(kind="ping", facts={"fail": True})) is None
    assert upper.ask(lower.id)


def test_wake_ends_a_wait(pair: tuple[Peer, Peer]) -> None:
    pair[0].network.wake()
    assert pair[0].next(Wake) == Wake()


# ---- links ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dialler", ["upper", "lower"])
def test_link_carries_frames_in_order_whoever_dials(pair: tuple[Peer, Peer], dialler: str) -> None:
    upper, lower = pair
    if dialler == "upper":
        dialled = upper.dial(lower.id, "lower")
        assert upper.hears_nothing(0.5)  # it waits for one who learns of the link later
        keys = dialled, lower.expect(upper.id, "upper")
    else:
        keys = upper.expect(lower.id, "lower"), lower.dial(upper.id, "upper")
    upper.network.send(keys[0], small(0))  # it waits for the link
    assert upper.next(Opened) == Opened(keys[0])
    assert lower.next(Opened) == Opened(keys[1])
    for step in range(1, 20):
        upper.network.send(keys[0], small(step))
        lower.network.send(keys[1], small(step, kind="go"))
    assert [lower.next(Arrived).frame.step for _ in range(20)] == list(range(20))
    arrived = [upper.next(Arrived) for _ in range(19)]
    assert arrived == [Arrived(keys[0], small(step, kind="go")) for step in range(1, 20)]


def test_link_knows_its_round_trip_on_both_sides(pair: tuple[Peer, Peer]) -> None:
    keys = link(*pair)
    for peer, key in zip(pair, keys, strict=True):
        until(lambda p=peer, k=key: p.network.link_facts(k).round_trip_s)
        facts = peer.network.link_facts(key)
        assert 0 < facts.round_trip_s < 0.2
        assert facts.received_bytes_per_s == 0.0
    assert pair[0].network.link_facts(keys[1]) == LinkFacts()
    assert [list(peer.network.round_trips_s()) for peer in pair] == [["lower"], ["upper"]]
    assert 0 < pair[0].network.round_trips_s()["lower"] < 0.2


def test_large_frames_cross_each_other_unharmed(pair: tuple[Peer, Peer]) -> None:
    upper, lower = pair
    keys = link(upper, lower)
    for microbatch in range(3):
        upper.network.send(keys[0], large(microbatch))
        lower.network.send(keys[1], large(10 + microbatch, "gradient"))
    assert [lower.next(Arrived).frame for _ in range(3)] == [large(each) for each in range(3)]
    gradients = [upper.next(Arrived).frame for _ in range(3)]
    assert gradients == [large(10 + each, "gradient") for each in range(3)]
    assert lower.network.link_facts(keys[1]).received_bytes_per_s > 1e6
    assert upper.network.sent_bytes > 3 * 8 * 2**20
    assert upper.network.received_bytes > 3 * 8 * 2**20


def test_link_that_nobody_takes_up_is_missing_on_either_side(nodes: list[Node]) -> None:
    upper, lower, third = (Peer(node, silence_s=1.0) for node in nodes)
    with running(upper, lower, third):
        key = upper.dial(lower.id, "lower")
        broken = upper.next(Broken)
        assert (broken.key, broken.kind) == (key, "missing")
        assert 0.9 < broken.after_s < 1.6
        lower.expect(third.id, "upper")  # another than the one who dials
        upper.dial(lower.id, "lower")
        assert lower.next(Broken).kind == "missing"
        assert upper.next(Broken).kind == "missing"


def test_hello_that_is_not_admitted_gets_a_no(pair: tuple[Peer, Peer], nodes: list[Node]) -> None:
    lower = pair[1]
    lower.expect(nodes[2].peer, "upper")
    strange = Frame(kind="hello", replica=REPLICA, epoch=1)
    other_epoch = hello("lower", epoch=2)
    no = [Frame(kind="no", replica=REPLICA, epoch=epoch) for epoch in (1, 2)]
    assert raw_stream(nodes[2], lower.id, strange) == encode_prefix_and_header(no[0])
    assert raw_stream(nodes[2], lower.id, other_epoch) == encode_prefix_and_header(no[1])
    assert lower.hears_nothing(0.1)


def test_dropped_links_are_silent_here_and_closed_there(pair: tuple[Peer, Peer]) -> None:
    head, second = pair
    keys = link(head, second)
    head.network.send(keys[0], small(7, kind="dissolve"))
    head.network.drop_links()
    second.network.send(keys[1], small(8))  # too late, or to nobody
    assert second.next(Arrived).frame.step == 7  # what was said last is heard
    assert second.next(Broken).kind == "closed"
    assert head.hears_nothing(0.5)


def test_links_that_have_ended_are_silent_once_they_are_dropped(pair: tuple[Peer, Peer]) -> None:
    head, second = pair
    link(head, second)
    until(second.network.round_trips_s)
    head.network.drop_links()
    until(lambda: not second.network.round_trips_s())  # its `Broken` lies in the inbox
    second.network.drop_links()
    assert second.hears_nothing(0.5)


def test_link_made_anew_under_its_key_gives_nothing_of_the_old_one(
    pair: tuple[Peer, Peer],
) -> None:
    upper, lower = pair
    keys = link(upper, lower)
    before = upper.network.received_bytes
    lower.network.send(keys[1], small(1))
    until(lambda: upper.network.received_bytes - before > 16 + 40)  # more than heartbeats
    for peer in pair:
        peer.network.drop_links()
    link(upper, lower)
    lower.network.send(keys[1], small(2))
    assert upper.next(Arrived).frame.step == 2


# ---- what is noticed -----------------------------------------------------------------------------
def test_frozen_neighbour_is_silent_within_the_limit(nodes: list[Node]) -> None:
    upper, lower = (Peer(node, silence_s=1.0) for node in nodes[:2])
    with running(upper, lower):
        key, _ = link(upper, lower)
        assert upper.hears_nothing(1.5)  # heartbeats keep an idle link
        with frozen(nodes[1]):
            began = time.monotonic()
            broken = upper.next(Broken)
            assert 0.6 < time.monotonic() - began < 1.5
            assert (broken.key, broken.kind) == (key, "silent")
            assert broken.after_s == pytest.approx(1.1, abs=0.3)
            assert lower.next(Broken).kind == "silent"


def test_who_was_frozen_itself_accuses_nobody(nodes: list[Node]) -> None:
    upper, lower, third = (
        Peer(nodes[0], silence_s=1.0),
        Peer(nodes[1], silence_s=20.0),
        Peer(nodes[2]),
    )
    frozen_s = Frame(kind="ping", replica=REPLICA, facts={"blocks_s": 1.5})
    with running(upper, lower, third):
        keys = link(upper, lower)
        with frozen(nodes[1]):  # longer than the limit, but nobody has watched
            assert third.ask(upper.id, frozen_s)
        upper.network.send(keys[0], small(1))
        assert lower.next(Arrived).frame.step == 1
        assert upper.hears_nothing(0.3)


def test_killed_p2pd_closes_links_and_the_network_closes_after_it(
    nodes: list[Node], tmp_path: Path
) -> None:
    node = Node.open(tmp_path, nodes[0].dht.visible_addresses())
    upper, lower = Peer(nodes[0]), Peer(node)
    try:
        with running(upper, lower):
            link(upper, lower)
            os.kill(node.dht.p2pd_pid, signal.SIGKILL)
            began = time.monotonic()
            assert upper.next(Broken).kind == "closed"
            assert lower.next(Broken).kind == "closed"
            assert time.monotonic() - began < 2.0
            assert lower.ask(upper.id, timeout_s=1.0) is None
            began = time.monotonic()
            lower.network.close()
            assert time.monotonic() - began < 3.0
            assert upper.ask(node.peer, timeout_s=2.0) is None
            assert lower.ask(upper.id) is None, "it is closed"
    finally:
        node.dht.close()


def test_closed_network_leaves_no_thread_and_no_socket(nodes: list[Node]) -> None:
    threads, files = threading.active_count(), open_files()
    for _ in range(3):
        upper, lower = Peer(nodes[0]), Peer(nodes[1])
        with running(upper, lower):
            keys = link(upper, lower)
            upper.network.request_all({lower.id: PING, nodes[2].peer: PING}, 2.0)
            lower.dial(nodes[2].peer, "lower", epoch=3)  # to nobody, again and again
            upper.network.send(keys[0], large(0))
            began = time.monotonic()
            upper.network.close()
            assert time.monotonic() - began < 3.0
    assert threading.active_count() == threads
    until(lambda: open_files() <= files, 3.0)


def open_files() -> int:
    gc.collect()  # of earlier tests, whose number does not matter
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (small(0, epoch=2), "epoch"),
        (Frame(kind="sum", replica="another", epoch=1), "epoch"),
        (small(0, kind="hello"), "kind"),
        (small(0, kind="yes"), "kind"),
        (small(0, kind="heartbeat"), "header"),
    ],
    ids=["epoch", "replica", "hello", "answer", "heartbeat"],
)
def test_frame_that_cannot_be_breaks_its_link(
    pair: tuple[Peer, Peer], frame: Frame, kind: str
) -> None:
    upper, lower = pair
    keys = link(upper, lower)
    upper.network.send(keys[0], frame)
    broken = lower.next(Broken)
    assert (broken.key, broken.kind) == (keys[1], "refused")
    assert lower.network.refused == {kind: 1}
    assert upper.next(Broken).kind == "closed"


@pytest.mark.parametrize(
    "rubbish",
    [b"\x00" * 64, bytes(range(256)), b"dx\x01\x00" + b"\xff" * 12, encode_prefix_and_header(PING)],
    ids=["zeros", "bytes", "oversized", "request"],
)
def test_rubbish_on_a_link_breaks_it(
    pair: tuple[Peer, Peer], nodes: list[Node], rubbish: bytes
) -> None:
    lower = pair[1]
    key = lower.expect(nodes[2].peer, "upper")
    assert raw_stream(nodes[2], lower.id, hello("lower"), rubbish)
    assert lower.next(Opened).key == key
    assert lower.next(Broken).kind == "refused"
    assert lower.network.refused.total() == 1


@pytest.mark.parametrize(
    "rubbish",
    [b"\x00" * 64, b"dx\x01\x00" + b"\xff" * 12, encode_prefix_and_header(small(0)), b"dx"],
    ids=["zeros", "oversized", "link frame", "nothing more"],
)
def test_rubbish_instead_of_a_request_gets_no_answer(nodes: list[Node], rubbish: bytes) -> None:
    peer = Peer(nodes[0], strangers=StrangerLimits(opening_s=0.5))
    with running(peer):
        assert raw_stream(nodes[1], peer.id, rubbish) == b""
        assert peer.asked == []
        assert peer.hears_nothing(0.0)


def test_peer_may_open_only_so_many_streams_without_a_frame(nodes: list[Node]) -> None:
    peer = Peer(nodes[0], strangers=StrangerLimits(strangers_of_a_peer=0))
    with running(peer):
        assert raw_stream(nodes[1], peer.id, PING) == b""
        assert peer.network.refused == {"crowded": 1}


def test_who_has_to_do_with_a_peer_has_places_that_no_stranger_fills(nodes: list[Node]) -> None:
    """Sixteen keys with idle streams closed a peer to its own replica."""
    peer = Peer(nodes[0], strangers=StrangerLimits(strangers=0), known={nodes[1].peer})
    with running(peer):
        assert raw_stream(nodes[1], peer.id, PING) != b""
        assert not peer.network.refused


def test_link_over_which_came_what_cannot_be_is_broken(pair: tuple[Peer, Peer]) -> None:
    upper, lower = pair
    keys = link(upper, lower)
    upper.network.break_link(keys[0], "order")
    assert upper.next(Broken).kind == "refused"
    assert upper.network.refused == {"order": 1}
    assert lower.next(Broken).kind == "closed"


# ---- what is bounded -----------------------------------------------------------------------------
def test_more_frames_than_may_wait_are_a_flood(nodes: list[Node]) -> None:
    upper, lower = Peer(nodes[0]), Peer(nodes[1], max_queued=50)
    with running(upper, lower):
        keys = link(upper, lower)
        for step in range(51):
            upper.network.send(keys[0], small(step))
        until(lambda: lower.network.refused["flood"])
        assert [lower.next(Arrived).frame.step for _ in range(50)] == list(range(50))
        assert lower.next(Broken).kind == "refused"


def test_more_frames_than_may_wait_to_be_sent_break_the_link(nodes: list[Node]) -> None:
    peer = Peer(nodes[0], max_queued=50)
    with running(peer):
        key = peer.expect(nodes[1].peer, "lower")
        for step in range(51):
            peer.network.send(key, small(step))
        assert peer.next(Broken).kind == "stuck"
        peer.network.send(key, small(0))  # to a link that is gone


def test_more_bytes_than_there_is_room_for_break_the_link_to_who_reads_nothing(
    nodes: list[Node],
) -> None:
    """It could feed a member without end, and have that keep all that it made of it."""
    room = [10 * LIMITS.max_payload]
    peer = Peer(nodes[0], inbox_bytes=0, room=lambda: room[0])
    with running(peer):
        key = peer.expect(nodes[1].peer, "lower")
        count = room[0] // len(large(0).payload)
        for step in range(count):
            peer.network.send(key, large(step))
        room[0] = 0  # there is less memory now: more than four of the largest frames wait
        peer.network.send(key, large(count))
        assert peer.next(Broken).kind == "stuck"


def test_who_takes_nothing_slows_its_neighbour_and_blocks_nobody(nodes: list[Node]) -> None:
    # so four of the largest frames
    upper, lower, third = (Peer(node, silence_s=1.0, inbox_bytes=0) for node in nodes)
    frames = [large(each) for each in range(16)]
    with running(upper, lower, third):
        keys = link(upper, lower)
        for frame in frames:
            upper.network.send(keys[0], frame)
        until(lambda: lower.network.received_bytes > 4 * 8 * 2**20)
        assert third.ask(lower.id, timeout_s=1.0)
        assert upper.hears_nothing(1.2)  # longer than the silence limit
        assert lower.network.received_bytes < 8 * 8 * 2**20
        assert [lower.next(Arrived).frame for _ in frames] == frames
        lower.network.send(keys[1], small(1))
        assert upper.next(Arrived).frame.step == 1
