"""Which nodes keep the values under a key, and what they are told and asked. Apart from node.py: it
is Kademlia's walk alone.

The nodes nearest to a key keep what is under it, and the run's bootstraps. The former change only
where nodes come and go near it, so they are searched for every ten minutes and not with every call.
A value goes to all of them; a question goes to one of them at random, another one each time, and
says what is known already: what one of them missed is heard from the next. Every other time a
bootstrap is asked as well, and has nothing to tell but what was missed: whoever draws keys until
five are next to one of the swarm's is all that is nearest to it, and could keep peers from each
other by silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from dilocox.dht.protocol import (
    MAX_KEYS,
    NEAREST,
    Entry,
    RunProtocol,
    entries_of,
    node_id_of,
)

SEARCH_AGAIN_S = 600.0
MAX_HOPS = 8  # of a search; each halves the distance to the key at least
ASKED_AT_ONCE = 2  # nodes for one key in one hop
MAX_REMEMBERED = 256  # keys


class Keepers:
    """The keepers of keys as one node knows them. Belongs to the node's event loop."""

    def __init__(self, node: DHTNode, bootstraps: Collection[str], *, keeps_all: bool = False):
        """keeps_all: this node is a bootstrap itself."""
        self._node = node
        peers = [PeerID.from_base58(peer) for peer in bootstraps]
        self._bootstraps = {node_id_of(peer.to_bytes()): peer for peer in peers}
        self._always = self._bootstraps | ({node.node_id: node.peer_id} if keeps_all else {})
        self._bootstrap_next = False
        self._nodes: dict[DHTID, dict[DHTID, PeerID]] = {}
        self._searched_at: dict[DHTID, float] = {}

    async def store(self, entries: Mapping[DHTID, Entry]) -> bool:
        """Give each entry to all keepers of its key; whether every one was taken by one at least.

        Where all keepers of a key are gone, those that are left are searched and told.
        """
        left = await self._give(entries)
        if left and self._forget(left):
            left = await self._give({key: entries[key] for key in left})
        return not left

    async def news(
        self, known: Mapping[DHTID, Collection[bytes]], *, thorough: bool, timeout_s: float
    ) -> dict[DHTID, list[Entry]]:
        """The values under these keys that are not among the `known` marks.

        Keys of which no keeper answered in time are left out. `thorough`: all keepers are asked,
        not one.
        """
        heard = _Heard(known)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ask(heard, thorough=thorough), timeout_s)
        return heard.by_key()

    async def everything(self, key: DHTID, *, timeout_s: float) -> list[Entry]:
        """All values under a key, of all keepers at once: for what is little and cannot wait."""
        heard = _Heard({key: ()})
        heard.add(key, self._own(key))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ask_all(key, heard), timeout_s)
        return heard.by_key()[key]

    async def _ask_all(self, key: DHTID, heard: _Heard) -> None:
        nodes = (await self._of([key]))[key]
        peers = [peer for node, peer in nodes.items() if node != self._node.node_id]
        await asyncio.gather(*(self._hear(peer, [key], heard) for peer in peers))

    async def _ask(self, heard: _Heard, *, thorough: bool) -> None:
        todo = {key: dict(nodes) for key, nodes in (await self._of(heard.marks)).items()}
        for key, nodes in todo.items():
            # also the first node of a swarm, which may only dial out, knows what there is; beside
            # other keepers what lies here is no answer: they may not tell this node everything
            nodes.pop(self._node.node_id, None)
            if not nodes:
                heard.add(key, self._own(key))
        left = {key for key in todo if thorough or not heard.answered(key)}
        while left := {key for key in left if todo[key]}:
            asked = _one_of_each({key: todo[key] for key in left}, self._bootstraps)
            calls = [self._hear(peer, keys, heard) for peer, keys in asked.items()]
            for (peer, keys), answered in zip(
                asked.items(), await asyncio.gather(*calls), strict=True
            ):
                for key in keys:
                    todo[key] = {node: at for node, at in todo[key].items() if at != peer}
                left -= set(keys) if answered and not thorough else set()
        self._bootstrap_next = not self._bootstrap_next
        if self._bootstrap_next:
            await self._ask_a_bootstrap(todo, heard)

    async def _ask_a_bootstrap(
        self, not_asked: Mapping[DHTID, Mapping[DHTID, PeerID]], heard: _Heard
    ) -> None:
        """Of what it was not asked yet, if it may answer."""
        left = {peer for nodes in not_asked.values() for peer in nodes.values()}
        if bootstraps := [peer for peer in self._bootstraps.values() if peer in left]:
            peer = random.choice(bootstraps)
            keys = [key for key, nodes in not_asked.items() if peer in nodes.values()]
            await self._hear(peer, keys[:MAX_KEYS], heard)

    async def _hear(self, peer: PeerID, keys: Collection[DHTID], heard: _Heard) -> bool:
        """Ask a keeper of these keys; whether it answered."""
        answer = await self._protocol.call_news(peer, {key: heard.marks[key] for key in keys})
        if answer is None:
            self._miss(peer, keys)
            self._node.blacklist.register_failure(peer)
            return False
        self._node.blacklist.register_success(peer)
        for key, told in answer.items():
            heard.add(key, self._own(key))
            heard.add(key, told)
        return True

    def _miss(self, peer: PeerID, keys: Iterable[DHTID]) -> None:
        """It gave no answer: search anew, but for a bootstrap, which no search finds."""
        if peer not in self._bootstraps.values():
            self._forget(keys)

    def _own(self, key: DHTID) -> list[Entry]:
        return entries_of(self._protocol.storage.get(key))

    async def _give(self, entries: Mapping[DHTID, Entry]) -> set[DHTID]:
        """Those keys whose entry no keeper took."""
        keepers, left = await self._of(entries), set(entries)
        by_peer: dict[PeerID, list[DHTID]] = defaultdict(list)
        for key, entry in entries.items():
            for node_id, peer in keepers[key].items():
                if node_id != self._node.node_id:
                    by_peer[peer].append(key)
                elif self._protocol.accepts(key, entry) and self._protocol.storage.store(
                    key, entry.value, entry.expires_at, subkey=entry.subkey
                ):
                    left.discard(key)
        calls = [
            self._call_store(peer, {key: entries[key] for key in keys})
            for peer, keys in by_peer.items()
        ]
        answers = await asyncio.gather(*calls)
        for (peer, keys), taken in zip(by_peer.items(), answers, strict=True):
            if taken is None:
                self._miss(peer, keys)
            else:
                left -= {key for key, done in zip(keys, taken, strict=False) if done}
        return left

    async def _call_store(self, peer: PeerID, entries: Mapping[DHTID, Entry]) -> Any:
        return await self._protocol.call_store(
            peer,
            keys=list(entries),
            values=[each.value for each in entries.values()],
            expiration_time=[each.expires_at for each in entries.values()],
            subkeys=[each.subkey for each in entries.values()],
        )

    # ---- who keeps a key -------------------------------------------------------------------------
    async def _of(self, keys: Iterable[DHTID]) -> dict[DHTID, dict[DHTID, PeerID]]:
        """The keepers of these keys, this node among them where it is one."""
        keys = list(keys)
        oldest = time.monotonic() - SEARCH_AGAIN_S
        late = [key for key in keys if self._searched_at.get(key, oldest) <= oldest]
        for start in range(0, len(late), MAX_KEYS):
            await self._search(late[start : start + MAX_KEYS])
        always = {each: peer for each, peer in self._always.items() if self._may_answer(peer)}
        return {key: self._nearest(key, self._known(key)) | always for key in keys}

    async def _search(self, keys: list[DHTID]) -> None:
        """Ask the nearest nodes known for nearer ones, until there are none."""
        asked: dict[DHTID, set[DHTID]] = {key: {self._node.node_id} for key in keys}
        found = {key: self._known(key) for key in keys}  # two threads' searches may meet here
        for _ in range(MAX_HOPS):
            by_peer: dict[PeerID, list[DHTID]] = defaultdict(list)
            for key in keys:
                nearest = self._nearest(key, found[key])
                for node_id in [each for each in nearest if each not in asked[key]][:ASKED_AT_ONCE]:
                    asked[key].add(node_id)
                    by_peer[nearest[node_id]].append(key)
            if not by_peer:
                break
            calls = [self._protocol.call_nearest(peer, near) for peer, near in by_peer.items()]
            answers = await asyncio.gather(*calls)
            for (peer, near), answer in zip(by_peer.items(), answers, strict=True):
                if answer is None:
                    self._node.blacklist.register_failure(peer)
                for key in near:
                    found[key] |= {} if answer is None else answer[key]
        for key in keys:
            self._nodes[key] = self._nearest(key, found[key])
            self._searched_at[key] = time.monotonic()
        while len(self._searched_at) > MAX_REMEMBERED:
            oldest = min(self._searched_at, key=self._searched_at.__getitem__)
            self._forget([oldest])

    def _known(self, key: DHTID) -> dict[DHTID, PeerID]:
        """Keepers as searched for, and nodes met since that are nearer."""
        table = self._protocol.routing_table
        met = dict(table.get_nearest_neighbors(key, NEAREST, exclude=self._node.node_id))
        own = {} if self._protocol.client_mode else {self._node.node_id: self._node.peer_id}
        return self._nodes.get(key, {}) | met | own

    def _nearest(self, key: DHTID, nodes: Mapping[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        own = self._node.node_id
        answering = [each for each, peer in nodes.items() if self._may_answer(peer)]
        if all(each == own for each in answering):  # nobody answered: then it was our own line
            answering = list(nodes)
        return {each: nodes[each] for each in sorted(answering, key=key.xor_distance)[:NEAREST]}

    def _may_answer(self, peer: PeerID) -> bool:
        return peer not in self._node.blacklist

    def _forget(self, keys: Iterable[DHTID]) -> bool:
        """Search anew for the keepers of these keys; whether any had been searched for."""
        known = [key for key in keys if self._searched_at.pop(key, None) is not None]
        for key in known:
            self._nodes.pop(key, None)
        return bool(known)

    @property
    def _protocol(self) -> RunProtocol:
        protocol: Any = self._node.protocol
        return protocol


class _Heard:
    """What keepers have told so far, the newest of each owner, and what need not be told again."""

    def __init__(self, known: Mapping[DHTID, Collection[bytes]]):
        self.marks = {key: set(marks) for key, marks in known.items()}
        self._entries: dict[DHTID, dict[bytes | None, Entry]] = {}

    def add(self, key: DHTID, told: Iterable[Entry]) -> None:
        entries, marks = self._entries.setdefault(key, {}), self.marks[key]
        for entry in told:
            before = entries.get(entry.subkey)
            if entry.mark not in marks and (before is None or before.expires_at < entry.expires_at):
                entries[entry.subkey] = entry
                marks.add(entry.mark)

    def answered(self, key: DHTID) -> bool:
        return key in self._entries

    def by_key(self) -> dict[DHTID, list[Entry]]:
        return {key: list(entries.values()) for key, entries in self._entries.items()}


def _one_of_each(
    keepers: Mapping[DHTID, Mapping[DHTID, PeerID]], last: Collection[DHTID]
) -> dict[PeerID, list[DHTID]]:
    """A keeper at random for every key, one of the `last` where there is no other, and few of them:
    who is asked is asked for all it keeps.
    """
    left: list[DHTID] = list(keepers)
    asked = dict[PeerID, list[DHTID]]()
    while left:
        nodes = keepers[left[0]]
        others = [peer for node, peer in nodes.items() if node not in last]
        peer = random.choice(others or list(nodes.values()))
        asked[peer] = [key for key in left if peer in keepers[key].values()][:MAX_KEYS]
        left = [key for key in left if key not in asked[peer]]
    return asked
