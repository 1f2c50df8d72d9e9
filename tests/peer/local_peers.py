"""A peer that has joined a run in a test: a real LocalPeer around what the test brings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dilocox.compression.layout import FlatLayout
from dilocox.dht.addresses import Reachability
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.options import PeerOptions
from tests.clocks import TestClock
from tests.peer.fabricated import peer_id

RUN = "f" * 32
MANIFEST = Manifest.from_dict({"name": "t", "model": "tiny", "end_tokens": 1000})
INVITE = Invite(RUN, (f"/ip4/198.51.100.1/tcp/31337/p2p/{peer_id(9)}",))


def local_peer(me: str = "me", *, client_mode: bool = False, **facts: Any) -> LocalPeer:
    """facts: fields of LocalPeer, or of its options."""
    named = {name: facts.pop(name) for name in facts.keys() - LocalPeer.__dataclass_fields__.keys()}
    given: dict[str, Any] = {
        "identity": SimpleNamespace(peer_id=me),
        "run": RUN,
        "manifest": MANIFEST,
        "clock": TestClock(),
        "dht": SimpleNamespace(
            client_mode=client_mode, running=True, local_network=False, bootstraps=frozenset()
        ),
        "swarm": SimpleNamespace(admission=None, admits=lambda _: True),
        "reach": Reachability(kind="public", by_others=True),
        "stage": 0,
        "layout": FlatLayout.of([("w", (3,))]),
        "addresses": (),
        "options": PeerOptions(invite=INVITE, **named),
        "folder": Path("no folder"),
    }
    return LocalPeer(**(given | facts))
