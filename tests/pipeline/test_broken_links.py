"""What a link notices (silence, death), refuses (rubbish) and bounds, over real p2pd processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dilocox.pipeline import link as link_module
from dilocox.pipeline.frames import Frame, encode_prefix_and_header
from dilocox.pipeline.link import Arrived, Broken, Opened
from dilocox.pipeline.network import Unreachable
from tests.pipeline.neighbours import (
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
    upper, lower = Peer(nodes[0], silence_s=2.0), Peer(nodes[1], silence_s=20.0)
    with running(upper, lower):
        keys = link(upper, lower)
        with frozen(nodes[1]):
            time.sleep(0.6)
            thawed = threading.Event()
            upper.network.thread.post(lambda: (time.sleep(3.0), thawed.set()))
            assert thawed.wait(5.0)  # longer than the limit, but nobody has watched
            time.sleep(0.1)
        upper.network.send(keys[0], small(1))
        assert lower.next(Arrived).frame.step == 1
        assert upper.hears_nothing(0.5)


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
            with pytest.raises(Unreachable):
                lower.network.request(upper.id, PING, 1.0)
            began = time.monotonic()
            lower.network.close()
            assert time.monotonic() - began < 3.0
            assert upper.network.request_all({node.peer: PING}, 2.0) == {node.peer: None}
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
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (small(0, epoch=2), "epoch"),
        (Frame(kind="sum", replica="another", epoch=1), "epoch"),
        (small(0, kind="ping"), "kind"),
        (small(0, kind="hello"), "kind"),
        (small(0, kind="yes"), "kind"),
        (Frame(kind="heartbeat", replica=REPLICA, epoch=1), "header"),
    ],
    ids=["epoch", "replica", "request", "hello", "answer", "heartbeat"],
)
def test_frame_that_cannot_be_breaks_its_link(
    pair: tuple[Peer, Peer], frame: Frame, kind: str
) -> None:
    upper, lower = pair
    keys = link(upper, lower)
    upper.network.send(keys[0], frame)
    broken = lower.next(Broken)
    assert (broken.key, broken.peer, broken.kind) == (keys[1], upper.id, "refused")
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
def test_rubbish_instead_of_a_request_gets_no_answer(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, rubbish: bytes
) -> None:
    monkeypatch.setattr("dilocox.pipeline.requests.OPENING_LIMIT_S", 1.0)
    peer = Peer(nodes[0])
    with running(peer):
        assert raw_stream(nodes[1], peer.id, rubbish) == b""
        assert peer.asked == []
        assert peer.hears_nothing(0.0)


def test_peer_may_open_only_so_many_streams_without_a_frame(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dilocox.pipeline.requests.STRANGERS_OF_A_PEER", 0)
    peer = Peer(nodes[0])
    with running(peer):
        assert raw_stream(nodes[1], peer.id, PING) == b""
        assert peer.network.refused == {"crowd": 1}


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


def test_who_takes_nothing_slows_its_neighbour_and_blocks_nobody(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "INBOX_BYTES", 0)  # so four of the largest frames
    upper, lower, third = (Peer(node, silence_s=1.0) for node in nodes)
    frames = [large(each) for each in range(16)]
    with running(upper, lower, third):
        keys = link(upper, lower)
        for frame in frames:
            upper.network.send(keys[0], frame)
        until(lambda: lower.network.received_bytes > 4 * 8 * 2**20)
        assert third.network.request(lower.id, PING, 1.0).kind == "yes"
        time.sleep(1.5)  # longer than the silence limit
        assert lower.network.received_bytes < 8 * 8 * 2**20
        assert [lower.next(Arrived).frame for _ in frames] == frames
        lower.network.send(keys[1], small(1))
        assert upper.next(Arrived).frame.step == 1


def test_frame_that_nobody_would_take_is_the_senders_mistake(pair: tuple[Peer, Peer]) -> None:
    keys = link(*pair)
    with pytest.raises(ValueError, match="payload"):
        pair[0].network.send(keys[0], Frame(kind="sum", payload=b"1"))
