"""Members with keys, and the votes that each of them holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dilocox.dht.identity import Identity
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.ballots import Ballot, Ballots
from tests.peer.codecs import codec_of
from tests.peer.members import LAYOUT, MANIFEST_DIGEST

KEYS = sorted(
    (Identity(Path("key"), bytes([number]) * 32) for number in range(5)),
    key=lambda identity: identity.peer_id,
)
A, B, C, D, Z = (identity.peer_id for identity in KEYS)
BALLOT = Ballot(
    run="run",
    stage=0,
    round=3,
    attempt=0,
    group=b"group",
    members=(A, B, C, D),
    voters=frozenset({A, B, C, D}),
)


def log_of(folder: Path, identity: Identity) -> RoundLog:
    own = folder / identity.peer_id
    return RoundLog(own, manifest_digest=MANIFEST_DIGEST, codec=codec_of(LAYOUT))


def ballots_of(identities: list[Identity], folder: Path, **changes: Any) -> list[Ballots]:
    """Each member's own."""
    members = tuple(identity.peer_id for identity in identities)
    ballot = replace(BALLOT, **({"members": members, "voters": frozenset(members)} | changes))
    return [
        Ballots(identity=identity, ballot=ballot, save_vote=log_of(folder, identity).save_vote)
        for identity in identities
    ]


def cast(ballots: Ballots, digest: str | None, missed: tuple[str, ...]) -> bytes:
    """A member's own vote, which counts from now on."""
    vote = ballots.sign(digest, missed)
    ballots.receive(vote)
    return vote
