"""Who is given a value and who is asked for it: the nodes next to its key, and always the run's
bootstraps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from dilocox.dht import keepers as keepers_module
from dilocox.dht.identity import Identity
from dilocox.dht.keepers import LATER_S, PATIENCE_S, PAUSE_S, SEARCH_WAIT_S, Keepers
from dilocox.dht.protocol import NEAREST, Entry, node_id_of
from dilocox.dht.rpc import NODE_REFUSALS, Counts
from dilocox.dht.storage import BoundedStorage

KEY, OTHER = DHTID.generate("a key"), DHTID.generate("another key")
LATE = 4e9
LOOKS = 8
LATE_S = 1.0


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("crowd")
    return [Identity.load_or_create(folder / f"{number}.key") for number in range(NEAREST + 4)]


class Wires:
    """The nodes of a swarm, as one of them meets them. Those that are `near` lie next to the key;
    of the rest `silent` ones say that they take what they are given, and tell nobody of it; those
    that are `late` answer after so many seconds.
    """

    def __init__(self, identities: Sequence[Identity]) -> None:
        peers = [PeerID.from_base58(each.peer_id) for each in identities]
        self.me, self.bootstrap, *self.others = sorted(
            peers, key=lambda peer: node_id_of(peer.to_bytes()).xor_distance(KEY), reverse=True
        )
        self.silent: Collection[PeerID] = ()
        self.gone: Collection[PeerID] = ()
        self.late_s = dict[PeerID, float]()
        self.kept: dict[PeerID, dict[bytes | None, Entry]] = {}
        self.asked: list[PeerID] = []
        self.storage = BoundedStorage(Counts(NODE_REFUSALS))
        self.client_mode = False
        self.routing_table = SimpleNamespace(get_nearest_neighbors=self._nearest)

    def keepers(self, **options: Any) -> Keepers:
        node: Any = SimpleNamespace(
            node_id=node_id_of(self.me.to_bytes()),
            peer_id=self.me,
            protocol=self,
            blacklist=Blacklist(base_time=5.0, backoff_rate=2.0),
        )
        return Keepers(cast("DHTNode", node), [str(self.bootstrap)], **options)

    def _nearest(self, key: DHTID, count: int, exclude: DHTID | None = None) -> Any:
        nodes = {node_id_of(peer.to_bytes()): peer for peer in [*self.others, self.bootstrap]}
        return [(each, nodes[each]) for each in sorted(nodes, key=key.xor_distance)[:count]]

    def accepts(self, key: DHTID, entry: Entry) -> bool:
        return True

    async def call_nearest(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        await asyncio.sleep(self.late_s.get(peer, 0.0))
        return {key: {} for key in keys}

    async def call_store(
        self, peer: PeerID, values: Sequence[bytes], subkeys: Sequence[bytes], **_: Any
    ) -> list[bool] | None:
        await asyncio.sleep(self.late_s.get(peer, 0.0))
        if peer in self.gone:
            return None
        for subkey, value in zip(subkeys, values, strict=True):
            self.kept.setdefault(peer, {})[subkey] = Entry(subkey, value, LATE)
        return [True] * len(values)

    async def call_news(self, peer: PeerID, known: Mapping[DHTID, Collection[bytes]]) -> Any:
        self.asked.append(peer)
        await asyncio.sleep(self.late_s.get(peer, 0.0))
        if peer in self.gone:
            return None
        found = [] if peer in self.silent else list(self.kept.get(peer, {}).values())
        return {key: [e for e in found if e.mark not in marks] for key, marks in known.items()}


async def look(keepers: Keepers, key: DHTID = KEY, **how: Any) -> bool:
    """Whether somebody tells of a value under the key."""
    found = await keepers.news({key: ()}, **{"thorough": False, "timeout_s": 5.0} | how)
    return bool(found.get(key))


def test_what_silent_keys_next_to_a_key_keep_to_themselves_is_heard_from_a_bootstrap(
    crowd: list[Identity],
) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.silent = wires.others
        assert len(wires.others) > NEAREST, "the bootstrap is none of the nearest"
        keepers = wires.keepers()
        assert await keepers.store({KEY: Entry(b"me", b"here", LATE)})
        assert wires.bootstrap in wires.kept
        looks = [(await look(keepers), await look(keepers, OTHER)) for _ in range(LOOKS)]
        for one in zip(*looks, strict=True):  # whatever else is asked between
            assert one in ((True, False) * (LOOKS // 2), (False, True) * (LOOKS // 2))
        assert [e.value for e in await keepers.everything(KEY, timeout_s=5.0)] == [b"here"]

    asyncio.run(scene())


def test_while_the_bootstrap_is_away_the_others_are_asked(
    crowd: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.gone = [wires.bootstrap]
        keepers = wires.keepers()
        assert await keepers.store({KEY: Entry(b"me", b"here", LATE)})
        assert all([await look(keepers) for _ in range(LOOKS)])
        assert wires.bootstrap not in wires.asked, "it is left alone for a while"
        assert len(set(wires.asked)) > 1, "always the same one"
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + PAUSE_S)
        monkeypatch.setattr(keepers_module, "time", later)
        wires.gone = []
        assert all([await look(keepers) for _ in range(2)])
        assert wires.bootstrap in wires.asked

    asyncio.run(scene())


@pytest.mark.parametrize("thorough", [False, True])
def test_keys_that_answer_late_keep_nobody_from_a_bootstrap(
    crowd: list[Identity], thorough: bool
) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.silent, wires.late_s = wires.others, dict.fromkeys(wires.others, LATE_S)
        keepers = wires.keepers()
        storing = asyncio.create_task(keepers.store({KEY: Entry(b"me", b"here", LATE)}))
        await asyncio.sleep(0.01)
        assert wires.bootstrap in wires.kept, "it is told at once"
        began = time.monotonic()
        assert await look(keepers, thorough=thorough, timeout_s=0.5 * LATE_S)
        assert await keepers.everything(KEY, timeout_s=5.0)
        assert time.monotonic() - began < LATE_S + LATER_S
        assert await asyncio.wait_for(storing, SEARCH_WAIT_S + 4 * LATE_S)

    asyncio.run(scene())


def test_who_answers_late_is_passed_over_for_longer_and_longer(
    crowd: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        wires, forward_s = Wires(crowd), 0.0
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + forward_s)
        monkeypatch.setattr(keepers_module, "time", later)
        wires.silent = wires.others
        keepers, entry = wires.keepers(), Entry(b"me", b"here", LATE)

        async def seconds(call: Awaitable[bool]) -> float:
            began = time.monotonic()
            assert await call
            return time.monotonic() - began

        assert await keepers.store({KEY: entry})
        wires.late_s = dict.fromkeys(wires.others, LATE_S)
        assert PATIENCE_S <= await seconds(keepers.store({KEY: entry})) < LATE_S
        near = set(wires.kept) - {wires.bootstrap}
        for pause_s in (PAUSE_S, 2 * PAUSE_S):
            for _ in range(LOOKS):
                wires.asked.clear()
                assert await seconds(look(keepers)) < PATIENCE_S, "nobody waits for them"
                assert wires.asked == [wires.bootstrap]
            wires.kept.clear()
            assert await seconds(keepers.store({KEY: entry})) < PATIENCE_S
            await asyncio.sleep(1.5 * LATE_S)
            assert near <= wires.kept.keys(), "they are told, all the same"
            forward_s += pause_s - PAUSE_S / 2
            wires.asked.clear()
            assert await look(keepers) and wires.asked == [wires.bootstrap], "too early"
            forward_s += PAUSE_S / 2
            wires.asked.clear()
            assert PATIENCE_S <= await seconds(look(keepers)) < LATE_S
            assert wires.asked[1:] == [wires.bootstrap], "instead of it"
            for _ in range(len(near) - 1):  # the others are tried again likewise
                assert await look(keepers)
        forward_s += 4 * PAUSE_S
        wires.late_s, wires.silent = {}, ()
        wires.asked.clear()
        assert all([await look(keepers) for _ in range(2 * LOOKS)])
        assert len(near & set(wires.asked)) > 1, "who answers in time is asked again"

    asyncio.run(scene())


def test_who_was_passed_over_is_asked_when_the_bootstrap_gives_no_answer(
    crowd: list[Identity],
) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        keepers = wires.keepers()
        assert await keepers.store({KEY: Entry(b"me", b"here", LATE)})
        wires.late_s = dict.fromkeys(wires.others, LATE_S)
        for _ in range(NEAREST):
            assert await look(keepers)
        wires.late_s, wires.gone = {}, [wires.bootstrap]
        for _ in range(2):
            assert await look(keepers)

    asyncio.run(scene())


def test_what_nobody_answered_is_not_nothing(crowd: list[Identity]) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.gone, wires.others = [wires.bootstrap], []
        for keeps_all, answered in ((False, set[DHTID]()), (True, {KEY})):
            found = await wires.keepers(keeps_all=keeps_all).news(
                {KEY: ()}, thorough=True, timeout_s=5.0
            )
            assert found.keys() == answered

    asyncio.run(scene())


def test_a_bootstrap_keeps_what_it_says_itself_wherever_the_key_lies(
    crowd: list[Identity],
) -> None:
    async def scene() -> None:
        for keeps_all in (False, True):
            wires = Wires(crowd)
            wires.silent = wires.others
            keepers = wires.keepers(keeps_all=keeps_all)
            await keepers.store({KEY: Entry(b"me", b"here", LATE)})
            kept = wires.storage.get(KEY)
            assert (kept is not None) == keeps_all

    asyncio.run(scene())


def test_the_only_keeper_is_told_and_asked_though_it_missed_a_call(crowd: list[Identity]) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.others, wires.gone = [], [wires.bootstrap]
        keepers, entry = wires.keepers(), Entry(b"me", b"here", LATE)
        assert not await look(keepers)
        wires.gone = []
        await keepers.store({KEY: entry})
        await asyncio.sleep(0.1)
        assert wires.bootstrap in wires.kept
        wires.gone = [wires.bootstrap]
        assert not await look(keepers)
        wires.gone = []
        assert await look(keepers)

    asyncio.run(scene())


def test_a_bootstrap_is_told_though_it_missed_a_call_and_others_take_the_value(
    crowd: list[Identity],
) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        wires.silent, wires.gone = wires.others, [wires.bootstrap]
        keepers, entry = wires.keepers(), Entry(b"me", b"here", LATE)
        assert await keepers.store({KEY: entry})
        wires.gone, wires.late_s = [], {wires.bootstrap: LATE_S}
        began = time.monotonic()
        assert await keepers.store({KEY: entry})
        assert time.monotonic() - began < LATE_S, "nobody waits for it"
        await asyncio.sleep(1.5 * LATE_S)
        assert wires.bootstrap in wires.kept

    asyncio.run(scene())


def test_a_call_that_fails_at_once_shortens_no_wait_for_the_others(crowd: list[Identity]) -> None:
    async def scene() -> None:
        wires = Wires(crowd)
        keepers = wires.keepers()
        assert await keepers.store({KEY: Entry(b"me", b"here", LATE)})
        wires.gone, wires.late_s = wires.others, {wires.bootstrap: 1.5 * LATER_S}
        assert await keepers.everything(KEY, timeout_s=5.0)

    asyncio.run(scene())
