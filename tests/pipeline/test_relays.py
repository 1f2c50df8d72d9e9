"""Requests between two peers that can only dial out, by way of others: over real p2pd processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.requests import StrangerLimits
from tests.pipeline.neighbours import (
    PING,
    RUN,
    Node,
    Peer,
    frozen,
    opened_nodes,
    raw_stream,
    running,
    until,
)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two that can be reached, then two that only dial out."""
    with opened_nodes(tmp_path_factory.mktemp("keys"), 2, dialling=2) as opened:
        yield opened


@pytest.fixture
def peers(nodes: list[Node]) -> Iterator[list[Peer]]:
    """The same, their networks up; those that dial out have dialled both others."""
    up = [Peer(node) for node in nodes]
    with running(*up):
        for peer in up[2:]:
            for other in up[:2]:
                # as a head does: a dial may fail where a machine is busy, and is tried again
                until(lambda a=peer, b=other: a.ask(b.id, timeout_s=2.0))
        yield up


def test_a_request_arrives_by_way_of_another_peer(peers: list[Peer]) -> None:
    relay, _, head, far = peers
    assert head.ask(far.id, timeout_s=2.0) is None
    head.relays = {far.id: [relay.id]}
    answer = head.ask(far.id)
    assert answer is not None
    assert (answer.kind, answer.facts) == ("yes", {"me": far.id})
    assert far.asked == [(head.id, PING)], "the far one knows who asks, not who brought it"


def test_of_two_ways_one_is_enough_and_the_request_counts_once(
    peers: list[Peer], nodes: list[Node]
) -> None:
    relay, other, head, far = peers
    head.relays = {far.id: [relay.id, other.id]}
    for count in range(1, 6):
        assert head.ask(far.id)
        assert len(far.asked) == count
    assert not far.network.refused, "the same request by another way is no fault"
    with frozen(nodes[1]):
        for _ in range(3):
            assert head.ask(far.id)
    other.network.close()
    assert head.ask(far.id)


def test_who_is_gone_costs_no_more_than_the_limit(peers: list[Peer]) -> None:
    relay, other, head, far = peers
    far.network.close()
    head.relays = {far.id: [relay.id, other.id]}
    began = time.monotonic()
    assert head.ask(far.id, timeout_s=4.0) is None
    assert time.monotonic() - began < 5.0


def test_a_request_that_was_brought_before_or_is_none_is_refused(
    peers: list[Peer], nodes: list[Node]
) -> None:
    relay, _, head, far = peers
    old, _ = head.relayed.ask(far.id, PING)
    sealed, _ = head.relayed.ask(far.id, PING)
    carried = Frame(kind="relay", sealed=sealed, facts={"to": far.id})
    assert b"reply" in raw_stream(nodes[2], relay.id, carried)
    assert far.asked == [(head.id, PING)]
    for odd in (sealed, old):
        carried = Frame(kind="relay", sealed=odd, facts={"to": far.id})
        answer = raw_stream(nodes[2], relay.id, carried)
        assert b"reply" not in answer and b"reason" in answer
    for node, odd in ((nodes[2], b"?"), (nodes[1], head.relayed.ask(far.id, PING)[0])):
        carried = Frame(kind="relay", sealed=odd, facts={"to": far.id})
        assert b"reply" not in raw_stream(node, relay.id, carried)
    until(lambda: relay.network.refused["sealed"] == 2)
    assert len(far.asked) == 1 and not far.network.refused, "they would count against the relay"


@pytest.mark.parametrize("limit", ["passed_on", "passed_on_of_a_peer"])
def test_requests_to_who_does_not_answer_take_few_places_of_strangers(
    nodes: list[Node], limit: str
) -> None:
    head, far = Peer(nodes[2]), Peer(nodes[3])
    relay = Peer(nodes[0], strangers=StrangerLimits(**{limit: 2}))
    with running(relay, head, far):
        assert far.ask(relay.id)
        head.relays = {far.id: [relay.id]}
        post = RelayedRequests(nodes[1].identity, RUN, nodes[1].clock.time)
        sealed, _ = post.ask(far.id, PING)
        carried = Frame(kind="relay", sealed=sealed, facts={"to": far.id})
        with frozen(nodes[3]), ThreadPoolExecutor() as pool:
            held = [pool.submit(raw_stream, nodes[1], relay.id, carried) for _ in range(5)]
            until(lambda: relay.network.refused["crowded"] == 3)
            assert not all(each.done() for each in held)
            assert head.ask(relay.id, timeout_s=1.0), "it answers others"
            assert sum(b"crowded" in each.result() for each in held) == 3
        assert head.ask(far.id), "the places are free again"
