"""A node that others cannot reach joins as a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.addresses import Reach
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.node import RunDHT
from dilocox.dht.records import PartRecord, part_key
from dilocox.dht.swarm import Swarm

Node = tuple[RunDHT, Swarm, RunClock]
OpenNode = Callable[..., Node]


@pytest.fixture(scope="module")
def first(open_node: OpenNode, operator: Identity) -> Node:
    return open_node(operator)


def opened(open_node: OpenNode, first: Node, key: Path, reach: Reach) -> Node:
    async def find_reach(p2p: Any, peers: Sequence[Any], own: Sequence[str]) -> Reach:
        return replace(reach, seen=(*map(str, peers), *own))

    return open_node(
        Identity.load_or_create(key),
        bootstraps=first[0].visible_addresses(),
        find_reach=find_reach,
    )


def test_the_bootstraps_are_asked_about_the_addresses_it_listens_on(
    open_node: OpenNode, first: Node, tmp_path: Path
) -> None:
    dht, *_ = opened(open_node, first, tmp_path / "key", Reach(kind="public"))
    bootstrap = first[0].visible_addresses()[0].rpartition("/")[2]
    (own,) = {address.partition("/p2p/")[0] for address in dht.visible_addresses()}
    assert dht.reach().kind == "public" and dht.reach().seen == (bootstrap, own)
    assert not dht.client_mode


def test_one_that_only_dials_out_is_a_client_and_names_no_address(
    open_node: OpenNode, first: Node, tmp_path: Path, run: str
) -> None:
    dht, swarm, _ = opened(open_node, first, tmp_path / "key", Reach(kind="dial_out"))
    assert dht.reach().kind == "dial_out" and dht.client_mode
    assert dht.visible_addresses() == ()
    assert swarm.publish(part_key(run, 9), PartRecord(part=9, position=1), 60)
    assert first[1].read(part_key(run, 9), PartRecord)
    assert dht.bootstrap_answers(5.0)


def test_one_behind_a_mapped_port_announces_what_others_found(
    open_node: OpenNode, first: Node, tmp_path: Path
) -> None:
    found = Reach(kind="mapped", addresses=("/ip4/198.51.100.7/tcp/31337",))
    dht, *_ = opened(open_node, first, tmp_path / "key", found)
    (address,) = dht.visible_addresses()
    assert address.startswith("/ip4/198.51.100.7/tcp/31337/p2p/")
    assert not dht.client_mode
