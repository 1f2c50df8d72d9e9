"""Which nodes keep the values under a key, and what they are told and asked. Apart from node.py: it
is Kademlia's walk alone.

The nodes nearest to a key keep what is under it. They change only where nodes come and go near it,
so they are searched for every ten minutes, beside what is asked meanwhile. A value goes to all of
them; a question goes to one of them at random, another one each time, and says what is known
already: what one of them missed is heard from the next.

But a stranger that draws keys until five are next to one of the swarm's owns all nodes nearest to
it, and could keep peers from each other, by silence or by late answers. So the run's bootstraps
keep everything as well. They are told at once, whatever becomes of the others. They are asked after
the others, so that they have nothing to tell but what was missed: for every key every other time,
and each time where nobody else answered, and a part of the time is theirs. A keeper that lets a
question or a value wait for much longer than a bootstrap would is passed over for a while, twice as
long each time: rounds end when all have heard the bell, and are no faster than it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

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

logger = logging.getLogger(__name__)

R = TypeVar("R")

SEARCH_AGAIN_S = 600.0
SEARCH_WAIT_S = 2.5  # that a value waits for a search
MAX_HOPS = 8  # of a search; each halves the distance to the key at least
ASKED_AT_ONCE = 2  # nodes for one key in one hop
MAX_REMEMBERED = 256  # keys
OTHERS_SHARE = 0.6  # of the time of a question, before a bootstrap is asked
PAUSE_S = 30.0  # for which a bootstrap that gave no answer is left alone
LATER_S = 1.0  # after the first answer of all, for which the others are waited for
# So long a keeper is waited for, or so many times as long as a bootstrap takes, if that is more.
PATIENCE_S, PATIENCE_TIMES = 0.5, 3.0
LONGEST_PAUSE_S = 3600.0  # for which one that tried it is passed over; the first time PAUSE_S


class Keepers:
    """The keepers of keys as one node knows them. Belongs to the node's event loop."""

    def __init__(self, node: DHTNode, bootstraps: Collection[str], *, keeps_all: bool = False):
        """keeps_all: this node is a bootstrap itself."""
        self._node = node
        peers = [PeerID.from_base58(peer) for peer in bootstraps]
        self._bootstraps = {node_id_of(peer.to_bytes()): peer for peer in peers}
        self._keeps_all = keeps_all
        self._silent_until: dict[PeerID, float] = {}  # bootstraps, on the monotonic clock
        # other keepers that were late: until when they are passed over, and for how long
        self._late_until: dict[PeerID, tuple[float, float]] = {}
        self._bootstrap_s = 0.0  # that an answer of one takes
        self._besides = set[asyncio.Task[Any]]()  # calls that nobody waits for any more
        self._bootstrap_asked = set[DHTID]()  # when these keys were asked for last
        self._nodes: dict[DHTID, dict[DHTID, PeerID]] = {}
        self._searched_at: dict[DHTID, float] = {}
        self._searches: dict[DHTID, asyncio.Task[None]] = {}

    async def store(self, entries: Mapping[DHTID, Entry]) -> bool:
        """Give each entry to all keepers of its key; whether each was taken by one at least."""
        kept = {key for key in entries if self._keeps_all and self._keep(key, entries[key])}
        answering = self._bootstraps_that_answer()
        silent = {node: at for node, at in self._bootstraps.items() if node not in answering}
        later = [self._beside(self._give(entries, dict.fromkeys(entries, silent)))]
        nearest = self._beside(self._give_nearest(entries, later))
        taken = kept | await self._give(entries, dict.fromkeys(entries, answering))
        # the others are asked first, and yet nobody waits long for them
        await asyncio.wait([nearest], timeout=self._patience_s if taken == set(entries) else None)
        if taken != set(entries):
            taken |= nearest.result()
        for each in later:
            if taken != set(entries):
                taken |= await each
        return taken == set(entries)

    async def news(
        self, known: Mapping[DHTID, Collection[bytes]], *, thorough: bool, timeout_s: float
    ) -> dict[DHTID, list[Entry]]:
        """The values under these keys that are not among the `known` marks.

        Keys of which no keeper answered in time are left out. `thorough`: all keepers are asked,
        not one.
        """
        heard, end = _Heard(known), time.monotonic() + timeout_s
        share = OTHERS_SHARE if self._bootstraps else 1.0
        self._aim(known)
        hasty = self._patience_s is not None
        await _in_time(self._ask(heard, thorough=thorough), share * timeout_s)
        due = [
            key
            for key in known
            if thorough or not heard.answered(key) or key not in self._bootstrap_asked
        ]
        self._bootstrap_asked = (self._bootstrap_asked - known.keys()) | set(due)
        if len(self._bootstrap_asked) > MAX_REMEMBERED:
            self._bootstrap_asked.clear()
        bootstraps = list(self._bootstraps_that_answer().values())
        if not bootstraps:  # perhaps one of those that gave no answer does: there is nobody else
            bootstraps = list(self._bootstraps.values())
            due = [key for key in due if not heard.answered(key)]
        asked = bootstraps if thorough else bootstraps and [random.choice(bootstraps)]
        parts = [due[start : start + MAX_KEYS] for start in range(0, len(due), MAX_KEYS)]
        calls = [self._hear(peer, part, heard) for peer in asked for part in parts]
        await _in_time(asyncio.gather(*calls), end - time.monotonic())
        if hasty and self._patience_s is None:  # so there are only those that were passed over
            await _in_time(self._ask(heard, thorough=thorough), end - time.monotonic())
        return heard.by_key()

    async def everything(self, key: DHTID, *, timeout_s: float) -> list[Entry]:
        """All values under a key, of all keepers at once: for what is little, and waits for nobody
        who is late.
        """
        heard = _Heard({key: ()})
        heard.add(key, self._own(key))
        self._aim([key])
        peers = [*self._others_near(key).values(), *self._bootstraps.values()]
        asked = {peer: asyncio.ensure_future(self._hear(peer, [key], heard)) for peer in peers}
        left = {asked[peer] for peer in self._prompt(peers)}
        end = time.monotonic() + timeout_s
        try:
            while left and time.monotonic() < end:
                done, left = await asyncio.wait(
                    left, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
                )
                if any(each.result() for each in done):
                    end = min(end, time.monotonic() + LATER_S)
                if not left and self._patience_s is None:  # there are only those passed over
                    left = {each for each in asked.values() if not each.done()}
        finally:
            for each in asked.values():
                each.cancel()
        return heard.by_key()[key]

    async def _ask(self, heard: _Heard, *, thorough: bool) -> None:
        """Ask those nearest to the keys."""
        todo = {key: self._others_near(key) for key in heard.marks}
        if self._keeps_all or not self._bootstraps:
            # also the first node of a swarm, which may only dial out, knows what there is; beside
            # other keepers what lies here is no answer: they may not tell this node everything
            for key in [each for each, nodes in todo.items() if not nodes]:
                heard.add(key, self._own(key))
        late: dict[PeerID, list[DHTID]] = defaultdict(list)
        for key, nodes in todo.items():
            prompt = self._prompt(nodes.values())
            todo[key] = {node: at for node, at in nodes.items() if at in prompt}
            for peer in set(nodes.values()) - prompt:
                late[peer].append(key)
        if thorough:  # a keeper that is passed over tells what it has if that comes in time
            for peer, keys in late.items():
                self._beside(self._hear(peer, keys[:MAX_KEYS], heard))
        left = {key for key in todo if thorough or not heard.answered(key)}
        while left := {key for key in left if todo[key]}:
            asked = _one_of_each({key: todo[key] for key in left})
            calls = {
                peer: self._beside(self._hear(peer, keys, heard)) for peer, keys in asked.items()
            }
            await asyncio.wait(calls.values(), timeout=self._patience_s)
            for peer, keys in asked.items():
                for key in keys:
                    todo[key] = {node: at for node, at in todo[key].items() if at != peer}
                # a bootstrap is asked instead of a keeper that is late
                enough = not calls[peer].done() or calls[peer].result()
                left -= set(keys) if enough and not thorough else set()

    async def _hear(self, peer: PeerID, keys: Collection[DHTID], heard: _Heard) -> bool:
        """Ask a keeper of these keys; whether it answered."""
        asking = self._protocol.call_news(peer, {key: heard.marks[key] for key in keys})
        answer = await self._watched(peer, asking)
        if answer is None:
            self._miss(peer, keys)
            return False
        self._answered(peer)
        if self._prompt([peer]):
            self._late_until.pop(peer, None)
        for key, told in answer.items():
            heard.add(key, self._own(key))
            heard.add(key, told)
        return True

    async def _watched(self, peer: PeerID, call: Coroutine[Any, Any, Any]) -> Any:
        """What a keeper answers; while it keeps us waiting for long it is passed over."""
        began, loop = time.monotonic(), asyncio.get_running_loop()
        patience_s = self._patience_s
        end = loop.call_later(patience_s, self._pass_over, peer) if patience_s else None
        try:
            answer = await call
        finally:
            if end is not None:
                end.cancel()
        if answer is not None and peer in self._bootstraps.values():
            self._bootstrap_s += (time.monotonic() - began - self._bootstrap_s) / 2
        return answer

    def _pass_over(self, peer: PeerID) -> None:
        until, pause_s = self._late_until.get(peer, (0.0, PAUSE_S / 2))
        if peer not in self._bootstraps.values() and until <= time.monotonic():
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if len(self._late_until) >= MAX_REMEMBERED:
                self._late_until.clear()
            self._late_until[peer] = time.monotonic() + pause_s, pause_s
            logger.debug("%s answers late, and is passed over for %.0f s", peer, pause_s)

    def _prompt(self, peers: Iterable[PeerID]) -> set[PeerID]:
        """Those of these keepers that are not passed over now; while no bootstrap answers, all."""
        now, hasty = time.monotonic(), self._patience_s is not None
        return {p for p in peers if not hasty or self._late_until.get(p, (0.0,))[0] <= now}

    @property
    def _patience_s(self) -> float | None:
        """For how long one keeper is waited for; None while no bootstrap could be asked instead."""
        if not self._bootstraps_that_answer():
            return None
        return max(PATIENCE_S, PATIENCE_TIMES * self._bootstrap_s)

    def _beside(self, call: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Something that may take longer than anybody waits for it."""
        task = asyncio.ensure_future(call)
        self._besides.add(task)
        task.add_done_callback(self._besides.discard)
        return task

    def _answered(self, peer: PeerID) -> None:
        self._silent_until.pop(peer, None)
        self._node.blacklist.register_success(peer)

    def _miss(self, peer: PeerID, keys: Iterable[DHTID]) -> None:
        """It gave no answer."""
        if peer in self._bootstraps.values():  # not for longer and longer, as hivemind does
            self._silent_until[peer] = time.monotonic() + PAUSE_S
        else:
            self._forget(keys)
            self._node.blacklist.register_failure(peer)

    def _own(self, key: DHTID) -> list[Entry]:
        return entries_of(self._protocol.storage.get(key))

    def _keep(self, key: DHTID, entry: Entry) -> bool:
        return self._protocol.accepts(key, entry) and self._protocol.storage.store(
            key, entry.value, entry.expires_at, subkey=entry.subkey
        )

    async def _give_nearest(
        self, entries: Mapping[DHTID, Entry], later: list[asyncio.Task[set[DHTID]]]
    ) -> set[DHTID]:
        """Those keys whose entry one of the nodes nearest to them took, but for those that are
        passed over, which are told beside that: in what is added to `later`.

        Where all of them are gone, those that are left are searched and told.
        """
        await self._search_for(entries)
        keepers = {key: self._near(key) for key in entries}
        prompt = self._prompt({peer for nodes in keepers.values() for peer in nodes.values()})
        near, late = (
            {
                key: {node: at for node, at in nodes.items() if (at in prompt) == waited_for}
                for key, nodes in keepers.items()
            }
            for waited_for in (True, False)
        )
        later.append(self._beside(self._give(entries, late)))
        taken = await self._give(entries, near)
        left = {key: entries[key] for key in entries if near[key] and key not in taken}
        if left:
            self._forget(left)
            await self._search_for(left)
            taken |= await self._give(left, {key: self._near(key) for key in left})
        return taken

    async def _give(
        self, entries: Mapping[DHTID, Entry], keepers: Mapping[DHTID, Mapping[DHTID, PeerID]]
    ) -> set[DHTID]:
        """Those keys whose entry one of these keepers took."""
        taken = set[DHTID]()
        by_peer: dict[PeerID, list[DHTID]] = defaultdict(list)
        for key, entry in entries.items():
            for node_id, peer in keepers[key].items():
                if node_id != self._node.node_id:
                    by_peer[peer].append(key)
                elif self._keep(key, entry):
                    taken.add(key)
        calls = [
            self._call_store(peer, {key: entries[key] for key in keys})
            for peer, keys in by_peer.items()
        ]
        answers = await asyncio.gather(*calls)
        for (peer, keys), done in zip(by_peer.items(), answers, strict=True):
            if done is None:
                self._miss(peer, keys)
            else:
                self._answered(peer)
                taken |= {key for key, stored in zip(keys, done, strict=False) if stored}
        return taken

    async def _call_store(self, peer: PeerID, entries: Mapping[DHTID, Entry]) -> Any:
        call = self._protocol.call_store(
            peer,
            keys=list(entries),
            values=[each.value for each in entries.values()],
            expiration_time=[each.expires_at for each in entries.values()],
            subkeys=[each.subkey for each in entries.values()],
        )
        return await self._watched(peer, call)

    # ---- the keepers of a key --------------------------------------------------------------------
    def _bootstraps_that_answer(self) -> dict[DHTID, PeerID]:
        now = time.monotonic()
        return {
            node: peer
            for node, peer in self._bootstraps.items()
            if self._silent_until.get(peer, 0.0) <= now
        }

    def _near(self, key: DHTID) -> dict[DHTID, PeerID]:
        """The nodes nearest to a key, but for bootstraps; this one where it is among them."""
        return self._nearest(key, self._but_bootstraps(self._known(key)))

    def _but_bootstraps(self, nodes: Mapping[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        return {node: peer for node, peer in nodes.items() if node not in self._bootstraps}

    def _others_near(self, key: DHTID) -> dict[DHTID, PeerID]:
        near = self._near(key)
        near.pop(self._node.node_id, None)
        return near

    async def _search_for(self, keys: Iterable[DHTID]) -> None:
        """Wait a while for the search for the keepers of these keys, where there is one."""
        self._aim(keys)
        searches = {self._searches[key] for key in keys if key in self._searches}
        if searches:
            await asyncio.wait(searches, timeout=SEARCH_WAIT_S)

    def _aim(self, keys: Iterable[DHTID]) -> None:
        """Search for the keepers of those keys of which it is time."""
        oldest = time.monotonic() - SEARCH_AGAIN_S
        late = [
            key
            for key in keys
            if key not in self._searches and self._searched_at.get(key, oldest) <= oldest
        ]
        for start in range(0, len(late), MAX_KEYS):
            part = late[start : start + MAX_KEYS]
            self._searches |= dict.fromkeys(part, asyncio.ensure_future(self._search(part)))

    async def _search(self, keys: list[DHTID]) -> None:
        """Ask the nearest nodes known for nearer ones, until there are none."""
        try:
            found = await self._found(keys)
            for key in keys:
                self._nodes[key] = self._nearest(key, self._but_bootstraps(found[key]))
                self._searched_at[key] = time.monotonic()
        finally:
            for key in keys:
                self._searches.pop(key, None)
        while len(self._searched_at) > MAX_REMEMBERED:
            oldest = min(self._searched_at, key=self._searched_at.__getitem__)
            self._forget([oldest])

    async def _found(self, keys: list[DHTID]) -> dict[DHTID, dict[DHTID, PeerID]]:
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
        return found

    def _known(self, key: DHTID) -> dict[DHTID, PeerID]:
        """Keepers as searched for, and nodes met since that are nearer."""
        table, most = self._protocol.routing_table, NEAREST + len(self._bootstraps)
        met = dict(table.get_nearest_neighbors(key, most, exclude=self._node.node_id))
        own = {} if self._protocol.client_mode else {self._node.node_id: self._node.peer_id}
        return self._nodes.get(key, {}) | met | own

    def _nearest(self, key: DHTID, nodes: Mapping[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        own = self._node.node_id
        answering = [each for each, peer in nodes.items() if peer not in self._node.blacklist]
        if all(each == own for each in answering):  # nobody answered: then it was our own line
            answering = list(nodes)
        return {each: nodes[each] for each in sorted(answering, key=key.xor_distance)[:NEAREST]}

    def _forget(self, keys: Iterable[DHTID]) -> None:
        """Search anew for the keepers of these keys."""
        for key in keys:
            self._searched_at.pop(key, None)
            self._nodes.pop(key, None)

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


async def _in_time(asked: Awaitable[object], timeout_s: float) -> None:
    """Wait for this, but not for longer; what was heard by then is heard."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asked, timeout_s)


def _one_of_each(
    keepers: Mapping[DHTID, Mapping[DHTID, PeerID]],
) -> dict[PeerID, list[DHTID]]:
    """A keeper at random for every key, and few keepers: each is asked for all that it keeps."""
    left: list[DHTID] = list(keepers)
    asked = dict[PeerID, list[DHTID]]()
    while left:
        peer = random.choice(list(keepers[left[0]].values()))
        asked[peer] = [key for key in left if peer in keepers[key].values()][:MAX_KEYS]
        left = [key for key in left if key not in asked[peer]]
    return asked
