"""What a DHT node keeps for others: hivemind's storage, bounded by owner and altogether. Apart from
protocol.py, whose rules of the wire it does not know.

A value under a subkey is signed by its owner, whose peer id the subkey is (validator.py), so its
owner is proven. Each owner has at most so many keys and bytes here: beyond that, the first of its
own values to expire goes. Where everything is full, the owner that came last has to go, so that a
crowd of new keys takes no place of those that were here before it. Only the manifest has no subkey.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import timed_storage

from dilocox.dht.rpc import Counts

KEYS_OF_OWNER = 256
BYTES_OF_OWNER = 512 << 10
BYTES_OF_ALL = 32 << 20
VALUE_BYTES = 400  # about what Python needs for one, beside its bytes
LOOK_EVERY_S = 10.0  # for what has expired, while everything is full


@dataclass(frozen=True)
class _Held:
    """One value of an owner."""

    expires_at: float
    size: int


class BoundedStorage(DHTLocalStorage):
    """hivemind's, with the bounds above; `refused` counts what they let not in."""

    def __init__(self, refused: Counts) -> None:
        super().__init__()
        self._refused = refused
        self.bytes_held = 0
        self._owners: dict[Any, dict[DHTID, _Held]] = {}  # in the order in which they came
        self._places: dict[Any, int] = {}  # in that order, of the same
        self._came = 0
        self._looked_at = 0.0

    def came(self, subkey: Any) -> int:
        """The place of an owner in the order in which they came, 0 of a plain value."""
        return self._places.get(subkey, 0)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Keep a value; whether it was, as hivemind's."""
        now = timed_storage.get_dht_time()
        new = _Held(expiration_time, len(value) + VALUE_BYTES)
        if expiration_time < now or new.size > BYTES_OF_OWNER:
            return False
        if subkey not in self._owners:
            self._came += 1
            self._places[subkey] = self._came
        own = self._owners.setdefault(subkey, {})
        before = own.get(key)
        if before is not None and before.expires_at >= expiration_time:
            return False  # hivemind's would note its expiry once more
        for gone in [each for each, held in own.items() if held.expires_at < now]:
            self._drop(subkey, gone)
        self._forget(subkey, key)
        while len(own) >= KEYS_OF_OWNER or _bytes(own) + new.size > BYTES_OF_OWNER:
            self._refused.add("crowded")
            self._drop(subkey, min(own, key=lambda each: own[each].expires_at))
        own[key] = new
        self.bytes_held += new.size
        stored = super().store_subkey(key, subkey, value, expiration_time)
        if not stored:  # under a plain value
            self._forget(subkey, key)
        self._tidy(key)
        self._make_room(now)
        if not own:
            self._leave(subkey)
        return key in own

    def _leave(self, owner: Any) -> None:
        self._owners.pop(owner, None)
        self._places.pop(owner, None)

    def _make_room(self, now: float) -> None:
        """Let those go that came last, until all the others fit."""
        if self.bytes_held > BYTES_OF_ALL and now - self._looked_at > LOOK_EVERY_S:
            self._looked_at = now
            for owner, own in list(self._owners.items()):
                for gone in [each for each, held in own.items() if held.expires_at < now]:
                    self._drop(owner, gone)
                if not own:
                    self._leave(owner)
        while self.bytes_held > BYTES_OF_ALL:
            last = next(reversed(self._owners))
            self._refused.add("full")
            for key in list(self._owners[last]):
                self._drop(last, key)
            self._leave(last)

    def _drop(self, owner: Any, key: DHTID) -> None:
        self._forget(owner, key)
        there = self.data.get(key)
        if there is not None and isinstance(there.value, DictionaryDHTValue):
            del there.value[owner]
            if not there.value:
                del self[key]

    def _forget(self, owner: Any, key: DHTID) -> None:
        held = self._owners[owner].pop(key, None)
        self.bytes_held -= 0 if held is None else held.size

    def _tidy(self, key: DHTID) -> None:
        """Forget expiries that do not count any more, of values that were written anew since."""
        _compact(self)
        there = self.data.get(key)
        if there is not None and isinstance(there.value, DictionaryDHTValue):
            _compact(there.value)


def _bytes(own: dict[DHTID, _Held]) -> int:
    return sum(held.size for held in own.values())


def _compact(storage: Any) -> None:
    """Keep of hivemind's heap of expiries one for each key, where it holds many more."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
